"""An export of Nsight Systems opened: its tables as columns of numbers and texts.

Tables exist only where something was recorded, and their columns differ between versions of nsys:
what is absent reads as `UNKNOWN`. The file is never written to, and nothing is written beside it.
"""

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.kernels import UNKNOWN, Coded
from lightning_rlprof.spans import Int64s

__all__ = ["Export", "coded", "is_sqlite"]

_MAGIC = b"SQLite format 3\0"
# Any of these is in every export from 2019 on; none is in another tool's database.
_SIGNS = {"EXPORT_META_DATA", "META_DATA_EXPORT", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_KERNEL"}
_ROWS = 65_536  # at a time as Python objects
_ASKED = 500  # numbers in one query; SQLite allows 999 in its oldest versions


def is_sqlite(path: Path) -> bool:
    """Tell by its first bytes whether a file is an SQLite database.

    Raises:
        TraceError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


class Export:
    """Read tables of one SQLite export; each call opens the file and closes it again.

    Args:
        path: The SQLite file.
        source: What the user named, where that is another file; errors name it.

    Raises:
        TraceError: The file is no SQLite database, or none that nsys wrote; also from any method
            when the file turns out to be damaged.
    """

    def __init__(self, path: Path, source: Path | None = None) -> None:
        self.source = source or path
        if not is_sqlite(path):
            raise TraceError(f"{self.source}: is no SQLite file, so no export of Nsight Systems")
        uri = quote(os.fsencode(path.absolute()))
        self._uri = f"file:{uri}?mode=ro&immutable=1"
        self._columns = self._schema()
        if not _SIGNS & self._columns.keys():
            found = ", ".join(sorted(self._columns)[:5]) or "none"
            raise TraceError(f"{self.source}: is no export of Nsight Systems (its tables: {found})")

    def has(self, table: str) -> bool:
        """Tell whether a table is there and has rows."""
        return table in self._columns and bool(self.rows(f'SELECT 1 FROM "{table}" LIMIT 1'))

    def numbers(self, table: str, *names: str) -> dict[str, Int64s]:
        """Return columns of integers, all of one length; `UNKNOWN` where there is none."""
        there = self._columns.get(table, frozenset())
        cells = [
            f'CASE typeof("{name}") WHEN \'integer\' THEN "{name}" ELSE ?1 END'
            if name in there
            else "?1"
            for name in names
        ]
        parts = [np.empty((0, len(names)), dtype=np.int64)]
        if table in self._columns:
            with self._reading() as database:
                found = database.execute(f'SELECT {", ".join(cells)} FROM "{table}"', (UNKNOWN,))
                while rows := found.fetchmany(_ROWS):
                    parts.append(np.array(rows, dtype=np.int64))
        columns = np.ascontiguousarray(np.concatenate(parts).T)
        return dict(zip(names, columns, strict=True))

    def reals(self, table: str, name: str) -> npt.NDArray[np.float64]:
        """Return a column of numbers, NaN where there is none; rows as in `numbers`."""
        parts = [np.empty(0)]
        if name in self._columns.get(table, frozenset()):
            cell = f"CASE WHEN typeof(\"{name}\") IN ('integer', 'real') THEN \"{name}\" END"
            with self._reading() as database:
                found = database.execute(f'SELECT {cell} FROM "{table}"')
                while rows := found.fetchmany(_ROWS):
                    parts.append(np.array(rows, dtype=np.float64)[:, 0])
        return np.concatenate(parts)

    def texts(self, table: str, name: str) -> Coded:
        """Return a column of texts, each kept once; rows as in `numbers`."""
        codes: dict[str | None, int] = {None: -1}
        parts = [np.empty(0, dtype=np.int64)]
        if name in self._columns.get(table, frozenset()):
            cell = f'CASE typeof("{name}") WHEN \'text\' THEN "{name}" END'
            with self._reading() as database:
                found = database.execute(f'SELECT {cell} FROM "{table}"')
                while rows := found.fetchmany(_ROWS):
                    own = (codes.setdefault(text, len(codes) - 1) for (text,) in rows)
                    parts.append(np.fromiter(own, np.int64, len(rows)))
        del codes[None]
        return np.concatenate(parts), [text for text in codes if text is not None]

    def strings(self, ids: Int64s) -> dict[int, str]:
        """Look up texts that other columns name by number, in the table StringIds."""
        found: dict[int, str] = {}
        if not {"id", "value"} <= self._columns.get("StringIds", frozenset()):
            return found
        wanted = np.unique(ids).tolist()
        for first in range(0, len(wanted), _ASKED):
            some = wanted[first : first + _ASKED]
            marks = ", ".join("?" * len(some))
            sql = (
                f"SELECT id, value FROM StringIds WHERE id IN ({marks}) AND typeof(value) = 'text'"
            )
            found.update(self.rows(sql, *some))
        return found

    def setting(self, table: str, name: str) -> str | None:
        """Return the text of one name in a table of names and values, None where it is not."""
        if not {"name", "value"} <= self._columns.get(table, frozenset()):
            return None
        sql = f"SELECT value FROM \"{table}\" WHERE name = ? AND typeof(value) = 'text'"
        return next((value for (value,) in self.rows(sql, name)), None)

    def least(self, table: str, group: str, name: str) -> dict[int, int]:
        """Return the smallest integer of a column for each integer in another one."""
        if not {group, name} <= self._columns.get(table, frozenset()):
            return {}
        kinds = f"typeof(\"{group}\") = 'integer' AND typeof(\"{name}\") = 'integer'"
        sql = f'SELECT "{group}", MIN("{name}") FROM "{table}" WHERE {kinds} GROUP BY "{group}"'
        return dict(self.rows(sql))

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Return all rows of a query; for short answers."""
        with self._reading() as database:
            return database.execute(sql, values).fetchall()

    def _schema(self) -> Mapping[str, frozenset[str]]:
        # Plain tables only: a view or a virtual table may be a program of whoever wrote the file.
        names = self.rows("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE TABLE%'")
        info = "SELECT name FROM pragma_table_info(?)"
        return {
            table: frozenset(column for (column,) in self.rows(info, table)) for (table,) in names
        }

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._uri, uri=True)) as database:
                database.text_factory = lambda data: data.decode(errors="replace")
                database.execute("PRAGMA trusted_schema = OFF")
                yield database
        except (sqlite3.Error, OverflowError) as error:
            reason = " ".join(str(error).split())
            raise TraceError(f"{self.source}: cannot be read as SQLite ({reason})") from error


def coded(ids: Int64s, texts: Mapping[int, str]) -> Coded:
    """Return a column of numbers as a column of the texts that they stand for, each kept once."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    codes: dict[str, int] = {}
    own = [
        codes.setdefault(texts[number], len(codes)) if number in texts else -1
        for number in distinct.tolist()
    ]
    return np.array(own, dtype=np.int64)[inverse], list(codes)
