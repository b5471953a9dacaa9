"""A thread that is ready while its CPU is taken has waited; one that sleeps has not."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.background.sampler import CpuWait
from lightning_rlprof.recording.session import Session
from lightning_rlprof.testing import make_header

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/thread-self/schedstat"), reason="Linux counts it, if built to"
)
SPIN = "while True: pass"


def spin(seconds: float) -> None:
    """Use the CPU for so long, however long that takes."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def kernel_ns() -> int:
    """Return how long the kernel says that this thread has waited."""
    with open("/proc/thread-self/schedstat", encoding="ascii") as file:
        return int(file.read().split()[1])


def test_what_another_process_takes_is_counted_and_sleeping_is_not(tmp_path) -> None:
    looked = []  # of the kernel's number: before and after the session's own look

    def train() -> None:
        cpu = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        before = kernel_ns()
        session = Session(ProfilerConfig(), tmp_path, make_header())
        looked.append((before, kernel_ns()))

        def step(number: int, work: Callable[[], None]) -> None:
            session.begin_step(number)
            work()
            before = kernel_ns()
            session.end_step()
            looked.append((before, kernel_ns()))

        with subprocess.Popen([sys.executable, "-c", SPIN]) as other:  # on the same CPU
            step(1, lambda: spin(0.4))
            other.kill()
        step(2, lambda: time.sleep(0.3))
        session.close()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    rows, waited = load(tmp_path).amounts("cpu_wait_ns")
    assert len(rows) == 2
    for ns, last, now in zip(waited, looked, looked[1:], strict=False):
        assert now[0] - last[1] <= ns <= now[1] - last[0]  # no sleep fits between
    assert waited[0] > 0.1e9  # as much as it ran, on a machine without other work


@pytest.mark.parametrize("content", [None, b"", b"12", b"12 many 3"])
def test_without_linux_it_is_unknown(content, monkeypatch, tmp_path) -> None:
    path = tmp_path / "schedstat"
    if content is not None:
        path.write_bytes(content)
    real = os.open
    monkeypatch.setattr("os.open", lambda name, flags: real(path, flags))
    wait = CpuWait()
    assert wait.counters() == {}
    wait.close()
    wait.close()
    assert wait.counters() == {}
