"""Capture ranges: NVTX heard by a real tool of our own, CUDA's calls counted; there is no nsys."""

from pathlib import Path

import pytest
import torch

from lightning_rlprof.testing import check_recorder
from tests.builders.capturing import ATTACHED, FakeCuda, capture, recorder_of
from tests.doubles.nvtx import listener

WHOLE = ["start", "push rlprof.capture", "synchronize", "pop", "stop"]

SESSION = """
from pathlib import Path
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.start import start_session

config = ProfilerConfig.build(tools=["nsight"], steps=[1, 3], {options})
with start_session(config, name="run") as session:
    for step in (1, 2, 3):
        session.begin_step(step)
        with stage("actor_update"):
            pass
        session.end_step()
"""


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTACHED, raising=False)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return listener.build(tmp_path_factory.mktemp("nvtx"))


def heard(tool: Path, folder: Path, options: str = "") -> list[str]:
    """Return the messages of pushes, and pops as dots, of the training thread."""
    calls = listener.heard(SESSION.format(options=options), folder, tool)
    assert listener.left_open(calls) == []
    ranges = [call for call in calls if call.verb in ("push", "pop")]
    assert {call.domain for call in ranges} == {"rlprof"}
    return [call.message or "." for call in ranges]


def test_a_captured_step_lies_in_an_nvtx_range_of_its_own(tool: Path, tmp_path: Path) -> None:
    captured = ["rlprof.capture", "step", "actor_update", ".", ".", "."]
    words = " ".join(heard(tool, tmp_path))
    assert words.count("rlprof.capture") == 2
    assert words.startswith(" ".join(captured))
    assert words.endswith(" ".join(captured))


@pytest.mark.deep
def test_a_captured_stage_lies_in_an_nvtx_range_of_its_own(tool: Path, tmp_path: Path) -> None:
    words = " ".join(heard(tool, tmp_path, "discrete=True"))
    assert words.count("rlprof.capture actor_update . .") == 2
    assert words.count("actor_update") == 3


@pytest.mark.deep
def test_the_message_is_registered_or_nsys_would_not_see_it(tool: Path, tmp_path: Path) -> None:
    calls = listener.heard(SESSION.format(options=""), tmp_path, tool)
    registered = [call.message for call in calls if call.verb == "register"]
    assert registered.count("rlprof.capture") == 1


def test_with_cuda_the_profilers_range_lies_around_and_waits_for_the_devices_work(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    recorder = recorder_of()
    capture(recorder, tmp_path, "step-000001", "step-000002")
    assert cuda.calls == WHOLE * 2


def test_a_device_that_has_failed_still_ends_the_range(cuda: FakeCuda, tmp_path: Path) -> None:
    cuda.fails = "synchronize"
    recorder = recorder_of()
    recorder.open(tmp_path / "step-000001")
    with pytest.raises(RuntimeError, match="asked to fail at synchronize"):
        recorder.close()
    assert cuda.calls == WHOLE
    recorder.close()
    assert cuda.calls == WHOLE


def test_a_range_that_did_not_begin_is_not_ended(cuda: FakeCuda, tmp_path: Path) -> None:
    cuda.fails = "start"
    recorder = recorder_of()
    with pytest.raises(RuntimeError, match="asked to fail at start"):
        recorder.open(tmp_path / "step-000001")
    recorder.close()
    assert cuda.calls == ["start"]


def test_the_contract_holds_on_any_machine_without_nsys(tmp_path: Path) -> None:
    check_recorder(recorder_of(), tmp_path)


@pytest.mark.cuda
def test_on_a_gpu_the_profiler_takes_every_range(tmp_path: Path) -> None:
    recorder = recorder_of()
    for number in (1, 2):
        recorder.open(tmp_path / f"step-{number:06d}")
        torch.ones(8, device="cuda").sum().item()
        recorder.close()
    recorder.finish()
