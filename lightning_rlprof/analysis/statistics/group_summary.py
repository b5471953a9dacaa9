"""Integer statistics of many groups at once."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lightning_rlprof.tables.arrays import Float64s, Int64s, group_sizes, group_starts

_Whole = TypeVar("_Whole", int, Int64s)


@dataclass(frozen=True, eq=False)
class Summary:
    """One entry per group, in ascending order of ``group``; all in the unit of the values.

    Quantiles are nearest rank: a value that occurred, so integers stay integers.
    """

    group: Int64s
    count: Int64s
    total: Int64s
    mean: Int64s
    p50: Int64s
    p95: Int64s
    max: Int64s


def mean(total: _Whole, count: _Whole) -> _Whole:
    """Divide, rounded to the nearest integer, halves up."""
    return (2 * total + count) // (2 * count)


def summarize(groups: Int64s, values: Int64s) -> Summary:
    """Summarize values by group, neither negative; groups that do not occur have no entry.

    Example::

        >>> summarize(np.array([7, 7, 7]), np.array([10, 2, 4])).p50.tolist()
        [4]
    """
    groups, values = _sorted(groups, values)
    heads = group_starts(groups)
    count = group_sizes(heads, len(groups))
    total = np.add.reduceat(values, heads) if len(heads) else values
    return Summary(
        groups[heads],
        count,
        total,
        mean(total, count),
        *(values[heads + (count * percent + 99) // 100 - 1] for percent in (50, 95, 100)),
    )


def rows_by_group(*columns: Int64s) -> list[Int64s]:
    """Return the rows of each group of equal values, groups ascending; its rows keep their order.

    Example::

        >>> [rows.tolist() for rows in rows_by_group(np.array([7, 3, 7]))]
        [[1], [0, 2]]
    """
    order = np.lexsort(columns[::-1])
    heads = group_starts(*(column[order] for column in columns))
    return np.split(order, heads[1:]) if len(order) else []


def _sorted(groups: Int64s, values: Int64s) -> tuple[Int64s, Int64s]:
    """Sort by group, then value; groups and values are not negative."""
    bits = int(values.max(initial=0)).bit_length()
    if int(groups.max(initial=0)).bit_length() + bits < 64:
        # One number per pair: numpy sorts numbers ten times as fast as pairs.
        keys = groups << bits
        keys |= values
        keys.sort()
        return keys >> bits, keys & ((1 << bits) - 1)
    order = np.lexsort((values, groups))
    return groups[order], values[order]


def group_medians(group: Int64s, values: Float64s, groups: int) -> Float64s:
    """Return the median of each group, NaN for those without values.

    Example::

        >>> group_medians(np.array([0, 2, 2]), np.array([5.0, 1.0, 2.0]), 3).tolist()
        [5.0, nan, 1.5]
    """
    order = np.lexsort((values, group))
    first = np.searchsorted(group[order], np.arange(groups))
    count = np.bincount(group, minlength=groups)
    ordered = np.append(values[order], np.nan)
    low, high = (np.where(count > 0, first + at, -1) for at in ((count - 1) // 2, count // 2))
    return np.asarray((ordered[low] + ordered[high]) / 2)
