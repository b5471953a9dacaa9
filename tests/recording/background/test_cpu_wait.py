"""A thread that is ready while its CPU is taken has waited; one that sleeps has not."""

import os
import subprocess
import sys
import threading
import time

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.load import load
from lightning_rlprof.recording.background.host_usage import CpuWait
from lightning_rlprof.recording.session import Session
from lightning_rlprof.testing import make_header

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/thread-self/schedstat"), reason="Linux counts it, if built to"
)
SPIN = "while True: pass"


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_what_another_process_takes_is_counted_and_sleeping_is_not(tmp_path) -> None:
    def train() -> None:
        cpu = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        session = Session(ProfilerConfig(), tmp_path, make_header())
        with subprocess.Popen([sys.executable, "-c", SPIN]) as other:  # on the same CPU
            session.begin_step(1)
            spin(0.6)
            session.end_step()
            other.kill()
        session.begin_step(2)
        time.sleep(0.2)
        session.end_step()
        session.close()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    rows, waited = load(tmp_path).amounts("cpu_wait_ns")
    assert len(rows) == 2
    assert waited[0] > 0.1e9  # half of it on a machine without other work
    assert waited[1] < 0.1e9


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
