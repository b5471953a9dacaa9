"""What the real torch_npu does not raise: each way to fail on the CANN double, and what is said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ascend.double import Process, Run, shown
from tests.builders.npu_run import notes
from tests.doubles.cann import cann

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def without(train: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Process]:
    """Record two captures with an installation of CANN that lacks a library."""

    def run(name: str, **changes: str) -> Process:
        broken = cann.build(tmp_path_factory.mktemp("broken"), without=(name,))
        return train("one", on=broken, **changes)

    return run


def test_without_a_device_a_capture_raises_before_training(train: Run) -> None:
    process = train("one", "spans", CANN_DOUBLE_DEVICES="0")
    said = process.raised("one")
    assert said.startswith(
        "RecorderError: torch_npu.profiler finds no NPU in this process: check npu"
    )
    assert process.part("one") == []


def test_without_a_device_a_training_records_spans_and_says_what_is_left(train: Run) -> None:
    process = train("one", "spans", CANN_DOUBLE_DEVICES="0")
    trace = process.trace("spans")
    assert (trace.header.device, trace.status) == ("cpu", "finished")
    said = "mstx: cpu has no profiler markers, spans and torch_profiler are recorded"
    assert said in notes(trace, "info")


@pytest.mark.parametrize("name", ["libmsprofiler", "libascend_hal"])
def test_without_a_library_of_the_profiler_the_recorder_is_dropped(
    name: str, without: Callable[..., Process]
) -> None:
    process = without(name)
    assert f"Call start failed. Exception: {name}.so: cannot open" in process.output
    (error,) = notes(process.trace("one"), "error")
    assert "torch_npu.profiler did not start in" in error
    assert "a library of CANN that is missing" in error
    (warning,) = notes(process.trace("one"))
    assert warning.endswith("torch_npu.profiler is not running in this capture")
    assert process.trace("one").status == "finished"
    assert process.status == 0
    assert sorted(path.name for path in process.folder.iterdir()) == ["calls.jsonl", "runs"]


def test_without_the_library_of_markers_the_capture_goes_on_and_one_line_says_so(
    without: Callable[..., Process],
) -> None:
    process = without("libms_tools_ext")
    ours, torch_npus = "Call range_start failed. Exception: libms_tools_ext.so", "ProfilerStep"
    assert torch_npus not in process.output
    # torch_npu's own range of each step fails, too: two captures, and ours once.
    assert process.output.count(ours) == 3
    (warning,) = notes(process.trace("one"))
    assert warning.startswith("MSTX does not work here, so the trace has no stage markers")
    assert shown(process.part("one")) == ["start", "stop"] * 2
    assert list(process.captures("one")) == ["step-000001", "step-000002"]


def test_a_torch_npu_that_cannot_be_imported_raises_before_training(
    without: Callable[..., Process],
) -> None:
    process = without("libhccl", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    said = process.raised("one")
    assert said.startswith(
        "RecorderError: torch_npu on a machine with CANN is required (libhccl.so: cannot open"
    )
    assert said.endswith('pip install "lightning-rlprof[npu]", and source set_env.sh of CANN')


def test_a_cann_that_writes_nothing_is_noted(train: Run) -> None:
    process = train("one", CANN_DOUBLE_PROF=None)
    first, last = notes(process.trace("one"))
    capture = process.captures("one")["step-000001"]
    assert first.startswith(f"{capture.name} has no device data")
    assert last == "2 of 2 captures have no device data"


def test_a_file_in_the_place_of_a_folder_costs_the_recorder_or_raises_before_training(
    train: Run,
) -> None:
    process = train("in_the_way")
    (error,) = notes(process.trace("in the way"), "error")
    assert error.startswith("NpuProfilerRecorder was disabled after an error (NotADirectoryError")
    said = process.raised("file")
    path = Path(process.folder).resolve() / "runs" / "file" / "below" / "run"
    assert said.startswith(f"ConfigError: integrated.profile_save_path: {path} cannot be")
    # torch_npu's way out, when it may not write, is the working directory.
    names = {path.name for path in Path(process.folder).iterdir()}
    assert names == {"calls.jsonl", "runs"}


def test_msprof_around_the_process_raises_before_training(train: Run) -> None:
    said = train("in_the_way").raised("msprof")
    assert said.startswith(
        "RecorderError: PROFILING_MODE is set, so msprof profiles this process and "
        "torch_npu.profiler does nothing: unset it, or record only markers with tools:"
    )
