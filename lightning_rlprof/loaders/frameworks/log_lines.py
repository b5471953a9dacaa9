"""What readers of frameworks' logs share: lines of JSON, checked numbers, and a rank's record."""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import (
    FATES,
    FORMAT,
    NO_KNOWN_FATE,
    SAMPLE,
    Header,
    Kind,
    Note,
    Number,
)
from lightning_rlprof.records.run_directory import RankTrace, SampleLine, SpanLine
from lightning_rlprof.system.files import open_file

US, MS, S = 1_000, 1_000_000, 1_000_000_000
"""Nanoseconds of each unit."""

LONGEST = 1 << 24
"""Bytes of a line, or of a pickle's beginning, that are looked at."""

_MOST_NS = 2**60  # 36 years
_FIRST_NS, _LAST_NS = 15 * 10**17, 26 * 10**17  # the years 2017 to 2052, less than 2**60 apart
_MOST = 2**52
_LONGEST_TEXT = 200
_Read = TypeVar("_Read")


def objects(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """Yield the object of each line; None once for each line that is none, or is too long.

    Raises:
        TraceError: The file cannot be read.
    """
    try:
        with open_file(path) as file:
            begins = True
            while part := file.readline(LONGEST):
                if begins and part.strip():
                    yield as_object(part)
                begins = part.endswith(b"\n")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def as_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a text; None for anything else."""
    try:
        found = json.loads(text)
    except NOT_JSON:
        return None
    return found if isinstance(found, dict) else None


def nanoseconds(value: Any, unit: int) -> int | None:
    """Return a time in nanoseconds; None for what is not a number, or out of range.

    Example::

        >>> nanoseconds(1.5, S), nanoseconds(float("nan"), S), nanoseconds("1", S)
        (1500000000, None, None)
    """
    found = exact(value, unit)
    return found if found is not None and abs(found) < _MOST_NS else None


def wall_clock(value: Any) -> int | None:
    """Return a time of today in nanoseconds, from seconds; None for what can't be one.

    One that is far away would put all others out of range.
    """
    found = exact(value, S)
    return found if found is not None and _FIRST_NS < found < _LAST_NS else None


def exact(value: Any, unit: int) -> int | None:
    """Return a time in nanoseconds, up to the year 2116; None for what isn't a number."""
    if not is_number(value) or not abs(value) < 2**62 // unit:
        return None
    full, rest = divmod(value, 1)  # a float of today's date in nanoseconds is 256 ns coarse
    found: int = int(full) * unit + round(rest * unit)
    return found


def is_number(value: Any) -> bool:
    """Tell whether a value is a number that is finite and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def whole(value: object) -> int | None:
    """Return a number that counts something; None for anything else."""
    return value if type(value) is int and 0 <= value < _MOST else None


def is_name(value: object) -> bool:
    """Tell whether a value can name a task or a sample."""
    return isinstance(value, str) or (type(value) is int and abs(value) < _MOST)


def text(value: object) -> str:
    """Return a value as a text of moderate length that every encoder takes."""
    return str(value)[:_LONGEST_TEXT].encode("utf-8", "replace").decode()


def sample_number(*ids: object) -> int:
    """Return the number of a sample below 2**52, the same in every file that has these ids."""
    digest = blake2b(json.dumps(ids).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") >> 4


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


def fate_mark(fate: str, number: int, at_ns: int, **counters: Number | None) -> SpanLine:
    """Return the mark of what became of a sample; a word that `FATES` lacks counts as unknown."""
    told = {name: value for name, value in counters.items() if value is not None}
    known = fate if fate in FATES else NO_KNOWN_FATE
    return line(f"{SAMPLE} {known}", "mark", at_ns, at_ns, counters={SAMPLE: number, **told})


def step_spans(starts: Mapping[int, int], end_ns: int, thread: int = 0) -> list[SpanLine]:
    """Return steps that follow one another, by their number and start."""
    numbers = sorted(starts, key=starts.__getitem__)
    bounds = [*(starts[number] for number in numbers[1:]), end_ns]
    return [
        line("step", "step", starts[number], max(until, starts[number]), number, thread)
        for number, until in zip(numbers, bounds, strict=True)
    ]


def in_steps(spans: Iterable[SpanLine], starts: Mapping[int, int]) -> list[SpanLine]:
    """Give each span the step in which it starts: the last that began before it, or the first."""
    numbers = sorted(starts, key=starts.__getitem__)
    begins = [starts[number] for number in numbers]
    return [
        replace(each, step=numbers[max(bisect_right(begins, each.start_ns) - 1, 0)])
        for each in spans
    ]


def rollout_stages(spans: Iterable[SpanLine], name: str) -> list[SpanLine]:
    """Return for each step the stage from its first phase to the end of its last one.

    Phases of samples overlap, so that none of them alone is what the process does.
    """
    lives: dict[int, tuple[int, int]] = {}
    for each in spans:
        if each.kind == "region":
            first, last = lives.get(each.step, (each.start_ns, each.end_ns))
            lives[each.step] = min(first, each.start_ns), max(last, each.end_ns)
    return [line(name, "stage", *life, step) for step, life in lives.items()]


def rank_trace(
    path: Path,
    spans: Sequence[SpanLine],
    *,
    rank: int = 0,
    role: str = "actor",
    process: int = 0,
    zero_ns: int = 0,
    samples: Sequence[SampleLine] = (),
    notes: Iterable[tuple[str, str]] = (),
    lost: int = 0,
) -> RankTrace:
    """Return the record of a rank.

    Args:
        path: The log, which the name of the run is taken from.
        spans: Its spans; a ``parent`` is the place of a span in them, from 1.
        rank: Its number.
        role: What the process does.
        process: Its id.
        zero_ns: Wall clock of the record's first moment; 0 if the log has no wall clock.
        samples: What its samples are called.
        notes: Level and text of each.
        lost: Lines that could not be read.
    """
    head = Header(
        FORMAT, path.parent.name, rank, rank + 1, role, "unknown host", process, "unknown",
        zero_ns, 0,
        open_world=True,
    )  # fmt: skip
    lines = [
        SpanLine(
            each.name, each.kind, each.step, each.start_ns - zero_ns, each.end_ns - zero_ns,
            each.thread, at, each.parent, each.counters,
        )
        for at, each in enumerate(spans, start=1)
    ]  # fmt: skip
    return RankTrace(
        path,
        head,
        lines,
        samples=[*samples],
        notes=[Note(0, level, said, Code.OF_LOG.value) for level, said in notes],
        status="finished",
        lost_lines=lost,
    )
