"""Intervals in one another, also those that overlap, against looking at every pair and moment."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.nested import (
    NONE,
    SLACK_NS,
    alone,
    depths,
    enclosing,
    holding,
    open_at,
)
from lightning_rlprof.spans import Int64s

_TIMES = st.integers(0, 9)
_PAIRS = st.lists(st.tuples(st.integers(0, 2), _TIMES, _TIMES), max_size=14)


def columns(pairs: list[tuple[int, int, int]], unit: int) -> tuple[Int64s, Int64s, Int64s]:
    """Return lane, start and end as the functions want them."""
    rows = sorted((lane, min(a, b) * unit, -max(a, b) * unit) for lane, a, b in pairs)
    lane, start, end = np.array(rows, np.int64).reshape(-1, 3).T
    return lane, start, -end


@given(_PAIRS, st.sampled_from([5_000, SLACK_NS, 300]))
@settings(max_examples=300, deadline=None)
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
@settings(max_examples=300, deadline=None)
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
