"""One table as one Parquet file, which also holds what SQL does not need to be the same table."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_rlprof.errors import TraceError
from lightning_rlprof.frames import columns_of
from lightning_rlprof.store.columns import attach, quoted, texts_used
from lightning_rlprof.store.duck import reader, writer
from lightning_rlprof.store.query import text_literal
from lightning_rlprof.table import ColumnRows, Table

__all__ = ["STAMP_NS", "About", "is_whole", "read_about", "reads", "row_count", "write_table"]

STAMP_NS = 946_684_800 * 10**9
"""Time of change of every file of ours, the year 2000: whoever changes one changes this."""

About = dict[str, Any]
"""What a file tells beside its rows: ``note``, ``abstained``, and of each of the ``columns``
``name``, ``kind``, ``unit``, ``type`` (of an array) and ``texts`` (that its codes stand for)."""

_MAGIC = b"PAR1"
_ROWS = 8_192  # a group; DuckDB's own 122,880 hold 40 MB more while they are written


def write_table(table: Table, name: str, path: Path) -> None:
    """Write a table, its bytes on the disk when this returns; the same table is the same bytes.

    Raises:
        OSError: The disk does not take it.
        TraceError: It holds what no column can.
    """
    import duckdb

    table = replace(table, rows=ColumnRows(columns_of(table)))
    about = json.dumps(_about(table))
    form = f"FORMAT parquet, COMPRESSION snappy, ROW_GROUP_SIZE {_ROWS}, USE_TMP_FILE false"
    meta = f"KV_METADATA {{rlprof: {text_literal(about)}}}"
    try:
        with writer() as connection:
            attach(connection, table, codes=True)
            connection.execute(
                f"COPY (SELECT * FROM {quoted(table.name)}) "
                f"TO {text_literal(path)} ({form}, {meta})"
            )
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.utime(path, ns=(STAMP_NS, STAMP_NS))
    except duckdb.IOException as error:
        raise OSError(None, " ".join(str(error).split()), str(path)) from error
    except duckdb.Error as error:
        text = " ".join(str(error).split())
        raise TraceError(f"table {name} cannot be brought into columns ({text})") from error


def _about(table: Table) -> About:
    columns = []
    for column, cells in zip(table.columns, columns_of(table), strict=True):
        texts = kind = None
        if isinstance(cells, tuple):
            texts = [str(cells[1][text]) for text in texts_used(*cells)[1]]
        else:
            kind = cells.dtype.str
        columns.append(
            {"name": column.name, "kind": column.kind, "unit": column.unit}
            | {"type": kind, "texts": texts}
        )
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
