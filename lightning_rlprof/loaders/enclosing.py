"""Find the innermost range around a moment or a range, among those that nest and overlap."""

import numpy as np
import numpy.typing as npt

from lightning_rlprof.spans import Int64s

__all__ = ["Enclosing", "innermost", "parents"]

_Rows = npt.NDArray[np.int32]

_NONE = -1
_ROWS = 4_096


class Enclosing:
    """Ranges that nest and overlap, made ready to be asked for the one around a moment.

    Making them ready takes O(n log n) time and a pass of Python over the ranges.

    Args:
        lane: Lane of each range, e.g. a code of its thread; shape (ranges,).
        start: Start of each range in nanoseconds; shape (ranges,).
        end: End of each range; shape (ranges,).
    """

    def __init__(self, lane: Int64s, start: Int64s, end: Int64s) -> None:
        # Of two that begin at once the shorter one is inside.
        order = np.lexsort((-end, start, lane)).astype(np.int32)
        edges = np.flatnonzero(np.diff(lane[order])) + 1
        self._end = end
        self._lanes: dict[int, tuple[_Rows, Int64s, _Rows]] = {
            int(lane[rows[0]]): (rows, start[rows], _before(end[rows], end[rows] + 1))
            for rows in np.split(order, edges)
            if len(rows)
        }

    def at(self, lane: Int64s, point: Int64s) -> Int64s:
        """Return for each point the range of its lane that began last and contains it, else -1.

        A range contains its start and not its end. Ranges of one lane may overlap without nesting.
        Takes O(m log n) time.

        Args:
            lane: Lane of each point; shape (points,), as that of what is returned.
            point: Times of the points.
        """
        found = np.full(len(point), _NONE, dtype=np.int64)
        for each in np.unique(lane).tolist():
            if each in self._lanes:
                points = np.flatnonzero(lane == each)
                found[points] = _of_lane(*self._lanes[each], self._end, point[points])
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


def _of_lane(ranges: _Rows, start: Int64s, before: _Rows, end: Int64s, point: Int64s) -> Int64s:
    at = np.searchsorted(start, point, side="right") - 1
    while True:
        over = (at >= 0) & (end[ranges[at]] <= point)
        if not over.any():
            break
        at[over] = before[at[over]]
    return np.where(at >= 0, ranges[at], _NONE)


def parents(lane: Int64s, start: Int64s, end: Int64s, *, closed: bool = True) -> Int64s:
    """Return for each range the row of the last one before it that holds all of it, -1 where none.

    Ranges of one lane may overlap without nesting; what merely overlaps holds nothing of the other.
    Two of the same times hold one another in the order of their rows. Nothing is inside an instant,
    a range that ends where it starts. Takes a pass of Python over the ranges.

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
    edges = np.flatnonzero(np.diff(lane[order], prepend=lane[order][:1] - 1))
    found = np.full(len(lane), _NONE, dtype=np.int64)
    for rows in np.split(order, edges[1:]):
        found[rows] = np.append(rows, _NONE)[_before(reach[rows], until[rows])]
    return found


def _before(reach: Int64s, until: Int64s) -> _Rows:
    """Return for each range the nearest one before it that reaches as far as it asks for.

    Whatever lies between the two is over when this one is, so a search may leap over it.
    """
    before = np.full(len(reach), _NONE, dtype=np.int32)
    stack: list[tuple[int, int]] = []  # of those that may still hold another: end and row
    for low in range(0, len(reach), _ROWS):  # as Python's numbers they take five times the memory
        part = slice(low, low + _ROWS)
        rows = zip(reach[part].tolist(), until[part].tolist(), strict=True)
        for at, (end, wanted) in enumerate(rows, low):
            while stack and stack[-1][0] < wanted:
                stack.pop()
            if stack:
                before[at] = stack[-1][1]
            stack.append((end, at))
    return before
