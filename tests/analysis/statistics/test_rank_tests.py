import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.statistics.rank_tests import (
    at_least,
    holm,
    median_bounds,
    sign_test,
)


@pytest.mark.parametrize(("trials", "chance"), [(1, 0.5), (7, 0.5), (16, 0.125), (300, 0.5)])
def test_tails_are_sums_of_the_binomial_distribution(trials: int, chance: float) -> None:
    terms = [
        math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)
    ]
    expected = [math.fsum(terms[k:]) for k in range(trials + 1)]
    assert at_least(trials, chance) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_the_tail_of_nothing_is_certain() -> None:
    assert at_least(0).tolist() == [1.0]


@pytest.mark.parametrize("chance", [0.0, 1.0, -0.1])
def test_a_chance_that_is_none_is_refused(chance: float) -> None:
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        at_least(3, chance)


def test_a_shared_tail_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        at_least(3)[0] = 0.0


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0, math.nan]), min_size=1, max_size=9))
def test_the_sign_test_counts_all_outcomes_that_are_as_bad(values: list[float]) -> None:
    known = [value for value in values if not math.isnan(value)]
    above = sum(value > 0 for value in known)
    outcomes = [sum(one) for one in itertools.product((0, 1), repeat=len(known))]
    expected = sum(outcome >= above for outcome in outcomes) / len(outcomes)
    assert sign_test(np.array([values])) == pytest.approx(expected)


def test_every_series_is_tested_by_itself() -> None:
    values = np.ones((2, 3, 4))
    values[0, :, 1] = -1.0
    found = sign_test(values)
    assert found.shape == (2, 4)
    assert (found[0, 1], found[1, 1]) == (1.0, pytest.approx(0.125))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_holm_is_its_definition(chances: list[float]) -> None:
    ordered = sorted(chances)
    stepped = [
        min(1.0, max(ordered[i] * (len(chances) - i) for i in range(at + 1)))
        for at in range(len(chances))
    ]
    assert sorted(holm(np.array(chances))) == pytest.approx(stepped)
    assert holm(np.array(chances)).shape == (len(chances),)


def test_holm_keeps_errors_rare_however_many_are_asked() -> None:
    random = np.random.default_rng(5)
    wrong = sum(bool((holm(random.random((8, 5))) <= 0.05).any()) for _ in range(2_000))
    assert wrong <= 2_000 * 0.05 * 1.25


@pytest.mark.parametrize("size", [6, 9, 16, 40])
def test_bounds_hold_the_median_as_often_as_they_say(size: int) -> None:
    random = np.random.default_rng(size)
    inside = 0
    for _ in range(1_000):
        bounds = median_bounds(random.exponential(size=size))
        assert bounds is not None
        inside += bounds[0] <= math.log(2) <= bounds[1]
    assert inside >= 940


def test_bounds_are_values_that_occurred_and_need_six() -> None:
    assert median_bounds(np.array([3.0, 1.0, np.nan, 2.0, 9.0, 5.0])) is None
    assert median_bounds(np.array([3.0, 1.0, np.nan, 2.0, 9.0, 5.0, 4.0])) == (1.0, 9.0)
