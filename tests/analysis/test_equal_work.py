import numpy as np
import pytest

from lightning_rlprof.analysis.equal_work import equal_work


def _work(seed: int, steps: int = 60, spread: float = 0.2) -> np.ndarray:
    return 1_000 * np.exp(np.random.default_rng(seed).normal(0, spread, steps))


def test_without_work_it_is_the_ratio_of_typical_times() -> None:
    a, b = _work(1), 1.5 * _work(2)
    found = equal_work(a, b, [], 0.01)
    low, high = found.bounds or (0.0, 0.0)
    assert found.work == 1.0
    assert low < float(np.median(b) / np.median(a)) < high


def test_a_constant_column_explains_nothing() -> None:
    a, b = _work(1), _work(2)
    same = np.full(60, 7.0)
    assert equal_work(a, b, [(same, same)], 0.01) == equal_work(a, b, [], 0.01)


def test_fixed_costs_are_told_from_those_that_grow() -> None:
    """Half the time is fixed: twice the tokens take 1.5 times as long."""
    a, b = _work(1), 2 * _work(2)
    found = equal_work(1_000 + a, 1_000 + b, [(a, b)], 0.01)
    assert found.bounds == pytest.approx((1.0, 1.0), abs=1e-5)
    assert found.work == pytest.approx((1_000 + b).mean() / (1_000 + a).mean(), rel=1e-4)


def test_squares_of_lengths_are_learned_beside_tokens() -> None:
    a, b = _work(1), 1.5 * _work(2)
    squares = [_work(seed) ** 2 for seed in (3, 4)]
    times = [work + square / 500 for work, square in zip((a, b), squares, strict=True)]
    found = equal_work(times[0], times[1] * 1.1, [(a, b), (squares[0], squares[1])], 0.01)
    assert found.bounds == pytest.approx((1.1, 1.1), abs=1e-4)


@pytest.mark.parametrize("drift", [0.7, 1.0, 1.3])
def test_the_true_ratio_is_covered_as_often_as_promised(drift: float) -> None:
    random, missed = np.random.default_rng(11), 0
    for _ in range(100):
        a, b = (scale * 1_000 * np.exp(random.normal(0, 0.15, 30)) for scale in (1.0, drift))
        times = [(200 + own) * np.exp(random.normal(0, 0.03, 30)) for own in (a, b)]
        low, high = equal_work(times[0], times[1] * 1.05, [(a, b)], 0.05).bounds or (0.0, 9.0)
        missed += not low <= 1.05 <= high
    assert missed <= 12  # 5 of 100 are promised; 13 have a chance below 1 in 500


def test_a_few_wild_steps_move_nothing() -> None:
    a, b = _work(1), _work(2)
    calm = equal_work(a * 2, b * 2, [(a, b)], 0.01).bounds
    times = a * 2
    times[::20] *= 50
    assert equal_work(times, b * 2, [(a, b)], 0.01).bounds == pytest.approx(calm, abs=0.01)


def test_work_that_only_the_run_changes_is_no_evidence() -> None:
    one, two = np.full(60, 1_000.0), np.full(60, 2_000.0)
    found = equal_work(_work(1, spread=0.02), 2 * _work(2, spread=0.02), [(one, two)], 0.01)
    assert (found.work, found.bounds) == (None, None)


def test_steps_like_their_neighbours_count_as_fewer() -> None:
    random = np.random.default_rng(2)
    slow = [np.exp(np.cumsum(random.normal(0, 0.01, 300))) for _ in range(2)]
    found = equal_work(slow[0], slow[1], [], 0.01)
    assert found.lasting > 10
