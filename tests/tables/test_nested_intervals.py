"""Intervals in one another, also those that overlap, against looking at every pair and moment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import (
    NONE,
    SLACK_NS,
    alone,
    depths,
    enclosing,
    holding,
    innermost,
    open_at,
    parents,
)
from tests.effort import examples


def brute(lane, start, end, point_lane, point):
    found = []
    for where, when in zip(point_lane, point, strict=True):
        around = [
            (start[i], -end[i], i)
            for i in range(len(start))
            if lane[i] == where and start[i] <= when < end[i]
        ]
        found.append(max(around)[2] if around else -1)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_brute_force_on_overlapping_ranges(seed):
    random = np.random.default_rng(seed)
    count, points = int(random.integers(0, 25)), 60
    # All starts and ends differ within a lane: between twins either one is right.
    start = random.permutation(np.arange(0, 60))[:count].astype(np.int64)
    end = start + random.permutation(np.arange(1, 61))[:count].astype(np.int64)
    lane = random.integers(0, 3, count)
    point_lane, point = random.integers(0, 4, points), random.integers(-5, 120, points)

    found = innermost(lane, start, end, point_lane, point)

    assert found.tolist() == brute(lane, start, end, point_lane, point)


def test_a_deep_nest_is_climbed_to_the_range_that_is_still_open():
    depth = 2_000
    start = np.arange(depth)
    end = 10_000 - start
    zeros = np.zeros(depth, np.int64)

    found = innermost(zeros, start, end, np.zeros(2, np.int64), np.array([9_999, 8_001]))

    assert found.tolist() == [0, 1998]


def test_of_two_that_begin_at_once_the_shorter_is_inside():
    zeros = np.zeros(2, np.int64)

    found = innermost(zeros, zeros, np.array([5, 9]), np.zeros(2, np.int64), np.array([4, 6]))

    assert found.tolist() == [0, 1]


def by_start(ranges):
    """Return lane, start and end of (lane, start, length), in the order that `parents` asks for."""
    ranges = sorted(ranges, key=lambda each: (each[1], -each[2]))
    lane, start, length = np.array(ranges or np.empty((0, 3)), np.int64).T
    return lane, start, start + length


def brute_parents(lane, start, end, closed):
    found = []
    for own in range(len(lane)):
        around = [
            row
            for row in range(own)
            if lane[row] == lane[own]
            and end[row] > start[row]
            and end[row] >= end[own]
            and (closed or end[row] > start[own])
        ]
        found.append(around[-1] if around else -1)
    return found


def nested(depth):
    """Make one range of a lane with others inside of it, as its own (lane, start, length)."""
    inside = st.just([]) if not depth else st.lists(nested(depth - 1), max_size=3)
    return st.tuples(inside, st.integers(0, 2), st.integers(0, 2)).map(_wrapped)


def _wrapped(made):
    inside, before, behind = made
    at, ranges = before, []
    for own in inside:
        ranges += [(lane, start + at, length) for lane, start, length in own]
        at += own[0][2]
    return [(0, 0, at + behind), *ranges]


loose = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 6)), max_size=14)


@given(loose | nested(3), st.booleans())
def test_parents_agree_with_brute_force_on_nested_and_overlapping_ranges(ranges, closed):
    lane, start, end = by_start(ranges)

    found = parents(lane, start, end, closed=closed)

    assert found.tolist() == brute_parents(lane, start, end, closed)


def test_an_instant_at_the_end_of_a_range_is_in_it_where_that_is_closed():
    zeros, start, end = np.zeros(3, np.int64), np.array([0, 5, 5]), np.array([5, 5, 5])

    assert parents(zeros, start, end).tolist() == [-1, 0, 0]
    assert parents(zeros, start, end, closed=False).tolist() == [-1, -1, -1]


def test_what_overlaps_holds_nothing_of_the_other_and_yet_what_is_in_both():
    start, end = np.array([0, 2, 3, 4]), np.array([6, 9, 5, 8])

    assert parents(np.zeros(4, np.int64), start, end).tolist() == [-1, -1, 1, 1]


_TIMES = st.integers(0, 9)
_PAIRS = st.lists(st.tuples(st.integers(0, 2), _TIMES, _TIMES), max_size=14)


def columns(pairs: list[tuple[int, int, int]], unit: int) -> tuple[Int64s, Int64s, Int64s]:
    """Return lane, start and end as the functions want them."""
    rows = sorted((lane, min(a, b) * unit, -max(a, b) * unit) for lane, a, b in pairs)
    lane, start, end = np.array(rows, np.int64).reshape(-1, 3).T
    return lane, start, -end


@given(_PAIRS, st.sampled_from([5_000, SLACK_NS, 300]))
@settings(max_examples=examples(300), deadline=None)
def test_each_lies_in_the_last_before_it_that_holds_it_but_for_the_slack(pairs, unit) -> None:
    lane, start, end = columns(pairs, unit)
    found = enclosing(lane, start, end)
    strict = holding(found, start, end)
    for at in range(len(lane)):
        before = [o for o in range(at) if lane[o] == lane[at] and start[at] < end[o]]
        loose = [o for o in before if end[at] <= end[o] + SLACK_NS]
        assert found[at] == max(loose, default=NONE)
        assert strict[at] == max((o for o in before if end[at] <= end[o]), default=NONE)


@given(_PAIRS, st.sampled_from([5_000, SLACK_NS, 300]))
@settings(max_examples=examples(300), deadline=None)
def test_a_moment_belongs_to_the_last_to_begin_even_where_intervals_overlap(pairs, unit) -> None:
    """Of damaged traces."""
    lane, start, end = columns(pairs, unit)
    holder = holding(enclosing(lane, start, end), start, end)
    lanes, times = (each.ravel() for each in np.meshgrid([NONE, 0, 1, 2, 3], np.arange(-1, 11)))
    expected = np.full(len(lanes), NONE)
    own = np.zeros(len(lane), np.int64)
    for point, (where, time) in enumerate(zip(lanes, times * unit, strict=True)):
        there = np.flatnonzero((lane == where) & (start <= time) & (time < end))
        if len(there):
            expected[point] = there[-1]
            own[there[-1]] += unit
    assert open_at(lane, start, end, holder, lanes, times * unit).tolist() == expected.tolist()
    assert alone(lane, start, end, holder).tolist() == own.tolist()


def test_an_interval_that_ends_before_it_begins_is_never_open() -> None:
    lane, start, end = np.zeros(3, int), np.array([0, 4, 5]), np.array([9, 2, 7])
    holder = holding(enclosing(lane, start, end), start, end)
    assert open_at(lane, start, end, holder, lane, np.array([4, 5, 8])).tolist() == [0, 2, 0]
    assert alone(lane, start, end, holder).tolist() == [7, 0, 2]


def test_depths_count_what_is_around() -> None:
    assert depths(np.array([-1, 0, 1, 2, -1, 4])).tolist() == [0, 1, 2, 3, 0, 1]
    assert depths(np.array([], np.int64)).tolist() == []
