"""A simulated pair of clocks, of which the true offset is known at every time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.loaders.clock_fit import (
    Clock,
    Knot,
    from_collectives,
    from_exchange,
    solve,
)

SECOND = 10**9
MINUTE = 60 * SECOND
Ints = npt.NDArray[np.int64]


@dataclass
class Pair:
    """This clock, and the other one's offset to it."""

    random: np.random.Generator
    start: int = 0
    offset: int = 0
    drift: float = 0.0
    jump_at: int = 2**62
    jump: int = 0
    uneven: int = 0

    def truth(self, times: Ints) -> Ints:
        grown = np.rint(self.drift * (times - self.start)).astype(np.int64)
        return self.offset + grown + self.jump * (times > self.jump_at)

    def delay(self) -> int:
        return 30_000 + int(self.random.exponential(40_000))

    def exchange(self, at: int, pings: int = 8) -> list[tuple[int, int, int, int]]:
        readings = []
        for _ in range(pings):
            arrived = at + self.delay() + self.uneven
            answered = arrived + 5_000
            received = answered + self.delay()
            there = np.array([arrived, answered])
            readings.append((at, *(there + self.truth(there)).tolist(), received))
            at = received + 10_000
        return readings

    def collectives(self, at: int, count: int) -> list[Ints]:
        late = self.random.integers(0, 5_000_000, (2, count))
        starts = at + np.arange(count) * 20_000_000 + late
        done = starts.max(axis=0) + 200_000
        ends = done + self.random.integers(0, 60_000, (2, count))
        there_start, there_end = (times + self.truth(times) for times in (starts[1], ends[1]))
        return [starts[0], ends[0], there_start, there_end]


def pair(seed: int, *, jump: bool = False) -> Pair:
    random = np.random.default_rng(seed)
    start = int(random.integers(0, 2**53))
    found = Pair(
        random,
        start,
        offset=int(random.integers(-(2**55), 2**55)),
        drift=float(random.uniform(-50e-6, 50e-6)),
        uneven=int(random.integers(0, 400_000)),
    )
    if jump:
        found.jump_at = start + int(random.integers(0, 60 * MINUTE))
        found.jump = int(random.choice([-1, 1]) * random.integers(3_000_000, 80_000_000))
    return found


def every_ten_minutes(of: Pair) -> Clock:
    times = of.start + np.arange(0, 61, 10) * MINUTE
    clock = solve([from_exchange(of.exchange(int(at))) for at in times])
    assert clock is not None
    return clock


def inside(of: Pair, clock: Clock, over: int = 65 * MINUTE) -> float:
    """Return the share of moments at which the true offset lies within the stated bounds."""
    times = of.start + of.random.integers(0, over, 400)
    return float((abs(clock.offset(times) - of.truth(times)) <= clock.uncertainty(times)).mean())


def test_the_true_offset_lies_within_the_bounds_whatever_offset_drift_and_uneven_delays() -> None:
    shares = []
    for seed in range(100):
        of = pair(seed)
        clock = every_ten_minutes(of)
        shares.append(inside(of, clock))
        assert not clock.jumps
        assert abs(clock.drift - of.drift) <= clock.drift_uncertainty
        assert clock.uncertainty([of.start + 25 * MINUTE])[0] < 400_000
    assert np.mean(shares) > 0.999
    assert min(shares) > 0.99


def test_a_clock_that_was_set_is_found_and_the_bounds_hold_around_it() -> None:
    shares = []
    for seed in range(100):
        of = pair(seed, jump=True)
        clock = every_ten_minutes(of)
        shares.append(inside(of, clock))
        (jump,) = clock.jumps
        assert jump.after_ns <= of.jump_at + SECOND
        assert of.jump_at <= jump.before_ns
        assert jump.size_ns == pytest.approx(of.jump, abs=700_000)
    assert np.mean(np.array(shares) > 0.99) >= 0.95


def test_even_delays_give_the_offset_within_microseconds() -> None:
    found = []
    for seed in range(100):
        of = pair(seed)
        of.uneven = 0
        clock = every_ten_minutes(of)
        times = of.start + np.arange(0, 60) * MINUTE
        found.append(abs(clock.offset(times) - of.truth(times)).mean())
    assert np.mean(found) < 6_000


def _wandering(kind: str, seed: int) -> tuple[Ints, Ints]:
    """Return seconds and the true offset in ns, of a rate that temperature or NTP changes."""
    random = np.random.default_rng(seed)
    seconds = np.arange(0, 7_201)
    rate = np.full(len(seconds), random.uniform(-2e-5, 2e-5))
    if kind == "air conditioning":
        rate += 1e-6 * np.sin(2 * np.pi * seconds / 1_200 + random.uniform(0, 6))
    elif kind == "slew":
        rate += np.where(seconds // 1_200 % 2 == 0, 5e-6, 0.0)
    else:
        rate += np.cumsum(random.normal(0, 1e-6 / 60, len(seconds)))
    return seconds * SECOND, np.rint(np.cumsum(rate) * SECOND).astype(np.int64)


@pytest.mark.parametrize("kind", ["air conditioning", "slew", "random walk"])
def test_a_rate_that_changes_is_followed_and_its_wander_measured(kind: str) -> None:
    shares, unsure = [], []
    for seed in range(12):
        times, offset = _wandering(kind, seed)
        of = Pair(np.random.default_rng(seed))
        knots = []
        for at in range(0, 7_200, 120):
            of.offset = int(offset[at])
            knots.append(from_exchange(of.exchange(at * SECOND)))
        clock = solve(knots)
        assert clock is not None
        moments = slice(0, 7_080)
        off = abs(clock.offset(times[moments]) - offset[moments])
        known = clock.uncertainty(times[moments])
        shares.append(float((off <= known).mean()))
        unsure.append(float(np.median(known)))
    assert np.mean(shares) >= 0.999
    assert kind == "slew" or np.median(unsure) < 110_000


def test_no_message_is_received_before_it_was_sent() -> None:
    for seed in range(100):
        of = pair(seed, jump=seed % 2 == 0)
        rounds = [of.exchange(int(of.start + at * MINUTE)) for at in range(0, 61, 10)]
        clock = solve([from_exchange(readings) for readings in rounds])
        assert clock is not None
        for readings in rounds:
            sent, arrived, answered, received = np.array(readings).T
            straddles = sent[0] <= of.jump_at <= received[-1]
            # within one exchange the offset moves by 50 ppm of some milliseconds
            assert straddles or (clock.moved(sent) <= arrived + 200).all()
            assert straddles or (answered <= clock.moved(received) + 200).all()


def test_collectives_alone_bound_the_offset_and_their_ends_give_it() -> None:
    for seed in range(100):
        of = pair(seed)
        rounds = [of.collectives(int(of.start + at * MINUTE), 40) for at in range(0, 61, 5)]
        clock = solve([from_collectives(*columns) for columns in rounds])
        assert clock is not None
        assert inside(of, clock, 60 * MINUTE) > 0.99
        times = of.start + np.arange(60) * MINUTE
        assert abs(clock.offset(times) - of.truth(times)).max() < 100_000
        assert clock.uncertainty(times).max() < 1_500_000


def test_bounds_of_collectives_hold_although_the_clocks_drift_meanwhile() -> None:
    start = np.arange(0, 3_000_000_000, 50_000_000)
    late = np.where(np.arange(len(start)) % 2, 2_000_000, 0)  # now one comes last, now the other
    end = start + 2_010_000

    def there(times: Ints) -> Ints:
        return times + np.rint(9e-5 * times).astype(np.int64)

    knot = from_collectives(start + late, end, there(start + 2_000_000 - late), there(end))
    true = int(there(np.array([knot.time_ns]))[0]) - knot.time_ns
    assert knot.low_ns <= true <= knot.high_ns
    assert knot.high_ns - knot.low_ns < 1_000_000


def test_a_rank_whose_collectives_always_end_late_stays_within_the_bounds() -> None:
    for seed in range(20):
        of = pair(seed)
        knots = []
        for at in range(0, 61, 5):
            start, end, start_there, end_there = of.collectives(int(of.start + at * MINUTE), 40)
            knots.append(from_collectives(start, end + 300_000, start_there, end_there))
        clock = solve(knots)
        assert clock is not None
        assert inside(of, clock, 60 * MINUTE) > 0.99


def test_collectives_keep_the_drift_where_only_the_first_exchange_came_through() -> None:
    of = pair(3)
    first = from_exchange(of.exchange(of.start))
    alone = solve([first])
    later = [
        from_collectives(*of.collectives(int(of.start + at * MINUTE), 40)) for at in (20, 40, 60)
    ]
    both = solve([first, *later])
    assert alone is not None
    assert both is not None
    at = [of.start + 60 * MINUTE]
    assert alone.uncertainty(at)[0] > 300_000_000
    assert both.uncertainty(at)[0] < 1_500_000
    assert inside(of, both, 60 * MINUTE) > 0.99


def test_coarse_knots_do_not_spoil_fine_ones() -> None:
    of = pair(5)
    fine = [from_exchange(of.exchange(int(of.start + at * MINUTE))) for at in range(0, 61, 10)]
    coarse = [
        from_collectives(*of.collectives(int(of.start + at * MINUTE + SECOND), 4))
        for at in range(0, 60)
    ]
    alone, both = solve(fine), solve([*fine, *coarse])
    assert alone is not None
    assert both is not None
    times = of.start + np.arange(60) * MINUTE
    assert (both.uncertainty(times) <= alone.uncertainty(times)).all()


def test_a_coarse_knot_that_contradicts_shows_that_the_clock_was_set_after_the_last_exchange() -> (
    None
):
    of = pair(5)
    fine = [from_exchange(of.exchange(int(of.start + at * MINUTE))) for at in (0, 10, 20, 30)]
    of.jump_at, of.jump = of.start + 40 * MINUTE, 50_000_000
    later = from_collectives(*of.collectives(int(of.start + 50 * MINUTE), 1))
    alone, clock = solve(fine), solve([*fine, later])
    assert alone is not None
    assert clock is not None
    assert later.half_ns > alone.uncertainty([later.time_ns])[0]
    (jump,) = clock.jumps
    assert jump.size_ns == pytest.approx(50_000_000, rel=0.15)
    assert inside(of, clock, 50 * MINUTE) > 0.99


def test_three_exchanges_leave_open_in_which_half_the_clock_was_set() -> None:
    for seed in range(40):
        of = pair(seed, jump=True)
        of.jump = 3_000_000 * int(np.sign(of.jump))
        of.drift /= 100
        times = of.start + np.array([0, 30, 60]) * MINUTE
        clock = solve([from_exchange(of.exchange(int(at))) for at in times])
        assert clock is not None
        assert len(clock.jumps) == 2
        assert inside(of, clock, 60 * MINUTE) > 0.99


def test_two_exchanges_give_a_drift_and_one_gives_none() -> None:
    one, two = Knot(0, -100, 100, 0), Knot(MINUTE, 600_000 - 100, 600_000 + 100, 600_000)
    alone, both = solve([one]), solve([two, one])
    assert alone is not None
    assert both is not None
    assert (alone.drift, alone.drift_uncertainty) == (0.0, 1e-4)
    assert both.drift == pytest.approx(1e-5)
    assert both.drift_uncertainty < 1e-8
    assert both.offset([0, MINUTE, 2 * MINUTE]).tolist() == [0, 600_000, 1_200_000]


def test_exchanges_within_a_second_tell_no_drift() -> None:
    clock = solve([Knot(0, -50_000, 50_000, 0), Knot(SECOND // 2, -10_000, 70_000, 30_000)])
    assert clock is not None
    assert (clock.drift, clock.drift_uncertainty) == (0.0, 1e-4)


def test_two_exchanges_too_far_apart_for_any_drift_are_a_jump() -> None:
    clock = solve([Knot(0, -100, 100, 0), Knot(SECOND, 10**9 - 100, 10**9 + 100, 10**9)])
    assert clock is not None
    assert [jump.size_ns for jump in clock.jumps] == [10**9]
    assert clock.uncertainty([SECOND // 2])[0] >= 10**9 // 2


def test_a_clock_set_in_the_middle_of_an_exchange_is_not_told_to_be_sure() -> None:
    knot = from_exchange([(0, 1_040, 1_050, 90), (200, 5_240, 5_250, 290)])
    assert (knot.low_ns, knot.high_ns) == (960, 5_040)


def test_without_a_knot_nothing_is_known() -> None:
    assert solve([]) is None


knots = st.lists(
    st.builds(
        lambda time, low, width, share: Knot(time, low, low + width, low + width * share // 100),
        st.integers(0, 2**58),
        st.integers(-(2**60), 2**60),
        st.integers(0, 10**9),
        st.integers(0, 100),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda knot: knot.time_ns,
)


@given(knots)
def test_at_a_knot_the_bounds_hold_all_that_it_allows(found: list[Knot]) -> None:
    clock = solve(found)
    assert clock is not None
    for knot in found:
        if knot.time_ns in clock.time_ns:
            offset = int(clock.offset([knot.time_ns])[0])
            unsure = int(clock.uncertainty([knot.time_ns])[0])
            assert knot.low_ns <= offset <= knot.high_ns
            assert offset - unsure <= knot.low_ns
            assert knot.high_ns <= offset + unsure


@given(st.integers(0, 10**6), st.lists(st.integers(0, 4 * 3600 * SECOND), min_size=2))
def test_moved_times_keep_their_order(seed: int, times: list[int]) -> None:
    of = pair(seed, jump=True)
    ordered = of.start + np.sort(np.array(times, np.int64)) - 30 * MINUTE
    assert (np.diff(every_ten_minutes(of).moved(ordered)) >= 0).all()
