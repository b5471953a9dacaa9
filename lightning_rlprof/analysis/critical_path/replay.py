"""Replay of a step graph with any durations, its longest paths, and slack.

A run is one training thread in one step interval, as a sequence of segments. A sync point starts
when the last run has arrived, lasts as long as its transfer, and ends for all at once. A run that
produces a handoff continues at once; those that need it wait. `Schedule` orders the sync points
independently of durations. Times are integer nanoseconds, so results are exact.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, Mask

WORK = -1
"""Stands for "no sync point": the time of the segment is work of its run."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The order in which sync points can be replayed, for any durations.

    Visits are numbered in this order. The start of a run counts as one more visit, numbered after
    all others: number of visits + run.

    Attributes:
        run: Run of each segment, ascending.
        sync_point: Sync point of each segment, or `WORK`.
        produces: Whether the segment only produces a handoff and doesn't wait.
        runs: Number of runs, ordered by chain and then interval.
        interval_count: Number of step intervals.
        at: Segments that visit a sync point, ascending.
        number: Number of each of these visits.
        piece: Segment of each visit, by number like all that follows.
        group: Its sync point.
        visit_produces: Whether it only produces a handoff and doesn't wait.
        since: First segment on the way to the visit.
        before: Previous visit of the same run.
        last: Last visit of each run.
        tail: First segment of each run after its last visit.
        until: Segment after the last one of each run.
        levels: Visits and sync points that depend on earlier levels only.
        stuck: Sync points that wait for each other in a cycle, or lie in several intervals.
    """

    run: Int64s
    sync_point: Int64s
    produces: Mask
    runs: int
    interval_count: int
    at: Int64s
    number: Int64s
    piece: Int64s
    group: Int64s
    visit_produces: Mask
    since: Int64s
    before: Int64s
    last: Int64s
    tail: Int64s
    until: Int64s
    levels: "tuple[_Level, ...]"
    stuck: Mask


class _Level(NamedTuple):
    """Visits that arrive, and sync points that start then: their visits and where each starts."""

    come: slice
    produces: Int64s
    sync_points: Int64s
    members: Int64s
    heads: Int64s
    waits: Int64s
    size: Int64s


def build_schedule(
    run: Int64s, sync_point: Int64s, runs: int, interval_count: int, produces: Mask | None = None
) -> Schedule:
    """Order the sync points.

    Args:
        run: Run of each segment, ascending; run = chain x interval_count + interval.
        sync_point: Sync point of each segment in order of time, or `WORK`; every number occurs.
        runs: Number of runs.
        interval_count: Number of step intervals.
        produces: Segments that produce what others wait for at their sync point; None: none.
    """
    at = np.flatnonzero(sync_point != WORK)
    group, owner = sync_point[at], run[at]
    produces = np.zeros(len(run), dtype=bool) if produces is None else produces
    visit_produces = produces[at]
    same = np.append(False, owner[1:] == owner[:-1])[: len(at)]
    come, level = _levels(group, same, visit_produces)
    order, number = np.argsort(come, kind="stable"), np.empty(len(at), dtype=np.int64)
    number[order] = np.arange(len(at))
    begin = np.searchsorted(run, np.arange(runs))
    until = np.append(begin[1:], len(run))
    since = np.where(same, np.append(0, at + 1)[: len(at)], begin[owner])
    before = np.where(same, np.append(0, number)[: len(at)], len(at) + owner)
    final = np.flatnonzero(np.append(owner[1:] != owner[:-1], True)[: len(at)])
    last, tail = len(at) + np.arange(runs), begin.copy()
    last[owner[final]], tail[owner[final]] = number[final], at[final] + 1
    levels = _cut(come[order], group[order], visit_produces[order], level)
    ordered = (at[order], group[order], visit_produces[order], since[order], before[order])
    ends, stuck = (
        (last, tail, until),
        (level < 0) | _apart(group, owner % interval_count, len(level)),
    )
    return Schedule(
        run, sync_point, produces, runs, interval_count, at, number, *ordered, *ends, levels, stuck
    )


def _apart(group: Int64s, interval: Int64s, sync_points: int) -> Mask:
    """Mark the sync points that lie in several intervals."""
    low, high = np.full(sync_points, np.iinfo(np.int64).max), np.full(sync_points, -1)
    np.minimum.at(low, group, interval)
    np.maximum.at(high, group, interval)
    found: Mask = low != high
    return found


def _levels(group: Int64s, same: Mask, produces: Mask) -> tuple[Int64s, Int64s]:
    """Return the level of visits and sync points: how many must come before; -1 in a cycle.

    Args:
        group: Sync point of each visit, by run and time.
        same: Whether the previous visit is of the same run.
        produces: Whether the visit continues without waiting.
    """
    order = np.argsort(group, kind="stable")
    size = np.bincount(group)
    head = np.cumsum(size) - size
    come, level = np.full(len(group), WORK), np.full(len(size), WORK)
    left, follows = size.copy(), np.append(same[1:], False)[: len(group)]
    now, depth, some = np.flatnonzero(~same), 0, bool(produces.any())
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
            members = np.append(members[~produces[members]], now[produces[now]])
        now, depth = members[follows[members]] + 1, depth + 1
    return come, level


def _cut(come: Int64s, group: Int64s, produces: Mask, level: Int64s) -> tuple[_Level, ...]:
    """Return the levels of visits in their order, without those in cycles."""
    sync_points = np.argsort(level, kind="stable")
    rank = np.empty_like(sync_points)
    rank[sync_points] = np.arange(len(sync_points))
    members = np.argsort(rank[group], kind="stable")
    size = np.bincount(group, minlength=len(level))[sync_points]
    heads = np.cumsum(size) - size
    waiting = np.bincount(group[~produces], minlength=len(level))[sync_points]
    found, depths = [], np.arange(int(come.max(initial=-1)) + 2)
    rows, firsts = np.searchsorted(come, depths), np.searchsorted(level[sync_points], depths)
    until = np.append(heads, len(group))
    for depth in depths[:-1].tolist():
        low, high = rows[depth : depth + 2].tolist()
        own = slice(*firsts[depth : depth + 2].tolist())
        mine = members[until[own.start] : until[own.stop]]
        visit_produces = low + np.flatnonzero(produces[low:high])
        first = heads[own] - until[own.start]
        part = (mine, first, mine[~produces[mine]], waiting[own])
        found.append(_Level(slice(low, high), visit_produces, sync_points[own], *part))
    return tuple(found)


_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Times:
    """Times of a replay, counted from the start of the step interval.

    Visits are ``ready``, sync points ``start`` and ``finish``, runs ``end``. ``interval_ns`` is
    when the last run of each interval ends.
    """

    ready: Int64s
    start: Int64s
    finish: Int64s
    end: Int64s
    interval_ns: Int64s


@dataclass(frozen=True, eq=False)
class LongestPath:
    """The longest path, segment by segment.

    Attributes:
        on: Whether a segment is on it; of a sync point only the last arrival.
        slack: How much longer this segment alone may take without making its interval longer.
        weight: What a segment adds to a path: its work, or the transfer of its sync point.
    """

    on: Mask
    slack: Int64s
    weight: Int64s


def replay(schedule: Schedule, work_ns: Int64s, transfer_ns: Int64s, offset_ns: Int64s) -> Times:
    """Replay all runs with other durations.

    Args:
        schedule: The order.
        own_ns: Own time of each segment; that of sync points does not count.
        transfer_ns: How long each sync point takes when all have come.
        offset_ns: How much later than its interval each run begins.
    """
    total = _running(schedule, work_ns)
    way = total[schedule.piece] - total[schedule.since]
    ready = np.zeros(len(way), dtype=np.int64)
    left = np.append(ready, offset_ns)
    start, finish = np.zeros((2, len(transfer_ns)), dtype=np.int64)
    for each in schedule.levels:
        now = ready[each.come] = left[schedule.before[each.come]] + way[each.come]
        left[each.produces] = now[each.produces - each.come.start]
        if len(each.sync_points):
            begun = start[each.sync_points] = np.maximum.reduceat(ready[each.members], each.heads)
            done = finish[each.sync_points] = begun + transfer_ns[each.sync_points]
            left[each.waits] = np.repeat(done, each.size)
    end = left[schedule.last] + total[schedule.until] - total[schedule.tail]
    return Times(ready, start, finish, end, end.reshape(-1, schedule.interval_count).max(axis=0))


def _running(schedule: Schedule, work_ns: Int64s) -> Int64s:
    total = np.zeros(len(work_ns) + 1, dtype=np.int64)
    np.cumsum(np.where(schedule.sync_point == WORK, work_ns, 0), out=total[1:])
    return total


def longest_path(
    schedule: Schedule, work_ns: Int64s, transfer_ns: Int64s, offset_ns: Int64s
) -> LongestPath:
    """Find the longest path of each interval, the first of several, and all slack."""
    found = replay(schedule, work_ns, transfer_ns, offset_ns)
    total, count = _running(schedule, work_ns), len(schedule.piece)
    ends = found.end.reshape(-1, schedule.interval_count)
    due = np.full(count + schedule.runs, _NEVER)  # when an visit must be left
    due[schedule.last] = np.tile(found.interval_ns, len(ends)) - (
        total[schedule.until] - total[schedule.tail]
    )
    on_tail, leads = (
        np.zeros(schedule.runs, dtype=bool),
        np.zeros(count + schedule.runs, dtype=bool),
    )
    on_tail[ends.argmax(axis=0) * schedule.interval_count + np.arange(schedule.interval_count)] = (
        True
    )
    leads[schedule.last[on_tail]] = True
    way = total[schedule.piece] - total[schedule.since]
    back = _back(schedule, way, transfer_ns, found, due, leads)
    return _by_piece(schedule, work_ns, transfer_ns, found, on_tail, back)


class _Back(NamedTuple):
    """Of visits: whether the path reaches a sync point by it or on the way to it, and the slack.

    ``spare`` is the slack of each sync point's transfer.
    """

    last: Mask
    way: Mask
    slack: Int64s
    spare: Int64s


def _back(
    schedule: Schedule, way: Int64s, transfer_ns: Int64s, found: Times, due: Int64s, leads: Mask
) -> _Back:
    """Go through the levels from the end.

    ``way`` is how long it takes to each visit, ``due`` when it must be left and ``leads``
    whether the path leaves it; the last two are known of each run's last one.
    """
    count = len(way)
    late, limit = np.full(len(transfer_ns), _NEVER), np.full(count, _NEVER)
    last = np.zeros(count, dtype=bool)
    for each in schedule.levels[::-1]:
        if len(each.sync_points):
            firsts = np.cumsum(each.size) - each.size
            sizes = np.diff(np.append(each.heads, len(each.members)))
            led = np.repeat(np.logical_or.reduceat(leads[each.waits], firsts), sizes)
            begun = np.repeat(found.start[each.sync_points], sizes)
            came = each.members[led & (found.ready[each.members] == begun)]
            last[came[np.unique(schedule.group[came], return_index=True)[1]]] = True
            done = late[each.sync_points] = np.minimum.reduceat(due[each.waits], firsts)
            limit[each.members] = np.repeat(done - transfer_ns[each.sync_points], sizes)
        limit[each.produces] = np.minimum(limit[each.produces], due[each.produces])
        before, come = schedule.before[each.come], each.come
        due[before] = limit[come] - way[come]
        leads[before] = last[come] | schedule.visit_produces[come] & leads[come]
    return _Back(
        last,
        last | schedule.visit_produces & leads[:count],
        limit - found.ready,
        late - found.finish,
    )


def _by_piece(
    schedule: Schedule,
    work_ns: Int64s,
    transfer_ns: Int64s,
    found: Times,
    on_tail: Mask,
    back: _Back,
) -> LongestPath:
    """Assign to segments what is known of the ways to sync points, and of the ends of runs."""
    segments = np.arange(len(schedule.run))
    next_one = np.searchsorted(schedule.at, segments)
    rest = segments >= schedule.tail[schedule.run]
    spare = np.tile(found.interval_ns, schedule.runs // schedule.interval_count) - found.end
    on_way, slack = back.way[schedule.number], back.slack[schedule.number]
    on = np.where(rest, on_tail[schedule.run], np.append(on_way, False)[next_one])
    room = np.where(rest, spare[schedule.run], np.append(slack, 0)[next_one])
    weight = work_ns.copy()
    weight[schedule.piece] = transfer_ns[schedule.group]
    room[schedule.piece] = back.spare[schedule.group]
    on[schedule.piece] = back.last
    return LongestPath(on, room, weight)
