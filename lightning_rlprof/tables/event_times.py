"""Which times of recorded events can be true: one check for what every profiler writes.

Damaged events have a start of zero or of another date, or an end long after the next work of their
stream began. What of them is true still counts; the rest is in no sum.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, Mask, differs
from lightning_rlprof.tables.kernels import Coded
from lightning_rlprof.tables.table import ImpossibleTimes

DATE_NS = 8 * 3_600 * 10**9
"""Events are of another date if none began for this long, or for up to twice as long."""

LONGEST_NS = 86_400 * 10**9
"""No event takes a day: real captures last minutes."""

_NEVER = 2**62  # Nanoseconds: the year 2116.

# Kernels of programmatic dependent launches begin up to 2.4 µs before the one before has ended.
_OVERLAP_NS = 20_000
_MARGIN_NS = 10**9  # A device works on for a while when the host is done.

# If more of a stream overlaps, it is not one stream. If more of the work is not within the host's
# recording, the two have different clocks. Then nothing is doubted.
_MOST_OVERLAPS, _MOST_OUTSIDE = 0.1, 0.5
_NAMED = 3


class DeviceTimes(NamedTuple):
    """What of the times of a device's work can be true.

    Attributes:
        end_ns: Ends; those that cannot be true are the start of the next work of the stream.
        bounded: Which ends that are.
        untimed: Which rows have no time that can be true.
    """

    end_ns: Int64s
    bounded: Mask
    untimed: Mask

    def at(self, rows: Int64s | slice) -> "DeviceTimes":
        """Return the times of some rows."""
        return DeviceTimes(self.end_ns[rows], self.bounded[rows], self.untimed[rows])

    def remarks(self, what: str, called: Coded | None) -> list[str]:
        """Say how many rows are doubted, and what they are called."""
        texts = (
            (self.untimed, "untimed", "are left out, as their times cannot be true"),
            (self.bounded, "bounded", "have impossible ends and last at most to the next work"),
        )
        found = []
        for rows, fact, text in texts:
            if count := int(np.count_nonzero(rows)):
                end = "" if called is None else named(called[0][rows].tolist(), called[1])
                found.append(ImpossibleTimes(f"{count} {what} {text}{end}", **{fact: count}))
        return [*found]


def named(codes: Iterable[int], names: Sequence[str]) -> str:
    """Return the end of a text that names some events by the codes of their names, "" without.

    Example::

        >>> named([3, 1, -1, 1], ["a", "b", "c", "d"]), named([-1], [])
        (': b, d', '')
    """
    some = [names[each] for each in sorted({*codes} - {-1})]
    more = f" and {len(some) - _NAMED} more" if len(some) > _NAMED else ""
    return f": {', '.join(some[:_NAMED])}{more}" if some else ""


def main_dates(date: Int64s, count: Int64s) -> tuple[int, int]:
    """Return the first and the last date of those that follow one another with most events.

    Args:
        date: Distinct numbers of dates, which are `DATE_NS` long, ascending.
        count: How many events began on each.

    Example::

        >>> main_dates(np.array([0, 60, 61, 80]), np.array([1, 2, 3, 4]))
        (60, 61)
    """
    if not len(date):
        return 0, -1
    group = np.cumsum(np.diff(date, prepend=date[0]) > 1)
    sums = np.bincount(group, count)
    # Times of zero come first, so the later one of two is more likely to be true.
    own = date[group == len(sums) - 1 - sums[::-1].argmax()]
    return int(own[0]), int(own[-1])


def of_one_date(start_ns: Int64s) -> Mask:
    """Return which starts are not of another date than most.

    Example::

        >>> of_one_date(np.array([0, 10**18, 10**18 + 9])).tolist()
        [False, True, True]
    """
    date = start_ns // DATE_NS
    dates, count = np.unique(date, return_counts=True)
    first, last = main_dates(dates, count)
    return np.asarray((date >= first) & (date <= last))


def plausible(start_ns: Int64s, end_ns: Int64s) -> Mask:
    """Return which rows have possible times since 1970: neither too long nor of another date.

    Example::

        >>> start = np.array([10**18, 1_000, 10**18 + 9])
        >>> plausible(start, np.array([10**18 + 5, 1_005, 10**18])).tolist()
        [True, False, False]
    """
    sound = (start_ns > 0) & (start_ns < _NEVER) & (end_ns >= start_ns)
    sound &= end_ns - start_ns < LONGEST_NS
    sound[sound] = of_one_date(start_ns[sound])
    return sound


def device_times(
    lane: Int64s, start_ns: Int64s, end_ns: Int64s, launch: Int64s, host: tuple[int, int] | None
) -> DeviceTimes:
    """Check work of devices, which run what is in one stream in its order.

    Takes O(n log n) time.

    Args:
        lane: Number of the stream, below 0 where it is not known.
        start_ns: When each began.
        end_ns: When it ended, as it was recorded, at least ``start_ns`` and below 2**62.
        launch: Number of the call, below 0 without: the kernels of a graph replay have one call,
            and may overlap.
        host: When the first event of the host began, and its last one ended; None if unknown.

    Example::

        >>> lane, launch = np.zeros(3, np.int64), np.full(3, -1)
        >>> device_times(lane, np.array([0, 5, 9]) * 10**6, np.array([4, 50, 12]) * 10**6, launch,
        ...     (0, 20 * 10**6)).end_ns.tolist()
        [4000000, 9000000, 12000000]
    """
    long = end_ns - start_ns >= LONGEST_NS
    # CUPTI writes both as 0 if it could not collect the times.
    untimed = (start_ns == 0) & ((end_ns == 0) if host is None else host[0] > _OVERLAP_NS)
    first, last = (-_NEVER, _NEVER) if host is None else host
    margin = 0 if host is None else max(_MARGIN_NS, last - first)
    untimed |= _few((start_ns < first - margin) | (start_ns > last + margin))
    late = _few(end_ns > last + margin) | long
    end_ns, bounded = end_ns.copy(), np.zeros(len(end_ns), bool)
    order = np.lexsort((start_ns, lane))
    order = order[~untimed[order] & (lane[order] >= 0)]
    next_start = _next_starts(lane[order], start_ns[order], launch[order])
    rare = _rare(lane[order], end_ns[order] > next_start + _OVERLAP_NS)
    bounded[order[rare | (late[order] & (end_ns[order] > next_start))]] = True
    end_ns[order] = np.where(bounded[order], next_start, end_ns[order])
    untimed |= late & ~bounded
    return DeviceTimes(end_ns, bounded & ~untimed, untimed)


def _next_starts(lane: Int64s, start_ns: Int64s, launch: Int64s) -> Int64s:
    """Return when the next work of another launch began, of rows by lane and start."""
    new = differs(lane, launch) | (launch < 0)
    heads = np.flatnonzero(new)
    following = np.append(start_ns[heads], _NEVER)[1:]
    following[:-1][lane[heads[1:]] != lane[heads[:-1]]] = _NEVER
    found: Int64s = following[np.cumsum(new) - 1]
    return found


def _rare(lane: Int64s, rows: Mask) -> Mask:
    """Return the rows of those lanes in which they are few."""
    code = np.cumsum(differs(lane)) - 1
    most = np.maximum(np.bincount(code) * _MOST_OVERLAPS, 1)
    kept: Mask = rows & (np.bincount(code, rows) <= most)[code]
    return kept


def _few(rows: Mask) -> Mask:
    """Return the rows if they are few, else none."""
    few = np.count_nonzero(rows) <= max(len(rows) * _MOST_OUTSIDE, 1)
    return rows if few else np.zeros_like(rows)
