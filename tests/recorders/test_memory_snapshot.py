"""Snapshots of allocations on a strict fake of torch's history; the last tests need a GPU."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.marking import stage
from lightning_rlprof.recorders import memory_snapshot
from lightning_rlprof.recorders.memory import build
from lightning_rlprof.recorders.memory_snapshot import MemorySnapshotRecorder, _out_of_memory
from lightning_rlprof.session import Session
from lightning_rlprof.testing import FakeClock, check_recorder, make_header
from lightning_rlprof.tracefile import Note, read_trace
from tests.recorders.fake_memory import DEEP, FakeAllocator, FakeHistory

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
NAME = f"memory-snapshot_rank0_pid{os.getpid()}.pickle"


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> FakeHistory:
    fake = FakeHistory()
    fake.install(monkeypatch)
    FakeAllocator().install(monkeypatch)
    return fake


def make(**changes: Any) -> MemorySnapshotRecorder:
    return MemorySnapshotRecorder("cuda", 0, **{"max_entries": 100, "stack_depth": 3, **changes})


def noting(recorder: MemorySnapshotRecorder) -> list[str]:
    notes: list[str] = []
    recorder.note = lambda level, text: notes.append(f"{level}: {text}")
    return notes


def read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def actions(path: Path) -> list[tuple[str, int]]:
    return [(entry["action"], entry["size"]) for entry in read(path)["device_traces"][0]]


def notes_of(run: Path) -> list[Note]:
    return read_trace(run / "rank-00000.jsonl").notes


def session(folder: Path, device: str = "cuda", **options: Any) -> Session:
    config = ProfilerConfig.build(profile=True, memory={"level": "snapshot"}, **options)
    header = make_header(device=device)
    return Session(config, folder, header, [build(config, header)], FakeClock())


def test_the_history_is_on_in_captures_only(history: FakeHistory, tmp_path: Path) -> None:
    recorder = make()
    assert history.enabled is None
    for number in (1, 2):
        recorder.open(tmp_path / f"step-{number:06d}")
        history.allocate(number)
        recorder.close()
        assert history.enabled is None
        history.allocate(1000)
    assert actions(tmp_path / "step-000001" / NAME) == [("alloc", 1)]
    assert actions(tmp_path / "step-000002" / NAME) == [("alloc", 2)]
    assert list(tmp_path.rglob("*.part")) == []


def test_entries_and_stack_depth_are_those_asked_for(history: FakeHistory, tmp_path: Path) -> None:
    recorder = make(max_entries=2, stack_depth=7)
    recorder.open(tmp_path)
    for size in (1, 2, 3):
        history.allocate(size)
    recorder.close()
    assert actions(tmp_path / NAME) == [("alloc", 2), ("alloc", 3)]
    frames = read(tmp_path / NAME)["device_traces"][0][0]["frames"]
    assert [frame["line"] for frame in frames] == list(range(7))  # the innermost of DEEP
    on = history.asked[0]
    assert (on["enabled"], on["context"], on["stacks"]) == ("all", "all", "python")
    assert (on["max_entries"], on.get("clear_history", True)) == (2, True)
    assert DEEP > 7


def test_only_arguments_that_the_torch_at_hand_knows_are_given(
    history: FakeHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def older(enabled: str | None = "all", stacks: str = "all", max_entries: int = 9) -> None:
        asked.append((enabled, stacks, max_entries))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", older)
    recorder = make()
    recorder.open(tmp_path)
    recorder.close()
    assert asked == [("all", "python", 100), (None, "all", 9)]


def test_it_keeps_the_contract(history: FakeHistory, tmp_path: Path) -> None:
    check_recorder(make(), tmp_path)
    assert len(list(tmp_path.glob(f"*/{NAME}"))) == 3


def test_a_snapshot_that_cannot_be_written_leaves_the_history_off(
    history: FakeHistory, tmp_path: Path
) -> None:
    recorder = make()
    (tmp_path / "step-000001").write_text("in the way")
    recorder.open(tmp_path / "step-000001")
    with pytest.raises(OSError, match="step-000001"):
        recorder.close()
    assert history.enabled is None
    recorder.close()  # once more, as the owner does with one that failed


def test_a_history_that_somebody_else_records_is_left_alone(
    history: FakeHistory, tmp_path: Path
) -> None:
    torch.cuda.memory._record_memory_history(max_entries=9)
    history.allocate(5)
    recorder = make()
    with pytest.raises(RecorderError, match="is being recorded already; leave out your own"):
        recorder.open(tmp_path)
    recorder.close()
    assert (history.enabled, len(history.trace)) == ("all", 1)


def test_running_out_of_memory_in_a_capture_leaves_a_snapshot_and_the_error(
    history: FakeHistory, tmp_path: Path
) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 99 bytes"):  # noqa: SIM117
        with session(tmp_path) as one:
            one.begin_step(1)
            with stage("actor_update"):
                history.allocate(7)
                history.run_out(99)
    folder = tmp_path / "rank-00000"
    assert actions(folder / "oom-step-000001" / NAME) == [("alloc", 7), ("oom", 99)]
    assert (folder / "step-000001" / NAME).exists()  # and the capture ends as others do
    (note,) = [note for note in notes_of(tmp_path) if "out of memory" in note.text]
    assert note.level == "warning"
    assert note.text == (
        "cuda:0 is out of memory: 99 bytes wanted, 5 free, in step 1; "
        f"see oom-step-000001/{NAME} in https://docs.pytorch.org/memory_viz"
    )
    assert history.enabled is None


def test_one_snapshot_per_step_that_runs_out_of_memory(
    history: FakeHistory, tmp_path: Path
) -> None:
    """Whoever catches the error and tries again, as cuDNN does, fills no disk."""
    recorder = make()
    recorder.open(tmp_path / "step-000001")
    for step in (1, 1, 2):
        recorder.enter("step", "step", step)
        with pytest.raises(torch.OutOfMemoryError):
            history.run_out(10 * step)
    found = sorted(path.parent.name for path in tmp_path.rglob(NAME))
    assert found == ["oom-step-000001", "oom-step-000002"]
    assert actions(tmp_path / "oom-step-000001" / NAME) == [("oom", 10)]


def test_running_out_of_memory_outside_captures_says_once_how_to_get_a_snapshot(
    history: FakeHistory, tmp_path: Path
) -> None:
    recorder = make()
    notes = noting(recorder)
    recorder.open(tmp_path / "step-000001")
    recorder.close()
    for size in (8, 9):
        with pytest.raises(torch.OutOfMemoryError):
            history.run_out(size)
    assert notes == [
        "warning: cuda:0 is out of memory: 8 bytes wanted, 5 free; "
        "no capture was open, so there is no snapshot: add this step to `steps`"
    ]
    assert list(tmp_path.glob("oom*")) == []


def test_a_snapshot_that_fails_does_not_replace_the_error(
    history: FakeHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = make()
    notes = noting(recorder)
    recorder.open(tmp_path / "step-000001")
    (tmp_path / "oom-step-000000").write_text("in the way")
    with pytest.raises(torch.OutOfMemoryError):
        history.run_out(1)
    assert "the snapshot could not be written (FileExistsError" in notes[0]

    def broken(level: str, text: str) -> None:
        raise ValueError("nobody listens")

    recorder.note = broken
    recorder.enter("step", "step", 2)
    with pytest.raises(torch.OutOfMemoryError):
        history.run_out(1)


def test_torch_is_asked_once_per_process_and_runs_that_are_over_hear_nothing(
    history: FakeHistory, tmp_path: Path
) -> None:
    first, second = make(), make()
    assert history.observers == [_out_of_memory]
    heard = {"first": noting(first), "second": noting(second)}
    first.finish()
    _out_of_memory(0, 1, 2, 3)
    second.finish()
    _out_of_memory(0, 1, 2, 3)
    assert {name: len(notes) for name, notes in heard.items()} == {"first": 0, "second": 1}
    assert memory_snapshot._Process.recorder is None


def test_an_allocator_that_tells_nobody_is_noted_once(
    history: FakeHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.install(monkeypatch, observes=False)
    recorder = make()
    notes = noting(recorder)
    check_recorder(recorder, tmp_path)
    assert notes == [
        "warning: no snapshot will be written when memory runs out "
        "(cudaMallocAsync does not yet support attachOutOfMemoryObserver)"
    ]
    assert len(list(tmp_path.glob(f"*/{NAME}"))) == 3


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_a_device_without_history_has_a_timeline_and_says_so_once(
    kind: str, tmp_path: Path
) -> None:
    with session(tmp_path, kind, steps=[1, 2]) as one:
        for step in (1, 2):
            one.begin_step(step)
            one.end_step()
    text = f"memory.level: torch records no allocations on {kind!r}, so no snapshot"
    found = [note.text for note in notes_of(tmp_path) if "snapshot" in note.text]
    assert found == [f"{text}; the timeline is written"]
    folder = tmp_path / "rank-00000"
    names = [path.name for step in (1, 2) for path in (folder / f"step-00000{step}").iterdir()]
    assert names == ["memory-timeline.jsonl"] * 2


@pytest.fixture
def gpu() -> Iterator[None]:
    torch.zeros(1, device="cuda")
    yield
    torch.cuda.empty_cache()


@pytest.mark.cuda
@needs_cuda
def test_a_forced_oom_on_a_gpu_leaves_a_snapshot_and_the_error(gpu: None, tmp_path: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError) as caught, session(tmp_path) as one:
        one.begin_step(1)
        with stage("actor_update"):
            kept = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")
            torch.zeros(2 * total, dtype=torch.uint8, device="cuda")
    assert "out of memory" in str(caught.value)
    path = tmp_path / "rank-00000" / "oom-step-000001" / NAME
    (trace,) = [trace for trace in read(path)["device_traces"] if trace]
    sizes = {entry["action"]: entry for entry in trace if entry["size"] >= kept.numel()}
    assert sizes["oom"]["size"] >= 2 * total
    assert sizes["alloc"]["size"] == kept.numel()
    assert any(frame["filename"] == __file__ for frame in sizes["alloc"]["frames"])
    assert len(sizes["alloc"]["frames"]) <= 32
    assert torch._C._cuda_isHistoryEnabled() is False


@pytest.mark.cuda
@needs_cuda
def test_a_capture_on_a_gpu_leaves_a_snapshot_of_its_own(gpu: None, tmp_path: Path) -> None:
    before = torch.zeros(5 << 20, dtype=torch.uint8, device="cuda")
    with session(tmp_path, steps=[2]) as one:
        for step in (1, 2, 3):
            one.begin_step(step)
            kept = torch.zeros((step << 20) + 512, dtype=torch.uint8, device="cuda")
            one.end_step()
    assert [path.parent.name for path in tmp_path.rglob(NAME)] == ["step-000002"]
    snapshot = read(tmp_path / "rank-00000" / "step-000002" / NAME)
    entries = [entry for trace in snapshot["device_traces"] for entry in trace]
    sizes = {entry["size"] for entry in entries if entry["action"] == "alloc"}
    assert (2 << 20) + 512 in sizes
    assert not sizes & {(1 << 20) + 512, (3 << 20) + 512}
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) >= before.numel()
    assert kept.numel() > 0
