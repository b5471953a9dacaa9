"""From pace to a word: whose fault, where, and how many steps it takes."""

import pytest

from lightning_rlprof.analysis.lineup import line_up, stage_rows
from lightning_rlprof.analysis.pace import WHOLE, Pace, pace
from lightning_rlprof.analysis.verdicts import (
    INSUFFICIENT,
    SLOW,
    SLOW_DEVICE,
    SLOW_HOST,
    SLOW_OR_UNEVEN,
    TRANSIENT,
    UNEVEN,
    judge,
    steps_needed,
)
from tests.analysis.scripted import Script, play


def paced(script: Script, seed: int = 11) -> Pace:
    spans = play(script, seed).spans
    return pace(spans, line_up(spans, stage_rows(spans), spans.ranks))


def words(script: Script, *, host_only: bool = True) -> dict[int, str]:
    return {each.rank: each.verdict for each in judge(paced(script), host_only=host_only)}


@pytest.mark.parametrize(
    ("script", "host_only", "word"),
    [
        (Script(slow={1: 0.15}), True, SLOW_HOST),
        (Script(slow={1: 0.15}), False, SLOW),
        (Script(slow={1: 0.15}, device="device"), False, SLOW_DEVICE),
        (Script(slow={1: 0.15}, device="host"), False, SLOW_HOST),
        (Script(slow={1: 0.15}, counters=False), True, SLOW_OR_UNEVEN),
        (Script(slow={1: 0.15}, when=(6, 14)), True, TRANSIENT),
        (Script(more={1: 1.3}, uneven=0.3, steps=40), True, UNEVEN),
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
    assert [each.verdict for each in judge(few, host_only=True, places=2)] == [INSUFFICIENT]


def test_what_proves_nothing_is_insufficient() -> None:
    assert set(words(Script(steps=8, slow={1: 0.3}, noise=0.01)).values()) == {INSUFFICIENT}


def test_more_ranks_take_more_steps() -> None:
    assert [steps_needed(ranks) for ranks in (2, 8, 64, 1024)] == [10, 12, 15, 19]


def test_work_that_is_not_counted_is_said() -> None:
    assert not paced(Script(counters=False)).counted
    assert paced(Script()).counted
    assert paced(Script()).lasting == 1
