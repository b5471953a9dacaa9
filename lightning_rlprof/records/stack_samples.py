"""Samples of the training thread's stack: how they are asked for, answered, and kept in a run.

A sample names a function and a line of the training's own code, never text of the source or values
of variables. In a rank's file each is a mark, ``stack: Data.decode train.py:27``. The folder
``watchdog`` has the newest request, and the newest answer of each rank.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.records.hang_reports import FOLDER
from lightning_rlprof.system.files import open_file, replace_file

STACK = "stack: "
"""How the name of the mark of a sample begins."""

LONGEST_S = 60.0
"""Most seconds for which stacks are sampled on request."""

_LIBRARY = re.compile(r"site-packages/|dist-packages/|/lib/python3|^<")
_OURS = re.compile(r"/lightning_rlprof/(recording|integrations|system|records)/")
_MOST_BYTES = 1 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StackRequest:
    """Which ranks are to sample their training thread, and for how long.

    Attributes:
        id: Unique in the run.
        seconds: At most `LONGEST_S`.
        ranks: Of these ranks; None means all.
    """

    id: str
    seconds: float
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StackAnswer:
    """What a rank sampled, and what was open on its training thread in the end.

    Attributes:
        id: That of the request.
        thread: Identity of the training thread.
        samples: Time on the rank's monotonic clock, function and line of each.
        spans: Name and start of the open stages and regions.
    """

    id: str
    thread: int
    samples: tuple[tuple[int, str], ...] = ()
    spans: tuple[tuple[str, int], ...] = ()


def is_own_code(file: str) -> bool:
    """Return whether a file is of the training's own code, not of a library or of rlprof.

    Example::

        >>> is_own_code("/code/train.py"), is_own_code("/env/lib/python3.11/queue.py")
        (True, False)
    """
    return not _LIBRARY.search(file) and not _OURS.search(file)


def stack_request_file(run: Path) -> Path:
    """Return the path of a run's newest request."""
    return run / FOLDER / "stack-request.json"


def stack_answer_file(run: Path, rank: int) -> Path:
    """Return the path of a rank's newest answer."""
    return run / FOLDER / f"rank-{rank:05d}.stacks"


def write_stack_request(run: Path, request: StackRequest) -> None:
    """Ask the ranks of a run for samples; raises OSError."""
    _write(stack_request_file(run), request)


def write_stack_answer(run: Path, rank: int, answer: StackAnswer) -> None:
    """Write what a rank sampled; raises OSError."""
    _write(stack_answer_file(run, rank), answer)


def read_stack_request(run: Path) -> StackRequest | None:
    """Return the newest request of a run, None if there is none that can be read."""
    request = _read(stack_request_file(run), StackRequest)
    return request if request is not None and 0 < request.seconds <= LONGEST_S else None


def read_stack_answer(run: Path, rank: int) -> StackAnswer | None:
    """Return the newest answer of a rank, None if there is none that can be read."""
    return _read(stack_answer_file(run, rank), StackAnswer)


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    replace_file(path, msgspec.json.encode(content), f"{os.getpid()}")


def _read(path: Path, kind: type[_T]) -> _T | None:
    with suppress(OSError, *NOT_JSON):
        with open_file(path) as file:
            data = file.read(_MOST_BYTES)
        return msgspec.json.decode(data, type=kind)
    return None
