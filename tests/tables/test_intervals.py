"""Counts and unions of many intervals against a loop over every cell."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_rlprof.tables.intervals import open_count, unions

Intervals = list[tuple[int, int, int]]
intervals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20)).map(
        lambda each: (each[0], min(each[1:]), max(each[1:]))
    ),
    max_size=20,
)


@given(intervals, st.sampled_from([20, 200]))
def test_open_intervals_are_counted_cell_by_cell(rows: Intervals, cells: int) -> None:
    _, first, last = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    expected = [sum(a <= cell < b for _, a, b in rows) for cell in range(cells)]
    assert open_count(first, last, cells).tolist() == expected


@given(intervals)
def test_a_union_covers_what_its_intervals_cover_and_no_two_of_it_touch(rows: Intervals) -> None:
    found = np.stack(unions(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)).T.tolist()
    covered = {(owner, cell) for owner, a, b in rows for cell in range(a, b)}
    assert [(owner, cell) for owner, a, b in found for cell in range(a, b)] == sorted(covered)
    ends = {(owner, b) for owner, _, b in found}
    assert not ends & {(owner, a) for owner, a, _ in found}


_NANOSECONDS = st.sampled_from([-(2**63), -1, 0, 1, 1_727_743_122_000_000_000, 2**63 - 1])
_far = st.one_of(_NANOSECONDS, st.integers(-(2**63), 2**63 - 1), st.integers(-5, 5))
_far_intervals = st.lists(
    st.tuples(st.one_of(st.integers(0, 3), st.integers(0, 2**63 - 1)), _far, _far), max_size=20
)


@given(_far_intervals)
@example(
    [(5, 0, 1_727_743_122_000_000_000), (5, 1_727_743_121_000_000_000, 1_727_743_122_000_000_001)]
)
def test_a_union_of_any_times_is_that_of_a_loop(rows: Intervals) -> None:
    expected: Intervals = []
    for owner, first, last in sorted(row for row in rows if row[1] < row[2]):
        if expected and expected[-1][0] == owner and first <= expected[-1][2]:
            expected[-1] = owner, expected[-1][1], max(last, expected[-1][2])
        else:
            expected.append((owner, first, last))
    found = unions(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)
    assert list(zip(*(part.tolist() for part in found), strict=True)) == expected
