"""What a report has of threads and child processes."""

import subprocess
import sys
import threading
import time

import pytest

from lightning_rlprof.recording.stacks import (
    child_processes,
    thread_stacks,
)


class Told(threading.Event):
    """An event that says when a thread begins to wait for it, from which on its stack stays."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.entered.set()
        return super().wait(timeout)


ENDED = threading.Event()
ENDED.set()


def test_frames_are_innermost_first_with_their_lines_and_the_training_comes_first():
    end = Told()

    def other() -> None:
        end.wait()

    thread = threading.Thread(target=other, name="rewards")
    thread.start()
    end.entered.wait()
    try:
        first, *rest = thread_stacks(thread.ident, ENDED)
    finally:
        end.set()
        thread.join()
    assert (first.name, first.is_training) == ("rewards", True)
    own = next(frame for frame in first.frames if frame.function.endswith("other"))
    assert (own.file, own.text) == (__file__, "end.wait()")
    assert threading.current_thread().name not in [each.name for each in rest], "the watchdog's own"


def test_a_deep_stack_is_cut():
    def down(depth: int) -> int:
        return down(depth - 1) if depth else len(thread_stacks(me, ENDED)[0].frames)

    me = threading.get_ident()
    assert down(200) == 64


class Used(threading.Event):
    """An event for which one waits until a thread has used 100 ms of a CPU, however busy it is."""

    def __init__(self, thread: int) -> None:
        super().__init__()
        self.clock = time.pthread_getcpuclockid(thread)

    def wait(self, timeout: float | None = None) -> bool:
        until = time.clock_gettime(self.clock) + 0.1
        while time.clock_gettime(self.clock) < until:
            time.sleep(0.01)
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="clocks of threads")
def test_the_cpu_share_tells_a_loop_from_a_wait():
    end = threading.Event()

    def loop() -> None:
        while not end.is_set():
            pass

    threads = [threading.Thread(target=target) for target in (loop, end.wait)]
    for thread in threads:
        thread.start()
    look = Used(threads[0].ident)
    shares = [thread_stacks(thread.ident, look)[0].cpu_share for thread in threads]
    end.set()
    for thread in threads:
        thread.join()
    assert shares[0] > 10 * shares[1]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_child_processes_have_names_and_states():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        states = {each.pid: each.state for each in child_processes()}
    finally:
        child.communicate(b"\n")
    assert states[child.pid] in ("R", "S", "D")
