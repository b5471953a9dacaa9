"""What goes wrong under torch_npu.profiler, on the strict fake: in training it costs itself."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError, RecorderError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.recorders.npu_profiler import build
from lightning_rlprof.recording.session import current
from lightning_rlprof.records.run_directory import read_trace
from lightning_rlprof.testing import make_header
from tests.builders.models import PACKAGES, loader, make_trainer, module_of
from tests.builders.npu_run import notes, record, session_of
from tests.doubles.torch_npu.fake import Device, install

WHOLE = {"profile_step_start": 2, "profile_step_end": 4}
HEADER = replace(make_header(), device="npu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install(monkeypatch)


def test_without_a_device_nothing_begins(device: Device) -> None:
    device.available = False
    with pytest.raises(RecorderError, match=r"finds no NPU in this process: check npu-smi info"):
        build(ProfilerConfig.build(profile=True), HEADER)


@pytest.mark.parametrize("name", ["PROFILING_MODE", "PROFILER_SAMPLECONFIG"])
def test_under_the_command_line_of_msprof_nothing_begins(
    name: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "dynamic")
    with pytest.raises(
        RecorderError,
        match=(
            f"{name} is set, so msprof profiles this process and torch_npu.profiler does "
            f"nothing: unset it, or record only markers with tools:"
        ),
    ):
        build(ProfilerConfig.build(profile=True), HEADER)


def test_without_torch_npu_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(RecorderError, match=r"torch_npu on a machine with CANN is required"):
        build(ProfilerConfig.build(profile=True), HEADER)


def dropped(folder: Path, **options: Any) -> str:
    """Record two steps and return the one error; spans are recorded all the same."""
    trace = record(folder, steps=2, profile=True, profile_step_end=3, **options)
    assert [span.name for span in trace.spans].count("actor_update") == 2
    assert trace.status == "finished"
    (said,) = notes(trace, "error")
    return said


def _error(folder: Path) -> str:
    (said,) = notes(read_trace(folder / "rank-00000.jsonl"), "error")
    return said


def test_inside_an_active_torch_profiler_the_recorder_is_dropped(
    device: Device, tmp_path: Path
) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        said = dropped(tmp_path)
    assert "another profiler is active on this thread" in said
    assert "crashes when it stops" in said
    assert device.profiles == []


def test_a_device_that_goes_away_drops_the_recorder(device: Device, tmp_path: Path) -> None:
    with session_of(tmp_path, profile=True) as session:
        device.available = False
        session.begin_step(1)
        session.end_step()
    assert "NPU function error" in _error(tmp_path)


def test_a_missing_library_drops_the_recorder(device: Device, tmp_path: Path) -> None:
    device.library = False
    said = dropped(tmp_path)
    assert "torch_npu.profiler did not start in" in said
    assert "a library of CANN that is missing" in said
    assert len(device.profiles) == 1
    assert device.profiles[0].stopped is True  # its __del__ would write into the working directory
    assert ("profile", "stop") not in device.calls


def test_a_folder_that_cannot_be_made_drops_the_recorder(device: Device, tmp_path: Path) -> None:
    with session_of(tmp_path, profile=True, profile_step_end=3) as session:
        (tmp_path / "rank-00000").write_text("in the way")
        session.begin_step(1)
        session.end_step()
    assert "NotADirectoryError" in _error(tmp_path)
    assert device.profiles == []


def _refuses(dir_name: str, analyse_flag: bool = True, async_mode: bool = False) -> None:
    """Return what torch_npu returns when it refuses the folder."""


def test_a_folder_that_torch_npu_refuses_drops_the_recorder(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = importlib.import_module("torch_npu.profiler")
    monkeypatch.setattr(profiler, "tensorboard_trace_handler", _refuses)
    assert "torch_npu.profiler cannot write into" in dropped(tmp_path)
    assert device.profiles == []


def test_data_written_elsewhere_drops_the_recorder(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = build(ProfilerConfig.build(profile=True), HEADER)
    real = recorder._new_profile  # type: ignore[attr-defined]
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setattr(recorder, "_new_profile", lambda out: real(elsewhere))
    with pytest.raises(RecorderError, match="did not start in"):
        recorder.open(tmp_path / "step-000001")
    assert device.calls == [("profile", "start"), ("profile", "stop")]


def test_captures_without_data_of_the_device_are_noted_once_and_counted(
    device: Device, tmp_path: Path
) -> None:
    device.collects = False
    trace = record(tmp_path, stage="actor_update", **WHOLE)
    first, last = notes(trace)
    assert first.startswith("host_7_20260101000000001_ascend_pt has no device data")
    assert last == "2 of 2 captures have no device data"


def test_captures_of_the_host_alone_need_no_data_of_the_device(
    device: Device, tmp_path: Path
) -> None:
    assert notes(record(tmp_path, profile=True, profile_with_npu=False)) == []


def test_a_save_path_that_cannot_be_written_raises_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"integrated\.profile_save_path"):
        record(tmp_path / "file" / "run", profile=False)


@pytest.mark.parametrize("package", PACKAGES)
def test_lightnings_own_torch_profiler_raises_before_training(
    package: Any, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lightning_rlprof.integrations.lightning.profiler_callback.device_kind", lambda: "npu"
    )
    # Lightning's own fails in its __del__ when a fit ends before it has begun.
    kind = type("PyTorchProfiler", (package.profilers.PassThroughProfiler,), {})
    callback = ProfilerCallback(profile_save_path=str(tmp_path), profile=True)
    trainer = make_trainer(callback, package=package, profiler=kind())
    with pytest.raises(ConfigError, match=r"PyTorchProfiler and torch_npu\.profiler cannot prof"):
        trainer.fit(module_of(package), loader())
    assert (device.profiles, current(), list(tmp_path.iterdir())) == ([], None, [])
