"""SIGTERM in a loop: the file says so, and the process ends as it would have."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightning_rlprof.integrations.termination import Termination
from lightning_rlprof.records.run_directory import rank_files, read_trace
from tests.places import ROOT

pytestmark = pytest.mark.deep

PROGRAM = """
import asyncio, ctypes, os, signal, sys, threading, time
from lightning_rlprof import stage, start_session, step

folder, what = sys.argv[1:]
if what == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
session = start_session(profile_save_path=folder, summary=False)
if what == "event loop":  # which takes the interpreter's wakeup file
    loop = asyncio.new_event_loop()
    loop.add_signal_handler(signal.SIGUSR1, print)
if what == "forks":
    for _ in range(200):
        child = os.fork()
        if not child:
            ctypes.CDLL(None).sleep(60)
            os._exit(3)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
ended = 0
while True:
    with step(), stage("actor_update"):
        time.sleep(0.001)
        if ended == 20:
            print(ended, flush=True)
        if what == "stuck" and ended == 20:
            ctypes.CDLL(None).sleep(600)  # as in a collective: no Python runs
        if what == "lock" and ended == 20:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
    ended += 1
"""


def terminated(what: str, folder: Path) -> int:
    """Run the program until step 20, end it; returns its status."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", PROGRAM, str(folder), what]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "20\n"
        process.terminate()
        return process.wait(120)


@pytest.mark.parametrize("what", ["", "stuck", "lock", "event loop", "forks"])
def test_the_run_says_that_it_was_terminated_and_loses_nothing(what: str, tmp_path: Path) -> None:
    assert terminated(what, tmp_path) == -signal.SIGTERM
    [run] = tmp_path.iterdir()
    trace = read_trace(rank_files(run)[0])
    assert trace.status == "interrupted by SIGTERM"
    steps = [span.step for span in trace.spans if span.kind == "step"]
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) >= 21  # the last one as interrupted, or the process ended between two


def test_a_handler_of_the_program_is_left_alone(tmp_path: Path) -> None:
    assert terminated("handler", tmp_path) == 7
    [run] = tmp_path.iterdir()
    assert read_trace(rank_files(run)[0]).status == "interrupted by SystemExit"


def test_nothing_stays_when_the_session_ends() -> None:
    before = threading.enumerate()  # an injected failure may have left one in this process
    for _ in range(100):
        Termination(bool).remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    for thread in threading.enumerate():
        if thread.name == "rlprof-termination" and thread not in before:
            thread.join(60)
            assert not thread.is_alive()


def test_another_thread_than_the_main_one_installs_nothing() -> None:
    thread = threading.Thread(target=lambda: Termination(bool).remove())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
