"""What Linux' /proc tells of this process: its memory, that of its children, its wait for CPUs."""

import os
from contextlib import suppress
from time import perf_counter_ns

from lightning_rlprof.system.process import limit_bytes, pages, resident_bytes

_CHILDREN_EVERY_NS = 100_000_000  # each child costs the reading of a file


class HostMemory:
    """Counters of resident memory for the steps of one thread: 2 µs per step.

    The file stays open: opening it at every step takes ten times as long.
    """

    def __init__(self) -> None:
        self._children_at = 0
        self._limit = limit_bytes()
        self._statm = -1
        with suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file."""
        number, self._statm = self._statm, -1
        if number >= 0:
            os.close(number)

    def counters(self) -> dict[str, int]:
        """Return ``host_rss_bytes``, and ``children_rss_bytes`` at most every 100 ms.

        Children are those that the calling thread started, such as DataLoader workers. Both are
        left out where they are unknown. The first call also returns ``host_limit_bytes``: what the
        container allows, else the memory of the machine.
        """
        found, now = self.own(), perf_counter_ns()
        if found and self._limit is not None:
            found["host_limit_bytes"], self._limit = self._limit, None
        if now - self._children_at >= _CHILDREN_EVERY_NS:
            self._children_at = now
            children = [size for pid in _children() if (size := resident_bytes(pid)) is not None]
            found |= {"children_rss_bytes": sum(children)} if children else {}
        return found

    def own(self) -> dict[str, int]:
        """Return ``host_rss_bytes``, nothing where it is unknown."""
        if self._statm < 0:
            return {}
        try:
            return {"host_rss_bytes": pages(os.pread(self._statm, 80, 0))}
        except (OSError, IndexError, ValueError):
            return {}


def _children() -> list[str]:
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []


class CpuWait:
    """The time that the calling thread waits for a CPU, for its steps: 2 µs per step.

    Linux counts it in ``/proc``. The file stays open, as opening it takes ten times as long.
    """

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._before = self._total()

    def close(self) -> None:
        """Close the file."""
        number, self._file = self._file, -1
        if number >= 0:
            os.close(number)

    def counters(self) -> dict[str, int]:
        """Return ``cpu_wait_ns`` since the last call; nothing if it is unknown."""
        before, self._before = self._before, self._total()
        if before is None or self._before is None:
            return {}
        return {"cpu_wait_ns": max(self._before - before, 0)}

    def _total(self) -> int | None:
        try:
            return int(os.pread(self._file, 80, 0).split()[1])
        except (OSError, IndexError, ValueError):  # not Linux, or a kernel without it
            return None
