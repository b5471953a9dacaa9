"""Divide every step among its stages, or "untraced": each instant once, in integer nanoseconds.

An instant belongs to the innermost open stage of the step's own thread: the one that started last
(ties: the greater id). If none is open, it belongs to the innermost known region, such as a data
fetch, a transfer or a checkpoint: one whose name has a category. If none of these is open either,
the time is untraced. This is the only definition of untraced time.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.steps.time_categories import NO_CATEGORY, categories_of
from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import FIRST_ROLE_RANK, KINDS, Kind
from lightning_rlprof.tables.arrays import Int64s, Mask, differs, order_of
from lightning_rlprof.tables.intervals import last_begun, on_few
from lightning_rlprof.tables.spans import Spans

UNTRACED = -1
"""Stands for the time in a step without an open stage."""
_STAGE = KINDS.index("stage")
_ROWS_AT_ONCE = 2**18
"""Rows of some threads that are sorted at once: more take memory, and no less time."""


class Segments(NamedTuple):
    """Steps cut into segments without gaps, by thread and time.

    ``step`` is an index into ``Partition.steps``, ``stage`` the row of a stage or, outside of any,
    of a known region, else `UNTRACED`.
    Neighbors may belong to the same stage.
    """

    start_ns: Int64s
    end_ns: Int64s
    step: Int64s
    stage: Int64s


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of a run's steps, by rank and start, and how they are divided.

    ``outside`` has the stages outside of the steps of their thread, cut in the same way; its
    ``step`` is -1.
    """

    steps: Int64s
    divided: Segments
    outside: Segments


def partition(spans: Spans, ranks: Collection[int] | None = None) -> Partition:
    """Divide all steps of some ranks (None: of all); all are divided once per run.

    Raises:
        TraceError: A rank is not in the run.
    """
    whole = spans.once("partition", _divide_all)
    if ranks is None:
        return whole
    steps = rows_on_ranks(spans, "step", ranks)
    place = np.searchsorted(whole.steps, steps)
    at = np.full(len(whole.steps) + 1, -1, np.int64)
    at[place] = np.arange(len(steps))
    mine = np.flatnonzero(at[whole.divided.step] >= 0)
    divided = Segments(*(column[mine] for column in whole.divided))
    beside = np.flatnonzero(np.isin(spans.rank[whole.outside.stage], list(ranks)))
    return Partition(
        steps,
        divided._replace(step=at[divided.step]),
        Segments(*(column[beside] for column in whole.outside)),
    )


def lanes(spans: Spans) -> Int64s:
    """Return the thread in whose steps each row counts: its own, or for a server the rank's one.

    A server may answer each request on another thread.
    """
    return spans.once("lanes", _lanes)


def _lanes(spans: Spans) -> Int64s:
    steps = spans.rows(kind="step")
    ranks, first = np.unique(spans.rank[steps], return_index=True)
    if not len(ranks) or ranks[-1] < FIRST_ROLE_RANK:
        return spans.thread
    at = np.minimum(np.searchsorted(ranks, spans.rank), len(ranks) - 1)
    of_server = (spans.rank >= FIRST_ROLE_RANK) & (ranks[at] == spans.rank)
    return np.where(of_server, spans.thread[steps[first]][at], spans.thread)


def stages_in_steps(spans: Spans, steps: Int64s) -> tuple[Int64s, Int64s]:
    """Return the stages that begin in a step of their thread, and the index of each one's step.

    Args:
        spans: The run.
        steps: Rows of step spans: all of the run, or those of some ranks.
    """
    rows, step = spans.once("stages in steps", _stages_in_steps)
    whole = spans.rows(kind="step")
    if len(whole) == len(steps):
        return rows, step
    at = np.full(len(whole), -1, np.int64)
    at[np.searchsorted(whole, steps)] = np.arange(len(steps))
    mine = at[step] >= 0
    return rows[mine], at[step[mine]]


def _stages_in_steps(spans: Spans) -> tuple[Int64s, Int64s]:
    steps, rows = spans.rows(kind="step"), spans.rows(kind="stage")
    step = containing_step(spans, steps, rows, lanes(spans))
    return rows[step >= 0], step[step >= 0]


def _divide_all(spans: Spans) -> Partition:
    steps = spans.rows(kind="step")
    return Partition(steps, *divide(spans, steps, _dividing(spans)))


def _dividing(spans: Spans, some: Mask | None = None) -> Int64s:
    """Return the rows that steps are divided by, of some: of several open ones the last counts."""
    steps, known = spans.rows(kind="step"), categories_of(spans.names) != NO_CATEGORY
    regions = spans.rows(kind="region")
    regions = regions[known[spans.name[regions]]]
    lane = lanes(spans)
    regions = regions[np.isin(lane[regions], lane[steps])]
    if some is None:
        stages = spans.rows(kind="stage")
    else:
        regions, stages = regions[some[regions]], np.flatnonzero((spans.kind == _STAGE) & some)
    return np.append(regions, stages) if len(regions) else stages  # A stage wins over a region.


@dataclass(frozen=True, eq=False)
class Part:
    """Some threads, and what `partition` says of them when it is asked for.

    Attributes:
        spans: The run.
        steps: Rows of their steps, by thread.
        stages: Rows of their stages, by thread; of several open ones the last counts.
    """

    spans: Spans
    steps: Int64s
    stages: Int64s

    @property
    def divided(self) -> Segments:
        """The steps cut into segments; ``step`` is an index into ``steps`` of this part."""
        return self._both[0]

    @property
    def outside(self) -> Segments:
        """The stages outside of steps."""
        return self._both[1]

    @cached_property
    def _both(self) -> tuple[Segments, Segments]:
        return _divide(self.spans, self.steps, self.stages)

    @cached_property
    def begun(self) -> tuple[Int64s, Int64s]:
        """As `stages_in_steps` the stages that begin in the steps."""
        rows = self.stages[self.spans.kind[self.stages] == _STAGE]
        step = containing_step(self.spans, self.steps, rows, lanes(self.spans))
        return rows[step >= 0], step[step >= 0]

    @cached_property
    def is_plain(self) -> bool:
        """Whether only the step in which a stage begins can have time of it."""
        (rows, step), end, lane = self.begun, self.spans.end_ns, lanes(self.spans)[self.steps]
        apart = lane[1:] != lane[:-1]
        apart |= end[self.steps[:-1]] <= self.spans.start_ns[self.steps[1:]]
        within = end[rows] <= end[self.steps[step]]
        return len(rows) == len(self.stages) and bool(apart.all() and within.all())


def partition_parts(
    spans: Spans, ranks: Collection[int] | None = None, *, since: int = 0
) -> Iterator[Part]:
    """Yield what `partition` has, some threads at a time, so that memory never holds all.

    Args:
        spans: The run.
        ranks: Only these; None for all.
        since: Number of the first step that is divided; what else there is, is left out.
    """
    steps, some = rows_on_ranks(spans, "step", ranks), None
    if ranks is not None:
        some = np.isin(spans.rank, list(ranks))
    if since:
        lane, steps = lanes(spans), steps[spans.step[steps] >= since]
        first = np.full(len(spans.threads), np.iinfo(np.int64).max)
        np.minimum.at(first, lane[steps], spans.start_ns[steps])
        later = np.empty(len(spans), bool)
        for low in range(0, len(spans), _ROWS_AT_ONCE):
            rows = slice(low, low + _ROWS_AT_ONCE)
            later[rows] = spans.end_ns[rows] > first[lane[rows]]
        some = later if some is None else some & later
    return divided_parts(spans, steps, _dividing(spans, some))


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


def divide(spans: Spans, steps: Int64s, stages: Int64s) -> tuple[Segments, Segments]:
    """Cut all wherever a stage begins or ends, with any nesting; return steps and what is beside.

    What is beside the steps are stages only. Rows of any other spans can be cut in the same way.

    Args:
        spans: The run.
        steps: Rows to divide, ascending.
        stages: Rows to divide them by; of several open ones the last counts.
    """
    # Room for all is taken once: parts that are joined later would be in memory twice.
    room, size = np.empty((len(Segments._fields), 2 * (len(steps) + len(stages))), np.int64), 0
    beside: list[Segments] = []
    for part in divided_parts(spans, steps, stages):
        own_size, own_steps = len(part.divided.step), np.searchsorted(steps, part.steps)
        room[:, size : size + own_size] = part.divided._replace(step=own_steps[part.divided.step])
        size += own_size
        beside.append(part.outside)
    outside = Segments(*map(np.concatenate, zip(*beside, strict=True)))
    return Segments(*room[:, :size]), outside


def divided_parts(spans: Spans, steps: Int64s, stages: Int64s) -> Iterator[Part]:
    """Yield what `divide` returns, some threads at a time, by thread; there is one part at least.

    Args:
        spans: The run.
        steps: As of `divide`.
        stages: As of `divide`.
    """
    rows = [_by_lane(spans, steps), _by_lane(spans, stages)]
    own = [lanes(spans)[each] for each in rows]
    most = max(int(lane.max(initial=0)) for lane in own) + 1
    count = np.sum([np.bincount(lane, minlength=most) for lane in own], axis=0)
    part = np.cumsum(count) // _ROWS_AT_ONCE
    firsts = np.append(np.flatnonzero(np.diff(part, prepend=-1)), len(count))
    bounds = [np.searchsorted(lane, firsts).tolist() for lane in own]
    del own
    for edges in zip(*map(pairwise, bounds), strict=True):
        mine, theirs = (each[slice(*edge)] for each, edge in zip(rows, edges, strict=True))
        yield Part(spans, mine, theirs)


def _by_lane(spans: Spans, rows: Int64s) -> Int64s:
    """Return rows by the thread in whose steps they count; mostly they are in that order."""
    lane = lanes(spans)[rows]
    if (lane[1:] >= lane[:-1]).all():
        return rows
    ordered: Int64s = rows[np.argsort(lane, kind="stable")]
    return ordered


def _divide(spans: Spans, steps: Int64s, stages: Int64s) -> tuple[Segments, Segments]:
    rows = np.append(steps, stages)
    times = np.append(spans.start_ns[rows], spans.end_ns[rows])
    threads = np.tile(lanes(spans)[rows], 2)
    order = order_of(threads, times)
    times, threads = times[order], threads[order]
    new = differs(times, threads)
    place = np.empty_like(order)
    place[order] = np.cumsum(new) - 1
    times, (first, last), count = times[new], place.reshape(2, -1), len(steps)
    step = paint(first[:count], last[:count], len(times) - 1)
    label = paint(first[count:], last[count:], len(times) - 1)
    stage = np.append(stages, UNTRACED)[label]  # A label of -1, for none, reads the last item.
    parts = (np.flatnonzero(step >= 0), np.flatnonzero((step < 0) & (label >= 0)))
    divided, outside = (Segments(times[at], times[at + 1], step[at], stage[at]) for at in parts)
    return divided, outside


def exclusive_ns(spans: Spans, segments: Segments) -> Int64s:
    """Sum the time of each stage's row in some segments; one entry per row of the run."""
    sums = np.zeros(len(spans) + 1, dtype=np.int64)
    np.add.at(sums, segments.stage, segments.end_ns - segments.start_ns)  # Untraced is last.
    return sums[:-1]


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
    levels = np.frexp(last - first)[1] - 1  # This is the floor of the binary logarithm.
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

    Of overlapping steps it can only be the one that began last.

    Args:
        spans: The run.
        steps: Rows of step spans, ascending.
        rows: Rows to place, ascending.
        group: ``spans.thread`` or ``spans.rank``: a step contains only spans of its own group.
    """
    if not len(rows):  # A counter that no span has would cost as much as one that many have.
        return np.empty(0, np.int64)
    # Empty steps contain nothing.
    long = np.flatnonzero(spans.end_ns[steps] > spans.start_ns[steps])
    long = long[np.argsort(group[steps[long]], kind="stable")]
    step, start = steps[long], spans.start_ns[rows]
    at = last_begun(group[step], spans.start_ns[step], group[rows], start)
    inside = start < np.append(spans.end_ns[step], 0)[at]  # An index of -1, for none, reads the 0.
    return np.where(inside, np.append(long, -1)[at], -1)
