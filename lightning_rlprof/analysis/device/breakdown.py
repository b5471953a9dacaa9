"""Where the time of each device goes: one partition that `breakdown` and the report sum up.

Compute is divided by the class of its kernels, idle time by its cause, and unknown time by what
makes it unknown. Each nanosecond is in one part.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.kernel_names import CLASSES
from lightning_rlprof.analysis.device.losses import NO_TIMES, LossCode
from lightning_rlprof.analysis.device.timeline import (
    IDLE_CATEGORIES,
    TABLES,
    UNTRACED,
    DeviceTimeline,
    Lane,
    device_timeline,
    grid_of,
    idle_causes,
)
from lightning_rlprof.analysis.device.work import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    NO_STAGE,
    device_work,
    no_work,
)
from lightning_rlprof.analysis.steps.partition import paint
from lightning_rlprof.tables.arrays import Int64s, Mask, distinct_tuples, group_starts
from lightning_rlprof.tables.intervals import cells_of
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

COMPUTE_CLASSES = tuple(each for each in CLASSES if each != "communication")
"""Classes of kernels that compute."""

WORK = (*COMPUTE_CLASSES, "exposed communication", "exposed memcpy")
"""What a device can do in a cell of time."""

IDLE = tuple(each.text for each in IDLE_CATEGORIES)
"""Causes of idle time, in the order of `idle_causes`."""

REPLAY, UNKNOWN, EDGE, NOT_PROFILED = (
    *("inside graph replays", "unknown", "edge of the recording", "not profiled"),
)
PARTS = (*WORK, *IDLE, REPLAY, UNKNOWN, EDGE, NOT_PROFILED)
"""Parts of the time of a device; they add up to it."""

OVERLAPPED = ("overlapped communication", "overlapped memcpy")
"""What runs hidden behind other work, and is in no sum."""

MAX_COLUMNS = 110
"""Columns of the picture of what devices do over time."""

# Of classes that run at once, the first has the time.
_PRIORITY = ("matmul", "attention", "reduction", "elementwise", "data movement", "other")
_COPIES = ("exposed memcpy", "overlapped memcpy")
_REST = ("idle", "unknown")
_SUMS = ("compute", "exposed communication", "exposed memcpy", *_REST)
_STARTS = [0, len(COMPUTE_CLASSES), len(COMPUTE_CLASSES) + 1, len(WORK), len(WORK) + len(IDLE)]
_TOTAL = "total"


@dataclass(frozen=True, eq=False)
class DeviceTime:
    """The time of every device of a run.

    Attributes:
        places: Rank and number of each device, the number None if unknown.
        stages: Names of stages, `UNTRACED` first.
        ns: Time of each device by stage and part; shape (devices, stages, parts).
        overlapped: What was hidden; shape (devices, stages, 2).
        columns: Work of all devices over the time from first to last; shape (columns, work).
        start_ns: Where the first column begins.
        end_ns: Where the last one ends.
        kernels: How many kernels were recorded.
        copies: How many copies.
        streams: How many streams these ran on.
        knows_kernels: Whether kernels were recorded, so that what has none took no time.
        knows_copies: The same of copies.
        notes: What the reader must know.
    """

    places: list[tuple[int, int | None]]
    stages: list[str]
    ns: Int64s
    overlapped: Int64s
    columns: Int64s
    start_ns: int
    end_ns: int
    kernels: int
    copies: int
    streams: int
    knows_kernels: bool
    knows_copies: bool
    notes: list[str]

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part of `breakdown`, largest first; empty without device work."""
        sums = np.add.reduceat(self.ns.sum(axis=(0, 1)), _STARTS)
        order = np.argsort(-sums, kind="stable").tolist()
        return {_SUMS[at]: float(sums[at] / sums.sum()) for at in order if sums[at]}

    @property
    def idle_cause(self) -> str | None:
        """The cause of most idle time; None without device work."""
        causes = self.ns.sum(axis=(0, 1))[len(WORK) : len(WORK) + len(IDLE)]
        return IDLE[int(np.argmax(causes))] if self.places else None


class AnnotationTime(NamedTuple):
    """What an annotation of the trace launched, by `WORK`, each kernel for as long as it ran."""

    name: str
    ns: Int64s


def device_time(spans: Spans) -> DeviceTime:
    """Divide the time of the devices of a run; computed once."""
    return spans.once("device_time", _device_time, TABLES)


def _device_time(spans: Spans) -> DeviceTime:
    timeline = device_timeline(spans)
    lanes, stages, work = timeline.lanes, len(timeline.stages), timeline.work
    ns = np.zeros((len(lanes), stages + 1, len(PARTS)), np.int64)
    overlapped = np.zeros((len(lanes), stages + 1, len(OVERLAPPED)), np.int64)
    divided = []
    for at, lane in enumerate(lanes):
        cells = _cells(timeline, lane)
        took = np.diff(cells.times)
        np.add.at(ns[at], (cells.stage, cells.part), took)
        for code, (hidden, stage) in enumerate(cells.overlapped):
            np.add.at(overlapped[at, :, code], stage[hidden], took[hidden])
        divided.append((cells.times, cells.part))
    start, end, columns = _columns(divided)
    stream = work.rank, work.numbers("device"), work.numbers("stream")
    heads = group_starts(*stream)
    streams = distinct_tuples(np.stack([column[heads] for column in stream]))
    return DeviceTime(
        places=[(lane.rank, lane.device) for lane in lanes],
        stages=[UNTRACED, *timeline.stages],
        ns=ns,
        overlapped=overlapped,
        columns=columns,
        start_ns=start,
        end_ns=end,
        kernels=work.kernel_count,
        copies=len(work) - work.kernel_count,
        streams=streams[0].shape[1],
        knows_kernels=timeline.kernels,
        knows_copies=timeline.copies,
        notes=timeline.notes,
    )


def _columns(divided: list[tuple[Int64s, Int64s]]) -> tuple[int, int, Int64s]:
    """Return where the picture over time begins and ends, and the work in each of its columns.

    It begins and ends with the devices' work, not with the edge of the recording.

    Args:
        divided: Edges and parts of the cells of each device.
    """
    bounds = [_work_between_edges(times, part) for times, part in divided]
    start = min((first for first, _ in bounds), default=0)
    end = max((last for _, last in bounds), default=0)
    edges = np.linspace(0, end - start, min(MAX_COLUMNS, end - start) + 1)
    found = np.zeros((len(edges) - 1, len(WORK)))
    for times, part in divided:
        found += _between(times - start, part, edges, len(WORK))
    return start, end, np.rint(found).astype(np.int64)


def _between(times: Int64s, part: Int64s, edges: Any, parts: int) -> Any:
    """Return the time of the first parts between edges; shape (columns, parts)."""
    took = np.diff(times)
    found = np.zeros((len(edges) - 1, parts))
    for code in range(parts):
        done = np.append(0, np.cumsum(took * (part == code)))
        found[:, code] = np.diff(np.interp(edges, times, done))
    return found


class DeviceColumns(NamedTuple):
    """What a device did in a window of time, by columns of equal length and `PARTS`."""

    device: int | None
    ns: Int64s


class DeviceParts:
    """What every device did at any time, divided as `device_time` divides it.

    Args:
        spans: The run.
    """

    def __init__(self, spans: Spans) -> None:
        timeline = device_timeline(spans)
        self._lanes = [(lane, _cells(timeline, lane)) for lane in timeline.lanes]

    def count(self, ranks: Collection[int]) -> int:
        """Return how many devices these ranks have."""
        return sum(lane.rank in ranks for lane, _ in self._lanes)

    def columns(self, rank: int, start_ns: int, end_ns: int, count: int) -> list[DeviceColumns]:
        """Return what each device of a rank did in a window that it was recorded in.

        A window shorter than ``count`` nanoseconds has fewer columns. All are exact: time before
        and after the record of the rank counts as not profiled.
        """
        length = end_ns - start_ns
        count = min(count, length)
        edges = np.arange(count + 1) * length // max(count, 1)
        found = []
        for lane, cells in self._lanes:
            if lane.rank != rank or not count:
                continue
            ns = np.rint(_between(cells.times - start_ns, cells.part, edges, len(PARTS)))
            own = ns.astype(np.int64)
            own[:, -1] += np.diff(edges) - own.sum(axis=1)
            if own[:, :-1].any():
                found.append(DeviceColumns(lane.device, own))
        return found


def _work_between_edges(times: Int64s, part: Int64s) -> tuple[int, int]:
    """Return from when to when a device was recorded, without gaps at the edge."""
    work = np.cumsum(np.diff(times) * (part < len(WORK)))
    inside = np.flatnonzero(part < PARTS.index(EDGE))
    gaps = np.flatnonzero(part == PARTS.index(EDGE))
    early = work[gaps] < work[-1] / 2  # Next to no work is before the first gap.
    first = int(gaps[early][-1]) + 1 if early.any() else int(inside[0])
    last = int(gaps[~early][0]) if not early.all() else int(inside[-1]) + 1
    return int(times[first]), int(times[last])


class _Cells(NamedTuple):
    """The time of a device in cells: what each is, the stage it counts to, and what is hidden."""

    times: Int64s
    part: Int64s
    stage: Int64s
    overlapped: tuple[tuple[Mask, Int64s], ...]


def _cells(timeline: DeviceTimeline, lane: Lane) -> _Cells:
    """Cut the time of a device into cells; a stage is an index into `DeviceTime.stages`."""
    host, work, classes = lane.host, lane.work, timeline.work.work_class
    edges_of = [
        each.times
        for each in timeline.losses
        if (each.code, each.rank) == (LossCode.EDGES, lane.rank)
    ]
    edge_start, edge_end = map(np.concatenate, zip(NO_TIMES, *edges_of, strict=True))
    gap_start, gap_end, cause = idle_causes(lane)
    others = (host.start_ns, host.end_ns, gap_start, gap_end, edge_start, edge_end)
    grid = grid_of(lane, *others)
    count = len(grid.busy)

    def within(start: Int64s, end: Int64s) -> Int64s:
        return paint(*cells_of(grid.times, start, end), count)

    def running(rows: Int64s) -> Int64s:
        return paint(grid.first[rows], grid.last[rows], count)

    last_started, stages = [], []
    for kind in (COMPUTE, COMMUNICATION, COPY):
        rows = np.flatnonzero(work.kind == kind)
        last_started.append(running(rows))
        stages.append(np.append(work.stage[rows], NO_STAGE)[last_started[-1]] - NO_STAGE)
    computes, communicates, copies = (each >= 0 for each in last_started)
    part = np.full(count, PARTS.index(UNKNOWN))
    part[within(edge_start, edge_end) >= 0] = PARTS.index(EDGE)
    part[grid.replayed] = PARTS.index(REPLAY)
    part[within(*lane.recorded) < 0] = PARTS.index(NOT_PROFILED)
    gap = within(gap_start, gap_end)
    part[gap >= 0] = cause[gap[gap >= 0]] + PARTS.index(IDLE[0])
    part[copies] = WORK.index("exposed memcpy")
    part[communicates] = WORK.index("exposed communication")
    part[computes] = WORK.index("other")
    compute = work.kind == COMPUTE
    for name in _PRIORITY[-2::-1]:
        rows = np.flatnonzero(compute & (classes[work.row] == CLASSES.index(name)))
        part[running(rows) >= 0] = WORK.index(name)
    stage = np.append(host.stage, NO_STAGE)[within(host.start_ns, host.end_ns)] - NO_STAGE
    for runs, of in zip((copies, communicates, computes), stages[::-1], strict=True):
        stage = np.where(runs, of, stage)
    hidden = communicates & computes, copies & (communicates | computes)
    return _Cells(grid.times, part, stage, tuple(zip(hidden, stages[1:], strict=True)))


def annotation_times(spans: Spans) -> list[AnnotationTime]:
    """Return what each annotation around launches launched, those first that took most time.

    The name is empty for work without one.
    """
    work = device_work(spans)
    codes, names = work.ranges
    kinds = np.array([COMPUTE_CLASSES.index(each) if each in WORK else 0 for each in CLASSES])
    of = kinds[work.work_class]
    of = np.where(work.kind == COMPUTE, of, len(COMPUTE_CLASSES) + work.kind - COMMUNICATION)
    sums = np.zeros((len(names) + 1, len(WORK)), np.int64)
    np.add.at(sums, (codes, of), work.duration)
    merged: dict[str, Int64s] = {}
    for name, ns in zip((*names, ""), sums, strict=True):
        merged[name] = merged.get(name, 0) + ns
    found = [AnnotationTime(name, ns) for name, ns in merged.items() if ns.any()]
    return sorted(found, key=lambda each: -int(each.ns.sum()))


def breakdown(spans: Spans, *, per_rank: bool = True) -> Table:
    """Divide the time of each device among kinds of work, idle and unknown, by stage.

    The wall time of a row is compute + exposed communication + exposed memcpy + idle + unknown.
    The walls of a device add up to the time from its rank's first record to the last, in integer
    nanoseconds. Overlapped communication runs at the same time as compute, overlapped memcpy at
    the same time as compute or communication; neither is part of the wall. The last row is the
    total.

    Work counts to the stage that launched it; time without work counts to the stage that the host
    was in, or to "untraced". Idle: no stream is active while the device is profiled. Unknown: the
    device isn't profiled, work may be lost there, or the gap is inside a CUDA graph replay.

    Abstains if the run has no device work.

    Args:
        spans: The run.
        per_rank: A row per rank, device and stage; else one per stage.
    """
    time = device_time(spans)
    name = "breakdown" if per_rank else "breakdown by stage"
    columns = (
        *([Column("rank", "count"), Column("device", "count")] if per_rank else []),
        Column("stage", "text"),
        *(Column(each, "duration", "ns") for each in ("wall", *_SUMS, *OVERLAPPED)),
    )
    if not time.places:
        return Table(name, columns, abstained=no_work(None, time.notes))
    sums = np.dstack([np.add.reduceat(time.ns, _STARTS, axis=2), time.overlapped])
    whole: Int64s = sums.sum(axis=0)
    pairs = zip(time.places, sums, strict=True) if per_rank else [((), whole)]
    rows = [(*place, *row) for place, own in pairs for row in _stage_rows(own, time)]
    total = _cells_of_row(whole.sum(axis=0), time)
    rows.append((*(None, None) * per_rank, _TOTAL, *total))
    return Table(name, columns, rows, " ".join(time.notes))


def _stage_rows(sums: Int64s, time: DeviceTime) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per stage by wall time, untraced last."""
    walls = sums[:, : len(_SUMS)].sum(axis=1).tolist()
    some = np.flatnonzero(sums.any(axis=1)).tolist()
    for code in sorted(some, key=lambda code: (code == 0, -walls[code], code)):
        yield time.stages[code], *_cells_of_row(sums[code], time)


def _cells_of_row(values: Int64s, time: DeviceTime) -> Iterator[Cell]:
    """Yield the wall time and its parts; copies or kernels are empty if none were recorded."""
    yield int(values[: len(_SUMS)].sum())
    for name, ns in zip((*_SUMS, *OVERLAPPED), values.tolist(), strict=True):
        is_known = time.knows_copies if name in _COPIES else name in _REST or time.knows_kernels
        yield ns if ns or is_known else None
