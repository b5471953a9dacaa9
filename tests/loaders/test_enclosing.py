import numpy as np
import pytest

from lightning_rlprof.loaders.enclosing import innermost


def brute(lane, start, end, point_lane, point):
    found = []
    for where, when in zip(point_lane, point, strict=True):
        around = [
            (start[i], -end[i], i)
            for i in range(len(start))
            if lane[i] == where and start[i] <= when < end[i]
        ]
        found.append(max(around)[2] if around else -1)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_brute_force_on_overlapping_ranges(seed):
    random = np.random.default_rng(seed)
    count, points = int(random.integers(0, 25)), 60
    # All starts and ends differ within a lane: between twins either one is right.
    start = random.permutation(np.arange(0, 60))[:count].astype(np.int64)
    end = start + random.permutation(np.arange(1, 61))[:count].astype(np.int64)
    lane = random.integers(0, 3, count)
    point_lane, point = random.integers(0, 4, points), random.integers(-5, 120, points)

    found = innermost(lane, start, end, point_lane, point)

    assert found.tolist() == brute(lane, start, end, point_lane, point)


def test_a_deep_nest_is_climbed_to_the_range_that_is_still_open():
    depth = 2_000
    start = np.arange(depth)
    end = 10_000 - start
    zeros = np.zeros(depth, np.int64)

    found = innermost(zeros, start, end, np.zeros(2, np.int64), np.array([9_999, 8_001]))

    assert found.tolist() == [0, 1998]


def test_of_two_that_begin_at_once_the_shorter_is_inside():
    zeros = np.zeros(2, np.int64)

    found = innermost(zeros, zeros, np.array([5, 9]), np.zeros(2, np.int64), np.array([4, 6]))

    assert found.tolist() == [0, 1]
