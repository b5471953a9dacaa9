"""Replay, longest paths and slack, compared with all paths counted out on small random graphs."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.critical_path.replay import (
    WORK,
    build_schedule,
    longest_path,
    replay,
)

Draw = Any


class Job(NamedTuple):
    """Segments of some chains and intervals, as the functions take them."""

    run: Any
    sync_point: Any
    own: Any
    transfer: Any
    offset: Any
    intervals: int
    produces: Any

    @property
    def measured(self) -> tuple[Any, ...]:
        schedule = build_schedule(
            self.run, self.sync_point, len(self.offset), self.intervals, self.produces
        )
        return schedule, self.own, self.transfer, self.offset


@st.composite
def jobs(draw: Draw) -> Job:
    chains, intervals = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    times, segments, transfer = st.integers(0, 9), {}, []
    for interval in range(intervals):
        for chain in range(chains):
            segments[chain * intervals + interval] = []
        for _ in range(draw(st.integers(0, 7))):
            some = draw(st.sets(st.integers(0, chains - 1), min_size=1))
            if len(some) > 1:
                transfer.append(draw(times))
            waits = draw(st.sampled_from(sorted(some)))  # of the others each may only hand over
            for chain in some:
                joint = len(transfer) - 1 if len(some) > 1 else WORK
                hands = joint != WORK and chain != waits and draw(st.booleans())
                segments[chain * intervals + interval].append((joint, draw(times), hands))
    flat = [(run, *piece) for run in sorted(segments) for piece in segments[run]]
    run, join, own, hands = np.array(flat, dtype=np.int64).reshape(-1, 4).T
    offset = np.array([draw(times) for _ in segments], dtype=np.int64)
    return Job(run, join, own, np.array(transfer, dtype=np.int64), offset, intervals, hands > 0)


def counted_out(job: Job, interval: int) -> int:
    """Return the length of the longest of all paths through a interval, each of them walked."""

    def until(piece: int, run: int) -> list[int]:
        if piece < 0 or job.run[piece] != run:
            return [int(job.offset[run])]
        group = job.sync_point[piece]
        if group == WORK or job.produces[piece]:
            own = 0 if job.produces[piece] else int(job.own[piece])
            return [length + own for length in until(piece - 1, run)]
        ways = [until(at - 1, int(job.run[at])) for at in np.flatnonzero(job.sync_point == group)]
        return [length + int(job.transfer[group]) for way in ways for length in way]

    runs = range(interval, len(job.offset), job.intervals)
    ends = [int(np.searchsorted(job.run, run, "right")) - 1 for run in runs]
    return max(max(until(end, run)) for end, run in zip(ends, runs, strict=True))


@given(jobs())
def test_a_lap_is_as_long_as_the_longest_of_all_its_paths(job: Job) -> None:
    assert replay(*job.measured).interval_ns.tolist() == [
        counted_out(job, interval) for interval in range(job.intervals)
    ]


@given(jobs())
def test_what_is_on_the_path_adds_up_to_the_lap(job: Job) -> None:
    intervals, found = replay(*job.measured).interval_ns, longest_path(*job.measured)
    total = np.zeros(job.intervals, dtype=np.int64)
    np.add.at(total, job.run[found.on] % job.intervals, found.weight[found.on])
    late = intervals - total  # where the path began: nothing else is missing
    for interval, rest in enumerate(late.tolist()):
        assert rest in job.offset[interval :: job.intervals]
    assert (found.slack[found.on] == 0).all()


@given(jobs(), st.data())
def test_a_piece_may_take_its_slack_longer_and_no_more(job: Job, data: Draw) -> None:
    if not len(job.run):
        return
    schedule, *measured = job.measured
    intervals, found = replay(schedule, *measured).interval_ns, longest_path(schedule, *measured)
    piece = data.draw(st.integers(0, len(job.run) - 1))
    own, transfer = job.own.copy(), job.transfer.copy()
    at, where = (own, piece) if job.sync_point[piece] == WORK else (transfer, job.sync_point[piece])
    at[where] += found.slack[piece]
    assert replay(schedule, own, transfer, job.offset).interval_ns.tolist() == intervals.tolist()
    at[where] += 1
    longer = np.arange(job.intervals) == job.run[piece] % job.intervals
    assert (
        replay(schedule, own, transfer, job.offset).interval_ns.tolist()
        == (intervals + longer).tolist()
    )


@given(jobs(), st.data())
def test_shorter_on_the_path_shortens_the_lap_by_as_much_and_beside_it_by_nothing(
    job: Job, data: Draw
) -> None:
    segments = np.flatnonzero(job.sync_point == WORK)
    if not len(segments):
        return
    piece, less = data.draw(st.sampled_from(segments.tolist())), data.draw(st.integers(0, 5))
    on = longest_path(*job.measured).on[piece]
    job.own[piece] += 5 * on  # so much longer than every path around it
    schedule, *measured = job.measured
    before = replay(schedule, *measured).interval_ns
    job.own[piece] -= less if on else min(less, int(job.own[piece]))
    saved = before - replay(schedule, *measured).interval_ns
    there = np.arange(job.intervals) == job.run[piece] % job.intervals
    assert saved.tolist() == (there * less * on).tolist()


def test_of_two_ranks_the_late_one_is_on_the_path_and_the_early_one_has_slack() -> None:
    # Rank 0: 3 of its own, the join, 1. Rank 1: 5, the join, 4.
    run, join = np.array([0, 0, 0, 1, 1, 1]), np.array([WORK, 0, WORK] * 2)
    own, transfer = np.array([3, 9, 1, 5, 7, 4]), np.array([2])
    measured = (build_schedule(run, join, 2, 1), own, transfer, np.zeros(2, dtype=np.int64))

    found = longest_path(*measured)

    assert replay(*measured).interval_ns.tolist() == [11]
    assert found.on.tolist() == [False, False, False, True, True, True]
    assert found.slack.tolist() == [2, 0, 3, 0, 0, 0]
    assert found.weight.tolist() == [3, 2, 1, 5, 2, 4]


def test_who_hands_over_goes_on_and_two_may_hand_to_each_other() -> None:
    # Rank 0: 3 of its own, hands over to join 0, waits in join 1, 1. Rank 1: 5, hands, waits, 4.
    run, join = np.array([0] * 4 + [1] * 4), np.array([WORK, 0, 1, WORK, WORK, 1, 0, WORK])
    own, hands = np.array([3, 0, 9, 1, 5, 0, 9, 4]), np.array([False, True, False, False] * 2)
    schedule = build_schedule(run, join, 2, 1, hands)
    measured = (schedule, own, np.array([7, 2]), np.zeros(2, dtype=np.int64))

    found = longest_path(*measured)

    assert not schedule.stuck.any()
    assert replay(*measured).end.tolist() == [5 + 2 + 1, 5 + 7 + 4]
    # Rank 1 came last to the join in which it waits: what it was handed had been there for long.
    assert found.on.tolist() == [False] * 4 + [True, False, True, True]
    assert found.slack.tolist()[:2] == [2, 0]
    assert (found.weight[found.on]).tolist() == [5, 7, 4]


@pytest.mark.parametrize(
    ("join", "runs", "intervals"),
    [([0, 1, 1, 0], 2, 1), ([0, WORK, WORK, 0], 4, 2)],
    ids=["in a circle", "in two intervals"],
)
def test_joins_that_cannot_be_are_stuck(join: list[int], runs: int, intervals: int) -> None:
    run = np.array([0, 0, 1, 1]) if intervals == 1 else np.array([0, 1, 2, 3])
    assert build_schedule(run, np.array(join), runs, intervals).stuck.all()
