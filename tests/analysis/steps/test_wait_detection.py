"""Waiting is told from own time by who comes early, with one clock and with many."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.statistics.robust import expected, slope
from lightning_rlprof.analysis.steps.rank_matrix import (
    DetectedWaits,
    RankMatrix,
    build_rank_matrix,
    detect_waits,
    find_meeting_places,
    stage_rows,
)
from tests.builders.scripted import STAGES, Script, play
from tests.effort import examples

OFFSETS = {0: 5.0, 2: -5.0}


def held(script: Script, seed: int, *, one_clock: bool = True) -> dict[str, tuple[bool, bool]]:
    """Return by stage whether it is bound, and whether a slow rank would be seen."""
    found = found_in(script, seed, one_clock=one_clock)
    return dict(
        zip(STAGES, zip(found.bound.tolist(), found.seen.tolist(), strict=True), strict=True)
    )


def found_in(script: Script, seed: int, *, one_clock: bool) -> DetectedWaits:
    spans = play(script, seed).spans
    lineup = build_rank_matrix(spans, stage_rows(spans), spans.ranks)
    tokens = lineup.counter(spans, "tokens")
    work = [] if tokens is None else [tokens]
    explained = np.stack(
        [expected(lineup.own_ns[:, :, at], [each[:, :, at] for each in work]) for at in range(4)],
        axis=2,
    )
    return detect_waits(lineup, explained, tokens, one_clock=one_clock)


@pytest.mark.parametrize("uneven", [0.0, 0.5])
@pytest.mark.parametrize("one_clock", [True, False])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_stage_with_the_collective_is_told(uneven: float, one_clock: bool, ranks: int) -> None:
    script = Script(ranks=ranks, uneven=uneven, offsets_ms={} if one_clock else OFFSETS)
    for seed in range(5):
        found = held(script, seed, one_clock=one_clock)
        assert found["actor_update"] == (True, False)
        assert [found[stage][0] for stage in STAGES[:3]] == [False] * 3


def test_without_collectives_no_stage_is_bound() -> None:
    for seed in range(5):
        found = held(Script(meets=()), seed)
        assert [bound for bound, _ in found.values()] == [False] * 4


def test_where_every_stage_has_a_collective_nothing_is_seen() -> None:
    for seed in range(5):
        found = held(Script(meets=STAGES), seed)
        assert [seen for _, seen in found.values()] == [False] * 4


def test_a_rank_that_comes_early_is_known_to_by_how_much() -> None:
    found = found_in(Script(ranks=2, slow={1: 0.3}), 0, one_clock=True)
    early = found.early_ns[:, :, 3]
    assert np.median(early[0]) == pytest.approx(0.3 * 1.2e9, rel=0.1)
    assert np.median(early[1]) == 0.0


@pytest.mark.parametrize("one_clock", [True, False])
def test_an_error_of_a_clock_changes_nothing(one_clock: bool) -> None:
    plain = found_in(Script(hosts=True), 3, one_clock=False)
    wrong = found_in(Script(offsets_ms=OFFSETS), 3, one_clock=False)
    assert plain.bound.tolist() == wrong.bound.tolist()
    assert plain.seen.tolist() == wrong.seen.tolist()
    assert plain.early_ns == pytest.approx(wrong.early_ns, abs=2.0, nan_ok=True)


def test_ranks_meet_after_the_collective_and_nowhere_where_there_is_none() -> None:
    for script, sharp in ((Script(offsets_ms=OFFSETS), True), (Script(meets=()), False)):
        spans = play(script, 1).spans
        lineup = build_rank_matrix(spans, stage_rows(spans), spans.ranks)
        met = find_meeting_places(lineup)
        assert met.sharp is sharp
        if sharp:
            apart = met.times_ns[:, :, 0] - lineup.end_ns[:, :, 3]
            assert np.abs(apart).max() < 1e6 or np.median(np.abs(apart)) > 1e6
            assert met.apart_ns < 2e6


def noisy(seed: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    late = random.normal(0.0, 1.0, (4, 30))
    return late, share * late + random.normal(0.0, 0.3, (4, 30))


@pytest.mark.parametrize("share", [0.0, -0.5, -1.0, 1.0])
def test_the_slope_is_found_with_its_error(share: float) -> None:
    off = [slope(*noisy(seed, share)) for seed in range(60)]
    inside = sum(abs(found - share) <= 2 * error for found, error in off)
    assert inside >= 51
    assert max(error for _, error in off) < 0.1


def test_what_the_step_and_the_rank_have_in_common_does_not_matter() -> None:
    late, longer = noisy(1, -1.0)
    shifted = late + np.arange(30) * 5.0 + np.array([[3.0], [0.0], [9.0], [-40.0]])
    found, error = slope(shifted, longer + np.arange(30) ** 2)
    plain, exact = slope(late, longer)
    assert found == pytest.approx(plain, abs=2 * exact)
    assert error == pytest.approx(exact, rel=0.5)


def test_work_that_hides_waiting_is_taken_off() -> None:
    random = np.random.default_rng(2)
    work = random.lognormal(0.0, 0.5, (8, 40))
    late = 10 * work + random.normal(0.0, 1.0, (8, 40))
    longer = 10 * work - late  # waits for the late, and has as much more to do afterwards
    longer = longer + 10 * work
    assert slope(late, longer)[0] > -0.3
    found, error = slope(late, longer, work)
    assert found + 2 * error < -0.5


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10_000))
def test_no_ratio_gives_less_absolute_deviation(seed: int) -> None:
    random = np.random.default_rng(seed)
    late, longer = random.normal(size=(2, 12)), random.normal(size=(2, 12))
    x, y = late[0] - late[1], longer[0] - longer[1]
    x, y = x - np.median(x), y - np.median(y)  # two ranks mirror each other
    found, _ = slope(late, longer)
    total = [float(np.abs(y - ratio * x).sum()) for ratio in (y / x).tolist()]
    assert float(np.abs(y - found * x).sum()) == pytest.approx(min(total))


def test_too_few_values_say_nothing() -> None:
    late, longer = noisy(3, -1.0)
    assert slope(late[:2, :8], longer[:2, :8]) == (0.0, np.inf)
    assert slope(np.zeros((4, 30)), longer) == (0.0, np.inf)
    assert slope(np.full((4, 30), np.nan), longer) == (0.0, np.inf)


@pytest.mark.parametrize("meets", [True, False])
def test_on_one_clock_a_rank_that_is_always_as_late_shows_the_wait(meets: bool) -> None:
    random, steps = np.random.default_rng(0), 60
    late = np.array([[0.0], [20e6]]) + random.normal(0, 1e6, (2, steps))
    step = np.arange(steps) * 100e6
    # After the ranks have met each has work of its own, which changes far more than their lateness.
    own_work = random.exponential(4e6, (2, steps))
    end = (late.max(axis=0) if meets else late) + 5e6 + own_work
    starts = np.stack([np.broadcast_to(step, late.shape), step + late], axis=2)
    ends = np.stack([step + late, step + end], axis=2)
    own = np.stack([late, end - late], axis=2)
    none = np.zeros(0, dtype=np.int64)
    matrix = RankMatrix(
        np.arange(2), np.arange(steps), np.arange(2), starts, ends, own, none, (none,) * 3,
        (none,) * 4,
    )  # fmt: skip
    explained = np.stack([expected(own[:, :, at], []) for at in range(2)], axis=2)
    assert detect_waits(matrix, explained, None, one_clock=True).bound.tolist() == [False, meets]
