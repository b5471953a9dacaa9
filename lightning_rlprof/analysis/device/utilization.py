"""How much of each rank's communication was hidden behind compute.

What each rank's device did in each stage: compute, communication, copies, idle, unknown.

Why each rank's device idled: the host was late, launching took time, a collective, unknown.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.timeline import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    NO_STAGE,
    DeviceRuns,
    Lane,
    device_runs,
    grid_of,
)
from lightning_rlprof.analysis.device.wait_chain import LATENCY_NS
from lightning_rlprof.analysis.stages.partition import paint
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import edges, unions
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_PARTS = ("compute", "exposed communication", "exposed memcpy", "idle", "unknown")
_HIDDEN = ("overlapped communication", "overlapped memcpy")
_COPIES = ("exposed memcpy", "overlapped memcpy")
_BREAKDOWN_NOTHING = "no kernels and no copies of a device were recorded"
_UNTRACED = "untraced"
_TOTAL = "total"

_Sums = dict[int, list[int]]
"""By stage: what `_PARTS` took, then `_HIDDEN`."""


def breakdown(spans: Spans, *, per_rank: bool = True) -> Table:
    """Divide the time of each rank's device among kinds of work, idle and unknown, by stage.

    The wall of a row is compute + exposed communication + exposed memcpy + idle + unknown, and walls
    of a rank's device add up to the time from the first thing that its rank recorded to the last,
    in integer nanoseconds. What is overlapped runs beside compute (copies: or communication) and is
    in no sum. The last row is the total.

    Work counts to the stage that launched it, time in which nothing runs to the stage that the
    host was in; "untraced" is no stage. Unknown: nothing ran, and nobody looked, or it was inside
    of a graph's replay.

    Abstains without work of a device.

    Args:
        spans: The run.
        per_rank: A row per rank, device and stage; else one per stage.
    """
    runs = device_runs(spans)
    name = "breakdown" if per_rank else "breakdown by stage"
    columns = (
        *([Column("rank", "count"), Column("device", "count")] if per_rank else []),
        Column("stage", "text"),
        *(Column(each, "duration", "ns") for each in ("wall", *_PARTS, *_HIDDEN)),
    )
    if not runs.lanes:
        return Table(name, columns, abstained=" ".join([_BREAKDOWN_NOTHING, *runs.remarks]))
    parts = [_sums(lane, len(runs.stages)) for lane in runs.lanes]
    return Table(name, columns, _breakdown_rows(parts, runs, per_rank), " ".join(runs.remarks))


def _breakdown_rows(
    parts: Sequence[_Sums], runs: DeviceRuns, per_rank: bool
) -> list[tuple[Cell, ...]]:
    """Return the rows of each device, or of all as one, and the total."""
    whole = _added(parts)
    places: list[tuple[Cell, ...]] = [(lane.rank, lane.device) for lane in runs.lanes]
    pairs = zip(places, parts, strict=True) if per_rank else [((), whole)]
    rows = [(*place, *row) for place, sums in pairs for row in _stages(sums, runs)]
    total = [sum(each) for each in zip(*whole.values(), strict=True)]
    return [*rows, (*(None, None) * per_rank, _TOTAL, *_line(total, runs))]


def _sums(lane: Lane, width: int) -> _Sums:
    """Sum the time of one device by stage, of which there are as many as the width."""
    host, runs = lane.host, lane.runs
    grid = grid_of(lane, host.start_ns, host.end_ns)
    count = len(grid.busy)
    at = np.append(host.stage, NO_STAGE)[paint(*grid.cells(host.start_ns, host.end_ns), count)]
    stage, there = [], []
    for kind in (COMPUTE, COMMUNICATION, COPY):
        own = np.flatnonzero(runs.kind == kind)
        top = paint(grid.first[own], grid.last[own], count)
        stage.append(np.append(runs.stage[own], NO_STAGE)[top])
        there.append(top >= 0)
    compute, communication, copy = there
    masks = (
        (compute, stage[COMPUTE]),
        (communication & ~compute, stage[COMMUNICATION]),
        (copy & ~compute & ~communication, stage[COPY]),
        (~grid.busy & grid.seen, at),
        (~grid.busy & ~grid.seen, at),
        (communication & compute, stage[COMMUNICATION]),
        (copy & (compute | communication), stage[COPY]),
    )
    sums = np.zeros((width + 1, len(masks)), dtype=np.int64)
    ns = np.diff(grid.times)
    for column, (mask, stages) in enumerate(masks):
        np.add.at(sums[:, column], stages[mask] - NO_STAGE, ns[mask])
    some = np.flatnonzero(sums.any(axis=1)).tolist()
    return {each + NO_STAGE: sums[each].tolist() for each in some}


def _added(parts: Iterable[_Sums]) -> _Sums:
    whole: _Sums = {}
    for sums in parts:
        for stage, own in sums.items():
            before = whole.get(stage, [0] * len(own))
            whole[stage] = [a + b for a, b in zip(before, own, strict=True)]
    return whole


def _stages(sums: _Sums, runs: DeviceRuns) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per stage by wall, untraced last."""
    walls = {stage: sum(own[: len(_PARTS)]) for stage, own in sums.items()}
    for stage in sorted(sums, key=lambda each: (each == NO_STAGE, -walls[each], each)):
        name = _UNTRACED if stage == NO_STAGE else runs.stages[stage]
        yield name, *_line(sums[stage], runs)


def _line(own: Sequence[int], runs: DeviceRuns) -> Iterator[Cell]:
    """Yield the wall and its parts; of copies that nobody recorded nothing is known."""
    yield sum(own[: len(_PARTS)])
    for name, ns in zip((*_PARTS, *_HIDDEN), own, strict=True):
        yield ns if runs.copies or name not in _COPIES else None


_IDLE_COLUMNS = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("kind", "text"),
    Column("stage", "text"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("count", "count"),
    Column("median", "duration", "ns"),
    Column("longest", "duration", "ns"),
)
_HOST, _LAUNCH, _COLLECTIVE, _UNKNOWN = range(4)
_KINDS = ("host-bound idle", "launch latency", "collective wait", "unattributed idle")
_NO_WORK = "no kernels and no copies of a device were recorded"
_NO_IDLE = "no device is known to have idled"


class _Pieces(NamedTuple):
    """Disjoint pieces of idle time, ascending; those of one gap have its number."""

    start_ns: Int64s
    end_ns: Int64s
    kind: Int64s


def idle(spans: Spans) -> Table:
    """Divide the idle time of each rank's device by why it idled, and by what the host was in.

    A device idles while none of its streams runs anything; a gap lasts until the next work begins.
    Host bound: that was launched only after the device had run empty; the whole gap, or, where the
    work lay launched for more than `LATENCY_NS`, until the launch. Launch bound: it was launched
    before and began within `LATENCY_NS`. Waiting for a collective: it lay launched for longer, and
    is a collective. Unknown: all else; its launch was not recorded, say, or nothing came.

    Totals add up to ``idle`` in `breakdown`, per device and stage. ``share`` is of the device's
    idle time. A gap in which the host was in several stages counts in each with its part.

    Abstains without work of a device, and where none is known to have idled.
    """
    runs = device_runs(spans)
    rows: list[tuple[Cell, ...]] = []
    for lane in runs.lanes:
        rows += [(lane.rank, lane.device, *row) for row in _idle_rows(lane, runs.stages)]
    if not rows:
        reason = _NO_IDLE if runs.lanes else _NO_WORK
        return Table("idle", _IDLE_COLUMNS, abstained=" ".join([reason, *runs.remarks]))
    return Table("idle", _IDLE_COLUMNS, rows, " ".join(runs.remarks))


def _idle_rows(lane: Lane, names: list[str]) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per kind and stage of one device, most time first."""
    kind, stage, ns = _by_stage(lane, _pieces(lane, *grid_of(lane).idle()))
    whole = int(ns.sum())
    keys = kind * (len(names) + 1) + stage - NO_STAGE
    found = summarize(keys, ns)
    columns = (found.group, found.total, found.count, found.p50, found.max)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for key, total, *rest in sorted(rows, key=lambda row: (-row[1], row[0])):
        each, code = divmod(key, len(names) + 1)
        name = names[code + NO_STAGE] if code else _UNTRACED
        yield _KINDS[each], name, total / whole, total, *rest


def _pieces(lane: Lane, start: Int64s, end: Int64s) -> _Pieces:
    """Divide gaps by kind."""
    runs = lane.runs
    at, launch = runs.begun(end)
    known, late = launch <= end, launch > start  # a launch after the work itself is no launch
    ready = np.where(known, launch, end).clip(start, end)
    short = end - ready <= LATENCY_NS
    joins = np.append(runs.kind, COMMUNICATION)[at] == COMMUNICATION
    whole = np.where(short, np.where(late, _HOST, _LAUNCH), np.where(joins, _COLLECTIVE, _UNKNOWN))
    whole[~known] = _UNKNOWN
    split = np.flatnonzero(known & late & ~short)  # late, and then not at once
    first = np.append(np.where(known & ~short, ready, start), start[split])
    last = np.append(end, ready[split])
    order = np.argsort(first, kind="stable")
    kind = np.append(whole, np.full(len(split), _HOST))
    return _Pieces(first[order], last[order], kind[order])


def _by_stage(lane: Lane, pieces: _Pieces) -> tuple[Int64s, Int64s, Int64s]:
    """Return kind, stage of the host and length of each piece, cut where the stage changes.

    Of a piece, what lies in one stage is one part, also where another stage lies in between.
    """
    host = lane.host
    times = edges(pieces.start_ns, pieces.end_ns, host.start_ns, host.end_ns)
    count = max(len(times) - 1, 0)
    inside, stage = (
        paint(np.searchsorted(times, start), np.searchsorted(times, end), count)
        for start, end in ((pieces.start_ns, pieces.end_ns), (host.start_ns, host.end_ns))
    )
    cells = np.flatnonzero(inside >= 0)
    codes = np.append(host.stage, NO_STAGE)[stage[cells]]
    width = int(codes.max(initial=NO_STAGE)) - NO_STAGE + 1
    keys, place = np.unique(inside[cells] * width + codes - NO_STAGE, return_inverse=True)
    ns = np.zeros(len(keys), np.int64)
    np.add.at(ns, place, np.diff(times)[cells])
    return pieces.kind[keys // width], keys % width + NO_STAGE, ns


_COLUMNS = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("operation", "text"),
    Column("group", "text"),
    Column("communication", "duration", "ns"),
    Column("overlapped", "duration", "ns"),
    Column("exposed", "duration", "ns"),
    Column("overlap", "share"),
    Column("count", "count"),
)
_ALL = "all"
_NOTHING = "no communication was recorded"
_NONE = -1
_NOTE = (
    "Rows of operations and groups are each for themselves: where two run at once, they add up to "
    "more than all."
)


def overlap(spans: Spans) -> Table:
    """Say how much of each rank's communication ran beside compute, and how much was exposed.

    Communication is the time in which at least one collective runs on the device; overlapped is the
    part of it in which compute runs, too; exposed is the rest, and overlap the overlapped share.
    The first row of a device is about all its communication; where the table ``collectives`` tells
    operation and group, a row for each follows, most exposed first. ``count`` counts pieces of
    device work.

    Abstains without communication. A rank without has no row.
    """
    return overlapped(spans, device_runs(spans))


def overlapped(spans: Spans, runs: DeviceRuns) -> Table:
    """Return `overlap` of a run of which the devices are read already."""
    lanes = [lane for lane in runs.lanes if (lane.runs.kind == COMMUNICATION).any()]
    if not lanes:
        return Table("overlap", _COLUMNS, abstained=" ".join([_NOTHING, *runs.remarks]))
    remarks = [*runs.remarks]
    told = _collectives(spans, remarks)
    rows: list[tuple[Cell, ...]] = []
    for lane in lanes:
        place = (lane.rank, lane.device)
        own = lane.runs.kind == COMMUNICATION
        owner = np.zeros(np.count_nonzero(own), np.int64)
        columns = (owner, lane.runs.start_ns[own], lane.runs.end_ns[own])
        busy = _busy(lane)
        rows += [(*place, *row) for row in _rows(lane, busy, columns, [(_ALL, None)])]
        rows += [(*place, *row) for row in _told_rows(lane, busy, told)]
    more = len(rows) > len(lanes)
    return Table("overlap", _COLUMNS, rows, " ".join([*remarks, *[_NOTE] * more]))


class _Busy(NamedTuple):
    """When a device computed: disjoint intervals, and how long before each. Times of its lane."""

    first: Int64s
    last: Int64s
    before: Int64s


class _Told(NamedTuple):
    """The table of collectives: columns of one length, and what each key stands for."""

    rank: Int64s
    device: Int64s
    start_ns: Int64s
    end_ns: Int64s
    key: Int64s
    names: list[tuple[str | None, str | None]]


def _collectives(spans: Spans, remarks: list[str]) -> _Told | None:
    table = spans.try_table("collectives", remarks)
    if table is None or not len(table.rows):
        return None
    operation, operations = table.texts("operation")
    group, groups = table.texts("group")
    width = len(groups) + 1
    keys, key = np.unique((operation + 1) * width + group + 1, return_inverse=True)
    names = [
        ([None, *operations][each // width], [None, *groups][each % width])
        for each in keys.tolist()
    ]
    start = table.numbers("start")
    end = start + table.numbers("duration")
    return _Told(table.numbers("rank"), table.numbers("device", _NONE), start, end, key, names)


def _told_rows(lane: Lane, busy: _Busy, told: _Told | None) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per operation and group on one device."""
    if told is None:
        return
    device = _NONE if lane.device is None else lane.device
    own = np.flatnonzero((told.rank == lane.rank) & (told.device == device))
    columns = (told.key[own], told.start_ns[own], told.end_ns[own])
    yield from _rows(lane, busy, columns, told.names)


def _rows(
    lane: Lane,
    busy: _Busy,
    columns: tuple[Int64s, Int64s, Int64s],
    names: Sequence[tuple[str | None, str | None]],
) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per key of intervals (key, start and end), most exposed first."""
    zero = int(min(lane.start_ns, columns[1].min(initial=lane.start_ns)))
    key, start, end = unions(columns[0], columns[1] - zero, columns[2] - zero)
    shift = zero - lane.start_ns
    hidden = _computed(busy, end + shift) - _computed(busy, start + shift)
    some = columns[2] > columns[1]
    count = np.bincount(columns[0][some], minlength=len(names)).tolist()
    sums = np.zeros((2, len(names)), np.int64)
    np.add.at(sums[0], key, end - start)
    np.add.at(sums[1], key, hidden)
    whole, beside = sums.tolist()
    for each in sorted(set(key.tolist()), key=lambda at: (beside[at] - whole[at], at)):
        exposed = whole[each] - beside[each]
        share = beside[each] / whole[each]
        yield *names[each], whole[each], beside[each], exposed, share, count[each]


def _busy(lane: Lane) -> _Busy:
    own = lane.runs.kind == COMPUTE
    starts, ends = lane.runs.start_ns[own] - lane.start_ns, lane.runs.end_ns[own] - lane.start_ns
    _, first, last = unions(np.zeros(len(starts), np.int64), starts, ends)
    return _Busy(first, last, np.append(0, np.cumsum(last - first)))


def _computed(busy: _Busy, times: Int64s) -> Int64s:
    """Return for how long the device had computed before each of some times."""
    at = np.searchsorted(busy.first, times, "right")
    over = np.append(0, busy.last)[at] - times
    found: Int64s = busy.before[at] - np.maximum(over, 0) * (at > 0)
    return found
