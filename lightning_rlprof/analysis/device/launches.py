"""What launching costs the host, how long launches wait, and how long each stream's queue is."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import (
    NO_REPLAY,
    NOT_RECORDED,
    DeviceWork,
    device_work,
    launch_calls,
    no_work,
)
from lightning_rlprof.analysis.statistics.group_summary import rows_by_group, summarize
from lightning_rlprof.analysis.steps.step_selection import CLOSED, OPENED
from lightning_rlprof.tables.arrays import Int64s, Mask, differs
from lightning_rlprof.tables.intervals import covered_before
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

FULL = 1_000
"""A queue with this many launches is full: launching waits.

CUDA documents no number. Users measured that from about 1,000 on each launch takes as long as a
kernel (forums.developer.nvidia.com/t/68937); HTA assumes 1,024.
"""

_COLUMNS = (
    *columns_of("count", "rank", "device", "stream"),
    Column("call", "text"),
    *columns_of("count", "launches", "kernels"),
    *columns_of("duration", "API time total", "API time p50", "API time p95", unit="ns"),
    *columns_of("duration", "delay p50", "delay p95", "delay max", unit="ns"),
    *columns_of("count", "shorter than launch", "queue max depth"),
    Column("queue mean depth", "number", "launches"),
    *columns_of("share", "queue empty %", "queue full %"),
)
_READ = ("rank", "device", "stream", "start", "duration", "launch", "launch duration")
# These titles are for calls without a name.
_TITLES = ("launch", "graph replay", "copy", "not recorded")
_NOT_RECORDED = len(_TITLES) - 1
_NO_LAUNCHES = "The profiler recorded no launch times of kernels."


class _Launched(NamedTuple):
    """Kernels and copies as columns; `NOT_RECORDED` for what is unknown."""

    is_copy: Mask
    rank: Int64s
    device: Int64s
    stream: Int64s
    start: Int64s
    duration: Int64s
    launch: Int64s
    call: Int64s
    replay: Int64s


def launches(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Show per stream and driver call what launching costs, and how long the queue was.

    A delay lasts from the start of the call to the start on the device. ``shorter than launch``
    counts kernels that ran for less time than the call that launched them: a stream of
    only such kernels waits for the host. A graph replay is one launch of all kernels and copies in
    it. It belongs to the stream on which the first of them starts; rows of other streams don't
    count it. Kernels without a known launch have a row ``not recorded``.

    The queue of a stream contains what is launched and has not started. It is the same in all rows
    of the stream, from its first launch to its last start, without the time between captures.

    Args:
        spans: The run.
        ranks: Only these; None for all.
    """
    notes: list[str] = []
    work = device_work(spans, ranks, notes)
    if not len(work):
        return Table("launches", _COLUMNS, abstained=no_work(ranks, notes))
    if not (work.numbers("launch") != NOT_RECORDED).any():
        return Table("launches", _COLUMNS, abstained=_NO_LAUNCHES)
    return Table("launches", _COLUMNS, _rows(spans, work, notes), " ".join(notes))


def _rows(spans: Spans, work: DeviceWork, notes: list[str]) -> list[tuple[Cell, ...]]:
    """Return a row per stream and call; those of a stream by number of launches."""
    is_copy = np.arange(len(work)) >= work.kernel_count
    own = _Launched(is_copy, *[*map(work.numbers, _READ), work.replay])
    titles, title = _titles(spans, own, notes)
    streams, stream = _distinct(own.rank, own.device, own.stream)
    keys = stream * len(titles) + title
    first = first_of_launches(own.launch, own.replay, own.start)
    wrong = own.start[first] < own.launch[first]
    if wrong.any():
        text = f"{int(wrong.sum())} launches start before they were launched, by their clocks"
        notes.append(f"{text}; they count to no delay and no queue.")
    sound = first[~wrong]
    launched, kernels = (Counter(each.tolist()) for each in (keys[first], keys))
    api = first[own.call[first] != NOT_RECORDED]
    found = summarize(keys[api], own.call[api])
    times = _by_key(found.group, found.total, found.p50, found.p95) + _delays(own, keys, sound)
    queues = _queues(spans, streams[0], stream[sound], own.launch[sound], own.start[sound])
    rows: list[tuple[Cell, ...]] = []
    for key in sorted(kernels, key=lambda key: (key // len(titles), -launched[key], key)):
        place, code = divmod(key, len(titles))
        head = (None if each == NOT_RECORDED else each for each in streams[:, place].tolist())
        count = None if code == _NOT_RECORDED else launched[key]
        values = (column.get(key) for column in (kernels, *times))
        rows.append((*head, titles[code], count, *values, *queues.get(place, (None,) * 4)))
    return rows


def _titles(spans: Spans, work: _Launched, notes: list[str]) -> tuple[list[str], Int64s]:
    """Return titles of calls, and for each row that of its launch: the call's name if known."""
    title = np.where(work.replay != NO_REPLAY, 1, np.where(work.is_copy, 2, 0))
    names: Sequence[str] = ()
    if (table := spans.try_table("calls", notes)) is not None:
        code, names = table.texts("name")
        call = np.append(code, -1)[launch_calls(table, work.rank, work.launch, work.call)]
        title = np.where(call < 0, title, call + len(_TITLES))
    return [*_TITLES, *names], np.where(work.launch == NOT_RECORDED, _NOT_RECORDED, title)


def _distinct(*columns: Int64s) -> tuple[Int64s, Int64s]:
    """Return the distinct rows, ascending, one column each, and which of them each row is."""
    order = np.lexsort(columns[::-1])
    is_new = differs(*(column[order] for column in columns))
    code = np.empty(len(order), np.int64)
    code[order] = np.cumsum(is_new) - 1
    return np.stack([column[order[is_new]] for column in columns]), code


def first_of_launches(launch: Int64s, replay: Int64s, start: Int64s) -> Int64s:
    """Return one row per launch that was recorded: of a graph replay the first to start."""
    rows = np.flatnonzero(launch != NOT_RECORDED)
    replayed = replay[rows] != NO_REPLAY
    if not replayed.any():
        return rows
    alone, many = rows[~replayed], rows[replayed]
    many = many[np.lexsort((start[many], replay[many]))]
    return np.sort(np.append(alone, many[differs(replay[many])]))


def queue_depths(owner: Int64s, launch: Int64s, start: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return whose queue changes, when, and how many launches then wait in it for their start.

    Args:
        owner: Whose queue each launch is in, such as a stream or a rank.
        launch: When it was launched.
        start: When its work started, no earlier.

    Example::

        >>> [part.tolist() for part in queue_depths(*np.array([[0, 0], [1, 2], [5, 5]]))]
        [[0, 0, 0], [1, 2, 5], [1, 2, 0]]
    """
    owners, times = np.tile(owner, 2), np.append(launch, start)
    order = np.lexsort((times, owners))
    owners, times = owners[order], times[order]
    change = np.repeat([1, -1], len(launch))[order]
    last_at_once = np.append(differs(owners, times)[1:], True)[: len(order)]
    return owners[last_at_once], times[last_at_once], np.cumsum(change)[last_at_once]


def _delays(work: _Launched, keys: Int64s, rows: Int64s) -> list[dict[int, int]]:
    """Return p50, p95 and maximum of delays, and kernels shorter than launch, by key."""
    keys, delay = keys[rows], work.start[rows] - work.launch[rows]
    found = summarize(keys, delay)
    call = work.call[rows]
    is_kernel = (call != NOT_RECORDED) & (work.replay[rows] == NO_REPLAY) & ~work.is_copy[rows]
    shorter = summarize(keys[is_kernel], (work.duration[rows] < call)[is_kernel].astype(np.int64))
    delays = _by_key(found.group, found.p50, found.p95, found.max)
    return delays + _by_key(shorter.group, shorter.total)


def _by_key(keys: Int64s, *columns: Int64s) -> list[dict[int, int]]:
    return [dict(zip(keys.tolist(), column.tolist(), strict=True)) for column in columns]


def _queues(
    spans: Spans, ranks: Int64s, stream: Int64s, launch: Int64s, start: Int64s
) -> dict[int, tuple[Cell, ...]]:
    """Return maximum and mean depth of each stream's queue, and shares of time empty and full.

    Stream, launch and start are those of each launch; ``ranks`` of each stream, ascending.
    """
    streams, times, depth = queue_depths(stream, launch, start)
    captured = _captured_time(spans, ranks[streams], times)
    lasted = np.diff(captured, append=captured[-1:]) * (np.diff(streams, append=-1) == 0)
    parts = rows_by_group(streams)
    return {int(streams[at[0]]): _queue(depth[at], lasted[at]) for at in parts}


def _queue(depth: Int64s, lasted: Int64s) -> tuple[Cell, ...]:
    whole, most = int(lasted.sum()), int(depth[lasted > 0].max(initial=0))
    if not whole:
        return most, None, None, None
    empty, full = (int(lasted[which].sum()) for which in (depth == 0, depth >= FULL))
    return most, int(depth @ lasted) / whole, empty / whole, full / whole


def _captured_time(spans: Spans, ranks: Int64s, times: Int64s) -> Int64s:
    """Return each time without the time between captures of its rank; ranks ascend."""
    captured = times.copy()
    for rank in np.unique(ranks).tolist():
        closed = np.sort(spans.start_ns[spans.rows(kind="region", name=CLOSED, rank=rank)])
        opened = np.sort(spans.end_ns[spans.rows(kind="region", name=OPENED, rank=rank)])
        at, first = np.unique(np.searchsorted(opened, closed), return_index=True)
        again = at < len(opened)  # No capture opens again after the last one.
        own = slice(*np.searchsorted(ranks, [rank, rank + 1]).tolist())
        captured[own] -= covered_before(closed[first[again]], opened[at[again]], times[own])
    return captured
