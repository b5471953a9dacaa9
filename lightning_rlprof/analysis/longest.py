"""Longest paths through runs that meet: replay with any durations, the path, and slack.

A run is what one thread does in one lap, piece by piece. A join begins when the last run has come
to it, lasts as long as its transfer, and ends for all at once. Exact in integer nanoseconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rlprof.spans import Int64s

__all__ = ["OWN", "Path", "Plan", "Times", "longest", "plan", "replay"]

OWN = -1
"""Stands in a piece's join for "none": the time is the run's own."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Plan:
    """In which order joins can be gone through; durations do not matter to it.

    Attributes:
        run: Run of each piece, ascending.
        join: Join of each piece, or `OWN`.
        runs: How many runs there are, by chain and then lap.
        laps: How many laps there are.
        at: Pieces that attend a join.
        before: The join that the same run left before each of them, `OWN` where there was none.
        since: The piece with which its way there begins.
        last: The last join of each run, or `OWN`.
        tail: The piece with which the rest of each run begins.
        until: The piece after the last one of each run.
        levels: Attendances, as indices into ``at`` by join, that depend on earlier levels alone.
        stuck: Joins that wait for one another in a circle, or lie in several laps.
    """

    run: Int64s
    join: Int64s
    runs: int
    laps: int
    at: Int64s
    before: Int64s
    since: Int64s
    last: Int64s
    tail: Int64s
    until: Int64s
    levels: tuple[Int64s, ...]
    stuck: Mask


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


def plan(run: Int64s, join: Int64s, runs: int, laps: int) -> Plan:
    """Order the joins.

    Args:
        run: Run of each piece, ascending; run = chain x laps + lap.
        join: Join of each piece in the order of time, or `OWN`; every number occurs.
        runs: How many runs there are.
        laps: How many laps there are.
    """
    at = np.flatnonzero(join != OWN)
    group, owner = join[at], run[at]
    same = np.append(False, owner[1:] == owner[:-1])[: len(at)]
    before = np.where(same, np.append(OWN, group)[: len(at)], OWN)
    head = np.searchsorted(run, np.arange(runs))
    until = np.searchsorted(run, np.arange(runs), "right")
    since = np.where(same, np.append(0, at + 1)[: len(at)], head[owner])
    final = np.flatnonzero(np.append(owner[1:] != owner[:-1], True)[: len(at)])
    last, tail = np.full(runs, OWN), head.copy()
    last[owner[final]], tail[owner[final]] = group[final], at[final] + 1
    level, lap = _levels(group, same), owner % laps
    stuck = level < 0
    low, high = np.full(len(level), laps), np.full(len(level), -1)
    np.minimum.at(low, group, lap)
    np.maximum.at(high, group, lap)
    order = np.lexsort((group, level[group]))
    heads = np.flatnonzero(np.diff(level[group[order]], prepend=-2))
    levels = tuple(np.split(order, heads[1:])) if len(order) else ()
    places = (at, before, since, last, tail, until)
    return Plan(run, join, runs, laps, *places, levels, stuck | (low != high))


def _levels(group: Int64s, same: Mask) -> Int64s:
    """Return for each join how many must come before it, at most; `OWN` in a circle.

    Args:
        group: Join of each attendance, by run and time.
        same: Whether the attendance before is of the same run.
    """
    order = np.argsort(group, kind="stable")
    size = np.bincount(group)
    head = np.cumsum(size) - size
    level, come = np.full(len(size), OWN), np.zeros(len(size), dtype=np.int64)
    follows = np.append(same[1:], False)[: len(group)]
    now, depth = np.flatnonzero(~same), 0
    while len(now):
        here = group[now]
        np.add.at(come, here, 1)
        full = np.unique(here[come[here] == size[here]])
        level[full] = depth
        count = size[full]
        inside = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        members = order[np.repeat(head[full], count) + inside]
        now, depth = members[follows[members]] + 1, depth + 1
    return level


def replay(its: Plan, own_ns: Int64s, transfer_ns: Int64s, offset_ns: Int64s) -> Times:
    """Let all runs happen with these durations.

    Args:
        its: The order.
        own_ns: Own time of each piece; that of joins does not count.
        transfer_ns: How long each join takes when all have come.
        offset_ns: How much later than its lap each run begins.
    """
    total = _running(its, own_ns)
    way = total[its.at] - total[its.since]
    ready = np.zeros(len(its.at), dtype=np.int64)
    start, finish = np.zeros((2, len(transfer_ns)), dtype=np.int64)
    begin = offset_ns[its.run[its.at]]
    for level in its.levels:
        group, before = its.join[its.at[level]], its.before[level]
        left = np.where(before == OWN, begin[level], finish[before])
        ready[level] = left + way[level]
        heads = np.flatnonzero(np.diff(group, prepend=-1))
        which = group[heads]
        start[which] = np.maximum.reduceat(ready[level], heads)
        finish[which] = start[which] + transfer_ns[which]
    left = np.where(its.last == OWN, offset_ns, np.append(finish, 0)[its.last])
    end = left + total[its.until] - total[its.tail]
    return Times(ready, start, finish, end, end.reshape(-1, its.laps).max(axis=0))


def _running(its: Plan, own_ns: Int64s) -> Int64s:
    own = np.where(its.join == OWN, own_ns, 0)
    return np.concatenate([[0], np.cumsum(own)])


def longest(its: Plan, own_ns: Int64s, transfer_ns: Int64s, offset_ns: Int64s) -> Path:
    """Find the longest path of each lap, the first of several as long, and everyone's slack."""
    found = replay(its, own_ns, transfer_ns, offset_ns)
    total, joint = _running(its, own_ns), len(transfer_ns)
    way = total[its.at] - total[its.since]
    ends = found.end.reshape(-1, its.laps)
    until = np.tile(found.lap, len(ends))
    late = np.full(joint + 1, np.iinfo(np.int64).max)  # the last item is for "no join"
    np.minimum.at(late, its.last, until - (total[its.until] - total[its.tail]))
    on_tail, on_join = np.zeros(its.runs, dtype=bool), np.zeros(joint + 1, dtype=bool)
    on_tail[ends.argmax(axis=0) * its.laps + np.arange(its.laps)] = True
    on_join[its.last[on_tail]] = True
    on_way, slack = np.zeros(len(its.at), dtype=bool), np.zeros(len(its.at), dtype=np.int64)
    for level in its.levels[::-1]:
        group, before = its.join[its.at[level]], its.before[level]
        start = late[group] - transfer_ns[group]
        slack[level] = start - found.ready[level]
        np.minimum.at(late, before, start - way[level])
        last = level[on_join[group] & (found.ready[level] == found.start[group])]
        first = last[np.unique(its.join[its.at[last]], return_index=True)[1]]
        on_way[first] = True
        on_join[its.before[first]] = True
        late[joint], on_join[joint] = np.iinfo(np.int64).max, False
    return _by_piece(its, own_ns, transfer_ns, on_way, on_tail, slack, late, found)


def _by_piece(
    its: Plan,
    own_ns: Int64s,
    transfer_ns: Int64s,
    on_way: Mask,
    on_tail: Mask,
    slack: Int64s,
    late: Int64s,
    found: Times,
) -> Path:
    """Hand down to pieces what is known of the ways to joins, and of the rests of runs."""
    pieces = np.arange(len(its.run))
    next_one = np.searchsorted(its.at, pieces)
    rest = pieces >= its.tail[its.run]
    spare = np.tile(found.lap, its.runs // its.laps) - found.end
    on = np.where(rest, on_tail[its.run], np.append(on_way, False)[next_one])
    room = np.where(rest, spare[its.run], np.append(slack, 0)[next_one])
    weight = own_ns.copy()
    group = its.join[its.at]
    weight[its.at] = transfer_ns[group]
    room[its.at] = late[group] - found.finish[group]
    return Path(on, room, weight)
