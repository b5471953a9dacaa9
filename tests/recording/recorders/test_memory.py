"""Snapshots of allocations on a strict fake of torch's history; the last tests need a GPU.

Memory of spans: the real host, and counters of a fake allocator; the last test needs a GPU.

Timelines of memory: the real host, and devices replaced by fakes; the last test needs a GPU.
"""

import gc
import json
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import RecorderError
from lightning_rlprof.recording import accelerator
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.recorders import memory
from lightning_rlprof.recording.recorders import memory as memory_recorders
from lightning_rlprof.recording.recorders.memory import (
    MemoryRecorder,
    MemorySnapshotRecorder,
    MemoryTimelineRecorder,
    _out_of_memory,
    build,
)
from lightning_rlprof.recording.session import Session
from lightning_rlprof.records.notes import Code, Fact, Level, level_of
from lightning_rlprof.records.records import Note
from lightning_rlprof.records.run_directory import SpanLine, read_trace
from lightning_rlprof.testing import FakeClock, check_recorder, make_header
from tests.builders.fake_memory import DEEP, FakeAllocator, FakeHistory

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@contextmanager
def fake_allocator() -> Iterator[FakeAllocator]:
    allocator = FakeAllocator()
    with pytest.MonkeyPatch.context() as patch:
        allocator.install(patch)
        yield allocator


def recorded(tmp_path: Path) -> dict[str, SpanLine]:
    trace = read_trace(tmp_path / "rank-00000.jsonl")
    assert [note.text for note in trace.notes if note.level == "error"] == []
    return {span.name: span for span in trace.spans if span.kind == "stage"}


@contextmanager
def one_step(tmp_path: Path, kind: str) -> Iterator[None]:
    config = ProfilerConfig.build(profile=True)
    recorder = MemoryRecorder(kind)
    with Session(config, tmp_path, make_header(), [recorder], FakeClock()) as session:
        session.begin_step(1)
        yield
        session.end_step()


def test_on_a_cpu_a_span_has_the_memory_of_the_host_alone(tmp_path: Path) -> None:
    with one_step(tmp_path, "cpu"), stage("actor_update", tokens=2):
        pass
    counters = recorded(tmp_path)["actor_update"].counters
    assert counters is not None
    assert set(counters) == {"tokens", "host_rss_bytes"}
    assert counters["host_rss_bytes"] > 1 << 20  # an interpreter with torch in it


def test_on_a_cpu_a_kept_allocation_is_seen_in_the_hosts_memory(tmp_path: Path) -> None:
    with one_step(tmp_path, "cpu"):
        with stage("actor_generate"):
            pass
        with stage("actor_update"):
            kept = bytearray(b"x") * (64 << 20)
    spans = recorded(tmp_path)
    before, after = (
        spans[name].counters["host_rss_bytes"] for name in ("actor_generate", "actor_update")
    )
    assert after - before > len(kept) // 2


def test_where_the_host_tells_nothing_a_span_has_no_host_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_recorders, "resident_bytes", lambda: None)
    with one_step(tmp_path, "cpu"), stage("actor_update"):
        pass
    assert recorded(tmp_path)["actor_update"].counters is None


def test_each_span_has_its_own_peak_on_a_fake_allocator(tmp_path: Path) -> None:
    with fake_allocator() as memory, one_step(tmp_path, "fake"):
        memory.allocate(10)
        memory.allocate(500)
        memory.allocate(-500)  # a peak before the first span belongs to none
        with stage("actor_update"):
            memory.allocate(5)
            with stage("first child"):
                memory.allocate(100)
                memory.allocate(-100)
            with stage("second child"):
                memory.allocate(20)
            memory.allocate(-20)
        with stage("weight_sync"):
            pass
    spans = recorded(tmp_path)
    peaks = {name: span.counters["device_peak_bytes"] for name, span in spans.items()}
    assert peaks == {"first child": 115, "second child": 35, "actor_update": 115, "weight_sync": 15}
    ends = {name: span.counters["device_allocated_bytes"] for name, span in spans.items()}
    assert ends == {"first child": 15, "second child": 35, "actor_update": 15, "weight_sync": 15}
    counters = spans["weight_sync"].counters
    assert counters["device_reserved_bytes"] == 1000
    assert counters["device_used_bytes"] == 5000
    assert counters["device_other_bytes"] == 4000


def test_a_new_window_begins_with_no_span_open_on_a_fake_allocator(tmp_path: Path) -> None:
    recorder = MemoryRecorder("fake")
    with fake_allocator() as memory:
        recorder.open(tmp_path)
        recorder.enter("never ended", "stage", 1)
        recorder.open(tmp_path)
        token = recorder.enter("actor_update", "stage", 1)
        memory.allocate(7)
        found = recorder.exit(token)
    assert found is not None
    assert found["device_peak_bytes"] == 7


@pytest.mark.parametrize(
    ("memory", "names"),
    [
        ({}, []),
        ({"level": "counters"}, []),
        ({"level": "timeline"}, ["MemoryTimelineRecorder"]),
        ({"level": "snapshot"}, ["MemoryTimelineRecorder", "MemorySnapshotRecorder"]),
    ],
)
def test_each_level_adds_to_the_one_below(memory: dict[str, str], names: list[str]) -> None:
    first, *others = build(ProfilerConfig.build(profile=True, memory=memory), make_header())
    assert isinstance(first, MemoryRecorder)
    assert [type(other).__name__ for other in others] == names
    for other in others:
        other.finish()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(-100, 100)),
        st.tuples(st.just("enter"), st.just(0)),
        st.tuples(st.just("exit"), st.integers(0, 9)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_peaks_agree_with_brute_force_on_a_fake_allocator(
    operations: list[tuple[str, int]],
) -> None:
    """Spans end in any order, as asyncio tasks do; nested ones are the special case."""
    recorder = MemoryRecorder("fake")
    with fake_allocator() as memory:
        recorder.open(Path())
        levels: list[tuple[object, list[int]]] = []  # each open span, and every level in it
        for verb, number in operations:
            if verb == "allocate":
                memory.allocate(max(number, -memory.allocated))
                for _, seen in levels:
                    seen.append(memory.allocated)
            elif verb == "enter":
                levels.append((recorder.enter("span", "stage", 1), [memory.allocated]))
            elif levels:
                token, seen = levels.pop(number % len(levels))
                found = recorder.exit(token)
                assert found is not None
                assert found["device_peak_bytes"] == max(seen)


@pytest.mark.cuda
@needs_cuda
def test_peaks_of_spans_on_a_gpu(tmp_path: Path) -> None:
    gc.collect()
    with one_step(tmp_path, "cuda"):
        torch.zeros(1, device="cuda")
        base = torch.cuda.memory_allocated()
        with stage("actor_update"):
            with stage("actor_generate"):
                big = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
                del big
            small = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    spans = recorded(tmp_path)
    for name in ("actor_generate", "actor_update"):
        counters = spans[name].counters
        assert 64 << 20 <= counters["device_peak_bytes"] - base < 66 << 20
        assert counters["device_reserved_bytes"] >= 64 << 20
        assert counters["device_used_bytes"] >= counters["device_reserved_bytes"]
        assert counters["device_other_bytes"] > 0  # its CUDA context, at the least
    assert spans["actor_update"].counters["device_allocated_bytes"] - base == small.numel()


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
    recorder.note = lambda code, text, **facts: notes.append(f"{level_of(code)}: {text}")
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
    return Session(config, folder, header, build(config, header), FakeClock())


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
    with pytest.raises(RecorderError, match="records allocations already; remove your own"):
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
        "no snapshot, because no capture was open: add this step to `steps`"
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
    assert "the snapshot could not be written (NotADirectoryError" in notes[0]

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
    assert memory._Process.recorder is None


def test_an_allocator_that_tells_nobody_is_noted_once(
    history: FakeHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.install(monkeypatch, observes=False)
    recorder = make()
    notes = noting(recorder)
    check_recorder(recorder, tmp_path)
    assert notes == [
        "warning: no snapshot will be written on an out-of-memory error "
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
    text = f"memory.level: no snapshots on {kind!r}: torch does not record allocations there"
    found = [note.text for note in notes_of(tmp_path) if "snapshot" in note.text]
    assert found == [f"{text}; the timeline is still recorded"]
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


LONG_MS = 1e6
"""So long an interval that there are two samples: the first, and that of `close`."""


def memory_timeline_read(folder: Path) -> tuple[dict[str, Any], list[list[int | None]]]:
    head, *rows = (folder / "memory-timeline.jsonl").read_text().splitlines()
    return json.loads(head), [json.loads(row) for row in rows]


def memory_timeline_noting(recorder: MemoryTimelineRecorder) -> tuple[list[str], threading.Event]:
    """Return what the recorder notes, and what is set when it does."""
    notes: list[str] = []
    noted = threading.Event()

    def note(code: Code | Level, text: str, /, **facts: Fact) -> None:
        notes.append(f"{level_of(code)}: {text}")
        noted.set()

    recorder.note = note
    return notes, noted


def test_on_a_cpu_it_is_the_hosts_memory_on_the_runs_clock(tmp_path: Path) -> None:
    before = perf_counter_ns()
    check_recorder(MemoryTimelineRecorder("cpu", LONG_MS), tmp_path)
    after = perf_counter_ns()
    for window in ("step-000001", "step-000002", "step-000003"):
        head, rows = memory_timeline_read(tmp_path / window)
        assert head == {
            "columns": ["clock_ns", "host_rss_bytes"],
            "units": ["ns", "bytes"],
            "interval_ms": LONG_MS,
        }
        times = [row[0] for row in rows]
        assert len(rows) == 2
        assert before < times[0] < times[1] < after
        assert all(row[1] > 1 << 20 for row in rows)
        before = times[1]


def test_it_samples_every_interval_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = threading.Event()
    sampled: list[str] = []

    def count() -> int:
        sampled.append(threading.current_thread().name)
        if len(sampled) == 5:
            enough.set()
        return len(sampled)

    monkeypatch.setattr(memory_recorders, "resident_bytes", count)
    recorder = MemoryTimelineRecorder("cpu", 0.01)
    recorder.open(tmp_path)
    assert enough.wait(30)
    recorder.close()
    _, rows = memory_timeline_read(tmp_path)
    assert [row[1] for row in rows] == list(range(1, len(sampled) + 1))
    assert set(sampled[:-1]) == {"rlprof-memory"}
    assert sampled[-1] == threading.current_thread().name
    assert "rlprof-memory" not in [thread.name for thread in threading.enumerate()]


def test_the_columns_of_a_fake_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator()
    allocator.install(monkeypatch)
    monkeypatch.setattr(memory_recorders, "resident_bytes", lambda: None)
    recorder = MemoryTimelineRecorder("fake", LONG_MS)
    recorder.open(tmp_path)
    recorder.close()
    head, rows = memory_timeline_read(tmp_path)
    names = ["device_allocated_bytes", "device_reserved_bytes", "device_used_bytes"]
    assert head["columns"] == ["clock_ns", *names]
    assert head["units"] == ["ns", "bytes", "bytes", "bytes"]
    assert [row[1:] for row in rows] == [[0, 1000, 5000]] * 2


def test_what_is_not_known_yet_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{}, {"device_allocated_bytes": 0}])
    monkeypatch.setattr(accelerator, "memory_bytes", lambda kind: next(answers))
    monkeypatch.setattr(memory_recorders, "resident_bytes", lambda: 7)
    recorder = MemoryTimelineRecorder("fake", LONG_MS)
    recorder.open(tmp_path)
    recorder.close()
    _, rows = memory_timeline_read(tmp_path)
    assert [row[1:] for row in rows] == [[None, 7], [0, 7]]


def test_it_samples_the_device_that_the_training_thread_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(accelerator, "device_index", lambda: 3)
    monkeypatch.setattr(
        accelerator,
        "use_device",
        lambda *words: chosen.append((*words, threading.current_thread().name)),
    )
    recorder = MemoryTimelineRecorder("cuda", LONG_MS)
    recorder.open(tmp_path)
    recorder.close()
    assert chosen == [("cuda", 3, "rlprof-memory")]


def test_a_question_that_fails_ends_the_timeline_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kind: str) -> dict[str, int]:
        raise RuntimeError("device is lost")

    recorder = MemoryTimelineRecorder("cpu", 0.01)
    notes, noted = memory_timeline_noting(recorder)
    monkeypatch.setattr(accelerator, "memory_bytes", fail)
    recorder.open(tmp_path)
    assert noted.wait(30)
    recorder.close()
    assert notes == ["warning: the memory timeline ended early (RuntimeError: device is lost)"]
    assert memory_timeline_read(tmp_path) == (
        {"columns": ["clock_ns"], "units": ["ns"], "interval_ms": 0.01},
        [],
    )


def test_training_does_not_wait_for_a_driver_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(kind: str) -> dict[str, int]:
        assert answers.wait(30)
        return {}

    monkeypatch.setattr(memory, "_STOP_S", 0.01)
    monkeypatch.setattr(accelerator, "memory_bytes", hang)
    recorder = MemoryTimelineRecorder("cuda", 0.01)
    notes, _ = memory_timeline_noting(recorder)
    recorder.open(tmp_path)
    recorder.close()
    assert notes == [
        ("warning: the memory timeline stopped: a call into the driver of cuda does not return")
    ]
    assert memory_timeline_read(tmp_path)[1] == []
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "rlprof-memory":
            assert thread.daemon
            thread.join(30)


@pytest.mark.cuda
@needs_cuda
def test_a_timeline_of_a_gpu_shows_an_allocation(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    recorder = MemoryTimelineRecorder("cuda", LONG_MS)
    recorder.open(tmp_path)
    base = torch.cuda.memory_allocated()
    big = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    recorder.close()
    head, rows = memory_timeline_read(tmp_path)
    last = dict(zip(head["columns"], rows[-1], strict=True))
    assert last["device_allocated_bytes"] == base + big.numel()
    assert last["device_used_bytes"] > last["device_reserved_bytes"] >= big.numel()
    assert last["host_rss_bytes"] > 0
