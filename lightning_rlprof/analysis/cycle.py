"""What the rate of an asynchronous training hangs on: the cycle with the most time by step."""

from collections import Counter

import numpy as np

from lightning_rlprof.analysis.counted import FEWEST, counted
from lightning_rlprof.analysis.cycles import heaviest
from lightning_rlprof.analysis.events import TRANSFER, Steady, steady
from lightning_rlprof.analysis.handed import Handed, handed, is_fed
from lightning_rlprof.analysis.joins import Joins, joins
from lightning_rlprof.analysis.labels import Label, labels_of
from lightning_rlprof.analysis.laps import Laps, laps
from lightning_rlprof.analysis.last_steps import last_steps
from lightning_rlprof.analysis.partition import Flat, Partition, partition
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["cycle"]

_COLUMNS = (
    Column("stage", "text"),
    Column("part", "text"),
    Column("role", "text"),
    Column("rank", "count"),
    Column("share", "share"),
    Column("per round", "duration", "ns"),
)
_BETWEEN = "between stages"
_IDLE = (Label.STARVATION, Label.SYNC, Label.WAITING)


def cycle(spans: Spans) -> Table:
    """Divide the cycle that a steady step of an asynchronous training hangs on, longest part first.

    What is in it comes after itself, some steps later: no other cycle takes as long by step. So no
    step comes sooner than its time by its steps. Only of runs that tell of samples or versions of
    the weights, in which steps overlap.
    """
    spans, _ = last_steps(spans)
    cut = partition(spans)
    choice, threads = counted(spans, cut.steps), np.unique(spans.thread[cut.steps])
    if len(threads) < 2 or not is_fed(spans):
        return _nothing("nobody counts samples or versions of the weights")
    met = joins(spans, threads, fed=True)
    its = laps(spans, cut, threads, choice.mask, met, fed=True)
    if its.joined or not _overlap(spans, cut, its):
        return _nothing("no step begins before the one before has ended")
    if len(its.steps) < FEWEST:
        return _nothing(f"{len(its.steps)} steps can be cut, it takes {FEWEST}")
    got = handed(spans, threads, met, its)
    return _table(spans, cut, threads, (met, got), float(its.wall_ns.mean()))


def _nothing(why: str) -> Table:
    return Table("cycle", _COLUMNS, abstained=why)


def _overlap(spans: Spans, cut: Partition, its: Laps) -> bool:
    """Tell whether most steps begin, on some rank, before the one before has ended on all."""
    rows, step = cut.stages(spans)
    works = ~np.isin(labels_of(spans.names), _IDLE)[spans.name[rows]]
    numbers = np.append(its.steps, its.steps[-1:] + 1)
    place = np.searchsorted(numbers, spans.step[cut.steps[step]])
    known = works & (np.append(numbers, -1)[place] == spans.step[cut.steps[step]])
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(first, place[known], spans.start_ns[rows[known]])
    end = its.end_ns.max(axis=0, initial=0)
    return 2 * int((first[1:] < end).sum()) > len(end)


def _table(
    spans: Spans, cut: Partition, threads: Int64s, waits: tuple[Joins, Handed], took: float
) -> Table:
    graph = steady(*waits)
    try:
        found = heaviest(graph.source, graph.target, graph.ns, graph.steps)
    except ValueError as error:
        return _nothing(f"steps of different ranks cannot be lined up: {error}")
    if found is None or not found.weight:
        return _nothing("nothing comes after itself in most steps")
    names, parts = waits[0].names, Counter[tuple[str, str, int]]()
    for edge in found.edges.tolist():
        chain = int(graph.chain[edge])
        if chain < 0:
            part = "transfer" if chain == TRANSFER else "hand-over"
            parts[names[graph.what[edge]], part, -1] += int(graph.ns[edge])
        else:
            for name, ns in _divided(spans, cut, int(threads[chain]), graph, edge).items():
                parts[name, "own time", chain] += ns
    rows = [_row(spans, threads, *each, found.weight) for each in parts.most_common() if each[1]]
    each, on = found.weight / found.steps, "1 step" if found.steps == 1 else f"{found.steps} steps"
    text = f"A round takes {found.weight / 1e9:.4g} s and {on}, {each / 1e9:.4g} s"
    note = f"{text} by step; measured are {took / 1e9:.4g} s in the mean."
    return Table("cycle", _COLUMNS, rows, note)


def _row(
    spans: Spans, threads: Int64s, part: tuple[str, str, int], ns: int, whole: int
) -> tuple[Cell, ...]:
    name, what, chain = part
    rank = spans.threads[threads[chain]].rank if chain >= 0 else None
    role = spans.headers[rank].role if rank is not None else None
    return name, what, role, rank, ns / whole, ns


def _divided(spans: Spans, cut: Partition, thread: int, graph: Steady, edge: int) -> dict[str, int]:
    """Divide the mean time of an edge by the stages that its thread is in."""
    own = cut.divided
    if isinstance(own, Flat):
        row, start, end = own.rows, own.start_ns, own.end_ns
    else:
        row, start, end = own.label, own.start_ns, own.end_ns
    mine = (row >= 0) & (spans.thread[row] == thread)
    row, start, end = row[mine], start[mine], end[mine]
    passed = graph.at == edge
    begin, until = np.sort(graph.begin_ns[passed]), np.sort(graph.end_ns[passed])
    place = np.minimum(np.searchsorted(until, start, "right"), len(until) - 1)
    inside = np.minimum(end, until[place]) - np.maximum(start, begin[place])
    inside = np.maximum(inside, 0)
    sums = np.bincount(spans.name[row], inside, len(spans.names))
    mean = {spans.names[at]: round(sums[at] / len(begin)) for at in np.flatnonzero(sums).tolist()}
    return mean | {_BETWEEN: max(int(graph.ns[edge]) - sum(mean.values()), 0)}
