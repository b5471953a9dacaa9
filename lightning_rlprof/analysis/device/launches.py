"""How the host feeds each stream: what launches cost, how long they wait, how long the queue is.

Launches that have no kernel: what a device tool lost, or what went into a graph.
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.operators.call_tree import UNKNOWN, drivers
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.analysis.step_selection import CLOSED, OPENED
from lightning_rlprof.tables.arrays import Int64s, differs
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

FULL = 1_000
"""So many launches in the queue of a stream are a full queue, at which launching waits.

CUDA documents no number. Measured by users: from about 1,000 on, each launch takes as long as a
kernel (forums.developer.nvidia.com/t/68937); HTA assumes 1,024.
"""

_COLUMNS = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("stream", "count"),
    Column("call", "text"),
    Column("launches", "count"),
    Column("kernels", "count"),
    Column("API time total", "duration", "ns"),
    Column("API time p50", "duration", "ns"),
    Column("API time p95", "duration", "ns"),
    Column("delay p50", "duration", "ns"),
    Column("delay p95", "duration", "ns"),
    Column("delay max", "duration", "ns"),
    Column("outliers", "count"),
    Column("shorter than launch", "count"),
    Column("queue max depth", "count"),
    Column("queue mean depth", "number", "launches"),
    Column("queue empty %", "share"),
    Column("queue full %", "share"),
)
_TITLES = ("launch", "graph replay", "copy", "not recorded")  # of calls without a name
_LOST = len(_TITLES) - 1


class _Work(NamedTuple):
    """Kernels and copies as columns; `UNKNOWN` stands for what is not known."""

    rank: Int64s
    device: Int64s
    stream: Int64s
    start: Int64s
    duration: Int64s
    launch: Int64s
    call: Int64s
    graph: Int64s
    copy: Int64s


def launches(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Tell for each stream and driver call what launching costs, and how long its queue was.

    A delay lasts from the beginning of the call to the start on the device. ``late`` are delays
    beyond ``Q3 + 3 * (Q3 - Q1)`` of those in their row (Tukey 1977, "far out"). ``short`` are
    kernels that ran for less time than the call took that launched them: while there are only such,
    the device waits for the host. A replay of a graph is one launch of many kernels, which starts
    with the first of them. Kernels of which no launch is known have a row ``not recorded``.

    The queue of a stream holds what is launched and has not started; it is the same in all rows of
    the stream, and counted from its first launch to its last start, but not between captures.

    Args:
        spans: The run.
        ranks: Only these; None for all.
    """
    remarks: list[str] = []
    work = _read(spans, ranks, remarks)
    if not len(work.rank):
        of = "" if ranks is None else f" of ranks {sorted(ranks)}"
        why = "; ".join([f"no device tool recorded kernels{of}", *remarks])
        return Table("launches", _COLUMNS, abstained=why)
    if not (work.launch != UNKNOWN).any():
        return Table("launches", _COLUMNS, abstained="when kernels were launched is not recorded")
    return Table("launches", _COLUMNS, _rows(spans, work, remarks), " ".join(remarks))


def _read(spans: Spans, ranks: Collection[int] | None, remarks: list[str]) -> _Work:
    parts = [_Work(*(np.empty(0, np.int64) for _ in _Work._fields))]
    for name in ("kernels", "memcpy"):
        table = spans.try_table(name, remarks)
        if table is None:
            continue
        there = {column.name for column in table.columns}
        nothing = np.full(len(table.rows), UNKNOWN)
        columns = ("rank", "device", "stream", "start", "duration", "launch", "launch duration")
        found = [
            table.numbers(each, UNKNOWN) if each in there else nothing
            for each in (*columns, "graph")
        ]
        found.append(np.full(len(nothing), int(name == "memcpy")))
        part = _Work(*found)
        keep = slice(None) if ranks is None else np.isin(part.rank, list(ranks))
        parts.append(_Work(*(column[keep] for column in part)))
    return _Work(*map(np.concatenate, zip(*parts, strict=True)))


def _rows(spans: Spans, work: _Work, remarks: list[str]) -> list[tuple[Cell, ...]]:
    """Return a row per stream and call; those of a stream by number of launches."""
    titles, title = _titles(spans, work, remarks)
    streams, stream = _distinct(*work[:3])
    keys = stream * len(titles) + title
    first = _first(work, stream)
    wrong = work.start[first] < work.launch[first]
    if wrong.any():
        text = f"{int(wrong.sum())} launches count to no delay and no queue: they seem to start"
        remarks.append(f"{text} before they were launched.")
    sound = first[~wrong]
    columns = [*_counts(keys, first), *_calls(work, keys, first), *_delays(work, keys, sound)]
    queues = _queues(spans, streams[0], stream[sound], work.launch[sound], work.start[sound])
    rows: list[tuple[Cell, ...]] = []
    for key in np.unique(keys).tolist():
        place, name = divmod(key, len(titles))
        head = (None if each == UNKNOWN else each for each in streams[:, place].tolist())
        cells = (column.get(key) for column in columns)
        rows.append((*head, titles[name], *cells, *queues.get(place, (None,) * 4)))
    return sorted(rows, key=_order)


def _order(row: tuple[Cell, ...]) -> list[int]:
    rank, device, stream, count = (
        each if isinstance(each, int) else -1 for each in (*row[:3], row[4])
    )
    return [rank, device, stream, -count]


def _titles(spans: Spans, work: _Work, remarks: list[str]) -> tuple[list[str], Int64s]:
    """Return titles of calls and that of the call that launched each: its name where it is told."""
    title = np.where(work.copy > 0, 2, np.where(work.graph != UNKNOWN, 1, 0))
    names: Sequence[str] = ()
    table = spans.try_table("calls", remarks)
    if table is not None:
        code, names = table.texts("name")
        own = np.append(code, -1)[drivers(table, work.rank, work.launch, work.call)]
        title = np.where(own < 0, title, own + len(_TITLES))
    return [*_TITLES, *names], np.where(work.launch == UNKNOWN, _LOST, title)


def _distinct(*columns: Int64s) -> tuple[Int64s, Int64s]:
    """Return the distinct rows, ascending, one column each, and which of them each row is."""
    order = np.lexsort(columns[::-1])
    heads = differs(*(column[order] for column in columns))
    code = np.empty(len(order), np.int64)
    code[order] = np.cumsum(heads) - 1
    return np.stack([column[order[heads]] for column in columns]), code


def _first(work: _Work, stream: Int64s) -> Int64s:
    """Return the rows that stand for launches: the first to start of each replay on a stream."""
    rows = np.flatnonzero(work.launch != UNKNOWN)
    replayed = work.graph[rows] != UNKNOWN
    alone, many = rows[~replayed], rows[replayed]
    many = many[np.lexsort((work.start[many], work.graph[many], stream[many]))]
    heads = differs(stream[many], work.graph[many])
    return np.sort(np.append(alone, many[heads]))


def _counts(keys: Int64s, first: Int64s) -> list[dict[int, int]]:
    """Return launches and kernels by key."""
    return [
        dict(zip(*map(np.ndarray.tolist, np.unique(each, return_counts=True)), strict=True))
        for each in (keys[first], keys)
    ]


def _calls(work: _Work, keys: Int64s, first: Int64s) -> list[dict[int, int]]:
    """Return total, p50 and p95 of the calls' durations by key."""
    rows = first[work.call[first] != UNKNOWN]
    found = summarize(keys[rows], work.call[rows])
    return [_by(found.group, each) for each in (found.total, found.p50, found.p95)]


def _delays(work: _Work, keys: Int64s, rows: Int64s) -> list[dict[int, int]]:
    """Return p50, p95 and the largest of delays by key, how many are late, and short kernels."""
    delay = work.start[rows] - work.launch[rows]
    found = summarize(keys[rows], delay)
    low, high = _quartiles(keys[rows], delay)
    late = delay > (high + 3 * (high - low))[np.searchsorted(found.group, keys[rows])]
    told = (work.call[rows] != UNKNOWN) & (work.graph[rows] == UNKNOWN) & (work.copy[rows] == 0)
    short = rows[told & (work.duration[rows] < work.call[rows])]
    group, place = np.unique(keys[rows[told]]), len(found.group)
    counts = np.bincount(np.searchsorted(group, keys[short]), minlength=len(group))
    sums = np.bincount(np.searchsorted(found.group, keys[rows[late]]), minlength=place)
    columns = (found.p50, found.p95, found.max, sums)
    return [*(_by(found.group, each) for each in columns), _by(group, counts)]


def _quartiles(keys: Int64s, values: Int64s) -> tuple[Int64s, Int64s]:
    """Return the first and third quartile of each key, ascending, by nearest rank."""
    order = np.lexsort((values, keys))
    heads = np.flatnonzero(differs(keys[order]))
    count = np.diff(heads, append=len(order))
    low, high = (values[order[heads + (count * part + 3) // 4 - 1]] for part in (1, 3))
    return low, high


def _by(keys: Int64s, values: Int64s) -> dict[int, int]:
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def _queues(
    spans: Spans, ranks: Int64s, stream: Int64s, launch: Int64s, start: Int64s
) -> dict[int, tuple[Cell, ...]]:
    """Return the most, the mean, and the shares of time empty and full of each stream's queue."""
    streams = np.concatenate([stream, stream])
    times = np.concatenate([launch, start])
    order = np.lexsort((times, streams))
    streams, times = streams[order], times[order]
    heads = np.flatnonzero(differs(streams, times))
    step = np.repeat([1, -1], len(launch))[order]
    length = np.cumsum(np.add.reduceat(step, heads)) if len(heads) else step
    streams, times = streams[heads], times[heads]
    seen = _seen(spans, ranks[streams], times)
    lasted = np.diff(seen, append=seen[-1:]) * (np.diff(streams, append=-1) == 0)
    found: dict[int, tuple[Cell, ...]] = {}
    for each in streams[differs(streams)].tolist():
        own = slice(*np.searchsorted(streams, [each, each + 1]).tolist())
        found[each] = _queue(length[own], lasted[own])
    return found


def _queue(length: Int64s, lasted: Int64s) -> tuple[Cell, ...]:
    whole, most = int(lasted.sum()), int(length[lasted > 0].max(initial=0))
    if not whole:
        return most, None, None, None
    empty, full = (int(lasted[which].sum()) for which in (length == 0, length >= FULL))
    return most, int(length @ lasted) / whole, empty / whole, full / whole


def _seen(spans: Spans, ranks: Int64s, times: Int64s) -> Int64s:
    """Return how much of the time before each moment was not between two captures of its rank.

    Ranks ascend.
    """
    seen = times.copy()
    for rank in ranks[differs(ranks)].tolist():
        closed = np.sort(spans.start_ns[spans.rows(kind="region", name=CLOSED, rank=rank)])
        opened = np.sort(spans.end_ns[spans.rows(kind="region", name=OPENED, rank=rank)])
        again = np.append(opened, UNKNOWN)[np.searchsorted(opened, closed)]
        again, first = np.unique(again, return_index=True)
        closed, again = closed[first[again != UNKNOWN]], again[again != UNKNOWN]
        if not len(closed):
            continue
        own = slice(*np.searchsorted(ranks, [rank, rank + 1]).tolist())
        before = np.append(0, np.cumsum(again - closed))
        at = np.searchsorted(closed, times[own], "right")
        over = np.maximum(np.append(again, UNKNOWN)[at - 1] - times[own], 0) * (at > 0)
        seen[own] -= before[at] - over
    return seen


LOST = 0.05
"""Share of the launches; the last ones of a capture have no kernel even where nothing was lost."""

_LAUNCH = re.compile(r"(cuda|cu|hip)\w*Launch(Cooperative)?Kernel\w*")
_UNKNOWN = -1


class Unpaired(NamedTuple):
    """How many launches of kernels were recorded, and how many of these have no kernel."""

    launches: int
    alone: int

    @property
    def lossy(self) -> bool:
        """Whether so many have none that what looks idle may have been busy: above `LOST`."""
        return self.alone > LOST * self.launches


def unpaired(spans: Spans) -> Unpaired | None:
    """Count the calls that launch one kernel each, and those of which no kernel was recorded.

    A kernel and its launch are two records: in a whole trace each launch has its kernel, but for
    the last ones of a capture and those that a graph captured. None where calls or kernels were
    not recorded.
    """
    calls, kernels = (spans.try_table(name, []) for name in ("calls", "kernels"))
    if calls is None or kernels is None:
        return None
    code, names = calls.texts("name")
    launches = np.array([*(_LAUNCH.fullmatch(name) is not None for name in names), False])[code]
    if not launches.any():
        return None
    rank, start = (calls.numbers(name)[launches] for name in ("rank", "start"))
    of, launch = kernels.numbers("rank"), kernels.numbers("launch", _UNKNOWN)
    alone = 0
    for each in np.unique(rank).tolist():
        alone += int(np.count_nonzero(~_among(start[rank == each], launch[of == each])))
    return Unpaired(len(start), alone)


def _among(values: Int64s, others: Int64s) -> npt.NDArray[np.bool_]:
    """Tell which values are among others; quick where both come by time, as they do."""
    others = np.sort(others, kind="stable")
    place = np.searchsorted(others, values)
    found: npt.NDArray[np.bool_] = np.append(others, _UNKNOWN)[place] == values
    return found
