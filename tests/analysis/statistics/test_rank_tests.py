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
    shift_bounds,
    sign_test,
    student,
    typical_shift,
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


NEAR = 1e-6


def _two(a: object, b: object) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    lever = np.repeat([-0.5, 0.5], [len(a), len(b)])
    return np.concatenate([a, b]), lever - lever.mean()


def _mann_whitney(a: list[int], b: list[int], chance: float) -> tuple[int, int] | None:
    """Cut off differences while U is beyond the normal quantile, as textbooks have it."""
    n, m = len(a), len(b)
    quantile = {0.01: 2.5758293035489, 0.05: 1.9599639845401}[chance]
    rank = math.floor(n * m / 2 - quantile * math.sqrt(n * m * (n + m + 1) / 12)) + 1
    differences = sorted(y - x for x in a for y in b)
    return (differences[rank - 1], differences[-rank]) if rank > 0 else None


SAMPLES = st.lists(st.integers(0, 10**6), min_size=2, max_size=9, unique=True)


@given(SAMPLES, SAMPLES, st.sampled_from([0.01, 0.05]))
def test_of_two_samples_it_is_the_mann_whitney_interval(
    a: list[int], b: list[int], chance: float
) -> None:
    differences = [y - x for x in a for y in b]
    expected = _mann_whitney(a, b, chance)
    if expected and len(set(differences)) < len(differences):
        return  # ties among differences: the step is wider than one of them
    found = shift_bounds(*_two(a, b), chance)
    assert (found is None) == (expected is None)
    if found and expected:
        assert found == pytest.approx(expected, abs=1e-3)


@given(SAMPLES, SAMPLES)
def test_the_typical_shift_of_two_samples_is_the_median_difference(
    a: list[int], b: list[int]
) -> None:
    median = np.median([y - x for x in a for y in b])
    assert typical_shift(*_two(a, b)) == pytest.approx(median, abs=1e-2)


@given(SAMPLES, SAMPLES)
def test_swapping_the_samples_mirrors_the_interval(a: list[int], b: list[int]) -> None:
    forth, back = shift_bounds(*_two(a, b)), shift_bounds(*_two(b, a))
    assert (forth is None) == (back is None)
    if forth and back:
        assert forth == pytest.approx((-back[1], -back[0]), abs=1e-2)


def test_four_values_a_side_are_too_few_and_five_are_enough() -> None:
    four, five = np.arange(4), np.arange(5)
    assert shift_bounds(*_two(four, four)) is None
    assert shift_bounds(*_two(five, five)) == pytest.approx((-4, 4), abs=NEAR)


def test_a_lever_that_other_columns_explain_tells_nothing() -> None:
    assert typical_shift(np.arange(9.0), np.zeros(9)) is None
    assert shift_bounds(np.arange(9.0), np.zeros(9)) is None


def test_values_without_noise_have_an_interval_without_width() -> None:
    values, lever = _two(np.full(9, 3.0), np.full(9, 5.0))
    low, high = shift_bounds(values, lever) or (0.0, 0.0)
    assert (low, high) == pytest.approx((2.0, 2.0), abs=NEAR)


@pytest.mark.deep
@pytest.mark.parametrize("size", [6, 12, 40])
def test_the_true_shift_is_covered_about_as_often_as_promised(size: int) -> None:
    noise = np.random.default_rng(7)
    misses = 0
    for _ in range(300):
        a, b = noise.exponential(1.0, size), noise.exponential(1.0, size) + 5
        low, high = shift_bounds(*_two(a, b)) or (0, 9)
        misses += not low <= 5 <= high
    assert misses <= 9  # 1 % of 300 is 3; 10 or more has a chance below 1 in 900


def test_a_slope_that_has_to_be_learned_widens_the_interval() -> None:
    noise = np.random.default_rng(3)
    run = np.repeat([-0.5, 0.5], 40)
    work = noise.normal(size=80) + run * 4
    values = 0.3 * run + noise.normal(0, 0.1, 80)
    table = np.stack([np.ones(80), work], axis=1)
    lever = run - table @ np.linalg.lstsq(table, run, rcond=None)[0]
    rest = values - table @ np.linalg.lstsq(np.c_[table, run], values, rcond=None)[0][:2]

    low, high = shift_bounds(rest, lever) or (0.0, 0.0)
    alone = shift_bounds(rest, run) or (0.0, 0.0)

    assert low < 0.3 < high
    assert high - low > 1.5 * (alone[1] - alone[0])


@pytest.mark.deep
def test_every_way_to_deal_the_ranks_keeps_the_chance_promised() -> None:
    """Of all 924 ways to deal 12 values to two sides at most 1 % exclude "no shift"."""
    values = np.arange(12.0) ** 2
    wrong = 0
    for chosen in itertools.combinations(range(12), 6):
        lever = np.full(12, -0.5)
        lever[list(chosen)] = 0.5
        low, high = shift_bounds(values, lever) or (-1.0, 1.0)
        wrong += not low <= NEAR or not high >= -NEAR
    assert wrong <= 9


@pytest.mark.parametrize(
    ("freedom", "chance", "value"),
    [(2, 0.01, 9.925), (3, 0.001, 12.924), (7, 0.01, 3.499), (10, 0.05, 2.228), (30, 0.9, 0.127)],
)
def test_students_t_is_as_tables_have_it(freedom: float, chance: float, value: float) -> None:
    assert student(freedom, chance) == pytest.approx(value, rel=3e-3)
