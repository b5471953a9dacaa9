"""Which times can be true: what is sound stays as it is, and what is not costs nothing else."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.records.notes import Code
from lightning_rlprof.tables.event_times import (
    DATE_NS,
    DeviceTimes,
    device_times,
    main_dates,
    of_one_date,
    plausible,
)
from lightning_rlprof.tables.table import ImpossibleTimes

Int64s = npt.NDArray[np.int64]
MS, HOUR, YEAR = 10**6, 3_600 * 10**9, 365 * 86_400 * 10**9
EPOCH = 1_736_408_883_000_000_000
UNKNOWN_LAUNCH = -1


def serial(draw: st.DrawFn, kernels: int, began: int) -> tuple[Int64s, Int64s]:
    """Return starts and ends of one stream; some begin up to 2.4 µs before the one before ends."""
    gaps = draw(st.lists(st.integers(-2_400, 5 * MS), min_size=kernels, max_size=kernels))
    took = draw(st.lists(st.integers(5_000, 20 * MS), min_size=kernels, max_size=kernels))
    start, end, at = [], [], began
    for gap, length in zip(gaps, took, strict=True):
        at += max(gap, -length // 2)
        start.append(at)
        at += length
        end.append(at)
    return np.array(start), np.array(end)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Int64s, Int64s, Int64s]:
    began = draw(st.sampled_from([5 * MS, 3_605_054_881_202_000, EPOCH]))
    found = [serial(draw, draw(st.integers(10, 25)), began) for _ in range(draw(st.integers(1, 3)))]
    lane = np.repeat(np.arange(len(found)), [len(start) for start, _ in found])
    return lane, np.concatenate([s for s, _ in found]), np.concatenate([e for _, e in found])


def checked(lane: Int64s, start: Int64s, end: Int64s, host: tuple[int, int]) -> DeviceTimes:
    return device_times(lane, start, end, np.full(len(lane), UNKNOWN_LAUNCH), host)


def host_of(start: Int64s, end: Int64s) -> tuple[int, int]:
    return int(start.min()) - 1, int(end.max())


def is_untouched(times: DeviceTimes, end: Int64s) -> bool:
    return not times.bounded.any() and not times.untimed.any() and (times.end_ns == end).all()


@given(streams(), st.booleans())
def test_streams_that_run_in_their_order_are_not_accused(
    rows: tuple[Int64s, Int64s, Int64s], shuffled: bool
) -> None:
    lane, start, end = rows
    order = np.random.default_rng(0).permutation(len(lane)) if shuffled else np.arange(len(lane))

    times = checked(lane[order], start[order], end[order], host_of(start, end))

    assert is_untouched(times, end[order])


@given(streams(), st.data())
def test_an_end_past_the_next_work_is_bounded_by_it(
    rows: tuple[Int64s, Int64s, Int64s], data: st.DataObject
) -> None:
    lane, start, end = rows
    row = data.draw(st.integers(0, len(lane) - 2))
    late = data.draw(st.integers(21_000, 60 * YEAR))
    following = start[row + 1]
    written = end.copy()
    written[row] = max(following, end[row]) + late if lane[row + 1] == lane[row] else end[row]

    times = checked(lane, start, written, host_of(start, end))

    assert times.bounded.tolist() == (written != end).tolist()
    assert not times.untimed.any()
    others = np.arange(len(lane)) != row
    assert (times.end_ns[others] == end[others]).all()
    if written[row] != end[row]:
        assert times.end_ns[row] == following >= end[row] - 2_400


@given(streams(), st.integers(0, 9), st.sampled_from([-1, 1]), st.integers(HOUR, 50 * YEAR))
def test_work_far_outside_the_trace_of_the_host_is_untimed(
    rows: tuple[Int64s, Int64s, Int64s], row: int, way: int, far: int
) -> None:
    lane, start, end = rows
    moved = np.where(np.arange(len(lane)) == row, way * far, 0)

    times = checked(lane, start + moved, end + moved, host_of(start, end))

    assert np.flatnonzero(times.untimed).tolist() == [row]
    assert not times.bounded.any()


@given(streams(), st.integers(0, 9), st.booleans())
def test_a_start_of_zero_is_untimed(
    rows: tuple[Int64s, Int64s, Int64s], row: int, ended: bool
) -> None:
    lane, start, end = rows
    start[row] = 0
    end[row] *= ended

    times = checked(lane, start, end, host_of(start[start > 0], end))

    assert np.flatnonzero(times.untimed).tolist() == [row]
    assert not times.bounded.any()


@given(st.integers(2, 5), st.integers(10, 40), st.integers(0, 2**31))
def test_streams_that_are_several_are_not_accused(queues: int, kernels: int, seed: int) -> None:
    """Queues of one number, streams that are not known, and graph replays overlap."""
    noise = np.random.default_rng(seed)
    start = EPOCH + np.sort(noise.integers(0, 100 * MS, kernels * queues))
    end = start + noise.integers(5 * MS, 50 * MS, len(start))
    lane, launch = np.zeros(len(start), np.int64), np.full(len(start), UNKNOWN_LAUNCH)
    host = host_of(start, end)

    merged = device_times(lane, start, end, launch, host)
    unknown = device_times(lane - 1, start, end, launch, host)
    replay = device_times(lane, start, end, lane + 7, host)

    assert all(is_untouched(times, end) for times in (merged, unknown, replay))


def test_the_kernels_of_a_replay_end_before_the_next_replay() -> None:
    start = np.array([0, 1, 2, 10, 11, 12]) * MS + EPOCH
    end = start + np.array([5, 5, 500, 5, 5, 5]) * MS
    launch = np.array([7, 7, 7, 8, 8, 8])

    times = device_times(np.zeros(6, np.int64), start, end, launch, (EPOCH, EPOCH + 20 * MS))

    assert times.end_ns.tolist() == np.where(times.bounded, EPOCH + 10 * MS, end).tolist()
    assert times.bounded.tolist() == [False, False, True, False, False, False]


def test_the_last_work_of_a_stream_has_no_bound_but_the_recording() -> None:
    start = np.arange(20) * MS + EPOCH
    end = start + MS // 2
    end[-1] += 3_400 * 1_000 * MS

    assert checked(np.zeros(20, np.int64), start, end, (EPOCH, EPOCH + 20 * MS)).untimed[-1]
    assert is_untouched(device_times(start * 0, start, end, start * 0 - 1, None), end)


@given(streams(), st.data())
def test_many_impossible_times_are_found_within_the_recording_of_the_host(
    rows: tuple[Int64s, Int64s, Int64s], data: st.DataObject
) -> None:
    """Up to half of the work has an end, or times, that the host rules out."""
    lane, start, end = rows
    bad = data.draw(st.sets(st.integers(0, len(lane) - 1), max_size=len(lane) // 2))
    late, moved = np.isin(np.arange(len(lane)), [*bad]), data.draw(st.booleans())

    far = np.where(late, HOUR, 0)
    times = checked(lane, start + far * moved, end + far, host_of(start, end))

    assert (times.bounded | times.untimed).tolist() == late.tolist()
    assert (times.end_ns[~late] == end[~late]).all()
    assert not (times.bounded & moved).any()


def test_a_host_whose_clock_disagrees_says_nothing() -> None:
    start = np.arange(20) * MS + EPOCH
    end = start + MS // 2

    assert is_untouched(checked(start * 0, start, end, (EPOCH - HOUR, EPOCH - HOUR + MS)), end)


@given(st.lists(st.integers(-(2**62), 2**62), max_size=30), st.booleans())
def test_any_times_are_an_answer(starts: list[int], known: bool) -> None:
    start = np.array(starts, np.int64)
    end = np.minimum(start + 2**61, 2**62)
    host = (min(starts, default=0), max(starts, default=0)) if known else None

    times = device_times(start % 3 - 1, start, end, start % 2 - 1, host)

    assert (times.end_ns <= end).all()
    assert (times.end_ns >= start).all()
    assert not (times.bounded & times.untimed).any()


@given(st.integers(0, 40), st.lists(st.integers(1, 60 * YEAR), min_size=1, max_size=5))
def test_starts_of_other_dates_than_most_are_found(first: int, early: list[int]) -> None:
    sound = EPOCH + first * HOUR + np.arange(9) * HOUR // 3
    odd = np.maximum(sound[0] - 24 * HOUR - np.array(early), 0)

    assert of_one_date(np.append(odd, sound)).tolist() == [False] * len(odd) + [True] * 9


def test_of_as_many_events_the_later_are_true() -> None:
    assert main_dates(np.array([0, 700, 900]), np.array([2, 2, 1])) == (700, 700)
    assert main_dates(np.array([], np.int64), np.array([], np.int64)) == (0, -1)
    assert of_one_date(np.arange(3) * DATE_NS).all()  # no date in between is empty


def test_times_since_1970_are_possible_within_a_capture() -> None:
    unknown = -(2**63) + 1
    start = np.array([EPOCH, EPOCH + HOUR, 1_000, EPOCH, EPOCH, unknown])
    end = start + np.array([5, 5, 5, -1, 2**60, 5])

    assert plausible(start, end).tolist() == [True, True, False, False, False, False]
    assert plausible(start[:0], end[:0]).tolist() == []


@pytest.mark.parametrize("several", [False, True])
def test_what_is_doubted_is_named_and_counted(several: bool) -> None:
    bounded = np.array([True, several, False])
    times = DeviceTimes(np.zeros(3, np.int64), bounded, ~bounded)

    found = times.remarks("kernels", (np.array([1, 0, -1]), ["gemm", "add"]))

    facts = [each.facts for each in found if isinstance(each, ImpossibleTimes)]
    assert facts == [{"untimed": 2 - several}, {"bounded": 1 + several}]
    assert {each.code for each in found if isinstance(each, ImpossibleTimes)} == {
        Code.TIMES_IMPOSSIBLE
    }
    assert "add" in found[1]
