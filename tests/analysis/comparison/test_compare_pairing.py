"""Which stages, steps and work of two runs are compared with one another."""

from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.comparison.compare import compare
from lightning_rlprof.tables.table import Table
from tests.builders.pairs import run_of
from tests.builders.runs import Row, grpo_run, loaded


def _by(table: Table, column: str) -> dict[object, object]:
    return dict(zip(table.column("stage"), table.column(column), strict=True))


def _times(seed: int, steps: int = 30) -> np.ndarray:
    return 1e8 * np.exp(np.random.default_rng(seed).normal(0, 0.02, steps))


def test_names_of_two_frameworks_meet() -> None:
    ours = run_of(
        {"actor_generate": _times(1, 60), "actor_update": _times(2, 60), "mine": _times(3, 60)}
    )
    verl = run_of(
        {"gen": _times(4, 60), "update_actor": _times(5, 60) * 1.3, "mine": _times(6, 60)}
    )
    assert _by(compare(ours, verl), "verdict") == {
        "actor_update": "slower",
        "actor_generate": "unchanged",
        "mine": "unchanged",
        "untraced": "unchanged",
        "step": "slower",
    }


def test_a_stage_that_runs_more_often_had_more_to_do() -> None:
    rare, often = np.full(40, np.nan), _times(2, 40)
    rare[::4] = _times(1, 10)
    table = compare(
        run_of({"a": _times(3, 40), "save": rare}), run_of({"a": _times(4, 40), "save": often})
    )
    assert _by(table, "work B/A")["save"] == pytest.approx(4.0)
    assert _by(table, "adjusted")["save"] == pytest.approx(1.0, abs=0.02)
    assert _by(table, "verdict")["save"] == "unchanged"


def test_replicas_share_the_work() -> None:
    tokens = 1_000 * np.exp(np.random.default_rng(5).normal(0, 0.3, 60))
    runs = [
        run_of(
            {"actor_generate": tokens / replicas * 1e5 * (_times(replicas, 60) / 1e8)},
            {"tokens": {"actor_generate": tokens}, "replicas": {"actor_generate": [replicas] * 60}},
        )
        for replicas in (2, 3)
    ]
    table = compare(*runs)
    assert table.column("adjusted by")[0] == "tokens / replicas"
    assert _by(table, "raw B/A")["actor_generate"] == pytest.approx(2 / 3, abs=0.02)
    assert _by(table, "verdict")["actor_generate"] == "unchanged"


def test_first_steps_that_warm_up_are_left_out_and_said() -> None:
    cold, warm = _times(1, 40), _times(2, 40)
    cold[:2] *= 5
    table = compare(run_of({"a": cold}), run_of({"a": warm}))
    assert "A: Excluded steps: 2 warm-up." in table.note
    assert "B: Excluded" not in table.note
    assert _by(table, "adjusted")["a"] == pytest.approx(1.0, abs=0.02)


def test_stages_of_one_side_are_said() -> None:
    verdicts = _by(compare(run_of({"a": _times(1)}), run_of({"b": _times(2)})), "verdict")
    assert (verdicts["a"], verdicts["b"]) == ("only in A", "only in B")


def test_runs_that_hardly_compare_are_called_so() -> None:
    a = run_of({"a": _times(1), "c": _times(3)}, device="NVIDIA H100")
    b = run_of({"b": _times(2), "c": _times(4)}, device="Ascend 910B", world_size=8)
    assert "Comparability score 0." in compare(a, b).note
    assert "Comparability" not in compare(a, a).note


def test_captured_steps_are_excluded_and_said() -> None:
    def run(flag: str) -> list[Row]:
        return [
            Row(
                "step",
                "step",
                n,
                n * 99,
                n * 99 + (n if n < 10 else 15),
                counters={flag: 1} if n == 10 else None,
            )
            for n in range(1, 11)
        ]

    table = compare(loaded(run("capture")), loaded(run("other")))
    assert (table.column("A"), table.column("B")) == ([5, 5], [6, 6])
    assert "A: Excluded steps: 1 captured." in table.note
    assert "B: Excluded" not in table.note
    assert "B: the first" not in table.note


@pytest.mark.parametrize(("before", "after", "name"), [(2, 5, "A"), (5, 2, "B"), (0, 5, "A")])
def test_it_abstains_below_three_steps(tmp_path: Path, before: int, after: int, name: str) -> None:
    a, b = grpo_run(tmp_path / "a", before), grpo_run(tmp_path / "b", after)
    steps = min(before, after)
    assert (
        compare(a, b).abstained == f"Run {name} has {steps} complete steps; a comparison needs 3."
    )
