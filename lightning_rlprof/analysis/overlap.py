"""How much of each rank's communication was hidden behind compute."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.analysis.device_runs import (
    COMMUNICATION,
    COMPUTE,
    DeviceRuns,
    Lane,
    device_runs,
)
from lightning_rlprof.analysis.sweep import unions
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["overlap", "overlapped"]

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
    table = read(spans, "collectives", remarks)
    if table is None or not len(table.rows):
        return None
    operation, operations = texts(table, "operation")
    group, groups = texts(table, "group")
    width = len(groups) + 1
    keys, key = np.unique((operation + 1) * width + group + 1, return_inverse=True)
    names = [
        ([None, *operations][each // width], [None, *groups][each % width])
        for each in keys.tolist()
    ]
    start = numbers(table, "start")
    end = start + numbers(table, "duration")
    return _Told(numbers(table, "rank"), numbers(table, "device", _NONE), start, end, key, names)


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
