"""Critical path of a step, and the slack of everything else."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.clock_uncertainty import (
    WITHIN_UNCERTAINTY,
    is_within_uncertainty,
    uncertainty_ns,
)
from lightning_rlprof.analysis.critical_path.replay import WORK, LongestPath, longest_path, replay
from lightning_rlprof.analysis.critical_path.step_graph import StepGraph, seconds, step_graph
from lightning_rlprof.analysis.step_selection import FEWEST
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_COLUMNS: tuple[Column, ...] = (
    Column("stage", "text"),
    Column("part", "text"),
    Column("role", "text"),
    Column("rank", "count"),
    Column("share", "share"),
    Column("per step", "duration", "ns"),
    Column("slack", "duration", "ns"),
    Column("total", "duration", "ns"),
    Column("steps", "count"),
    Column("count", "count"),
)
_SAMPLE = Column("sample", "count")
_LATE = "late start"


class _Sums(NamedTuple):
    """Columns of the table.

    ``first`` is one segment of the row, ``most`` the chain with most of its time on the path.
    """

    first: Int64s
    total: Int64s
    middle: Int64s
    slack: Int64s
    steps: Int64s
    number: Int64s
    most: Int64s


def critical_path(spans: Spans, *, per_rank: bool = False, per_sample: bool = False) -> Table:
    """Divide complete steps by what is on their longest path, longest first, with the slack.

    ``part`` is the ``work`` of a stage, a ``transfer`` in it, or the ``handoff`` of a sample or of
    weights: the time from when it is ready until its consumer continues. ``total`` is the time on
    the path; totals add up to the steps. ``per step`` is the median over the steps, ``steps`` the
    number of steps in which the row was on the path. ``slack`` is how much longer the tightest of
    its ``count`` occurrences alone could take without making its step longer: 0 on the path.

    Args:
        spans: The run.
        per_rank: One row per rank; else ``rank`` is the one most often on the path.
        per_sample: One row per sample that is on the path, with an additional column.
    """
    graph = step_graph(spans)
    if isinstance(graph, str):
        return Table("critical_path", _COLUMNS, abstained=graph)
    if len(graph.steps) < FEWEST:
        text = f"{len(graph.steps)} steps have usable boundaries; {FEWEST} are needed."
        return Table("critical_path", _COLUMNS, abstained=text)
    measured = (graph.schedule, graph.ns, graph.transfer_ns, graph.offset_ns)
    interval_ns, found = replay(*measured).interval_ns, longest_path(*measured)
    sample = _samples(graph, found) if per_sample else None
    sums = _sums(graph, found, sample, per_rank=per_rank)
    error = float(np.median(np.abs(interval_ns / np.maximum(graph.wall_ns, 1) - 1)))
    took = seconds(float(np.median(graph.wall_ns)))
    text = f"Median step: {took} ({len(graph.steps)} steps). Replay error: {error:.2%}."
    columns, rows = (*_COLUMNS, _SAMPLE), _rows(graph, sums, sample, int(interval_ns.sum()))
    return Table("critical_path", columns[: 10 + per_sample], rows, f"{text} {graph.note}")


def _rows(
    graph: StepGraph, sums: _Sums, sample: Int64s | None, interval_ns: int
) -> list[tuple[Cell, ...]]:
    """Return the rows; ``interval_ns`` is the time of all steps."""
    whole, late = max(interval_ns, 1), interval_ns - int(sums.total.sum())
    table = []
    for at in np.argsort(-sums.total, kind="stable").tolist():
        known = () if sample is None else (_known(sample[sums.first[at]]),)
        table.append((*_row(graph, sums, at, whole), *known))
    if late:
        known = () if sample is None else (None,)
        below = is_within_uncertainty(late // max(len(graph.steps), 1), uncertainty_ns(graph.spans))
        part = WITHIN_UNCERTAINTY if below else "work"
        late_row = (_LATE, part, None, None, late / whole, None, 0, late, None, None)
        table.append((*late_row, *known))
    return table


def _known(sample: float) -> int | None:
    return int(sample) if sample >= 0 else None


def _row(graph: StepGraph, sums: _Sums, at: int, whole: int) -> tuple[Cell, ...]:
    first, total = int(sums.first[at]), int(sums.total[at])
    schedule = graph.schedule
    return (
        graph.names[graph.name[first]],
        _part(graph, first),
        graph.roles[schedule.run[first] // schedule.interval_count],
        int(graph.ranks[sums.most[at]]) if sums.most[at] >= 0 else None,
        total / whole,
        int(sums.middle[at]),
        int(sums.slack[at]),
        total,
        int(sums.steps[at]),
        int(sums.number[at]),
    )


def _part(graph: StepGraph, segment: int) -> str:
    sync_point = graph.schedule.sync_point[segment]
    return (
        "work" if sync_point == WORK else "handoff" if graph.is_handoff[sync_point] else "transfer"
    )


def _samples(graph: StepGraph, found: LongestPath) -> Int64s:
    """Return the sample of each segment, -1 if it has none or is never on the path.

    Numbers beyond 64 bits are Python integers.
    """
    told = graph.spans.counters.get("sample")
    of_row = np.full(len(graph.spans) + 1, -1, None if told is None else told.values.dtype)
    if told is not None:
        of_row[told.rows] = told.values
    sample = of_row[graph.row]  # UNTRACED reads the last one
    on = np.unique(sample[found.on & (found.weight > 0)])
    return np.where(np.isin(sample, on), sample, -1)


def _sums(graph: StepGraph, found: LongestPath, sample: Int64s | None, *, per_rank: bool) -> _Sums:
    schedule = graph.schedule
    interval, chain = (
        schedule.run % schedule.interval_count,
        schedule.run // schedule.interval_count,
    )
    first, of = _groups(graph, chain, sample, per_rank=per_rank)
    size, on = len(first), np.flatnonzero(found.on)
    cells = np.zeros((size, schedule.interval_count), dtype=np.int64)
    np.add.at(cells, (of[on], interval[on]), found.weight[on])
    slack = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(slack, of, found.slack)
    total, most = cells.sum(axis=1), chain[first]
    if not per_rank:
        theirs = np.zeros((size, len(graph.ranks)), dtype=np.int64)
        np.add.at(theirs, (of[on], chain[on]), found.weight[on])
        most = np.where(total > 0, theirs.argmax(axis=1), -1)
    middle = np.rint(np.median(cells, axis=1)).astype(np.int64)
    count = np.bincount(of, minlength=size)
    return _Sums(first, total, middle, slack, (cells > 0).sum(axis=1), count, most)


def _groups(
    graph: StepGraph, chain: Int64s, sample: Int64s | None, *, per_rank: bool
) -> tuple[Int64s, Int64s]:
    """Group segments by stage, part, role and request; return one of each, and the groups."""
    roles = {role: at for at, role in enumerate(dict.fromkeys(graph.roles))}
    who = np.arange(len(graph.ranks)) if per_rank else np.array([*map(roles.get, graph.roles)])
    keys = (graph.name * 2 + (graph.schedule.sync_point != WORK)) * len(who) + who[chain]
    size = 2 * len(graph.names) * len(who)
    if sample is not None:
        there, code = np.unique(sample, return_inverse=True)
        keys, size = keys + size * code, size * len(there)
    first = np.full(size, -1)
    first[keys[::-1]] = np.arange(len(keys))[::-1]
    used = np.flatnonzero(first >= 0)
    place = np.zeros_like(first)
    place[used] = np.arange(len(used))
    return first[used], place[keys]
