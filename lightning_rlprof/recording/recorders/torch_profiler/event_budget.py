"""Estimate the events of a capture by the memory that they take, and know when it is too many.

Run something on the main thread soon, wherever in its Python code that thread is.
"""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from lightning_rlprof.system.memory_trim import give_back

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_PROBE = 1 << 16


def event_bytes(*, with_stack: bool, record_shapes: bool) -> tuple[int, int]:
    """Return the bytes of an event while it is recorded, and those that stopping adds.

    Measured with torch 2.13 on 0.1 to 1.7 million events each, of a small MLP and of a transformer:
    144 to 206 and 1,280 to 1,500 without shapes, 243 to 462 and 2,300 to 3,090 with them.
    """
    if record_shapes:
        return (260, 2_500) if with_stack else (460, 3_000)
    return (150, 1_450) if with_stack else (200, 1_300)


def available_bytes() -> int | None:
    """Return the host memory that this process could still get, in bytes; None off Linux.

    What the host has free or can free, less where a container allows less.
    """
    try:
        lines = _MEMINFO.read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    except (OSError, IndexError, ValueError):
        return None
    host = found.get("MemAvailable")
    container = _container_bytes()
    return container if host is None or (container is not None and container < host) else host


def _container_bytes() -> int | None:
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no container, or "max"
        return None
    cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, limit - used + cached)


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class HostMemory:
    """How much memory this process has handed out to its code, as its allocator counts.

    glibc's own count is exact: its blocks in use, without the big ones (above 128 KiB to 32 MiB)
    that are mapped one by one, as a training's tensors are and events never. The resident memory,
    which is asked where another allocator is loaded, was up to 17 times the events: it holds the
    gaps between blocks, and does not grow while freed memory is used again.
    """

    def __init__(self) -> None:
        self.used: Callable[[], int | None] = _glibc() or _anonymous
        """Asks for the bytes, which takes 0.03 to 2 ms; None off Linux."""

    def release(self, held: list[Any]) -> None:
        """Free what a list holds and give its memory back to the host.

        Freeing a stopped capture takes about 1 µs per event, with the interpreter locked; without
        the second part glibc would keep nearly all of its memory.
        """
        held.clear()
        give_back()


def _glibc() -> Callable[[], int] | None:
    """Return glibc's count, where glibc's allocator is the one in use."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Mallinfo
    before = ask().uordblks
    probe = ctypes.create_string_buffer(_PROBE)
    grown = ask().uordblks - before
    return (lambda: int(ask().uordblks)) if grown >= len(probe) else None


def _anonymous() -> int | None:
    """Return the resident memory of this process that is no file's, in bytes."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            _, resident, shared, *_ = statm.read().split()
            return (int(resident) - int(shared)) * _PAGE
    except (OSError, ValueError):
        return None


class Budget:
    """The events that one capture may still hold, counted from now.

    Args:
        memory: The memory of this process.
        size: What `event_bytes` says.
        max_events: The most events.
        max_bytes: The most bytes that stopping may add; None for no such limit.
    """

    def __init__(
        self, memory: HostMemory, size: tuple[int, int], max_events: int, max_bytes: int | None
    ) -> None:
        self._memory, self._size = memory, size
        self._max_events, self._max_bytes = max_events, max_bytes
        self._start = memory.used()

    def exceeded(self) -> str | None:
        """Say how much too many events there are; None as long as they fit."""
        now = self._memory.used()
        if now is None or self._start is None:
            return None
        recorded, stopped = self._size
        events = max(0, now - self._start) // recorded
        if events > self._max_events:
            return f"about {events:,} events (torch_profiler.max_events={self._max_events:,})"
        if self._max_bytes is not None and events * stopped > self._max_bytes:
            return (
                f"about {events:,} events, whose writing takes {events * stopped / 1e9:.1f} GB of "
                f"host memory (allowed here: {self._max_bytes / 1e9:.1f} GB, "
                "torch_profiler.max_host_bytes)"
            )
        return None


_actions: deque[Callable[[], object]] = deque()


def soon(action: Callable[[], object]) -> None:
    """Have the main thread call ``action`` between two of its instructions; from any thread.

    It is called once, however often it was asked for until then, and not before the main thread is
    back from a call into C. That thread may hold any lock at that moment, as a signal handler's
    may: the action must take none, and must not log. What it raises is dropped. It is not called
    while a debugger or a coverage tool traces that thread: CPython 3.11 then hangs in such calls.
    """
    if action not in _actions:
        _actions.append(action)
    # A signal would do the same, but signals belong to the training.
    ctypes.pythonapi.Py_AddPendingCall(_runner(), None)


@cache
def _runner() -> Callable[..., int]:
    """Return what the interpreter calls; it lives as long as the process, as such calls may."""

    def run(_: object) -> int:
        if sys.gettrace() is not None:
            _actions.clear()
        while _actions:
            with suppress(Exception):
                _actions.popleft()()
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)
