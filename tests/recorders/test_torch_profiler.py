"""Real torch.profiler captures on the CPU, read back from their files; the last needs a GPU."""

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.marking import annotate, stage
from lightning_rlprof.recorders import torch_profiler
from lightning_rlprof.recorders.torch_profiler import TorchProfilerOptions, TorchProfilerRecorder
from lightning_rlprof.session import Session
from lightning_rlprof.testing import FakeClock, make_header
from lightning_rlprof.tracefile import read_trace

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def options(**changes: Any) -> TorchProfilerOptions:
    values = {"device": "cpu", "role": "actor", "rank": 0, "world_size": 1}
    return TorchProfilerOptions(**{**values, **changes})


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def capture(out: Path, **changes: Any) -> list[dict[str, Any]]:
    """Capture one call of a small network and return the events of its file."""
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())
    recorder = TorchProfilerRecorder(options(**changes))
    recorder.open(out)
    token = recorder.enter("actor_update", "stage", 1)
    network(torch.ones(2, 3))
    recorder.exit(token)
    recorder.close()
    recorder.finish()
    (path,) = out.iterdir()
    return events_of(path)


def test_a_window_is_one_trace_with_a_row_per_span(tmp_path: Path) -> None:
    config = ProfilerConfig.build(profile=True)
    recorder = TorchProfilerRecorder(options(rank=3, world_size=8, role="critic"))
    with Session(config, tmp_path, make_header(3, 8), [recorder], FakeClock()) as session:
        session.begin_step(1)
        with stage("actor_update"), annotate("optimizer"):
            torch.ones(2) + 1
        session.end_step()
    folder = tmp_path / "rank-00003" / "step-000001"
    name = f"step-000001_critic_rank3-of-8_pid{os.getpid()}.trace.json.gz"
    assert [path.name for path in folder.iterdir()] == [name]
    rows = {e["name"]: e for e in events_of(folder / name) if e.get("cat") == "user_annotation"}
    outer, inner = rows["actor_update"], rows["optimizer"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_each_window_has_its_own_trace_and_nothing_else_is_left(tmp_path: Path) -> None:
    config = ProfilerConfig.build(stage=["actor_update", "compute_reward"], profile_step_end=3)
    recorder = TorchProfilerRecorder(options())
    with Session(config, tmp_path, make_header(), [recorder], FakeClock()) as session:
        for step in (1, 2, 3):
            session.begin_step(step)
            for name in ("actor_update", "weight_sync", "compute_reward"):
                with stage(name):
                    torch.ones(2) + 1
            session.end_step()
    files = sorted(path for path in (tmp_path / "rank-00000").rglob("*") if path.is_file())
    assert [path.parent.name for path in files] == [
        "step-000001-actor_update",
        "step-000001-compute_reward",
        "step-000002-actor_update",
        "step-000002-compute_reward",
    ]
    for path in files:
        assert path.name.startswith(f"{path.parent.name}_actor_rank0-of-1_pid")
        names = [e["name"] for e in events_of(path) if e.get("cat") == "user_annotation"]
        assert names == [path.parent.name.split("-")[-1]]


def test_spans_that_interleave_get_rows_too(tmp_path: Path) -> None:
    recorder = TorchProfilerRecorder(options())
    recorder.open(tmp_path / "window")
    first, second = recorder.enter("actor_generate", "stage", 1), recorder.enter("compute_reward", "stage", 1)
    recorder.exit(first)
    recorder.exit(second)
    recorder.close()
    recorder.finish()
    (path,) = (tmp_path / "window").iterdir()
    rows = [e["name"] for e in events_of(path) if e.get("cat") == "user_annotation"]
    assert sorted(rows) == ["actor_generate", "compute_reward"]


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
def test_with_modules_adds_rows_of_modules(wanted: bool, tmp_path: Path) -> None:
    events = capture(tmp_path / "window", with_modules=wanted)
    modules = {e["name"] for e in events if e["name"].startswith("nn.Module: ")}
    expected = {"nn.Module: Sequential_0", "nn.Module: Linear_0", "nn.Module: ReLU_0"}
    assert modules == (expected if wanted else set())


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
        ("npu", True, True, [ProfilerActivity.CPU]),
        ("mps", False, True, []),
    ],
)
def test_activities_follow_from_device_and_options(
    device: str, with_cpu: bool, with_device: bool, expected: list[ProfilerActivity]
) -> None:
    chosen = options(device=device, with_cpu=with_cpu, with_device=with_device)
    assert chosen.activities() == expected


def test_with_no_activity_left_the_error_names_the_keys() -> None:
    with pytest.raises(RecorderError, match=r"'cpu': set integrated\.profile_with_cpu or"):
        TorchProfilerRecorder(options(with_cpu=False))


def test_another_active_profiler_is_refused_and_goes_on(tmp_path: Path) -> None:
    recorder = TorchProfilerRecorder(options())
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as theirs:
        with pytest.raises(RecorderError, match="another torch profiler is active; stop it or"):
            recorder.open(tmp_path / "window")
        recorder.close()
        torch.ones(2) + 1
    recorder.finish()
    assert "aten::add" in {event.name for event in theirs.events()}
    assert list(tmp_path.iterdir()) == []


def test_a_session_with_another_active_profiler_says_so_and_goes_on(tmp_path: Path) -> None:
    config = ProfilerConfig.build(profile=True)
    recorder = TorchProfilerRecorder(options())
    with (
        torch.profiler.profile(activities=[ProfilerActivity.CPU]),
        Session(config, tmp_path, make_header(), [recorder], FakeClock()) as session,
    ):
        session.begin_step(1)
        with stage("actor_update"):
            pass
        session.end_step()
    trace = read_trace(tmp_path / "rank-00000.jsonl")
    (error,) = (note.text for note in trace.notes if note.level == "error")
    assert "TorchProfilerRecorder failed and was dropped (RecorderError: another" in error
    assert "actor_update" in {span.name for span in trace.spans}


def test_the_export_runs_on_a_thread_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    may_write, threads, said = threading.Event(), [], []
    real = torch.profiler.profile.export_chrome_trace

    def export(self: Any, path: str) -> None:
        threads.append(threading.current_thread())
        assert may_write.wait(60)
        real(self, path)

    def info(text: str, number: int) -> None:
        said.append(text % number)
        may_write.set()

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    monkeypatch.setattr(torch_profiler.log, "info", info)
    recorder = TorchProfilerRecorder(options())
    for name in ("first", "second"):  # neither close nor the next open waits for the file
        recorder.open(tmp_path / name)
        recorder.close()
        assert list((tmp_path / name).glob("*.gz")) == []
    recorder.finish()
    assert said == ["waiting for 2 traces to be written"]
    assert threading.current_thread() not in threads
    for name in ("first", "second"):
        (path,) = (tmp_path / name).iterdir()
        assert isinstance(events_of(path), list)


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = TorchProfilerRecorder(options())
    with pytest.raises(NotADirectoryError):
        recorder.open(tmp_path / "file" / "window")
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    recorder.close()
    recorder.finish()


def test_a_folder_lost_during_the_window_is_told_by_finish_once(tmp_path: Path) -> None:
    recorder = TorchProfilerRecorder(options())
    out = tmp_path / "window"
    recorder.open(out)
    out.rmdir()
    out.write_text("")
    recorder.close()
    with pytest.raises(OSError, match="window"):
        recorder.finish()
    recorder.finish()
    assert list(tmp_path.iterdir()) == [out]


def test_a_write_that_fails_half_way_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(source: Any, target: Any, length: int) -> None:
        target.write(source.read(9))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    recorder = TorchProfilerRecorder(options())
    recorder.open(tmp_path / "window")
    recorder.close()
    with pytest.raises(OSError, match="No space left"):
        recorder.finish()
    assert list((tmp_path / "window").iterdir()) == []


@pytest.mark.cuda
@needs_cuda
def test_kernels_of_a_gpu_are_in_the_trace_and_only_where_wanted(tmp_path: Path) -> None:
    def kernels(name: str, **changes: Any) -> int:
        recorder = TorchProfilerRecorder(options(device="cuda", **changes))
        recorder.open(tmp_path / name)
        token = recorder.enter("actor_update", "stage", 1)
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        torch.cuda.synchronize()
        recorder.exit(token)
        recorder.close()
        recorder.finish()
        (path,) = (tmp_path / name).iterdir()
        return sum(event.get("cat") == "kernel" for event in events_of(path))

    assert kernels("both") > 0
    assert kernels("device alone", with_cpu=False) > 0
    assert kernels("host alone", with_device=False) == 0
