"""Time one NVTX range in a process of its own, for ``ranges.py``; prints JSON.

NVTX looks for a tool once, at the first call of a process: with and without one are two processes.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

import nvtx
from _measure import fresh
from _timing import Timed, interleaved

from lightning_rlprof.recording.recorders.base import Recorder
from lightning_rlprof.recording.recorders.nvtx import NvtxRecorder

__all__ = ["AGAIN", "BARE", "INSIDE", "MOVING", "OURS", "measure"]

OURS, AGAIN = "NvtxRecorder", "NvtxRecorder again (A/A)"
MOVING, INSIDE = "NvtxRecorder, another step each time", "NvtxRecorder, inside an asyncio loop"
BARE = "Domain.push_range and pop_range alone"

_NAME, _COLOR = "actor_update", 0xFFD55E00
# A millisecond at most: with 2,000 ranges a neighbour on the core doubled the dearest medians.
_NUMBER = 1_000

# What is timed. Each contender gets its own copy, since the interpreter specialises code objects.


def _steady(recorder: Recorder, number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        recorder.exit(recorder.enter(_NAME, "stage", 3))
    return perf_counter_ns() - start


def _moving(recorder: Recorder, number: int) -> int:
    start = perf_counter_ns()
    for step in range(number):
        recorder.exit(recorder.enter(_NAME, "stage", step))
    return perf_counter_ns() - start


def _inside(recorder: Recorder, number: int) -> int:
    async def ranges() -> int:
        return _steady(recorder, number)

    return asyncio.run(ranges())


def _bare(domain: Any, attributes: Any, number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        domain.push_range(attributes)
        domain.pop_range()
    return perf_counter_ns() - start


def _annotated(annotate: Any, number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        with annotate(_NAME):
            pass
    return perf_counter_ns() - start


def _annotated_fully(annotate: Any, number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        with annotate(_NAME, color=_COLOR, domain="rlprof", category="stage", payload=3):
            pass
    return perf_counter_ns() - start


class _Ranges(Timed):
    """A contender that marks ranges in one of the ways above."""

    def __init__(self, name: str, loop: Callable[..., int], *arguments: object) -> None:
        super().__init__()
        self.name = name
        self._ranges = partial(fresh(loop), *arguments)

    def warm(self, number: int) -> list[float]:
        """Return nanoseconds per range in a tight loop, the loop included."""
        return [self._ranges(number) / number]


def _contenders() -> list[Timed]:
    domain = nvtx.get_domain("bare")
    bare = domain.get_event_attributes(message=_NAME)
    return [
        _Ranges(OURS, _steady, NvtxRecorder()),
        _Ranges(AGAIN, _steady, NvtxRecorder()),
        _Ranges(MOVING, _moving, NvtxRecorder()),
        _Ranges(INSIDE, _inside, NvtxRecorder()),
        _Ranges("Recorder, which does nothing", _steady, Recorder()),
        _Ranges(BARE, _bare, domain, bare),
        _Ranges("nvtx.annotate(name)", _annotated, nvtx.annotate),
        _Ranges("nvtx.annotate(name, color, domain, …)", _annotated_fully, nvtx.annotate),
    ]


def measure(repeats: int) -> tuple[dict[str, float], float]:
    """Return medians in nanoseconds by contender, and the share of a core that we had."""
    contenders = _contenders()
    interleaved(contenders, lambda one: one.warm(_NUMBER), 3)
    wall, cpu = time.perf_counter(), time.process_time()
    found = interleaved(contenders, lambda one: one.warm(_NUMBER), repeats)
    return found, (time.process_time() - cpu) / (time.perf_counter() - wall)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
