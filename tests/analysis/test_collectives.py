"""Matching collectives across ranks, and telling their transfer from the wait for the last."""

import random

import numpy as np
import pytest

from lightning_rlprof.analysis.collectives import UNMATCHED, transfers


def matched(*members: tuple[int, int, int]) -> list[int]:
    """Return transfers of (rank, start, end), all of one name and step."""
    rank, start, end = np.array(members).T
    zeros = np.zeros(len(members), dtype=np.int64)
    return transfers(rank, zeros, zeros, start, end).tolist()


def test_a_clock_that_is_off_changes_no_duration() -> None:
    right = matched((0, 0, 50), (1, 40, 50), (0, 60, 70), (1, 60, 72))
    assert right == [10, 10, 10, 10]
    assert matched((0, 5, 55), (1, 40, 50), (0, 65, 75), (1, 60, 72)) == right


def test_clocks_that_are_unsure_by_more_do_not_part_a_collective() -> None:
    zeros, rank = np.zeros(2, dtype=np.int64), np.array([0, 1])
    start, end = np.array([0, 13]), np.array([10, 20])  # 3 ns apart
    found = [
        transfers(rank, zeros, zeros, start, end, unsure_ns=unsure).tolist()
        for unsure in (0, 2, 3, None)
    ]
    assert found == [[UNMATCHED] * 2, [UNMATCHED] * 2, [7, 7], [7, 7]]


def test_collectives_that_cannot_be_one_are_not_matched() -> None:
    nothing = [UNMATCHED] * 3
    assert matched((0, 0, 10), (1, 0, 10), (1, 20, 30)) == nothing  # not as many
    assert matched((0, 0, 10), (0, 20, 30), (0, 40, 50)) == nothing  # one rank alone
    assert matched((0, 0, 10), (1, 11, 20), (2, 5, 15)) == nothing  # one went before one came
    rank, step = np.array([0, 1]), np.array([1, 2])
    zeros, ends = np.zeros(2, dtype=np.int64), np.array([5, 5])
    assert transfers(rank, step, zeros, zeros, ends).tolist() == [UNMATCHED] * 2
    assert transfers(rank, zeros, step, zeros, ends).tolist() == [UNMATCHED] * 2
    empty = np.empty(0, dtype=np.int64)
    assert transfers(empty, empty, empty, empty, empty).tolist() == []


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_is_what_was_put_in(seed: int) -> None:
    noise = random.Random(seed)
    rows, expected, now = [], [], 0
    for _ in range(30):
        step, name, took = noise.randint(1, 3), noise.randint(0, 2), noise.randint(0, 9)
        came = [now + noise.randint(0, 50) for _ in range(4)]
        now = max(came) + took
        rows += [(rank, step, name, start, now) for rank, start in enumerate(came)]
        expected += [took] * 4
        now += 1
    order = noise.sample(range(len(rows)), len(rows))
    columns = np.array([rows[at] for at in order]).T
    assert transfers(*columns).tolist() == [expected[at] for at in order]
