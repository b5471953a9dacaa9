"""Host calls as a tree: what each is nested in, its self time, and which one launched a kernel."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import NOT_RECORDED, DeviceWork
from lightning_rlprof.tables.arrays import Int64s, group_starts
from lightning_rlprof.tables.intervals import (
    NONE,
    alone,
    depths,
    enclosing,
    holding,
    open_at,
)
from lightning_rlprof.tables.table import Table

UNATTRIBUTED = "unattributed"
"""Names the row of device time that no call launched."""

_DEEPEST = 1_000  # Python's own limit; real models nest some dozens


class Paths(NamedTuple):
    """Distinct stacks of names; an outer one comes before those inside it.

    Attributes:
        of: Path of each call.
        parent: Of each path the one around it, `NONE` at the top.
        name: Code of its innermost name.
    """

    of: Int64s
    parent: Int64s
    name: Int64s


@dataclass(frozen=True, eq=False)
class CallTree:
    """Calls of one kind by rank, thread and start, outer ones first.

    Attributes:
        names: Distinct names; ``name`` contains indices into it.
        row: Row of the table.
        threads: Distinct identities of threads, ascending.
        lane: One number per thread of a rank, see `thread_lanes`.
        id: Its number in its rank.
        forward: For a backward operator the number of its forward operator, else `NONE`.
        around: Index of the innermost call that it is nested in, `NONE` at the top.
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

    def at(self, lane: Int64s, time_ns: Int64s) -> Int64s:
        """Return the innermost call open on each lane at a moment, else `NONE`."""
        return open_at(self.lane, self.start_ns, self.end_ns, self._holder, lane, time_ns)

    def launching(self, work: DeviceWork, calls: Table) -> Int64s:
        """Return the innermost call open on its thread when each kernel or copy was launched.

        Copies without threads get those of the driver calls in the table ``calls``.
        """
        launch = work.numbers("launch")
        lane = thread_lanes(self.threads, work.rank, work.launching_threads(calls))
        return self.at(np.where(launch == NOT_RECORDED, NONE, lane), launch)

    def self_ns(self) -> Int64s:
        """Return how long each call was the innermost one.

        Time that two overlapping calls of a thread share counts to the later one. So the sum is
        exactly the time in which a call was open, summed over threads.
        """
        return alone(self.lane, self.start_ns, self.end_ns, self._holder)

    def forwards(self) -> Int64s:
        """Return for each call the index of its forward operator, else `NONE`."""
        width = int(self.id.max(initial=0)) + 1
        keys = self.rank * width + self.id
        order = np.argsort(keys, kind="stable")
        wanted = self.rank * width + self.forward
        at = np.searchsorted(keys[order], wanted)
        there = np.append(keys[order], NOT_RECORDED)[at] == wanted
        there &= (self.forward >= 0) & (self.forward < width)
        return np.where(there, np.append(order, NONE)[at], NONE)

    @property
    def too_deep(self) -> str:
        """Why there are no stacks, "" if there are: their size grows as the square of the depth."""
        deep = len(self._levels)
        return f"Calls are nested {deep:,} deep, more than {_DEEPEST:,}." * (deep > _DEEPEST)

    def with_inner(self, values: Int64s) -> Int64s:
        """Return for each call its value and those of all calls inside it."""
        total = values.copy()
        for rows in self._levels[:0:-1]:
            np.add.at(total, self.around[rows], total[rows])
        return total

    def outermost(self) -> Int64s:
        """Return the calls that are not inside one of the same name: recursion counts once."""
        repeated = np.zeros(len(self.name), dtype=bool)
        rows, around = np.arange(len(self.name)), self.around
        while len(rows):
            rows, around = rows[around != NONE], around[around != NONE]
            repeated[rows] |= self.name[rows] == self.name[around]
            around = self.around[around]
        return np.flatnonzero(~repeated)

    def paths(self) -> Paths:
        """Return the stack of names that each call is nested in, each distinct stack once."""
        of, width, count = np.full(len(self.name) + 1, NONE), len(self.names), 0  # the last stays
        levels: list[Int64s] = []
        for rows in self._levels:
            stacks = (of[self.around[rows]] + 1) * width + self.name[rows]
            distinct = np.unique(stacks)
            of[rows] = np.searchsorted(distinct, stacks) + count
            count += len(distinct)
            levels.append(distinct)
        keys = np.concatenate(levels)
        return Paths(of[:-1], keys // width - 1, keys % width)

    @cached_property
    def _levels(self) -> list[Int64s]:
        """The calls at each depth, outer ones first."""
        depth = depths(self.around)
        order = np.argsort(depth, kind="stable")
        return np.split(order, group_starts(depth[order])[1:])

    @cached_property
    def _holder(self) -> Int64s:
        """The last call before each that ends no earlier.

        It differs from ``around`` only if a call ends a little later than the one around it.
        """
        return holding(self.around, self.start_ns, self.end_ns)


def thread_lanes(threads: Int64s, rank: Int64s, thread: Int64s) -> Int64s:
    """Return one number per thread of a rank, `NONE` for a thread that is not among ``threads``."""
    at = np.searchsorted(threads, thread)
    there = np.append(threads, NOT_RECORDED)[at] == thread
    return np.where(there & (thread != NOT_RECORDED), rank * len(threads) + at, NONE)


def call_tree(table: Table, kind: str, ranks: Collection[int] | None = None) -> CallTree:
    """Return the calls of one kind in a table ``calls``, of some ranks or of all (None).

    A call is nested in the innermost one of its kind and thread that contains it in time.
    """
    codes, kinds = table.texts("kind")
    keep = codes == (kinds.index(kind) if kind in kinds else len(kinds))
    if ranks is not None:
        keep &= np.isin(table.numbers("rank"), list(ranks))
    rows = np.flatnonzero(keep)
    rank, start = table.numbers("rank")[rows], table.numbers("start")[rows]
    end = start + table.numbers("duration")[rows]
    threads = np.unique(thread := table.numbers("thread", NOT_RECORDED)[rows])
    lane = rank * len(threads) + np.searchsorted(threads, thread)
    order = np.lexsort((-end, start, lane))
    rows, rank, lane, start, end = (each[order] for each in (rows, rank, lane, start, end))
    code, names = table.texts("name")
    name = code[rows]
    return CallTree(
        (*names, ""),  # the last one is for an unknown name
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
