import numpy as np
import pytest

from lightning_rlprof.analysis.statistics.pace import above_the_others, highest, panel
from tests.builders.paced import autoregression

LEAST = np.log(1.05)


def _series(seed: int, ranks: int = 8, steps: int = 60, left: float = 0.9) -> np.ndarray:
    random = np.random.default_rng(seed)
    return autoregression(random, (ranks, steps), 0.03, left) + random.normal(
        0, 0.01, (ranks, steps)
    )


def test_levels_are_generalized_least_squares_means() -> None:
    series, steps = _series(1, ranks=3, steps=20), np.arange(20)
    found = panel(steps, series)
    covariance = 0.5 * np.eye(20) + 0.5 * 0.7 ** np.abs(steps[:, None] - steps)
    inverse = np.linalg.inv(covariance)
    at = 2 * 9 + 2  # correlation 0.7, share 0.5
    ones = np.ones(20)
    mean = series @ inverse @ ones / (ones @ inverse @ ones)
    assert found.level[at] == pytest.approx(mean)
    rest = [(y - m) @ inverse @ (y - m) for y, m in zip(series, mean, strict=True)]
    assert found.rest[at] == pytest.approx(np.array(rest))
    assert found.level[-1] == pytest.approx(series.mean(axis=1), abs=2e-3)  # outliers are clipped


def test_healthy_ranks_are_seldom_accused_however_pace_wanders() -> None:
    accused = sum(
        bool(highest(np.arange(24), _series(seed, steps=24, left=left), 0.01, LEAST))
        for seed in range(60)
        for left in (0.0, 0.9, 0.95)
    )
    assert accused <= 4  # 1% of 180 is promised; 5 have a chance of 4%


@pytest.mark.parametrize(("ranks", "slow"), [(8, [3]), (8, [1, 4]), (64, [40])])
def test_slow_ranks_are_found_although_pace_wanders(ranks: int, slow: list[int]) -> None:
    series = _series(2, ranks, 100)
    series[slow] += np.log(1.1)
    found = highest(np.arange(100), series, 0.01, LEAST)
    assert sorted(found) == slow
    for chance, known in found.values():
        assert chance <= 0.01
        assert known.quantile(0.01) < np.log(1.1) < known.quantile(0.99)


def test_levels_that_lie_apart_accuse_no_rank() -> None:
    series = _series(3) + np.linspace(-0.08, 0.08, 8)[:, None]
    assert highest(np.arange(60), series, 0.01, LEAST) == {}


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_or_three_ranks_need_more(ranks: int) -> None:
    """How much healthy ranks differ cannot be known of so few."""
    series = _series(4, ranks, 200, left=0.3)
    assert not highest(np.arange(200), series + np.arange(ranks)[:, None] * 0.04, 0.01, LEAST)
    assert set(highest(np.arange(200), series + np.eye(ranks, 1) * 0.5, 0.01, LEAST)) == {0}


def test_what_is_known_narrows_with_the_number_of_steps() -> None:
    spreads = [
        above_the_others(panel(np.arange(n), _series(5, steps=n)), 0, range(1, 8)).spread
        for n in (24, 240)
    ]
    assert spreads[1] < 0.6 * spreads[0]
