"""Calls of the host as a tree: what each lies in, its own time, and what was open at a moment."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, differs
from lightning_rlprof.tables.interval_nesting import (
    NONE,
    alone,
    depths,
    enclosing,
    holding,
    open_at,
)
from lightning_rlprof.tables.intervals import edges
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

UNATTRIBUTED = "unattributed"
"""Names the row of the device's time that no call launched."""

UNKNOWN = -(2**63)
"""Stands for a number that is not known."""

_DEEPEST = 1_000  # Python's own limit; real models nest some dozens


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
        row: Row of the table.
        threads: Distinct identities of threads, ascending.
        lane: One number per thread of a rank, see `lane_of`.
        id: Its number in its rank.
        forward: For a backward operator the number of its forward operator, else `NONE`.
        around: Index of the innermost call that it lies in, `NONE` at the top.
    """

    names: tuple[str, ...]
    row: Int64s
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
        intervals = self.lane, self.start_ns, self.end_ns, self._holder
        return open_at(*intervals, lane, time_ns)

    def launching(self, kernels: Launched) -> Int64s:
        """Return the innermost call open on its thread when each kernel was launched."""
        lane = self.lane_of(kernels.rank, kernels.thread)
        return self.at(np.where(kernels.launch_ns == UNKNOWN, NONE, lane), kernels.launch_ns)

    def own_ns(self) -> Int64s:
        """Return how long each call was the innermost one.

        What two calls of a thread share belongs to the later one, so that the sum is exactly the
        time in which a call was open, summed over threads.
        """
        return alone(self.lane, self.start_ns, self.end_ns, self._holder)

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

    @property
    def too_deep(self) -> str:
        """Why its stacks are not told, "" where they are: they would grow as the square."""
        deep = int(depths(self.around).max(initial=0)) + 1
        return f"calls lie in one another {deep:,} deep, beyond {_DEEPEST:,}" * (deep > _DEEPEST)

    @cached_property
    def paths(self) -> Paths:
        """The stack of names that each call lies in, each distinct stack once."""
        depth = depths(self.around)
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
    def _holder(self) -> Int64s:
        """The last call before each that ends no earlier.

        The same as ``around`` but where a call ends a little later than the one that it lies in.
        """
        return holding(self.around, self.start_ns, self.end_ns)


def call_tree(table: Table, kind: str, ranks: Collection[int] | None = None) -> CallTree:
    """Return the calls of one kind in a table ``calls``, of some ranks or of all (None).

    A call lies in the innermost one of its kind and thread that holds it by time.
    """
    rows = _rows(table, kind, ranks)
    rank, start = table.numbers("rank")[rows], table.numbers("start")[rows]
    end = start + table.numbers("duration")[rows]
    threads = _distinct(thread := table.numbers("thread", UNKNOWN)[rows])
    lane = rank * len(threads) + np.searchsorted(threads, thread)
    if not _in_order(lane, start, -end):
        order = np.lexsort((-end, start, lane))
        rows, rank, lane, start, end = (each[order] for each in (rows, rank, lane, start, end))
    code, names = table.texts("name")
    name = code[rows]
    return CallTree(
        (*names, ""),  # the last one stands for a name that is not known
        rows,
        threads,
        rank,
        lane,
        np.where(name < 0, len(names), name),
        start,
        end,
        table.numbers("id", NONE)[rows],
        table.numbers("forward", NONE)[rows],
        enclosing(lane, start, end),
    )


def _in_order(*columns: Int64s) -> bool:
    """Tell whether rows come by the first column, those alike in it by the second, and so on."""
    rows = np.arange(1, len(columns[0]))
    for column in columns:
        own, before = column[rows], column[rows - 1]
        if (own < before).any():
            return False
        rows = rows[own == before]
    return True


def _rows(table: Table, kind: str, ranks: Collection[int] | None) -> Int64s:
    codes, kinds = table.texts("kind")
    keep = codes == (kinds.index(kind) if kind in kinds else len(kinds))
    if ranks is not None:
        keep &= np.isin(table.numbers("rank"), list(ranks))
    return np.flatnonzero(keep)


def launched(
    spans: Spans, calls: Table, ranks: Collection[int] | None, remarks: list[str]
) -> Launched | None:
    """Return the run's kernels and copies, None where it has none.

    Where a table of copies tells no thread, it is that of the driver's call in the table ``calls``
    that launched each.
    """
    parts = []
    for name in ("kernels", "memcpy"):
        table = spans.try_table(name, remarks)
        if table is None or not len(table.rows):
            continue
        columns = ("rank", "launch", "launch duration", "duration")
        rank, launch, took, duration = (table.numbers(each, UNKNOWN) for each in columns)
        told = any(column.name == "thread" for column in table.columns)
        thread = (table if told else calls).numbers("thread", UNKNOWN)
        if not told:
            thread = np.append(thread, UNKNOWN)[drivers(calls, rank, launch, took)]
        keep = slice(None) if ranks is None else np.isin(rank, list(ranks))
        parts.append([column[keep] for column in (rank, thread, launch, duration)])
    return Launched(*map(np.concatenate, zip(*parts, strict=True))) if parts else None


def drivers(calls: Table, rank: Int64s, launch_ns: Int64s, call_ns: Int64s) -> Int64s:
    """Return the row of the driver's call of each launch's rank, start and length, else `NONE`."""
    rows = _rows(calls, "runtime", None)
    own = [calls.numbers(each)[rows] for each in ("start", "rank", "duration")]
    asked = [launch_ns, rank, call_ns]
    order = np.argsort(own[0], kind="stable")
    at, last = (np.searchsorted(own[0], launch_ns, side, order) for side in ("left", "right"))
    found = np.full(len(at), NONE)
    lone, many = np.flatnonzero(last == at + 1), np.flatnonzero(last > at + 1)
    place = order[at[lone]]
    alike = (own[1][place] == rank[lone]) & (own[2][place] == call_ns[lone])
    found[lone] = np.where(alike, place, NONE)
    if len(many):  # of several calls that began at once, on other ranks or threads
        same = np.diff(own[0][order]) == 0
        twins = order[np.append(same, False) | np.append(False, same)]
        pairs = zip(own, asked, strict=True)
        found[many] = np.append(twins, NONE)[_last_alike((a[twins], b[many]) for a, b in pairs)]
    call: Int64s = np.append(rows, NONE)[found]
    return call


def _last_alike(pairs: Iterable[tuple[Int64s, Int64s]]) -> Int64s:
    """Return the last of our rows that equals each row asked for, `NONE` without; by columns."""
    ours, asked = zip(*pairs, strict=True)
    columns, count = [np.append(*pair) for pair in zip(ours, asked, strict=True)], len(ours[0])
    order = np.lexsort(columns)
    place = np.arange(len(order))
    head = np.maximum.accumulate(np.where(differs(*(each[order] for each in columns)), place, 0))
    last = np.maximum.accumulate(np.where(order < count, place, NONE))  # ours come first
    found = np.full(len(order), NONE)
    found[order] = np.where(last >= head, np.append(order, NONE)[last], NONE)
    return found[count:]


def _distinct(values: Int64s) -> Int64s:
    return edges(values[differs(values)])


def _sums(groups: Int64s, values: Int64s, count: int) -> Int64s:
    found = np.zeros(count, dtype=np.int64)
    np.add.at(found, groups, values)
    return found
