"""What the recorder says of nsys, and how it fetches reports; a CUDA and reports made by hand."""

import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.nsys import fetch
from lightning_rlprof.recording.recorders import nsight
from lightning_rlprof.recording.recorders.base import build_recorder
from lightning_rlprof.testing import make_header
from tests.builders.capturing import ATTACHED, FakeCuda, capture, noted, recorder_of
from tests.builders.recording import read


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTACHED, raising=False)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_without_nsys_one_warning_names_both_cures(tmp_path: Path) -> None:
    recorder = recorder_of()
    notes = noted(recorder)
    capture(recorder, tmp_path, "step-000001", "step-000002")
    recorder.finish()
    ((level, text),) = notes
    assert level == "warning"
    assert "no Nsight Systems is attached" in text
    assert "`rlprof nsys run -- python …`" in text
    assert "runtime_env=ray_runtime_env(config, 'worker')" in text


def test_without_nsys_the_run_says_that_nothing_was_captured_and_the_real_reason(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    config = ProfilerConfig.build({"trainer": {"profile_steps": [1], "device": "cuda"}})
    session = start(
        [recorder_of(), build_recorder("nvtx", config, make_header())], **config.model_dump()
    )
    session.begin_step(1)
    session.end_step()
    session.close()
    texts = [note.text for note in read(session).notes]
    assert not [text for text in texts if text.startswith("captured")]
    assert texts[-1] == ("nothing was captured: no Nsight Systems is attached to this process")


def test_a_step_that_never_came_is_the_reason_with_and_without_nsys(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    config = ProfilerConfig.build({"trainer": {"profile_steps": [9], "device": "cuda"}})
    nvtx = build_recorder("nvtx", config, make_header())
    session = start([recorder_of(), nvtx], **config.model_dump())
    session.begin_step(1)
    with stage("actor_update"):
        session.end_step()
    session.close()
    assert [note.text for note in read(session).notes] == [
        "nothing was captured: steps to capture: [9]; last complete step: 1"
    ]


def test_under_nsys_the_run_keeps_which_range_is_which_capture_and_where_reports_go(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTACHED, "1")
    session = start([recorder_of()], tools=["nsight"], steps=[2, 5])
    for step in range(1, 7):
        session.begin_step(step)
        session.end_step()
    session.close()
    notes = [(note.level, note.text) for note in read(session).notes if "nsys" in note.text]
    assert notes == [
        ("info", "nsys range 1 is step-000002"),
        ("info", "nsys range 2 is step-000005"),
        ("info", "nsys writes its reports to its own output directory after this process ends"),
    ]


def test_a_run_without_a_capture_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTACHED, "1")
    recorder = recorder_of()
    notes = noted(recorder)
    recorder.finish()
    assert notes == []


# ---- reports


class Waiting:
    """Stands for time that passes while the recorder waits; a report appears after two seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.paused: list[float] = []
        self.path = path
        monkeypatch.setenv(ATTACHED, "1")
        monkeypatch.setattr(nsight, "fetch", partial(fetch, pause=self._pause))

    def _pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        if len(self.paused) == 2:
            self.path.write_text("report")


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Waiting:
    return Waiting(monkeypatch, tmp_path / f"worker_process_{os.getpid()}.1.nsys-rep")


def test_reports_are_waited_for_when_training_is_over_and_not_before(
    waiting: Waiting, cuda: FakeCuda, tmp_path: Path
) -> None:
    recorder = recorder_of(reports=str(tmp_path))
    capture(recorder, tmp_path / "run", "step-000001")
    assert waiting.paused == []
    recorder.finish()
    assert waiting.paused == [1.0] * 3
    (report,) = (tmp_path / "run" / "rank-00000").iterdir()
    assert report.name == f"actor_{socket.gethostname()}_rank0_step1.nsys-rep"


def test_reports_that_do_not_come_in_time_can_be_collected_later(
    waiting: Waiting, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsight, "REPORT_WAIT_S", 1.0)
    recorder = recorder_of(reports=str(tmp_path))
    notes = noted(recorder)
    capture(recorder, tmp_path / "run", "step-000001")
    recorder.finish()
    level, text = notes[-1]
    assert (level, waiting.paused) == ("warning", [1.0])
    assert text.startswith(
        f"no nsys report for step-000001 in {tmp_path}: nsys may write it after this "
        f"process ends; then call lightning_rlprof.integrations.ray.collect_reports"
    )
    assert "lightning_rlprof.integrations.ray.collect_reports(run)" in text


def test_nobody_waits_for_what_comes_after_the_process(
    waiting: Waiting, cuda: FakeCuda, tmp_path: Path
) -> None:
    for end in ("repeat", "repeat:2", "repeat-shutdown:3"):
        recorder = recorder_of(reports=str(tmp_path), worker={"capture-range-end": end})
        capture(recorder, tmp_path / "run", "step-000001")
        waiting.paused.clear()
        recorder.finish()
        assert waiting.paused == [1.0], end


@pytest.mark.parametrize("end", ["stop", "stop-shutdown", "repeat:1", "repeat-shutdown:1:async"])
def test_the_last_range_that_nsys_expects_is_waited_for(
    end: str, waiting: Waiting, cuda: FakeCuda, tmp_path: Path
) -> None:
    recorder = recorder_of(reports=str(tmp_path), worker={"capture-range-end": end})
    capture(recorder, tmp_path / "run", "step-000001")
    recorder.finish()
    assert waiting.paused == [1.0] * 3


def test_a_controller_has_one_report_of_its_whole_life_after_it(
    waiting: Waiting, cuda: FakeCuda, tmp_path: Path
) -> None:
    recorder = recorder_of("controller", reports=str(tmp_path))
    notes = noted(recorder)
    capture(recorder, tmp_path / "run", "step-000001")
    recorder.finish()
    assert waiting.paused == [1.0]
    assert notes[-1][1].startswith(f"no nsys report for process {os.getpid()} in {tmp_path}: nsys ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nobody_waits_and_the_reason_is_said(
    waiting: Waiting, tmp_path: Path
) -> None:
    recorder = recorder_of(reports=str(tmp_path))
    notes = noted(recorder)
    capture(recorder, tmp_path / "run", "step-000001")
    recorder.finish()
    assert waiting.paused == [1.0]
    assert notes[-1][1].endswith(
        "this process sees no GPU, and capture-range cudaProfilerApi makes no report without one"
    )
