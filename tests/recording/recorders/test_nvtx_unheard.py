"""NVTX that no tool hears: there is none, or it is too old for nvtx."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder, color
from lightning_rlprof.records.records import KINDS, STAGES
from lightning_rlprof.records.run_directory import read_trace
from lightning_rlprof.report.html.step_charts import paints
from tests.doubles.nvtx import listener

SESSION = """
from pathlib import Path
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import mark, stage
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder
from lightning_rlprof.recording.session import Session
from lightning_rlprof.testing import make_header

config = ProfilerConfig(integrated={"profile": True})
with Session(config, Path("run"), make_header(), [NvtxRecorder()]) as session:
    for step in (1, 2, 3):
        session.begin_step(step)
        with stage("actor_update"):
            mark("half")
        session.end_step()
"""


def notes(folder: Path, *levels: str) -> list[str]:
    """Return the texts of what a session noted."""
    found = read_trace(folder / "run" / "rank-00000.jsonl").notes
    return [note.text for note in found if note.level in levels]


def quiet_session(folder: Path, tool: Path | None, **more: str) -> list[str]:
    """Run a session that nobody hears; returns its warnings and errors but the last."""
    done = listener.run(SESSION, folder, tool, **more)
    assert done.returncode == 0, done.stderr
    *before, last = notes(folder, "warning", "error")
    assert last == "nothing was captured: no profiler gets the NVTX ranges of this process"
    return before


@pytest.mark.deep
def test_without_a_tool_nothing_raises_and_nothing_is_captured(tmp_path: Path) -> None:
    assert quiet_session(tmp_path, None) == []
    assert not (tmp_path / "calls").exists()


@pytest.mark.deep
def test_a_tool_that_refuses_what_nvtx_asks_for_is_noted_once_with_the_cure(tmp_path: Path) -> None:
    tool = listener.build(tmp_path, "-DREFUSES")
    (text,) = quiet_session(tmp_path, tool)
    assert [call.verb for call in listener.read(tmp_path)] == ["create"]  # as under old Nsight
    version = metadata.version("nvtx")
    assert text.startswith(
        "a profiler is attached (NVTX_INJECTION64_PATH is set) but gets no NVTX ranges: "
        "it does not trace NVTX, or is too old for nvtx"
    )
    assert f"too old for nvtx {version}" in text
    assert text.endswith("use nsys 2025.3 or newer with nvtx in --trace")


@pytest.mark.deep
def test_nsight_that_does_not_trace_nvtx_is_noted(tmp_path: Path) -> None:
    (text,) = quiet_session(tmp_path, None, NSYS_PROFILING_SESSION_ID="7")
    assert "NSYS_PROFILING_SESSION_ID is set" in text
    assert "with nvtx in --trace" in text


@pytest.mark.deep
def test_nvtx_that_is_switched_off_under_nsight_is_noted(tmp_path: Path) -> None:
    more = {"NSYS_PROFILING_SESSION_ID": "7", "NVTX_DISABLE": "1"}
    (text,) = quiet_session(tmp_path, None, **more)
    assert text == "Nsight Systems gets no NVTX ranges: NVTX_DISABLE is set; unset it"


@pytest.mark.deep
def test_without_a_tool_the_recorder_becomes_the_base_class(tmp_path: Path) -> None:
    script = """
from pathlib import Path
from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder
recorder = NvtxRecorder()
recorder.FIRST
for method in ("open", "enter", "exit", "mark"):
    assert getattr(recorder, method).__func__ is getattr(Recorder, method), method
"""
    firsts = ('open(Path("out"))', 'enter("actor_update", "stage", 1)', 'mark("half", 1)')
    for first in firsts:
        done = listener.run(script.replace("FIRST", first), tmp_path, None)
        assert done.returncode == 0, done.stderr


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(RecorderError, match=r"package nvtx, which is not installed; pip install"):
        NvtxRecorder()


def test_the_known_stages_have_the_colours_of_the_report() -> None:
    report = {name: int(paint.fill[1:], 16) for name, paint in paints(STAGES).items()}
    assert {name: color(name, "stage") & 0xFFFFFF for name in STAGES} == report


@pytest.mark.parametrize("name", ["my_filter", "tool_calls", "é", "", "\udc80"])
def test_a_stage_of_your_own_has_the_colour_that_the_report_gives_it_alone(name: str) -> None:
    (paint,) = paints([name]).values()
    assert color(name, "stage") & 0xFFFFFF == int(paint.fill[1:], 16)


def test_colours_are_opaque_and_grey_for_what_is_no_stage() -> None:
    found = {kind: color("actor_update", kind) for kind in KINDS}
    assert {value >> 24 for value in found.values()} == {0xFF}
    greys = {kind: value & 0xFFFFFF for kind, value in found.items() if kind != "stage"}
    assert all(len({value & 0xFF, value >> 8 & 0xFF, value >> 16}) == 1 for value in greys.values())
    assert len({*found.values()}) == len(KINDS)


@pytest.mark.deep
def test_a_colour_is_the_same_in_another_process() -> None:
    script = (
        "from lightning_rlprof.recording.recorders.nvtx import color;"
        "print(color('my_filter', 'stage'))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": str(listener.ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{color('my_filter', 'stage')}\n"}
