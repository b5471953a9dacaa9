"""A disk that fails at any system call, is slow, or turns read-only: what it took can be read."""

import logging
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.recording.start import start_session
from lightning_rlprof.testing import FakeClock
from tests.builders.models import Tiny, loader, make_trainer, steps_of, trace_of
from tests.chaos.disks import (
    ERRORS,
    FAULTS,
    STEPS,
    Disk,
    Fault,
    count_calls,
    on_disk,
    train,
    trained_on,
)
from tests.effort import DEEP

CALLS = ("write", "fstat", "open", "pwrite", "close")


@pytest.mark.parametrize("error", ERRORS if DEEP else ERRORS[:1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_fails_at_any_write_keeps_what_it_took(fault: Fault, error: int) -> None:
    writes = count_calls()
    assert writes == 6  # the header, four times three steps, and the end
    lost = []
    for call in range(writes):
        is_last = call == writes - 1  # after it nothing is tried again
        disk = Disk(("write",), call, fault, error)
        outcome = trained_on(disk, may_lose=fault.endswith("good") or is_last)
        assert not outcome.broken, (call, outcome)
        lost.append(outcome.lost)
    # A training begins with its header.
    assert (
        lost
        == {
            "once": [0, 0, 0, 0, 0, 2],
            "for good": [0, 12, 11, 8, 5, 2],
            "half, once": [0, 0, 0, 0, 0, 0],
            "half, then for good": [0, 12, 10, 7, 4, 1],
        }[fault]
    )


@pytest.mark.parametrize("fault", ["once", "for good"])
def test_any_system_call_of_the_writer_may_fail(fault: Fault) -> None:
    """Also the last one: NFS says only at the end that it could not keep what it had taken."""
    number = count_calls(CALLS)
    assert number == 13
    for call in range(number):
        disk = Disk(CALLS, call, fault)
        may_lose = fault == "for good" or call == number - 2
        outcome = trained_on(disk, may_lose=may_lose, says=fault == "once")
        assert not outcome.broken, (call, outcome)


def test_an_error_at_the_end_of_the_file_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with on_disk(Disk(("close",), 0)):
        train(tmp_path, FakeClock())
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith(
        "rank-00000.jsonl may lack its last lines: [Errno 28] No space left on device"
    )


def test_a_slow_disk_costs_time_and_no_step(tmp_path: Path) -> None:
    clock = FakeClock()
    with on_disk(Disk(on_write=lambda: clock.advance(7_000_000_000))):
        train(tmp_path, clock)
    spans = load(tmp_path)
    assert spans.statuses == {0: "finished"}
    assert spans.step[spans.rows(kind="step")].tolist() == [*range(1, STEPS + 1)]


def test_threads_mark_on_while_a_write_takes_for_ever(tmp_path: Path) -> None:
    """The write ends when the other threads have: if they waited for it, none of them would."""
    inside, over = threading.Event(), threading.Event()

    def wait() -> None:
        if armed:
            inside.set()
            assert over.wait(60)

    def mark() -> None:
        for _ in range(100):
            with stage("actor_generate", tokens=1):
                pass

    armed: list[bool] = []
    config = ProfilerConfig.build(profile_save_path=str(tmp_path))
    with on_disk(Disk(on_write=wait)), start_session(config, name="run", recorders=()) as session:
        session.begin_step(1)
        armed.append(True)
        writer = threading.Thread(target=session.flush)
        session.note("info", "to be written")
        writer.start()
        assert inside.wait(60)
        others = [threading.Thread(target=mark) for _ in range(8)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join(60)
        assert not any(thread.is_alive() for thread in others)
        armed.clear()
        over.set()
        writer.join(60)
        session.end_step()
    spans = load(tmp_path)
    assert len(spans.rows(name="actor_generate")) == 800


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Return a file system of its own, and the file that makes the kernel turn it read-only."""
    image, place = tmp_path / "image", tmp_path / "disk"
    image.write_bytes(bytes(4 << 20))
    place.mkdir()
    commands = [
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop,errors=remount-ro", str(image), str(place)],
    ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except FileNotFoundError:
            pytest.skip(f"there is no {command[0]} here")
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        mounted = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        (device,) = [Path(line[0]).name for line in mounted if line[1] == str(place)]
        trigger = Path("/sys/fs/ext4", device, "trigger_fs_error")
        if not trigger.exists():
            pytest.skip("this kernel cannot fail a file system on request")
        yield place, trigger
    finally:
        subprocess.run(["umount", "-l", str(place)], timeout=120, check=True)


def test_a_real_file_system_that_turns_read_only_leaves_training_alone(
    failing_disk: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_rlprof.recording.span_buffer._WRITE_NS", 0)
    disk, trigger = failing_disk
    callback, module = ProfilerCallback(profile_save_path=str(disk)), Tiny()

    def fail(batch_idx: int) -> None:
        if len(module.losses) == 10:
            trigger.write_text("by a test of rlprof")

    module.on_batch = fail
    caplog.set_level(logging.WARNING)
    make_trainer(callback, max_epochs=5).fit(module, loader())
    assert len(module.losses) == 20
    trace = trace_of(callback)
    assert steps_of(trace) == [*range(1, 11)]
    assert (trace.status, trace.lost_lines) == (None, 0)
    said = [
        record.getMessage() for record in caplog.records if record.name.startswith("lightning_")
    ]
    assert any("Read-only file system; the newest lines wait in memory" in each for each in said)
    assert any("lines that could not be written" in each for each in said)
