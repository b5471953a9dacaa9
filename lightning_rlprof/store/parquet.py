"""One table as one Parquet file, which also holds the table's note and why it abstained."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.columns import attach, quoted
from lightning_rlprof.store.query import text_literal
from lightning_rlprof.table import Table

__all__ = ["Remarks", "is_whole", "read_remarks", "reads", "write_table"]

_MAGIC = b"PAR1"
# Time of change of every file of ours, the year 2000: whoever changes one afterwards changes this.
_STAMP_NS = 946_684_800 * 10**9
_ROWS = 122_880  # rows a group, DuckDB's own size: bounds what is held while it writes


class Remarks(NamedTuple):
    """What a table says beside its rows."""

    note: str
    abstained: str | None


def write_table(table: Table, name: str, path: Path) -> None:
    """Write a table, its bytes on the disk when this returns.

    Raises:
        OSError: The disk does not take it.
    """
    import duckdb

    about = json.dumps({"note": table.note, "abstained": table.abstained})
    form = f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROWS}, USE_TMP_FILE false"
    meta = f"KV_METADATA {{rlprof: {text_literal(about)}}}"
    try:
        with duckdb.connect(":memory:") as connection:
            connection.execute("SET temp_directory = ''")
            attach(connection, table)
            connection.execute(
                f"COPY (SELECT * FROM {quoted(table.name)}) "
                f"TO {text_literal(path)} ({form}, {meta})"
            )
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.utime(path, ns=(_STAMP_NS, _STAMP_NS))
    except duckdb.IOException as error:
        raise OSError(None, " ".join(str(error).split()), str(path)) from error
    except duckdb.Error as error:
        text = " ".join(str(error).split())
        raise TraceError(f"table {name} cannot be brought into columns ({text})") from error


def is_whole(path: Path) -> bool:
    """Tell whether a file is as `write_table` left it: neither cut nor changed; opens no DuckDB."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
            file.seek(-len(_MAGIC), os.SEEK_END)
            same = os.fstat(file.fileno()).st_mtime_ns == _STAMP_NS
            return same and head == file.read() == _MAGIC and not path.is_symlink()
    except OSError:
        return False


def read_remarks(path: Path) -> Remarks | None:
    """Return what a table's file says beside its rows, None where it cannot be read."""
    import duckdb

    try:
        source = text_literal(path)
        with duckdb.connect(":memory:") as connection:
            found = connection.execute(
                f"SELECT value FROM parquet_kv_metadata({source}) WHERE key = 'rlprof'"
            ).fetchall()
        about = json.loads(found[0][0])
        return Remarks(about["note"], about["abstained"])
    except (duckdb.Error, ValueError, IndexError, KeyError, TypeError):
        return None


def reads(path: Path) -> bool:
    """Tell whether every page of a table's file can be read; takes as long as reading it."""
    import duckdb

    try:
        with duckdb.connect(":memory:") as connection:
            connection.execute(
                f"SELECT bit_xor(hash(COLUMNS(*))) FROM read_parquet({text_literal(path)})"
            ).fetchall()
    except duckdb.Error:
        return False
    return True
