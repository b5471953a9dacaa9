"""Join traces of several ranks into one run: one timeline, one list of warnings, joined tables."""

import collections
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.clocks import is_integer, is_moment
from lightning_rlprof.loaders.rank_names import as_ranges, missing, worker_in_name
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import stated_world_size
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import Coded, end_to_end
from lightning_rlprof.tables.spans import (
    NO_PARENT,
    ByRank,
    Counter,
    RankNote,
    RunWarning,
    Spans,
    Thread,
    is_kept,
    note_of,
)
from lightning_rlprof.tables.table import Column, PackedRows, Table, packed, with_name

# Each rank counts these numbers separately; the values are the columns that contain them.
_NUMBERED = {"id": ("id", "parent", "forward"), "graph": ("graph",)}
_RANK = Column("rank", "count")
_FEW = 8
_ABSENT = "this table was not recorded"
_NO_TIME = "the trace has no recording time: its times start with those of the run"
_PLAIN = ("kind", "step", "id", "parent")


class Piece(NamedTuple):
    """A table of some ranks.

    Attributes:
        ranks: Whose it is.
        later_ns: How far its axis begins behind that of the run.
        read: What reads it, None where these ranks have no such table.
    """

    ranks: tuple[int, ...]
    later_ns: int
    read: Callable[[], Table] | None


class _Part(NamedTuple):
    """What is kept of a piece's table: its ranks, how many rows it has, and its columns by name."""

    ranks: tuple[int, ...]
    rows: int
    columns: dict[str, Any]


def join_tables(name: str, pieces: Sequence[Piece]) -> Table:
    """Read a table of all ranks and put the rows end to end, in the order of the pieces.

    A column that only some pieces have is not known in the others' rows. Where the rows do not tell
    their rank and the piece has one alone, it is that one. Rows that are numbered in their rank, as
    calls are, are numbered on where a rank has several pieces. What cannot be read, abstained or is
    not there is said in the note with its ranks; where all of it is, the joined table abstains.

    Example::

        >>> one = Table("t", (Column("time", "time", "ns"),), [(5,)])
        >>> pieces = [Piece((rank,), rank * 100, lambda: one) for rank in (0, 1)]
        >>> list(join_tables("t", pieces).rows)
        [(0, 5), (1, 105)]
    """
    columns: dict[str, Column] = {}
    parts, note, losses = _read_all(pieces, columns)
    if not parts:
        recorded = any(piece.read is not None for piece in pieces)
        return Table(name, (_RANK,), abstained=note or _ABSENT, recorded=recorded)
    _renumber(parts)
    cells = [
        packed(_concatenate([(part.columns.pop(name, None), part.rows) for part in parts]))
        for name in columns
    ]
    return Table(name, tuple(columns.values()), PackedRows(cells), note, losses=tuple(losses))


def _read_all(
    pieces: Sequence[Piece], heads: dict[str, Column]
) -> tuple[list[_Part], str, list[str]]:
    """Return the tables that there are, what must be known of them all, and what is lost.

    One table is read after the other, so that only their columns stay; the heads get new ones.
    """
    remarks: dict[str, list[int]] = {}
    parts: list[_Part] = []
    losses: list[str] = []
    for piece in pieces:
        table, remark, lost = _read(piece)
        if remark:
            remarks.setdefault(remark, []).extend(piece.ranks)
        if table is not None:
            columns = _columns_on_timeline(piece, table, heads)
            parts.append(_Part(piece.ranks, len(table.rows), columns))
        whose = f"rank {as_ranges(piece.ranks)}"
        losses += [with_name(whose, each) if piece.ranks else each for each in lost]
    there = {rank for part in parts for rank in part.ranks}
    remarks[_ABSENT] = [rank for rank in remarks.get(_ABSENT, ()) if rank not in there]
    return parts, _note_of(remarks), losses


def _read(piece: Piece) -> tuple[Table | None, str, tuple[str, ...]]:
    """Return the table if there is one, what must be known about it, and what is lost."""
    if piece.read is None:
        return None, _ABSENT, ()
    try:
        table = piece.read()
    except TraceError as error:
        return None, str(error), (str(error),)
    if table.abstained is not None:
        return None, table.abstained, table.losses
    return table, table.note, table.losses


def _note_of(remarks: dict[str, list[int]]) -> str:
    texts = [
        f"rank {as_ranges(ranks)}: {text}" if ranks else text
        for text, ranks in remarks.items()
        if ranks or text != _ABSENT
    ]
    more = [f"and {len(texts) - _FEW} more warnings"] if len(texts) > _FEW else []
    return "; ".join([*texts[:_FEW], *more])


def _columns_on_timeline(piece: Piece, table: Table, heads: dict[str, Column]) -> dict[str, Any]:
    """Return one table's columns by name on the axis of the run, and add new ones to the heads."""
    found: dict[str, Any] = {}
    if _RANK.name not in (column.name for column in table.columns) and len(piece.ranks) == 1:
        found[_RANK.name] = np.full(len(table.rows), piece.ranks[0], np.int64)
        heads.setdefault(_RANK.name, _RANK)
    for column, cells in zip(table.columns, table.arrays(), strict=True):
        found[column.name] = packed(cells + piece.later_ns if is_moment(column, cells) else cells)
        heads.setdefault(column.name, column)
    return found


def _renumber(parts: Sequence[_Part]) -> None:
    """Keep the numbers of rows apart where several pieces are of one rank."""
    free: dict[tuple[int, str], int] = {}
    for ranks, _, part in parts:
        for counted, names in _NUMBERED.items() if len(ranks) == 1 else ():
            if is_integer(part.get(counted, ((), ()))):
                by = free.get((ranks[0], counted), 0)
                highest = int(np.ma.filled(part[counted], -1).max(initial=-1))
                free[ranks[0], counted] = by + highest + 1
                for name in names:
                    if by and is_integer(part.get(name, ((), ()))):
                        part[name] = part[name].astype(np.int64) + by


def _concatenate(parts: Sequence[tuple[Any, int]]) -> Any:
    """Put one column of all tables end to end, each with its rows; None where a table lacks it."""
    if any(isinstance(part, tuple) and len(part[1]) for part, _ in parts):
        return end_to_end([_as_texts(*each) for each in parts])
    told = [part for part, _ in parts if part is not None and not isinstance(part, tuple)]
    if not told:
        return np.full(sum(n for _, n in parts), -1, np.int8), []
    kind = np.result_type(*told)
    filled = [
        np.ma.masked_array(np.zeros(n, kind), np.ones(n, bool))
        if part is None or isinstance(part, tuple)
        else part
        for part, n in parts
    ]
    data = np.concatenate([np.ma.getdata(part) for part in filled])
    masks = np.concatenate([np.ma.getmaskarray(part) for part in filled])
    return np.ma.masked_array(data, masks) if masks.any() else data


def _as_texts(part: Any, count: int) -> Coded:
    """Return a column as texts, also where a table has numbers or nothing under that name."""
    if part is None:
        return np.full(count, -1), []
    if isinstance(part, tuple):
        return part
    values, codes = np.unique(np.ma.getdata(part), return_inverse=True)
    return np.where(np.ma.getmaskarray(part), -1, codes), [str(value) for value in values.tolist()]


class _Slice(NamedTuple):
    """The rows of one rank in a part, and how far that lies behind the start of the run."""

    rank: int
    part: Spans
    rows: slice
    later_ns: int


def join(parts: Sequence[Spans], lost: Sequence[RunWarning] = ()) -> Spans:
    """Return traces of different ranks as one run, on an axis that begins with the first of them.

    Each part comes onto the axis by wall clock; one without a recording time begins at zero, with a
    warning. Cycles of one process are one rank, see `is_cycle`. Of other parts that claim the same
    rank the newest stays, and what is left out is a warning of its ranks. Warnings and notes of a
    part with one rank are that rank's. Tables are read and put end to end when they are asked for:
    see `join_tables`.

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
    parts, left = _newest_per_rank(parts)
    lost = [*lost, *left]
    zero = min((part.unix_ns for part in parts if part.unix_ns), default=0)
    later = [part.unix_ns - zero if part.unix_ns else 0 for part in parts]
    slices = sorted(_slices(parts, later), key=lambda each: each.rank)
    headers = {each.rank: each.part.headers[each.rank] for each in slices}
    notes = [note for part, by in zip(parts, later, strict=True) for note in _notes(part, by)]
    statuses: dict[int, str | None] = {}
    for rank, part, *_ in slices:  # A rank with a trace that was cut off did not finish.
        own = part.statuses.get(rank)
        statuses[rank] = own and statuses.get(rank, own)
    names = sorted({name for part in parts for name in part.tables})
    world = stated_world_size(headers.values())
    return Spans(
        # This is the innermost folder that contains all parts.
        Path(os.path.commonpath([part.path.absolute().parent for part in parts])),
        **_columns(slices),
        headers=headers,
        statuses=statuses,
        notes=(*_cycles(slices), *sorted(notes, key=lambda note: note.time_ns)),
        warnings=(
            *lost,
            *missing(world, [*headers, *(each.rank for each in lost)]),
            *(
                RunWarning(rank, _NO_TIME, Code.TIME_UNKNOWN.value)
                for part in parts
                if not part.unix_ns
                for rank in part.ranks
            ),
            *(
                problem
                for part in parts
                for problem in _warnings_of(part)
                if problem.code != Code.TIME_UNKNOWN
            ),
        ),
        unix_ns=zero,
        # Without a cache, reading one rank after the other reads files again.
        tables={
            name: (ByRank if all(is_kept(part) for part in parts) else partial)(
                partial(_join_table, name, parts, later)
            )
            for name in names
        },
    )


def as_one(parts: Sequence[Spans]) -> Spans:
    """Return runs that were recorded apart as one, such as a trainer's and a rollout server's.

    Ranks of each run are numbered behind those of the runs before it; cycles of one process are one
    run. Runs are aligned by the wall clocks of their hosts, which nothing compares.

    Raises:
        ValueError: There are no runs.
    """
    groups: list[list[Spans]] = []
    for part in parts:
        own = next((group for group in groups if all(is_cycle(part, each) for each in group)), None)
        groups.append([part]) if own is None else own.append(part)
    parts = [join(group) if len(group) > 1 else group[0] for group in groups]
    worlds = [stated_world_size(part.headers.values()) for part in parts]
    first = [sum(worlds[:at]) for at in range(len(parts))]
    return join([_behind(part, by, sum(worlds)) for part, by in zip(parts, first, strict=True)])


def _behind(part: Spans, by: int, world: int) -> Spans:
    """Number the ranks of a run from another one on."""

    def moved(rank: int | None) -> int | None:
        return None if rank is None else rank + by

    def table(read: Callable[[], Table]) -> Table:
        found = read()
        names = [column.name for column in found.columns]
        if found.abstained is not None or "rank" not in names:
            return found
        at = names.index("rank")
        rows = [(*row[:at], moved(row[at]), *row[at + 1 :]) for row in found.rows]  # type: ignore[arg-type]
        return replace(found, rows=rows)

    return replace(
        part,
        rank=part.rank + by,
        headers={
            rank + by: replace(header, rank=rank + by, world_size=world)
            for rank, header in part.headers.items()
        },
        threads=tuple(each._replace(rank=each.rank + by) for each in part.threads),
        statuses={rank + by: status for rank, status in part.statuses.items()},
        notes=tuple(note._replace(rank=moved(note.rank)) for note in part.notes),
        warnings=tuple(each._replace(rank=moved(each.rank)) for each in part.warnings),
        wall_off={rank + by: off for rank, off in part.wall_off.items()},
        tables={name: partial(table, read) for name, read in part.tables.items()},
    )


def is_cycle(part: Spans, other: Spans) -> bool:
    """Return whether two traces are of one process, one after the other, and share no step.

    So a profiler writes them that records in cycles: ``schedule(..., repeat=3)``.
    """
    if part.ranks != other.ranks or len(part.ranks) != 1:
        return False
    rank = part.ranks[0]
    (worker, other_worker) = (worker_in_name(each.path.name) for each in (part, other))
    one, two = part.headers[rank], other.headers[rank]
    same_pid = one.pid > 0 and (one.host, one.pid) == (two.host, two.pid)
    if worker != other_worker or not (worker or same_pid):
        return False
    (start, end), (other_start, _) = sorted(map(_recorded, (part, other)))
    steps, other_steps = ({*np.unique(each.step).tolist()} - {0} for each in (part, other))
    return 0 < start < other_start and end <= other_start and steps.isdisjoint(other_steps)


def _recorded(part: Spans) -> tuple[int, int]:
    """Return wall-clock times of the first start and the last end of a trace, 0 if unknown."""
    if not part.unix_ns:
        return 0, 0
    first, last = int(part.start_ns.min(initial=0)), int(part.end_ns.max(initial=0))
    return part.unix_ns + first, part.unix_ns + last


def _cycles(slices: Sequence[_Slice]) -> Iterable[RankNote]:
    """Say of each rank with several traces that they are cycles."""
    counts = collections.Counter(each.rank for each in slices)
    for rank, count in counts.items():
        if count > 1:
            text = f"{count} traces of one process are read as one rank, in order of time"
            yield note_of(rank, Code.CYCLES_JOINED, text, traces=count)


def _newest_per_rank(parts: Sequence[Spans]) -> tuple[list[Spans], list[RunWarning]]:
    """Keep the newest of the parts that claim one rank, by rank; the first of two as old.

    Cycles of one process are all kept.
    """
    taken: dict[int, Spans] = {}
    problems: list[RunWarning] = []
    kept: list[Spans] = []
    for part in sorted(parts, key=lambda part: -part.unix_ns):
        both = sorted(taken.keys() & part.headers.keys())
        if both and not all(is_cycle(part, each) for each in kept if {*both} & {*each.ranks}):
            name, other = part.path.name, taken[both[0]].path.name
            text = f"{name} is left out: its rank is {both[0]}, as in {other}, which is kept"
            lost = [rank for rank in part.ranks if rank not in taken]
            text += f"; so rank {as_ranges(lost)} has no data" if lost else ""
            code = Code.RANK_LEFT_OUT.value
            problems += [RunWarning(rank, text, code) for rank in (lost or both[:1])]
            continue
        taken |= dict.fromkeys(part.headers, part)
        kept.append(part)
    kept.sort(key=lambda part: (part.ranks[:1], part.unix_ns))
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
    free: dict[int, int] = {}  # The ids of a rank's next trace begin behind these.
    for rank, part, rows, later in slices:
        name = np.array(
            [*(names.setdefault(each, len(names)) for each in part.names), -1], np.int64
        )
        own = [threads.setdefault(each, len(threads)) for each in part.threads]
        columns = {each: getattr(part, each)[rows].astype(np.int64) for each in _PLAIN}
        by = free.get(rank, 0)
        free[rank] = by + int(columns["id"].max(initial=0))
        has_parent = columns["parent"] != NO_PARENT
        columns["id"] = columns["id"] + by
        columns["parent"] = np.where(has_parent, columns["parent"] + by, NO_PARENT)
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


def merge(ranks: Sequence[Mapping[str, Counter]], counts: Sequence[int]) -> dict[str, Counter]:
    """Join the counters of ranks; ``counts`` are their numbers of spans.

    Where the types of two ranks differ, the values stay Python numbers.
    """
    starts = [0, *np.cumsum(counts).tolist()]
    merged: dict[str, Counter] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        merged[name] = joined_counter(
            [
                Counter(rank[name].rows + start, rank[name].values)
                for start, rank in zip(starts, ranks, strict=False)
                if name in rank
            ]
        )
    return merged


def joined_counter(parts: Sequence[Counter]) -> Counter:
    """Return a counter of the rows of all parts."""
    types = {values.dtype for _, values in parts}
    kind = types.pop() if len(types) == 1 else np.dtype(object)
    return Counter(
        np.concatenate([rows for rows, _ in parts]),
        np.concatenate([values.astype(kind, copy=False) for _, values in parts]),
    )


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


def _warnings_of(part: Spans) -> list[RunWarning]:
    """Return what a part says of itself, as said by its rank, or by its name if it has several."""
    rank = _only_rank(part)
    whose = f"{part.path.name}: " if rank is None else ""
    return [
        each._replace(rank=rank, text=whose + each.text) if each.rank is None else each
        for each in part.warnings
    ]


def _only_rank(part: Spans) -> int | None:
    return part.ranks[0] if len(part.ranks) == 1 else None


def _join_table(
    name: str, parts: Sequence[Spans], later: Sequence[int], rank: int | None = None
) -> Table:
    pairs = zip(parts, later, strict=True)
    pieces = [
        Piece(part.ranks, by, part.tables.get(name))
        for part, by in pairs
        if rank is None or rank in part.ranks
    ]
    return join_tables(name, pieces)
