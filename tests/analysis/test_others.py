import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.others import apart, middle, middle_of_others

COLUMN = st.lists(st.sampled_from([math.nan, 1.0, 2.0, 3.5, 7.0]), min_size=1, max_size=7)


def known(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def same(found: float, expected: float) -> bool:
    return found == expected or (math.isnan(found) and math.isnan(expected))


@given(COLUMN)
def test_the_middle_is_the_median_of_what_is_known(values: list[float]) -> None:
    expected = statistics.median(known(values)) if known(values) else math.nan
    assert same(float(middle(np.array(values))), expected)


def test_the_middle_goes_along_any_axis() -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    for axis in (0, 1, 2):
        assert middle(values, axis) == pytest.approx(np.median(values, axis))


@given(COLUMN, st.integers(1, 4))
def test_the_middle_of_others_leaves_out_one_rank_at_a_time(
    values: list[float], least: int
) -> None:
    found = middle_of_others(np.array(values), least).tolist()
    for at, value in enumerate(values):
        others = known(values[:at] + values[at + 1 :])
        told = len(others) >= least and not math.isnan(value)
        assert same(found[at], statistics.median(others) if told else math.nan)


def test_columns_do_not_touch_each_other() -> None:
    values = np.array([[1.0, 5.0], [2.0, np.nan], [4.0, 6.0]])
    assert middle_of_others(values)[:, 0].tolist() == [3.0, 2.5, 1.5]
    assert middle_of_others(values)[[0, 2], 1].tolist() == [6.0, 5.0]


@given(COLUMN)
def test_apart_wants_half_of_the_ranks_and_two(values: list[float]) -> None:
    found = apart(np.array(values)).tolist()
    told = len(known(values)) >= max(2, len(values) / 2)
    for at, value in enumerate(values):
        expected = value - statistics.median(known(values)) if told else math.nan
        assert same(found[at], expected)
