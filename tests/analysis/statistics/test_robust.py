import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.statistics.robust import (
    deviation_from_median,
    expected,
    leave_one_out_median,
    nan_median,
)
from tests.effort import examples

COLUMN = st.lists(st.sampled_from([math.nan, 1.0, 2.0, 3.5, 7.0]), min_size=1, max_size=7)


def known(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def same(found: float, expected: float) -> bool:
    return found == expected or (math.isnan(found) and math.isnan(expected))


@given(COLUMN)
def test_the_middle_is_the_median_of_what_is_known(values: list[float]) -> None:
    expected = statistics.median(known(values)) if known(values) else math.nan
    assert same(float(nan_median(np.array(values))), expected)


def test_the_middle_goes_along_any_axis() -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    for axis in (0, 1, 2):
        assert nan_median(values, axis) == pytest.approx(np.median(values, axis))


@given(COLUMN, st.integers(1, 4))
def test_the_middle_of_others_leaves_out_one_rank_at_a_time(
    values: list[float], least: int
) -> None:
    found = leave_one_out_median(np.array(values), least).tolist()
    for at, value in enumerate(values):
        others = known(values[:at] + values[at + 1 :])
        told = len(others) >= least and not math.isnan(value)
        assert same(found[at], statistics.median(others) if told else math.nan)


def test_columns_do_not_touch_each_other() -> None:
    values = np.array([[1.0, 5.0], [2.0, np.nan], [4.0, 6.0]])
    assert leave_one_out_median(values)[:, 0].tolist() == [3.0, 2.5, 1.5]
    assert leave_one_out_median(values)[[0, 2], 1].tolist() == [6.0, 5.0]


@given(COLUMN)
def test_apart_wants_half_of_the_ranks_and_two(values: list[float]) -> None:
    found = deviation_from_median(np.array(values)).tolist()
    told = len(known(values)) >= max(2, len(values) / 2)
    for at, value in enumerate(values):
        expected = value - statistics.median(known(values)) if told else math.nan
        assert same(found[at], expected)


def made(seed: int, shape: tuple[int, ...] = (8, 40)) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    tokens = random.lognormal(0.0, 0.6, shape) * 1_000
    return tokens, random.lognormal(0.0, 0.02, shape)


def test_two_kinds_of_work_are_told_apart() -> None:
    tokens, noise = made(0)
    true = 5e6 + 2e3 * tokens + 1.5 * tokens**2
    found = expected(true * noise, [tokens, tokens**2])
    assert found == pytest.approx(true, rel=0.01)


def test_a_few_bad_steps_and_one_slow_rank_do_not_bend_it() -> None:
    tokens, noise = made(1)
    true = 5e6 + 2e3 * tokens
    spoilt = true * noise
    spoilt[0, ::4] *= 10
    spoilt[3] *= 1.3
    assert expected(spoilt, [tokens]) == pytest.approx(true, rel=0.02)


def test_more_work_never_takes_less_time() -> None:
    tokens, noise = made(2)
    falling = (9e6 - 1e3 * np.minimum(tokens, 5_000)) * noise
    found = expected(falling, [tokens])
    assert np.ptp(found) == pytest.approx(0.0, abs=1.0)


def test_without_work_it_is_the_typical_time() -> None:
    times = np.array([[1.0, 2.0, 3.0, 100.0]])
    assert np.ptp(expected(times, [])) == pytest.approx(0.0)
    assert 2.0 <= expected(times, [])[0, 0] <= 3.5


def test_what_is_not_known_stays_so() -> None:
    tokens, noise = made(3, (2, 6))
    times = (1e6 + 1e3 * tokens) * noise
    times[0, 1], tokens[1, 2] = np.nan, np.nan
    found = expected(times, [tokens])
    assert np.isnan(found).sum() == 2
    assert np.isnan(found[0, 1])
    assert np.isnan(found[1, 2])
    assert np.isnan(expected(np.full((2, 2), np.nan), [])).all()


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1_000), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_units_do_not_matter(seed: int, time: float, work: float) -> None:
    tokens, noise = made(seed, (3, 12))
    times = (5e6 + 2e3 * tokens) * noise
    found = expected(times * time, [tokens * work])
    assert found == pytest.approx(expected(times, [tokens]) * time, rel=1e-4)


def test_many_rows_are_learned_from_some_and_told_for_all() -> None:
    tokens, noise = made(4, (40, 1_000))
    true = 5e6 + 2e3 * tokens
    assert expected(true * noise, [tokens]) == pytest.approx(true, rel=0.01)
