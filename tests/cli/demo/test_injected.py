"""A demo in which something goes wrong: what is trained, caught and printed."""

from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.comparison.changes import LEVEL, OUTLIER, changes
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.hangs import find_hang
from lightning_rlprof.analysis.memory import leaking_phases
from lightning_rlprof.analysis.stages import rank_status
from lightning_rlprof.cli.demo import faults
from lightning_rlprof.cli.demo.faults import fault_step
from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.cli.demo.run import run_demo
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.loaders.live_run import hang_evidence
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.notes import Code
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inject": "hang"}, "inject=hang needs ranks that wait; give ranks=2"),
        ({"inject": "oom", "ranks": 2}, "inject=oom is one rank's; ranks=2 is given, give ranks=1"),
        ({"inject": "leak", "steps": 69}, "steps=69 is given; give a number from 70 up"),
    ],
)
def test_what_cannot_be_injected_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DemoOptions(**options)


def test_a_shift_adds_the_same_time_to_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    fault = faults.Faults(DemoOptions(inject="shift", steps=70))
    for batch, seconds in enumerate((1.0, 9.0, 2.0, 3.0, 50.0, 0.1), start=32):
        fault.at_end_of("actor_generate", batch, seconds)
        fault.at_end_of("compute_reward", batch, 7.0)
    assert slept == [2.0, 2.0, 2.0]


def trained(options: DemoOptions, problem: str) -> Spans:
    """Return a run in which the fault was found: others on the machine may disturb one of three."""
    for _ in range(3):
        run = run_demo(options).run
        assert run is not None
        spans = load(run)
        if problem in [each.id for each in diagnose(spans).problems]:
            return spans
    pytest.fail(f"{problem} was not found")


def captures(spans: Spans) -> list[tuple[int | None, str]]:
    return [
        (each.rank, str(each.facts["capture"]))
        for each in spans.notes
        if each.code == Code.CAPTURE_TAKEN
    ]


# 15 times, not 5, which is within eight spreads of a very busy machine.
@pytest.mark.deep
def test_a_slow_step_is_named_and_captured_once_on_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "SLOW_STEP", 15.0)
    options = DemoOptions(inject="slow-step", ranks=2, steps=70, save_path=tmp_path)
    spans, step = trained(options, "outlier-step"), fault_step(options)
    assert (OUTLIER, step, "compute_reward") in [
        (row["change"], row["step"], row["stage"]) for row in rows_of(changes(spans))
    ]
    outliers = [each for each in diagnose(spans).problems if each.id == "outlier-step"]
    slow = [each.by_name["step"].value for each in outliers]
    assert step in slow
    assert any(each.text.startswith(f"step {step} took ") for each in spans.notes)
    (first, second) = captures(spans)
    assert {first[0], second[0]} == {0, 1}
    assert first[1] == second[1]


# Eight times, not two: a step takes four times as long while other tests share the machine.
@pytest.mark.deep
def test_a_lasting_change_is_named_and_captured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "SHIFT", 8.0)
    options = DemoOptions(inject="shift", steps=70, save_path=tmp_path)
    spans, step = trained(options, "slower-since"), fault_step(options)
    found = [row for row in rows_of(changes(spans)) if row["change"] == LEVEL and row["ratio"] > 1]
    near = [row["stage"] for row in found if abs(row["step"] - step) <= 3]
    assert near == ["actor_generate"]
    assert len(captures(spans)) == 1


@pytest.mark.deep
def test_out_of_memory_passes_through_and_is_named(tmp_path: Path) -> None:
    options = DemoOptions(inject="oom", steps=70, save_path=tmp_path)
    run = run_demo(options).run
    assert run is not None
    spans = load(run)
    assert rank_status(spans).column("status") == ["interrupted by OutOfMemoryError"]
    first = diagnose(spans).problems[0]
    assert first.id == "out-of-memory"
    assert (first.by_name["step"].value, first.by_name["stage"].value) == (36, "actor_update")


@pytest.mark.deep
def test_the_stage_that_leaks_is_named(tmp_path: Path) -> None:
    spans = trained(DemoOptions(inject="leak", steps=70, save_path=tmp_path), "memory-growth")
    assert leaking_phases(spans, 0, "host")[0] == "compute_reward"
    grows = [each for each in diagnose(spans).problems if each.id == "memory-growth"]
    assert "compute_reward" in str(grows[0].by_name["added by"].value)


@pytest.mark.deep
def test_a_real_training_is_caught_and_the_rank_and_line_are_named(tmp_path: Path) -> None:
    options = DemoOptions(inject="hang", ranks=2, steps=8, save_path=tmp_path)
    run = run_demo(options).run

    assert run is not None
    (cause,) = find_hang(hang_evidence(run), 0).causes
    assert cause.rank == 1
    assert cause.at is not None
    assert cause.at.function == "wait_for_closing_bracket"
    assert cause.report is not None
    assert [span.name for span in cause.report.spans][-1] == "compute_reward"
