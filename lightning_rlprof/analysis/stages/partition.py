"""Divide every step among its stages, or "untraced": each instant once, in integer nanoseconds.

An instant belongs to the innermost open stage of the step's own thread: the one that started last
(ties: the greater id). If none is open, the time is untraced.

Most runs are flat: no stage lies in another, and each lies in one step. Then the columns of the
spans are the partition already (`Flat`). Other runs are divided cell by cell (`Segments`).
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import Kind
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import on_few
from lightning_rlprof.tables.spans import Spans

UNTRACED = -1
"""Stands for the time in a step without an open stage."""

_SPARSE = 8  # more possible keys per entry than this: sort instead of counting


@dataclass(frozen=True, eq=False)
class Cells:
    """Exclusive time per step and stage: three columns sorted by step, then name.

    Attributes:
        ns: Time in a step whose innermost stage has a name; never zero.
        columns: ``step`` and ``name`` of each; None if all steps have the same ``names``.
        names: The names in that case; ``ns`` is then a table by step and name.
    """

    ns: Int64s
    columns: tuple[Int64s, Int64s] | None = None
    names: Int64s = field(default_factory=lambda: np.empty(0, np.int64))

    @cached_property
    def step(self) -> Int64s:
        """Index into ``Partition.steps``."""
        each = max(len(self.names), 1)
        return self.columns[0] if self.columns else np.repeat(np.arange(len(self.ns) // each), each)

    @cached_property
    def name(self) -> Int64s:
        """Index into ``Spans.names``, or `UNTRACED`."""
        each = max(len(self.names), 1)
        return self.columns[1] if self.columns else np.tile(self.names, len(self.ns) // each)

    def sums(self, place: Int64s, places: int, names: int) -> Int64s:
        """Sum by place and name, untraced first; ``place`` is the group of each step, or -1."""
        found = np.zeros((places + 1, names + 1), dtype=np.int64)
        if self.columns:
            row = place % (places + 1) * (names + 1) + 1  # steps without a place: last row
            np.add.at(found.ravel(), row[self.step] + self.name, self.ns)
            return found[:places]
        table, some = self.ns.reshape(len(place), -1), place >= 0
        if not some.all():  # the slices below would be many and short
            table, place = table[some], place[some]
        heads = np.flatnonzero(np.diff(place, prepend=-1))
        for first, last in pairwise([*heads.tolist(), len(place)]):
            found[place[first], self.names + 1] += table[first:last].sum(axis=0)
        return found[:places]


def sum_cells(step: Int64s, name: Int64s, ns: Int64s, steps: int, names: int) -> Cells:
    """Sum times by step and name; ``steps`` and ``names`` are how many of these there are."""
    width = names + 1
    keys, size, at = step * width + name + 1, steps * width, None
    if size > _SPARSE * len(keys):  # a table of all keys would not fit into memory
        at, keys = np.unique(keys, return_inverse=True)
        size = len(at)
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, keys, ns)
    some = np.flatnonzero(sums)
    at = some if at is None else at[some]
    return Cells(sums[some], (at // width, at % width - 1))


# The last partition of each run: a report needs the same one ten times.
_LAST: "WeakKeyDictionary[Spans, tuple[tuple[int, ...] | None, Partition]]" = WeakKeyDictionary()


class Segments(NamedTuple):
    """Steps cut into segments without gaps, by thread and time.

    ``step`` is an index into ``Partition.steps``, ``stage`` the row of a stage, or `UNTRACED`.
    Neighbors may belong to the same stage.
    """

    start_ns: Int64s
    end_ns: Int64s
    step: Int64s
    stage: Int64s


class Flat(NamedTuple):
    """Steps and their stages if no stage lies in another, by thread and time; none is empty.

    Of each step: ``begin``, ``end``, the index of its ``first`` stage, and their number ``size``.
    Of each stage: ``step``, an index into ``Partition.steps``, and its row, name, start and end.
    ``each`` is the number of stages per step if all steps have the same ones, once each, in the
    same order; else 0.
    """

    begin: Int64s
    end: Int64s
    first: Int64s
    size: Int64s
    step: Int64s
    rows: Int64s
    name: Int64s
    start_ns: Int64s
    end_ns: Int64s
    each: int


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of a run's steps, by rank and start, and how they are divided."""

    steps: Int64s
    divided: Flat | Segments
    _cells: list[Cells] = field(default_factory=list)

    def cells(self, spans: Spans) -> Cells:
        """Sum the time of each stage in each step; ``spans`` is the run of this partition."""
        if not self._cells:
            own, size = self.divided, (len(self.steps), len(spans.names))
            if isinstance(own, Flat):
                self._cells.append(_flat_cells(own, *size))
            else:
                name = np.append(spans.name, UNTRACED)[own.stage]  # -1 reads the last name
                self._cells.append(sum_cells(own.step, name, own.end_ns - own.start_ns, *size))
        return self._cells[0]

    def stages(self, spans: Spans) -> tuple[Int64s, Int64s]:
        """Return the stages that start in a step of their own thread, and the step of each."""
        if isinstance(self.divided, Flat):
            return self.divided.rows, self.divided.step
        rows = spans.rows(kind="stage")
        step = containing_step(spans, self.steps, rows, spans.thread)
        return rows[step >= 0], step[step >= 0]


def partition(spans: Spans, ranks: Collection[int] | None = None) -> Partition:
    """Divide all steps of some ranks (None: of all); the last result of a run is cached.

    Raises:
        TraceError: A rank is not in the run.
    """
    asked = None if ranks is None else tuple(sorted(set(ranks)))
    last = _LAST.get(spans)
    if last is None or last[0] != asked:
        steps = rows_on_ranks(spans, "step", ranks)
        divided = divide_flat(spans, steps) or divide_nested(spans, steps)
        last = _LAST[spans] = asked, Partition(steps, divided)
    return last[1]


def rows_on_ranks(spans: Spans, kind: Kind, ranks: Collection[int] | None) -> Int64s:
    """Return the rows of a kind on some ranks, None for all.

    Raises:
        TraceError: A rank is not in the run.
    """
    rows = spans.rows(kind=kind)
    if ranks is None:
        return rows
    absent = sorted(set(ranks) - set(spans.ranks))
    if absent:
        have = ", ".join(map(str, spans.ranks))
        raise TraceError(f"rank {absent[0]} is not in this run, which has {have}")
    return rows[np.isin(spans.rank[rows], list(ranks))]


def divide_flat(spans: Spans, steps: Int64s) -> Flat | None:
    """Divide steps by their stages if none lies in another or crosses a step's end, else None."""
    thread, begin, end = spans.thread[steps], spans.start_ns[steps], spans.end_ns[steps]
    rows = spans.rows(kind="stage")
    trains = np.zeros(len(spans.threads), dtype=bool)
    trains[thread] = True
    group = spans.thread[rows]
    if not (trains.all() or trains[group].all()):
        rows, group = rows[trains[group]], group[trains[group]]
    start, stop = spans.start_ns[rows], spans.end_ns[rows]
    if not (_in_a_row(thread, begin, end) and _in_a_row(group, start, stop)):
        return None
    first, last = _within(thread, begin, end, group, start)
    some, later = last > first, first > 0
    before = first[later] - 1
    cut = (group[before] == thread[later]) & (stop[before] > begin[later])
    if cut.any() or (stop[last[some] - 1] > end[some]).any():
        return None
    step, count = _spread(first, last, len(rows)), last - first
    if count.sum() < len(rows):
        inside = step >= 0
        step, rows, start, stop = step[inside], rows[inside], start[inside], stop[inside]
    name = spans.name[rows]
    each = _same(name, count)
    return Flat(begin, end, np.cumsum(count) - count, count, step, rows, name, start, stop, each)


def _same(name: Int64s, count: Int64s) -> int:
    """Return how many stages each step has if all have the same ones, else 0."""
    each = len(name) // max(len(count), 1)
    once = each and (count == each).all() and len(set(name[:each].tolist())) == each
    return each if once and (name.reshape(-1, each) == name[:each]).all() else 0


def _in_a_row(group: Int64s, start: Int64s, end: Int64s) -> bool:
    """Return whether intervals are sorted by group and time, none empty, none overlapping."""
    if (end <= start).any() or (group[1:] < group[:-1]).any():
        return False
    early = np.flatnonzero(start[1:] < end[:-1])
    return bool((group[early] < group[early + 1]).all())


def _flat_cells(own: Flat, count: int, width: int) -> Cells:
    ns = own.end_ns - own.start_ns
    if own.each:
        order, table = np.argsort(own.name[: own.each]), ns.reshape(count, own.each)
        if (np.diff(order) < 0).any():
            table = table[:, order]
        bare = own.end - own.begin - table.sum(axis=1)
        if bare.all():
            names = np.append(UNTRACED, own.name[order])
            return Cells(np.column_stack([bare, table]).ravel(), names=names)
    until, steps = np.append(0, np.cumsum(ns)), np.arange(count)
    bare = own.end - own.begin - until[own.first + own.size] + until[own.first]
    step, name = np.append(steps, own.step), np.append(np.full_like(steps, UNTRACED), own.name)
    return sum_cells(step, name, np.append(bare, ns), count, width)


def divide_nested(spans: Spans, steps: Int64s) -> Segments:
    """Divide steps with any nesting or overlap of stages."""
    stages = spans.rows(kind="stage")
    rows = np.append(steps, stages)
    times = np.append(spans.start_ns[rows], spans.end_ns[rows])
    threads = np.tile(spans.thread[rows], 2)
    order = np.lexsort((times, threads))
    times, threads = times[order], threads[order]
    new = np.append(True, (times[1:] != times[:-1]) | (threads[1:] != threads[:-1]))[: len(order)]
    place = np.empty_like(order)
    place[order] = np.cumsum(new) - 1
    times, (first, last), count = times[new], place.reshape(2, -1), len(steps)
    step = paint(first[:count], last[:count], len(times) - 1)
    label = paint(first[count:], last[count:], len(times) - 1)
    inside = np.flatnonzero(step >= 0)
    label = np.append(stages, UNTRACED)[label[inside]]  # -1 for none reads the last item
    return Segments(times[inside], times[inside + 1], step[inside], label)


def paint(first: Int64s, last: Int64s, cells: int) -> Int64s:
    """Return for each cell the greatest i with ``first[i] <= cell < last[i]``, or -1.

    An interval is two overlapping blocks whose length is a power of two. Blocks are split from the
    longest to the shortest, so the cost is ``cells x log2(longest)``.

    Example::

        >>> paint(np.array([0, 1]), np.array([4, 2]), 5).tolist()
        [0, 1, 0, 0, -1]
    """
    return on_few(_paint, first, last, max(cells, 0))


def _paint(first: Int64s, last: Int64s, cells: int) -> Int64s:
    top = np.full(cells, -1, dtype=np.int64)
    index = np.flatnonzero(last > first)
    first, last = first[index], last[index]
    levels = np.frexp(last - first)[1] - 1  # floor of the binary logarithm
    for level in range(int(levels.max(initial=0)), -1, -1):
        half = 1 << level
        top[half:] = np.maximum(top[half:], top[:-half])
        here = levels == level
        np.maximum.at(top, first[here], index[here])
        np.maximum.at(top, last[here] - half, index[here])
    return top


def open_spans(spans: Spans, kind: Kind, rank: int, times: Int64s) -> Int64s:
    """Return the row of the span of a kind that is open on a rank at each time, or -1.

    Of several open ones it is the one that started last.
    """
    rows = spans.rows(kind=kind, rank=rank)
    ends = np.concatenate([spans.start_ns[rows], spans.end_ns[rows]])
    edges, places = np.unique(ends, return_inverse=True)
    label = paint(places[: len(rows)], places[len(rows) :], len(edges) - 1)
    at = np.concatenate([[-1], label, [-1]])[np.searchsorted(edges, times, side="right")]
    found: Int64s = np.append(rows, -1)[at]
    return found


def containing_step(spans: Spans, steps: Int64s, rows: Int64s, group: Int64s) -> Int64s:
    """Return for each row the step in which it starts, as an index into ``steps``, or -1.

    Args:
        spans: The run.
        steps: Rows of step spans, ascending.
        rows: Rows to place, ascending.
        group: ``spans.thread`` or ``spans.rank``: a step contains only spans of its own group.
    """
    long = np.flatnonzero(spans.duration_ns[steps] > 0)  # empty steps contain nothing
    long = long[np.argsort(group[steps[long]], kind="stable")]
    order = np.argsort(group[rows], kind="stable")
    step, row = steps[long], rows[order]
    times = spans.start_ns[step], spans.end_ns[step]
    first, last = _within(group[step], *times, group[row], spans.start_ns[row])
    found = np.empty_like(order)
    found[order] = np.append(long, -1)[_spread(first, last, len(rows))]
    return found


def _within(
    key: Int64s, begin: Int64s, end: Int64s, group: Int64s, start: Int64s
) -> tuple[Int64s, Int64s]:
    """Return for each step the first row that starts in it, and the one after the last.

    Steps and rows are sorted by group and start. A row belongs to the last step that began before.
    """
    first, last = np.empty((2, len(key)), dtype=np.int64)
    for each in np.unique(key):
        own = slice(*np.searchsorted(key, [each, each + 1]))
        low, high = np.searchsorted(group, [each, each + 1])
        first[own] = low + np.searchsorted(start[low:high], begin[own])
        until = low + np.searchsorted(start[low:high], end[own])
        last[own] = np.minimum(until, np.append(first[own][1:], high))
    return first, np.maximum(last, first)


def _spread(first: Int64s, last: Int64s, size: int) -> Int64s:
    """Return the index of the range that each row lies in, or -1; ranges are ascending."""
    values, counts = np.full((2, 2 * len(first) + 1), -1, dtype=np.int64)
    values[1::2], counts[1::2] = np.arange(len(first)), last - first
    counts[::2] = np.append(first, size) - np.append(0, last)
    return np.repeat(values, counts)
