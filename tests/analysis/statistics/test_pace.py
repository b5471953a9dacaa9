import math

import numpy as np
import pytest

from lightning_rlprof.analysis.statistics.pace import (
    MAX_VALUES,
    PRIOR,
    Posterior,
    clipped,
    grams,
    joined,
    orthonormal,
    posterior,
)
from lightning_rlprof.analysis.statistics.rank_tests import student_tail
from tests.builders.paced import autoregression

CORRELATIONS = (0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.985)
SHARES = (0.1, 0.25, 0.5, 0.75, 0.85, 0.92, 0.96, 0.98, 1.0)


def _covariances(steps: np.ndarray) -> list[np.ndarray]:
    """Return V at each point of the grid, written out."""
    apart = np.abs(steps[:, None] - steps[None, :])
    every = [
        (1 - share) * np.eye(len(steps)) + share * left**apart
        for left in CORRELATIONS
        for share in SHARES
    ]
    return [*every, np.eye(len(steps))]


def test_sums_are_those_of_the_inverse_covariance_also_with_gaps() -> None:
    steps = np.array([1, 2, 3, 5, 6, 9, 10, 11])
    table = np.random.default_rng(0).normal(size=(8, 3))
    found = grams(steps, table)
    for at, covariance in enumerate(_covariances(steps)):
        wanted = table.T @ np.linalg.inv(covariance) @ table
        assert found.products[at] == pytest.approx(wanted, rel=1e-6)
        assert found.log_determinant[at] == pytest.approx(
            np.linalg.slogdet(covariance)[1], abs=1e-6
        )
    assert sum(PRIOR) == pytest.approx(1.0)


def test_the_posterior_is_generalized_least_squares_weighted_by_restricted_likelihood() -> None:
    random, steps = np.random.default_rng(1), np.arange(12)
    table = np.stack([random.normal(size=12), np.repeat([-0.5, 0.5], 6), np.ones(12)], axis=1)
    found = posterior(grams(steps, table), 0)
    assert found is not None
    y, x = table[:, 0], table[:, 1:]
    weight, center, error = [], [], []
    for prior, covariance in zip(PRIOR, _covariances(steps), strict=True):
        inverse = np.linalg.inv(covariance)
        square = x.T @ inverse @ x
        beta = np.linalg.solve(square, x.T @ inverse @ y)
        rest = (y - x @ beta) @ inverse @ (y - x @ beta)
        likelihood = -0.5 * (
            np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(square)[1] + 10 * np.log(rest)
        )
        weight.append(np.log(prior) + likelihood)
        center.append(beta[0])
        error.append(np.sqrt(rest / 10 * np.linalg.inv(square)[0, 0]))
    weights = np.exp(np.array(weight) - max(weight))
    assert found.weight == pytest.approx(weights / weights.sum(), rel=1e-5, abs=1e-12)
    assert found.center == pytest.approx(np.array(center), rel=1e-6)
    assert found.error == pytest.approx(np.array(error), rel=1e-6)


def test_of_white_noise_the_quantiles_are_students() -> None:
    one = np.ones(1)
    found = Posterior(one, 2 * one, 3 * one, 10.0)
    for chance, t in ((0.5, 0.0), (0.95, 1.8125), (0.995, 3.1693), (0.0005, -4.5869)):
        assert found.quantile(chance) == pytest.approx(2 + 3 * t, abs=0.06)
        assert found.above(found.quantile(chance)) == pytest.approx(1 - chance, rel=1e-3)
    low, high = found.interval(0.01)
    assert (low + high) / 2 == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("freedom", "value", "tail"),
    [(5, 2.015, 0.05), (10, 3.169, 0.005), (60, 3.46, 0.0005), (1000, 4.75, 1.16e-6)],
)
def test_tails_of_students_t_are_as_tables_have_them(
    freedom: float, value: float, tail: float
) -> None:
    assert student_tail(np.array([value]), freedom)[0] == pytest.approx(tail, rel=0.05)


def test_a_column_that_others_explain_has_no_answer() -> None:
    ones = np.ones(20)
    table = np.stack([np.arange(20.0), ones, 2 * ones], axis=1)
    assert posterior(grams(np.arange(20), table), 0) is None
    assert posterior(grams(np.arange(3), np.eye(3)[:, :2][:, [0, 1]]), 0) is not None
    assert posterior(grams(np.arange(2), np.ones((2, 3))), 0) is None  # more columns than values


def test_wander_is_noticed_and_widens_what_is_known() -> None:
    random, steps = np.random.default_rng(3), np.arange(200)
    lever = np.repeat([-0.5, 0.5], 100)
    found = [
        posterior(grams(steps, np.stack([series, lever, np.ones(200)], axis=1)), 0)
        for series in (random.normal(0, 1, 200), autoregression(random, (1, 200), 1.0, 0.95)[0])
    ]
    white, wandering = found
    assert white is not None
    assert wandering is not None
    assert white.wander < 0.5
    assert wandering.wander > 0.99
    assert wandering.spread > 2 * white.spread


def test_more_values_make_it_surer_as_the_law_of_the_pace_allows() -> None:
    steps = np.arange(60)
    series = np.random.default_rng(4).normal(0, 1, 60)
    known = posterior(grams(steps, np.stack([series, np.ones(60)], axis=1)), 0)
    assert known is not None
    assert known.values_needed(60, 1e9, 600) == 60
    half = known.values_needed(60, known.spread / 2, 6_000)
    assert half is not None
    assert 150 < half < 900
    assert known.values_needed(60, 1e-9, 600) is None
    assert known.widened(0.1).spread == pytest.approx(math.hypot(known.spread, 0.1))


def test_long_series_are_joined_by_means_and_gaps_stay() -> None:
    steps = np.delete(np.arange(1_000), np.arange(500, 600))
    number, table = joined(steps, np.stack([steps, np.ones(900)], axis=1).astype(float))
    assert len(number) <= MAX_VALUES
    assert table[0].tolist() == [1.5, 1.0]
    assert np.diff(number).max() > 20
    same, whole = joined(np.arange(10), np.ones((10, 1)))
    assert (same.tolist(), len(whole)) == (list(range(10)), 10)


def test_outliers_count_up_to_four_spreads_and_three_in_heavy_tails() -> None:
    random = np.random.default_rng(5)
    calm, wild = random.normal(0, 1, 500), random.standard_t(2, 500)
    calm[0] = 1e6
    assert 3 < clipped(calm).max() < 5
    spread = 1.4826 * float(np.median(np.abs(wild - np.median(wild))))
    assert clipped(wild).max() == pytest.approx(np.median(wild) + 3 * spread)
    assert clipped(np.ones(5)).tolist() == [1.0] * 5


def test_near_constant_and_repeated_columns_are_left_out() -> None:
    rise = np.arange(10.0)
    assert orthonormal([np.ones(10), 1e9 + 1e-3 * rise]).shape == (10, 0)
    assert orthonormal([rise, 2 * rise + 1]).shape == (10, 1)
    assert orthonormal([]).shape == (0, 0)
