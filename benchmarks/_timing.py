"""Time one span: in a tight loop, once between pieces of work, in two threads, in two tasks."""

import asyncio
import itertools
import random
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from time import perf_counter_ns

from _contenders import Contender, Span
from _measure import fresh

__all__ = ["SPANS_PER_TURN", "Timed", "interleaved"]

SPANS_PER_TURN = 4

# What is timed. Each contender gets its own copies, since the interpreter specialises code objects.


def _loop(span: Span, name: str, number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        with span(name):
            pass
    return perf_counter_ns() - start


def _loop_counted(span: Span, name: str, number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        with span(name, tokens=64):
            pass
    return perf_counter_ns() - start


def _loop_empty(span: Span, name: str, number: int) -> int:
    start = perf_counter_ns()
    for _ in itertools.repeat(None, number):
        pass
    return perf_counter_ns() - start


def _once(span: Span) -> int:
    start = perf_counter_ns()
    with span("actor_update"):
        pass
    return perf_counter_ns() - start


def _once_counted(span: Span) -> int:
    start = perf_counter_ns()
    with span("actor_update", tokens=64):
        pass
    return perf_counter_ns() - start


def _once_empty(span: Span) -> int:
    start = perf_counter_ns()
    return perf_counter_ns() - start


async def _turns(span: Span, name: str, number: int) -> None:
    for _ in itertools.repeat(None, number):
        with span(name):
            await asyncio.sleep(0)


async def _turns_counted(span: Span, name: str, number: int) -> None:
    for _ in itertools.repeat(None, number):
        with span(name, tokens=64):
            await asyncio.sleep(0)


async def _turns_empty(span: Span, name: str, number: int) -> None:
    for _ in itertools.repeat(None, number):
        await asyncio.sleep(0)


class Timed:
    """A contender with its own copies of the timed functions; without one, the empty control."""

    def __init__(self, contender: Contender | None = None) -> None:
        loop, once, turns = _loop, _once, _turns
        if contender is None:
            loop, once, turns = _loop_empty, _once_empty, _turns_empty
        elif contender.counted:
            loop, once, turns = _loop_counted, _once_counted, _turns_counted
        contender = contender or Contender("", nullcontext)
        self.name, self.span, self.drop = contender.name, contender.span, contender.drop
        self._loop, self._once, self._turns = fresh(loop), fresh(once), fresh(turns)

    def warm(self, number: int) -> list[float]:
        """Return nanoseconds per span in a tight loop, the loop included."""
        return [self._loop(self.span, "actor_update", number) / number]

    def cold(self, work: Callable[[], None]) -> list[float]:
        """Return nanoseconds of spans right after pieces of work, two clocks included.

        The first span of a turn does not count: since this contender's last one, others have had
        their turns. In a loop of its own, its last span is one piece of work ago.
        """
        found: list[float] = []
        for _ in range(SPANS_PER_TURN):
            work()
            found.append(self._once(self.span))
        return found[1:]

    def threads(self, number: int) -> list[float]:
        """Return nanoseconds of wall time per span of two threads."""
        gate = threading.Barrier(3)

        def work(name: str) -> None:
            gate.wait()
            self._loop(self.span, name, number)

        workers = [threading.Thread(target=work, args=(f"stage_{one}",)) for one in range(2)]
        for worker in workers:
            worker.start()
        gate.wait()
        start = perf_counter_ns()
        for worker in workers:
            worker.join()
        return [(perf_counter_ns() - start) / (2 * number)]

    def tasks(self, number: int) -> list[float]:
        """Return nanoseconds per span of two tasks that take turns, the turns included."""

        async def both() -> int:
            start = perf_counter_ns()
            names = ("stage_0", "stage_1")
            await asyncio.gather(*(self._turns(self.span, name, number) for name in names))
            return perf_counter_ns() - start

        return [asyncio.run(both()) / (2 * number)]

    def kept(self, number: int) -> float:
        """Return the bytes of memory that a span holds until it is written."""
        self.warm(number)
        self.drop()
        tracemalloc.start()
        try:
            self.warm(number)
            return tracemalloc.get_traced_memory()[0] / number
        finally:
            tracemalloc.stop()
            self.drop()


def interleaved(
    timed: Sequence[Timed], measure: Callable[[Timed], list[float]], repeats: int
) -> dict[str, float]:
    """Return each contender's median less that of the empty control.

    Every repeat measures all of them once, in random order.
    """
    everyone = [*timed, Timed()]
    found: dict[str, list[float]] = {one.name: [] for one in everyone}
    for _ in range(repeats):
        for one in random.sample(everyone, len(everyone)):
            found[one.name] += measure(one)
        for one in timed:
            one.drop()
    medians = {name: median(values) for name, values in found.items()}
    empty = medians.pop("")
    return {name: value - empty for name, value in medians.items()}
