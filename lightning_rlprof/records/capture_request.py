"""A request to capture a few steps of a training that runs: a file in its run directory."""

import math
from pathlib import Path

import msgspec

from lightning_rlprof.system.files import open_file, replace_file

_NAME = "capture-request.json"
# A rank looks every 0.5 s, and a request may take as long to reach its file system: with some room.
_AHEAD_NS = 1_200_000_000
_MOST = 100_000  # bytes; a longer one is not ours


class CaptureRequest(msgspec.Struct, frozen=True):
    """Which steps, ranks and stages to capture, and who asked why.

    Attributes:
        id: Unique in the run.
        unix_ns: When it was written.
        first_step: The first step to capture. It must lie so far ahead that no rank has begun it.
        steps: How many.
        ranks: On which ranks; None means all.
        stages: Which stages, one capture each; empty means whole steps.
        why: For people: ``rlprof capture``, or what was unusual.
    """

    id: str
    unix_ns: int
    first_step: int
    steps: int
    ranks: list[int] | None = None
    stages: list[str] = []
    why: str = ""

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
    """
    replace_file(request_file(run), msgspec.json.encode(request), request.id)


def read_request(run: Path) -> CaptureRequest | None:
    """Return the newest request of a run, None if there is none that can be read."""
    try:
        with open_file(request_file(run)) as file:
            return decode_request(file.read(_MOST))
    except OSError:
        return None


def decode_request(data: bytes) -> CaptureRequest | None:
    """Return a request in JSON, None if it is none."""
    try:
        request = msgspec.json.decode(data, type=CaptureRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return request if request.first_step > 0 and request.steps > 0 else None
