"""Intervals that lie in one another: what is around each, its own time, and what is open when.

All come by lane, start, and end downwards. What two of a lane share without one holding the other,
as in damaged traces, belongs to the later one.
"""

from itertools import pairwise

import numpy as np

from lightning_rlprof.analysis.sweep import differs
from lightning_rlprof.spans import Int64s

__all__ = ["NONE", "SLACK_NS", "alone", "depths", "enclosing", "holding", "open_at"]

NONE = -1
"""Stands for an interval that there is not."""

SLACK_NS = 1_000
"""So much later may an interval end than the one that it lies in.

Before torch 2.3 start and duration were cut to microseconds, each by itself.
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
    return _leapt(around, start, end, SLACK_NS)


def holding(around: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return for each the last one before it that ends no earlier, out of what `enclosing` found.

    When one is over, the moment belongs to that one, unless it is over as well.
    """
    return _leapt(around.copy(), start, end, 0)


def _leapt(around: Int64s, start: Int64s, end: Int64s, slack: int) -> Int64s:
    """Let each leap on, in place, until what is around it holds it but for some slack."""
    rows = np.flatnonzero(around >= 0)
    while len(rows):
        outer = around[rows]
        out = (end[outer] <= start[rows]) | (end[rows] > end[outer] + slack)
        rows, outer = rows[out], outer[out]
        around[rows] = around[outer]
        rows = rows[around[rows] >= 0]
    return around


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
        at = np.where(over < until, holder[at], NONE)  # it goes on with the time that is left
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
    found = _begun(lane, start, point_lane, point)
    rows = np.flatnonzero(found >= 0)
    while len(rows):
        rows = rows[end[found[rows]] <= point[rows]]
        found[rows] = holder[found[rows]]
        rows = rows[found[rows] >= 0]
    return found


def _begun(lane: Int64s, start: Int64s, point_lane: Int64s, point: Int64s) -> Int64s:
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
