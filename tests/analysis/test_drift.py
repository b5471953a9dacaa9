"""Steps count as one for as long as ranks keep their pace, and no longer."""

import numpy as np
import pytest

from lightning_rlprof.analysis.drift import joined, lasting


def drifting(rho: float, ranks: int, steps: int, seed: int) -> np.ndarray:
    """Return noise of which each step keeps the share rho of the one before."""
    random = np.random.default_rng(seed)
    noise = random.normal(size=(ranks, steps))
    found = noise.copy()
    for step in range(1, steps):
        found[:, step] = rho * found[:, step - 1] + np.sqrt(1 - rho**2) * noise[:, step]
    return found


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_independent_steps_count_one_by_one(ranks: int) -> None:
    found = [lasting(drifting(0.0, ranks, 40, seed)) for seed in range(200)]
    assert found.count(1) >= 198


@pytest.mark.parametrize(("rho", "time"), [(0.5, 3.0), (0.8, 9.0), (0.9, 19.0)])
def test_blocks_last_about_twice_the_correlation_time(rho: float, time: float) -> None:
    found = [lasting(drifting(rho, 8, 400, seed)) for seed in range(20)]
    assert 1.2 * time < float(np.median(found)) < 2.6 * time


def test_one_rank_that_is_slow_for_a_while_is_no_drift() -> None:
    alone = 0.02 * drifting(0.0, 8, 40, 1)
    alone[3, 10:25] += 0.2
    assert lasting(alone) == 1
    everybody = alone.copy()
    everybody[:, 10:25] += 0.2
    assert lasting(everybody) > 1


def test_a_series_that_says_nothing_does_not_drift() -> None:
    assert lasting(np.full((4, 30), np.nan)) == 1
    assert lasting(np.zeros((4, 30))) == 1
    assert lasting(np.zeros((4, 3))) == 1


def test_blocks_are_medians_and_what_is_left_over_goes() -> None:
    values = np.array([[1.0, 3.0, 2.0, np.nan, 7.0, 8.0, 100.0]])
    assert joined(values, 3).tolist() == [[2.0, 7.5]]
    assert joined(values, 1) is values
    assert joined(values[:, :, None], 3).tolist() == [[[2.0], [7.5]]]
    assert joined(values, 9).shape == (1, 0)
