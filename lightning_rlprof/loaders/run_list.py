"""The runs of a directory, from the first and last lines of one file each."""

import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import Header
from lightning_rlprof.records.run_directory import rank_files, read_header
from lightning_rlprof.tables.table import Cell, Column, Table

_COLUMNS = (
    Column("run", "text"),
    Column("state", "text"),
    Column("steps", "count"),
    Column("step", "duration", "ns"),
    Column("ranks", "count"),
    Column("started", "text"),
    Column("device", "text"),
    Column("size", "count", "bytes"),
)
_PART = 65_536  # bytes of a file's beginning and end that are looked at
_RUNNING_S = 60  # a file that was written to so recently belongs to a training that runs


def run_list(folder: Path) -> Table:
    """List the runs of a directory, newest first, or the one run that it is.

    ``steps`` and ``step``, the mean time of a step, are those of the lowest rank. ``state`` is
    ``finished``, ``running``, ``truncated``, or how the training was interrupted.

    Raises:
        TraceError: The directory contains no run.
    """
    folder = folder.absolute()
    found = [folder] if rank_files(folder) else sorted(folder.iterdir())
    runs = [entry for entry in found if rank_files(entry)]
    if not runs:
        raise TraceError(f"{folder} contains no run")
    rows = sorted(map(_row, runs), key=lambda row: (row[5] or "", row[0]), reverse=True)
    return Table("runs", _COLUMNS, rows)


class RankEnds(NamedTuple):
    """What the two ends of a rank's file say: numbers of steps, their times, and its status."""

    first: int | None
    last: int | None
    start_ns: int
    end_ns: int
    status: str | None


def _row(run: Path) -> tuple[Cell, ...]:
    files = rank_files(run)
    total = sum(file.stat().st_size for file in files)
    try:
        header = read_header(files[0])
        ends = rank_ends(files[0])
    except (TraceError, OSError) as error:
        return (run.name, f"not readable: {error}", *(None,) * 2, len(files), *(None,) * 2, total)
    steps = None if ends.first is None or ends.last is None else ends.last - ends.first + 1
    took = (ends.end_ns - ends.start_ns) // steps if steps else None
    ranks = len(files)
    state = _state(files[0], ends)
    if ranks < header.world_size and state == "finished":
        state = f"{header.world_size - ranks} of {header.world_size} ranks are missing"
    return (run.name, state, steps, took, ranks, _started(header), header.hardware, total)


def _state(file: Path, ends: RankEnds) -> str:
    if ends.status is not None:
        return ends.status
    age = time.time() - file.stat().st_mtime
    return "running" if age < _RUNNING_S else "truncated"


def _started(header: Header) -> str:
    moment = datetime.fromtimestamp(header.unix_ns / 1e9, timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M}"


def rank_ends(path: Path) -> RankEnds:
    """Read the spans of steps and the end of a file out of its first and last lines."""
    with path.open("rb") as file:
        head = file.read(_PART).split(b"\n")
        file.seek(max(0, path.stat().st_size - _PART), os.SEEK_SET)
        tail = file.read(_PART).split(b"\n")
    steps = [line for line in map(_line, head + tail) if line[:1] == ["span"] and _is_step(line)]
    ended = [str(line[2]) for line in map(_line, tail) if line[:1] == ["end"] and len(line) > 2]
    status = ended[-1] if ended else None
    if not steps:
        return RankEnds(None, None, 0, 0, status)
    first, last = (pick(steps, key=lambda line: line[3]) for pick in (min, max))
    return RankEnds(first[3], last[3], first[4], last[5], status)


def _is_step(line: list[Any]) -> bool:
    return len(line) > 5 and line[2] == "step" and all(type(each) is int for each in line[3:6])


def _line(raw: bytes) -> list[Any]:
    """Return a line as a list; an empty one if it is none, as where it is cut."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return found if isinstance(found, list) else []
