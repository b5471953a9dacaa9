"""Distinct tuples of columns, against numpy's own."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.tables.arrays import distinct_tuples
from tests.effort import examples

numbers = st.integers(-3, 3) | st.sampled_from([-(2**61), 2**40, 2**61])


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=30))
@settings(max_examples=examples(100), deadline=None)
def test_distinct_tuples_are_those_of_numpy(rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    tuples, place = distinct_tuples(columns)
    expected, where = np.unique(columns, axis=1, return_inverse=True)
    assert tuples.tolist() == expected.tolist()
    assert place.tolist() == where.reshape(-1).tolist()
