"""Read tables of an SQLite file as columns of numbers and texts.

Tools write a table only where they recorded something, and columns differ between their versions:
what is absent reads as `UNKNOWN`. The file is never written to, and nothing is written beside it.
"""

import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import TraceError
from lightning_rlprof.system.files import open_file
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, distinct

_MAGIC = b"SQLite format 3\0"
_VERSIONED = re.compile(r"(\w+)_V(\d{1,3})")
_ROWS = 65_536  # Rows in memory as Python objects.
_ASKED = 500  # Numbers in one query; the oldest versions of SQLite allow 999.
# 18 digits fit into 64 bits. SQLite would make 0 of any other text.
_TEXT_CELL = """CASE WHEN "{0}" GLOB '[0-9]*' AND "{0}" NOT GLOB '*[^0-9]*' AND length("{0}") < 20
THEN CAST("{0}" AS INTEGER) ELSE :unknown END"""
_CELL = f"""CASE typeof("{{0}}") WHEN 'integer' THEN "{{0}}" WHEN 'text' THEN {_TEXT_CELL}
ELSE :unknown END"""
_REAL = "CASE WHEN typeof(\"{0}\") IN ('integer', 'real') THEN \"{0}\" END"


def is_sqlite(path: Path) -> bool:
    """Return by its first bytes whether a file is an SQLite database.

    Raises:
        TraceError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


class SqliteTables:
    """Read tables of one file; each call opens the file and closes it again.

    Args:
        path: The SQLite file.
        source: What the user named, where that is another file; errors name it.

    Raises:
        TraceError: The file is not an SQLite database; also from any method if the file turns out
            to be damaged.

    Attributes:
        columns: Names of the columns by table; a table with the number of a version behind its
            name, such as ``NVTX_EVENTS_V2``, also has the name without it.
        problems: What is known to be missing.
    """

    def __init__(self, path: Path, source: Path | None = None) -> None:
        self.source = source or path
        # With immutable, SQLite neither applies a journal beside the file nor makes one.
        self._uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1"
        size, whole = self._sizes(path)
        lost = f"is truncated after {size:,} of {whole:,} bytes" if size < whole else ""
        self.problems = [text for text in (lost, _journal(path)) if text]
        self._views: list[str] = []
        self.columns = self._schema()

    def has(self, table: str, *names: str) -> bool:
        """Tell whether a table is there, with these columns, and has rows."""
        there = self.columns.get(table)
        if there is None or not there.issuperset(names):
            return False
        return bool(self.rows(f'SELECT 1 FROM "{table}" LIMIT 1'))

    def numbers(self, table: str, *names: str, where: str = "") -> dict[str, Int64s]:
        """Return columns of integers, also of those kept as text, `UNKNOWN` where there is none.

        Args:
            table: Name of the table; one that is not there has no rows.
            names: Of the columns, which all come back with one length.
            where: A condition in SQL; only where its columns are sure to be there.
        """
        return self._columns(table, names, _CELL, ":unknown", np.int64, where)

    def reals(self, table: str, *names: str) -> dict[str, npt.NDArray[np.float64]]:
        """Return columns of numbers, NaN where there is none; rows as in `numbers`."""
        return self._columns(table, names, _REAL, "NULL", np.float64)

    def _columns(
        self, table: str, names: tuple[str, ...], cell: str, absent: str, kind: Any, where: str = ""
    ) -> dict[str, Any]:
        there = self.columns.get(table, frozenset())
        cells = [cell.format(name) if name in there else absent for name in names]
        parts = [np.empty((0, len(names)), kind)]
        parts.extend(np.array(rows, kind) for rows in self._batches(table, cells, where))
        return dict(zip(names, np.ascontiguousarray(np.concatenate(parts).T), strict=True))

    def texts(self, table: str, name: str) -> Coded:
        """Return a column of texts, each kept once; rows as in `numbers`."""
        codes: dict[str | None, int] = {None: -1}
        parts = [np.empty(0, dtype=np.int64)]
        there = name in self.columns.get(table, frozenset())
        cell = f'CASE typeof("{name}") WHEN \'text\' THEN "{name}" END' if there else "NULL"
        for rows in self._batches(table, [cell]):
            own = (codes.setdefault(text, len(codes) - 1) for (text,) in rows)
            parts.append(np.fromiter(own, np.int64, len(rows)))
        del codes[None]
        return np.concatenate(parts), [text for text in codes if text is not None]

    def strings(self, ids: Int64s, table: str, name: str = "value") -> dict[int, str]:
        """Look up texts that other columns name by number, in a table with a column ``id``."""
        found: dict[int, str] = {}
        if not {"id", name} <= self.columns.get(table, frozenset()):
            return found
        wanted = np.unique(ids).tolist()
        for first in range(0, len(wanted), _ASKED):
            some = wanted[first : first + _ASKED]
            marks = ", ".join("?" * len(some))
            sql = (
                f'SELECT id, "{name}" FROM "{table}" '
                f"WHERE id IN ({marks}) AND typeof(\"{name}\") = 'text'"
            )
            found.update(self.rows(sql, *some))
        return found

    def decode(self, ids: Int64s, table: str, name: str = "value") -> Coded:
        """Return a column of numbers as the texts that `strings` finds for them."""
        return coded(ids, self.strings(ids, table, name))

    def setting(self, table: str, name: str) -> str | None:
        """Return the text of one name in a table of names and values, None where it is not."""
        if not {"name", "value"} <= self.columns.get(table, frozenset()):
            return None
        sql = f"SELECT value FROM \"{table}\" WHERE name = ? AND typeof(value) = 'text'"
        return next((value for (value,) in self.rows(sql, name)), None)

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Return all rows of a query; for short answers."""
        with self._reading() as database:
            return database.execute(sql, values).fetchall()

    def _batches(
        self, table: str, cells: list[str], where: str = ""
    ) -> Iterator[list[tuple[Any, ...]]]:
        if table not in self.columns:
            return
        sql = f'SELECT {", ".join(cells)} FROM "{table}"' + (f" WHERE {where}" if where else "")
        with self._reading() as database:
            found = database.execute(sql, {"unknown": UNKNOWN})
            while rows := found.fetchmany(_ROWS):
                yield rows

    def _sizes(self, path: Path) -> tuple[int, int]:
        """Return the size of the file, and what it should be as its first page tells."""
        try:
            with open_file(path) as file:
                head, size = file.read(100), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise TraceError(f"{self.source}: cannot be read ({error.strerror})") from error
        if not size:
            raise TraceError(f"{self.source}: the file is empty")
        page, pages = int.from_bytes(head[16:18], "big"), int.from_bytes(head[28:32], "big")
        kept = head[24:28] == head[92:96]  # Older libraries do not update the number of pages.
        return size, pages * (65_536 if page == 1 else page) if kept else size

    def _schema(self) -> Mapping[str, frozenset[str]]:
        # Only plain tables are read: a view or a virtual table may run code from the file.
        names = self.rows("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE TABLE%'")
        info = "SELECT name FROM pragma_table_info(?)"
        found = {
            table: frozenset(column for (column,) in self.rows(info, table)) for (table,) in names
        }
        numbered = {table: _VERSIONED.fullmatch(table) for table in found}
        newest = sorted((int(its[2]), its[1], table) for table, its in numbered.items() if its)
        others = {name: table for _, name, table in newest if name not in found}
        view = 'CREATE TEMP VIEW "{}" AS SELECT * FROM "{}"'
        self._views = [view.format(name, table) for name, table in others.items()]
        return found | {name: found[table] for name, table in others.items()}

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._uri, uri=True)) as database:
                database.text_factory = lambda data: data.decode(errors="replace")
                database.execute("PRAGMA trusted_schema = OFF")
                for view in self._views:
                    database.execute(view)
                yield database
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            reason = "; it ".join([" ".join(str(error).split()), *self.problems])
            raise TraceError(f"{self.source}: cannot be read as SQLite ({reason})") from error


def coded(ids: Int64s, texts: Mapping[int, str]) -> Coded:
    """Return a column of numbers as a column of the texts that they stand for, each kept once."""
    numbers, inverse = np.unique(ids, return_inverse=True)
    places = {number: at for at, number in enumerate(texts)}
    own = np.array([places.get(number, -1) for number in numbers.tolist()], np.int64)
    return distinct(own[inverse], list(texts.values()))


def _journal(path: Path) -> str:
    """Say that rows still stand in a journal beside the file, "" where none do."""
    journal = Path(f"{path}-wal")
    there = journal.is_file() and journal.stat().st_size > 0
    return f"is incomplete: the rows in {journal.name} next to it are not read" if there else ""
