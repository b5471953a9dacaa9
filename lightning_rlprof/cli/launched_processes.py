"""What the processes of a program under `rlprof run` are: which record, and which Python cannot."""

import itertools
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_rlprof.integrations.launch import INJECT
from lightning_rlprof.records.records import SIGNS_VARIABLE

_ISOLATED = re.compile(r"-[a-zA-Z]*[IES][a-zA-Z]*")
_MOST = 10_000  # processes that are looked at
_FIRST_S, _LAST_S = 0.1, 10.0  # between two looks, which take some milliseconds in large trainings
_LONGEST = 200  # characters of a text that is shown
_PYTHONPATH = "Extend it in the script: PYTHONPATH=FOLDER:$PYTHONPATH"


class Processes:
    """The processes of one launch, by what they say, and by what Linux says of those that do not.

    Args:
        signs: Folder in which a Python under ``rlprof run`` says what it is, and what it records.
    """

    def __init__(self, signs: Path) -> None:
        self._signs = signs
        self._seen: set[int] = set()
        self._why: list[str] = []  # why a Python did not hear of rlprof
        self._wait_s, self._look_at = _FIRST_S, 0.0

    def look(self, pid: int) -> None:
        """Look at a process and all that descend from it, those that run now, until one records."""
        if time.monotonic() < self._look_at or self._of("run"):
            return
        self._look_at = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LAST_S)
        for each in itertools.islice(_family(pid), _MOST):
            with suppress(OSError):  # it has ended, or is of another user
                if each not in self._seen and _is_python(os.readlink(f"/proc/{each}/exe")):
                    self._seen.add(each)
                    if why := _why_deaf(_words(each, "cmdline"), _variables(each)):
                        self._why.append(why)

    def runs(self) -> list[Path]:
        """Return the run directories that sessions of this host recorded into, by name."""
        lines = {line for path in self._of("run") for line in path.read_text().splitlines()}
        return sorted(map(Path, lines), key=lambda run: run.name)

    def why_nothing(self) -> str:
        """Say which Python could not record, and what to do; empty if each of them could."""
        if self._why:
            return self._why[0]
        if python := min((path.read_text() for path in self._of("without")), default=""):
            install = f"{python} -m pip install lightning-rlprof"
            return f"{python} has no lightning-rlprof. Install it there: {install}"
        if self._of("with"):
            return ""
        return (
            "No Python that it started has loaded rlprof: PYTHONPATH must keep the folder of "
            f"rlprof run. {_PYTHONPATH}. Leave out python -I, -E and -S"
        )

    def _of(self, kind: str) -> list[Path]:
        return sorted(self._signs.glob(f"{kind}-*"))


def is_isolated(command: Sequence[str]) -> bool:
    """Return whether a Python is told to ignore the variables or folders that doors need.

    Example::

        >>> is_isolated(["python3", "-Im", "train"]), is_isolated(["python", "train.py", "-I"])
        (True, False)
    """
    options = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    return _is_python(command[0]) and any(map(_ISOLATED.fullmatch, options))


def _why_deaf(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return why a Python with these arguments and variables does not hear of rlprof."""
    path, name = variables.get("PYTHONPATH", ""), shlex.join(command[:2])[:_LONGEST]
    if is_isolated(command):
        return f"'{name}' ignores PYTHONPATH: leave that option out"
    if str(INJECT) in path.split(os.pathsep):
        return ""
    if SIGNS_VARIABLE not in variables:
        return f"'{name}' was started without the variables of rlprof run. Pass them on"
    given = f"PYTHONPATH={path[:_LONGEST]}" if path else "an empty PYTHONPATH"
    return f"'{name}' was started with {given}, which replaces that of rlprof run. {_PYTHONPATH}"


def _is_python(path: str) -> bool:
    return Path(path).name.startswith(("python", "pypy"))


def _family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants on Linux; elsewhere, the process alone."""
    left = [pid]
    while left:
        pid = left.pop()
        yield pid
        for thread in _entries(f"/proc/{pid}/task"):
            with suppress(OSError):
                left += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _words(pid: int, name: str) -> list[str]:
    data = Path(f"/proc/{pid}/{name}").read_bytes()
    return data.decode("utf-8", "replace").rstrip("\0").split("\0")


def _variables(pid: int) -> dict[str, str]:
    pairs = (word.partition("=") for word in _words(pid, "environ"))
    return {name: value for name, equals, value in pairs if equals}
