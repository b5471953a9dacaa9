"""Logs of frameworks as runs: steps of verl's file logger.

The beginning of a file tells which of them it is; files of one kind are read together. They may be
compressed with gzip.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.chrome_events import Source
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import (
    FORMAT,
    Header,
    Kind,
    Note,
    Number,
)
from lightning_rlprof.records.run_directory import RankTrace, SpanLine
from lightning_rlprof.system.files import open_file

MAX_LINE_BYTES = 1 << 24
"""Bytes of a line that are looked at."""

TODAY = range(15 * 10**17, 26 * 10**17)
"""From 2017 to 2052: one time that is far away would put all others out of range."""

_MAX_INTEGER = 2**52
_MAX_TEXT = 200
_Read = TypeVar("_Read")
_MAX_STEP_S = 2**25  # A step longer than a year is an error, and would move all later steps.
_STEP = "timing_s/step"
_ONLY_STEPS = (
    "the log has no times of day: its steps follow one another without a gap, and their stages are "
    "left out, as their order is unknown"
)
Log = Literal["verl", "OpenTelemetry"]
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
"""Of files that may be logs."""

_MAX_LINES = 16  # The first lines may be damaged.
_HEAD = 4096
_BUFFER = 1 << 16  # Bytes that are read and decompressed at once.
_OTLP = re.compile(rb'\s*\{\s*"(?:resource(?:Spans|Metrics|Logs)|batches)"\s*:')


class _Stream(io.RawIOBase):
    """A file, decompressed, as what `io` reads.

    Args:
        source: The file.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._source.readinto(memoryview(buffer))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Source, io.BufferedReader]]:
    """Open a log, plain or compressed; raises TraceError and OSError."""
    open_file(path).close()  # A pipe, which may never end, is refused.
    with Source(path) as source:
        yield source, io.BufferedReader(_Stream(source), _BUFFER)


def texts(path: Path, *, by_line: bool) -> Iterator[bytes | None]:
    """Yield the file, or each line that is not empty; None at the end of one that is cut off.

    Of a line that is too long, only the beginning comes.

    Raises:
        TraceError: The file cannot be read.
    """
    try:
        with _opened(path) as (source, file):
            if not by_line:
                yield file.read()
            begins = True
            while part := file.readline(MAX_LINE_BYTES):
                if begins and part.strip():
                    yield part
                begins = part.endswith(b"\n")
            if source.problem is not None:
                yield None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def as_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a text; None for anything else."""
    try:
        found = json.loads(text)
    except NOT_JSON:
        return None
    return found if isinstance(found, dict) else None


def is_number(value: Any) -> bool:
    """Tell whether a value is a number that is finite and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def text(value: object) -> str:
    """Return a value as a text of moderate length that every encoder takes."""
    return str(value)[:_MAX_TEXT].encode("utf-8", "replace").decode()


def read_each(
    paths: Sequence[Path], read: Callable[[Path], _Read]
) -> tuple[list[_Read], list[str]]:
    """Read files; what cannot be read is said.

    Raises:
        TraceError: None of them can be read; the reason of the first.
    """
    found, broken = [], list[TraceError]()
    for path in paths:
        try:
            found.append(read(path))
        except TraceError as error:
            broken.append(error)
    if not found:
        raise broken[0]
    return found, [str(error) for error in broken]


def line(
    name: str,
    kind: Kind,
    start_ns: int,
    end_ns: int,
    step: int = 0,
    thread: int = 0,
    parent: int | None = None,
    counters: Mapping[str, Number] | None = None,
) -> SpanLine:
    """Return a span; `rank_trace` numbers it."""
    told: dict[str, Number | None] | None = None if counters is None else {**counters}
    return SpanLine(name, kind, step, start_ns, end_ns, thread, 0, parent, told)


def rank_trace(
    path: Path,
    spans: Sequence[SpanLine],
    *,
    rank: int = 0,
    role: str = "actor",
    process: int = 0,
    zero_ns: int = 0,
    notes: Iterable[tuple[str, str]] = (),
    lost: int = 0,
    host: str = "unknown host",
    world_size: int | None = None,
) -> RankTrace:
    """Return the record of a rank.

    Args:
        path: The log, which the name of the run is taken from.
        spans: Its spans; a ``parent`` is the place of a span in them, from 1.
        rank: Its number.
        role: What the process does.
        process: Its id.
        zero_ns: Wall clock of the record's first moment; 0 if the log has no wall clock.
        notes: Level and text of each.
        lost: Lines that could not be read.
        host: Its host.
        world_size: Number of ranks; None if those that are read are all.
    """
    head = Header(
        FORMAT, path.parent.name, rank, world_size or rank + 1, role, host, process, "unknown",
        zero_ns, 0,
        open_world=world_size is None,
    )  # fmt: skip
    lines = [
        replace(each, start_ns=each.start_ns - zero_ns, end_ns=each.end_ns - zero_ns, id=at)
        for at, each in enumerate(spans, start=1)
    ]
    return RankTrace(
        path,
        head,
        lines,
        notes=[Note(0, level, said, Code.OF_LOG.value) for level, said in notes],
        status="finished",
        lost_lines=lost,
    )


def read_verl(paths: Sequence[Path]) -> list[RankTrace]:
    """Read the steps in logs of verl's file logger (``trainer.logger=file``).

    Raises:
        TraceError: A file cannot be read, or has no time of a step.
    """
    return [_read_steps(path) for path in paths]


def _read_steps(path: Path) -> RankTrace:
    spans, lost, now = [], 0, 0
    for part in texts(path, by_line=True):
        row = None if part is None else as_object(part)
        if row is None:
            lost += 1
            continue
        step, data = row.get("step"), row.get("data")
        length: Any = data.get(_STEP) if isinstance(data, dict) else None
        if type(step) is int and 0 <= step < _MAX_INTEGER and _is_length(length):
            ended = now + round(length * 1e9)
            spans.append(line("step", "step", now, ended, step))
            now = ended
    if not spans:
        raise TraceError(f"{path}: has no timings of a step")
    return rank_trace(path, spans, notes=[("info", _ONLY_STEPS)], lost=lost)


def _is_length(value: Any) -> bool:
    return is_number(value) and 0 <= value < _MAX_STEP_S


def kind_of_log(path: Path) -> Log | None:
    """Return what kind of log a file is, by its beginning; None for anything else."""
    try:
        with _opened(path) as (_, file):
            head = file.peek(_HEAD)[:_HEAD]
            if _OTLP.match(head):
                return "OpenTelemetry"
            if not path.name.endswith(SUFFIXES[:2]):
                return None
            lines = islice(iter(lambda: file.readline(MAX_LINE_BYTES), b""), _MAX_LINES)
            kinds = (_kind_of_object(each) for each in map(as_object, lines) if each is not None)
            return next((kind for kind in kinds if kind is not None), None)
    except (OSError, TraceError):
        return None


def _kind_of_object(first: Mapping[str, Any]) -> Log | None:
    if isinstance(first.get("resourceSpans"), list):
        return "OpenTelemetry"
    if isinstance(first.get("data"), dict) and "step" in first:
        return "verl"
    return None
