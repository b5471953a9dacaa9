import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.cost import lost_ns


def slowly(own: np.ndarray, excess: np.ndarray, rank: int) -> float:
    """Wait step by step, with the rank as it was and without its excess."""
    lost = 0.0
    for step in range(own.shape[1]):
        times = {other: time for other, time in enumerate(own[:, step]) if not np.isnan(time)}
        if rank not in times or np.isnan(excess[rank, step]):
            continue
        without = times | {rank: times[rank] - excess[rank, step]}
        lost += (max(times.values()) - max(without.values())) * (len(times) - 1)
    return lost


@given(st.integers(0, 5_000), st.integers(2, 5))
def test_it_is_what_the_others_would_not_have_waited(seed: int, ranks: int) -> None:
    random = np.random.default_rng(seed)
    own = random.uniform(50, 150, (ranks, 6)) * 1e6
    excess = np.maximum(random.normal(0.1, 0.2, (ranks, 6)), 0) * own
    own[random.random((ranks, 6)) < 0.2] = np.nan
    excess[0, 2] = np.nan
    assert lost_ns(own, excess, 0, 0, 5) == pytest.approx(slowly(own, excess, 0), abs=1.0)


def test_two_equally_slow_ranks_cost_nothing_each() -> None:
    own, excess = np.array([[100.0], [110.0], [110.0]]), np.array([[0.0], [10.0], [10.0]])
    assert [lost_ns(own, excess, rank, 0, 0) for rank in range(3)] == [0, 0, 0]


def test_a_rank_that_stopped_does_not_make_the_wait_of_the_others_free() -> None:
    own = np.array([[100.0, 100.0], [100.0, np.nan], [150.0, 150.0]])
    assert lost_ns(own, np.full((3, 2), 50.0), 2, 0, 1) == 100 + 50


def test_only_the_steps_asked_about_count() -> None:
    own, excess = np.array([[100.0] * 4, [150.0] * 4]), np.array([[0.0] * 4, [50.0] * 4])
    assert lost_ns(own, excess, 1, 1, 2) == 100
    assert lost_ns(own[1:], excess[1:], 0, 0, 3) == 0
