"""Many intervals at once: how many are open, unions, covered time, and how they nest.

Nested intervals are on lanes such as threads, sorted by lane, then start, then the longer first.
Time that two of a lane share without nesting, as in damaged traces, belongs to the later one.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, Mask, differs, order_of

_FEW = 8  # Cells per interval.
_LARGEST = 2**63 - 1

NONE = -1
"""Stands for no interval."""

SLACK_NS = 1_000
"""An interval may end this much later than the one around it.

Before torch 2.3 start and duration were each cut to microseconds.
"""


def cells_of(times: Int64s, start_ns: Int64s, end_ns: Int64s) -> tuple[Int64s, Int64s]:
    """Return the cells in which intervals begin, and those before which they end.

    Args:
        times: Edges of the cells, ascending, one more than cells; what lies outside is cut off.
        start_ns: Where each interval begins: one of the edges.
        end_ns: Where it ends, the same.

    Example::

        >>> [part.tolist() for part in cells_of(*np.array([[0, 5, 9], [0, 5, 5], [5, 9, 20]]))]
        [[0, 1, 1], [1, 2, 2]]
    """
    low, high = times[0], times[-1]
    first: Int64s = np.searchsorted(times, start_ns.clip(low, high))
    last: Int64s = np.searchsorted(times, end_ns.clip(low, high))
    return first, last


def edges(*columns: Int64s) -> Int64s:
    """Return all values of some columns ascending, each once; quick where columns are in order.

    ``np.sort`` of several runs that ascend takes eight times as long where it does not merge them,
    and ``np.unique`` hashes.

    Example::

        >>> edges(np.array([1, 5, 5]), np.array([2, 5])).tolist()
        [1, 2, 5]
    """
    values: Int64s = np.concatenate(columns)
    values.sort(kind="stable")
    return values[differs(values)]


def open_count(first: Int64s, last: Int64s, cells: int) -> Int64s:
    """Return for each cell how many intervals ``first <= cell < last`` hold it.

    Example::

        >>> open_count(np.array([0, 1]), np.array([3, 2]), 4).tolist()
        [1, 2, 1, 0]
    """
    return on_few(_open_count, first, last, cells)


def _open_count(first: Int64s, last: Int64s, cells: int) -> Int64s:
    opened = np.bincount(first, minlength=cells + 1)
    count: Int64s = np.cumsum(opened - np.bincount(last, minlength=cells + 1))[:cells]
    return count


def on_few(
    of_cells: Callable[[Int64s, Int64s, int], Int64s], first: Int64s, last: Int64s, cells: int
) -> Int64s:
    """Return what a function of intervals says of each cell; quick where intervals are few.

    Args:
        of_cells: Given intervals and a number of cells, returns a value per cell; it must be the
            same for cells between which no interval begins or ends.
        first: Cell in which each interval begins, 0 to ``cells``.
        last: Cell before which it ends, the same.
        cells: How many there are.
    """
    if len(first) * _FEW >= cells:
        return of_cells(first, last, cells)
    cuts = edges(first, last, np.array([0, cells]))
    few = of_cells(np.searchsorted(cuts, first), np.searchsorted(cuts, last), len(cuts) - 1)
    return np.repeat(few, np.diff(cuts))


def unions(owner: Int64s, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return disjoint intervals that cover, for each owner, what its own intervals cover.

    Intervals that touch become one, empty ones none. Takes O(n log n) time.

    Args:
        owner: Whose interval it is; not negative.
        first: Where it begins. Times far from 0, or below it, take about twice as long.
        last: Where it ends.

    Example::

        >>> [part.tolist() for part in unions(*np.array([[0, 0, 1], [5, 2, 5], [9, 6, 7]]))]
        [[0, 1], [2, 5], [9, 7]]
    """
    some = last > first
    if not some.all():
        owner, first, last = owner[some], first[some], last[some]
    width = int(last.max(initial=0)) + 1
    if first.min(initial=0) < 0 or (int(owner.max(initial=0)) + 1) * width > _LARGEST:
        # A time of 1970 beside today's leaves no room for the owner, so distinct values are
        # numbered.
        owners, times = edges(owner), edges(first, last)
        rows = zip((owners, times, times), (owner, first, last), strict=True)
        found = unions(*(np.searchsorted(known, values) for known, values in rows))
        return owners[found[0]], times[found[1]], times[found[2]]
    end = owner * width + last
    begin = owner * width + first
    if (begin[1:] < begin[:-1]).any():
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
    np.maximum.accumulate(end, out=end)
    # Owners do not overlap on this line, so a start past all earlier ends begins a new interval.
    head = np.flatnonzero(np.append(True, begin[1:] > end[:-1])[: len(begin)])
    tail = np.append(head[1:], len(begin))[: len(head)] - 1
    owner = begin[head] // width
    return owner, begin[head] - owner * width, end[tail] - owner * width


def covered_before(start: Int64s, end: Int64s, times: Int64s) -> Int64s:
    """Return how much of disjoint, ascending intervals is before each time.

    Example::

        >>> covered_before(np.array([2, 6]), np.array([4, 9]), np.array([1, 3, 5, 20])).tolist()
        [0, 1, 2, 5]
    """
    before = np.append(0, np.cumsum(end - start))
    at = np.searchsorted(start, times, "right")
    rest = np.append(0, end)[at] - times
    found: Int64s = before[at] - np.maximum(rest, 0) * (at > 0)
    return found


def enclosing(lane: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return for each the last one before it that holds it but for `SLACK_NS`, `NONE` without.

    Each looks at the one before it, then at what that one has found so far: all leap at once, so
    that n of them take log n rounds, and as many more as are nested.

    Example::

        >>> start, end = np.array([0, 2, 3, 6]), np.array([9, 5, 4, 8])
        >>> enclosing(np.zeros(4, int), start, end).tolist()
        [-1, 0, 1, 0]
    """
    around = _before(lane, end, start + 1)
    return _leap(around, lambda row, outer: _is_out(row, outer, start, end, SLACK_NS))


def _before(lane: Int64s, reach: Int64s, until: Int64s) -> Int64s:
    """Return for each the one before it, `NONE` if no earlier one of its lane reaches so far."""
    around = np.arange(-1, len(lane) - 1)
    heads = np.flatnonzero(differs(lane))
    around[heads] = NONE
    for first, last in pairwise([*heads.tolist(), len(lane)]):
        highest = np.maximum.accumulate(reach[first:last])
        around[first + 1 : last][highest[:-1] < until[first + 1 : last]] = NONE
    return around


def holding(around: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return for each the last one before it that ends no earlier, out of what `enclosing` found.

    When one is over, the moment belongs to that one, unless it is over as well.
    """
    return _leap(around.copy(), lambda row, outer: _is_out(row, outer, start, end, 0))


def _leap(around: Int64s, is_out: Callable[[Int64s, Int64s], Mask]) -> Int64s:
    """Replace, in place, what is around each interval by the nearest one that it is not out of.

    All leap at once to what the one around them has found so far: whatever they leap over is not
    around that one, and so not around them either.
    """
    rows = np.flatnonzero(around >= 0)
    while len(rows):
        outer = around[rows]
        out = is_out(rows, outer)
        rows, outer = rows[out], outer[out]
        around[rows] = around[outer]
        rows = rows[around[rows] >= 0]
    return around


def _is_out(row: Int64s, outer: Int64s, start: Int64s, end: Int64s, slack: int) -> Mask:
    out: Mask = (end[outer] <= start[row]) | (end[row] > end[outer] + slack)
    return out


def alone(lane: Int64s, start: Int64s, end: Int64s, holder: Int64s) -> Int64s:
    """Return how long each was the last to begin of those that are open; `holder`: of `holding`.

    Example::

        >>> start, end = np.array([0, 2, 3, 6]), np.array([9, 5, 4, 8])
        >>> alone(np.zeros(4, int), start, end, np.array([-1, 0, 1, 0])).tolist()
        [4, 2, 1, 2]
    """
    own = np.zeros(len(lane), dtype=np.int64)
    at, begin = np.arange(len(own)), start
    until = np.append(start[1:], _LARGEST)[: len(own)]  # The next one of the lane begins there.
    until[:-1][lane[1:] != lane[:-1]] = _LARGEST
    while len(at):
        over = np.maximum(end[at], begin)
        np.add.at(own, at, np.minimum(over, until) - begin)
        at = np.where(over < until, holder[at], NONE)  # The rest belongs to the interval around it.
        more = at >= 0
        begin, until, at = over[more], until[more], at[more]
    return own


def open_at(
    lane: Int64s, start: Int64s, end: Int64s, holder: Int64s, point_lane: Int64s, point: Int64s
) -> Int64s:
    """Return for each point the last of its lane to begin that is open, `NONE` where none is.

    An interval is open at its start and not at its end.

    Args:
        lane: Lane of each interval.
        start: Where it begins.
        end: Where it ends.
        holder: What `holding` tells of it.
        point_lane: Lane of each point, in any order; `NONE` has no intervals.
        point: Times of the points.
    """
    found = last_begun(lane, start, point_lane, point)
    rows = np.flatnonzero(found >= 0)
    while len(rows):
        rows = rows[end[found[rows]] <= point[rows]]
        found[rows] = holder[found[rows]]
        rows = rows[found[rows] >= 0]
    return found


def last_begun(lane: Int64s, start: Int64s, point_lane: Int64s, point: Int64s) -> Int64s:
    """Return the last one of each point's lane that begins no later than it."""
    order: Int64s | None = None
    if (point_lane[1:] < point_lane[:-1]).any():
        order = np.argsort(point_lane, kind="stable")
        point_lane = point_lane[order]
    heads = np.flatnonzero(differs(point_lane))
    found = np.full(len(point_lane), NONE)
    for first, last in pairwise([*heads.tolist(), len(point_lane)]):
        rows = slice(first, last) if order is None else order[first:last]
        own = np.array([point_lane[first]], lane.dtype)  # Another type would copy all lanes.
        low, high = (int(np.searchsorted(lane, own, side)[0]) for side in ("left", "right"))
        place = np.searchsorted(start[low:high], point[rows], "right")
        found[rows] = np.where(place > 0, low + place - 1, NONE)
    return found


def depths(around: Int64s) -> Int64s:
    """Return how many are around each.

    Example::

        >>> depths(np.array([-1, 0, 1, 0])).tolist()
        [0, 1, 2, 1]
    """
    depth, leap = (around >= 0).astype(np.int64), around
    while len(rows := np.flatnonzero(leap >= 0)):
        depth[rows] += depth[leap[rows]]
        leap = np.where(leap >= 0, np.append(leap, NONE)[leap], NONE)
    return depth


class Enclosing:
    """Ranges that nest and overlap, prepared to find the innermost one at many times.

    Preparing takes O(n log n) time.

    Args:
        lane: Lane of each range, e.g. a code of its thread; shape (ranges,).
        start: Start of each range in nanoseconds; shape (ranges,).
        end: End of each range; shape (ranges,).
    """

    def __init__(self, lane: Int64s, start: Int64s, end: Int64s) -> None:
        order = nested_order(lane, start, end)
        self._rows = np.append(order, NONE)
        self._sorted = lane[order], start[order], end[order]
        self._holder = holding(enclosing(*self._sorted), *self._sorted[1:])

    def at(self, lane: Int64s, point: Int64s) -> Int64s:
        """Return for each point the range of its lane that began last and contains it, else -1.

        A range contains its start and not its end. Ranges of one lane may overlap without nesting.
        Takes O(m log n) time.

        Args:
            lane: Lane of each point; shape (points,), as that of what is returned.
            point: Times of the points.
        """
        found: Int64s = self._rows[open_at(*self._sorted, self._holder, lane, point)]
        return found


def innermost(
    lane: Int64s, start: Int64s, end: Int64s, point_lane: Int64s, point: Int64s
) -> Int64s:
    """Return for each point the range around it; see `Enclosing`, which can be asked again.

    Example::

        >>> lane, lanes = np.zeros(2, np.int64), np.zeros(3, np.int64)
        >>> innermost(lane, np.array([0, 2]), np.array([9, 4]), lanes, np.array([3, 5, 9]))
        array([ 1,  0, -1])
    """
    return Enclosing(lane, start, end).at(point_lane, point)


def nested_order(lane: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return the order in which `parents` takes ranges: by lane and start, the longer one first.

    Ranges of the same times keep theirs.

    Example::

        >>> nested_order(np.zeros(3, int), np.array([5, 0, 0]), np.array([6, 1, 9])).tolist()
        [2, 1, 0]
    """
    order = order_of(lane, start)
    if differs(lane[order], start[order]).all():
        return order
    return np.lexsort((-end, start, lane))


def parents(lane: Int64s, start: Int64s, end: Int64s, *, closed: bool = True) -> Int64s:
    """Return for each range the row of the last one before it that holds all of it, -1 where none.

    Ranges of one lane may overlap without nesting; what merely overlaps holds nothing of the other.
    Two of the same times hold one another in the order of their rows. Nothing is inside an instant,
    a range that ends where it starts.

    Args:
        lane: Lane of each range, e.g. a code of its thread; shape (ranges,), as all others.
        start: Start of each range; within a lane they come as in `nested_order`.
        end: End of each range, never before its start.
        closed: Whether an instant at the very end of a range still lies in it.

    Example::

        >>> lane, start, end = np.zeros(3, int), np.array([0, 1, 5]), np.array([5, 3, 5])
        >>> parents(lane, start, end), parents(lane, start, end, closed=False)
        (array([-1,  0,  0]), array([-1,  0, -1]))
    """
    reach = np.where(end > start, end, np.iinfo(np.int64).min)
    until = end if closed else np.maximum(end, start + 1)
    order = np.argsort(lane, kind="stable")
    reach, until = reach[order], until[order]
    around = _before(lane[order], reach, until)
    _leap(around, lambda row, outer: reach[outer] < until[row])
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.append(order, NONE)[around]
    return found
