"""Traces of several ranks as one run: one axis, one row of problems, tables end to end."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.loaders.counters import merge
from lightning_rlprof.loaders.ranks import as_ranges, missing
from lightning_rlprof.loaders.tables import Piece, join_tables
from lightning_rlprof.spans import Counter, Int64s, Problem, RankNote, Spans, Thread
from lightning_rlprof.table import Table

__all__ = ["join"]

_PLAIN = ("kind", "step", "id", "parent")


class _Slice(NamedTuple):
    """The rows of one rank in a part, and how far that lies behind the start of the run."""

    rank: int
    part: Spans
    rows: slice
    later_ns: int


def join(parts: Sequence[Spans], lost: Sequence[Problem] = ()) -> Spans:
    """Return traces of different ranks as one run, on an axis that begins with the first of them.

    Each part comes onto the axis by wall clock; one that does not know when it was recorded begins
    at zero, and that is a problem. Of parts that claim the same rank the newest stays, and what is
    left out is a problem of its ranks. Problems and notes of a part with one rank are that rank's.
    Tables are read and put end to end when they are asked for: see `join_tables`. Nothing of the
    parts is changed, and it does not matter who read them.

    Args:
        parts: At least one; each with one rank or several.
        lost: What to say of traces that could not be read; a rank named here counts as seen.

    Raises:
        ValueError: There are no parts.

    Example::

        >>> from lightning_rlprof.loaders.load import load
        >>> run = join([load("rank-0.json.gz"), load("rank-1.json.gz")])  # doctest: +SKIP
        >>> run.ranks  # doctest: +SKIP
        (0, 1)
    """
    if not parts:
        raise ValueError("join needs the spans of at least one trace")
    parts, left = _one_each(parts)
    return _joined(parts, [*lost, *left])


def _joined(parts: Sequence[Spans], lost: Sequence[Problem]) -> Spans:
    zero = min((part.unix_ns for part in parts if part.unix_ns), default=0)
    later = [part.unix_ns - zero if part.unix_ns else 0 for part in parts]
    slices = sorted(_slices(parts, later), key=lambda each: each.rank)
    headers = {each.rank: each.part.headers[each.rank] for each in slices}
    notes = [note for part, by in zip(parts, later, strict=True) for note in _notes(part, by)]
    world = max((header.world_size for header in headers.values()), default=0)
    return Spans(
        _folder(parts),
        **_columns(slices),
        headers=headers,
        statuses={each.rank: each.part.statuses.get(each.rank) for each in slices},
        notes=tuple(sorted(notes, key=lambda note: note.time_ns)),
        problems=(
            *lost,
            *missing(world, [*headers, *(each.rank for each in lost)]),
            *_undated(parts),
            *(problem for part in parts for problem in _problems(part)),
        ),
        unix_ns=zero,
        tables=_tables(parts, later),
    )


def _one_each(parts: Sequence[Spans]) -> tuple[list[Spans], list[Problem]]:
    """Keep the newest of the parts that claim one rank, by rank; the first of two as old."""
    taken: dict[int, Spans] = {}
    problems: list[Problem] = []
    kept: list[Spans] = []
    for part in sorted(parts, key=lambda part: -part.unix_ns):
        if both := sorted(taken.keys() & part.headers.keys()):
            name, other = part.path.name, taken[both[0]].path.name
            text = f"{name} is left out: it says rank {both[0]}, as {other} does, which is kept"
            lost = [rank for rank in part.ranks if rank not in taken]
            text += f"; so nothing is read of rank {as_ranges(lost)}" if lost else ""
            problems += [Problem(rank, text) for rank in (lost or both[:1])]
            continue
        taken |= dict.fromkeys(part.headers, part)
        kept.append(part)
    kept.sort(key=lambda part: part.ranks[:1])
    return kept, problems


def _slices(parts: Sequence[Spans], later: Sequence[int]) -> Iterable[_Slice]:
    for part, by in zip(parts, later, strict=True):
        edges = np.searchsorted(part.rank, [[rank, rank + 1] for rank in part.ranks])
        for rank, (first, last) in zip(part.ranks, edges.tolist(), strict=True):
            yield _Slice(rank, part, slice(first, last), by)


def _columns(slices: Sequence[_Slice]) -> dict[str, Any]:
    """Put the rows of all ranks end to end, with one list of names and one of threads."""
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    found: dict[str, list[Int64s]] = {}
    for rank, part, rows, later in slices:
        name = np.array(
            [*(names.setdefault(each, len(names)) for each in part.names), -1], np.int64
        )
        own = [threads.setdefault(each, len(threads)) for each in part.threads]
        columns = {each: getattr(part, each)[rows] for each in _PLAIN}
        columns["name"] = name[part.name[rows]]
        columns["thread"] = np.array([*own, -1], np.int64)[part.thread[rows]]
        columns["rank"] = np.full(rows.stop - rows.start, rank, np.int64)
        columns |= {each: getattr(part, each)[rows] + later for each in ("start_ns", "end_ns")}
        for each, column in columns.items():
            found.setdefault(each, []).append(column)
    counts = [each.rows.stop - each.rows.start for each in slices]
    return {
        **{each: np.concatenate(own) for each, own in found.items()},
        "names": tuple(names),
        "threads": tuple(threads),
        "counters": merge([_counters(each) for each in slices], counts),
    }


def _counters(own: _Slice) -> dict[str, Counter]:
    """Return the counters of one rank's rows, counted from its first."""
    found = {}
    for name, (rows, values) in own.part.counters.items():
        first, last = np.searchsorted(rows, [own.rows.start, own.rows.stop]).tolist()
        if last > first:
            found[name] = Counter(rows[first:last] - own.rows.start, values[first:last])
    return found


def _notes(part: Spans, later_ns: int) -> list[RankNote]:
    rank = _only_rank(part)
    return [
        note._replace(
            rank=rank if note.rank is None else note.rank, time_ns=note.time_ns + later_ns
        )
        for note in part.notes
    ]


def _problems(part: Spans) -> list[Problem]:
    """Return what a part says of itself, as said by its rank, or by its name if it has several."""
    rank = _only_rank(part)
    return [
        problem
        if problem.rank is not None
        else Problem(
            rank, problem.text if rank is not None else f"{part.path.name}: {problem.text}"
        )
        for problem in part.problems
    ]


def _only_rank(part: Spans) -> int | None:
    return part.ranks[0] if len(part.ranks) == 1 else None


def _undated(parts: Sequence[Spans]) -> list[Problem]:
    text = "{} does not say when it was recorded: its times begin with those of the run"
    return [
        Problem(rank, text.format(part.path.name))
        for part in parts
        if not part.unix_ns
        for rank in part.ranks
    ]


def _tables(parts: Sequence[Spans], later: Sequence[int]) -> dict[str, Callable[[], Table]]:
    """Return what reads each table that any part has; nothing is read yet."""
    names = sorted({name for part in parts for name in part.tables})
    return {
        name: partial(
            join_tables,
            name,
            [
                Piece(part.ranks, by, part.tables.get(name))
                for part, by in zip(parts, later, strict=True)
            ],
        )
        for name in names
    }


def _folder(parts: Sequence[Spans]) -> Path:
    """Return the innermost folder that holds all parts."""
    return Path(os.path.commonpath([part.path.absolute().parent for part in parts]))
