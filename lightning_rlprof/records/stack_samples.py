"""Samples of the training thread's stack: how they are asked for, answered, and kept in a run.

A sample names a function and a line of the training's own code, never text of the source or values
of variables. In a rank's file each is a mark, ``stack: Data.decode train.py:27``. The folder
``watchdog`` has the newest request, and the newest answer of each rank.
"""

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from lightning_rlprof.errors import NOT_JSON, RlprofError
from lightning_rlprof.records.hang_reports import FOLDER
from lightning_rlprof.system.files import asked_mode, read_inside, write_inside

STACK = "stack: "
"""How the name of the mark of a sample begins."""

LONGEST_S = 60.0
"""Most seconds for which stacks are sampled on request."""

_LIBRARY = re.compile(r"site-packages/|dist-packages/|/lib/python3|^<")
_OURS = re.compile(r"/lightning_rlprof/(recording|integrations|system|records)/")
_MOST_BYTES, _MOST_ASKED = 1 << 20, 100_000


@dataclass(frozen=True, slots=True)
class StackRequest:
    """Which ranks are to sample their training thread, and for how long.

    Attributes:
        id: Unique in the run.
        seconds: At most `LONGEST_S`.
        ranks: Of these ranks; None means all.
    """

    id: str
    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]
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
    """Ask the ranks of a run for samples; raises OSError, also if no rank can answer."""
    write_inside(run, stack_request_file(run), msgspec.json.encode(request), asked_mode())


def write_stack_answer(run: Path, rank: int, answer: StackAnswer) -> None:
    """Write what a rank sampled; raises OSError."""
    write_inside(run, stack_answer_file(run, rank), msgspec.json.encode(answer))


def read_stack_request(run: Path, owners: Collection[int]) -> StackRequest:
    """Return the newest request of a run.

    Args:
        run: The run directory.
        owners: The users who may ask, see `lightning_rlprof.system.files.owners_of`.

    Raises:
        OSError: There is none that can be read, or it is of another user.
        RlprofError: It is none, or asks for more than is allowed.
    """
    data = read_inside(run, stack_request_file(run), _MOST_ASKED, owners)
    try:
        return msgspec.json.decode(data, type=StackRequest)
    except NOT_JSON as error:
        raise RlprofError(f"not a valid request for stacks ({error})") from error


def read_stack_answer(run: Path, rank: int) -> StackAnswer | None:
    """Return the newest answer of a rank, None if there is none that can be read."""
    with suppress(OSError, *NOT_JSON):
        data = read_inside(run, stack_answer_file(run, rank), _MOST_BYTES)
        return msgspec.json.decode(data, type=StackAnswer)
    return None
