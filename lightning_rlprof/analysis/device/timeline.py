"""What is known of each device: what ran on it, when it was profiled, and why it was idle.

`idle` is its table; `breakdown`, communication, the ledger and findings ask it, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from lightning_rlprof.analysis.device.losses import (
    NEVER,
    DeviceLoss,
    LossCode,
    loss_texts,
    losses_in_steps,
    losses_of_tables,
)
from lightning_rlprof.analysis.device.work import (
    COMMUNICATION,
    COPY,
    GRAPHS_NOTE,
    NO_REPLAY,
    NO_STAGE,
    NOT_RECORDED,
    DeviceWork,
    device_work,
    no_work,
)
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.analysis.steps.partition import paint
from lightning_rlprof.analysis.steps.step_selection import captures
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Integers, Mask, group_starts
from lightning_rlprof.tables.intervals import cells_of, edges, open_count
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of, packed

LATENCY_NS = 30_000
"""Up to this long after its launch, work that has not started is in launch latency.

HTA has the same 30 µs. Its documentation calls them nanoseconds, while its data are microseconds.
"""

HOST_BOUND, LAUNCH_LATENCY, COLLECTIVE_WAIT, UNATTRIBUTED = range(4)
"""Causes of idle time, see `idle_causes`."""

_NO_COPIES = "Copies were not recorded; their time counts as idle."
_NO_KERNELS = "No kernels were recorded, so device idle time is unknown."
_EDGE_WORK, _EDGE_SHARE, _EDGE_NS = 0.01, 0.1, 1_000_000
"""A gap at the edge has at most this share of the work beyond it. It takes at least this share of
the time, and this many nanoseconds."""

_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")
_EMPTY = np.empty(0, np.int64)

_ALONE = LossCode.LAUNCHES
TABLES = ("kernels", "memcpy", "calls")
"""Tables of profilers that a timeline is read from."""

UNTRACED = "untraced"
"""Names the time of the host outside of stages."""

_IDLE_COLUMNS = (
    *columns_of("count", "rank", "device"),
    *columns_of("text", "kind", "stage"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("count", "count"),
    *columns_of("duration", "median", "longest", unit="ns"),
)

IDLE_CATEGORIES = (
    Category.HOST_IDLE,
    Category.LAUNCH_LATENCY,
    Category.COLLECTIVE_WAIT,
    Category.UNATTRIBUTED_IDLE,
)
"""Category of each cause of `idle_causes`."""

_NO_IDLE = "No device was idle while it was profiled."

_Intervals = tuple[Int64s, Int64s, Int64s]
"""Start, end and kind or key of intervals."""


class LaneWork(NamedTuple):
    """Kernels and copies as columns of one length, by start, then launch; none is empty.

    Attributes:
        start_ns: On the run's time axis.
        end_ns: Later than the start.
        kind: `COMPUTE`, `COMMUNICATION` or `COPY`.
        stage: Index into `DeviceTimeline.stages` of the stage that launched it, or `NO_STAGE`.
        launch_ns: When the call that launched it began, or `NEVER`.
        replay: Number of the graph replay that it ran in, or `NO_REPLAY`.
        row: Index of its row in `DeviceTimeline.work`.

    Codes have as few bytes as they need, so nothing may be added to them.
    """

    start_ns: Int64s
    end_ns: Int64s
    kind: Integers
    stage: Integers
    launch_ns: Int64s
    replay: Integers
    row: Integers

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
        lost_launches: When kernels of the rank were launched that are missing.
        recorded: As ``profiled``, with the time in which work may be lost.
    """

    rank: int
    device: int | None
    work: LaneWork
    host: HostStages
    start_ns: int
    end_ns: int
    profiled: tuple[Int64s, Int64s]
    lost_launches: Int64s
    recorded: tuple[Int64s, Int64s]


@dataclass(eq=False)
class DeviceTimeline:
    """What ran on the devices of a run.

    Attributes:
        lanes: By rank and device; those without device work have none.
        stages: Names of stages.
        copies: Whether copies were recorded, even if there were none.
        kernels: Whether kernels were recorded, so that what has none took no time.
        work: The kernels and copies as they were recorded.
        losses: What is known to be missing of the devices' work.
        notes: What the reader must know, losses included.
    """

    lanes: list[Lane] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    copies: bool = False
    kernels: bool = False
    work: DeviceWork = field(default_factory=lambda: DeviceWork(None, None))
    losses: list[DeviceLoss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Grid(NamedTuple):
    """The time of a lane, gapless from start to end, cut wherever something changes.

    Attributes:
        times: Edges of the cells, ascending; one more than cells.
        first: Cell in which each kernel or copy begins.
        last: Cell before which it ends.
        busy: Whether anything runs, per cell.
        profiled: Whether the device was profiled: elsewhere a cell without work is not idle.
        replayed: Whether a graph replay runs.
    """

    times: Int64s
    first: Int64s
    last: Int64s
    busy: Mask
    profiled: Mask
    replayed: Mask

    def idle(self) -> tuple[Int64s, Int64s]:
        """Return starts and ends of the intervals in which the device was idle."""
        return _spread(self.times, ~self.busy & self.profiled)

    def unknown(self) -> tuple[Int64s, Int64s, Mask]:
        """Return starts and ends of the other time without work, and whether a replay ran then."""
        parts = [
            _spread(self.times, ~self.busy & ~self.profiled & here)
            for here in (self.replayed, ~self.replayed)
        ]
        start, end = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(start, kind="stable")
        return start[order], end[order], order < len(parts[0][0])


def _spread(times: Int64s, cells: Mask) -> tuple[Int64s, Int64s]:
    """Return starts and ends of the intervals that some cells between the times are."""
    turns = np.diff(cells.astype(np.int8), prepend=0, append=0)
    return times[np.flatnonzero(turns > 0)], times[np.flatnonzero(turns < 0)]


def device_timeline(spans: Spans) -> DeviceTimeline:
    """Read kernels and copies as a lane per rank and device.

    A device counts as profiled inside captures that contain device work of its rank. A run
    without captures has two cases. In a trace of an external profiler it is all the time, except
    for missing steps. Next to spans that rlprof recorded it is from the rank's first launch or
    device work to its last. If kernels inside graphs aren't visible, or no kernel was recorded at
    all, no time counts as profiled. Neither does the time in which work may have been lost.

    It can be large, so it is shared only while a caller holds it.
    """
    held = spans.once("held_timeline", lambda _: WeakValueDictionary[str, DeviceTimeline](), TABLES)
    found = held.get("timeline")
    if found is None:
        found = held["timeline"] = _device_timeline(spans)
    return found


def _device_timeline(spans: Spans) -> DeviceTimeline:
    notes: list[str] = []
    work, losses = device_work(spans, None, notes), [*losses_of_tables(spans)]
    if work.hidden_in_graphs:
        notes.append(GRAPHS_NOTE)
    if not work.duration.any():
        return _kept(spans, DeviceTimeline(work=work, losses=losses, notes=notes))
    stage, stages = work.stages(spans.names)
    copies = work.copies is not None or bool((work.kind[work.duration > 0] == COPY).any())
    if not copies:
        notes.append(_NO_COPIES)
    if not work.kernel_count:
        notes.append(_NO_KERNELS)
    lanes = _lanes(spans, work, stage, losses)
    notes += [f"{text}." for text in loss_texts(losses)]
    notes += missing_ranks(spans, [lane.rank for lane in lanes])
    recorded = work.kernel_count > 0 and all(each.code != LossCode.ROWS for each in losses)
    return _kept(spans, DeviceTimeline(lanes, stages, copies, recorded, work, losses, notes))


def _kept(spans: Spans, timeline: DeviceTimeline) -> DeviceTimeline:
    """Return the timeline, and keep its losses for `device_losses`; the rest can be large."""
    spans.once("device_losses", lambda _: tuple(timeline.losses), TABLES)
    return timeline


def device_losses(spans: Spans) -> tuple[DeviceLoss, ...]:
    """Return what is known to be missing of the devices' work of a run; computed once."""
    return spans.once("device_losses", lambda run: tuple(device_timeline(run).losses), TABLES)


def missing_ranks(spans: Spans, ranks: list[int]) -> list[str]:
    """Say on how many ranks of the job device work was recorded, unless it was on all."""
    sizes = [header.world_size for header in spans.headers.values()]
    world, own = max([len(spans.ranks), *sizes]), len(set(ranks))
    return [f"Device work was recorded on {own} of {world} ranks."] if own < world else []


def grid_of(lane: Lane, *others: Int64s) -> Grid:
    """Cut the time of a lane wherever work begins or ends, and at the other times.

    A graph replay counts as not profiled from its first kernel or copy to its last: what they wait
    for is unknown.
    """
    work = lane.work
    replays = _replays(work)
    ends = np.array([lane.start_ns, lane.end_ns])
    parts = [work.start_ns, work.end_ns, *lane.profiled, *lane.recorded, *others, *replays, ends]
    times = edges(*(part.clip(*ends) for part in parts))
    count = len(times) - 1
    first, last = cells_of(times, work.start_ns, work.end_ns)
    profiled, replayed = (
        open_count(*cells_of(times, *each), count) > 0 for each in (lane.profiled, replays)
    )
    busy = open_count(first, last, count) > 0
    return Grid(times, first, last, busy, profiled & ~replayed, replayed)


def idle_causes(lane: Lane) -> tuple[Int64s, Int64s, Int64s]:
    """Return starts, ends and causes of a device's idle time; a gap lasts until the next work.

    - `HOST_BOUND`: the host launched that work after the device had run empty. If the work waited
      longer than `LATENCY_NS` for its start, only the time until the launch counts.
    - `LAUNCH_LATENCY`: the work was queued before, and started within `LATENCY_NS`.
    - `COLLECTIVE_WAIT`: the work was queued for longer, and is a collective.
    - `UNATTRIBUTED`: all other idle time, such as before work whose launch was not recorded.

    The intervals ascend. A gap with two causes is two of them.
    """
    start, end = grid_of(lane).idle()
    at, launch = lane.work.starting_at(end)
    launch = np.where(np.isin(end, lane.lost_launches), end, launch)
    # A launch after the start of its work is an error of the clocks.
    known, late = launch <= end, launch > start
    queued = np.where(known, launch, end).clip(start, end)
    short = end - queued <= LATENCY_NS
    collective = np.append(lane.work.kind, COMMUNICATION)[at] == COMMUNICATION
    waiting = np.where(collective, COLLECTIVE_WAIT, UNATTRIBUTED)
    cause = np.where(short, np.where(late, HOST_BOUND, LAUNCH_LATENCY), waiting)
    cause[~known] = UNATTRIBUTED
    # This work was launched late, and then did not start at once.
    split = np.flatnonzero(known & late & ~short)
    first = np.append(np.where(known & ~short, queued, start), start[split])
    last = np.append(end, queued[split])
    cause = np.append(cause, np.full(len(split), HOST_BOUND))
    order = np.argsort(first, kind="stable")
    return first[order], last[order], cause[order]


def _replays(work: LaneWork) -> tuple[Int64s, Int64s]:
    """Return starts and ends of graph replays."""
    at = np.flatnonzero(work.replay != NO_REPLAY)
    at = at[np.argsort(work.replay[at], kind="stable")]
    first = group_starts(work.replay[at])
    starts, ends = work.start_ns[at], work.end_ns[at]
    return np.minimum.reduceat(starts, first), np.maximum.reduceat(ends, first)


def _lanes(spans: Spans, work: DeviceWork, stage: Int64s, losses: list[DeviceLoss]) -> list[Lane]:
    """Return the lanes, without work that takes no time; what they show of losses is added.

    Args:
        spans: The run.
        work: What devices ran.
        stage: What launched each row of work.
        losses: What is missing by the tables.
    """
    start, launch = work.numbers("start"), work.numbers("launch", NEVER)
    device = work.numbers("device")
    order = np.lexsort((launch, start, device, work.rank))
    order = order[work.duration[order] > 0]
    rank, device = work.rank[order], device[order]
    # Codes are kept in few bytes: a job has millions of rows, and these lie there for all devices.
    kind, stage, replay, rows = map(packed, (work.kind, stage, work.replay, order))
    every = LaneWork(
        *(start[order], start[order] + work.duration[order], kind[order], stage[order]),
        *(launch[order], replay[order], rows),
    )
    del start, launch, kind, stage, replay
    unknown = work.hidden_in_graphs or not work.kernel_count
    lanes: list[Lane] = []
    for each, of_rank in _runs(rank):
        own = LaneWork(*(column[of_rank] for column in every))
        host = _host(spans, each)
        rows = spans.rows(rank=each)
        first = int(np.concatenate([spans.start_ns[rows], own.start_ns, own.launch_ns]).min())
        last = int(np.append(spans.end_ns[rows], own.end_ns).max())
        times = (own.start_ns, own.end_ns, own.launch_ns)
        recorded, profiled = profiled_times(spans, each, *times), (_EMPTY, _EMPTY)
        missing = [loss.times[0] for loss in losses if (loss.code, loss.rank) == (_ALONE, each)]
        lost = np.concatenate([_EMPTY, *missing])
        if not unknown:
            whole = Lane(each, None, own, host, first, last, recorded, lost, recorded)
            profiled = _certain(spans, whole, losses)
        for number, of_device in _runs(device[of_rank]):
            on_device = LaneWork(*(column[of_device] for column in own))
            name = None if number == NOT_RECORDED else number
            about = (host, first, last, profiled, lost, recorded)
            lanes.append(Lane(each, name, on_device, *about))
    return lanes


def _runs(column: Int64s) -> Iterator[tuple[int, slice]]:
    """Yield each value of a sorted column, and its rows."""
    for first, last in pairwise([*group_starts(column).tolist(), len(column)]):
        yield int(column[first]), slice(first, last)


def profiled_times(
    spans: Spans, rank: int, start_ns: Int64s, end_ns: Int64s, launch_ns: Int64s
) -> tuple[Int64s, Int64s]:
    """Return when the devices of a rank were profiled; see `device_timeline`.

    The arrays are the times of its work; a launch that was not recorded is later than all work.
    """
    if (windows := captures(spans, rank, start_ns)) is not None:
        return windows
    first, last = np.append(start_ns, launch_ns).min(), end_ns.max()
    header = spans.headers.get(rank)
    # This run is from rlprof: external traces have no configuration.
    if header is not None and header.config:
        return first[None], last[None]
    rows, steps = spans.rows(rank=rank), spans.rows(kind="step", rank=rank)
    first, last = spans.start_ns[rows].min(initial=first), spans.end_ns[rows].max(initial=last)
    leap = np.flatnonzero(np.diff(spans.step[steps]) > 1)
    starts = np.append(first, spans.start_ns[steps[leap + 1]])
    return starts, np.append(spans.end_ns[steps[leap]], last)


def _certain(spans: Spans, whole: Lane, losses: list[DeviceLoss]) -> tuple[Int64s, Int64s]:
    """Return when devices of a rank were profiled and nothing is lost; add what else is missing.

    Args:
        spans: The run.
        whole: The devices of the rank as one.
        losses: Of the tables.
    """
    rank, work = whole.rank, whole.work
    header = spans.headers.get(rank)
    if captures(spans, rank, work.start_ns) is None and (header is None or not header.config):
        more = losses_in_steps(spans, rank, work.start_ns, work.end_ns, work.launch_ns)
        losses += [] if more is None else [more]
        whole = replace(whole, profiled=_without(whole.profiled, rank, losses))
        edges_of = _edges(spans, whole)
        lost = int((edges_of[1] - edges_of[0]).sum())
        if lost:
            span = whole.end_ns - whole.start_ns
            losses.append(DeviceLoss(LossCode.EDGES, rank, lost, span, edges_of))
    return _without(whole.profiled, rank, losses)


def _without(
    profiled: tuple[Int64s, Int64s], rank: int, losses: list[DeviceLoss]
) -> tuple[Int64s, Int64s]:
    """Return the profiled time of a rank without that of its losses."""
    own = [each.times for each in losses if each.rank in (None, rank) and each.hides_time]
    if not own:
        return profiled
    lost = tuple(np.concatenate(each) for each in zip(*own, strict=True))
    times = edges(*profiled, *lost)
    inside, hidden = (
        open_count(*cells_of(times, *each), len(times) - 1) > 0 for each in (profiled, lost)
    )
    return _spread(times, inside & ~hidden)


def _edges(spans: Spans, whole: Lane) -> tuple[Int64s, Int64s]:
    """Return long gaps at the beginning and the end of a recording that may not be idle.

    That is time of which the host recorded nothing either, and the time in which the first work
    was queued and did not begin: the recording of the device may have begun later.
    """
    grid, (start, end, cause) = grid_of(whole), idle_causes(whole)
    done = np.append(0, np.cumsum(np.diff(grid.times) * grid.busy))
    before, after = (done[np.searchsorted(grid.times, each)] for each in (start, end))
    few = _EDGE_WORK * done[-1]
    is_first = before <= few
    at_edge = is_first | (done[-1] - after <= few)
    shortest = max(_EDGE_SHARE * (whole.end_ns - whole.start_ns), _EDGE_NS)
    at_edge &= end - start >= shortest
    if not at_edge.any():
        return _EMPTY, _EMPTY
    queued = at_edge & is_first & (cause == UNATTRIBUTED)
    rows = spans.rows(rank=whole.rank)
    host = [(spans.start_ns[rows], spans.end_ns[rows])]
    if (calls := spans.try_table("calls", [], whole.rank)) is not None:
        own = calls.numbers("rank") == whole.rank
        first, took = (calls.numbers(name)[own] for name in ("start", "duration"))
        host.append((first, first + took))
    parts = [
        (start[at_edge], end[at_edge]),
        (start[queued], end[queued]),
        tuple(np.concatenate(each) for each in zip(*host, strict=True)),
    ]
    times = edges(*(column for part in parts for column in part))
    edge, waited, hosted = (
        open_count(*cells_of(times, *each), len(times) - 1) > 0 for each in parts
    )
    first, last = _spread(times, edge & (waited | ~hosted))
    is_long = last - first >= shortest
    return first[is_long], last[is_long]


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


def idle(spans: Spans) -> Table:
    """Divide the idle time of each device by its cause and by the stage that the host was in.

    A device is idle while none of its streams runs anything; a gap lasts until the next work.

    Causes are those of `idle_causes`: host-bound idle, launch latency, collective wait, and
    unattributed idle.

    Totals add up to ``idle`` in `breakdown`, per device and stage. ``share`` is relative to the
    idle time of the device. A gap that spans several stages counts in each of them by its part.

    Abstains if the run has no device work, and if no device was idle.
    """
    timeline = device_timeline(spans)
    rows: list[tuple[Cell, ...]] = []
    for lane in timeline.lanes:
        rows += [(lane.rank, lane.device, *row) for row in _idle_rows(lane, timeline.stages)]
    notes = timeline.notes
    if not rows:
        known = [_NO_IDLE] * (not any(each.hides_time for each in timeline.losses))
        reason = " ".join([*known, *notes]) if timeline.lanes else no_work(None, notes)
        return Table("idle", _IDLE_COLUMNS, abstained=reason)
    return Table("idle", _IDLE_COLUMNS, rows, " ".join(notes))


def _idle_rows(lane: Lane, stages: list[str]) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per cause and stage of one device, most time first."""
    kind, stage, ns = _by_host_stage(lane, *idle_causes(lane))
    whole = int(ns.sum())
    found = summarize(kind * (len(stages) + 1) + stage - NO_STAGE, ns)
    columns = (found.group, found.total, found.count, found.p50, found.max)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for key, total, *rest in sorted(rows, key=lambda row: (-row[1], row[0])):
        cause, code = divmod(key, len(stages) + 1)
        yield IDLE_CATEGORIES[cause].text, [UNTRACED, *stages][code], total / whole, total, *rest


def _by_host_stage(lane: Lane, start: Int64s, end: Int64s, kind: Int64s) -> _Intervals:
    """Return cause, stage of the host and length, one per idle interval and stage."""
    host = lane.host
    times = edges(start, end, host.start_ns, host.end_ns)
    count = max(len(times) - 1, 0)
    inside, stage = (
        paint(np.searchsorted(times, first), np.searchsorted(times, last), count)
        for first, last in ((start, end), (host.start_ns, host.end_ns))
    )
    cells = np.flatnonzero(inside >= 0)
    codes = np.append(host.stage, NO_STAGE)[stage[cells]] - NO_STAGE
    width = int(codes.max(initial=0)) + 1
    found = summarize(inside[cells] * width + codes, np.diff(times)[cells])
    return kind[found.group // width], found.group % width + NO_STAGE, found.total
