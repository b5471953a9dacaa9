"""What runs when a run's files are complete: real threads, never a failure."""

import dataclasses
import logging
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.start import Finished, run_finish, start_session
from lightning_rlprof.testing import FakeRecorder, make_header


def finish(action=None, rank=0, tools=("nvtx",)):
    config = ProfilerConfig.build()
    thread = run_finish(config, make_header(rank), Path("runs/one"), tools, action)
    if thread:
        thread.join()
    return thread


@pytest.fixture
def longest(monkeypatch):
    def set_to(seconds):
        monkeypatch.setattr("lightning_rlprof.recording.start._MAX_CALL_S", seconds)

    return set_to


def test_a_callable_is_told_of_the_run_off_the_training_thread():
    told = []

    finish(lambda finished: told.append((finished, threading.get_ident())))

    ((finished, thread),) = told
    assert finished == Finished(Path("runs/one"), "nvtx", 0, 1, "actor")
    assert thread != threading.get_ident()


@pytest.mark.parametrize("error", [RuntimeError("bucket is gone"), SystemExit("bucket is gone")])
def test_a_callable_that_raises_is_one_warning(error, caplog):
    def broken(finished):
        raise error

    finish(broken)

    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.message == f"on_finish failed on rank 0: {error!r}"


def test_a_callable_that_hangs_is_left_behind(caplog, longest):
    longest(0.05)
    forever = threading.Event()

    finish(lambda _: forever.wait(600))

    assert (
        "on_finish of rank 0 still runs after 0.05 s; no longer waiting for it" in caplog.messages
    )
    forever.set()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0]),
        ({"steps": [1], "ranks": [1, 2]}, [1, 2]),
        ({"steps": [1], "ranks": "all"}, [0, 1, 2, 3]),
    ],
)
def test_it_runs_on_captured_ranks_or_on_rank_0(config, expected):
    built = ProfilerConfig.build(config)

    assert [rank for rank in range(4) if built.wants_finish(rank)] == expected
    header = make_header(3)
    thread = run_finish(built, header, Path("run"), (), lambda _: None)
    assert (thread is not None) == (3 in expected)


@pytest.mark.parametrize(
    ("mode", "waits"), [("worker", True), ("driver", False), ("client", False), (None, False)]
)
def test_it_is_waited_for_where_ray_would_kill_it(monkeypatch, longest, mode, waits):
    context = SimpleNamespace(worker=SimpleNamespace(mode=mode))
    context = SimpleNamespace() if mode == "client" else context
    fake = SimpleNamespace(WORKER_MODE="worker", get_runtime_context=lambda: context)
    fake.is_initialized = lambda: mode is not None
    monkeypatch.setitem(sys.modules, "ray", fake)
    # The machine may stop a process that does not wait, but not for so long.
    timeout_s = 0.2 if waits else 60.0
    longest(timeout_s)
    config = ProfilerConfig.build()
    forever = threading.Event()

    before = time.monotonic()
    thread = run_finish(config, make_header(0), Path("run"), (), lambda _: forever.wait(600))
    waited = time.monotonic() - before
    forever.set()
    thread.join()

    assert (waited >= timeout_s) == waits


def test_nothing_to_do_starts_no_thread():
    assert finish() is None


def test_a_session_runs_it_once_when_its_files_are_complete(tmp_path):
    statuses = []
    config = ProfilerConfig.build(profile_save_path=str(tmp_path), steps=[1])
    session = start_session(
        config,
        recorders=[FakeRecorder()],
        on_finish=lambda finished: statuses.append((load(finished.run).statuses, finished.tool)),
    )
    session.begin_step(1)
    session.end_step()
    session.close()
    session.close()
    for thread in threading.enumerate():
        if thread.name == "rlprof-finish":
            thread.join()
    assert statuses == [({0: "finished"}, "FakeRecorder")]


def test_what_is_told_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Finished(Path("run"), "", 0, 1, "actor").rank = 2
