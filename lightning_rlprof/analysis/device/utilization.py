"""How each device spent its time: work and idle by stage, and causes of idle time.

`breakdown` and `idle` share one timeline, see `device_timeline`.
"""

from collections.abc import Iterator

import numpy as np

from lightning_rlprof.analysis.device.timeline import (
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
    no_work,
)
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.analysis.steps.partition import paint
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import cells_of, edges
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_PARTS = ("compute", "exposed communication", "exposed memcpy", "idle", "unknown")
_OVERLAPPED = ("overlapped communication", "overlapped memcpy")
_COPIES = ("exposed memcpy", "overlapped memcpy")
_UNTRACED = "untraced"
_TOTAL = "total"

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


def breakdown(spans: Spans, *, per_rank: bool = True) -> Table:
    """Divide the time of each device among kinds of work, idle and unknown, by stage.

    The wall time of a row is compute + exposed communication + exposed memcpy + idle + unknown.
    The walls of a device add up to the time from its rank's first record to the last, in integer
    nanoseconds. Overlapped communication runs at the same time as compute, overlapped memcpy at
    the same time as compute or communication; neither is part of the wall. The last row is the
    total.

    Work counts to the stage that launched it; time without work counts to the stage that the host
    was in, or to "untraced". Idle: no stream is active while the device is profiled. Unknown: the
    device isn't profiled, or the gap is inside a CUDA graph replay.

    Abstains if the run has no device work.

    Args:
        spans: The run.
        per_rank: A row per rank, device and stage; else one per stage.
    """
    timeline = device_timeline(spans)
    name = "breakdown" if per_rank else "breakdown by stage"
    columns = (
        *([Column("rank", "count"), Column("device", "count")] if per_rank else []),
        Column("stage", "text"),
        *(Column(each, "duration", "ns") for each in ("wall", *_PARTS, *_OVERLAPPED)),
    )
    if not timeline.lanes:
        return Table(name, columns, abstained=no_work(None, timeline.notes))
    sums = [_sums_by_stage(lane, len(timeline.stages)) for lane in timeline.lanes]
    whole: Int64s = np.sum(sums, axis=0)
    places: list[tuple[Cell, ...]] = [(lane.rank, lane.device) for lane in timeline.lanes]
    pairs = zip(places, sums, strict=True) if per_rank else [((), whole)]
    rows = [(*place, *row) for place, own in pairs for row in _stage_rows(own, timeline)]
    total = _breakdown_cells(whole.sum(axis=0), timeline)
    rows.append((*(None, None) * per_rank, _TOTAL, *total))
    return Table(name, columns, rows, " ".join(timeline.notes))


def device_shares(timeline: DeviceTimeline) -> tuple[dict[str, float], str | None]:
    """Return the share of each part of `breakdown`, largest first, and the main cause of idling.

    Both are empty without device work.
    """
    if not timeline.lanes:
        return {}, None
    sums = np.sum([_sums_by_stage(lane, len(timeline.stages)) for lane in timeline.lanes], axis=0)
    parts = sums[:, : len(_PARTS)].sum(axis=0)
    causes = np.zeros(len(IDLE_CATEGORIES), np.int64)
    for lane in timeline.lanes:
        start, end, cause = idle_causes(lane)
        np.add.at(causes, cause, end - start)
    order = np.argsort(-parts, kind="stable").tolist()
    shares = {_PARTS[at]: float(parts[at] / parts.sum()) for at in order if parts[at]}
    return shares, IDLE_CATEGORIES[int(np.argmax(causes))].text


def _sums_by_stage(lane: Lane, stages: int) -> Int64s:
    """Sum the time of one device by stage and part, untraced first; shape (stages + 1, parts)."""
    host, work = lane.host, lane.work
    grid = grid_of(lane, host.start_ns, host.end_ns)
    count = len(grid.busy)
    open_stage = paint(*cells_of(grid.times, host.start_ns, host.end_ns), count)
    host_stage = np.append(host.stage, NO_STAGE)[open_stage]
    stage, running = [], []
    for kind in (COMPUTE, COMMUNICATION, COPY):
        rows = np.flatnonzero(work.kind == kind)
        last_started = paint(grid.first[rows], grid.last[rows], count)
        stage.append(np.append(work.stage[rows], NO_STAGE)[last_started])
        running.append(last_started >= 0)
    compute, communication, copy = running
    masks = (
        (compute, stage[COMPUTE]),
        (communication & ~compute, stage[COMMUNICATION]),
        (copy & ~compute & ~communication, stage[COPY]),
        (~grid.busy & grid.profiled, host_stage),
        (~grid.busy & ~grid.profiled, host_stage),
        (communication & compute, stage[COMMUNICATION]),
        (copy & (compute | communication), stage[COPY]),
    )
    sums = np.zeros((stages + 1, len(masks)), dtype=np.int64)
    ns = np.diff(grid.times)
    for column, (mask, codes) in enumerate(masks):
        np.add.at(sums[:, column], codes[mask] - NO_STAGE, ns[mask])
    return sums


def _stage_rows(sums: Int64s, timeline: DeviceTimeline) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per stage by wall time, untraced last."""
    names = [_UNTRACED, *timeline.stages]
    walls = sums[:, : len(_PARTS)].sum(axis=1).tolist()
    some = np.flatnonzero(sums.any(axis=1)).tolist()
    for code in sorted(some, key=lambda code: (code == 0, -walls[code], code)):
        yield names[code], *_breakdown_cells(sums[code], timeline)


def _breakdown_cells(values: Int64s, timeline: DeviceTimeline) -> Iterator[Cell]:
    """Yield the wall time and its parts; copies are empty if they were not recorded."""
    yield int(values[: len(_PARTS)].sum())
    for name, ns in zip((*_PARTS, *_OVERLAPPED), values.tolist(), strict=True):
        yield ns if timeline.copies or name not in _COPIES else None


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
        reason = " ".join([_NO_IDLE, *notes]) if timeline.lanes else no_work(None, notes)
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
        yield IDLE_CATEGORIES[cause].text, [_UNTRACED, *stages][code], total / whole, total, *rest


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
