"""Match calls across ranks by their order: the n-th call of a key is the same one on all ranks.

Ranks of one job run the same program, so this needs no clocks. A key is for instance a process
group, an operation and a step.
"""

from collections.abc import Sequence

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, Mask, group_sizes, group_starts


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
