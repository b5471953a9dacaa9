"""What a change would buy: steps played again with other durations, and predictions scored."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_rlprof.analysis.counted import FEWEST
from lightning_rlprof.analysis.dag import Dag, dag
from lightning_rlprof.analysis.edits import Edit, balanced, scaled, unslowed
from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.labels import Label, label_of
from lightning_rlprof.analysis.longest import longest, replay
from lightning_rlprof.analysis.workload import workload
from lightning_rlprof.errors import TraceError
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["predictions", "score", "whatif"]

_COLUMNS = (
    Column("change", "text"),
    Column("now", "duration", "ns"),
    Column("predicted", "duration", "ns"),
    Column("saving", "duration", "ns"),
    Column("share", "share"),
    Column("GPU-hours", "number", "h"),
    Column("low", "duration", "ns"),
    Column("high", "duration", "ns"),
)
_SCORES = (
    Column("change", "text"),
    Column("predicted", "duration", "ns"),
    Column("low", "duration", "ns"),
    Column("high", "duration", "ns"),
    Column("later", "duration", "ns"),
    Column("error", "share"),
)
_HOUR_NS = 3_600 * 10**9
_ALLOWED = 0.01  # of a step: how far it may be off when it is played again unchanged
_SHOWN = 5  # stages of which is told what it brings to make them faster
_DRAWS = 1_000


def whatif(
    spans: Spans, *, faster: Mapping[str, float] | None = None, removed: Sequence[str] = ()
) -> Table:
    """Predict the median step after each change, largest saving first.

    Always: ``no straggler``, and ``balanced work`` where tokens are counted. Besides the stages
    that are asked for; of none, those on the critical path twice as fast, weight syncs removed.
    ``low`` and ``high`` bound the prediction with 95 % (bootstrap over steps). ``GPU-hours`` are
    saved on all ranks in the steps that were looked at. Abstains where playing the steps again
    unchanged is more than 1 % off.

    Args:
        spans: The run.
        faster: How many times as fast, by stage; above 0.
        removed: Stages that take no time any more, gone or hidden behind others.

    Raises:
        TraceError: A stage is not in the run, or a speed is not above 0.
    """
    graph = dag(spans)
    if isinstance(graph, str) or len(graph.steps) < FEWEST:
        few = graph if isinstance(graph, str) else f"{len(graph.steps)} steps, it takes {FEWEST}"
        return Table("whatif", _COLUMNS, abstained=few)
    before = _laps(graph, Edit(graph.ns, graph.transfer_ns))
    error = float(np.median(np.abs(before / np.maximum(graph.wall_ns, 1) - 1)))
    if error > _ALLOWED:
        text = f"played again unchanged, the median step is {error:.2%} off; {_ALLOWED:.0%} is"
        return Table("whatif", _COLUMNS, abstained=f"{text} allowed. {graph.note}")
    wanted = dict(faster or {}), list(removed)
    wanted = wanted if any(wanted) else _usual(graph)
    rows = [
        _row(graph, text, before - _laps(graph, edit))
        for text, edit in _edits(spans, graph, *wanted)
    ]
    note = (
        f"Of {len(graph.steps)} steps; unchanged, the median one is {error:.2%} off. {graph.note}"
    )
    return Table("whatif", _COLUMNS, sorted(rows, key=lambda row: -int(row[3] or 0)), note)


def _laps(graph: Dag, edit: Edit) -> Int64s:
    return replay(graph.plan, edit.own_ns, edit.transfer_ns, graph.offset_ns).lap


def _usual(graph: Dag) -> tuple[dict[str, float], list[str]]:
    """Return what is worth asking where nothing is: stages on the path, and weight syncs."""
    found = longest(graph.plan, graph.ns, graph.transfer_ns, graph.offset_ns)
    on = np.bincount(graph.name[found.on], found.weight[found.on], len(graph.names))[:-1]
    stages = [code for code in np.argsort(-on, kind="stable").tolist() if on[code] > 0][:_SHOWN]
    syncs = [name for name in _there(graph) if label_of(name) == Label.SYNC]
    return {graph.names[code]: 2.0 for code in stages}, syncs


def _edits(
    spans: Spans, graph: Dag, faster: Mapping[str, float], removed: Iterable[str]
) -> Iterator[tuple[str, Edit]]:
    work = workload(spans, graph)
    yield "no straggler", unslowed(graph, work)
    even = balanced(graph, work)
    if even is not None:
        yield "balanced work", even
    for name, speed in faster.items():
        if not 0 < speed < np.inf:
            raise TraceError(f"{name} {speed} times as fast: a speed is above 0, for instance 2")
        yield f"{name} {speed:g}x faster", scaled(graph, _code(graph, name), 1 / speed)
    for name in removed:
        yield f"{name} removed", scaled(graph, _code(graph, name), 0.0)


def _code(graph: Dag, name: str) -> int:
    there = _there(graph)
    if name not in there:
        raise TraceError(f"{name} is no stage of these steps, which have {', '.join(there)}")
    return there[name]


def _there(graph: Dag) -> dict[str, int]:
    """Return the stages of the steps and their codes."""
    codes = np.flatnonzero(np.bincount(graph.name, minlength=len(graph.names))[:-1])
    return {graph.names[code]: code for code in codes.tolist()}


def _row(graph: Dag, text: str, saved_ns: Int64s) -> tuple[Cell, ...]:
    """Return what a change saves, with its interval."""
    after = (graph.wall_ns - saved_ns).astype(float)
    now, then = float(np.median(graph.wall_ns)), float(np.median(after))
    low, high = _bounds(after)
    hours = int(saved_ns.sum()) * len(graph.ranks) / _HOUR_NS
    saving = round(now) - round(then)
    return (text, round(now), round(then), saving, saving / now, hours, round(low), round(high))


def _bounds(values: Floats) -> tuple[float, float]:
    """Bound the median by drawing the steps anew, a thousand times."""
    draws = np.random.default_rng(0).integers(0, len(values), (_DRAWS, len(values)))
    low, high = np.percentile(np.median(values[draws], axis=1), [2.5, 97.5])
    return float(low), float(high)


def predictions(table: Table) -> list[dict[str, Any]]:
    """Return the rows of a what-if as plain data, to be kept until a later run can score them."""
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def score(kept: Iterable[Mapping[str, Any]], later: Spans) -> Table:
    """Compare predictions with the median step of a later run; an error above 0: too slow a guess.

    Which of the changes was made is for the reader to know. The last prediction of a change counts.
    """
    last = {str(each["change"]): each for each in kept}
    graph = dag(later)
    if isinstance(graph, str) or len(graph.steps) < FEWEST or not last:
        few = "no prediction was kept" if not last else "the later run has too few steps"
        return Table("score", _SCORES, abstained=graph if isinstance(graph, str) else few)
    took = round(float(np.median(graph.wall_ns)))
    rows: list[tuple[Cell, ...]] = [
        (
            change,
            *(int(each[name]) for name in ("predicted", "low", "high")),
            took,
            each["predicted"] / took - 1,
        )
        for change, each in last.items()
    ]
    rows.sort(key=lambda row: abs(float(row[5] or 0.0)))
    return Table("score", _SCORES, rows, f"Median of {len(graph.steps)} later steps. {graph.note}")
