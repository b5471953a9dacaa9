"""torch.profiler on a real GPU: kernels in the files of windows, cycles and the cheap mode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.recorders.base import build_recorders
from lightning_rlprof.recording.session import Session
from lightning_rlprof.testing import make_header
from tests.builders.recorder_traces import Noted, batches, events_of, only, options, rows

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "kernel"]


def multiply() -> None:
    one = torch.ones(256, 256, device="cuda")
    one @ one


def trainer() -> Callable[[], None]:
    network = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def mini_batch() -> None:
        network(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return mini_batch


def run(tmp_path: Path, **choice: Any) -> list[Path]:
    """Train two steps of two stages on the GPU; return the files of their captures."""
    config = ProfilerConfig.build(**choice)
    header = make_header(device="cuda")
    with Session(config, tmp_path, header, build_recorders(config, header)) as session:
        for step in (1, 2):
            session.begin_step(step)
            for name in ("actor_compute_log_prob", "actor_update"):
                with stage(name):
                    multiply()
            session.end_step()
    return sorted((tmp_path / "rank-00000").rglob("*.trace.json.gz"))


def test_a_capture_of_a_step_holds_the_kernels_of_all_its_stages(tmp_path: Path) -> None:
    (path,) = run(tmp_path, profile=True)
    assert len(kernels(events_of(path))) >= 4
    assert rows(path)[:2] == ["ProfilerStep#1", "actor_compute_log_prob"]


def test_a_capture_of_a_stage_holds_its_kernels_though_nobody_waited_for_them(
    tmp_path: Path,
) -> None:
    paths = run(tmp_path, profile=True, discrete=True)
    assert [path.parent.name for path in paths] == [
        "step-000001-actor_compute_log_prob",
        "step-000001-actor_update",
    ]
    for path in paths:
        assert len(kernels(events_of(path))) >= 2


def test_device_rows_of_stages_are_there_too(tmp_path: Path) -> None:
    (path,) = run(tmp_path, profile=True)
    names = {e["name"] for e in events_of(path) if e.get("cat") == "gpu_user_annotation"}
    assert {"actor_compute_log_prob", "actor_update"} <= names


def test_the_cheap_mode_holds_kernels_and_nothing_of_the_host(tmp_path: Path) -> None:
    recorder = Noted(*options(device="cuda", with_cpu=False))
    recorder.window(tmp_path / "window", multiply)
    events = only(tmp_path / "window")
    assert len(kernels(events)) >= 2
    assert not [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    assert recorder.notes == []


def test_without_device_activity_there_are_none_and_none_is_missed(tmp_path: Path) -> None:
    recorder = Noted(*options(device="cuda", with_device=False))
    recorder.window(tmp_path / "window", multiply)
    assert kernels(only(tmp_path / "window")) == []
    assert recorder.notes == []


def test_a_capture_without_a_kernel_says_so(tmp_path: Path) -> None:
    recorder = Noted(*options(device="cuda"))
    recorder.window(tmp_path / "window", lambda: torch.ones(2) + 1)
    ((level, text),) = recorder.notes
    assert level == "warning"
    assert "has no kernels: the device was idle, or another profiler in" in text


def test_each_cycle_of_a_schedule_holds_the_kernels_of_its_mini_batches(tmp_path: Path) -> None:
    recorder = Noted(*options({"warmup": 1, "active": 1}, device="cuda"))
    mini_batch = trainer()
    recorder.window(tmp_path / "window", lambda: [mini_batch() for _ in range(4)])
    assert batches(tmp_path / "window")[:2] == ["mb1", "mb3"]
    for path in (tmp_path / "window").iterdir():
        assert len(kernels(events_of(path))) >= 3


def test_a_step_captured_into_a_cuda_graph_is_no_mini_batch_and_stops_nothing(
    tmp_path: Path,
) -> None:
    mini_batch = trainer()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            mini_batch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    def work() -> None:
        with torch.cuda.graph(graph):
            mini_batch()
        for _ in range(3):
            graph.replay()

    recorder = Noted(*options({"active": 1}, device="cuda"))
    recorder.window(tmp_path / "window", work)
    assert batches(tmp_path / "window") == ["mb0"]
    assert len(kernels(only(tmp_path / "window"))) >= 3
