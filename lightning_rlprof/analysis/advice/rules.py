"""All rules of advice, in reading order."""

from collections.abc import Mapping

from lightning_rlprof.analysis.advice.ascend_rules import ASCEND_RULES
from lightning_rlprof.analysis.advice.communication_rules import COMMUNICATION_RULES
from lightning_rlprof.analysis.advice.host_rules import HOST_RULES
from lightning_rlprof.analysis.advice.memory_rules import MEMORY_RULES
from lightning_rlprof.analysis.advice.recording_rules import RECORDING_RULES
from lightning_rlprof.analysis.advice.rollout_rules import ROLLOUT_RULES
from lightning_rlprof.analysis.advice.rule import Rule
from lightning_rlprof.analysis.advice.update_rules import UPDATE_RULES

RULE_GROUPS: Mapping[str, tuple[Rule, ...]] = {
    "Rollout": ROLLOUT_RULES,
    "Update": UPDATE_RULES,
    "Memory": MEMORY_RULES,
    "Communication": COMMUNICATION_RULES,
    "Host": HOST_RULES,
    "Ascend": ASCEND_RULES,
    "Recording": RECORDING_RULES,
}
"""The rules by what they are about."""

RULES: Mapping[str, Rule] = {rule.id: rule for group in RULE_GROUPS.values() for rule in group}
"""The rules by id."""
