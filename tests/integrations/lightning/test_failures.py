"""What breaks in us: the disk, a directory, a recorder, a hook; training never notices."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.session import current
from lightning_rlprof.testing import FakeRecorder
from tests.builders.models import Tiny, loader, make_trainer, only_run, steps_of, trace_of


@pytest.fixture
def callback(tmp_path: Path) -> ProfilerCallback:
    return ProfilerCallback(profile_save_path=str(tmp_path / "runs"))


class FullDisk:
    """Stands in for ``os`` in the writer; while it is full it takes ten bytes and then none."""

    def __init__(self) -> None:
        self.full = False
        self._room = 10

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, data: memoryview) -> int:
        if not self.full:
            self._room = 10
            return os.write(file, data)
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(file, data[: self._room])
        self._room -= written
        return written


@pytest.fixture
def each_step_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of these trainings take a few ms, and would share one write."""
    monkeypatch.setattr("lightning_rlprof.recording.span_buffer._WRITE_NS", 0)


@pytest.mark.usefixtures("each_step_is_written")
def test_a_disk_that_is_full_for_some_steps_costs_nothing(
    callback: ProfilerCallback, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, module = FullDisk(), Tiny()
    monkeypatch.setattr("lightning_rlprof.records.run_directory.os", disk)
    module.on_batch = lambda batch_idx: setattr(disk, "full", batch_idx in (1, 2))
    make_trainer(callback, max_epochs=2).fit(module, loader())
    assert len(module.losses) == 8
    trace = trace_of(callback)
    assert steps_of(trace) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (trace.status, trace.lost_lines) == ("finished", 0)
    assert sum("waited in memory" in note.text for note in trace.notes) == 2
    warned = [record for record in caplog.records if "cannot write" in record.message]
    assert len(warned) == 2  # once per time that the disk filled, not once per step


@pytest.mark.usefixtures("each_step_is_written")
def test_a_disk_that_stays_full_leaves_training_alone(
    callback: ProfilerCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, module = FullDisk(), Tiny()
    monkeypatch.setattr("lightning_rlprof.records.run_directory.os", disk)
    module.on_batch = lambda batch_idx: setattr(disk, "full", batch_idx >= 2)
    make_trainer(callback).fit(module, loader())
    disk.full = False
    assert len(module.losses) == 4
    trace = trace_of(callback)
    assert (steps_of(trace), trace.status) == ([1, 2], "finished")
    assert "lines were lost" in trace.notes[-1].text


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"a disk cannot be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], timeout=120, check=True)


def test_a_real_disk_that_fills_up_leaves_training_alone(tiny_disk: Path) -> None:
    callback, module = ProfilerCallback(profile_save_path=str(tiny_disk)), Tiny()
    make_trainer(callback, max_epochs=20).fit(module, loader())
    assert len(module.losses) == 80
    trace = trace_of(callback)
    steps = steps_of(trace)
    assert 0 < len(steps) < 80
    assert steps == list(range(1, len(steps) + 1))
    assert trace.status == "finished"
    assert "lines were lost" in trace.notes[-1].text


@pytest.mark.parametrize("where", ["a file", "proc"])
def test_an_unwritable_directory_is_refused_before_training(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "file" / "runs" if where == "a file" else Path("/proc/runs")
    module = Tiny()
    callback = ProfilerCallback(profile_save_path=str(target))
    with pytest.raises(ConfigError, match=r"profile_save_path: .* cannot be written"):
        make_trainer(callback).fit(module, loader())
    assert module.losses == []
    assert current() is None


def test_two_jobs_never_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightning_rlprof.integrations.lightning.profiler_callback.new_run_name", lambda: "same"
    )
    make_trainer(ProfilerCallback(profile_save_path=str(tmp_path))).fit(Tiny(), loader())
    (before,) = only_run(tmp_path)
    with pytest.raises(ConfigError, match="has rank 0 already, of another process; give each"):
        make_trainer(ProfilerCallback(profile_save_path=str(tmp_path))).fit(Tiny(), loader())
    (after,) = only_run(tmp_path)
    assert after == before


@pytest.mark.parametrize("place", ["open", "enter", "exit", "close", "finish"])
def test_a_recorder_that_raises_is_dropped_noted_and_logged_once(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, watched = Tiny(), Tiny()
    make_trainer().fit(plain, loader())
    bad, good = FakeRecorder(fail_at=place), FakeRecorder()
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path), steps=[2, 4], recorders=[bad, good]
    )
    caplog.clear()
    make_trainer(callback).fit(watched, loader())
    assert plain.losses == watched.losses
    trace = trace_of(callback)
    assert (steps_of(trace), trace.status) == ([1, 2, 3, 4], "finished")
    assert [note.text for note in trace.notes if note.level == "error"] == [
        f"FakeRecorder was disabled after an error (RuntimeError: asked to fail at {place})"
    ]
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1
    assert [call for call in good.calls if call.startswith("open")] == [
        "open step-000002", "open step-000004",
    ]  # fmt: skip
    assert good.calls[-2:] == ["close", "finish"]


def test_a_hook_of_ours_that_fails_ends_the_recording_not_the_training(
    callback: ProfilerCallback, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, module = Tiny(), Tiny()
    make_trainer().fit(plain, loader())
    trainer = make_trainer(callback)

    def act(batch_idx: int) -> None:
        if batch_idx == 2:
            session = current()
            monkeypatch.setattr(session, "end_step", lambda: 1 / 0)

    module.on_batch = act
    caplog.clear()
    trainer.fit(module, loader())
    assert plain.losses == module.losses
    trace = trace_of(callback)
    assert trace.status == "stopped by an error in rlprof: ZeroDivisionError"
    assert steps_of(trace) == [1, 2]
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1
    assert current() is None
