"""Real torch.profiler captures on the CPU: what they contain, read back from their files.

Who gets CUPTI: decided by the environment, before CUDA starts; no GPU takes part.
"""

import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, record_function

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording.recorders.torch_profiler import (
    TorchProfilerRecorder,
    build,
    refuse_nsys,
    set_injection_aside,
)
from lightning_rlprof.testing import make_header
from tests.builders.recorder_traces import Noted, ends_of_rows, events_of, forward, only, options

LIBRARY = "NVTX_INJECTION64_PATH"
NSYS = {"NSYS_PROFILING_SESSION_ID": "1", LIBRARY: "/old/nsys/libToolsInjection64.so"}
CUDA_TRACED = {**NSYS, "CUDA_INJECTION64_PATH": "/old/nsys/libToolsInjection64.so"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*CUDA_TRACED, "RLPROF_KEEP_NVTX_INJECTION", "VERL_KEEP_NVTX_INJECTION"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_leftover_library_is_set_aside_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    variables = {LIBRARY: "/old/libtool.so"}
    with caplog.at_level(logging.WARNING):
        text = set_injection_aside(variables)
    assert text is not None
    assert text.startswith(
        "NVTX_INJECTION64_PATH=/old/libtool.so was replaced: its tool would take CUPTI "
        "from torch.profiler;"
    )
    assert text.endswith("RLPROF_KEEP_NVTX_INJECTION=1 keeps it")
    assert not Path(variables[LIBRARY]).exists()
    assert caplog.messages == [text]
    assert set_injection_aside(variables) is None


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {LIBRARY: ""},
        NSYS,
        {LIBRARY: "/old/libtool.so", "RLPROF_KEEP_NVTX_INJECTION": "1"},
        {LIBRARY: "/old/libtool.so", "VERL_KEEP_NVTX_INJECTION": "1"},
    ],
)
def test_it_stays_where_it_is_wanted(variables: dict[str, str]) -> None:
    before = dict(variables)
    assert set_injection_aside(variables) is None
    assert variables == before


def test_under_an_nsys_that_traces_cuda_the_gpu_is_refused() -> None:
    with pytest.raises(
        RecorderError, match=r"CUPTI serves one profiler.*integrated\.profile_with_npu"
    ):
        refuse_nsys(CUDA_TRACED)


@pytest.mark.parametrize("variables", [{}, NSYS, {"CUDA_INJECTION64_PATH": "/other/tool.so"}])
def test_without_nsys_or_with_one_that_traces_no_cuda_nothing_is_refused(
    variables: dict[str, str],
) -> None:
    refuse_nsys(variables)


def test_a_recorder_for_cuda_refuses_nsys_before_training(environment: pytest.MonkeyPatch) -> None:
    for name, value in CUDA_TRACED.items():
        environment.setenv(name, value)
    with pytest.raises(RecorderError, match="CUPTI"):
        build(ProfilerConfig.build(profile=True), make_header(device="cuda"))
    TorchProfilerRecorder(*options(device="cuda", with_device=False))
    TorchProfilerRecorder(*options(device="cpu"))


def test_the_library_is_set_aside_when_the_recorder_is_built_and_noted_in_the_run(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv(LIBRARY, "/old/libtool.so")
    recorder = Noted(*options(device="cuda", with_device=True))
    assert os.environ[LIBRARY] != "/old/libtool.so"
    recorder.activities, recorder._on_device = [ProfilerActivity.CPU], False  # without a GPU
    for name in ("first", "second"):
        recorder.window(tmp_path / name, lambda: None)
    ((level, text),) = recorder.notes
    assert level == "info"
    assert "/old/libtool.so was replaced: its tool would take CUPTI from torch.profiler;" in text


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"device": "cuda", "with_device": False}])
def test_without_events_of_a_gpu_it_stays(
    changes: dict[str, object], environment: pytest.MonkeyPatch
) -> None:
    environment.setenv(LIBRARY, "/old/libtool.so")
    TorchProfilerRecorder(*options(**changes))
    assert os.environ[LIBRARY] == "/old/libtool.so"


def capture(out: Path, **changes: Any) -> list[dict[str, Any]]:
    """Capture one call of a small network and return the events of its file."""
    Noted(*options(**changes)).window(out, forward)
    return only(out)


def test_heavy_contents_are_off_by_default() -> None:
    recorder = build(ProfilerConfig.build(profile=True), make_header())
    assert isinstance(recorder, TorchProfilerRecorder)
    profiler = recorder.new_profiler()
    assert recorder.activities == [ProfilerActivity.CPU]
    assert (profiler.record_shapes, profiler.profile_memory, profiler.with_stack) == (False,) * 3
    assert recorder.plan() is None


@pytest.mark.parametrize("wanted", [False, True])
def test_record_shapes_adds_the_shapes_of_inputs(wanted: bool, tmp_path: Path) -> None:
    events = capture(tmp_path / "window", record_shapes=wanted)
    (linear,) = (e for e in events if e["name"] == "aten::linear")
    shapes = linear["args"].get("Input Dims")
    assert shapes == ([[2, 3], [5, 3], [5]] if wanted else None)


@pytest.mark.parametrize("wanted", [False, True])
def test_with_memory_adds_allocations(wanted: bool, tmp_path: Path) -> None:
    events = capture(tmp_path / "window", with_memory=wanted)
    sizes = {e["args"]["Bytes"] for e in events if e["name"] == "[memory]"}
    assert (2 * 3 * 4 in sizes) is wanted


@pytest.mark.parametrize("wanted", [False, True])
def test_with_stack_adds_rows_of_modules(wanted: bool, tmp_path: Path) -> None:
    events = capture(tmp_path / "window", with_stack=wanted)
    modules = {e["name"] for e in events if e["name"].startswith("nn.Module: ")}
    expected = {"nn.Module: Sequential_0", "nn.Module: Linear_0", "nn.Module: ReLU_0"}
    assert modules == (expected if wanted else set())


@pytest.mark.parametrize("wanted", [False, True])
def test_with_stack_adds_python_calls(wanted: bool, tmp_path: Path) -> None:
    events = capture(tmp_path / "window", with_stack=wanted)
    calls = [e["name"] for e in events if e.get("cat") == "python_function"]
    assert any(name.endswith(": forward") for name in calls) is wanted


@pytest.mark.parametrize(
    ("device", "with_cpu", "with_device", "expected"),
    [
        ("cpu", True, True, [ProfilerActivity.CPU]),
        ("cpu", True, False, [ProfilerActivity.CPU]),
        ("cpu", False, True, []),
        ("cuda", True, True, [ProfilerActivity.CPU, ProfilerActivity.CUDA]),
        ("cuda", False, True, [ProfilerActivity.CUDA]),
        ("cuda", True, False, [ProfilerActivity.CPU]),
        ("xpu", True, True, [ProfilerActivity.CPU, ProfilerActivity.XPU]),
        ("xpu", True, False, [ProfilerActivity.CPU]),
        ("npu", True, True, [ProfilerActivity.CPU]),
        ("mps", False, True, []),
    ],
)
def test_activities_follow_from_device_and_options(
    device: str, with_cpu: bool, with_device: bool, expected: list[ProfilerActivity]
) -> None:
    chosen = options(device=device, with_cpu=with_cpu, with_device=with_device)
    if expected:
        assert TorchProfilerRecorder(*chosen).activities == expected
    else:
        with pytest.raises(RecorderError, match="nothing to capture"):
            TorchProfilerRecorder(*chosen)


def test_with_no_activity_left_the_error_names_the_keys() -> None:
    with pytest.raises(RecorderError, match=r"'cpu': set integrated\.profile_with_cpu or"):
        TorchProfilerRecorder(*options(with_cpu=False))


def test_without_host_activity_spans_cost_nothing_since_they_have_no_rows(tmp_path: Path) -> None:
    recorder = Noted(*options(device="cuda", with_cpu=False))
    assert recorder.enter("actor_update", "stage", 1) is None
    assert recorder.exit(None) is None
    assert recorder.mark("published", 1) is None


def test_a_mark_is_a_row_without_length(tmp_path: Path) -> None:
    recorder = Noted(*options())
    recorder.window(
        tmp_path / "window", lambda: [recorder.mark("weights published", 1) for _ in range(20)]
    )
    marks = [e["dur"] for e in only(tmp_path / "window") if e["name"] == "weights published"]
    assert len(marks) == 20
    assert min(marks) < 1_000  # the machine may stop us in one of them


def test_spans_that_interleave_get_rows_too(tmp_path: Path) -> None:
    recorder = Noted(*options())
    recorder.open(tmp_path / "window")
    first = recorder.enter("actor_generate", "stage", 1)
    second = recorder.enter("compute_reward", "stage", 1)
    recorder.exit(first)
    recorder.exit(second)
    recorder.close()
    recorder.finish()
    names = {e["name"] for e in only(tmp_path / "window") if e.get("cat") == "user_annotation"}
    assert names == {"actor_generate", "compute_reward"}


def test_without_a_window_nothing_is_recorded_and_nothing_raises(tmp_path: Path) -> None:
    recorder = Noted(*options())
    recorder.exit(recorder.enter("actor_update", "stage", 1))
    recorder.mark("published", 1)
    recorder.close()
    recorder.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_token_of_an_earlier_window_ends_nothing_in_the_next(tmp_path: Path) -> None:
    recorder = Noted(*options())
    recorder.open(tmp_path / "first")
    token = recorder.enter("actor_update", "stage", 1)
    recorder.close()
    recorder.window(tmp_path / "second", lambda: recorder.exit(token))
    assert recorder.notes == []


def test_another_active_profiler_is_refused_and_goes_on(tmp_path: Path) -> None:
    recorder = Noted(*options())
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as theirs:
        with pytest.raises(RecorderError, match="another torch profiler is active; stop it, or"):
            recorder.open(tmp_path / "window")
        recorder.close()
        torch.ones(2) + 1
    recorder.finish()
    assert "aten::add" in {event.name for event in theirs.events()}
    assert list((tmp_path / "window").iterdir()) == []


def test_no_row_stays_open_beyond_its_window(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its end would be written into freed memory, or into the events of the next window."""
    ended, foreign = ends_of_rows(monkeypatch), record_function("foreign")
    recorder = Noted(*options())
    recorder.window(tmp_path / "first", foreign.__enter__)
    assert "foreign" in ended
    assert "foreign" in {e["name"] for e in only(tmp_path / "first")}
    recorder.window(tmp_path / "second", lambda: foreign.__exit__(None, None, None))
    assert "foreign" not in {e["name"] for e in only(tmp_path / "second")}


def test_a_recorder_travels_to_another_process_with_its_options() -> None:
    chosen = options(with_stack=True, rank=3)
    copy = pickle.loads(pickle.dumps(TorchProfilerRecorder(*chosen)))
    assert (copy._config, copy._header) == chosen


def test_a_window_leaves_no_thread_behind(tmp_path: Path) -> None:
    before, recorder = {*threading.enumerate()}, Noted(*options())
    recorder.open(tmp_path / "window")
    recorder.close()
    recorder.finish()
    assert {*threading.enumerate()} <= before  # one of an earlier test may end meanwhile


@pytest.mark.deep
def test_the_events_of_a_window_are_freed_when_it_closes(tmp_path: Path) -> None:
    recorder = Noted(*options())
    used = recorder._used

    def work() -> None:
        for _ in range(20_000):
            torch.ones(2)

    recorder.window(tmp_path / "warm", forward)
    before = used() or 0
    recorder.window(tmp_path / "window", work)
    events = len(events_of(next((tmp_path / "window").iterdir())))
    assert events > 60_000
    assert (used() or 0) - before < events * 100  # they took 1,400 bytes each
