"""One table as one Parquet file, which also holds what SQL does not need to be the same table."""

import json
import os
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.columns import (
    Texts,
    given,
    numbers_of,
    selected,
    texts_in,
    with_nulls,
)
from lightning_rlprof.store.duck import reader, writer, writer_alone
from lightning_rlprof.store.query import text_literal
from lightning_rlprof.table import PartRows, Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = [
    "AT_ONCE",
    "STAMP_NS",
    "About",
    "is_whole",
    "read_about",
    "reads",
    "row_count",
    "write_table",
]

STAMP_NS = 946_684_800 * 10**9
"""Time of change of every file of ours, the year 2000: whoever changes one changes this."""

About = dict[str, Any]
"""What a file tells beside its rows: ``note``, ``abstained``, and of each of the ``columns``
``name``, ``kind``, ``unit``, ``type`` (of an array) and ``texts`` (that its codes stand for)."""

_MAGIC = b"PAR1"

AT_ONCE = 160_000
"""Rows of a table that are written in one go, all in memory; of larger `PartRows` some at a time,
which takes twice as long."""

# Groups of rows are small: DuckDB's own 122,880 hold 40 MB more while they are written. So are
# dictionaries: it begins one for every column, up to a fifth of a group, and drops most of them.
_FORM = "FORMAT parquet, USE_TMP_FILE false, DICTIONARY_SIZE_LIMIT 256, ROW_GROUP_SIZE"
_GROUP, _PART = 1 << 13, 1 << 14


def write_table(table: Table, name: str, path: Path) -> None:
    """Write a table, its bytes on the disk when this returns; the same table is the same bytes.

    Of `PartRows` one part at a time is in memory; their numbers are files beside it meanwhile.

    Raises:
        OSError: The disk does not take it.
        TraceError: It holds what no column can.
    """
    import duckdb

    try:
        _write(table, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.utime(path, ns=(STAMP_NS, STAMP_NS))
    except duckdb.IOException as error:
        raise OSError(None, " ".join(str(error).split()), str(path)) from error
    except duckdb.Error as error:
        text = " ".join(str(error).split())
        raise TraceError(f"table {name} cannot be brought into columns ({text})") from error


def _write(table: Table, path: Path) -> None:
    if isinstance(table.rows, PartRows) and len(table.rows) > AT_ONCE:
        _write_in_parts(table, table.rows, path)
        return
    with writer() as connection:
        select, columns, texts = given(connection, table, codes=True)
        _copy(connection, select, path, _form(_GROUP, _about(table, columns, texts)))


def _write_in_parts(table: Table, rows: PartRows, path: Path) -> None:
    pieces: list[Path] = []
    try:
        with writer_alone() as connection:
            columns, texts, alike = _put_pieces(connection, rows, path, pieces)
        listed = ", ".join(map(text_literal, pieces))
        # To find one type for all, DuckDB opens every piece at once.
        source = f"read_parquet([{listed}], union_by_name = {not alike})"
        with writer_alone() as connection:
            select = selected(connection, table, columns, texts, source, codes=True)
            form = _form(_group_of(len(rows)), _about(table, columns, texts))
            _copy(connection, select, path, form)
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)


def _group_of(rows: int) -> int:
    """Return how many rows a group of a large table has, so that both take little memory.

    What is written at a time takes about 20 bytes a value, what is known of each column of each
    group about 1 kB until all are written: together least where the groups grow with the square
    root of the rows.

    Example::

        >>> [_group_of(rows) for rows in (10**6, 4 * 10**6, 16 * 10**6)]
        [16384, 16384, 32768]
    """
    return max(1 << (rows.bit_length() + 6) // 2, _PART)


def _form(group: int, about: About) -> str:
    told = text_literal(json.dumps(about))
    return f"COMPRESSION snappy, {_FORM} {group}, KV_METADATA {{rlprof: {told}}}"


def _put_pieces(
    connection: "DuckDBPyConnection", rows: PartRows, path: Path, pieces: list[Path]
) -> tuple[list[Any], Texts, bool]:
    """Write the numbers of each part to a file of its own.

    Returns:
        The last columns and all texts, for `selected`, and whether all files have the same types.
    """
    columns: list[Any] = []
    texts: Texts | None = None
    types: set[tuple[str, ...]] = set()
    group = _group_of(len(rows))
    for at, part in enumerate(rows.parts(group)):
        columns, texts = list(part.columns), texts_in(part.columns, texts)
        numbers = numbers_of(columns)
        types.add(tuple(numbers[f"c{at}"].dtype.str for at in range(len(columns))))
        pieces.append(path.with_name(f"{path.name}-{at}"))
        connection.register("numbers", numbers)
        _copy(
            connection,
            f"FROM {with_nulls(numbers, 'numbers')}",
            pieces[-1],
            f"COMPRESSION uncompressed, {_FORM} {group}",
        )
        connection.unregister("numbers")
    return columns, texts or {}, len(types) == 1


def _copy(connection: "DuckDBPyConnection", select: str, path: Path, form: str) -> None:
    connection.execute(f"COPY ({select}) TO {text_literal(path)} ({form})")


def _about(table: Table, cells: Sequence[Any], texts: Texts) -> About:
    columns = [
        {"name": column.name, "kind": column.kind, "unit": column.unit}
        | {"type": None if at in texts else own.dtype.str}
        | {"texts": [*map(str, compress(*texts[at]))] if at in texts else None}
        for at, (column, own) in enumerate(zip(table.columns, cells, strict=True))
    ]
    return {"note": table.note, "abstained": table.abstained, "columns": columns}


def is_whole(path: Path) -> bool:
    """Tell whether a file is as `write_table` left it: neither cut nor changed; opens no DuckDB."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
            file.seek(-len(_MAGIC), os.SEEK_END)
            same = os.fstat(file.fileno()).st_mtime_ns == STAMP_NS
            return same and head == file.read() == _MAGIC and not path.is_symlink()
    except OSError:
        return False


def read_about(path: Path) -> About | None:
    """Return what a table's file tells beside its rows, None where it cannot be read."""
    import duckdb

    try:
        source = text_literal(path)
        query = f"SELECT value FROM parquet_kv_metadata({source}) WHERE key = 'rlprof'"
        with reader() as connection:
            about = json.loads(connection.execute(query).fetchall()[0][0])
        return about if {"note", "abstained", "columns"} <= set(about) else None
    except (duckdb.Error, ValueError, IndexError, TypeError):
        return None


def row_count(paths: list[Path]) -> int:
    """Return how many rows files hold together; raises TraceError where one cannot be read."""
    import duckdb

    listed = ", ".join(map(text_literal, paths))
    try:
        with writer() as connection:
            query = f"SELECT sum(num_rows) FROM parquet_file_metadata([{listed}])"
            return int(connection.execute(query).fetchall()[0][0])
    except duckdb.Error as error:
        raise TraceError(" ".join(str(error).split())) from error


def reads(path: Path) -> bool:
    """Tell whether every page of a table's file can be read; takes as long as reading it."""
    import duckdb

    try:
        with reader() as connection:
            connection.execute(
                f"SELECT bit_xor(hash(COLUMNS(*))) FROM read_parquet({text_literal(path)})"
            ).fetchall()
    except duckdb.Error:
        return False
    return True
