"""Pauses of Python's garbage collection, counted per step."""

import gc
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

from lightning_rlprof.records.records import GC_COUNT, GC_PAUSE

LONG_NS = 1_000_000
"""A pause of this length or more becomes a region."""

_MOST_EVENTS = 1 << 17  # two per collection, between two calls of `GcPauses.take`
_MOST_PAUSES = 1 << 12  # long ones between two steps


class Pause(NamedTuple):
    """One collection of `LONG_NS` or more, and the thread that ran it."""

    thread: int
    start_ns: int
    end_ns: int


def clock_in_c(events: "deque[Any]") -> Any:
    """Return a callback for `gc.callbacks` that runs no Python code.

    It appends ``(time, thread)`` when a collection starts, and the time when it stops. Python
    drops an exception that leaves a callback, and the handler of a signal runs in the next Python
    function: a Ctrl-C in a collection would reach such a callback and be lost. This one is made of
    C functions alone, so that the signal reaches the training.

    Python calls ``callback(phase, info)``, that is ``getattr(phases, phase, info)``: it reads the
    property ``start`` or ``stop``, which appends.
    """
    start: Iterator[None] = map(
        events.append, zip(iter(perf_counter_ns, None), iter(get_ident, None), strict=False)
    )
    stop: Iterator[None] = map(events.append, iter(perf_counter_ns, None))
    names = {"start": property(partial(next, start)), "stop": property(partial(next, stop))}
    return partial(getattr, type("Phases", (), names)())


class GcPauses:
    """Count the pauses of this process, of all its threads: each waits for the interpreter."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque(maxlen=_MOST_EVENTS)
        self._callback = clock_in_c(self._events)
        self._lock = threading.Lock()
        self._open: tuple[int, int] | None = None
        self._ns = self._count = 0
        self._long: deque[Pause] = deque(maxlen=_MOST_PAUSES)
        gc.callbacks.append(self._callback)

    def close(self) -> None:
        """Stop listening; further calls do nothing."""
        with suppress(ValueError):
            gc.callbacks.remove(self._callback)

    def add_up(self) -> None:
        """Take in what was appended so far: a step of minutes may have millions of collections."""
        with self._lock:
            for _ in range(len(self._events)):
                event = self._events.popleft()
                if isinstance(event, tuple):
                    self._open = event
                elif self._open is not None:
                    (start, thread), self._open = self._open, None
                    self._ns += event - start
                    self._count += 1
                    if event - start >= LONG_NS:
                        self._long.append(Pause(thread, start, event))

    def take(self) -> tuple[dict[str, int], list[Pause]]:
        """Return ``gc_pause_ns`` and ``gc_collections`` since the last call, and long pauses."""
        self.add_up()
        with self._lock:
            found = {GC_PAUSE: self._ns, GC_COUNT: self._count}, [*self._long]
            self._ns = self._count = 0
            self._long.clear()
        return found
