import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.intervals import shift_interval


def _slow(a: list[int], b: list[int]) -> tuple[int, int] | None:
    """Count every way to deal the ranks, as the definition of the test says."""
    n, m = len(a), len(b)
    counts = [0] * (n * m + 1)
    for chosen in itertools.combinations(range(n + m), n):
        counts[sum(chosen) - n * (n - 1) // 2] += 1
    rank = sum(1 for tail in itertools.accumulate(counts) if tail / math.comb(n + m, n) <= 0.005)
    differences = sorted(y - x for x in a for y in b)
    return (differences[rank - 1], differences[-rank]) if rank else None


SAMPLES = st.lists(st.integers(0, 100), min_size=1, max_size=7)


@given(SAMPLES, SAMPLES)
def test_small_samples_have_the_exact_interval(a: list[int], b: list[int]) -> None:
    assert shift_interval(np.array(a), np.array(b)) == _slow(a, b)


@given(SAMPLES, SAMPLES)
def test_swapping_the_samples_mirrors_the_interval(a: list[int], b: list[int]) -> None:
    forth, back = shift_interval(np.array(a), np.array(b)), shift_interval(np.array(b), np.array(a))
    assert (forth is None) == (back is None)
    if forth and back:
        assert forth == (-back[1], -back[0])


def test_four_values_a_side_are_too_few_and_five_are_enough() -> None:
    four, five = np.arange(4), np.arange(5)
    assert shift_interval(four, four) is None
    assert shift_interval(five, five) == (-4, 4)


@pytest.mark.parametrize("size", [12, 40])
def test_the_true_shift_is_covered_about_as_often_as_promised(size: int) -> None:
    noise = np.random.default_rng(7)
    misses = 0
    for _ in range(400):
        a = noise.exponential(1e6, size).astype(np.int64)
        b = noise.exponential(1e6, size).astype(np.int64) + 5_000_000
        low, high = shift_interval(a, b) or (0, 0)
        misses += not low <= 5_000_000 <= high
    assert misses <= 12  # 1 % of 400 is 4; 13 or more has a chance below 1 in 3000


def test_many_values_are_thinned_and_still_found() -> None:
    noise = np.random.default_rng(7)
    a = noise.normal(1e9, 1e7, 50_000).astype(np.int64)
    low, high = shift_interval(a, a + 20_000_000) or (0, 0)
    assert 15_000_000 < low < 20_000_000 < high < 25_000_000
