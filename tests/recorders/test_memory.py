"""Memory of spans: the real host, and counters of a fake allocator; the last test needs a GPU."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof import device
from lightning_rlprof.config.profiler import ProfilerConfig
from lightning_rlprof.marking import stage
from lightning_rlprof.recorders.base import Recorder
from lightning_rlprof.recorders.memory import MemoryRecorder, build
from lightning_rlprof.session import Session
from lightning_rlprof.testing import FakeClock, FakeRecorder, check_recorder, make_header
from lightning_rlprof.tracefile import SpanLine, read_trace
from tests.recorders.fake_memory import FakeAllocator

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
    monkeypatch.setattr(device, "host_rss_bytes", lambda: None)
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
    recorder = build(ProfilerConfig.build(profile=True, memory=memory), make_header())
    assert isinstance(recorder, MemoryRecorder)
    assert [type(part).__name__ for part in recorder._parts] == names
    recorder.finish()


def test_parts_see_the_same_captures(tmp_path: Path) -> None:
    part = FakeRecorder()
    check_recorder(MemoryRecorder("cpu", [part]), tmp_path)
    verbs = [call.split()[0] for call in part.calls]
    assert verbs == ["open", *["enter"] * 3, "close"] * 2 + ["open", "close", "finish"]


@pytest.mark.parametrize("method", ["open", "enter", "close", "finish"])
def test_a_part_that_fails_is_dropped_and_the_counters_go_on(method: str, tmp_path: Path) -> None:
    failing, other = FakeRecorder(fail_at=method), FakeRecorder()
    recorder = MemoryRecorder("cpu", [failing, other])
    notes: list[tuple[str, str]] = []
    recorder.note = lambda level, text: notes.append((level, text))
    check_recorder(recorder, tmp_path)
    what = f"FakeRecorder failed and was dropped (RuntimeError: told to fail at {method})"
    assert notes == [("error", what)]
    assert len([call for call in other.calls if call.startswith("open")]) == 3
    first = [call.split()[0] for call in failing.calls].index(method)
    assert failing.calls[first + 1 :] == ["close", "finish"]  # switched off, and left alone
    recorder.open(tmp_path)
    assert "host_rss_bytes" in (recorder.exit(recorder.enter("actor_update", "stage", 1)) or {})


def test_what_a_part_says_is_kept_in_the_run(tmp_path: Path) -> None:
    class Talking(Recorder):
        def open(self, out: Path) -> None:
            self.note("warning", "I have something to say")

    recorder = MemoryRecorder("cpu", [Talking()])
    config = ProfilerConfig.build(profile=True)
    with Session(config, tmp_path, make_header(), [recorder], FakeClock()) as session:
        session.begin_step(1)
        session.end_step()
    notes = read_trace(tmp_path / "rank-00000.jsonl").notes
    assert "I have something to say" in [note.text for note in notes]


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
