"""The step graph: what each training thread did between sync points, step by step.

The critical path and what-if analyses work on this graph. A chain is one training thread; a run is
a chain in one step interval; segments tile a run: stages, untraced time, sync points and handoffs.

A step interval lasts from the last global sync point of the previous step to that of its own step.
At both ends all ranks are at the same place at the same time, whatever their clocks show. If no
sync point includes all ranks, the clocks give the boundaries.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.clock_uncertainty import uncertainty_note, unsynchronized_clocks
from lightning_rlprof.analysis.critical_path.handoffs import Handoffs, find_handoffs, has_handoffs
from lightning_rlprof.analysis.critical_path.replay import WORK, Schedule, build_schedule
from lightning_rlprof.analysis.critical_path.step_intervals import (
    StepIntervals,
    find_step_intervals,
)
from lightning_rlprof.analysis.critical_path.sync_points import SyncPoints, find_sync_points
from lightning_rlprof.analysis.stages.partition import UNTRACED, Partition, partition
from lightning_rlprof.analysis.step_selection import counted, last_steps
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.intervals import edges
from lightning_rlprof.tables.spans import Spans

Int32s = npt.NDArray[np.int32]
Kind = tuple[Int64s, Int64s, Int64s]


class Segments(NamedTuple):
    """Segments by run and time, which tile all runs, and their sync points, renumbered.

    Attributes:
        run: Run of each segment.
        sync_point: Sync point of each segment, or `WORK`.
        name: Its stage, or the name of a sync point outside of stages; the last one is for neither.
        row: Row of the stage, or of the span that produces a handoff, or `UNTRACED`.
        ns: Duration of each segment, waiting included; 0 if it produces a handoff.
        produces: Whether the segment only produces a handoff.
        transfer_ns: Shortest visit of each sync point, or time of a handoff after it was produced.
        whole_stage: Whether the sync point is a whole stage, which includes work.
        is_handoff: Whether the sync point is a wait for a handoff.
    """

    run: Int64s
    sync_point: Int64s
    name: Int64s
    row: Int64s
    ns: Int64s
    produces: Mask
    transfer_ns: Int64s
    whole_stage: Mask
    is_handoff: Mask

    def schedule(self, intervals: StepIntervals) -> Schedule:
        """Order the sync points."""
        return build_schedule(
            self.run, self.sync_point, intervals.begin_ns.size, len(intervals.steps), self.produces
        )


class _Segments(NamedTuple):
    """Segments with the original numbers of sync points; waits for handoffs follow these."""

    run: Int64s
    sync_point: Int64s
    name: Int64s
    row: Int64s
    ns: Int64s


def cut_segments(
    spans: Spans,
    cut: Partition,
    threads: Int64s,
    sync_points: SyncPoints,
    handoffs: Handoffs | None,
    intervals: StepIntervals,
) -> Segments:
    """Cut the intervals of all chains at the edges of stages and sync points."""
    segments, transfer, count = (
        _cut_stages(spans, cut, threads, sync_points, handoffs, intervals),
        sync_points.transfer_ns,
        len(sync_points.size),
    )
    produces = np.zeros(len(segments.run), dtype=bool)
    if handoffs is not None and len(segments.run):
        segments, produces, more = _add_handoffs(
            segments, handoffs, intervals, count, len(sync_points.names)
        )
        transfer = np.append(transfer, more)
    used = np.unique(segments.sync_point[segments.sync_point != WORK])
    sync_point = np.where(
        segments.sync_point == WORK, WORK, np.searchsorted(used, segments.sync_point)
    )
    waits = np.append(sync_points.whole_stage, np.zeros(len(transfer) - count, dtype=bool))[used]
    return Segments(
        segments.run, sync_point, *segments[2:], produces, transfer[used], waits, used >= count
    )


def _cut_stages(
    spans: Spans,
    cut: Partition,
    threads: Int64s,
    sync_points: SyncPoints,
    handoffs: Handoffs | None,
    intervals: StepIntervals,
) -> _Segments:
    if not len(intervals.steps):
        return _Segments(*np.zeros((5, 0), dtype=np.int64))
    (chain, start, end), row = stage_stretches(spans, cut, threads)
    low, high = intervals.begin_ns[:, 0], intervals.end_ns[:, -1]
    near = (end > low[chain]) & (start < high[chain])
    row, stages = row[near], (chain[near], start[near], end[near])
    attended, group, name = _visits_and_waits(sync_points, handoffs, low, high)
    chains = np.repeat(np.arange(len(threads)), len(intervals.steps))
    kinds = [stages, attended, (chains, intervals.begin_ns.ravel(), intervals.end_ns.ravel())]
    if handoffs is not None:
        kinds += [
            (handoffs.producer, handoffs.produced_ns, handoffs.produced_ns),
            (handoffs.chain, handoffs.end_ns, handoffs.end_ns),
        ]
    times, (stage, sync_point, interval) = _cells(kinds)
    keep = np.flatnonzero(interval >= 0)
    stage, sync_point, run = stage[keep], sync_point[keep], interval[keep]
    heads = np.flatnonzero(
        (sync_point < 0) | (np.diff(sync_point, prepend=-2) != 0) | (np.diff(run, prepend=-1) != 0)
    )
    ns = np.add.reduceat((times[keep + 1] - times[keep]), heads)
    stage, sync_point = stage[heads], sync_point[heads]
    rows = np.append(row, UNTRACED)[stage]
    named = np.append(spans.name, len(sync_points.names))[rows]  # -1 reads the last one
    named = np.where((rows < 0) & (sync_point >= 0), np.append(name, 0)[sync_point], named)
    return _Segments(
        run[heads].astype(np.int64), np.append(group, WORK)[sync_point], named, rows, ns
    )


def stage_stretches(spans: Spans, cut: Partition, threads: Int64s) -> tuple[Kind, Int64s]:
    """Return chain, start, end and row of each stretch in which a stage is the innermost one."""
    segments = cut.divided
    inside = segments.stage != UNTRACED
    row, start, end = segments.stage[inside], segments.start_ns[inside], segments.end_ns[inside]
    return (np.searchsorted(threads, spans.thread[row]), start, end), row


def _visits_and_waits(
    sync_points: SyncPoints, handoffs: Handoffs | None, low: Int64s, high: Int64s
) -> tuple[Kind, Int64s, Int64s]:
    """Return chain, start and end of visits and waits in the intervals, their groups and names."""
    chain, start, end, group, name = (
        sync_points.chain,
        sync_points.start_ns,
        sync_points.end_ns,
        sync_points.group,
        sync_points.name,
    )
    if handoffs is not None:
        number = len(sync_points.size) + np.arange(len(handoffs.chain))
        pairs = zip(
            (chain, start, end, group, name), (*handoffs[:3], number, handoffs.name), strict=True
        )
        both = [np.concatenate(pair) for pair in pairs]
        order = np.lexsort((both[2], both[1], both[0]))
        chain, start, end, group, name = (each[order] for each in both)
    near = (end > low[chain]) & (start < high[chain])
    return (chain[near], start[near], end[near]), group[near], name[near]


def _cells(kinds: list[Kind]) -> tuple[Int64s, list[Int32s]]:
    """Cut chains at all edges; return the times, and for three kinds the interval of each cell.

    The intervals of a kind are ordered by chain and start and don't overlap. The other kinds are
    instants, which only cut.
    """
    low = min(int(kind[1].min(initial=kinds[2][1].min())) for kind in kinds)
    width = max(int(kind[2].max(initial=low)) for kind in kinds) - low + 1
    starts = [chain * width + (start - low) for chain, start, _ in kinds]
    ends = [chain * width + (end - low) for chain, _, end in kinds]
    times = edges(*starts, *ends[:3])
    found = []
    for start, end in zip(starts[:3], ends, strict=False):
        first, last = np.searchsorted(times, start), np.searchsorted(times, end)
        found.append(_inside(first, last, len(times)))
    times %= width
    times += low
    return times, found


def _inside(first: Int64s, last: Int64s, cells: int) -> Int32s:
    """Return the interval that contains each cell, or -1; intervals ascend and don't overlap."""
    values = np.full(2 * len(first) + 1, -1, dtype=np.int32)
    values[1::2] = np.arange(len(first))
    counts = np.zeros(2 * len(first) + 1, dtype=np.int64)
    counts[1::2] = last - first
    counts[::2] = np.append(first, cells) - np.append(0, last)
    return np.repeat(values, counts)


def _add_handoffs(
    segments: _Segments, handoffs: Handoffs, intervals: StepIntervals, sync_count: int, between: int
) -> tuple[_Segments, Mask, Int64s]:
    """Insert handoffs within an interval; return the transfers of waits, too.

    A handoff from another interval, or one that was produced after it was needed by the clocks,
    ends no wait: then the wait counts as work. But waiting at the end of an interval for a handoff
    that follows later takes no time of the interval.
    """
    waits, interval = (
        sync_count + np.arange(len(handoffs.chain)),
        segments.run % len(intervals.steps),
    )
    after, end = _segment_ends(segments, intervals)
    edge = segments.run // len(intervals.steps), end, end - segments.ns
    producing, waiting = (
        _segment_at(*edge, handoffs.producer, handoffs.produced_ns),
        _segment_at(*edge, handoffs.chain, handoffs.end_ns),
    )
    sync_point, idle = _idle_waits(segments, handoffs, sync_count, waiting, end)
    there = (producing >= 0) & (waiting[handoffs.wait] >= 0)
    there &= (interval[producing] == interval[waiting[handoffs.wait]]) & (
        after[producing] <= after[waiting[handoffs.wait]]
    )
    long = (waiting >= 0) & (
        segments.sync_point[waiting] == waits
    )  # else the chain was ready only after it was produced
    ready = after[waiting] - np.where(long, segments.ns[waiting], 0)
    np.maximum.at(ready, handoffs.wait[there], after[producing[there]])
    live = np.zeros(len(waits), dtype=bool)
    live[handoffs.wait[there]] = True
    sync_point[waiting[live & long]] = waits[live & long]
    name = np.where((sync_point == WORK) & (segments.row < 0), between, segments.name)
    new = _new_instants(
        segments, handoffs, sync_count, (producing, there), (waiting, np.flatnonzero(live & ~long))
    )
    transfer = np.append(after[waiting] - ready, np.zeros(idle, dtype=np.int64))
    return *_inserted(segments._replace(sync_point=sync_point, name=name), *new), transfer


def _new_instants(
    segments: _Segments,
    handoffs: Handoffs,
    sync_count: int,
    producing: tuple[Int64s, Mask],
    waiting: tuple[Int64s, Int64s],
) -> tuple[_Segments, Int64s, Mask]:
    """Return segments of zero length, the segment each follows, and which produce a handoff."""
    (where, there), (end, short) = producing, waiting
    place = np.append(where[there], end[short])
    rank = np.append(np.where(handoffs.is_mark[there], 2, 0), np.ones(len(short), dtype=np.int64))
    order = np.lexsort((rank, place))
    place = place[order]
    name = np.append(handoffs.producer_name[there], handoffs.name[short])[order]
    row = np.append(handoffs.row[there], np.full(len(short), UNTRACED))[order]
    sync_point = sync_count + np.append(handoffs.wait[there], short)[order]
    found = _Segments(
        segments.run[place], sync_point, name, row, np.zeros(len(place), dtype=np.int64)
    )
    return found, place, rank[order] != 1


def _inserted(
    segments: _Segments, new: _Segments, place: Int64s, produces: Mask
) -> tuple[_Segments, Mask]:
    every = (np.insert(old, place + 1, more) for old, more in zip(segments, new, strict=True))
    return _Segments(*every), np.insert(
        np.zeros(len(segments.run), dtype=bool), place + 1, produces
    )


def _idle_waits(
    segments: _Segments, handoffs: Handoffs, sync_count: int, waiting: Int64s, end: Int64s
) -> tuple[Int64s, int]:
    """Return sync points without waits, and the number of waits that last until an interval's end.

    Each of these is a sync point of its own, numbered after all others, with zero transfer time.
    """
    count, latest = len(handoffs.chain), np.full(len(handoffs.chain) + 1, np.iinfo(np.int64).min)
    fine = handoffs.produced_ns <= handoffs.end_ns[handoffs.wait]
    np.maximum.at(latest, handoffs.wait[fine], handoffs.produced_ns[fine])
    parts = np.flatnonzero(segments.sync_point >= sync_count)
    wait = segments.sync_point[parts] - sync_count
    parts = parts[(end[parts] <= latest[wait]) & (waiting[wait] != parts)]
    sync_point = np.where(segments.sync_point < sync_count, segments.sync_point, WORK)
    sync_point[parts] = sync_count + count + np.arange(len(parts))
    return sync_point, len(parts)


def _segment_ends(segments: _Segments, intervals: StepIntervals) -> tuple[Int64s, Int64s]:
    """Return the end of each segment, since its interval started and by the clock of its chain."""
    until = np.append(0, np.cumsum(segments.ns))
    first = np.searchsorted(segments.run, np.arange(intervals.begin_ns.size))
    inside = until[1:] - until[first][segments.run]
    return inside + intervals.offset_ns[segments.run], inside + intervals.begin_ns.ravel()[
        segments.run
    ]


def _segment_at(chain: Int64s, end: Int64s, start: Int64s, whose: Int64s, when: Int64s) -> Int64s:
    """Return the segment of a chain that contains a time or ends at it, or -1."""
    low = min(int(start.min()), int(when.min(initial=int(start.min()))))
    width = max(int(end.max()), int(when.max(initial=0))) - low + 1
    place = np.searchsorted(chain * width + (end - low), whose * width + (when - low))
    at = np.minimum(place, len(end) - 1)
    return np.where((place < len(end)) & (chain[at] == whose) & (start[at] < when), at, -1)


UNTRACED_STAGE = "untraced"
"""Name of a training thread's time outside any stage."""

_NO_SYNC = (
    "rlprof found no synchronization between ranks. Mark collectives with "
    'annotate("all_reduce"), or capture a step with a profiler.'
)


def seconds(ns: float) -> str:
    """Format a time in ms, or in s from one second on.

    Example::

        >>> seconds(116.1e6), seconds(2.5e9)
        ('116 ms', '2.5 s')
    """
    return f"{ns / 1e9:.3g} s" if ns >= 1e9 else f"{ns / 1e6:.3g} ms"


@dataclass(frozen=True, eq=False)
class StepGraph:
    """Segments by run and time; they tile each step interval of each training thread.

    Attributes:
        spans: The run, or its last steps; ``row`` belongs to them.
        names: What ``name`` stands for; the last one is `UNTRACED_STAGE`.
        ranks: Rank of each chain.
        roles: Role of each chain.
        steps: RL step of each interval, ascending.
        wall_ns: Duration of each interval.
        offset_ns: How much later than its interval each run started; 0 at global sync points.
        name: Stage of each segment, or the name of a sync point outside of stages.
        row: Row of the stage, or of the span that produces a handoff, or `UNTRACED`.
        ns: Duration of each segment, waiting included.
        transfer_ns: Shortest visit of each sync point, or time of a handoff after it was produced.
        whole_stage: Whether the sync point is a whole stage, which includes work.
        is_handoff: Whether the sync point is a wait for a sample or weights.
        schedule: The order of sync points.
        note: What the reader must know.
    """

    spans: Spans
    names: tuple[str, ...]
    ranks: Int64s
    roles: tuple[str, ...]
    steps: Int64s
    wall_ns: Int64s
    offset_ns: Int64s
    name: Int64s
    row: Int64s
    ns: Int64s
    transfer_ns: Int64s
    whole_stage: Mask
    is_handoff: Mask
    schedule: Schedule
    note: str


def step_graph(spans: Spans) -> StepGraph | str:
    """Build the graph of a run's complete steps, or return a text that says why it can't be built.

    Excludes threads without steps, steps that a thread lacks, and steps whose sync points come in
    different orders. Of a run with very many spans only the last steps are used.
    """
    spans, fewer = last_steps(spans)
    cut = partition(spans)
    choice, threads = counted(spans, cut.steps), np.unique(spans.thread[cut.steps])
    if not len(threads):
        return "This run has no steps."
    fed = has_handoffs(spans)
    sync_points = find_sync_points(spans, threads, with_handoffs=fed)
    intervals = find_step_intervals(
        spans, cut, threads, choice.mask, sync_points, with_handoffs=fed
    )
    handoffs = find_handoffs(spans, threads, sync_points, intervals) if fed else None
    if len(threads) > 1 and (why := _why_not(spans, sync_points, intervals, handoffs)):
        return why
    segments = cut_segments(spans, cut, threads, sync_points, handoffs, intervals)
    order = segments.schedule(intervals)
    bad = np.flatnonzero(order.stuck)
    if len(bad):
        intervals = intervals.only(np.delete(np.arange(len(intervals.steps)), bad))
        segments = cut_segments(spans, cut, threads, sync_points, handoffs, intervals)
        order = segments.schedule(intervals)
    if not len(intervals.steps):
        return "No step is complete on all ranks with the same order of sync points."
    told = (fewer, choice.note, _note(spans, sync_points, segments, intervals), _lost(len(bad)))
    note = " ".join(filter(None, told))
    return _dag(
        spans,
        (*sync_points.names, UNTRACED_STAGE),
        _ranks_and_roles(spans, threads),
        intervals,
        segments,
        order,
        note,
    )


def _why_not(
    spans: Spans, sync_points: SyncPoints, intervals: StepIntervals, handoffs: Handoffs | None
) -> str:
    """Return why the ranks can't be analyzed together, or an empty text."""
    if not intervals.synchronized and (text := unsynchronized_clocks(spans)):
        return f"Steps can't be aligned: no sync point includes all ranks, and {text}."
    if not len(sync_points.step) and (handoffs is None or not len(handoffs.wait)):
        return _NO_SYNC
    return ""


def _ranks_and_roles(spans: Spans, threads: Int64s) -> tuple[Int64s, tuple[str, ...]]:
    ranks = [spans.threads[thread].rank for thread in threads.tolist()]
    return np.array(ranks), tuple(spans.headers[rank].role for rank in ranks)


def _note(
    spans: Spans, sync_points: SyncPoints, segments: Segments, intervals: StepIntervals
) -> str:
    if len(intervals.begin_ns) == 1:
        return "Single thread, so everything is on the critical path."
    crosses = not intervals.synchronized or bool(segments.is_handoff.any())
    sure = uncertainty_note(spans, "Step boundaries and handoffs") if crosses else ""
    by = [sync_points.source] if sync_points.source else []
    by += ["samples and weight versions"] if segments.is_handoff.any() else []
    points = f"Synchronization points: {' and '.join(by)}."
    return f"{points} Step boundaries: {intervals.boundaries}. {sure}".rstrip()


def _lost(intervals: int) -> str:
    return (
        f"Excluded {intervals} steps whose sync points come in different orders."
        if intervals
        else ""
    )


def _dag(
    spans: Spans,
    names: tuple[str, ...],
    who: tuple[Int64s, tuple[str, ...]],
    intervals: StepIntervals,
    segments: Segments,
    order: Schedule,
    note: str,
) -> StepGraph:
    """Put together what is known."""
    when = (intervals.steps, intervals.wall_ns, intervals.offset_ns)
    what = (segments.name, segments.row, segments.ns, segments.transfer_ns)
    return StepGraph(
        spans, names, *who, *when, *what, segments.whole_stage, segments.is_handoff, order, note
    )
