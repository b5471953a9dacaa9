"""What to fix first: the problems that cost most, with evidence and what to try.

`CHECKS` lists the functions that measure, and `rules` the rules that they report.
"""

import shlex
from collections.abc import Callable

from lightning_rlprof.analysis.findings.device_evidence import (
    device_idle,
    dominant_kernel,
    small_collectives,
)
from lightning_rlprof.analysis.findings.finding import Finding, NotChecked, Results, RunData
from lightning_rlprof.analysis.findings.machine_evidence import (
    cpu_contention,
    gc_pauses,
    gpu_throttling,
    memory_pressure,
)
from lightning_rlprof.analysis.findings.rules import (
    CATEGORY_RULES,
    CPU_RULES,
    FATAL,
    STRAGGLER,
)
from lightning_rlprof.analysis.findings.run_evidence import (
    category_shares,
    hangs,
    low_mfu,
    memory_growth,
    out_of_memory,
    slow_ranks,
    step_changes,
)
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

CHECKS: tuple[Callable[[RunData], Results], ...] = (
    slow_ranks,  # first: it needs most memory, and the checks after it keep what they read
    device_idle,
    dominant_kernel,
    small_collectives,
    out_of_memory,
    hangs,
    memory_growth,
    step_changes,
    cpu_contention,
    gpu_throttling,
    memory_pressure,
    gc_pauses,
    low_mfu,
    category_shares,
)
"""All checks."""

_COLUMNS = (
    Column("finding", "text"),
    Column("share", "share"),
    Column("cost", "duration", "ns"),
    Column("CI low", "duration", "ns"),
    Column("CI high", "duration", "ns"),
    Column("confidence", "text"),
    Column("kind", "text"),
    Column("try", "text"),
    Column("ruled out if", "text"),
    Column("evidence", "text"),
    Column("reproduce", "text"),
    Column("query", "text"),
    Column("rank", "count"),
    Column("step", "count"),
    Column("from", "duration", "ns"),
    Column("to", "duration", "ns"),
)


_EXPLAINED = "Not listed: the wait of ranks for one another, which the straggler explains"


def findings(spans: Spans) -> Table:
    """List the problems worth acting on, by cost, then ideas of what might be saved.

    What ended the run comes first: a rank that ran out of memory, or a hang. Other problems without
    a cost in time, such as growing memory, come after those with one. Waiting for a CPU comes last:
    it is in the time of everything else. Slow steps, and ranks that wait, are not
    listed if it explains half of their cost.

    ``cost`` is GPU time of the whole job, ``share`` its part of the job. ``CI low`` and ``CI high``
    are its 95% confidence interval, from a bootstrap over steps or parts of the run. A rule reports
    if the whole interval is above its threshold, and passes if all of it is below. Otherwise the
    note lists it as not checked, after a sentence with their number.

    Commands in the texts have the path of the run, as a shell takes it.

    ``kind`` is ``problem``, time that was lost, or ``idea``, time that might be saved. ``query`` is
    the SELECT that returns the evidence. ``rank``, ``step``, ``from`` and ``to`` are
    the place of its first event, in the report's timeline and in an exported trace.

    Shares that kernels show are of the time in which devices were profiled, with steps or without.

    Has no data if the run has no complete step and no device activity.
    """
    run = RunData(spans)
    results = [each for check in CHECKS for each in check(run)]
    if not results and not len(spans.rows(kind="step")) and not run.devices.lanes:
        return Table("findings", _COLUMNS, abstained="no complete step was recorded")
    found, explained = _without_effects([each for each in results if isinstance(each, Finding)])
    found.sort(
        key=lambda each: (
            each.rule not in FATAL,
            each.rule in CPU_RULES,
            each.rule.idea,
            -(each.cost or 0),
        )
    )
    path = shlex.quote(str(spans.path))
    rows = [_row(each, run.accounts.total_ns, path) for each in found]
    not_checked: dict[str, list[str]] = {}
    for each in results:
        if isinstance(each, NotChecked):
            names = not_checked.setdefault(each.why, [])
            names += [each.rule] * (each.rule not in names)
    count = sum(map(len, not_checked.values()))
    notes = (
        [f"{count} {'check was' if count == 1 else 'checks were'} not decided."] if count else []
    )
    notes += [
        f"Not checked ({why}): {'; '.join(rules)}."
        if len(rules) > 1
        else f"Not checked: {rules[0]} ({why})."
        for why, rules in not_checked.items()
    ]
    return Table("findings", _COLUMNS, rows, " ".join([*notes, *explained]))


def _without_effects(found: list[Finding]) -> tuple[list[Finding], list[str]]:
    """Leave out that ranks wait if stragglers, which are findings too, explain half of it."""
    wait = CATEGORY_RULES[Category.COLLECTIVE_WAIT]
    lost = sum(each.cost or 0 for each in found if each.rule is STRAGGLER)
    kept = [each for each in found if each.rule is not wait or 2 * lost < (each.cost or 0)]
    return kept, [f"{_EXPLAINED}."] * (len(kept) < len(found))


def _row(found: Finding, total_ns: int, path: str) -> tuple[Cell, ...]:
    rule = found.rule
    texts = (rule.suggestion, rule.ruled_out_if, rule.command)
    suggestion, ruled_out_if, command = (text.replace("RUN", path) for text in texts)
    share = None if found.cost is None or not total_ns else found.cost / total_ns
    return (
        *(found.title, share, found.cost, found.low, found.high, found.confidence),
        "idea" if rule.idea else "problem",
        *(suggestion, ruled_out_if, found.evidence, command, found.query),
        *(found.place or (None,) * 4),
    )
