"""How long a thread was ready to run while every CPU was taken, counted with every step."""

import os
from contextlib import suppress


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
