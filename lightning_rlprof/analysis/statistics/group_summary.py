"""Integer statistics of many groups at once."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lightning_rlprof.tables.arrays import Int64s

_Whole = TypeVar("_Whole", int, Int64s)
_SHORT = 2**16
_MEMBERS = 32  # values a group from which on picking quantiles is faster than sorting


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


@dataclass(frozen=True, eq=False)
class Totals:
    """One entry per group, in ascending order of ``group``; all in the unit of the values."""

    group: Int64s
    count: Int64s
    total: Int64s
    mean: Int64s
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
    if len(groups) and int(groups.max()) < _SHORT:
        count = np.bincount(groups)
        group = np.flatnonzero(count)
        if len(group) * _MEMBERS <= len(groups):
            return _few(groups, values, group, count[group])
    return _by_sorting(groups, values)


def _by_sorting(groups: Int64s, values: Int64s) -> Summary:
    groups, values = _sorted(groups, values)
    heads = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    count = np.diff(heads, append=len(groups))
    total = np.add.reduceat(values, heads) if len(heads) else values
    return Summary(
        groups[heads],
        count,
        total,
        mean(total, count),
        *(values[heads + _place(count, percent)] for percent in (50, 95, 100)),
    )


def summarize_runs(group: Int64s, count: Int64s, values: Int64s) -> Summary:
    """Summarize groups, ascending, whose values lie group by group; no group is empty.

    The values may be left in another order: those of large groups are not sorted, but picked.
    """
    if len(values) < len(group) * _MEMBERS:
        return _by_sorting(np.repeat(group, count), values)
    heads = np.cumsum(count) - count
    total, longest = np.add.reduceat(values, heads), np.maximum.reduceat(values, heads)
    places = _place(count, 50), _place(count, 95)
    for first, size, *own in zip(*(each.tolist() for each in (heads, count, *places)), strict=True):
        values[first : first + size].partition(own)
    p50, p95 = (values[heads + place] for place in places)
    return Summary(group, count, total, mean(total, count), p50, p95, longest)


def totals(groups: Int64s, values: Int64s) -> Totals:
    """Sum values by group, neither negative; `summarize` without quantiles, and no sorting.

    Example::

        >>> totals(np.array([7, 7, 3]), np.array([10, 2, 4])).total.tolist()
        [4, 12]
    """
    names = None
    if int(groups.max(initial=0)) >= max(_SHORT, len(groups)):
        names, groups = np.unique(groups, return_inverse=True)
    count = np.bincount(groups)
    total, longest = np.zeros((2, len(count)), dtype=np.int64)
    np.add.at(total, groups, values)
    np.maximum.at(longest, groups, values)
    some = np.flatnonzero(count)
    count, total = count[some], total[some]
    group = some if names is None else names[some]
    return Totals(group, count, total, mean(total, count), longest[some])


def _few(groups: Int64s, values: Int64s, group: Int64s, count: Int64s) -> Summary:
    """Summarize few large groups: numpy sorts short numbers by radix."""
    if (groups[1:] < groups[:-1]).any():
        values = values[np.argsort(groups.astype(np.uint16), kind="stable")]
    else:
        values = values.copy()
    return summarize_runs(group, count, values)


def _place(count: Int64s, percent: int) -> Int64s:
    """Return the place of a quantile among sorted values."""
    return (count * percent + 99) // 100 - 1


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
