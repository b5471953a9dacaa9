"""Types of the arrays that tables exchange, groups of equal rows, calls that match across ranks.

The n-th call of a key, such as a process group, an operation and a step, is the same one on all
ranks: ranks of one job run the same program, so this needs no clocks.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

UNKNOWN = -1
"""Stands for a code, an index or an amount that was not recorded; never a valid value of these."""

_LARGEST_CODE = 2**62
_MIN_MEETINGS = 4  # With fewer calls of two ranks, the offset of their clocks is unknown.
_CLOSER = 5  # If two ranks met, their ends differ by less than this part of what starts differ.

Int64s: TypeAlias = npt.NDArray[np.int64]
"""An array of 64-bit integers."""

Integers: TypeAlias = npt.NDArray[np.signedinteger[Any]]
"""An array of integers of any size; they get 64 bits before they are multiplied."""

Float64s: TypeAlias = npt.NDArray[np.float64]
"""An array of 64-bit floats."""

Mask: TypeAlias = npt.NDArray[np.bool_]
"""An array of yes and no."""


def differs(*columns: npt.NDArray[Any]) -> Mask:
    """Mark the rows that differ from the row before in any column; the first one does.

    Example::

        >>> differs(np.array([3, 3, 5]), np.array([1, 1, 1])).tolist()
        [True, False, True]
    """
    changed = np.zeros(len(columns[0]), dtype=bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def group_starts(*columns: npt.NDArray[Any]) -> Int64s:
    """Return the first row of each group of equal rows that follow one another.

    Example::

        >>> group_starts(np.array([3, 3, 5]), np.array([1, 1, 1])).tolist()
        [0, 2]
    """
    return np.flatnonzero(differs(*columns))


def distinct_tuples(columns: Int64s) -> tuple[Int64s, Int64s]:
    """Return the distinct tuples of some columns, ascending, and which one each row is.

    Much faster than `numpy.unique` of two dimensions: a million rows take half a second.

    Args:
        columns: Whole numbers; shape (columns, rows).

    Example::

        >>> tuples, place = distinct_tuples(np.array([[7, 3, 7], [1, 2, 1]]))
        >>> tuples.tolist(), place.tolist()
        ([[3, 7], [2, 1]], [1, 0, 1])
    """
    code, width = np.zeros(columns.shape[1], np.int64), 1
    for column in columns if columns.shape[1] else ():
        low, size = int(column.min()), int(column.max()) - int(column.min()) + 1
        # The code would not fit, so the distinct values are numbered.
        if width * size >= _LARGEST_CODE:
            used, code = np.unique(code, return_inverse=True)
            values, own = np.unique(column, return_inverse=True)
            width, size = len(used), len(values)
        else:
            own = column - low
        code, width = code * size + own, width * size
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    return columns[:, first], place


def group_sizes(starts: Int64s, rows: int) -> Int64s:
    """Return how many rows each group has.

    Args:
        starts: The first row of each group, as from `group_starts`.
        rows: Number of all rows.

    Example::

        >>> group_sizes(np.array([0, 2]), 3).tolist()
        [2, 1]
    """
    return np.diff(starts, append=rows)


def order_of(major: Int64s, minor: Int64s) -> Int64s:
    """Return the order by one column, then by another, as `numpy.lexsort` does.

    It is quick where both fit into one number, as rows mostly come in few runs that ascend.

    Example::

        >>> order_of(np.array([1, 0, 1]), np.array([5, 7, 4])).tolist()
        [1, 2, 0]
    """
    if len(minor):
        low, least = int(minor.min()), int(major.min())
        width = int(minor.max()) - low + 1
        if (int(major.max()) - least + 1) * width < _LARGEST_CODE:
            code = (major.astype(np.int64) - least) * width + (minor - low)
            return np.argsort(code, kind="stable")
    return np.lexsort((minor, major))


def number_occurrences(*key: Int64s) -> tuple[Int64s, Int64s]:
    """Number the rows of each key from 0, in their order, and return the key's number of rows, too.

    Args:
        key: Columns that together are the key of a row; shape (rows,) each.

    Example::

        >>> [part.tolist() for part in number_occurrences(np.array([7, 3, 7]))]
        [[0, 0, 1], [2, 1, 2]]
    """
    order = np.lexsort(key[::-1])
    starts = group_starts(*(column[order] for column in key))
    sizes = group_sizes(starts, len(order))
    number, count = np.empty((2, len(order)), dtype=np.int64)
    number[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    count[order] = np.repeat(sizes, sizes)
    return number, count


def match_occurrences(
    key: Sequence[Int64s | Mask], rank: Int64s, start_ns: Int64s
) -> tuple[Int64s, Int64s]:
    """Return the rows that have counterparts on other ranks, occurrence by occurrence.

    Keys of which ranks have different numbers of rows are left out, as are those of one rank alone.
    Takes O(n log n) time.

    Args:
        key: Columns that together are the key of a row; shape (rows,) each.
        rank: Rank of each row.
        start_ns: By which the rows of a key and rank are counted; ranks are not compared by it.

    Returns:
        Row numbers, those of one occurrence after one another, by rank; and the position in them
        at which each occurrence starts. Occurrences are ordered by key, then by their number.

    Example::

        >>> key, rank, start = np.array([[4, 4, 4, 4], [0, 0, 1, 1], [1, 2, 8, 9]])
        >>> [part.tolist() for part in match_occurrences([key], rank, start)]
        [[0, 2, 1, 3], [0, 2]]
    """
    order = np.lexsort((start_ns, rank, *key[::-1]))
    columns = [column[order] for column in key]
    key_starts, rank_starts = group_starts(*columns), group_starts(*columns, rank[order])
    counts = group_sizes(rank_starts, len(order))
    first = np.searchsorted(rank_starts, key_starts)
    equal = np.minimum.reduceat(counts, first) == np.maximum.reduceat(counts, first)
    shared = equal & (group_sizes(first, len(rank_starts)) > 1)
    sizes = group_sizes(key_starts, len(order))
    kept = np.flatnonzero(np.repeat(shared, sizes))
    # The number of an occurrence is less than its key's number of rows, so the sum is unique.
    number = np.arange(len(order)) - np.repeat(rank_starts, counts)
    occurrence = number[kept] + np.repeat(key_starts, sizes)[kept]
    by_occurrence = np.argsort(occurrence, kind="stable")
    return order[kept[by_occurrence]], group_starts(occurrence[by_occurrence])


def ended_together(starts: Int64s, ends: Int64s) -> Mask:
    """Mark the calls in which two ranks met, as their ends show; no clock is needed.

    Members of one collective end together, however late each arrives. So if most ends differ by one
    offset of the clocks, far more closely than starts do, calls with such ends were collectives of
    both ranks. Ranks that always start together show nothing.

    Args:
        starts: By how much later the second rank started each call; shape (calls,).
        ends: By how much later it ended.

    Example::

        >>> starts, ends = np.array([[0, 900, -400, 70, 500], [7, 8, 7, 7, 600]])
        >>> ended_together(starts, ends).tolist()
        [True, True, True, True, False]
    """
    if len(ends) < _MIN_MEETINGS:
        return np.zeros(len(ends), dtype=bool)
    offset, usual = (np.sort(each)[len(each) // 2] for each in (ends, starts))
    found: Mask = abs(ends - offset) * _CLOSER < np.median(abs(starts - usual))
    count = np.count_nonzero(found)
    return found & (count >= _MIN_MEETINGS and 2 * count > len(found))
