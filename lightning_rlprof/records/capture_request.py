"""A request to capture a few steps of a training that runs: a file in its run directory."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec

from lightning_rlprof.errors import NOT_JSON, RlprofError
from lightning_rlprof.system.files import asked_mode, read_inside, write_inside

MOST_STEPS = 100
"""Steps that one request may capture."""

_NAME = "capture-request.json"
# A rank looks every 0.5 s, and a request may take as long to reach its file system; the rest is a
# margin.
_AHEAD_NS = 1_200_000_000
_MOST = 100_000  # Bytes; a larger file is not a request of rlprof.

_Name = Annotated[str, msgspec.Meta(max_length=200)]
_Rank = Annotated[int, msgspec.Meta(ge=0)]


class CaptureRequest(msgspec.Struct, frozen=True):
    """Which steps, ranks and stages to capture, and who asked why.

    The limits of these fields are checked where a request is read and where it is written.

    Attributes:
        id: Unique in the run.
        unix_ns: When it was written.
        first_step: The first step to capture. It must lie so far ahead that no rank has begun it.
        steps: How many, at most `MOST_STEPS`.
        ranks: On which ranks; None means all.
        stages: Which stages, one capture each; empty means whole steps.
        why: For people: ``rlprof capture``, or what was unusual.
    """

    id: Annotated[str, msgspec.Meta(max_length=64)]
    unix_ns: int
    first_step: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]
    ranks: Annotated[list[_Rank], msgspec.Meta(max_length=4096)] | None = None
    stages: Annotated[list[_Name], msgspec.Meta(max_length=100)] = []
    why: Annotated[str, msgspec.Meta(max_length=1000)] = ""

    @property
    def last_step(self) -> int:
        """The last step to capture."""
        return self.first_step + self.steps - 1


def steps_ahead(step_ns: float | None) -> int:
    """Return how many steps ahead of the last one a capture must be requested.

    Ranks are a step apart at most if each step has a collective.

    Example::

        >>> steps_ahead(20_000_000), steps_ahead(5_000_000_000), steps_ahead(None)
        (62, 3, 3)
    """
    return 2 + (math.ceil(_AHEAD_NS / step_ns) if step_ns else 1)


def request_file(run: Path) -> Path:
    """Return the path of a run's newest request."""
    return run / _NAME


def write_request(run: Path, request: CaptureRequest) -> None:
    """Put a request where all ranks of the run find it; it takes the place of the last one.

    Raises:
        OSError: The run directory cannot be written.
        RlprofError: The request asks for more than is allowed.
    """
    data = msgspec.json.encode(request)
    decode_request(data)
    write_inside(run, request_file(run), data, asked_mode())


def read_request(run: Path, owners: Collection[int]) -> CaptureRequest:
    """Return the newest request of a run.

    Args:
        run: The run directory.
        owners: The users who may ask, see `lightning_rlprof.system.files.owners_of`.

    Raises:
        OSError: There is none that can be read, or it is of another user.
        RlprofError: It is none, or asks for more than is allowed.
    """
    return decode_request(read_inside(run, request_file(run), _MOST, owners))


def decode_request(data: bytes) -> CaptureRequest:
    """Return a request in JSON, from a file or from the store of the process group.

    Raises:
        RlprofError: It is none, or asks for more than is allowed; the text names the field.
    """
    try:
        if len(data) > _MOST:
            raise ValueError(f"{len(data):,} bytes, at most {_MOST:,} are allowed")
        return msgspec.json.decode(data, type=CaptureRequest)
    except NOT_JSON as error:
        raise RlprofError(f"not a valid capture request ({error})") from error
