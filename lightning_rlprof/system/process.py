"""Memory that a process has or gives back, memory that the machine has, and states of processes."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.system.files import IS_POSIX

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# Both are parameters in glibc's malloc.h. Arrays of `_LARGEST` bytes go back at once where no freed
# memory has room for them: kept, those of a large run left holes of 60 MB.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST, _NEVER = 1 << 23, (1 << 31) - 1


def check_records(what: str) -> None:
    """Refuse to record on Windows; raises ConfigError."""
    if not IS_POSIX:
        raise ConfigError(
            f"{what} needs Linux, macOS or WSL; on Windows, rlprof reads what was recorded there"
        )


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # Elsewhere, those of the machine are known.


def resident_bytes(process: str = "self") -> int | None:
    """Return the memory of a process that is resident on the host; None off Linux."""
    try:
        with open(f"/proc/{process}/statm", "rb") as statm:
            return pages(statm.read())
    except (OSError, IndexError, ValueError):
        return None


def pages(content: bytes) -> int:
    """Return the second number of a ``statm`` file, in bytes."""
    return int(content.split(b" ", 2)[1]) * _PAGE


def machine_bytes() -> int | None:
    """Return how much memory this machine has; None if the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * _PAGE
    except (AttributeError, OSError, ValueError):
        return None


def limit_bytes() -> int | None:
    """Return how much memory this process may have: that of its container, else of the machine."""
    machine = machine_bytes()
    try:
        container = int(_CGROUP_LIMIT.read_text("ascii"))
    except (OSError, ValueError):  # No container limits it, or its limit is "max".
        return machine
    return container if machine is None else min(container, machine)


def give_back() -> None:
    """Give freed memory back to the machine, which takes a millisecond; nothing without glibc.

    glibc keeps what was freed between blocks that are still in use, and does not do so unasked.
    """
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def keep_freed() -> None:
    """Keep freed memory for what comes next, in a process of our own; nothing without glibc.

    Arrays of some megabytes otherwise come from the machine one by one, page after page: half of
    the page faults of an analysis of a large trace. `give_back` still does what it says.
    """
    if option := _of_glibc("mallopt"):
        option(_MMAP_THRESHOLD, _LARGEST)
        option(_TRIM_THRESHOLD, _NEVER)


def _of_glibc(name: str) -> Any:
    """Return a function of glibc, None elsewhere; Windows has no library without a name."""
    with suppress(TypeError):
        return getattr(ctypes.CDLL(None), name, None)
    return None


def process_state(pid: int) -> str:
    """Return the state of a process: ``R``, ``S``, ``T`` (stopped), ``Z`` and so on, or ``gone``.

    It is empty off Linux.

    Example::

        >>> process_state(2**22 + 1) in ("gone", "")
        True
    """
    if not os.path.isdir("/proc/self"):
        return ""
    return _stat(pid)[1] or "gone"


def child_states(most: int) -> list[tuple[int, str, str]]:
    """Return number, name and state of the children of this process; none off Linux."""
    found = []
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                found += [int(pid) for pid in (task / "children").read_text("ascii").split()]
    return [(pid, *_stat(pid)) for pid in sorted(found)[:most]]


def _stat(pid: int) -> tuple[str, str]:
    """Return name and state; both are empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return "", ""
    name, _, rest = text.partition("(")[2].rpartition(")")  # A name may contain a bracket.
    return name, rest.split()[0] if rest.split() else ""
