"""What following advice would save: a replay of the recorded steps, else an upper limit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.advice.evidence import Evidence
from lightning_rlprof.analysis.advice.rule import Measured, Measurement, Quantity, Rule
from lightning_rlprof.analysis.advice.time_shares import COLLECTIVE_WAIT
from lightning_rlprof.analysis.findings.finding import rows_of
from lightning_rlprof.analysis.whatif.whatif import BALANCED, Rollout, whatif
from lightning_rlprof.errors import TraceError

REPLAY, AT_MOST = "replay", "at most"
"""Where a saving is known from: `whatif`, or the time that the advice is about."""

_TAIL = 0.9  # of a rollout's requests
_WORDS = {"overlap": "overlapped", "removed": "removed"}


class Effect(NamedTuple):
    """A saving as a share of the step, or of the captured time, with its interval."""

    source: str
    share: float
    low: float
    high: float


def effects(
    run: Evidence, rules: Iterable[Rule], measured: Mapping[Quantity, Measurement]
) -> dict[str, Effect]:
    """Return what each rule saves, by id; rules about memory or quality have no entry.

    Args:
        run: The run.
        rules: The rules that are given.
        measured: Every quantity of their conditions.
    """
    own = [rule for rule in rules if rule.saving != "none"]
    found = {rule.id: limit for rule in own if (limit := _at_most(rule, measured)) is not None}
    for rule in own:
        if rule.saving == "balance" and isinstance(wait := COLLECTIVE_WAIT.measure(run), Measured):
            found[rule.id] = Effect(AT_MOST, *wait[:3])
    stages = {rule.id: name for rule in own if (name := _only_stage(run, rule)) is not None}
    asked = {
        kind: [stages[rule.id] for rule in own if rule.saving == kind and rule.id in stages]
        for kind in _WORDS
    }
    wants_balance = any(rule.saving == "balance" for rule in own)
    rows: dict[str, Effect] = {}
    if wants_balance or any(asked.values()):
        rows = _replays(run, remove=asked["removed"], overlap=asked["overlap"])
    for rule in own:
        text = BALANCED
        if rule.saving in _WORDS:
            text = f"{stages.get(rule.id)} {_WORDS[rule.saving]}"
        if rule.saving in (*_WORDS, "balance") and text in rows:
            found[rule.id] = rows[text]
        elif rule.saving == "tail":
            text = f"rollout stopped at {_TAIL:.0%}"
            tail = _replays(run, rollout=Rollout(stop_at=_TAIL)).get(text)
            found |= {rule.id: tail} if tail is not None else {}
    return found


def _at_most(rule: Rule, measured: Mapping[Quantity, Measurement]) -> Effect | None:
    """Return the share of time that a rule is about: no change can save more."""
    for condition in rule.conditions:
        value = measured[condition.quantity]
        if condition.quantity.kind == "share" and not condition.below:
            return Effect(AT_MOST, *value[:3]) if isinstance(value, Measured) else None
    return None


def _only_stage(run: Evidence, rule: Rule) -> str | None:
    """Return the stage of the steps that a rule is about, None unless it is exactly one."""
    covers = rule.conditions[0].quantity.covers
    if rule.saving not in _WORDS or covers is None:
        return None
    spans = run.spans
    rows = spans.rows(kind="stage")
    rows = rows[np.isin(spans.step[rows], run.included)]
    names = [spans.names[code] for code in np.unique(spans.name[rows]).tolist()]
    own = [name for name in names if covers(name)]
    return own[0] if len(own) == 1 else None


def _replays(
    run: Evidence,
    *,
    remove: Sequence[str] = (),
    overlap: Sequence[str] = (),
    rollout: Rollout | None = None,
) -> dict[str, Effect]:
    """Return the saving of each change that a replay predicts; none if it cannot."""
    try:
        table = whatif(run.spans, remove=remove, overlap=overlap, rollout=rollout)
    except TraceError:  # a stage is not on the path of steps, or requests have no spans
        return {}
    found = {}
    for row in rows_of(table):
        now: Any = row["baseline"]
        if now:
            least, most = ((now - row[bound]) / now for bound in ("CI high", "CI low"))
            found[row["change"]] = Effect(REPLAY, row["saved"] / now, least, most)
    return found
