"""Steps count as one for as long as ranks keep their pace, and no longer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.statistics.rank_tests import joined, lasting, stretches
from tests.effort import examples

STEP = st.sampled_from([0.0, 0.01, 0.2, 0.2, np.nan])


def scores(effect: np.ndarray, rank: int) -> list[float]:
    """Return what each step of one rank adds, by the definition in the docstring."""
    others = np.delete(effect, rank, axis=0)
    known = ~np.isnan(others)
    q = (np.sum(np.abs(others[known]) > 0.05) + 1) / (known.sum() + 2)
    q = min(max(q, 0.05), 0.5)
    found = []
    for value in effect[rank]:
        gain = np.log(0.8 / q) if value > 0.05 else np.log(0.2 / (1 - q))
        found.append(0.0 if np.isnan(value) else float(gain))
    return found


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.lists(STEP, min_size=7, max_size=7), min_size=2, max_size=3))
def test_the_stretch_is_the_best_of_all_stretches(rows: list[list[float]]) -> None:
    effect = np.array(rows)
    found = stretches(effect[:, :, None], 0.05)
    for rank in range(len(effect)):
        added = scores(effect, rank)
        best = max(
            (sum(added[first : last + 1]) for first in range(7) for last in range(first, 7)),
            default=0.0,
        )
        steps = int(np.sum(~np.isnan(effect[rank])))
        assert found.chance[rank, 0] == pytest.approx(min(1.0, steps * np.exp(-max(best, 0.0))))
        if best > 1e-9:
            first, last = int(found.first[rank, 0]), int(found.last[rank, 0])
            assert sum(added[first : last + 1]) == pytest.approx(best)


def test_a_slow_while_is_found_where_it_was() -> None:
    effect = np.random.default_rng(0).normal(0.0, 0.02, (8, 60, 1))
    effect[5, 20:32] += 0.12
    found = stretches(effect, 0.05)
    assert (found.first[5, 0], found.last[5, 0]) == (20, 31)
    assert found.chance[5, 0] < 1e-6
    assert (np.delete(found.chance[:, 0], 5) > 0.01).all()


def test_by_chance_it_is_no_likelier_than_it_says() -> None:
    random = np.random.default_rng(1)
    wrong = 0
    for _ in range(500):
        found = stretches(random.normal(0.0, 0.03, (4, 40, 1)), 0.05)
        wrong += bool((found.chance < 0.05).any())
    assert wrong <= 500 * 4 * 0.05


def test_where_all_are_noisy_the_same_stretch_means_nothing() -> None:
    random = np.random.default_rng(2)
    calm, wild = random.normal(0.0, 0.01, (8, 40, 1)), random.normal(0.0, 0.15, (8, 40, 1))
    for effect in (calm, wild):
        effect[0, 10:16] = 0.2
    assert stretches(calm, 0.05).chance[0, 0] < 1e-4
    assert stretches(wild, 0.05).chance[0, 0] > 0.05


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
