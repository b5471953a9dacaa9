from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.compare import compare
from tests.runs import Row, grpo_rows, grpo_run, loaded, spans_of


def _verdicts(table: object) -> dict[object, object]:
    return dict(zip(table.column("stage"), table.column("verdict"), strict=True))  # type: ignore[attr-defined]


def test_a_real_change_is_told_from_noise(tmp_path: Path) -> None:
    a = spans_of(tmp_path / "a", grpo_rows(12, 0), grpo_rows(12, 1))
    faster = {"actor_generate": 0.5, "compute_reward": 1.5}
    b = spans_of(tmp_path / "b", grpo_rows(12, 2, slow=faster), grpo_rows(12, 3, slow=faster))

    table = compare(a, b)

    assert _verdicts(table) == {
        "actor_generate": "faster",
        "compute_reward": "slower",
        "actor_update": "within noise",
        "actor_compute_log_prob": "within noise",
        "untraced": "within noise",
        "step": "faster",
    }
    assert table.column("stage")[0] == "actor_generate"
    assert table.column("stage")[-2:] == ["untraced", "step"]
    assert table.rows[0][4] == pytest.approx(0.5, abs=0.03)


def test_the_same_run_differs_in_nothing(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path, steps=8)
    table = compare(spans, spans)
    assert set(table.column("delta")) == {0}
    assert set(table.column("B/A")) == {1.0}
    assert set(table.column("verdict")) == {"within noise"}


def test_noise_alone_is_seldom_called_a_change() -> None:
    noise = np.random.default_rng(3)

    def rows() -> list[Row]:
        lengths = noise.lognormal(13, 0.4, 10).astype(int).tolist()
        at, found = 0, []
        for step, length in enumerate(lengths, start=1):
            found.append(Row("step", "step", step, at, at + 2 * length))
            found.append(Row("a", "stage", step, at, at + length))
            at += 2 * length
        return found

    wrong = 0
    for _ in range(60):
        verdicts = _verdicts(compare(loaded(rows()), loaded(rows())))
        wrong += verdicts["a"] != "within noise"
    assert wrong <= 3


def test_means_are_per_step_over_ranks() -> None:
    def run(*lengths: int) -> list[list[Row]]:
        return [
            [
                Row(kind, kind, n, n * 100, n * 100 + (100 if kind == "step" else length))
                for n in (1, 2, 3)
                for kind in ("step", "stage")
            ]
            for length in lengths
        ]

    table = compare(loaded(*run(10, 20)), loaded(*run(30)))
    assert table.rows == [
        ("stage", 15, 30, 15, 2.0, "too few steps", None, None),
        ("untraced", 85, 70, -15, 70 / 85, "too few steps", None, None),
        ("step", 100, 100, 0, 1.0, "too few steps", None, None),
    ]


def test_a_few_long_steps_against_all_the_others_are_called_mixed() -> None:
    def run(*lengths: int) -> list[Row]:
        rows, at = [], 0
        for step, length in enumerate(lengths, start=1):
            rows += [Row("step", "step", step, at, at + length)]
            at += length
        return rows

    a = [100 + n for n in range(20)]
    b = [80 + n // 2 for n in range(19)] + [5_000]
    step = compare(loaded(run(*a)), loaded(run(*b))).rows[-1]
    assert step[0] == "step"
    assert step[3] > 0 > step[7], "the mean rose, the typical step fell"
    assert step[5] == "mixed"


@pytest.mark.parametrize(("percent", "verdict"), [(97, "small"), (103, "small"), (90, "faster")])
def test_a_sure_change_under_five_percent_is_called_small(percent: int, verdict: str) -> None:
    def run(scale: int) -> list[Row]:
        return [
            Row("step", "step", n, n * 10_000, n * 10_000 + (1_000 + n % 5) * scale // 100)
            for n in range(1, 30)
        ]

    assert _verdicts(compare(loaded(run(100)), loaded(run(percent))))["step"] == verdict


def test_stages_of_one_side_are_said(tmp_path: Path) -> None:
    steps = [Row("step", "step", n, n * 10, n * 10 + 10) for n in range(1, 8)]
    a, b = Row("a", "stage", 1, 10, 12), Row("b", "stage", 1, 10, 13)
    verdicts = _verdicts(compare(loaded([*steps, a]), loaded([*steps, b])))
    assert (verdicts["a"], verdicts["b"]) == ("only in A", "only in B")


def test_steps_under_capture_are_left_out_and_said() -> None:
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
    assert "A: Steps left out: 1 under capture." in table.note
    assert "B: " not in table.note


@pytest.mark.parametrize(("before", "after", "name"), [(2, 5, "A"), (5, 2, "B"), (0, 5, "A")])
def test_it_abstains_below_three_steps(tmp_path: Path, before: int, after: int, name: str) -> None:
    a, b = grpo_run(tmp_path / "a", before), grpo_run(tmp_path / "b", after)
    steps = min(before, after)
    assert compare(a, b).abstained == f"run {name} has {steps} complete steps, 3 are needed"
