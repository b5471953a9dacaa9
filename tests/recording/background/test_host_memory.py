"""Resident memory of the process and of its children, counted with every step."""

import mmap
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording import session as session_module
from lightning_rlprof.recording.annotations import annotate, stage
from lightning_rlprof.recording.background.sampler import HostMemory
from lightning_rlprof.recording.session import Session
from lightning_rlprof.system import process
from lightning_rlprof.system.process import resident_bytes
from lightning_rlprof.testing import FakeClock, make_header

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="memory is read from Linux' /proc"
)


def test_the_hosts_memory_grows_with_what_this_process_keeps() -> None:
    before = resident_bytes()
    kept = mmap.mmap(-1, 64 << 20)  # of the allocator some may be used again
    kept.write(b"x" * len(kept))
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert after - before > len(kept) // 2


@pytest.mark.parametrize("content", [None, b"", b"12", b"12 many"])
def test_an_unreadable_host_has_no_memory(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "statm"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr("builtins.open", lambda name, mode="r", real=open, **_: real(path, "rb"))
    assert resident_bytes() is None
    real_open = os.open
    monkeypatch.setattr("os.open", lambda name, flags: real_open(path, flags))
    memory = HostMemory()
    assert "host_rss_bytes" not in memory.counters()
    memory.close()


def test_children_are_added_up() -> None:
    code = "kept = bytearray(b'x') * (64 << 20); print(1, flush=True); input()"
    memory = HostMemory()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert memory.counters()["children_rss_bytes"] > 64 << 20
        child.communicate(b"\n")
    memory.close()
    assert "host_rss_bytes" not in memory.counters()


def test_steps_have_it_without_any_capture_unless_the_last_reading_was_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**9]
    monkeypatch.setattr(session_module, "perf_counter_ns", lambda: now[0])
    with Session(ProfilerConfig.build(profile=False), tmp_path / "run", make_header()) as session:
        for step, passed in enumerate((10**8, 10**8, 10**8 - 1, 1), 1):
            now[0] += passed
            session.begin_step(step)
            session.end_step()
    spans = load(tmp_path / "run")
    for name in ("host_rss_bytes", "cpu_wait_ns"):
        assert spans.step[spans.counters[name].rows].tolist() == [1, 2, 4]
    assert min(spans.counters["host_rss_bytes"].values) > 1 << 20


def test_the_first_step_has_the_limit_of_the_container_or_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.max"
    monkeypatch.setattr(process, "_CGROUP_LIMIT", file)
    assert process.limit_bytes() == process.machine_bytes()
    file.write_text("max\n")
    assert process.limit_bytes() == process.machine_bytes()
    file.write_text("1048576\n")
    with Session(ProfilerConfig.build(profile=False), tmp_path / "run", make_header()) as session:
        for step in (1, 2):
            session.begin_step(step)
            session.end_step()
    counter = load(tmp_path / "run").counters["host_limit_bytes"]
    assert (len(counter.rows), counter.values.tolist()) == (1, [1 << 20])


def test_the_first_long_stage_has_the_memory_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake device."""
    monkeypatch.setattr(session_module, "allocator_bytes", lambda kind: {})
    monkeypatch.setattr(session_module, "device_memory", lambda: (5, 7))
    clock = FakeClock()
    with Session(ProfilerConfig(), tmp_path, make_header(device="cuda"), clock=clock) as session:
        for milliseconds in (50, 51, 52):
            with stage("actor_update"):
                clock.advance(milliseconds * 1_000_000)
        session.flush()
    totals = [(span.counters or {}).get("device_total_bytes") for span in load(tmp_path)]
    assert totals == [None, 7, None]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("device", "milliseconds", "recorded"),
    [
        ("cpu", 1, set()),
        ("cpu", 2, {"host_rss_bytes"}),
        ("cuda", 50, {"host_rss_bytes"}),
        ("cuda", 51, {"host_rss_bytes", "device_peak_bytes"}),
    ],
)
def test_a_stage_of_a_millisecond_or_more_has_the_memory_at_its_end(
    device: str,
    milliseconds: int,
    recorded: set[str],
    nested: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a fake device, whose allocator is asked only at the end of long stages."""
    monkeypatch.setattr(session_module, "allocator_bytes", lambda kind: {"device_peak_bytes": 5})
    clock = FakeClock()
    header = make_header(device=device)
    with Session(ProfilerConfig(), tmp_path, header, clock=clock) as session:
        with annotate("train") if nested else nullcontext(), stage("actor_update", tokens=3):
            clock.advance(milliseconds * 1_000_000)
        session.flush()
    [span] = [span for span in load(tmp_path) if span.name == "actor_update"]
    assert set(span.counters) == {"tokens", *recorded}
