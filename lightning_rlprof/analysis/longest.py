"""Longest paths through runs that meet: replay with any durations, the path, and slack.

A run is what one thread does in one lap, piece by piece. A join begins when the last run has come
to it, lasts as long as its transfer, and ends for all at once. Who only hands something over, the
others wait for, and it goes on at once. Exact in integer nanoseconds.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.plan import OWN, Plan
from lightning_rlprof.spans import Int64s

__all__ = ["OWN", "Path", "Times", "longest", "replay"]

Mask = npt.NDArray[np.bool_]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Times:
    """What happens when: attendances are ``ready``, joins ``start`` and ``finish``, runs ``end``.

    All count from the beginning of the lap. ``lap`` is when the last run of each lap ends.
    """

    ready: Int64s
    start: Int64s
    finish: Int64s
    end: Int64s
    lap: Int64s


@dataclass(frozen=True, eq=False)
class Path:
    """The longest path, piece by piece.

    Attributes:
        on: Whether a piece is on it; of a join only the attendance that came last.
        slack: How much longer a piece may take, it alone, before its lap does.
        weight: What a piece adds to a path: its own time, or its join's transfer.
    """

    on: Mask
    slack: Int64s
    weight: Int64s


def replay(its: Plan, own_ns: Int64s, transfer_ns: Int64s, offset_ns: Int64s) -> Times:
    """Let all runs happen with these durations.

    Args:
        its: The order.
        own_ns: Own time of each piece; that of joins does not count.
        transfer_ns: How long each join takes when all have come.
        offset_ns: How much later than its lap each run begins.
    """
    total = _running(its, own_ns)
    way = total[its.piece] - total[its.since]
    ready = np.zeros(len(way), dtype=np.int64)
    left = np.append(ready, offset_ns)
    start, finish = np.zeros((2, len(transfer_ns)), dtype=np.int64)
    for each in its.levels:
        now = ready[each.come] = left[its.before[each.come]] + way[each.come]
        left[each.hands] = now[each.hands - each.come.start]
        if len(each.joins):
            begun = start[each.joins] = np.maximum.reduceat(ready[each.members], each.heads)
            done = finish[each.joins] = begun + transfer_ns[each.joins]
            left[each.waits] = np.repeat(done, each.size)
    end = left[its.last] + total[its.until] - total[its.tail]
    return Times(ready, start, finish, end, end.reshape(-1, its.laps).max(axis=0))


def _running(its: Plan, own_ns: Int64s) -> Int64s:
    total = np.zeros(len(own_ns) + 1, dtype=np.int64)
    np.cumsum(np.where(its.join == OWN, own_ns, 0), out=total[1:])
    return total


def longest(its: Plan, own_ns: Int64s, transfer_ns: Int64s, offset_ns: Int64s) -> Path:
    """Find the longest path of each lap, the first of several as long, and everyone's slack."""
    found = replay(its, own_ns, transfer_ns, offset_ns)
    total, count = _running(its, own_ns), len(its.piece)
    ends = found.end.reshape(-1, its.laps)
    due = np.full(count + its.runs, _NEVER)  # when an attendance must be left
    due[its.last] = np.tile(found.lap, len(ends)) - (total[its.until] - total[its.tail])
    on_tail, leads = np.zeros(its.runs, dtype=bool), np.zeros(count + its.runs, dtype=bool)
    on_tail[ends.argmax(axis=0) * its.laps + np.arange(its.laps)] = True
    leads[its.last[on_tail]] = True
    way = total[its.piece] - total[its.since]
    back = _back(its, way, transfer_ns, found, due, leads)
    return _by_piece(its, own_ns, transfer_ns, found, on_tail, back)


class _Back(NamedTuple):
    """Of attendances: is the path's join reached through it, or a way to it on the path, and slack.

    ``spare`` is the slack of each join's transfer.
    """

    last: Mask
    way: Mask
    slack: Int64s
    spare: Int64s


def _back(
    its: Plan, way: Int64s, transfer_ns: Int64s, found: Times, due: Int64s, leads: Mask
) -> _Back:
    """Go through the levels from the end.

    ``way`` is how long it takes to each attendance, ``due`` when it must be left and ``leads``
    whether the path leaves it; the last two are known of each run's last one.
    """
    count = len(way)
    late, limit = np.full(len(transfer_ns), _NEVER), np.full(count, _NEVER)
    last = np.zeros(count, dtype=bool)
    for each in its.levels[::-1]:
        if len(each.joins):
            firsts = np.cumsum(each.size) - each.size
            sizes = np.diff(np.append(each.heads, len(each.members)))
            led = np.repeat(np.logical_or.reduceat(leads[each.waits], firsts), sizes)
            begun = np.repeat(found.start[each.joins], sizes)
            came = each.members[led & (found.ready[each.members] == begun)]
            last[came[np.unique(its.group[came], return_index=True)[1]]] = True
            done = late[each.joins] = np.minimum.reduceat(due[each.waits], firsts)
            limit[each.members] = np.repeat(done - transfer_ns[each.joins], sizes)
        limit[each.hands] = np.minimum(limit[each.hands], due[each.hands])
        before, come = its.before[each.come], each.come
        due[before] = limit[come] - way[come]
        leads[before] = last[come] | its.gives[come] & leads[come]
    return _Back(last, last | its.gives & leads[:count], limit - found.ready, late - found.finish)


def _by_piece(
    its: Plan, own_ns: Int64s, transfer_ns: Int64s, found: Times, on_tail: Mask, back: _Back
) -> Path:
    """Hand down to pieces what is known of the ways to joins, and of the rests of runs."""
    pieces = np.arange(len(its.run))
    next_one = np.searchsorted(its.at, pieces)
    rest = pieces >= its.tail[its.run]
    spare = np.tile(found.lap, its.runs // its.laps) - found.end
    on_way, slack = back.way[its.number], back.slack[its.number]
    on = np.where(rest, on_tail[its.run], np.append(on_way, False)[next_one])
    room = np.where(rest, spare[its.run], np.append(slack, 0)[next_one])
    weight = own_ns.copy()
    weight[its.piece] = transfer_ns[its.group]
    room[its.piece] = back.spare[its.group]
    on[its.piece] = back.last
    return Path(on, room, weight)
