"""The tiny run of the doctor: recorded for real here, and findings when something is wrong."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.cli import doctor as selftest
from lightning_rlprof.loaders.load import load
from lightning_rlprof.system.subprocess_python import InterpreterError, ask
from tests.builders.runs import Row, header, write_rank

STAGES = ("actor_generate", "actor_update")
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What the process of the self-test leaves behind, and what it says."""
    folder = tmp_path_factory.mktemp("selftest")
    return folder, ask(selftest._TRAIN, str(folder))


def run_on(folder: Path, monkeypatch: pytest.MonkeyPatch, **answer: str) -> dict[str, Any]:
    """Run the self-test on a run that is there instead of on one of its own."""
    said = {"device": "cpu", "refused": "", "errors": "", **answer}
    monkeypatch.setattr(selftest, "ask", lambda *_, **__: said)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(folder))
    monkeypatch.setattr(selftest.shutil, "rmtree", lambda *_, **__: None)
    return {check.name: check for check in selftest.run_selftest()}


def rows(**changes: Any) -> list[Row]:
    """Return the spans of the two steps, as they should be."""
    made = []
    for step in (1, 2):
        at = 100 * step
        made += [Row(name, "stage", step, at + 1, at + 9) for name in STAGES]
        made.append(Row("step", "step", step, at, at + 50, **changes))
    return made


def test_here_it_finds_all_as_it_should_be_and_keeps_nothing(
    recorded: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, answer = recorded
    removed: list[Path] = []
    monkeypatch.setattr(selftest, "ask", lambda *_, **__: answer)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(folder))
    monkeypatch.setattr(selftest.shutil, "rmtree", lambda path, **_: removed.append(path))
    checks = selftest.run_selftest()
    assert [check for check in checks if check.state != "ok"] == []
    names = [check.name for check in checks]
    timed = ["device time"] if answer["device"] == "cuda" else []
    assert names == ["operators", "spans", "recorders", *timed, "trace"]
    assert removed == [folder]


def test_no_finding_holds_a_duration(recorded: tuple[Path, dict[str, Any]]) -> None:
    spans = load(recorded[0] / "selftest")
    said = " ".join(check.message for check in selftest._checks(spans.path, "cpu", "", ""))
    assert not {str(number) for number in spans.duration_ns.tolist()} & set(said.split())
    assert [unit for unit in (" ms", " us", " µs", " ns", " s ") if unit in said] == []


@pytest.mark.parametrize(
    "made",
    [
        rows()[1:],
        [*rows(), rows()[0]],
        [*rows()[:-1], Row("step", "step", 2, 205, 250)],
        [*rows()[:-1], Row("step", "step", 2, 200, 205)],
    ],
)
def test_spans_that_are_not_those_of_the_training_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[Row]
) -> None:
    write_rank(tmp_path / "selftest", header(), made)
    check = run_on(tmp_path, monkeypatch)["spans"]
    assert (check.state, check.message) == ("broken", "differ from the recorded ones")


def test_a_run_that_just_stops_and_warnings_in_it_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = [(5, "info", "all is well"), (6, "warning", "MSTX does not record the stages")]
    write_rank(tmp_path / "selftest", header(), rows(), status=None, notes=notes)
    checks = run_on(tmp_path, monkeypatch, errors="[ERROR] no device")
    assert checks["spans"].state == "broken"
    assert checks["recorders"].message == (
        "MSTX does not record the stages; printed: [ERROR] no device"
    )
    assert checks["trace"].message == "torch.profiler wrote no trace"


def test_a_trace_without_our_operators_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path / "selftest", header(), rows())
    trace = tmp_path / "selftest" / "rank-00000" / "step-000002" / "x.trace.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert run_on(tmp_path, monkeypatch)["trace"].message == "the operators are missing"
    # On a GPU it takes kernels, and each stage has to have some.
    checks = run_on(tmp_path, monkeypatch, device="cuda")
    assert (checks["trace"].state, checks["device time"].state) == ("broken", "broken")


def test_an_npu_without_a_capture_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rank(tmp_path / "selftest", header(), rows())
    checks = run_on(tmp_path, monkeypatch, device="npu", refused="error code is 200006")
    assert checks["operators"].message == "npu cannot run them: error code is 200006"
    assert checks["capture"].message == "torch_npu.profiler did not write exactly one directory"


def test_a_training_that_does_not_end_is_the_only_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_in_vain(*_: object, **__: object) -> None:
        raise InterpreterError("it ended by signal 11 without an answer")

    monkeypatch.setattr(selftest, "ask", ask_in_vain)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path / "made"))
    (check,) = selftest.run_selftest()
    assert (check.name, check.state) == ("training", "broken")
    assert check.message == "failed: it ended by signal 11 without an answer"


def test_a_run_that_cannot_be_read_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = run_on(tmp_path, monkeypatch)
    assert list(checks) == ["operators", "run"]
    assert checks["run"].message.endswith("selftest: no such file or directory")
