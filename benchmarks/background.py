"""What background metrics cost: ``python benchmarks/background.py``.

Two samplers run at once for half a minute, each on its thread as in a training. A third thread
only waits. The main thread moves memory meanwhile, so that caches hold nothing of theirs. Reported
is the processor time of each thread. The two samplers are the A/A control.

Collections of garbage are timed in short blocks that take turns: without a callback, once more
(A/A), with rlprof's, and with one that is written in Python, does the same, and loses a Ctrl-C.
"""

import argparse
import gc
import itertools
import sys
import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

from _measure import Bound, Report, fresh, options, quiet_enough, verdict

from lightning_rlprof.recording.background.readings import HostFiles, host_parts, process_parts
from lightning_rlprof.recording.background.sampler import Background, clock_in_c
from lightning_rlprof.records.notes import Code, Fact, Level
from lightning_rlprof.testing import make_header

__all__ = ["main"]

SECONDS, TRIES = 30, 3
SAMPLES_BAND, BLOCKS_BAND = (0.8, 1.25), (0.95, 1.05)
SAMPLER, AGAIN, WAITING = "sampler", "sampler again (A/A)", "a thread that only waits"
BARE, BARE_AGAIN = "no callback", "no callback again (A/A)"
OURS, PYTHON = "rlprof's callback", "a callback in Python"
BLOCKS, PER_BLOCK = 200, 500
MOST_OF_A_CORE, MOST_OF_PYTHON = 0.001, 2.0


class Found(NamedTuple):
    """Share of a core of each thread, bytes per sample, and ns of one collection."""

    shares: dict[str, float]
    bytes: float
    collections: dict[str, float]

    @property
    def samplers(self) -> float:
        """The second sampler as a multiple of the first."""
        return self.shares[AGAIN] / self.shares[SAMPLER]

    @property
    def blocks(self) -> float:
        """The second blocks without a callback as a multiple of the first."""
        return self.collections[BARE_AGAIN] / self.collections[BARE]

    @property
    def quiet(self) -> bool:
        """Whether both controls are inside of their bands."""
        low, high = SAMPLES_BAND
        least, most = BLOCKS_BAND
        return low <= self.samplers <= high and least <= self.blocks <= most


def threads(seconds: float) -> tuple[dict[str, float], float]:
    """Return the share of a core that each thread took, and the bytes of a sample."""
    lines: list[Any] = []
    made: list[tuple[str, threading.Thread, Callable[[], object]]] = []
    for name in (SAMPLER, AGAIN):
        files = HostFiles()
        parts = [*process_parts(files), *host_parts(files)]
        session: Any = SimpleNamespace(
            add=lines.append,
            note=_no_note,
            clock=time.perf_counter_ns,
            buffer=SimpleNamespace(flush_if_free=bool),
            header=make_header(),
        )
        one = Background(session, parts)
        one.start()
        assert one._thread is not None
        made.append((name, one._thread, one.stop))
    end = threading.Event()

    def wait() -> None:
        while not end.wait(1.0):
            pass

    waiting = threading.Thread(target=wait)
    waiting.start()
    made.append((WAITING, waiting, end.set))
    time.sleep(0.5)  # the first sample opens files
    lines.clear()
    before, begun = _processor_times(made), time.perf_counter()
    memory = bytearray(4 << 20)
    while time.perf_counter() < begun + seconds:
        memory = memory[::-1]
        time.sleep(0.002)
    took, after = time.perf_counter() - begun, _processor_times(made)
    for _, thread, stop in made:
        stop()
        thread.join()
    shares = {name: (after[name] - before[name]) / 1e9 / took for name, *_ in made}
    return shares, sum(len(str(line)) for line in lines) / max(len(lines), 1)


def _no_note(code: Code | Level, text: str, /, **facts: Fact) -> None:
    pass


def _processor_times(made: list[tuple[str, threading.Thread, Any]]) -> dict[str, int]:
    return {
        name: time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident or 0))
        for name, thread, _ in made
    }


def _block(number: int) -> int:
    start = time.perf_counter_ns()
    for _ in itertools.repeat(None, number):
        gc.collect(0)
    return time.perf_counter_ns() - start


def collections(blocks: int) -> dict[str, float]:
    """Return the median of blocks, in nanoseconds per collection."""
    events: deque[Any] = deque(maxlen=1000)

    def in_python(phase: str, info: object) -> None:
        now = time.perf_counter_ns()
        events.append((now, get_ident()) if phase == "start" else now)

    callbacks = {BARE: None, OURS: clock_in_c(events), PYTHON: in_python, BARE_AGAIN: None}
    timed = {name: fresh(_block) for name in callbacks}
    found: dict[str, list[int]] = {name: [] for name in callbacks}
    gc.disable()
    gc.collect()
    for _ in range(blocks):
        for name, callback in callbacks.items():
            if callback is not None:
                gc.callbacks.append(callback)
            found[name].append(timed[name](PER_BLOCK))
            if callback is not None:
                gc.callbacks.remove(callback)
    gc.enable()
    return {name: median(times) / PER_BLOCK for name, times in found.items()}


def main(chosen: argparse.Namespace) -> int:
    """Measure and judge; return the exit status."""

    def measure() -> Found:
        shares, size = threads(2 if chosen.quick else SECONDS)
        return Found(shares, size, collections(5 if chosen.quick else BLOCKS))

    found = quiet_enough(measure, lambda one: one.quiet, 1 if chosen.quick else TRIES)
    bare = found.collections[BARE]
    added = {name: found.collections[name] - bare for name in (OURS, PYTHON)}
    rows = [
        *([name, f"{share:.4%}", round(share * 1e6), None] for name, share in found.shares.items()),
        *([name, None, None, round(ns)] for name, ns in found.collections.items()),
    ]
    bounds = [
        Bound("a sampler, share of a core", found.shares[SAMPLER], MOST_OF_A_CORE, ""),
        Bound("a callback, × one in Python", added[OURS] / added[PYTHON], MOST_OF_PYTHON, ""),
    ]
    control = (
        f"samplers {found.samplers:.2f} (band {SAMPLES_BAND[0]} to {SAMPLES_BAND[1]}), "
        f"collections {found.blocks:.3f} (band {BLOCKS_BAND[0]} to {BLOCKS_BAND[1]})"
    )
    facts = [
        f"rlprof's callback adds {added[OURS]:.0f} ns to a collection, one in Python "
        f"{added[PYTHON]:.0f} ns.",
        f"A sample takes {found.bytes:.0f} bytes in the file.",
    ]
    heads = ["what", "of a core", "CPU µs per s", "ns per collection"]
    report = Report("background", heads, rows, bounds, control, found.quiet, facts)
    return verdict(report, chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.partition("\n")[0])))
