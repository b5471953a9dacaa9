"""Many intervals at once on a grid of cells: how many are open, unions, and covered time."""

from collections.abc import Callable

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, differs

_FEW = 8  # cells per interval
_LARGEST = 2**63 - 1


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
        # A time of 1970 beside those of today leaves no room for the owner: number what occurs.
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
    # Each owner has a stretch of the line to itself: what reaches past the maximum so far is new.
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
