"""The recorder on a fake of torch_npu's MSTX: it proves which calls are made, nothing on Ascend."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.annotations import annotate, mark, stage
from lightning_rlprof.recording.recorders.mstx import MstxRecorder, build
from lightning_rlprof.recording.session import Session
from lightning_rlprof.records.run_directory import read_trace
from lightning_rlprof.testing import FakeClock, check_recorder, make_header
from tests.builders.npu_run import notes, record, session_of, shown
from tests.doubles.torch_npu.fake import VERSIONS, Device, install

LIGHTWEIGHT = {"mstx": True, "profile_level": "level_none", "profile_with_cpu": False}
STEP = ["+ step", "+ actor_generate", "- actor_generate", "+ actor_update", "- actor_update"]
WINDOW = ["profile start", "+ rlprof.canary", "- rlprof.canary", *STEP, "- step", "profile stop"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return install(monkeypatch)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lightweight_capture_is_a_range_per_span_in_our_domain(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = install(monkeypatch, version)
    trace = record(tmp_path, steps=3, profile_step_start=2, profile_step_end=3, **LIGHTWEIGHT)
    assert shown(device) == WINDOW
    assert {call[4] for call in device.calls if call[0] == "start"} == {"rlprof"}
    assert (device.lost, device.running, device.printed) == ([], {}, [])
    assert notes(trace) == []


def test_the_contract_leaves_no_range_running(device: Device, tmp_path: Path) -> None:
    check_recorder(build(ProfilerConfig.build(tools=["mstx"]), make_header()), tmp_path)
    assert (device.calls, device.lost) == ([], [])


def test_a_range_that_is_open_is_closed_with_the_window_and_begun_again_in_the_next(
    device: Device, tmp_path: Path
) -> None:
    with session_of(tmp_path, mstx=True, stage=["actor_update"], profile_step_end=3) as session:
        session.begin_step(1)
        with annotate("outer"):
            for _ in range(2):
                with stage("actor_update"):
                    pass
        session.end_step()
    canary = ["+ rlprof.canary", "- rlprof.canary"]
    window = [*canary, "+ outer", "+ actor_update", "- actor_update", "- outer"]
    assert shown(device) == ["profile start", *window, "profile stop"] * 2
    assert device.lost == []


def test_a_tool_that_listens_from_outside_hears_whole_ranges(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "hears", lambda domain: True)
    options: dict[str, Any] = {"tools": ["mstx"], "stage": ["actor_update"]}
    with session_of(tmp_path, **options) as session:
        session.begin_step(1)
        with annotate("outer"):
            with stage("actor_update"):
                pass
            mark("weights published")
        session.end_step()
    inner = ["+ rlprof.canary", "- rlprof.canary", "+ actor_update", "- actor_update"]
    assert shown(device) == ["+ outer", *inner, "mark weights published", "- outer"]


def test_what_nobody_ends_is_ended_with_the_run(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "hears", lambda domain: True)
    with session_of(tmp_path, tools=["mstx"], steps=[9]) as session:
        session.begin_step(1)
        stage("weight_sync").__enter__()
        session.end_step()
        assert shown(device) == ["+ weight_sync"]
    assert shown(device) == ["+ weight_sync", "- weight_sync"]
    assert device.running == {}


@pytest.mark.parametrize("marker", [stage("actor_update"), annotate("actor_update")])
def test_annotate_ends_its_range_when_the_function_raises(
    marker: Any, device: Device, tmp_path: Path
) -> None:
    @marker
    def update() -> None:
        raise KeyError("reward")

    with session_of(tmp_path, **LIGHTWEIGHT) as session:
        session.begin_step(1)
        with pytest.raises(KeyError):
            update()
        session.end_step()
    assert shown(device)[3:7] == ["+ step", "+ actor_update", "- actor_update", "- step"]
    assert device.lost == []


def test_annotate_marks_coroutines_that_interleave(device: Device, tmp_path: Path) -> None:
    @annotate("score")
    async def score() -> None:
        await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(score(), score())

    with session_of(tmp_path, **LIGHTWEIGHT) as session:
        session.begin_step(1)
        asyncio.run(both())
        session.end_step()
    assert shown(device)[4:8] == ["+ score", "+ score", "- score", "- score"]
    ends = [call[1] for call in device.calls if call[0] == "end"]
    assert ends == [1, 3, 4, 2]
    assert device.lost == []


def test_marks_are_instants_in_our_domain(device: Device, tmp_path: Path) -> None:
    with session_of(tmp_path, **LIGHTWEIGHT) as session:
        session.begin_step(1)
        mark("weights published")
        session.end_step()
    assert ("mark", "weights published", "rlprof") in device.calls


def test_ranges_on_the_stream_when_asked_for(device: Device, tmp_path: Path) -> None:
    record(tmp_path, steps=1, **LIGHTWEIGHT, npu={"device_ranges": True})
    assert {call[3] for call in device.calls if call[0] == "start"} == {"stream"}
    device.calls.clear()
    record(tmp_path / "host", steps=1, **LIGHTWEIGHT)
    assert {call[3] for call in device.calls if call[0] == "start"} == {None}


DEAF: list[tuple[dict[str, Any], str]] = [
    ({"tools": ["mstx"]}, "tools=['mstx'] lacks npu_profiler, and no other profiler records MSTX"),
    (
        {"tools": ["npu_profiler", "mstx"], "profile_with_npu": False},
        "integrated.profile_with_npu is false, and MSTX is part of the device's trace",
    ),
]


@pytest.mark.parametrize(("options", "why"), DEAF)
def test_a_canary_tells_once_why_no_range_is_heard(
    options: dict[str, Any], why: str, device: Device, tmp_path: Path
) -> None:
    trace = record(tmp_path, steps=3, profile_step_end=4, **options)
    assert notes(trace) == [f"MSTX does not record the stages: {why}"]
    assert [call for call in device.calls if call[0] != "profile"] == []


def test_a_profiler_that_does_not_start_makes_the_canary_speak(
    device: Device, tmp_path: Path
) -> None:
    device.library = False
    (said,) = notes(record(tmp_path, steps=1, **LIGHTWEIGHT))
    assert said == (
        "MSTX does not record the stages: torch_npu.profiler is not running in this capture"
    )


def test_a_missing_library_of_markers_is_told_and_asked_once(
    device: Device, tmp_path: Path
) -> None:
    device.markers = False
    with session_of(tmp_path, **LIGHTWEIGHT) as session:
        session.begin_step(1)
        with stage("actor_update"):
            mark("weights published")
        session.end_step()
    (said,) = notes(read_trace(tmp_path / "rank-00000.jsonl"))
    assert said.startswith(
        "MSTX does not work here, so the trace has no stage markers: libms_tools"
    )
    assert device.printed == ["[ERROR] Call range_start failed: libms_tools_ext.so"]
    assert device.calls == [("profile", "start"), ("profile", "stop")]


def test_without_torch_npu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(
        RecorderError, match=r'CANN is required \(.*\): pip install "lightning-rlprof\[npu\]"'
    ):
        build(ProfilerConfig.build(tools=["mstx"]), make_header())


def test_spans_of_a_run_are_ranges_without_a_capture_too(device: Device, tmp_path: Path) -> None:
    mstx = sys.modules["torch_npu.npu"].mstx
    config = ProfilerConfig.build(profile=True, steps=[9])
    device.hears = lambda domain: True  # type: ignore[method-assign]
    recorder = MstxRecorder(mstx)
    with Session(config, tmp_path, make_header(), [recorder], FakeClock()) as session:
        session.begin_step(1)
        with stage("actor_update"):
            pass
        session.end_step()
    assert shown(device) == ["+ actor_update", "- actor_update"]
