"""A demo in which something goes wrong: what is trained, caught and printed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlprof.analysis.comparison.changes import LEVEL, OUTLIER, changes
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.hangs import find_hang
from lightning_rlprof.analysis.memory import leaking_phases
from lightning_rlprof.analysis.stages import rank_status
from lightning_rlprof.cli.demo import faults
from lightning_rlprof.cli.demo.caught import caught, fault_step
from lightning_rlprof.cli.demo.injected import InjectedResult, run_injected_demo
from lightning_rlprof.cli.demo.options import INJECTIONS, DemoOptions
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.loaders.live_run import hang_evidence
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.notes import Code
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of
from tests.builders.runs import Row, grpo_rows, header, write_rank

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[DemoOptions]:
    """Put a demo in place that trains nothing, and return what it was asked for."""
    seen: list[DemoOptions] = []

    def run(options: DemoOptions, progress: object) -> InjectedResult:
        seen.append(options)
        if options.task is not None:
            return InjectedResult(None)
        write_rank(options.save_path / "run", header(), grpo_rows(40))
        return InjectedResult(options.save_path / "run")

    module: Any = ModuleType("lightning_rlprof.cli.demo.injected")
    module.run_injected_demo = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_a_hang_trains_two_ranks_unless_more_are_asked_for(
    rlprof: Run, asked: list[DemoOptions], tmp_path: Path
) -> None:
    status, out, _ = rlprof("demo", "--inject", "hang", "-o", tmp_path)
    rlprof("demo", "--inject", "hang", "--ranks", 3, "-o", tmp_path / "more")
    assert status == 0
    assert [(each.inject, each.ranks) for each in asked] == [("hang", 2), ("hang", 3)]
    assert "no rank has reported a hang" in " ".join(out.split()), "of the run that was written"
    assert "Injected: in step 5, the last rank never leaves its reward." in " ".join(out.split())
    assert out.endswith(f"Wrote {tmp_path}/run\n")


@pytest.mark.parametrize("fault", [each for each in INJECTIONS if each != "hang"])
def test_it_says_what_was_injected_and_that_a_healthy_run_does_not_show_it(
    rlprof: Run, asked: list[DemoOptions], tmp_path: Path, fault: str
) -> None:
    status, out, _ = rlprof("demo", "--inject", fault, "-o", tmp_path)
    assert status == 0
    assert [each.ranks for each in asked] == [2 if fault == "slow-step" else 1]
    assert "Injected: " in out
    assert "Not caught: " in out
    assert "Caught by" not in out
    assert "try again when it is idle" in out
    simulated = {"oom": "It's simulated", "throttle": "A throttled GPU isn't simulated"}
    assert simulated.get(fault, "") in " ".join(out.split())


def test_a_training_without_a_run_is_one_line(
    rlprof: Run, asked: list[DemoOptions], tmp_path: Path
) -> None:
    words = ("demo", "--inject", "hang", "--task", "spell_backward", "-o", tmp_path)
    assert "the training left no run" in rlprof(*words)[2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inject": "hnag", "ranks": 2}, "did you mean 'hang'"),
        ({"inject": "hang"}, "inject=hang needs ranks that wait; give ranks=2"),
        ({"inject": "oom", "ranks": 2}, "inject=oom is one rank's; ranks=2 is given, give ranks=1"),
        ({"inject": "throttle", "ranks": 2}, "inject=throttle is one rank's"),
        ({"inject": "leak", "steps": 69}, "steps=69 is given; give a number from 70 up"),
    ],
)
def test_what_cannot_be_injected_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DemoOptions(**options)


def test_without_a_count_of_waits_for_a_cpu_nothing_is_throttled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    faults.check_can_inject(DemoOptions(inject="leak"))
    with pytest.raises(ConfigError, match="inject=throttle needs /proc/thread-self/schedstat"):
        faults.check_can_inject(DemoOptions(inject="throttle"))


@pytest.mark.parametrize(
    ("fault", "kind", "step", "is_own"),
    [
        ("slow-step", "spike", 36, True),
        ("slow-step", "spike", 33, False),
        ("slow-step", "level", 36, False),
        ("shift", "spike", 36, True),
        ("shift", "spike", 33, False),
        ("shift", "level", 40, True),
    ],
)
def test_a_capture_for_something_else_has_not_caught_the_fault(
    tmp_path: Path, fault: str, kind: str, step: int, is_own: bool
) -> None:
    notes = [
        (1, "info", f"{kind} {step}", Code.CAPTURE_REQUESTED, {"found": kind, "found_step": step}),
        (2, "info", "", Code.CAPTURE_TAKEN, {"capture": "step-000041", "step": 41}),
    ]
    write_rank(tmp_path, header(), grpo_rows(70), notes=notes)
    said = caught(load(tmp_path), DemoOptions(inject=fault, steps=70)).lines
    assert (f"Caught during the training: {notes[0][2]}." in said) == is_own
    missing = "Not caught: no capture was taken of it during the training."
    assert (missing in said) != is_own


def test_a_shift_adds_the_same_time_to_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    fault = faults.Faults(DemoOptions(inject="shift"), 6)
    for batch, seconds in enumerate((1.0, 9.0, 2.0, 3.0, 50.0, 0.1)):
        fault.at_end_of("actor_generate", batch, seconds)
        fault.at_end_of("compute_reward", batch, 7.0)
    assert slept == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(("since", "is_own"), [(30, False), (36, True)])
def test_a_change_elsewhere_is_not_the_shift(tmp_path: Path, since: int, is_own: bool) -> None:
    times = np.repeat([1e8, 2e8], [since - 1, 71 - since]).astype(np.int64)
    ends = np.cumsum(times).tolist()
    starts = [0, *ends[:-1]]
    rows = [Row("step", "step", at + 1, starts[at], ends[at]) for at in range(70)]
    rows += [Row("actor_generate", "stage", at + 1, starts[at], ends[at]) for at in range(70)]
    write_rank(tmp_path, header(), sorted(rows, key=lambda row: row.start_ns))
    said = caught(load(tmp_path), DemoOptions(inject="shift", steps=70)).lines
    assert said[0].startswith("Caught by changes: from step 36 on") == is_own
    assert said[0].startswith("Not caught: no change of the level") != is_own


def trained(options: DemoOptions) -> Spans:
    result = run_injected_demo(options)
    assert result.run is not None
    assert result.error is None
    return load(result.run)


def caught_in_one_of_three(options: DemoOptions) -> Spans:
    """Return a run in which the fault was caught: others on the machine may disturb one."""
    for _ in range(3):
        spans = trained(options)
        if caught(spans, options).complete:
            return spans
    pytest.fail(f"not caught: {caught(spans, options).lines}")


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
    spans, step = caught_in_one_of_three(options), fault_step(options)
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
    spans, step = caught_in_one_of_three(options), fault_step(options)
    found = [row for row in rows_of(changes(spans)) if row["change"] == LEVEL and row["ratio"] > 1]
    near = [row["stage"] for row in found if abs(row["step"] - step) <= 3]
    assert near == ["actor_generate"]
    assert len(captures(spans)) == 1


@pytest.mark.deep
def test_out_of_memory_passes_through_and_is_named(tmp_path: Path) -> None:
    options = DemoOptions(inject="oom", steps=70, save_path=tmp_path)
    result = run_injected_demo(options)
    assert type(result.error) is torch.OutOfMemoryError
    assert result.run is not None
    spans = load(result.run)
    assert caught(spans, options).complete
    assert rank_status(spans).column("status") == ["interrupted by OutOfMemoryError"]
    first = diagnose(spans).problems[0]
    assert first.id == "out-of-memory"
    assert (first.by_name["step"].value, first.by_name["stage"].value) == (36, "actor_update")


@pytest.mark.deep
def test_the_stage_that_leaks_is_named(tmp_path: Path) -> None:
    options = DemoOptions(inject="leak", steps=70, save_path=tmp_path)
    spans = caught_in_one_of_three(options)
    assert leaking_phases(spans, 0, "host")[0] == "compute_reward"
    grows = [each for each in diagnose(spans).problems if each.id == "memory-growth"]
    assert "compute_reward" in str(grows[0].by_name["added by"].value)


@pytest.mark.deep
def test_waiting_for_a_cpu_is_named(tmp_path: Path) -> None:
    options = DemoOptions(inject="throttle", steps=70, save_path=tmp_path)
    spans = caught_in_one_of_three(options)
    assert {"cpu-contention", "cpu-quota"} & {each.id for each in diagnose(spans).problems}


@pytest.mark.deep
def test_neighbors_end_and_the_training_gets_its_cpus_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(words: list[str]) -> subprocess.Popen[bytes]:
        started.append(real(words))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    cpus = os.sched_getaffinity(0)
    fault = faults.Faults(DemoOptions(inject="throttle"), 2)
    fault.in_reward(0, 0)
    assert not started
    fault.in_reward(1, 0)
    assert [each.poll() for each in started] == [None, None, None]
    fault.end()
    assert all(each.poll() is not None for each in started)
    assert os.sched_getaffinity(0) == cpus


@pytest.mark.deep
def test_a_real_training_is_caught_and_the_rank_and_line_are_named(tmp_path: Path) -> None:
    options = DemoOptions(inject="hang", ranks=2, steps=8, save_path=tmp_path)
    run = run_injected_demo(options).run

    assert run is not None
    (cause,) = find_hang(hang_evidence(run), 0).causes
    assert cause.rank == 1
    assert cause.at is not None
    assert cause.at.function == "wait_for_closing_bracket"
    assert cause.report is not None
    assert [span.name for span in cause.report.spans][-1] == "compute_reward"
