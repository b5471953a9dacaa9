"""What ran on each device over time, which stage its host was in, and when it was profiled."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import (
    COPY,
    GRAPHS_NOTE,
    NO_REPLAY,
    NOT_RECORDED,
    DeviceWork,
    device_work,
)
from lightning_rlprof.analysis.step_selection import captures
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, group_starts
from lightning_rlprof.tables.intervals import cells_of, edges, open_count
from lightning_rlprof.tables.spans import Spans

NEVER = 2**63 - 1
"""Launch time of device work whose launch was not recorded."""

_NO_COPIES = "Copies were not recorded; their time counts as idle."
_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")
_EMPTY = np.empty(0, np.int64)


class LaneWork(NamedTuple):
    """Kernels and copies as columns of one length, by start, then launch; none is empty.

    Attributes:
        start_ns: On the run's time axis.
        end_ns: Later than the start.
        kind: `COMPUTE`, `COMMUNICATION` or `COPY`.
        stage: Index into `DeviceTimeline.stages` of the stage that launched it, or `NO_STAGE`.
        launch_ns: When the call that launched it began, or `NEVER`.
        replay: Number of the graph replay that it ran in, or `NO_REPLAY`.
    """

    start_ns: Int64s
    end_ns: Int64s
    kind: Int64s
    stage: Int64s
    launch_ns: Int64s
    replay: Int64s

    def starting_at(self, times: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first row that starts at each time, and its launch, else `NEVER`."""
        at = np.searchsorted(self.start_ns, times)
        starts = np.append(self.start_ns, NEVER)[at] == times
        return at, np.where(starts, np.append(self.launch_ns, NEVER)[at], NEVER)


class HostStages(NamedTuple):
    """The stages of the training thread by start; they may nest. ``stage`` as in `LaneWork`."""

    start_ns: Int64s
    end_ns: Int64s
    stage: Int64s


@dataclass(frozen=True, eq=False)
class Lane:
    """One device as one rank used it.

    Attributes:
        rank: Rank of the process.
        device: Number of the device, None if unknown.
        work: What ran on any of its streams.
        host: The stages that its rank was in.
        start_ns: Where the record of the rank begins: its first span, launch or device work.
        end_ns: Where that record ends.
        profiled: Starts and ends of the disjoint intervals in which the device was profiled.
    """

    rank: int
    device: int | None
    work: LaneWork
    host: HostStages
    start_ns: int
    end_ns: int
    profiled: tuple[Int64s, Int64s]


@dataclass(eq=False)
class DeviceTimeline:
    """What ran on the devices of a run.

    Attributes:
        lanes: By rank and device; those without device work have none.
        stages: Names of stages.
        copies: Whether copies were recorded, even if there were none.
        notes: What the reader must know.
    """

    lanes: list[Lane] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    copies: bool = False
    notes: list[str] = field(default_factory=list)


class Grid(NamedTuple):
    """The time of a lane, gapless from start to end, cut wherever something changes.

    Attributes:
        times: Edges of the cells, ascending; one more than cells.
        first: Cell in which each kernel or copy begins.
        last: Cell before which it ends.
        busy: Whether anything runs, per cell.
        profiled: Whether the device was profiled: elsewhere a cell without work is not idle.
    """

    times: Int64s
    first: Int64s
    last: Int64s
    busy: Mask
    profiled: Mask

    def idle(self) -> tuple[Int64s, Int64s]:
        """Return starts and ends of the intervals in which the device was idle."""
        turns = np.diff((~self.busy & self.profiled).astype(np.int8), prepend=0, append=0)
        return self.times[np.flatnonzero(turns > 0)], self.times[np.flatnonzero(turns < 0)]


def device_timeline(spans: Spans) -> DeviceTimeline:
    """Read kernels and copies as a lane per rank and device.

    A device counts as profiled inside captures that contain device work of its rank. A run
    without captures has two cases. In a trace of an external profiler it is all the time, except
    for missing steps. Next to spans that rlprof recorded it is from the rank's first device work
    to its last. If kernels inside graphs aren't visible, no time counts as profiled.
    """
    notes: list[str] = []
    work = device_work(spans, None, notes)
    if not work.duration.any():
        return DeviceTimeline(notes=notes)
    stage, stages = work.stages(spans.names)
    copies = work.copies is not None or bool((work.kind[work.duration > 0] == COPY).any())
    if work.hidden_in_graphs:
        notes.append(GRAPHS_NOTE)
    if not copies:
        notes.append(_NO_COPIES)
    lanes = _lanes(spans, work, stage)
    if absent := len(set(spans.ranks) - {lane.rank for lane in lanes}):
        notes.append(f"{absent} ranks have no device work, so they have no row.")
    return DeviceTimeline(lanes, stages, copies, notes)


def grid_of(lane: Lane, *others: Int64s) -> Grid:
    """Cut the time of a lane wherever work begins or ends, and at the other times.

    A graph replay counts as not profiled from its first kernel or copy to its last: what they wait
    for is unknown.
    """
    work = lane.work
    replays = _replays(work)
    ends = np.array([lane.start_ns, lane.end_ns])
    parts = [work.start_ns, work.end_ns, *lane.profiled, *others, *replays, ends]
    times = edges(*(part.clip(*ends) for part in parts))
    count = len(times) - 1
    first, last = cells_of(times, work.start_ns, work.end_ns)
    profiled, replayed = (
        open_count(*cells_of(times, *each), count) > 0 for each in (lane.profiled, replays)
    )
    return Grid(times, first, last, open_count(first, last, count) > 0, profiled & ~replayed)


def _replays(work: LaneWork) -> tuple[Int64s, Int64s]:
    """Return starts and ends of graph replays."""
    at = np.flatnonzero(work.replay != NO_REPLAY)
    at = at[np.argsort(work.replay[at], kind="stable")]
    first = group_starts(work.replay[at])
    starts, ends = work.start_ns[at], work.end_ns[at]
    return np.minimum.reduceat(starts, first), np.maximum.reduceat(ends, first)


def _lanes(spans: Spans, work: DeviceWork, stage: Int64s) -> list[Lane]:
    """Return the lanes, without work that takes no time; ``stage`` launched each row of work."""
    start, launch = work.numbers("start"), work.numbers("launch", NEVER)
    device = work.numbers("device")
    order = np.lexsort((launch, start, device, work.rank))
    order = order[work.duration[order] > 0]
    rank, device = work.rank[order], device[order]
    columns = (start, start + work.duration, work.kind, stage, launch, work.replay)
    every = LaneWork(*(column[order] for column in columns))
    hidden = work.hidden_in_graphs
    lanes: list[Lane] = []
    for each, of_rank in _runs(rank):
        own = LaneWork(*(column[of_rank] for column in every))
        host = _host(spans, each)
        rows = spans.rows(rank=each)
        first = int(np.concatenate([spans.start_ns[rows], own.start_ns, own.launch_ns]).min())
        last = int(np.append(spans.end_ns[rows], own.end_ns).max())
        profiled = (_EMPTY, _EMPTY) if hidden else _profiled(spans, each, own, first, last)
        for number, of_device in _runs(device[of_rank]):
            on_device = LaneWork(*(column[of_device] for column in own))
            name = None if number == NOT_RECORDED else number
            lanes.append(Lane(each, name, on_device, host, first, last, profiled))
    return lanes


def _runs(column: Int64s) -> Iterator[tuple[int, slice]]:
    """Yield each value of a sorted column, and its rows."""
    for first, last in pairwise([*group_starts(column).tolist(), len(column)]):
        yield int(column[first]), slice(first, last)


def _profiled(
    spans: Spans, rank: int, work: LaneWork, first: int, last: int
) -> tuple[Int64s, Int64s]:
    """Return when the devices of a rank were profiled; see `device_timeline`."""
    if (windows := captures(spans, rank, work.start_ns)) is not None:
        return windows
    header = spans.headers.get(rank)
    if header is not None and header.config:  # rlprof's: external traces name no configuration
        return work.start_ns.min()[None], work.end_ns.max()[None]
    steps = spans.rows(kind="step", rank=rank)
    leap = np.flatnonzero(np.diff(spans.step[steps]) > 1)
    starts = np.append(first, spans.start_ns[steps[leap + 1]])
    return starts, np.append(spans.end_ns[steps[leap]], last)


def _host(spans: Spans, rank: int) -> HostStages:
    """Return the stages of the thread with most steps, then with most stages."""
    rows = spans.rows(rank=rank)
    stages = rows[spans.kind[rows] == _STAGE]
    threads, codes = np.unique(spans.thread[rows], return_inverse=True)
    counts = [
        np.bincount(codes, spans.kind[rows] == kind, len(threads)) for kind in (_STAGE, _STEP)
    ]
    if len(stages):
        stages = stages[spans.thread[stages] == threads[np.lexsort(counts)[-1]]]
    return HostStages(spans.start_ns[stages], spans.end_ns[stages], spans.name[stages])
