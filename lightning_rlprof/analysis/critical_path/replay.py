"""The order in which runs that meet can be gone through; how long anything takes is nothing to it.

A run is what one thread does in one lap, piece by piece. In a join all wait for the last one; who
only hands something over goes on at once.

Longest paths through runs that meet: replay with any durations, the path, and slack.

A run is what one thread does in one lap, piece by piece. A join begins when the last run has come
to it, lasts as long as its transfer, and ends for all at once. Who only hands something over, the
others wait for, and it goes on at once. Exact in integer nanoseconds.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, Mask

OWN = -1
"""Stands in a piece's join for "none": the time is the run's own."""


@dataclass(frozen=True, eq=False)
class Plan:
    """In which order joins can be gone through; durations do not matter to it.

    Attendances are numbered in an order in which they can be played. A run's beginning stands
    behind them all, as if it were one: their number + the run's.

    Attributes:
        run: Run of each piece, ascending.
        join: Join of each piece, or `OWN`.
        hands: Pieces that only hand over, and do not wait.
        runs: How many runs there are, by chain and then lap.
        laps: How many laps there are.
        at: Pieces that attend a join, ascending.
        number: Number of each of them.
        piece: The piece of each attendance, by number like all that follows.
        group: Its join.
        gives: Whether it only hands over, and does not wait.
        since: The piece with which the way there begins.
        before: The attendance that the same run left before.
        last: The last attendance of each run.
        tail: The piece with which the rest of each run begins.
        until: The piece after the last one of each run.
        levels: Attendances and joins that depend on earlier levels alone.
        stuck: Joins that wait for one another in a circle, or lie in several laps.
    """

    run: Int64s
    join: Int64s
    hands: Mask
    runs: int
    laps: int
    at: Int64s
    number: Int64s
    piece: Int64s
    group: Int64s
    gives: Mask
    since: Int64s
    before: Int64s
    last: Int64s
    tail: Int64s
    until: Int64s
    levels: "tuple[_Level, ...]"
    stuck: Mask


class _Level(NamedTuple):
    """Attendances that come, and joins that begin then: their attendances and where each starts."""

    come: slice
    hands: Int64s
    joins: Int64s
    members: Int64s
    heads: Int64s
    waits: Int64s
    size: Int64s


def plan(run: Int64s, join: Int64s, runs: int, laps: int, hands: Mask | None = None) -> Plan:
    """Order the joins.

    Args:
        run: Run of each piece, ascending; run = chain x laps + lap.
        join: Join of each piece in the order of time, or `OWN`; every number occurs.
        runs: How many runs there are.
        laps: How many laps there are.
        hands: Pieces that hand over to those who wait in their join, and do not wait; None: none.
    """
    at = np.flatnonzero(join != OWN)
    group, owner = join[at], run[at]
    hands = np.zeros(len(run), dtype=bool) if hands is None else hands
    gives = hands[at]
    same = np.append(False, owner[1:] == owner[:-1])[: len(at)]
    come, level = _levels(group, same, gives)
    order, number = np.argsort(come, kind="stable"), np.empty(len(at), dtype=np.int64)
    number[order] = np.arange(len(at))
    begin = np.searchsorted(run, np.arange(runs))
    until = np.append(begin[1:], len(run))
    since = np.where(same, np.append(0, at + 1)[: len(at)], begin[owner])
    before = np.where(same, np.append(0, number)[: len(at)], len(at) + owner)
    final = np.flatnonzero(np.append(owner[1:] != owner[:-1], True)[: len(at)])
    last, tail = len(at) + np.arange(runs), begin.copy()
    last[owner[final]], tail[owner[final]] = number[final], at[final] + 1
    levels = _cut(come[order], group[order], gives[order], level)
    ordered = (at[order], group[order], gives[order], since[order], before[order])
    ends, stuck = (last, tail, until), (level < 0) | _apart(group, owner % laps, len(level))
    return Plan(run, join, hands, runs, laps, at, number, *ordered, *ends, levels, stuck)


def _apart(group: Int64s, lap: Int64s, joins: int) -> Mask:
    """Tell which joins lie in several laps."""
    low, high = np.full(joins, np.iinfo(np.int64).max), np.full(joins, -1)
    np.minimum.at(low, group, lap)
    np.maximum.at(high, group, lap)
    found: Mask = low != high
    return found


def _levels(group: Int64s, same: Mask, hands: Mask) -> tuple[Int64s, Int64s]:
    """Return for attendances and joins how many must come before them; `OWN` in a circle.

    Args:
        group: Join of each attendance, by run and time.
        same: Whether the attendance before is of the same run.
        hands: Whether it goes on without waiting.
    """
    order = np.argsort(group, kind="stable")
    size = np.bincount(group)
    head = np.cumsum(size) - size
    come, level = np.full(len(group), OWN), np.full(len(size), OWN)
    left, follows = size.copy(), np.append(same[1:], False)[: len(group)]
    now, depth, some = np.flatnonzero(~same), 0, bool(hands.any())
    while len(now):
        come[now] = depth
        here = group[now]
        np.subtract.at(left, here, 1)
        full = np.unique(here[left[here] == 0])
        level[full] = depth
        count = size[full]
        inside = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        members = order[np.repeat(head[full], count) + inside]
        if some:
            members = np.append(members[~hands[members]], now[hands[now]])
        now, depth = members[follows[members]] + 1, depth + 1
    return come, level


def _cut(come: Int64s, group: Int64s, hands: Mask, level: Int64s) -> tuple[_Level, ...]:
    """Return the levels of attendances in their order; those in circles belong to none."""
    joins = np.argsort(level, kind="stable")
    rank = np.empty_like(joins)
    rank[joins] = np.arange(len(joins))
    members = np.argsort(rank[group], kind="stable")
    size = np.bincount(group, minlength=len(level))[joins]
    heads = np.cumsum(size) - size
    waiting = np.bincount(group[~hands], minlength=len(level))[joins]
    found, depths = [], np.arange(int(come.max(initial=-1)) + 2)
    rows, firsts = np.searchsorted(come, depths), np.searchsorted(level[joins], depths)
    until = np.append(heads, len(group))
    for depth in depths[:-1].tolist():
        low, high = rows[depth : depth + 2].tolist()
        own = slice(*firsts[depth : depth + 2].tolist())
        mine = members[until[own.start] : until[own.stop]]
        gives = low + np.flatnonzero(hands[low:high])
        first = heads[own] - until[own.start]
        part = (mine, first, mine[~hands[mine]], waiting[own])
        found.append(_Level(slice(low, high), gives, joins[own], *part))
    return tuple(found)


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
