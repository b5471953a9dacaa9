"""Tables of several ranks put end to end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.frames import columns_of
from lightning_rlprof.loaders.kernels import Coded, end_to_end
from lightning_rlprof.loaders.ranks import as_ranges
from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import Column, ColumnRows, Table

__all__ = ["Piece", "changed", "is_moment", "join_tables"]

# Columns of nanoseconds that count from the beginning of the axis; all others are lengths.
_MOMENTS = {"start", "end", "time", "launch", "allocated at", "released at"}
# Columns of numbers that rows have in their rank, and by which others name them.
_IDENTITIES = ("id", "parent", "forward")
_RANK = Column("rank", "count")
_FEW = 8
_ABSENT = "no such table was recorded"


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


def join_tables(name: str, pieces: Sequence[Piece]) -> Table:
    """Read a table of all ranks and put the rows end to end, in the order of the pieces.

    A column that only some pieces have is not known in the others' rows. Where the rows do not tell
    their rank and the piece has one alone, it is that one. Rows that are numbered in their rank, as
    calls are, are numbered on where a rank has several pieces. What cannot be read, abstained or is
    not there is said in the note with its ranks; where all of it is, the joined table abstains.

    Args:
        name: Of the table.
        pieces: Where it comes from.

    Example::

        >>> one = Table("t", (Column("time", "duration", "ns"),), [(5,)])
        >>> pieces = [Piece((rank,), rank * 100, lambda: one) for rank in (0, 1)]
        >>> list(join_tables("t", pieces).rows)
        [(0, 5), (1, 105)]
    """
    tables, note = _read_all(pieces)
    if not tables:
        return Table(name, (_RANK,), abstained=note or _ABSENT)
    columns: dict[str, Column] = {}
    parts = [_columns(piece, table, columns) for piece, table in tables]
    _number_on([(piece.ranks, part) for (piece, _), part in zip(tables, parts, strict=True)])
    counts = [len(table.rows) for _, table in tables]
    cells = [_stacked([part.get(name) for part in parts], counts) for name in columns]
    return Table(name, tuple(columns.values()), ColumnRows(cells), note=note)


def _read_all(pieces: Sequence[Piece]) -> tuple[list[tuple[Piece, Table]], str]:
    """Return the tables that there are, and what must be known about them and the others."""
    remarks: dict[str, list[int]] = {}
    tables: list[tuple[Piece, Table]] = []
    for piece in pieces:
        table, remark = _read(piece)
        if remark:
            remarks.setdefault(remark, []).extend(piece.ranks)
        if table is not None:
            tables.append((piece, table))
    there = {rank for piece, _ in tables for rank in piece.ranks}
    remarks[_ABSENT] = [rank for rank in remarks.get(_ABSENT, ()) if rank not in there]
    return tables, _said(remarks)


def _read(piece: Piece) -> tuple[Table | None, str]:
    """Return the table if there is one, and what must be known about it."""
    if piece.read is None:
        return None, _ABSENT
    try:
        table = piece.read()
    except TraceError as error:
        return None, str(error)
    return (table, table.note) if table.abstained is None else (None, table.abstained)


def _said(remarks: dict[str, list[int]]) -> str:
    texts = [
        f"rank {as_ranges(ranks)}: {text}" if ranks else text
        for text, ranks in remarks.items()
        if ranks or text != _ABSENT
    ]
    more = [f"and {len(texts) - _FEW} more remarks"] if len(texts) > _FEW else []
    return "; ".join([*texts[:_FEW], *more])


def _columns(piece: Piece, table: Table, heads: dict[str, Column]) -> dict[str, Any]:
    """Return one table's columns by name on the axis of the run, and add new ones to the heads."""
    found: dict[str, Any] = {}
    if _RANK.name not in (column.name for column in table.columns) and len(piece.ranks) == 1:
        found[_RANK.name] = np.full(len(table.rows), piece.ranks[0], np.int64)
        heads.setdefault(_RANK.name, _RANK)
    for column, cells in zip(table.columns, columns_of(table), strict=True):
        found[column.name] = cells + piece.later_ns if is_moment(column, cells) else cells
        heads.setdefault(column.name, column)
    return found


def is_moment(column: Column, cells: Any) -> bool:
    """Tell whether a column, as `columns_of` gives its cells, is of times on the run's axis."""
    own = column.name.removesuffix("_ns").replace("_", " ")
    return own in _MOMENTS and column.kind == "duration" and _whole(cells)


def changed(cells: Any, rank: Int64s, changes: Mapping[int, Callable[[Any], Any]]) -> Any:
    """Return a column of which the cells of some ranks are changed.

    Args:
        cells: An array, perhaps masked.
        rank: Of each cell.
        changes: By rank, what makes new cells of its own.
    """
    found, order = cells.copy(), np.argsort(rank, kind="stable")
    ranks, heads = np.unique(rank[order], return_index=True)
    parts = np.split(order, heads[1:])  # of nothing it makes one part
    for each, mine in zip(ranks.tolist(), parts, strict=False):
        if each in changes:
            found[mine] = changes[each](cells[mine])
    return found


def _number_on(parts: Sequence[tuple[tuple[int, ...], dict[str, Any]]]) -> None:
    """Keep the numbers of rows apart where several pieces are of one rank."""
    free: dict[int, int] = {}
    for ranks, part in parts:
        if len(ranks) != 1 or not _whole(part.get("id", ((), ()))):
            continue
        by = free.get(ranks[0], 0)
        free[ranks[0]] = by + int(np.ma.filled(part["id"], -1).max(initial=-1)) + 1
        for name in _IDENTITIES:
            if by and _whole(part.get(name, ((), ()))):
                part[name] = part[name] + by


def _whole(cells: Any) -> bool:
    return not isinstance(cells, tuple) and cells.dtype.kind == "i"


def _stacked(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """Put one column of all tables end to end; None stands for a table that has none."""
    if any(isinstance(part, tuple) and len(part[1]) for part in parts):
        return end_to_end([_texts(part, n) for part, n in zip(parts, counts, strict=True)])
    told = [part for part in parts if part is not None and not isinstance(part, tuple)]
    if not told:
        return np.full(sum(counts), -1), []
    kind = np.result_type(*told)
    filled = [
        np.ma.masked_array(np.zeros(n, kind), np.ones(n, bool))
        if part is None or isinstance(part, tuple)
        else part
        for part, n in zip(parts, counts, strict=True)
    ]
    data = np.concatenate([np.ma.getdata(part) for part in filled])
    masks = np.concatenate([np.ma.getmaskarray(part) for part in filled])
    return np.ma.masked_array(data, masks) if masks.any() else data


def _texts(part: Any, count: int) -> Coded:
    """Return a column as texts, also where a table has numbers or nothing under that name."""
    if part is None:
        return np.full(count, -1), []
    if isinstance(part, tuple):
        return part
    values, codes = np.unique(np.ma.getdata(part), return_inverse=True)
    return np.where(np.ma.getmaskarray(part), -1, codes), [str(value) for value in values.tolist()]
