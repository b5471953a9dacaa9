"""Find the innermost range around a moment, among ranges that may nest and overlap."""

import numpy as np

from lightning_rlprof.spans import Int64s

__all__ = ["innermost"]

_NONE = -1


def innermost(
    lane: Int64s, start: Int64s, end: Int64s, point_lane: Int64s, point: Int64s
) -> Int64s:
    """Return for each point the range of its lane that began last and contains it, -1 where none.

    A range contains its start and not its end. Ranges of one lane may overlap without nesting.
    Takes O((n + m) log n) time and a pass of Python over the ranges.

    Args:
        lane: Lane of each range, e.g. a code of its thread; shape (ranges,).
        start: Start of each range in nanoseconds; shape (ranges,).
        end: End of each range; shape (ranges,).
        point_lane: Lane of each point; shape (points,), as that of what is returned.
        point: Times of the points.

    Example::

        >>> lane, lanes = np.zeros(2, np.int64), np.zeros(3, np.int64)
        >>> innermost(lane, np.array([0, 2]), np.array([9, 4]), lanes, np.array([3, 5, 9]))
        array([ 1,  0, -1])
    """
    found = np.full(len(point), _NONE, dtype=np.int64)
    for each in np.unique(point_lane).tolist():
        ranges = np.flatnonzero(lane == each)
        # Of two that begin at once the shorter one is inside.
        ranges = ranges[np.lexsort((-end[ranges], start[ranges]))]
        points = np.flatnonzero(point_lane == each)
        if len(ranges):
            found[points] = _of_lane(ranges, start[ranges], end[ranges], point[points])
    return found


def _of_lane(ranges: Int64s, start: Int64s, end: Int64s, point: Int64s) -> Int64s:
    before = _previous_longer(end)
    at = np.searchsorted(start, point, side="right") - 1
    while True:
        over = (at >= 0) & (end[at] <= point)
        if not over.any():
            break
        at[over] = before[at[over]]
    return np.where(at >= 0, ranges[at], _NONE)


def _previous_longer(end: Int64s) -> Int64s:
    """Return for each range the nearest one before it that ends later.

    Whatever lies between the two is over when this one is, so a search may leap over it.
    """
    before = np.full(len(end), _NONE, dtype=np.int64)
    stack: list[int] = []
    for at, own in enumerate(ends := end.tolist()):
        while stack and ends[stack[-1]] <= own:
            stack.pop()
        if stack:
            before[at] = stack[-1]
        stack.append(at)
    return before
