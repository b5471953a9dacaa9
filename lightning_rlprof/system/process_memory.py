"""Memory that a process has, and that the machine has."""

import os
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


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
        container = int(_CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # no container, or "max"
        return machine
    return container if machine is None else min(container, machine)
