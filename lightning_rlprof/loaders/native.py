"""Rank files of one run, read one by one into the columns of `Spans`."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.axis import anchors
from lightning_rlprof.model import KINDS, Header, Note, Number
from lightning_rlprof.spans import (
    NO_PARENT,
    Counter,
    Int64s,
    Problem,
    RankNote,
    Spans,
    Thread,
)
from lightning_rlprof.tracefile import RankTrace, SpanLine, read_trace

__all__ = ["read_run"]

_KIND = {kind: code for code, kind in enumerate(KINDS)}
# Times below 2**60 (36 years of uptime) and anchors below 2**62 (the year 2116): on the common axis
# every time, and every difference of two, fits into 64 bits.
_LARGEST = 2**60
_LARGEST_ANCHOR = 2**62
_MOST_RANKS = 2**20
_NUMBERS = ("name", "kind", "step", "start_ns", "end_ns", "thread", "id", "parent")


@dataclass
class _Rank:
    """One rank's columns on its own clock, before they share an axis."""

    path: Path
    header: Header
    columns: dict[str, Int64s]
    counters: dict[str, Counter]
    notes: list[Note]
    status: str | None
    problems: list[Problem]


@dataclass
class _Tables:
    """Names and threads met so far, with their codes."""

    names: dict[str, int] = field(default_factory=dict)
    threads: dict[Thread, int] = field(default_factory=dict)


def read_run(
    path: Path, files: list[Path], progress: Callable[[int, int], None] | None = None
) -> Spans:
    """Read the files of one run; a file that cannot be read becomes a problem of the run.

    Args:
        path: What the user asked for, kept in ``Spans.path``.
        files: The rank files.
        progress: Called after each file with how many are read, and how many there are.

    Raises:
        TraceError: None of the files can be read.
    """
    ranks: dict[int, _Rank] = {}
    problems: list[Problem] = []
    broken: list[TraceError] = []
    tables = _Tables()
    for count, file in enumerate(files, start=1):
        try:
            rank = _read_rank(file, tables)
        except TraceError as error:
            broken.append(error)
            problems.append(Problem(_rank_of(file), str(error)))
        else:
            problems += _admit(rank, ranks)
        if progress is not None:
            progress(count, len(files))
    if not ranks:
        raise broken[0]
    ranks = dict(sorted(ranks.items()))
    seen = {*ranks, *(problem.rank for problem in problems if problem.rank is not None)}
    problems += _missing(ranks, seen) if len(files) > 1 or path.is_dir() else []
    return _assemble(path, ranks, tables, problems)


def _admit(rank: _Rank, ranks: dict[int, _Rank]) -> list[Problem]:
    """Add a rank to the run unless its file does not belong there."""
    number, name = rank.header.rank, rank.path.name
    if number in ranks:
        other = ranks[number].path.name
        return [Problem(number, f"{name} is left out: it says rank {number}, as {other} does")]
    first = next(iter(ranks.values()), rank)
    ranks[number] = rank
    if rank.header.run_id != first.header.run_id:
        text = f"{name} belongs to run {rank.header.run_id}, {first.path.name} to another one"
        return [Problem(number, text)]
    return []


def _read_rank(file: Path, tables: _Tables) -> _Rank:
    trace = read_trace(file)
    number = trace.header.rank
    if not 0 <= number < _MOST_RANKS:
        raise TraceError(f"{file}: its header says rank {number}, allowed are 0 to {_MOST_RANKS - 1}")
    if not -_LARGEST < trace.header.unix_ns - trace.header.clock_ns < _LARGEST_ANCHOR:
        raise TraceError(f"{file}: the clocks of its header are out of range")
    lines, problems = _sound(trace)
    columns = _columns(lines, number, trace.threads, tables)
    order = np.lexsort((columns["id"], columns["start_ns"]))
    columns = {name: column[order] for name, column in columns.items()}
    problems += _family(columns, number)
    counters = _counters(lines, order)
    return _Rank(file, trace.header, columns, counters, trace.notes, trace.status, problems)


def _sound(trace: RankTrace) -> tuple[list[SpanLine], list[Problem]]:
    """Return the spans that can be true, and say how many cannot, and how the file ended."""
    rank, lines = trace.header.rank, trace.spans
    small = [line for line in lines if _is_small(line)]
    forward = [line for line in small if line.end_ns >= line.start_ns]
    texts = [
        (trace.lost_lines, "{} of its lines could not be read"),
        (len(lines) - len(small), "{} spans are left out: their numbers are out of range"),
        (len(small) - len(forward), "{} spans are left out: they end before they start"),
        (trace.status is None, "its file just stops: killed, or still running"),
        (trace.status not in (None, "finished"), f"it ended early: {trace.status}"),
    ]
    return forward, [Problem(rank, text.format(int(count))) for count, text in texts if count]


def _is_small(line: SpanLine) -> bool:
    return (
        -_LARGEST < line.start_ns < _LARGEST
        and -_LARGEST < line.end_ns < _LARGEST
        and 0 <= line.id < _LARGEST
        and 0 <= line.step < _LARGEST
        and (line.parent is None or 0 <= line.parent < _LARGEST)
    )


def _columns(
    lines: list[SpanLine], rank: int, names: Mapping[int, str], tables: _Tables
) -> dict[str, Int64s]:
    """Turn one rank's lines into columns; names and threads become codes."""
    codes, threads = tables.names, tables.threads
    for name in dict.fromkeys(line.name for line in lines):
        codes.setdefault(name, len(codes))
    idents: dict[int, int] = {}
    for ident in dict.fromkeys(line.thread for line in lines):
        thread = Thread(rank, ident, names.get(ident, f"thread {ident}"))
        idents[ident] = threads.setdefault(thread, len(threads))
    values: tuple[Iterable[int], ...] = (
        (codes[line.name] for line in lines),
        (_KIND[line.kind] for line in lines),
        (line.step for line in lines),
        (line.start_ns for line in lines),
        (line.end_ns for line in lines),
        (idents[line.thread] for line in lines),
        (line.id for line in lines),
        (NO_PARENT if line.parent is None else line.parent for line in lines),
    )
    count = len(lines)
    return {
        column: np.fromiter(numbers, np.int64, count)
        for column, numbers in zip(_NUMBERS, values, strict=True)
    }


def _family(columns: dict[str, Int64s], rank: int) -> list[Problem]:
    """Say how many spans share an id or name a parent that is not in the file."""
    ids, parents = columns["id"], columns["parent"]
    twins = len(ids) - len(np.unique(ids))
    orphans = int(np.count_nonzero((parents != NO_PARENT) & ~np.isin(parents, ids)))
    texts = [
        (twins, "{} spans have the id of another one"),
        (orphans, "{} spans lost the span around them, which never ended"),
    ]
    return [Problem(rank, text.format(count)) for count, text in texts if count]


def _counters(lines: list[SpanLine], order: Int64s) -> dict[str, Counter]:
    """Collect one rank's counters by name, rows after sorting."""
    found: dict[str, tuple[list[int], list[Number]]] = {}
    for row, line in enumerate(lines):
        for name, value in (line.counters or {}).items():
            if value is None:  # written for a number that is not finite
                continue
            rows, values = found.setdefault(name, ([], []))
            rows.append(row)
            values.append(value)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    result = {}
    for name, (rows, values) in found.items():
        at = place[rows]
        sort = np.argsort(at)
        result[name] = Counter(at[sort], _exact(values)[sort])
    return result


def _exact(values: list[Number]) -> np.ndarray[Any, Any]:
    """Return an array that holds every value as it is: no integer becomes a float."""
    kinds = set(map(type, values))
    if kinds == {int} and max(map(abs, values)) < 2**63:
        return np.array(values, dtype=np.int64)
    return np.array(values, dtype=np.float64 if kinds == {float} else object)


def _missing(ranks: dict[int, _Rank], seen: set[int]) -> list[Problem]:
    """Name the ranks of the world that wrote no file, as ranges."""
    world = max(rank.header.world_size for rank in ranks.values())
    gaps, expected = [], 0
    for number in [*sorted(number for number in seen if number < world), world]:
        if number > expected:
            gaps.append(f"{expected}" if number == expected + 1 else f"{expected}-{number - 1}")
        expected = number + 1
    if not gaps:
        return []
    return [Problem(None, f"of {world} ranks, these wrote no trace: {', '.join(gaps)}")]


def _rank_of(file: Path) -> int | None:
    found = re.fullmatch(r"rank-(\d{1,9})", file.stem)
    return int(found[1]) if found else None


def _assemble(
    path: Path, ranks: dict[int, _Rank], tables: _Tables, problems: list[Problem]
) -> Spans:
    """Put all ranks on one axis that starts with the first event."""
    headers = {number: rank.header for number, rank in ranks.items()}
    anchor, doubts = anchors(headers)
    firsts = [
        int(rank.columns["start_ns"][0]) + anchor[number]
        for number, rank in ranks.items()
        if len(rank.columns["start_ns"])
    ]
    zero = min(firsts, default=min(header.unix_ns for header in headers.values()))
    shifts = {number: anchor[number] - zero for number in ranks}
    for number, rank in ranks.items():
        rank.columns["start_ns"] += shifts[number]
        rank.columns["end_ns"] += shifts[number]
    columns = {
        name: np.concatenate([rank.columns[name] for rank in ranks.values()]) for name in _NUMBERS
    }
    counts = [len(rank.columns["id"]) for rank in ranks.values()]
    columns["rank"] = np.repeat(np.array(list(ranks), dtype=np.int64), counts)
    problems = problems + doubts + [own for rank in ranks.values() for own in rank.problems]
    return Spans(
        path,
        tuple(tables.names),
        tuple(tables.threads),
        **columns,
        counters=_merge(list(ranks.values()), counts),
        headers=headers,
        statuses={number: rank.status for number, rank in ranks.items()},
        notes=tuple(_notes(ranks, shifts)),
        problems=tuple(problems),
        unix_ns=zero,
    )


def _notes(ranks: dict[int, _Rank], shifts: Mapping[int, int]) -> list[RankNote]:
    return sorted(
        (
            RankNote(number, note.clock_ns + shifts[number], note.level, note.text)
            for number, rank in ranks.items()
            for note in rank.notes
        ),
        key=lambda note: note.time_ns,
    )


def _merge(ranks: list[_Rank], counts: list[int]) -> dict[str, Counter]:
    """Join the ranks' counters; where their types differ, the values stay Python numbers."""
    starts = [0, *np.cumsum(counts).tolist()]
    merged: dict[str, Counter] = {}
    for name in sorted({name for rank in ranks for name in rank.counters}):
        own = [
            (start, rank.counters[name])
            for start, rank in zip(starts, ranks, strict=False)
            if name in rank.counters
        ]
        types = {counter.values.dtype for _, counter in own}
        kind = types.pop() if len(types) == 1 else np.dtype(object)
        merged[name] = Counter(
            np.concatenate([counter.rows + start for start, counter in own]),
            np.concatenate([counter.values.astype(kind) for _, counter in own]),
        )
    return merged
