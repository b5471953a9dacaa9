"""Nested intervals on lanes such as threads: parents, self time, and the innermost at a moment.

Intervals are sorted by lane, then start, then the longer first. Time that two of a lane share
without nesting, as in damaged traces, belongs to the later one.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, Mask, differs

NONE = -1
"""Stands for no interval."""

SLACK_NS = 1_000
"""An interval may end this much later than the one around it.

Before torch 2.3 start and duration were each cut to microseconds.
"""

_LAST = 2**63 - 1


def enclosing(lane: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return for each the last one before it that holds it but for `SLACK_NS`, `NONE` without.

    Each looks at the one before it, then at what that one has found so far: all leap at once, so
    that n of them take log n rounds, and as many more as are nested.

    Example::

        >>> start, end = np.array([0, 2, 3, 6]), np.array([9, 5, 4, 8])
        >>> enclosing(np.zeros(4, int), start, end).tolist()
        [-1, 0, 1, 0]
    """
    around = np.arange(-1, len(lane) - 1)
    heads = np.flatnonzero(differs(lane))
    around[heads] = NONE
    for first, last in pairwise([*heads.tolist(), len(lane)]):
        reach = np.maximum.accumulate(end[first:last])
        bare = reach[:-1] <= start[first + 1 : last]  # all before are over
        around[first + 1 : last][bare] = NONE
    return _leap(around, lambda row, outer: _is_out(row, outer, start, end, SLACK_NS))


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
    until = np.append(start[1:], _LAST)[: len(own)]  # where the next one of its lane begins
    until[:-1][lane[1:] != lane[:-1]] = _LAST
    while len(at):
        over = np.maximum(end[at], begin)
        np.add.at(own, at, np.minimum(over, until) - begin)
        at = np.where(over < until, holder[at], NONE)  # the rest belongs to the one around it
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
    order = np.argsort(point_lane, kind="stable")
    heads = np.flatnonzero(differs(point_lane[order]))
    found = np.full(len(order), NONE)
    for first, last in pairwise([*heads.tolist(), len(order)]):
        rows = order[first:last]
        low, high = np.searchsorted(lane, point_lane[rows[0]] + np.arange(2))
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
        # Of two that begin at once the shorter one is inside.
        order = np.lexsort((-end, start, lane))
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


def parents(lane: Int64s, start: Int64s, end: Int64s, *, closed: bool = True) -> Int64s:
    """Return for each range the row of the last one before it that holds all of it, -1 where none.

    Ranges of one lane may overlap without nesting; what merely overlaps holds nothing of the other.
    Two of the same times hold one another in the order of their rows. Nothing is inside an instant,
    a range that ends where it starts.

    Args:
        lane: Lane of each range, e.g. a code of its thread; shape (ranges,), as all others.
        start: Start of each range; within a lane they come by it, and the longer one first.
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
    around = np.arange(-1, len(order) - 1)
    around[np.flatnonzero(differs(lane[order]))] = NONE
    _leap(around, lambda row, outer: reach[outer] < until[row])
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.append(order, NONE)[around]
    return found
