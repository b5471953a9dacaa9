"""DuckDB for our own files, one per process and purpose: to start it takes as long as to write."""

import functools
import os
from typing import TYPE_CHECKING

from lightning_rlprof.heap import give_back

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["close", "reader", "writer"]

# Our files all have one time, by which DuckDB 1.4 tells whether what it holds of one still is true.
# DuckDB 1.5 fails where it samples an array of objects and finds only None: they are texts, always.
_BOTH = (
    "temp_directory = ''",
    "enable_external_file_cache = false",
    "pandas_analyze_sample = 0",
)
# One thread: the same table is the same bytes.
_WRITER = ("threads = 1", "memory_limit = '1GB'")


def reader() -> "DuckDBPyConnection":
    """Return a new cursor that reads with all cores."""
    return _database(os.getpid(), ()).cursor()


def writer() -> "DuckDBPyConnection":
    """Return a new cursor that writes with one thread and 1 GB of memory at most."""
    return _database(os.getpid(), _WRITER).cursor()


def close() -> None:
    """Leave no database open: it keeps the memory that it once needed, tens of megabytes."""
    _database.cache_clear()
    give_back()


@functools.lru_cache(maxsize=2)
def _database(_: int, settings: tuple[str, ...]) -> "DuckDBPyConnection":
    """Return the database of a process, not that of the one it was forked from."""
    import duckdb

    connection = duckdb.connect(":memory:")
    for setting in (*_BOTH, *settings):
        connection.execute(f"SET GLOBAL {setting}")  # cursors have only these
    return connection
