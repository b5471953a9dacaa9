"""What Linux' /proc tells of the state of processes."""

import os
from contextlib import suppress
from pathlib import Path


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
                found += [int(pid) for pid in (task / "children").read_text().split()]
    return [(pid, *_stat(pid)) for pid in sorted(found)[:most]]


def _stat(pid: int) -> tuple[str, str]:
    """Return name and state; both are empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", ""
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may contain a bracket
    return name, rest.split()[0] if rest.split() else ""
