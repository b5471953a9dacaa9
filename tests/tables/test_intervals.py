"""Counts and unions of many intervals against a loop over every cell."""

import numpy as np
from hypothesis import given
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
