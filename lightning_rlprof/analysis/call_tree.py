"""Calls of the host as a tree: what each lies in, its own time, and what was open at a moment."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.analysis.partition import paint
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Table

__all__ = [
    "NONE",
    "UNKNOWN",
    "CallTree",
    "Launched",
    "Paths",
    "call_tree",
    "drivers",
    "enclosing",
    "launched",
]

NONE = -1
"""Stands for a call, a path or a name that there is not."""

UNKNOWN = -(2**63)
"""Stands for a number that is not known."""

# Before torch 2.3 start and duration were cut to microseconds, each by itself: a call may seem to
# end one microsecond after the call that it lies in.
_SLACK_NS = 1_000


@dataclass(frozen=True, eq=False)
class Paths:
    """Distinct stacks of names; an outer one comes before those inside it.

    ``of`` is the path of each call; of each path, ``parent`` is the one around it, `NONE` at the
    top, ``name`` the code of its innermost name, and ``depth`` how many are around it.
    """

    of: Int64s
    parent: Int64s
    name: Int64s
    depth: Int64s

    def sum(self, calls: Int64s, values: Int64s) -> Int64s:
        """Return the sum for each path over values that belong to calls."""
        return _sums(self.of[calls], values, len(self.parent))

    def with_inner(self, values: Int64s) -> Int64s:
        """Return for each path its value and those of all paths inside it."""
        total = values.copy()
        heads = np.searchsorted(self.depth, np.arange(int(self.depth.max(initial=0)) + 2)).tolist()
        for level in range(len(heads) - 2, 0, -1):
            rows = slice(heads[level], heads[level + 1])
            np.add.at(total, self.parent[rows], total[rows])
        return total

    @cached_property
    def outermost(self) -> Int64s:
        """Paths in which no path of the same name lies around: each name counts once in those."""
        repeated = np.zeros(len(self.parent), dtype=bool)
        rows, around = np.arange(len(self.parent)), self.parent
        while len(rows):
            inside = around >= 0
            rows, around = rows[inside], around[inside]
            repeated[rows] |= self.name[rows] == self.name[around]
            around = self.parent[around]
        return np.flatnonzero(~repeated)


class Launched(NamedTuple):
    """Kernels and copies, and what is known of their launches; `UNKNOWN` where nothing is."""

    rank: Int64s
    thread: Int64s
    launch_ns: Int64s
    duration_ns: Int64s


@dataclass(frozen=True, eq=False)
class CallTree:
    """Calls of one kind by rank, thread and start, outer ones first.

    Attributes:
        names: Distinct names; ``name`` holds indices into it.
        threads: Distinct identities of threads, ascending.
        lane: One number per thread of a rank, see `lane_of`.
        id: Its number in its rank.
        forward: For a backward operator the number of its forward operator, else `NONE`.
        around: Index of the innermost call that it lies in, `NONE` at the top.
    """

    names: tuple[str, ...]
    threads: Int64s
    rank: Int64s
    lane: Int64s
    name: Int64s
    start_ns: Int64s
    end_ns: Int64s
    id: Int64s
    forward: Int64s
    around: Int64s

    def lane_of(self, rank: Int64s, thread: Int64s) -> Int64s:
        """Return the lane of threads of ranks, `NONE` for threads without calls."""
        at = np.searchsorted(self.threads, thread)
        there = np.append(self.threads, UNKNOWN)[at] == thread
        return np.where(there & (thread != UNKNOWN), rank * len(self.threads) + at, NONE)

    def at(self, lane: Int64s, time_ns: Int64s) -> Int64s:
        """Return the innermost call open on each lane at a moment, `NONE` where none is."""
        times, keys, owner = self._cells
        code = np.searchsorted(times, time_ns, "right") - 1
        cell = np.searchsorted(keys, lane * len(times) + code, "right") - 1
        there = (lane >= 0) & (code >= 0) & (cell >= 0)
        there &= np.append(keys, -1)[cell] // max(len(times), 1) == lane
        return np.where(there, np.append(owner, NONE)[cell], NONE)

    def launching(self, kernels: Launched) -> Int64s:
        """Return the innermost call open on its thread when each kernel was launched."""
        lane = self.lane_of(kernels.rank, kernels.thread)
        return self.at(np.where(kernels.launch_ns == UNKNOWN, NONE, lane), kernels.launch_ns)

    def own_ns(self) -> Int64s:
        """Return how long each call was the innermost one.

        What two calls of a thread share belongs to the later one, so that the sum is exactly the
        time in which a call was open, summed over threads.
        """
        times, keys, owner = self._cells
        inner = np.flatnonzero(owner >= 0)  # the last cell of a lane has no owner
        when = times[keys % max(len(times), 1)]
        lasted = when[inner + 1] - when[inner]
        return _sums(owner[inner], lasted, len(self.start_ns))

    def forwards(self) -> Int64s:
        """Return for each call the index of its forward operator, `NONE` where it has none."""
        width = int(self.id.max(initial=0)) + 1
        keys = self.rank * width + self.id
        order = np.argsort(keys, kind="stable")
        wanted = self.rank * width + self.forward
        at = np.searchsorted(keys[order], wanted)
        there = np.append(keys[order], UNKNOWN)[at] == wanted
        there &= (self.forward >= 0) & (self.forward < width)
        return np.where(there, np.append(order, NONE)[at], NONE)

    @cached_property
    def paths(self) -> Paths:
        """The stack of names that each call lies in, each distinct stack once."""
        depth = _depth(self.around)
        order = np.argsort(depth, kind="stable")
        heads = np.searchsorted(depth[order], np.arange(int(depth.max(initial=-1)) + 2))
        of, width, count = np.full(len(depth) + 1, NONE), len(self.names), 0  # the last stays
        keys: list[Int64s] = [np.empty(0, np.int64)]
        for first, last in zip(heads[:-1].tolist(), heads[1:].tolist(), strict=True):
            rows = order[first:last]
            stacks = (of[self.around[rows]] + 1) * width + self.name[rows]
            own = _distinct(stacks)
            of[rows] = np.searchsorted(own, stacks) + count
            count += len(own)
            keys.append(own)
        joined, levels = np.concatenate(keys), [len(own) for own in keys[1:]]
        parent, name = joined // max(width, 1) - 1, joined % max(width, 1)
        return Paths(of[:-1], parent, name, np.repeat(np.arange(len(levels)), levels))

    @cached_property
    def _cells(self) -> tuple[Int64s, Int64s, Int64s]:
        """Distinct times, cells as lane and index of a time, and the innermost call of each."""
        count = len(self.start_ns)
        both = np.concatenate([self.start_ns, self.end_ns])
        times = _distinct(both)
        every = np.append(self.lane, self.lane) * len(times) + np.searchsorted(times, both)
        place = np.searchsorted(keys := _distinct(every), every)
        return times, keys, paint(place[:count], place[count:], len(keys))


def call_tree(table: Table, kind: str, ranks: Collection[int] | None = None) -> CallTree:
    """Return the calls of one kind in a table ``calls``, of some ranks or of all (None).

    A call lies in the innermost one of its kind and thread that holds it by time.
    """
    rows = _rows(table, kind, ranks)
    rank, start = numbers(table, "rank")[rows], numbers(table, "start")[rows]
    end = start + numbers(table, "duration")[rows]
    threads = _distinct(thread := numbers(table, "thread", UNKNOWN)[rows])
    lane = rank * len(threads) + np.searchsorted(threads, thread)
    order = np.lexsort((-end, start, lane))
    rows, lane, start, end = (each[order] for each in (rows, lane, start, end))
    name, names = texts(table, "name")
    return CallTree(
        (*names, ""),  # the last one stands for a name that is not known
        threads,
        rank[order],
        lane,
        np.where(name < 0, len(names), name)[rows],
        start,
        end,
        numbers(table, "id", NONE)[rows],
        numbers(table, "forward", NONE)[rows],
        enclosing(lane, start, end),
    )


def _rows(table: Table, kind: str, ranks: Collection[int] | None) -> Int64s:
    codes, kinds = texts(table, "kind")
    keep = codes == (kinds.index(kind) if kind in kinds else len(kinds))
    if ranks is not None:
        keep &= np.isin(numbers(table, "rank"), list(ranks))
    return np.flatnonzero(keep)


def launched(
    spans: Spans, calls: Table, ranks: Collection[int] | None, remarks: list[str]
) -> Launched | None:
    """Return the run's kernels and copies, None where it has none.

    The thread of a copy is that of the driver's call in the table ``calls`` that launched it.
    """
    parts = []
    for name in ("kernels", "memcpy"):
        table = read(spans, name, remarks)
        if table is None or not len(table.rows):
            continue
        columns = ("rank", "launch", "launch duration", "duration")
        rank, launch, took, duration = (numbers(table, each, UNKNOWN) for each in columns)
        thread = numbers(table if name == "kernels" else calls, "thread", UNKNOWN)
        if name == "memcpy":
            thread = np.append(thread, UNKNOWN)[drivers(calls, rank, launch, took)]
        keep = slice(None) if ranks is None else np.isin(rank, list(ranks))
        parts.append([column[keep] for column in (rank, thread, launch, duration)])
    return Launched(*map(np.concatenate, zip(*parts, strict=True))) if parts else None


def drivers(calls: Table, rank: Int64s, launch_ns: Int64s, call_ns: Int64s) -> Int64s:
    """Return the row of the driver's call of each launch's rank, start and length, else `NONE`."""
    rows = _rows(calls, "runtime", None)
    own = [numbers(calls, each)[rows] for each in ("rank", "start", "duration")]
    pairs = zip(own, (rank, launch_ns, call_ns), strict=True)
    columns = [np.concatenate(pair) for pair in pairs]
    order = np.lexsort(columns)
    alike = np.all([column[order][1:] == column[order][:-1] for column in columns], axis=0)
    place = np.arange(len(order))
    head = np.maximum.accumulate(np.where(np.append(False, alike)[: len(order)], 0, place))
    last = np.maximum.accumulate(np.where(order < len(rows), place, NONE))  # calls come first
    found = np.full(len(order), NONE)
    found[order] = np.where(last >= head, np.append(order, NONE)[last], NONE)
    call: Int64s = np.append(rows, NONE)[found[len(rows) :]]
    return call


def enclosing(lane: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return for each call the last one before it that holds it, `NONE` where none does.

    A call that ends a microsecond after another one still lies in it. They come by lane, start, and
    end downwards. Each looks at the call before it, then at what that one has found so far: all
    leap at once, so that n calls take log n rounds, and as many more as calls are nested.

    Example::

        >>> start, end = np.array([0, 2, 3, 6]), np.array([9, 5, 4, 8])
        >>> enclosing(np.zeros(4, int), start, end).tolist()
        [-1, 0, 1, 0]
    """
    around = np.arange(-1, len(lane) - 1)
    around[:1] = NONE
    around[1:][lane[1:] != lane[:-1]] = NONE
    rows = np.flatnonzero(around >= 0)
    while len(rows):
        outer = around[rows]
        out = (end[outer] <= start[rows]) | (end[rows] > end[outer] + _SLACK_NS)
        rows, outer = rows[out], outer[out]
        around[rows] = around[outer]
        rows = rows[around[rows] >= 0]
    return around


def _depth(around: Int64s) -> Int64s:
    """Return how many calls are around each."""
    depth, leap = (around >= 0).astype(np.int64), around
    while len(rows := np.flatnonzero(leap >= 0)):
        depth[rows] += depth[leap[rows]]
        leap = np.where(leap >= 0, np.append(leap, NONE)[leap], NONE)
    return depth


def _distinct(values: Int64s) -> Int64s:
    ordered = np.sort(values)  # np.unique hashes, three times as slow
    return ordered[np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))]


def _sums(groups: Int64s, values: Int64s, count: int) -> Int64s:
    found = np.zeros(count, dtype=np.int64)
    np.add.at(found, groups, values)
    return found
