"""Timelines of memory: the real host, and devices replaced by fakes; the last test needs a GPU."""

import json
import threading
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest
import torch

from lightning_rlprof import device
from lightning_rlprof.recorders import memory_timeline
from lightning_rlprof.recorders.memory_timeline import MemoryTimelineRecorder
from lightning_rlprof.testing import check_recorder
from tests.recorders.fake_memory import FakeAllocator

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
LONG_MS = 1e6
"""So long an interval that there are two samples: the first, and that of `close`."""


def read(folder: Path) -> tuple[dict[str, Any], list[list[int | None]]]:
    head, *rows = (folder / "memory-timeline.jsonl").read_text().splitlines()
    return json.loads(head), [json.loads(row) for row in rows]


def noting(recorder: MemoryTimelineRecorder) -> tuple[list[str], threading.Event]:
    """Return what the recorder notes, and what is set when it does."""
    notes: list[str] = []
    noted = threading.Event()

    def note(level: str, text: str) -> None:
        notes.append(f"{level}: {text}")
        noted.set()

    recorder.note = note
    return notes, noted


def test_on_a_cpu_it_is_the_hosts_memory_on_the_runs_clock(tmp_path: Path) -> None:
    before = perf_counter_ns()
    check_recorder(MemoryTimelineRecorder("cpu", LONG_MS), tmp_path)
    after = perf_counter_ns()
    for window in ("step-000001", "step-000002", "step-000003"):
        head, rows = read(tmp_path / window)
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

    monkeypatch.setattr(device, "host_rss_bytes", count)
    recorder = MemoryTimelineRecorder("cpu", 0.01)
    recorder.open(tmp_path)
    assert enough.wait(30)
    recorder.close()
    _, rows = read(tmp_path)
    assert [row[1] for row in rows] == list(range(1, len(sampled) + 1))
    assert set(sampled[:-1]) == {"rlprof-memory"}
    assert sampled[-1] == threading.current_thread().name
    assert "rlprof-memory" not in [thread.name for thread in threading.enumerate()]


def test_the_columns_of_a_fake_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator()
    allocator.install(monkeypatch)
    monkeypatch.setattr(device, "host_rss_bytes", lambda: None)
    recorder = MemoryTimelineRecorder("fake", LONG_MS)
    recorder.open(tmp_path)
    recorder.close()
    head, rows = read(tmp_path)
    names = ["device_allocated_bytes", "device_reserved_bytes", "device_used_bytes"]
    assert head["columns"] == ["clock_ns", *names]
    assert head["units"] == ["ns", "bytes", "bytes", "bytes"]
    assert [row[1:] for row in rows] == [[0, 1000, 5000]] * 2


def test_what_is_not_known_yet_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{}, {"device_allocated_bytes": 0}])
    monkeypatch.setattr(device, "memory_bytes", lambda kind: next(answers))
    monkeypatch.setattr(device, "host_rss_bytes", lambda: 7)
    recorder = MemoryTimelineRecorder("fake", LONG_MS)
    recorder.open(tmp_path)
    recorder.close()
    _, rows = read(tmp_path)
    assert [row[1:] for row in rows] == [[None, 7], [0, 7]]


def test_it_samples_the_device_that_the_training_thread_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(device, "device_index", lambda: 3)
    monkeypatch.setattr(
        device,
        "use_device",
        lambda *words: chosen.append((*words, threading.current_thread().name)),
    )
    recorder = MemoryTimelineRecorder("cuda", LONG_MS)
    recorder.open(tmp_path)
    recorder.close()
    assert chosen == [("cuda", 3, "rlprof-memory")]


def test_a_timeline_that_is_full_ends_with_a_note(tmp_path: Path) -> None:
    recorder = MemoryTimelineRecorder("cpu", 0.01, most=3)
    notes, noted = noting(recorder)
    recorder.open(tmp_path)
    assert noted.wait(30)
    recorder.close()
    assert len(read(tmp_path)[1]) == 3
    assert notes == ["warning: a memory timeline ends early, after 3 samples"]


def test_a_question_that_fails_ends_the_timeline_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kind: str) -> dict[str, int]:
        raise RuntimeError("device is lost")

    recorder = MemoryTimelineRecorder("cpu", 0.01)
    notes, noted = noting(recorder)
    monkeypatch.setattr(device, "memory_bytes", fail)
    recorder.open(tmp_path)
    assert noted.wait(30)
    recorder.close()
    assert notes == ["error: a memory timeline ends early (RuntimeError: device is lost)"]
    assert read(tmp_path) == ({"columns": ["clock_ns"], "units": ["ns"], "interval_ms": 0.01}, [])


def test_training_does_not_wait_for_a_driver_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(kind: str) -> dict[str, int]:
        assert answers.wait(30)
        return {}

    monkeypatch.setattr(memory_timeline, "_STOP_S", 0.01)
    monkeypatch.setattr(device, "memory_bytes", hang)
    recorder = MemoryTimelineRecorder("cuda", 0.01)
    notes, _ = noting(recorder)
    recorder.open(tmp_path)
    recorder.close()
    assert notes == ["warning: the memory timeline hangs in cuda's driver and stops"]
    assert read(tmp_path)[1] == []
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
    head, rows = read(tmp_path)
    last = dict(zip(head["columns"], rows[-1], strict=True))
    assert last["device_allocated_bytes"] == base + big.numel()
    assert last["device_used_bytes"] > last["device_reserved_bytes"] >= big.numel()
    assert last["host_rss_bytes"] > 0
