"""Pauses of garbage collection are counted, and no signal is lost in the callback."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.annotations import annotate, stage
from lightning_rlprof.recording.background import sampler
from lightning_rlprof.recording.background.sampler import Background, GcPauses, Pause, clock_in_c
from lightning_rlprof.recording.session import Helpers, Session
from lightning_rlprof.testing import FakeClock, make_header

MS = 1_000_000


@pytest.fixture
def no_others() -> Iterator[None]:
    """Let Python begin no collection of its own, which would be counted, too."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def pauses(no_others: None) -> Iterator[GcPauses]:
    found = GcPauses()
    yield found
    found.close()


def feed(pauses: GcPauses, *events: Any) -> None:
    """Put events of collections at times of the test's own."""
    pauses._events.extend(events)


def test_each_collection_is_timed_and_names_its_thread(pauses: GcPauses) -> None:
    before = time.perf_counter_ns()
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    gc.collect()
    events = [*pauses._events]
    assert len(events) == 4
    (first, one), end, (second, other), last = events
    assert before <= first <= end <= second <= last <= time.perf_counter_ns()
    assert (one, other) == (thread.ident, threading.get_ident())
    counters, _ = pauses.take()
    assert counters == {"gc_pause_ns": end - first + last - second, "gc_collections": 2}
    assert pauses.take() == ({"gc_pause_ns": 0, "gc_collections": 0}, [])


def test_a_pause_of_a_millisecond_or_more_is_kept(pauses: GcPauses) -> None:
    feed(pauses, (0, 7), MS - 1, (2 * MS, 8), 3 * MS, (5 * MS, 9))
    pauses.add_up()
    feed(pauses, 9 * MS)
    counters, long = pauses.take()
    assert counters == {"gc_pause_ns": 6 * MS - 1, "gc_collections": 3}
    assert long == [Pause(8, 2 * MS, 3 * MS), Pause(9, 5 * MS, 9 * MS)]


def test_an_end_whose_start_was_lost_counts_for_nothing(pauses: GcPauses) -> None:
    feed(pauses, 5, (6, 1), 8)
    assert pauses.take() == ({"gc_pause_ns": 2, "gc_collections": 1}, [])


def test_what_is_kept_between_two_steps_has_a_bound() -> None:
    events: deque[Any] = deque(maxlen=4)
    callback = clock_in_c(events)
    for _ in range(10):
        callback("start", {})
        callback("stop", {})
    assert len(events) == 4


def test_after_its_end_nothing_is_called() -> None:
    before = [*gc.callbacks]
    pauses = GcPauses()
    assert len(gc.callbacks) == len(before) + 1
    pauses.close()
    pauses.close()
    assert gc.callbacks == before


CTRL_C = """
import ctypes, gc, signal, sys
from lightning_rlprof.recording.background.sampler import GcPauses

signal.signal(signal.SIGINT, signal.default_int_handler)
# What the C part of Python's handler does when a Ctrl-C arrives: the next Python code raises.
interrupt = ctypes.pythonapi.PyErr_SetInterrupt
interrupt.argtypes, interrupt.restype = [ctypes.py_object] * 2, None
gc.disable()
if sys.argv[1] == "ours":
    GcPauses()
else:
    gc.callbacks.append(lambda phase, info: None)
gc.callbacks.insert(0, interrupt)
try:
    gc.collect()
    gc.callbacks.remove(interrupt)
    print("lost")
except KeyboardInterrupt:
    gc.callbacks.remove(interrupt)
    print("reached the training")
"""


@pytest.mark.parametrize(
    ("whose", "what"), [("ours", "reached the training"), ("written in Python", "lost")]
)
def test_a_ctrl_c_in_a_collection_reaches_the_training(whose: str, what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C, whose], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == what
    assert ("Exception ignored in" in done.stderr) == (what == "lost")


TRAINING = """
import gc, signal, sys
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.start import start_session

signal.signal(signal.SIGINT, signal.default_int_handler)
kept = [[number] for number in range(300_000)]  # so that most of the time is in collections
with start_session(ProfilerConfig.build(profile_save_path=sys.argv[1]), name="run") as session:
    for step in range(1, 10**9):
        session.begin_step(step)
        if step == 3:
            print("collects", flush=True)
        gc.collect()
        session.end_step()
"""


@pytest.mark.deep
@pytest.mark.skipif(os.name == "nt", reason="a signal of POSIX")
def test_a_real_ctrl_c_ends_a_training_that_collects(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(60) != 0
    run = load(tmp_path / "run")
    assert run.statuses[0] == "interrupted by KeyboardInterrupt"
    assert "gc_pause_ns" in run.counters


def recorded(tmp_path: Path) -> tuple[Session, FakeClock, Background]:
    clock = FakeClock(10 * MS)
    session = Session(
        ProfilerConfig(),
        tmp_path,
        make_header(),
        clock=clock,
        helpers=lambda session: Helpers(Background(session, [])),
    )
    assert session.helpers.background is not None
    return session, clock, session.helpers.background


def test_steps_have_the_counters_and_long_pauses_lie_in_their_stage(
    tmp_path: Path, no_others: None
) -> None:
    session, clock, background = recorded(tmp_path)
    here = threading.get_ident()
    feed(background._pauses, (1 * MS, here), 3 * MS)  # before the first step
    session.begin_step(1)
    with stage("actor_update"), annotate("backward"):
        clock.advance(9 * MS)
        feed(background._pauses, (12 * MS, here), 15 * MS, (16 * MS, here), 16 * MS + 5)
    with stage("compute_reward"):
        clock.advance(9 * MS)
    feed(background._pauses, (20 * MS, -1), 22 * MS)  # of a thread that marks nothing
    feed(background._pauses, (28 * MS, here), 32 * MS)  # when the stages have ended
    clock.advance(9 * MS)
    session.end_step()
    session.begin_step(2)
    clock.advance(200 * MS)
    session.end_step()
    session.close()
    run = load(tmp_path)
    by_id = {span.id: span for span in run}
    pauses = [span for span in run if span.name == "garbage_collection"]
    assert [(span.kind, span.step, span.duration_ns // MS) for span in pauses] == [
        ("region", 0, 2),
        ("region", 1, 3),
        ("region", 1, 2),
        ("region", 1, 4),
    ]
    parents = [span.parent and by_id[span.parent].name for span in pauses]
    assert parents == [None, "backward", None, None]
    steps = [span.counters or {} for span in run if span.kind == "step"]
    assert [each["gc_pause_ns"] for each in steps] == [9 * MS + 5, 0]
    assert [each["gc_collections"] for each in steps] == [4, 0]


def test_a_stage_that_is_still_open_has_its_pauses(tmp_path: Path, no_others: None) -> None:
    session, clock, background = recorded(tmp_path)
    session.begin_step(1)
    around = annotate("fit")
    around.__enter__()
    clock.advance(9 * MS)
    feed(background._pauses, (12 * MS, threading.get_ident()), 15 * MS)
    session.end_step()
    around.__exit__(None, None, None)
    session.close()
    run = load(tmp_path)
    [pause] = [span for span in run if span.name == "garbage_collection"]
    [fit] = [span for span in run if span.name == "fit"]
    assert pause.parent == fit.id


def test_no_background_no_counters(start: Any, tmp_path: Path) -> None:
    session = start()
    session.begin_step(1)
    session.end_step()
    session.close()
    assert not {"gc_pause_ns", "gc_collections"} & load(tmp_path).counters.keys()


def test_the_limit_of_a_region_is_a_millisecond() -> None:
    assert sampler.LONG_NS == MS
