"""DuckDB for our own files, one per process and purpose: to start it takes as long as to write."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["reader", "writer", "writer_alone"]

# One thread, and no table swapped for another in a join: rows stay in order, and the same table is
# the same bytes.
_WRITER = (
    "threads = 1",
    "memory_limit = '1GB'",
    "disabled_optimizers = 'join_order,build_side_probe_side'",
)


def reader() -> "DuckDBPyConnection":
    """Return a new cursor that reads with all cores."""
    return _database(os.getpid(), ()).cursor()


def writer() -> "DuckDBPyConnection":
    """Return a new cursor that writes with one thread and 1 GB of memory at most."""
    return _database(os.getpid(), _WRITER).cursor()


@contextlib.contextmanager
def writer_alone() -> Iterator["DuckDBPyConnection"]:
    """Yield a cursor as of `writer` when no other database is open, and leave none open.

    An open database keeps the memory that it once needed: tens of megabytes.
    """
    _database.cache_clear()
    try:
        with writer() as connection:
            yield connection
    finally:
        _database.cache_clear()


@functools.lru_cache(maxsize=2)
def _database(_: int, settings: tuple[str, ...]) -> "DuckDBPyConnection":
    """Return the database of a process, not that of the one it was forked from."""
    import duckdb

    connection = duckdb.connect(":memory:")
    for setting in ("temp_directory = ''", *settings):
        connection.execute(f"SET {setting}")
    return connection
