"""Many intervals at once on a grid of cells: how many are open, and unions of them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rlprof.spans import Int64s

__all__ = ["differs", "edges", "open_count", "unions"]


def differs(*columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Tell which rows differ from the one before in any column; the first one does.

    Example::

        >>> differs(np.array([3, 3, 5]), np.array([1, 1, 1])).tolist()
        [True, False, True]
    """
    changed = np.zeros(len(columns[0]), dtype=bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


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
    opened = np.bincount(first, minlength=cells + 1)
    count: Int64s = np.cumsum(opened - np.bincount(last, minlength=cells + 1))[:cells]
    return count


def unions(owner: Int64s, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return disjoint intervals that cover, for each owner, what its own intervals cover.

    Intervals that touch become one, empty ones none. Takes O(n log n) time.

    Args:
        owner: Whose interval it is; not negative.
        first: Where it begins; not negative, and owner times the largest must fit into 64 bits.
        last: Where it ends.

    Example::

        >>> [part.tolist() for part in unions(*np.array([[0, 0, 1], [5, 2, 5], [9, 6, 7]]))]
        [[0, 1], [2, 5], [9, 7]]
    """
    some = last > first
    if not some.all():
        owner, first, last = owner[some], first[some], last[some]
    width = int(last.max(initial=0)) + 1
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
