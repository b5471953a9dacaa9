"""Evidence against a rank: proven always or for a stretch, suspected, or none.

From pace to a word: whose fault, where, and how many steps it takes.
"""

import numpy as np
import pytest

from lightning_rlprof.analysis.statistics.rank_tests import at_least
from lightning_rlprof.analysis.steps.rank_matrix import build_rank_matrix, stage_rows
from lightning_rlprof.analysis.stragglers.verdicts import (
    EFFECT,
    IMBALANCE,
    INCONCLUSIVE,
    SLOW,
    SLOW_DEVICE,
    SLOW_HOST,
    SLOW_UNCOUNTED,
    TRANSIENT,
    WHOLE,
    RankSlowdown,
    judge,
    proven,
    rank_slowdown,
    steps_needed,
    suspicious,
)
from tests.builders.paced import autoregression
from tests.builders.scripted import Script, play

LEVEL = 0.01 / 3


def noise(ranks: int, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.01, (ranks, steps, 1))


def test_a_rank_that_is_always_slow_is_proven_with_effect_interval_and_exact_chance() -> None:
    effect = noise(8, 24)
    effect[3] += 0.1

    ((key, found),) = proven(effect, LEVEL).items()

    assert key == (3, 0)
    assert (found.first, found.last, found.ended) == (0, 23, False)
    assert found.effect == np.median(effect[3])
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.effect < found.high
    assert found.chance == pytest.approx(8 * at_least(24)[24])


def test_below_the_threshold_nobody_is_slow_however_sure() -> None:
    effect = noise(8, 200)
    effect[3] += EFFECT - 0.01
    assert proven(effect, LEVEL) == {}


@pytest.mark.parametrize(("first", "last", "ended"), [(5, 16, True), (12, 29, False)])
def test_a_stretch_is_found_where_it_was(first: int, last: int, ended: bool) -> None:
    effect = noise(8, 30)
    effect[2, first : last + 1] += 0.12

    found = proven(effect, LEVEL)[2, 0]

    assert (found.first, found.last, found.ended) == (first, last, ended)
    assert found.effect == pytest.approx(0.12, abs=0.02)


@pytest.mark.parametrize(("steps", "first"), [(300, 0), (50, 6)])
def test_who_is_slow_but_for_the_first_of_very_many_steps_is_slow(steps: int, first: int) -> None:
    effect = noise(2, steps)
    effect[1, 6:] += 0.15

    found = proven(effect, LEVEL)[1, 0]

    assert (found.first, found.last, found.ended) == (first, steps - 1, False)
    assert found.effect == pytest.approx(0.15, abs=0.02)


@pytest.mark.parametrize(("first", "last"), [(0, 974), (20, 999)])
def test_who_recovers_or_begins_in_a_long_run_is_slow_for_a_stretch(first: int, last: int) -> None:
    effect = noise(8, 1_000)
    effect[1, first : last + 1] += 0.15

    found = proven(effect, LEVEL)[1, 0]

    assert (found.first, found.last, found.ended) == (first, last, last < 999)


def test_where_pace_wanders_a_rank_must_stand_out_from_the_wander() -> None:
    random = np.random.default_rng(3)
    healthy = np.expm1(autoregression(random, (8, 24), 0.05, 0.9))[:, :, None]
    assert proven(healthy, LEVEL, lasting=8) == {}
    slow = healthy.copy()
    slow[3] += 0.4
    ((key, found),) = proven(slow, LEVEL, lasting=8).items()
    assert (key, found.first, found.last) == ((3, 0), 0, 23)
    assert found.low is not None
    assert found.high is not None
    assert 0.2 < found.low < found.effect < found.high < 0.6


def test_ranks_that_are_all_apart_have_no_slow_one_among_them() -> None:
    apart = noise(8, 24) + np.linspace(-0.08, 0.08, 8)[:, None, None]
    assert proven(apart, LEVEL) == {}
    assert proven(apart, LEVEL, beyond=0.0)
    apart[3] += 0.5
    assert (3, 0) in proven(apart, LEVEL)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_another_slow_rank_is_no_excuse(ranks: int) -> None:
    effect = noise(ranks, 24)
    effect[-1] += 0.1
    effect[0] += 0.1 if ranks > 3 else 0.0
    found = {rank for rank, _ in proven(effect, LEVEL)}
    assert found == ({0, ranks - 1} if ranks > 3 else {ranks - 1})


def test_a_series_of_which_nothing_is_known_costs_the_others_nothing() -> None:
    effect = np.concatenate([noise(8, 12), np.full((8, 12, 9), np.nan)], axis=2)
    effect[3, :, 0] += 0.1
    assert list(proven(effect, LEVEL)) == [(3, 0)]


def test_a_suspicion_is_what_one_look_alone_would_prove() -> None:
    effect = noise(8, 6)[:, :, 0]
    effect[3] += 0.1
    assert proven(effect[:, :, None], LEVEL) == {}
    assert list(suspicious(effect)) == [3]
    assert suspicious(effect)[3].low == min(effect[3])
    assert suspicious(effect[:, :4]) == {}


@pytest.mark.parametrize("ranks", [2, 8])
def test_healthy_ranks_are_hardly_ever_proven_slow(ranks: int) -> None:
    rng = np.random.default_rng(7)
    windows = (rng.normal(0, 0.1, (ranks, 24, 1)) for _ in range(500))
    assert sum(bool(proven(window, LEVEL)) for window in windows) <= 5


def paced(script: Script, seed: int = 11) -> RankSlowdown:
    spans = play(script, seed).spans
    return rank_slowdown(spans, build_rank_matrix(spans, stage_rows(spans), spans.ranks))


def words(script: Script, *, host_only: bool = True) -> dict[int, str]:
    return {each.rank: each.verdict for each in judge(paced(script), host_only=host_only)}


@pytest.mark.parametrize(
    ("script", "host_only", "word"),
    [
        (Script(slow={1: 0.15}), True, SLOW_HOST),
        (Script(slow={1: 0.15}), False, SLOW),
        (Script(slow={1: 0.15}, device="device"), False, SLOW_DEVICE),
        (Script(slow={1: 0.15}, device="host"), False, SLOW_HOST),
        (Script(slow={1: 0.15}, counters=False), True, SLOW_UNCOUNTED),
        (Script(slow={1: 0.15}, when=(6, 14)), True, TRANSIENT),
        (Script(more={1: 1.3}, uneven=0.3, steps=40), True, IMBALANCE),
    ],
)
def test_the_cause_is_told_as_far_as_the_run_knows(
    script: Script, host_only: bool, word: str
) -> None:
    assert words(script, host_only=host_only) == {1: word}


def test_a_slow_stage_is_named_and_all_of_them_are_the_whole() -> None:
    (everywhere,) = judge(paced(Script(slow={1: 0.15})), host_only=True)
    (one,) = judge(paced(Script(slow={1: 0.3}, where=("compute_reward",))), host_only=True)
    names = ("step", "actor_generate", "compute_reward", "actor_compute_log_prob", "actor_update")

    assert everywhere.stages == (WHOLE,)
    assert [names[code] for code in one.stages] == ["compute_reward"]


def test_several_places_share_the_chance_of_a_false_word() -> None:
    few = paced(Script(steps=12, slow={1: 0.3}, noise=0.01, hiccups=0.0))
    assert [each.verdict for each in judge(few, host_only=True)] == [SLOW_HOST]
    assert [each.verdict for each in judge(few, host_only=True, places=2)] == [INCONCLUSIVE]


def test_what_proves_nothing_is_insufficient() -> None:
    assert set(words(Script(steps=8, slow={1: 0.3}, noise=0.01)).values()) == {INCONCLUSIVE}


def test_more_ranks_take_more_steps() -> None:
    assert [steps_needed(ranks) for ranks in (2, 8, 64, 1024)] == [10, 12, 15, 19]


def test_work_that_is_not_counted_is_said() -> None:
    assert not paced(Script(counters=False)).counted
    assert paced(Script()).counted
    assert paced(Script()).lasting == 1
