"""The cycle that the rate of a scripted job hangs on, by its script."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.cycle import cycle
from tests.analysis.fed import MS, Fed, feed
from tests.analysis.scripted import Script, play
from tests.analysis.test_handed import jobs
from tests.runs import Row, loaded

ASYNC = Fed(lag=1)


def parts(job: Fed) -> dict[tuple[str, int | None], int]:
    table = cycle(feed(job))
    assert table.abstained is None, table.abstained
    return {(row[0], row[3]): row[5] for row in table.rows}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({}, {("actor_generate", 1): 70}),
        ({"generate": (90, 70)}, {("actor_generate", 0): 90}),
        ({"train": 100}, {("actor_update", 3): 100, ("weight_sync", 3): 8}),
        ({"reward": 50, "lag": 2}, {("compute_reward", 2): 100}),
    ],
    ids=str,
)
def test_one_role_that_is_always_busy_is_the_cycle(
    change: dict[str, Any], want: dict[tuple[str, int], int]
) -> None:
    found = parts(replace(ASYNC, **change))
    assert found == {key: ms * MS for key, ms in want.items()}


def test_weights_that_may_be_one_version_old_make_a_round_of_two_steps() -> None:
    job = Fed(generate=(60, 60), train=60, lag=1, steps=20)
    table = cycle(feed(job))

    # 1 for the weights, 60, 1, both samples 20, 1, 60 and 8: 151 every two steps.
    assert {(row[0], row[1]): row[5] for row in table.rows} == {
        ("actor_update", "own time"): 60 * MS,
        ("actor_generate", "own time"): 60 * MS,
        ("compute_reward", "own time"): 20 * MS,
        ("weight_sync", "own time"): 8 * MS,
        ("actor_generate", "hand-over"): MS,
        ("compute_reward", "hand-over"): MS,
        ("taken", "hand-over"): MS,
    }
    assert "A round takes 0.151 s and 2 steps, 0.0755 s by step" in (table.note or "")


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_the_rate_is_that_of_the_cycle(lag: int) -> None:
    for generate in ((50, 70), (100, 30), (60, 60)):
        for train in (20, 60, 110):
            table = cycle(feed(Fed(generate=generate, train=train, lag=lag, steps=40)))
            words = (table.note or "").split()
            by_step, measured = float(words[8]), float(words[14])
            assert by_step == pytest.approx(measured, rel=0.02)


def test_where_every_step_waits_for_the_one_before_nothing_is_said() -> None:
    assert "no step begins before the one before has ended" in str(cycle(feed(Fed())).abstained)
    assert "nobody counts samples" in str(cycle(feed(Fed(lag=1, tell=False))).abstained)
    assert "nobody counts samples" in str(cycle(play(Script(), 1).spans).abstained)


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_odd_runs_abstain_or_name_a_cycle_that_adds_up(ranks: list[list[Row]]) -> None:
    table = cycle(loaded(*ranks))
    if table.abstained is None:
        assert sum(row[4] for row in table.rows) == pytest.approx(1, abs=0.2)  # type: ignore[misc]
