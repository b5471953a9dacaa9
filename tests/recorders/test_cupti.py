"""Who gets CUPTI: decided by the environment, before CUDA starts; no GPU takes part."""

import logging
import os
from pathlib import Path

import pytest
import torch

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recorders.cupti import refuse_nsys, set_injection_aside
from lightning_rlprof.recorders.torch_profiler import TorchProfilerRecorder, build
from lightning_rlprof.testing import make_header
from tests.recorders.traces import Noted, options

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
    assert text.startswith("NVTX_INJECTION64_PATH=/old/libtool.so was set aside: its tool would")
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


def test_once_cuda_runs_it_is_too_late_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    text = set_injection_aside({LIBRARY: "/old/libtool.so"})
    assert (text or "").endswith(
        "CUDA runs already, so it may be too late: unset it before the training starts"
    )


def test_under_an_nsys_that_traces_cuda_the_gpu_is_refused() -> None:
    with pytest.raises(
        RecorderError, match=r"CUPTI has one listener.*integrated\.profile_with_npu"
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
    TorchProfilerRecorder(options(device="cuda", with_device=False))
    TorchProfilerRecorder(options(device="cpu"))


def test_the_library_is_set_aside_when_the_recorder_is_built_and_noted_in_the_run(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv(LIBRARY, "/old/libtool.so")
    recorder = Noted(options(device="cuda", with_device=True))
    assert os.environ[LIBRARY] != "/old/libtool.so"
    recorder._options = options()  # the rest has to work without a GPU
    for name in ("first", "second"):
        recorder.window(tmp_path / name, lambda: None)
    ((level, text),) = recorder.notes
    assert level == "info"
    assert "/old/libtool.so was set aside" in text


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"device": "cuda", "with_device": False}])
def test_without_events_of_a_gpu_it_stays(
    changes: dict[str, object], environment: pytest.MonkeyPatch
) -> None:
    environment.setenv(LIBRARY, "/old/libtool.so")
    TorchProfilerRecorder(options(**changes))
    assert os.environ[LIBRARY] == "/old/libtool.so"
