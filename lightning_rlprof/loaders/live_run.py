"""How far each rank of a run has come, from the ends of its files: a training may still write."""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from lightning_rlprof.records.run_directory import rank_files
from lightning_rlprof.system.files import open_file

_TAIL = 1 << 18  # bytes; some 250 steps of 40 spans
_LATELY = 20  # steps whose times count

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True)
class RankProgress:
    """How far a rank has come.

    Attributes:
        rank: Its number.
        path: Its file.
        size: Bytes of it that were read.
        last_step: The last step whose end was written; 0 before the first.
        step_ns: Median time of the last steps; None if there is none.
        status: How it ended; None while it records, or if it was killed.
    """

    rank: int
    path: Path
    size: int
    last_step: int
    step_ns: float | None
    status: str | None


def progress(run: Path) -> list[RankProgress]:
    """Return how far the ranks of a run have come, by rank; those that can't be read are left out.

    It reads the last 256 KB of each file.
    """
    found = []
    for path in rank_files(run):
        try:
            found.append(_progress(path))
        except OSError:
            continue
    return found


def _progress(path: Path) -> RankProgress:
    lines, size = new_lines(path, max(path.stat().st_size - _TAIL, 0))
    steps = [step for line in lines if (step := step_of(line)) is not None]
    ends = [line[2] for line in lines if line[0] == "end" and len(line) > 2]
    times = [ns for _, ns in steps[-_LATELY:]]
    return RankProgress(
        rank=int(path.stem[5:]),
        path=path,
        size=size,
        last_step=steps[-1][0] if steps else 0,
        step_ns=median(times) if times else None,
        status=str(ends[-1]) if ends else None,
    )


def new_lines(path: Path, start: int) -> tuple[list[list[object]], int]:
    """Return the complete lines of a rank file from an offset on, and where they end.

    What is not a line of a rank file is left out, as is half a line at the start.

    Raises:
        OSError: The file cannot be read.
    """
    with open_file(path) as file:
        file.seek(start)
        data = file.read(os.fstat(file.fileno()).st_size - start)
    end = data.rfind(b"\n") + 1
    found = []
    for line in data[:end].splitlines():
        try:
            read = _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(read, list) and read:
            found.append(read)
    return found, start + end


def step_of(line: list[object]) -> tuple[int, int] | None:
    """Return the number and the ns of the step whose line this is; None of another line."""
    if line[0] != "span" or len(line) < 6 or line[2] != "step":
        return None
    step, start, end = line[3:6]
    if type(step) is int and type(start) is int and type(end) is int:
        return step, end - start
    return None
