"""Longest paths beside all paths counted out, and what longer or shorter pieces do to a lap."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.critical_path.replay import OWN, longest, plan, replay

Draw = Any


class Job(NamedTuple):
    """Pieces of some chains and laps, as the functions take them."""

    run: Any
    join: Any
    own: Any
    transfer: Any
    offset: Any
    laps: int
    hands: Any

    @property
    def measured(self) -> tuple[Any, ...]:
        its = plan(self.run, self.join, len(self.offset), self.laps, self.hands)
        return its, self.own, self.transfer, self.offset


@st.composite
def jobs(draw: Draw) -> Job:
    chains, laps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    times, pieces, transfer = st.integers(0, 9), {}, []
    for lap in range(laps):
        for chain in range(chains):
            pieces[chain * laps + lap] = []
        for _ in range(draw(st.integers(0, 7))):
            some = draw(st.sets(st.integers(0, chains - 1), min_size=1))
            if len(some) > 1:
                transfer.append(draw(times))
            waits = draw(st.sampled_from(sorted(some)))  # of the others each may only hand over
            for chain in some:
                joint = len(transfer) - 1 if len(some) > 1 else OWN
                hands = joint != OWN and chain != waits and draw(st.booleans())
                pieces[chain * laps + lap].append((joint, draw(times), hands))
    flat = [(run, *piece) for run in sorted(pieces) for piece in pieces[run]]
    run, join, own, hands = np.array(flat, dtype=np.int64).reshape(-1, 4).T
    offset = np.array([draw(times) for _ in pieces], dtype=np.int64)
    return Job(run, join, own, np.array(transfer, dtype=np.int64), offset, laps, hands > 0)


def counted_out(job: Job, lap: int) -> int:
    """Return the length of the longest of all paths through a lap, each of them walked."""

    def until(piece: int, run: int) -> list[int]:
        if piece < 0 or job.run[piece] != run:
            return [int(job.offset[run])]
        group = job.join[piece]
        if group == OWN or job.hands[piece]:
            own = 0 if job.hands[piece] else int(job.own[piece])
            return [length + own for length in until(piece - 1, run)]
        ways = [until(at - 1, int(job.run[at])) for at in np.flatnonzero(job.join == group)]
        return [length + int(job.transfer[group]) for way in ways for length in way]

    runs = range(lap, len(job.offset), job.laps)
    ends = [int(np.searchsorted(job.run, run, "right")) - 1 for run in runs]
    return max(max(until(end, run)) for end, run in zip(ends, runs, strict=True))


@given(jobs())
def test_a_lap_is_as_long_as_the_longest_of_all_its_paths(job: Job) -> None:
    assert replay(*job.measured).lap.tolist() == [counted_out(job, lap) for lap in range(job.laps)]


@given(jobs())
def test_what_is_on_the_path_adds_up_to_the_lap(job: Job) -> None:
    laps, found = replay(*job.measured).lap, longest(*job.measured)
    total = np.zeros(job.laps, dtype=np.int64)
    np.add.at(total, job.run[found.on] % job.laps, found.weight[found.on])
    late = laps - total  # where the path began: nothing else is missing
    for lap, rest in enumerate(late.tolist()):
        assert rest in job.offset[lap :: job.laps]
    assert (found.slack[found.on] == 0).all()


@given(jobs(), st.data())
def test_a_piece_may_take_its_slack_longer_and_no_more(job: Job, data: Draw) -> None:
    if not len(job.run):
        return
    its, *measured = job.measured
    laps, found = replay(its, *measured).lap, longest(its, *measured)
    piece = data.draw(st.integers(0, len(job.run) - 1))
    own, transfer = job.own.copy(), job.transfer.copy()
    at, where = (own, piece) if job.join[piece] == OWN else (transfer, job.join[piece])
    at[where] += found.slack[piece]
    assert replay(its, own, transfer, job.offset).lap.tolist() == laps.tolist()
    at[where] += 1
    longer = np.arange(job.laps) == job.run[piece] % job.laps
    assert replay(its, own, transfer, job.offset).lap.tolist() == (laps + longer).tolist()


@given(jobs(), st.data())
def test_shorter_on_the_path_shortens_the_lap_by_as_much_and_beside_it_by_nothing(
    job: Job, data: Draw
) -> None:
    pieces = np.flatnonzero(job.join == OWN)
    if not len(pieces):
        return
    piece, less = data.draw(st.sampled_from(pieces.tolist())), data.draw(st.integers(0, 5))
    on = longest(*job.measured).on[piece]
    job.own[piece] += 5 * on  # so much longer than every path around it
    its, *measured = job.measured
    before = replay(its, *measured).lap
    job.own[piece] -= less if on else min(less, int(job.own[piece]))
    saved = before - replay(its, *measured).lap
    there = np.arange(job.laps) == job.run[piece] % job.laps
    assert saved.tolist() == (there * less * on).tolist()


def test_of_two_ranks_the_late_one_is_on_the_path_and_the_early_one_has_slack() -> None:
    # Rank 0: 3 of its own, the join, 1. Rank 1: 5, the join, 4.
    run, join = np.array([0, 0, 0, 1, 1, 1]), np.array([OWN, 0, OWN] * 2)
    own, transfer = np.array([3, 9, 1, 5, 7, 4]), np.array([2])
    measured = (plan(run, join, 2, 1), own, transfer, np.zeros(2, dtype=np.int64))

    found = longest(*measured)

    assert replay(*measured).lap.tolist() == [11]
    assert found.on.tolist() == [False, False, False, True, True, True]
    assert found.slack.tolist() == [2, 0, 3, 0, 0, 0]
    assert found.weight.tolist() == [3, 2, 1, 5, 2, 4]


def test_who_hands_over_goes_on_and_two_may_hand_to_each_other() -> None:
    # Rank 0: 3 of its own, hands over to join 0, waits in join 1, 1. Rank 1: 5, hands, waits, 4.
    run, join = np.array([0] * 4 + [1] * 4), np.array([OWN, 0, 1, OWN, OWN, 1, 0, OWN])
    own, hands = np.array([3, 0, 9, 1, 5, 0, 9, 4]), np.array([False, True, False, False] * 2)
    its = plan(run, join, 2, 1, hands)
    measured = (its, own, np.array([7, 2]), np.zeros(2, dtype=np.int64))

    found = longest(*measured)

    assert not its.stuck.any()
    assert replay(*measured).end.tolist() == [5 + 2 + 1, 5 + 7 + 4]
    # Rank 1 came last to the join in which it waits: what it was handed had been there for long.
    assert found.on.tolist() == [False] * 4 + [True, False, True, True]
    assert found.slack.tolist()[:2] == [2, 0]
    assert (found.weight[found.on]).tolist() == [5, 7, 4]


@pytest.mark.parametrize(
    ("join", "runs", "laps"),
    [([0, 1, 1, 0], 2, 1), ([0, OWN, OWN, 0], 4, 2)],
    ids=["in a circle", "in two laps"],
)
def test_joins_that_cannot_be_are_stuck(join: list[int], runs: int, laps: int) -> None:
    run = np.array([0, 0, 1, 1]) if laps == 1 else np.array([0, 1, 2, 3])
    assert plan(run, np.array(join), runs, laps).stuck.all()
