"""Replay of a step graph with any durations, its longest paths, and slack.

A run is one training thread in one step interval, as a sequence of segments. A sync point starts
when the last run has arrived, lasts as long as its transfer, and ends for all at once. A run that
produces a handoff continues at once; those that need it wait. `Schedule` orders the sync points
independently of durations. Times are integer nanoseconds, so results are exact.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, Mask, differs

WORK = -1
"""Stands for "no sync point": the time of the segment is work of its run."""

_NEVER = np.iinfo(np.int64).max


class _Level(NamedTuple):
    """Visits that arrive, and sync points that start then, with all of their visits.

    ``heads`` is the position in ``members`` of each sync point's first visit.
    """

    arrive: Int64s
    sync_points: Int64s
    members: Int64s
    heads: Int64s


@dataclass(frozen=True, eq=False)
class Schedule:
    """The order in which sync points can be replayed, for any durations.

    The nodes of a run are its start and its visits to sync points, by time. Nodes of one run follow
    those of the run before.

    Attributes:
        run: Run of each segment, ascending.
        sync_point: Sync point of each segment, or `WORK`.
        produces: Whether the segment only produces a handoff and doesn't wait.
        runs: Number of runs, ordered by chain and then interval.
        interval_count: Number of step intervals.
        stuck: Whether an interval's sync points wait for each other in a cycle, or lie in others.
        node: Node of each visit; of work, the node that it follows.
        starts: First node of each run.
        ends: Last node of each run.
        group: Sync point of each node; `WORK` of a start.
        continues: Whether a node only produces a handoff and doesn't wait.
        levels: Visits and sync points that depend on earlier levels only.
    """

    run: Int64s
    sync_point: Int64s
    produces: Mask
    runs: int
    interval_count: int
    stuck: Mask
    node: Int64s
    starts: Int64s
    ends: Int64s
    group: Int64s
    continues: Mask
    levels: tuple[_Level, ...]


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
    produces = np.zeros(len(run), dtype=bool) if produces is None else produces
    visits = np.flatnonzero(sync_point != WORK)
    count = np.bincount(run[visits], minlength=runs)
    ends = np.cumsum(count + 1) - 1
    node = np.cumsum(sync_point != WORK) + run
    group, continues = np.full(len(visits) + runs, WORK), np.zeros(len(visits) + runs, dtype=bool)
    group[node[visits]], continues[node[visits]] = sync_point[visits], produces[visits]
    levels, left = _levels(group, continues)
    interval, where = run[visits] % interval_count, sync_point[visits]
    some = np.zeros(len(left), dtype=np.int64)
    some[where] = interval  # Each sync point keeps one of its intervals; several are an error.
    bad = left > 0
    bad[where[some[where] != interval]] = True
    stuck = np.zeros(interval_count, dtype=bool)
    stuck[interval[bad[where]]] = True
    ordered = (stuck, node, ends - count, ends, group, continues, levels)
    return Schedule(run, sync_point, produces, runs, interval_count, *ordered)


def _levels(group: Int64s, continues: Mask) -> tuple[tuple[_Level, ...], Int64s]:
    """Return the levels, and how many visits each sync point still lacks: 0 but in cycles."""
    visits = np.flatnonzero(group != WORK)
    members_of = visits[np.argsort(group[visits], kind="stable")]
    size = np.bincount(group[visits])
    head, left = np.cumsum(size) - size, size.copy()
    has_next = np.append(group[1:] != WORK, False)
    levels, done = [], np.flatnonzero(group == WORK)
    while len(arrive := done[has_next[done]] + 1):
        here = group[arrive]
        np.subtract.at(left, here, 1)
        full = np.unique(here[left[here] == 0])
        heads = np.cumsum(size[full]) - size[full]
        shift = np.repeat(head[full] - heads, size[full])
        members = members_of[np.arange(len(shift)) + shift]
        levels.append(_Level(arrive, full, members, heads))
        done = np.append(members[~continues[members]], arrive[continues[arrive]])
    return tuple(levels), left


@dataclass(frozen=True, eq=False)
class Times:
    """Times of a replay, counted from the start of the step interval.

    ``ready`` is when each node is reached and ``leave`` when it is left. ``finish`` is when each
    sync point ends, ``end`` when each run does, and ``interval_ns`` when the last run of an
    interval does. ``work_ns`` is the work after each node.
    """

    ready: Int64s
    leave: Int64s
    finish: Int64s
    end: Int64s
    interval_ns: Int64s
    work_ns: Int64s


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


def replay(schedule: Schedule, own_ns: Int64s, transfer_ns: Int64s, offset_ns: Int64s) -> Times:
    """Replay all runs with other durations.

    Args:
        schedule: The order.
        own_ns: Own time of each segment; that of sync points does not count.
        transfer_ns: How long each sync point takes when all have come.
        offset_ns: How much later than its interval each run begins.
    """
    group, continues = schedule.group, schedule.continues
    work, at = np.zeros(len(group), dtype=np.int64), schedule.sync_point == WORK
    np.add.at(work, schedule.node[at], own_ns[at])
    ready, leave = np.zeros((2, len(group)), dtype=np.int64)
    leave[schedule.starts] = offset_ns
    finish = np.zeros(len(transfer_ns), dtype=np.int64)
    for arrive, sync_points, members, heads in schedule.levels:
        ready[arrive] = leave[arrive] = leave[arrive - 1] + work[arrive - 1]
        if len(members):
            begun = np.maximum.reduceat(ready[members], heads)
            finish[sync_points] = begun + transfer_ns[sync_points]
            leave[members] = np.where(continues[members], ready[members], finish[group[members]])
    end = leave[schedule.ends] + work[schedule.ends]
    interval_ns = end.reshape(-1, schedule.interval_count).max(axis=0)
    return Times(ready, leave, finish, end, interval_ns, work)


def longest_path(
    schedule: Schedule, own_ns: Int64s, transfer_ns: Int64s, offset_ns: Int64s
) -> LongestPath:
    """Find the longest path of each interval, the first of several, and all slack."""
    times = replay(schedule, own_ns, transfer_ns, offset_ns)
    group, continues, work = schedule.group, schedule.continues, times.work_ns
    ends = times.end.reshape(-1, schedule.interval_count)
    due = np.full(len(group), _NEVER)  # A node must be left by this time.
    due[schedule.ends] = np.tile(times.interval_ns, len(ends)) - work[schedule.ends]
    leads = np.zeros(len(group), dtype=bool)  # It is true if the path leaves the node.
    latest = ends.argmax(axis=0) * schedule.interval_count + np.arange(schedule.interval_count)
    leads[schedule.ends[latest]] = True
    # It is true if the path reaches a sync point by this visit.
    last = np.zeros(len(group), dtype=bool)
    limit, late = np.full(len(group), _NEVER), np.zeros(len(transfer_ns), dtype=np.int64)
    led, begun = np.zeros(len(transfer_ns), dtype=bool), times.finish - transfer_ns
    for arrive, sync_points, members, heads in reversed(schedule.levels):
        if len(members):
            where, waits = group[members], ~continues[members]
            late[sync_points] = np.minimum.reduceat(np.where(waits, due[members], _NEVER), heads)
            limit[members] = late[where] - transfer_ns[where]
            led[where[waits & leads[members]]] = True
            came = members[led[where] & (times.ready[members] == begun[where])]
            last[came[differs(group[came])]] = True
        handed = arrive[continues[arrive]]
        limit[handed] = np.minimum(limit[handed], due[handed])
        due[arrive - 1] = limit[arrive] - work[arrive - 1]
        leads[arrive - 1] = last[arrive] | continues[arrive] & leads[arrive]
    node, visits = schedule.node, schedule.sync_point != WORK
    where = schedule.sync_point[visits]
    on, slack, weight = leads[node], (due - times.leave)[node], own_ns.copy()
    on[visits] = last[node[visits]]
    slack[visits] = (late - times.finish)[where]
    weight[visits] = transfer_ns[where]
    return LongestPath(on, slack, weight)
