"""The door to a run's tables: made once, kept as Parquet, asked in SQL that can only read."""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.cache import Cache, find, make, sources
from lightning_rlprof.store.columns import attach, quoted
from lightning_rlprof.store.parquet import read_remarks, reads
from lightning_rlprof.store.query import answer, is_users, named, text_literal, write_answer
from lightning_rlprof.store.rows import CORE, core_tables
from lightning_rlprof.table import Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from lightning_rlprof.spans import Spans

__all__ = ["Store", "ask"]

_Answer = TypeVar("_Answer")


class Store:
    """A run on disk as tables; reads the run itself only where no cache of it is good.

    Args:
        path: What to read, as `lightning_rlprof.load` takes it.
        read: Reads it, that is `lightning_rlprof.load`.

    Raises:
        TraceError: It cannot be read.

    Example::

        >>> from lightning_rlprof import load
        >>> store = Store("profiler_data/run", load)         # doctest: +SKIP
        >>> store.sql("select name, sum(duration_ns) as total_ns from spans group by name")
        ... # doctest: +SKIP
    """

    def __init__(self, path: str | Path, read: "Callable[[Path], Spans]") -> None:
        self.path = Path(path)
        self._read = read
        self._spans: Spans | None = None
        self._made_of = sources(self.path)
        self._cache = find(self.path, self._made_of) or self._made()

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of all tables; those of device tools are made when a query names them."""
        return self._cache.tables

    def sql(self, query: str, rows: int | None = None) -> Table:
        """Return what one SELECT says; see `lightning_rlprof.store.query.answer`.

        Raises:
            TraceError: The query is wrong or would do more than read, or names a table of which
                the run knows nothing; the text is one line.
        """
        table = self._asked(query, lambda view, files: answer(query, view, files, rows))
        remarks = (read_remarks(self._cache.file(name)) for name in named(query, self.tables))
        return _noted(table, [each.note for each in remarks if each])

    def write(self, query: str, output: Path) -> int:
        """Write what one SELECT says to a .csv or .parquet file; return the number of rows.

        Raises:
            TraceError: As `sql`.
            OSError: The file cannot be written.
        """
        return self._asked(query, lambda view, files: write_answer(query, view, files, output))

    def _asked(self, query: str, ask: Callable[[Any, list[Path]], _Answer]) -> _Answer:
        """Ask, and once more from a new cache where a file of it turns out to be damaged."""
        for last in (False, True):
            untold = self._ready(query)
            files = {name: self._cache.file(name) for name in self.tables if name not in untold}
            files = {name: file for name, file in files.items() if file.is_file()}
            try:
                return ask(_view(files), list(files.values()))
            except TraceError as error:
                if last or is_users(error) or all(map(reads, files.values())):
                    raise _explained(error, self.tables, untold) from error
            shutil.rmtree(self._cache.folder, ignore_errors=True)
            self._cache = self._made()
        raise AssertionError("the last round returns or raises")

    def _ready(self, query: str) -> dict[str, str]:
        """Make the tables that a query names; return why some of them abstained."""
        untold = {}
        for name in named(query, self.tables):
            if not self._cache.has(name):
                self._add(name)
            remarks = read_remarks(self._cache.file(name))
            if remarks and remarks.abstained is not None:
                untold[name] = remarks.abstained
        return untold

    def _add(self, name: str) -> None:
        table = self._table(name)
        if sources(self.path) != self._made_of:  # the run is still growing: ours alone
            self._cache = self._made(shared=False)
            table = self._table(name)
        try:
            self._cache.add(table, name)
        except OSError as error:
            text = f"{self._cache.folder}: has no room for table {name} ({error.strerror})"
            raise TraceError(text) from error

    def _table(self, name: str) -> Table:
        if self._spans is None:
            self._spans = self._read(self.path)
        return self._spans.table(name)

    def _made(self, *, shared: bool = True) -> Cache:
        before = self._made_of = sources(self.path)
        spans = self._spans = self._read(self.path)
        shared = shared and sources(self.path) == before
        return make(self.path, before, core_tables(spans), spans.tables, shared=shared)


def ask(spans: "Spans", query: str, read: Callable[[str], Table]) -> Table:
    """Return what one SELECT says of a run that is in memory; nothing is written.

    Args:
        spans: The run.
        query: As `Store.sql`.
        read: Returns a table of the run by its name.

    Raises:
        TraceError: As `Store.sql`.
    """
    names = (*CORE, *spans.tables)
    tables = [read(name) for name in named(query, dict.fromkeys(names))]
    untold = {table.name: table.abstained for table in tables if table.abstained is not None}
    told = [table for table in tables if table.abstained is None]

    def view(connection: "DuckDBPyConnection") -> None:
        for table in told:
            attach(connection, table)

    try:
        return _noted(answer(query, view), [table.note for table in told])
    except TraceError as error:
        raise _explained(error, names, untold) from error


def _view(files: Mapping[str, Path]) -> "Callable[[DuckDBPyConnection], None]":
    def view(connection: "DuckDBPyConnection") -> None:
        for name, file in files.items():
            select = f"SELECT * FROM read_parquet({text_literal(file)})"
            connection.execute(f"CREATE VIEW {quoted(name)} AS {select}")

    return view


def _noted(answer: Table, notes: list[str]) -> Table:
    """Say with an answer what must be known of the tables that it comes from."""
    return replace(answer, note="; ".join(filter(None, [answer.note, *notes])))


def _explained(error: TraceError, tables: Iterable[str], untold: Mapping[str, str]) -> TraceError:
    """Say why a table abstained that was not found, else which tables there are."""
    found = re.search(r"Table with name (\w+)", str(error))
    if found is None:
        return error
    if found[1].lower() in untold:
        return TraceError(f"table {found[1]} is not told: {untold[found[1].lower()]}")
    text, _, _ = str(error).partition(" Did you mean")  # which knows only what is open
    return TraceError(f"{text} (there are: {', '.join(tables)})")
