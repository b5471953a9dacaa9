from pathlib import Path

import pytest

from lightning_rlprof.analysis.headline import headline
from tests.runs import Row, grpo_run, loaded


def _run(steps: int = 3, **lengths: int) -> str:
    rows = []
    for step in range(1, steps + 1):
        at = step * 100
        rows.append(Row("step", "step", step, at, at + 100))
        for name, length in lengths.items():
            rows.append(Row(name, "stage", step, at, at + length))
            at += length
    return headline(loaded(rows))


def test_generation_that_dominates_points_at_the_rollout(tmp_path: Path) -> None:
    assert headline(grpo_run(tmp_path)) == (
        "actor_generate is 64% of the step; look at the rollout first: KV cache, batching, the "
        "rollout engine. Almost all is in a stage."
    )


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({"my_stage": 80}, "my_stage is 80% of the step; look at my_stage first. 20% is in no"),
        ({"a": 30, "b": 35, "c": 25}, "No stage dominates: the largest is b, 35% of the step; 10%"),
        ({"a": 30}, "Most of the step is unknown: 70% is in no stage; the largest stage is a, 30%"),
        ({"a": 30, "b": 30}, "The largest part is unknown: 40% is in no stage;"),
        ({}, "No stage was marked in 3 steps; mark them with stage(...) or wrap:."),
    ],
)
def test_the_sentence_fits_the_run(lengths: dict[str, int], said: str) -> None:
    assert _run(**lengths).startswith(said)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_it_abstains_below_three_steps(steps: int) -> None:
    said = f"Too few complete steps to say where the time goes: {steps}, of 3 needed."
    assert _run(steps, a=90) == said


def test_captured_steps_alone_are_not_taken_for_the_run() -> None:
    rows = [Row("step", "step", n, n * 9, n * 9 + 9, counters={"capture": 1}) for n in (1, 2, 3)]
    assert headline(loaded(rows)).startswith("No stage was marked")
