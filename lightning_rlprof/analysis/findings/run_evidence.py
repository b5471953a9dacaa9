"""Evidence from the run as a whole: ranks that slow the others down, and memory that grows."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_rlprof.analysis.findings.finding import (
    HIGH,
    MEDIUM,
    Finding,
    NotChecked,
    RunData,
    place_at,
    place_of,
    quoted,
)
from lightning_rlprof.analysis.findings.rules import MEMORY_GROWTH, STRAGGLER
from lightning_rlprof.analysis.memory import growth, lowest_by_step, memory_timeline
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.analysis.stragglers.verdicts import (
    IMBALANCE,
    INCONCLUSIVE,
    NO_STRAGGLER,
    SLOW_UNCOUNTED,
)
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans

_HARMLESS = (INCONCLUSIVE, NO_STRAGGLER, IMBALANCE)


def slow_ranks(run: RunData) -> Iterator[Finding]:
    """Report each rank, or group that contains one, that the analysis of stragglers names."""
    if not len(run.spans.rows(kind="step")):
        return
    table = stragglers(run.spans)
    names = [column.name for column in table.columns]
    for row in table.rows:
        cells = dict(zip(names, row, strict=True))
        if cells["verdict"] not in _HARMLESS:
            yield straggler_finding(run.spans, cells)


def straggler_finding(spans: Spans, row: dict[str, Any]) -> Finding:
    """Return the finding on one row of `stragglers`; its keys are the columns."""
    is_rank, lost = row["rank"] is not None, row["peer time lost"]
    ranks = [row["rank"]] if is_rank else _ranks(str(row["group"]))
    who = f"Rank {row['rank']}" if is_rank else f"One of ranks {', '.join(map(str, ranks))}"
    first, last = map(int, str(row["steps"]).split("-"))
    rows, condition = _stages_of(spans, ranks, first, last, str(row["stages"]))
    chance = "" if row["p-value"] is None else f", p-value {row['p-value']:.2g}"
    low = high = None
    if lost is not None and row["slowdown"]:
        low, high = (
            None if row[name] is None else int(lost * row[name] / row["slowdown"])
            for name in ("CI low", "CI high")
        )
    return Finding(
        STRAGGLER,
        STRAGGLER.title.format(who=who, verdict=row["verdict"]),
        lost,
        low,
        high,
        HIGH if is_rank and row["verdict"] != SLOW_UNCOUNTED else MEDIUM,
        f"steps {row['steps']}, stages {row['stages']}{chance}",
        f"select * from spans where kind = 'stage' and {condition} order by rank, start_ns",
        place_of(spans, rows),
    )


def _ranks(group: str) -> list[int]:
    """Return the ranks at the end of a group's name."""
    return [int(rank) for rank in group.rpartition("ranks ")[2].split(", ")]


def _stages_of(
    spans: Spans, ranks: list[int], first: int, last: int, stages: str
) -> tuple[Int64s, str]:
    """Return the stages that a verdict is about, all if it names none, and their SQL condition."""
    rows = spans.rows(kind="stage")
    step = spans.step[rows]
    rows = rows[np.isin(spans.rank[rows], ranks) & (step >= first) & (step <= last)]
    condition = f"rank in ({', '.join(map(str, ranks))}) and step between {first} and {last}"
    named = [spans.names.index(name) for name in stages.split(", ") if name in spans.names]
    if named:
        rows = rows[np.isin(spans.name[rows], named)]
        texts = ", ".join(quoted(spans.names[code]) for code in named)
        condition += f" and name in ({texts})"
    return rows, condition


FEWEST_STEPS = 16
"""Steps with memory data needed: each half of them must show growth."""

_ALL_STAGES = "all"
_MIB = 2**20
# Counted by spans.
_COUNTERS = {
    "torch": "device_allocated_bytes",
    "host": "host_rss_bytes",
    "child processes": "children_rss_bytes",
}


def memory_growth(run: RunData) -> Iterator[Finding | NotChecked]:
    """Report growing memory, the worst rank of each component; nothing without memory data.

    The second half of the steps must grow too: setup and warm-up grow, but stop. The finding has
    no cost in time: either the run goes out of memory, or nothing happens.
    """
    table = memory_timeline(run.spans)
    names = [column.name for column in table.columns]
    rows: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in table.rows]
    rows = [row for row in rows if row["stage"] == _ALL_STAGES]
    growing = [row for row in rows if row["growing"] == "yes" and _is_large(row, "CI low")]
    steps = max((row["steps"] for row in rows), default=0)
    if rows and steps < FEWEST_STEPS:
        yield _too_few_steps(f"has {steps}")
        return
    if not growing and any(row["growing"] == "no" and _is_large(row, "CI high") for row in rows):
        yield NotChecked(MEMORY_GROWTH.name, "steps differ too much")
    for component in dict.fromkeys(row["component"] for row in growing):
        of_component = [row for row in growing if row["component"] == component]
        worst = max(of_component, key=lambda row: row["CI low"])
        yield _memory_finding(run.spans, worst, len(of_component))


def _too_few_steps(has: str) -> NotChecked:
    why = f"needs {FEWEST_STEPS} steps with memory data, {has}"
    return NotChecked(MEMORY_GROWTH.name, why)


def _is_large(row: dict[str, Any], bound: str) -> bool:
    peak = max(row["peak"] or 0, row["reserved"] or 0)
    return bool(row[bound] * row["steps"] >= MEMORY_GROWTH.threshold * peak > 0)


def _memory_finding(spans: Spans, row: dict[str, Any], ranks: int) -> Finding | NotChecked:
    steps, lowest = lowest_by_step(spans, row["rank"], row["component"], row["device"])
    half = len(steps) // 2
    slope, low, high = growth(steps[half:], lowest[half:])
    if slope is None or low is None or high is None or len(steps) < FEWEST_STEPS:
        return _too_few_steps(f"rank {row['rank']} has {len(steps)}")
    where = f"rank {row['rank']}" + (f" and {ranks - 1} more" if ranks > 1 else "")
    if low * len(steps) < MEMORY_GROWTH.threshold * lowest.max():
        return NotChecked(MEMORY_GROWTH.name, f"it nearly stopped in the second half, on {where}")
    first, last = int(steps[half]), int(steps[-1])
    return Finding(
        MEMORY_GROWTH,
        MEMORY_GROWTH.title.format(what=f"{row['component']} on {where}"),
        *(None, None, None),
        HIGH if low > slope / 2 else MEDIUM,
        f"{slope / _MIB:.3g} MiB per step (99% CI {low / _MIB:.3g}–{high / _MIB:.3g}) "
        f"in steps {first}–{last}",
        _memory_query(spans, row, first, last),
        place_at(spans, row["rank"], *_step_times(spans, row["rank"], last)),
    )


def _step_times(spans: Spans, rank: int, step: int) -> tuple[int, int]:
    rows = spans.rows(kind="step", rank=rank)
    row = rows[spans.step[rows] == step][0]
    return int(spans.start_ns[row]), int(spans.end_ns[row])


def _memory_query(spans: Spans, row: dict[str, Any], first: int, last: int) -> str:
    """Return the SELECT of the samples, from the table or from the counters of spans."""
    counter = _COUNTERS.get(str(row["component"]))
    if counter is not None and counter in spans.counters:
        return (
            f"select step, kind, name, start_ns, {counter} from spans where rank = {row['rank']} "
            f"and kind in ('stage', 'step') and step between {first} and {last} "
            f"and {counter} is not null order by start_ns"
        )
    since = _step_times(spans, row["rank"], first)[0]
    until = _step_times(spans, row["rank"], last)[1]
    of = "is null" if row["component"] is None else f"= {quoted(row['component'])}"
    return (
        f"select * from memory where rank = {row['rank']} and component {of} "
        f"and time_ns between {since} and {until} order by time_ns"
    )
