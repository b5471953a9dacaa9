"""The order in which runs that meet can be gone through; how long anything takes is nothing to it.

A run is what one thread does in one lap, piece by piece. In a join all wait for the last one; who
only hands something over goes on at once.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.spans import Int64s

__all__ = ["OWN", "Plan", "plan"]

OWN = -1
"""Stands in a piece's join for "none": the time is the run's own."""

Mask = npt.NDArray[np.bool_]


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
