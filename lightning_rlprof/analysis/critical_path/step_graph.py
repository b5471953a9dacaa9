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

from lightning_rlprof.analysis.critical_path.handoffs import (
    Handoffs,
    StepIntervals,
    find_handoffs,
    find_step_intervals,
)
from lightning_rlprof.analysis.critical_path.replay import WORK, Schedule, build_schedule
from lightning_rlprof.analysis.steps.partition import UNTRACED, Partition, lanes, partition
from lightning_rlprof.analysis.steps.step_selection import MIN_STEPS, counted, last_steps
from lightning_rlprof.analysis.steps.sync_points import (
    SyncPoints,
    find_sync_points,
    uncertainty_note,
    unsynchronized_clocks,
)
from lightning_rlprof.tables.arrays import Int64s, Mask, differs
from lightning_rlprof.tables.intervals import edges, last_begun
from lightning_rlprof.tables.spans import Spans

OUTSIDE_STAGES = "outside stages"
"""Name of a training thread's time outside any stage."""

_NO_SYNC = (
    "rlprof found no synchronization between ranks. Mark collectives with "
    'annotate("all_reduce"), or capture a step with a profiler.'
)
_BEFORE_ALL = np.iinfo(np.int64).min


class Timeline(NamedTuple):
    """The steps of all training threads, and where these wait for each other.

    Attributes:
        spans: The run, or its last steps.
        cut: Its partition.
        threads: Training threads, one per chain.
        sync_points: Where chains wait for each other.
        intervals: Their step intervals.
        handoffs: Samples and weights that they wait for.
        note: Which steps are left out.
    """

    spans: Spans
    cut: Partition
    threads: Int64s
    sync_points: SyncPoints
    intervals: StepIntervals
    handoffs: Handoffs
    note: str


def find_timeline(spans: Spans) -> Timeline:
    """Find the steps of a run that has some, and what connects its training threads."""
    spans, fewer = last_steps(spans)
    cut = partition(spans)
    choice, threads = counted(spans, cut.steps), np.unique(spans.thread[cut.steps])
    sync_points = find_sync_points(spans, threads)
    intervals = find_step_intervals(spans, cut, threads, choice.mask, sync_points)
    handoffs = find_handoffs(spans, threads, sync_points, intervals)
    note = f"{fewer} {choice.note}".strip()
    return Timeline(spans, cut, threads, sync_points, intervals, handoffs, note)


class _Segments(NamedTuple):
    """Segments by run and time, which tile all runs; columns as in `StepGraph`.

    ``sync_point`` is its original number; waits for handoffs follow these.
    """

    run: Int64s
    sync_point: Int64s
    name: Int64s
    row: Int64s
    ns: Int64s
    produces: Mask


def _cut_segments(timeline: Timeline) -> tuple[_Segments, Int64s]:
    """Cut all runs at the edges of stages, sync points and handoffs; return the ends, too."""
    spans, sync_points = timeline.spans, timeline.sync_points
    intervals, handoffs = timeline.intervals, timeline.handoffs
    divided = timeline.cut.divided
    start, end, row = (
        each[divided.stage != UNTRACED]
        for each in (divided.start_ns, divided.end_ns, divided.stage)
    )
    stages = [np.searchsorted(timeline.threads, lanes(spans)[row]), start, end]
    visits = np.stack(
        [
            np.append(sync_points.chain, handoffs.chain),
            np.append(sync_points.start_ns, handoffs.start_ns),
            np.append(sync_points.end_ns, handoffs.end_ns),
            np.append(sync_points.group, len(sync_points.size) + np.arange(len(handoffs.chain))),
            np.append(sync_points.name, spans.name[handoffs.consumer_row]),
        ]
    )
    *visited, group, name = visits[:, np.lexsort(visits[2::-1])]
    chain = np.repeat(np.arange(len(timeline.threads)), len(intervals.steps))
    runs = [chain, intervals.begin_ns.ravel(), intervals.end_ns.ravel()]
    instants = [handoffs.producer, handoffs.produced_ns, handoffs.produced_ns]
    times, (stage, visit, run) = _cells([stages, visited, runs, instants])
    heads = np.flatnonzero((visit < 0) | differs(visit, run))
    tails = np.append(heads[1:], len(times) - 1)
    inside = run[heads] >= 0
    heads, end = heads[inside], times[tails[inside]]
    ns, stage, visit, run = end - times[heads], stage[heads], visit[heads], run[heads]
    rows = np.append(row, UNTRACED)[stage]
    # An index of -1 reads the last item.
    named = np.append(spans.name, len(sync_points.names))[rows]
    named = np.where((rows < 0) & (visit >= 0), np.append(name, 0)[visit], named)
    none = np.zeros(len(run), dtype=bool)
    group = np.append(group, WORK)[visit]
    return _Segments(run.astype(np.int64), group, named, rows, ns, none), end


def _cells(kinds: list[list[Int64s]]) -> tuple[Int64s, list[npt.NDArray[np.int32]]]:
    """Cut chains at the edges of all kinds of intervals.

    Args:
        kinds: Chain, start and end of the intervals of each kind, which are ordered by these and
            don't overlap; the last ones are instants, in any order.

    Returns:
        The times, and for all kinds but the last the interval of each cell between two times, or
        -1.
    """
    low = int(np.concatenate([start for _, start, _ in kinds]).min())
    width = int(np.concatenate([end for _, _, end in kinds]).max()) - low + 1
    keys = [chain * width + np.stack(times) - low for chain, *times in kinds]
    times = edges(*(each for pair in keys for each in pair))
    found = []
    for start, end in keys[:-1]:
        place = np.searchsorted(start, times, "right") - 1
        inside = times < np.append(end, times[0])[place]
        # These arrays are the largest of all, so 32 bits save memory.
        found.append(np.where(inside, place, -1).astype(np.int32))
    times %= width
    times += low
    return times, found


def _add_handoffs(
    segments: _Segments, end_ns: Int64s, timeline: Timeline
) -> tuple[_Segments, Int64s]:
    """Insert handoffs within an interval; return the transfers of waits, too.

    A handoff from another interval, or one that was produced after it was needed by the clocks,
    ends no wait: then the wait counts as work. But waiting at the end of an interval for a handoff
    that follows later takes no time of the interval: such a wait is a sync point of its own.
    """
    spans, sync_points = timeline.spans, timeline.sync_points
    intervals, handoffs = timeline.intervals, timeline.handoffs
    if not len(handoffs.chain):
        return segments, np.zeros(0, dtype=np.int64)
    count, waits = len(sync_points.size), np.arange(len(handoffs.chain))
    chain, interval = np.divmod(segments.run, len(intervals.steps))
    start_ns = end_ns - segments.ns

    def segment_at(whose: Int64s, when: Int64s) -> Int64s:
        """Return the segment of a chain that contains a time or ends at it, or -1."""
        found = last_begun(chain, start_ns, whose, when - 1)
        return np.where(np.append(end_ns, _BEFORE_ALL)[found] >= when, found, -1)

    producing = segment_at(handoffs.producer, handoffs.produced_ns)
    waiting = segment_at(handoffs.chain, handoffs.end_ns)
    idle = np.flatnonzero(segments.sync_point >= count)
    wait, latest = segments.sync_point[idle] - count, np.full(len(waits), _BEFORE_ALL)
    fine = handoffs.produced_ns <= handoffs.end_ns[handoffs.wait]
    np.maximum.at(latest, handoffs.wait[fine], handoffs.produced_ns[fine])
    idle = idle[(end_ns[idle] <= latest[wait]) & (waiting[wait] != idle)]
    # Times since the interval started, to compare chains.
    after = end_ns - (intervals.begin_ns.ravel() - intervals.offset_ns)[segments.run]
    ends = waiting[handoffs.wait]
    there = (producing >= 0) & (ends >= 0) & (interval[producing] == interval[ends])
    there &= after[producing] <= after[ends]
    live = np.isin(waits, handoffs.wait[there])
    # A wait without a segment takes no time: the chain was ready only after the handoff.
    long = (waiting >= 0) & (segments.sync_point[waiting] == count + waits)
    ready = after[waiting] - np.where(long, segments.ns[waiting], 0)
    np.maximum.at(ready, handoffs.wait[there], after[producing[there]])
    sync_point = np.where(segments.sync_point < count, segments.sync_point, WORK)
    sync_point[idle] = count + len(waits) + np.arange(len(idle))
    sync_point[waiting[live & long]] = count + waits[live & long]
    work = (sync_point == WORK) & (segments.row < 0)
    name = np.where(work, len(sync_points.names), segments.name)
    segments = segments._replace(sync_point=sync_point, name=name)

    short, row = waits[live & ~long], handoffs.producer_row[there]
    place = np.append(producing[there], waiting[short])
    when = np.append(np.where(handoffs.is_mark[there], 2, 0), np.ones_like(short))
    order = np.lexsort((when, place))
    new = _Segments(
        segments.run[place],
        count + np.append(handoffs.wait[there], short),
        np.append(spans.name[row], spans.name[handoffs.consumer_row[short]]),
        np.append(row, np.full_like(short, UNTRACED)),
        np.zeros_like(place),
        when != 1,
    )
    columns = (
        np.insert(old, place[order] + 1, added[order])
        for old, added in zip(segments, new, strict=True)
    )
    return _Segments(*columns), np.append(after[waiting] - ready, np.zeros_like(idle))


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
        names: What ``name`` stands for; the last one is `OUTSIDE_STAGES`.
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
    if not len(spans.rows(kind="step")):
        return "This run has no steps."
    timeline, dropped = find_timeline(spans), 0
    if len(timeline.threads) > 1:
        if not timeline.intervals.synchronized and (text := unsynchronized_clocks(timeline.spans)):
            return f"Steps can't be aligned: no sync point includes all ranks, and {text}."
        if not len(timeline.sync_points.step) and not len(timeline.handoffs.wait):
            return f"{_NO_SYNC} {timeline.handoffs.note}".strip()
    while len(timeline.intervals.steps):
        graph = _graph(timeline, dropped)
        stuck = graph.schedule.stuck
        if not stuck.any() and len(graph.steps) < MIN_STEPS:
            return f"{len(graph.steps)} steps have usable boundaries; {MIN_STEPS} are needed."
        if not stuck.any():
            return graph
        dropped += int(stuck.sum())
        timeline = timeline._replace(intervals=timeline.intervals.only(np.flatnonzero(~stuck)))
    return "No step is complete on all ranks with the same order of sync points."


def _graph(timeline: Timeline, dropped: int) -> StepGraph:
    """Build the graph of all intervals, given how many others were dropped."""
    spans, sync_points, intervals = timeline.spans, timeline.sync_points, timeline.intervals
    segments, wait_ns = _add_handoffs(*_cut_segments(timeline), timeline)
    visits = segments.sync_point != WORK
    used = np.unique(segments.sync_point[visits])
    sync_point = np.where(visits, np.searchsorted(used, segments.sync_point), WORK)
    size = intervals.begin_ns.size, len(intervals.steps)
    ranks = [spans.threads[thread].rank for thread in timeline.threads.tolist()]
    is_handoff = used >= len(sync_points.size)
    return StepGraph(
        spans=spans,
        names=(*sync_points.names, OUTSIDE_STAGES),
        ranks=np.array(ranks),
        roles=tuple(spans.headers[rank].role for rank in ranks),
        steps=intervals.steps,
        wall_ns=intervals.wall_ns,
        offset_ns=intervals.offset_ns,
        name=segments.name,
        row=segments.row,
        ns=segments.ns,
        transfer_ns=np.append(sync_points.transfer_ns, wait_ns)[used],
        whole_stage=np.append(sync_points.whole_stage, np.zeros(len(wait_ns), dtype=bool))[used],
        is_handoff=is_handoff,
        schedule=build_schedule(segments.run, sync_point, *size, segments.produces),
        note=_note(timeline, dropped, with_handoffs=bool(is_handoff.any())),
    )


def _note(timeline: Timeline, dropped: int, *, with_handoffs: bool) -> str:
    told = [timeline.note]
    if len(timeline.threads) == 1:
        told.append("Single thread, so everything is on the critical path.")
    else:
        by = [timeline.sync_points.source, "samples and weight versions" * with_handoffs]
        told.append(f"Synchronization points: {' and '.join(filter(None, by))}.")
        told.append(f"Step boundaries: {timeline.intervals.boundaries}.")
        if with_handoffs or not timeline.intervals.synchronized:
            told.append(uncertainty_note(timeline.spans, "Step boundaries and handoffs"))
    told.append(timeline.handoffs.note)
    if dropped:
        told.append(f"Excluded {dropped} steps whose sync points come in different orders.")
    return " ".join(filter(None, told))
