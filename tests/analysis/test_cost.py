import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.cost import lost_ns


def slowly(own: np.ndarray, effect: np.ndarray, rank: int) -> float:
    """Wait step by step, with the rank as it was and without its excess."""
    lost = 0.0
    for step in range(own.shape[1]):
        times = own[:, step].tolist()
        excess = effect[rank, step]
        if np.isnan(times).any() or np.isnan(excess):
            continue
        without = list(times)
        without[rank] = times[rank] / (1 + max(excess, 0.0))
        lost += (max(times) - max(without)) * (len(times) - 1)
    return lost


@given(st.integers(0, 5_000), st.integers(2, 5))
def test_it_is_what_the_others_would_not_have_waited(seed: int, ranks: int) -> None:
    random = np.random.default_rng(seed)
    own, effect = random.uniform(50, 150, (ranks, 6)) * 1e6, random.normal(0.1, 0.2, (ranks, 6))
    own[random.random((ranks, 6)) < 0.05] = np.nan
    effect[0, 2] = np.nan
    assert lost_ns(own, effect, 0, 0, 5) == pytest.approx(slowly(own, effect, 0), abs=1.0)


def test_two_equally_slow_ranks_cost_nothing_each() -> None:
    own = np.array([[100.0], [110.0], [110.0]])
    effect = np.array([[0.0], [0.1], [0.1]])
    assert [lost_ns(own, effect, rank, 0, 0) for rank in range(3)] == [0, 0, 0]


def test_only_the_steps_asked_about_count() -> None:
    own, effect = np.array([[100.0] * 4, [150.0] * 4]), np.array([[0.0] * 4, [0.5] * 4])
    assert lost_ns(own, effect, 1, 1, 2) == 100
    assert lost_ns(own[1:], effect[1:], 0, 0, 3) == 0
