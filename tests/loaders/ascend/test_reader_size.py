"""A trace_view.json far larger than the memory that reading it may take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.ascend_output import EPOCH, MAIN, PID, TraceEvents, us

MEGABYTE = 2**20
PYTHON_STACK = ";\r\n".join(f"site-packages/torch/module_{at}.py({at}): call" for at in range(60))

# Not by ru_maxrss, which begins with the peak of the process that starts this one.
READ = """
import sys
from pathlib import Path
from lightning_rlprof.loaders.ascend.reader import read_ascend
status = Path("/proc/self/status")
peak = lambda: int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
before = peak()
run = read_ascend(Path(sys.argv[1]))
counts = [len(run), len(run.table("kernels").rows)]
print(*counts, peak() - before)
"""


def block(at: int) -> str:
    """One kernel with everything around it, a third of a kilobyte of counters and a long stack."""
    ns = EPOCH + at * 10_000
    trace = TraceEvents()
    trace.events.clear()
    trace.operator("aten::mul", at * 10_000, at * 10_000 + 4_000)
    trace.events[0]["args"]["Call stack"] = PYTHON_STACK
    trace.task("Mul", at * 10_000 + 5_000, at * 10_000 + 9_000, torch=(at * 10_000, MAIN))
    counter = {"name": "HBM 0/Read", "ph": "C", "pid": PID, "tid": 0, "args": {"Read(MB/s)": 0.0}}
    trace.events += [{**counter, "ts": us(ns + tick)} for tick in range(4)]
    return ", ".join(map(json.dumps, trace.events))


def large(path: Path, size: int) -> int:
    """Write a trace of at least that size; return the number of its kernels."""
    ends = TraceEvents()
    ends.mark("actor_update", 0, 900_000_000_000_000)
    ends.named("Ascend Hardware", ends.pid("Ascend Hardware", 0))
    count = 0
    with path.open("w") as file:
        file.write("[" + ", ".join(map(json.dumps, ends.events)))
        while file.tell() < size:
            file.write(", " + ", ".join(block(count + at) for at in range(256)))
            count += 256
        file.write("]")
    return count


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux' /proc")
def test_reading_takes_memory_for_the_columns_and_not_for_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace_view.json"
    kernels = large(path, 100 * MEGABYTE)

    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    spans, rows, grown = map(int, done.stdout.split())

    assert (spans, rows) == (1, kernels)
    # 40 bytes per task, 24 per arrow, a few copies of those while they are put in order.
    assert grown < 12 * MEGABYTE + 400 * kernels
    assert grown < path.stat().st_size / 3
