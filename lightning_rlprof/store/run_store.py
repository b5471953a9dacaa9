"""Query the tables of a run, or of many traces at once, by read-only SQL; Parquet caches them."""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from lightning_rlprof.analysis.device.kernel_names import kernel_names
from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.run_directory import mode_made_of
from lightning_rlprof.store.cache import Cache, find_cache, make, sources
from lightning_rlprof.store.column_meanings import meaning
from lightning_rlprof.store.duckdb_tables import VISIBLE, attach, quoted, sql_columns
from lightning_rlprof.store.parquet import files_of, first_of, read_abouts, source_of
from lightning_rlprof.store.sql import (
    DEFAULT_LIMITS,
    Attach,
    Limits,
    answer,
    listing,
    named,
    text_literal,
    write_answer,
)
from lightning_rlprof.tables.spans import CORE
from lightning_rlprof.tables.table import Column, Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from lightning_rlprof.tables.spans import Spans

_FILE = "its file"
KERNELS = "kernels"
"""The table whose view in SQL also has `KERNEL_NAMES`."""

KERNEL_NAMES = ("short_name", "class")
"""Columns that follow from the full name of a kernel."""


# These tables are of the whole run; other tables are read from the traces of its parts.
_WHOLE = (*CORE, "clocks")
Facts = Mapping[str, Any]
_Answer = TypeVar("_Answer")


class Part(NamedTuple):
    """One trace of several.

    Attributes:
        cache: Of it, with all its tables.
        rank: Whose it is; None where it is of several.
        later_ns: How far its axis begins behind that of all.
    """

    cache: Cache
    rank: int | None
    later_ns: int


class Source(NamedTuple):
    """A table that can be asked.

    Attributes:
        files: Those that hold it.
        note: What must be known of its rows.
        attach: Makes it a view of its name.
    """

    files: list[Path]
    note: str
    attach: Attach


def in_memory(table: Table) -> Source | str:
    """Return a table that was read, or why it has no data."""
    if table.abstained is not None:
        return table.abstained
    return Source([], table.note, partial(attach, table=table))


def joined_table(name: str, parts: Sequence[Part]) -> Source | str:
    """Return the table of all parts that have it, or the reason for missing data.

    Its rows are on one axis, each with its rank. Columns are in the order of the first file that
    has them.

    Args:
        name: Of the table.
        parts: All tables that they have are whole.

    Raises:
        TraceError: A file cannot be read.
    """
    there = {part.cache.file(name): part for part in parts if name in part.cache.tables}
    abouts = read_abouts([*there]) if there else {}
    told = {path: about for path, about in abouts.items() if about["abstained"] is None}
    remarks: dict[str, None] = {}
    for path, about in abouts.items():
        text, rank = about["abstained"] or about["note"], there[path].rank
        if text:
            remarks[text if rank is None else f"rank {rank}: {text}"] = None
    note = first_of([*remarks])
    if not told:
        return note or "no trace contains it"
    columns = {
        column.name: column.kind == "time"
        for about in told.values()
        for column in sql_columns(
            Column(each["name"], each["kind"], each["unit"]) for each in about["columns"]
        )
    }
    files = {file: there[path] for path in told for file in files_of(path)}
    return Source([*files], note, partial(_attach_joined, name=name, files=files, columns=columns))


def _attach_joined(
    connection: "DuckDBPyConnection",
    name: str,
    files: Mapping[Path, Part],
    columns: Mapping[str, bool],
) -> None:
    """Make a view of files, given the part of each; columns say whether they are times."""
    ranks = [-1 if part.rank is None else part.rank for part in files.values()]
    about = {
        "file": np.array([*map(str, files)], dtype=object),
        "rank": np.array(ranks),
        "later": np.array([part.later_ns for part in files.values()], dtype=np.int64),
    }
    parts = f"{name} parts"
    connection.register(parts, about)
    picks = [] if "rank" in columns else ["nullif(p.rank, -1) AS rank"]
    for column, is_time in columns.items():
        own = quoted(column)
        value = "coalesce(d.rank, nullif(p.rank, -1))" if column == "rank" else f"d.{own}"
        picks.append(f"{value}{' + p.later' * is_time} AS {own}")
    options = f"union_by_name = true, filename = {text_literal(_FILE)}"
    connection.execute(
        f"CREATE TEMP VIEW {quoted(name)} AS SELECT {', '.join(picks)} "
        f"FROM read_parquet({source_of(files)}, {options}) d "
        f"JOIN {quoted(parts)} p ON d.{quoted(_FILE)} = p.file"
    )


def _attach_files(connection: "DuckDBPyConnection", name: str, files: Sequence[Path]) -> None:
    select = f"SELECT {VISIBLE} FROM read_parquet({source_of(files)})"
    connection.execute(f"CREATE VIEW {quoted(name)} AS {select}")


def _name_kernels(connection: "DuckDBPyConnection") -> None:
    """Add the short name and the class of each kernel to the view of kernels."""
    unnamed, texts = f"{KERNELS} unnamed", f"{KERNELS} names"
    connection.execute(f"ALTER VIEW {KERNELS} RENAME TO {quoted(unnamed)}")
    found = connection.execute(f"SELECT DISTINCT name FROM {quoted(unnamed)}").fetchall()
    names = sorted(name for (name,) in found if name is not None)
    rows = [(name, *own) for name, own in zip(names, kernel_names(names), strict=True)]
    rows.append(("", "", ""))  # DuckDB needs a text to know the type of a column.
    cells = (np.array(own, object) for own in zip(*rows, strict=True))
    connection.register(texts, dict(zip(("name", *KERNEL_NAMES), cells, strict=True)))
    picks = ", ".join(f"n.{column}" for column in KERNEL_NAMES)
    connection.execute(
        f"CREATE TEMP VIEW {KERNELS} AS SELECT k.*, {picks} "
        f"FROM {quoted(unnamed)} k LEFT JOIN {quoted(texts)} n ON k.name = n.name"
    )


def ask(
    query: str,
    names: Iterable[str],
    read: Callable[[str], Source | str],
    rows: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Table:
    """Return what one SELECT says of the tables of a run; see `lightning_rlprof.store.sql.answer`.

    Args:
        query: One SELECT.
        names: Of all tables.
        read: Returns a table that the query names, or why it has no data.
        rows: Most rows.
        limits: Of memory and time.

    Raises:
        TraceError: The query is wrong or would do more than read, or names a table of which
            the run knows nothing; the text is one line.
    """
    tables = _Tables(query, names, read)
    found = tables.ask(partial(answer, rows=rows, limits=limits))
    notes = (found.note, *(each.note for each in tables.sources.values()))
    return replace(found, note="; ".join(filter(None, notes)))


class _Tables:
    """The tables that a query names, and why some of them have no data."""

    def __init__(
        self, query: str, names: Iterable[str], read: Callable[[str], Source | str]
    ) -> None:
        self._names = [*dict.fromkeys(names)]
        self._query = listing(query, self._names)
        found = {name: read(name) for name in named(query, self._names)}
        self.sources = {name: each for name, each in found.items() if isinstance(each, Source)}
        self._without = {name: each for name, each in found.items() if isinstance(each, str)}

    def ask(self, call: Callable[[str, Attach, list[Path]], _Answer]) -> _Answer:
        """Return what is answered, given the query, what makes the tables, and their files."""
        files = [file for source in self.sources.values() for file in source.files]
        try:
            return call(self._query, self._attach, files)
        except TraceError as error:
            raise self._explained(error) from error

    def _attach(self, connection: "DuckDBPyConnection") -> None:
        for source in self.sources.values():
            source.attach(connection)
        if KERNELS in self.sources:
            _name_kernels(connection)

    def _explained(self, error: TraceError) -> TraceError:
        """Say why a table abstained that was not found, else which tables there are."""
        found = re.search(r"Table with name (\w+)", str(error))
        if found is None:
            return error
        if found[1].lower() in self._without:
            return TraceError(f"table {found[1]} has no data: {self._without[found[1].lower()]}")
        # DuckDB suggests only tables that are open.
        text, _, _ = str(error).partition(" Did you mean")
        return TraceError(f"{text} (there are: {', '.join(self._names)})")


class Store:
    """A run on disk as tables; reads the run itself only where no cache of it is good.

    Args:
        path: What to read, as `lightning_rlprof.load` takes it.
        read: Reads it, that is `lightning_rlprof.load`.
        parts: Says of which traces with caches of their own it was put together, given the facts of
            the whole: their tables are then asked where they lie.

    Raises:
        TraceError: It cannot be read.

    Example::

        >>> from lightning_rlprof import load
        >>> store = Store("profiler_data/run", load)         # doctest: +SKIP
        >>> store.sql("select name, sum(duration_ns) as total_ns from spans group by name")
        ... # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | Path,
        read: "Callable[[Path], Spans]",
        parts: "Callable[[Facts], Sequence[Part]] | None" = None,
    ) -> None:
        self.path = Path(path)
        self._read = read
        self._spans: Spans | None = None
        self._made_of = sources(self.path)
        self._cache = find_cache(self.path, self._made_of) or self._made()
        self._parts = parts(self._cache.facts() or {}) if parts else ()

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of all tables; those of device tools are made when a query names them."""
        return self._cache.tables

    def sql(self, query: str, rows: int | None = None, limits: Limits = DEFAULT_LIMITS) -> Table:
        """Return what one SELECT says; raises TraceError as `ask`."""
        return ask(query, self.tables, self._source, rows, limits)

    def describe(self) -> Table:
        """Return every column of every table that has data: its unit, and what it means."""
        return described({name: self._columns(name) for name in self.tables})

    def _columns(self, name: str) -> list[str]:
        try:
            return [str(row[0]) for row in self.sql(f'describe "{name}"').rows]
        except TraceError:  # The table has no data.
            return []

    def write(self, query: str, output: Path, limits: Limits = DEFAULT_LIMITS) -> int:
        """Write what one SELECT says to a .csv or .parquet file; return the number of rows.

        Raises:
            TraceError: As `sql`.
            OSError: The file cannot be written.
        """
        mode = mode_made_of(self.path)
        return _Tables(query, self.tables, self._source).ask(
            lambda select, attach, files: write_answer(select, attach, files, output, limits, mode)
        )

    def _source(self, name: str) -> Source | str:
        if self._parts and name not in _WHOLE:
            return joined_table(name, self._parts)
        if not self._cache.has(name):
            self._add(name)
        path = self._cache.file(name)
        about, files = read_abouts([path])[path], files_of(path)
        if about["abstained"] is not None:
            return str(about["abstained"])
        return Source(files, about["note"], partial(_attach_files, name=name, files=files))

    def _add(self, name: str) -> None:
        table = self._table(name)
        if sources(self.path) == self._made_of:
            with contextlib.suppress(OSError):  # Only other users may be allowed to write there.
                return self._cache.add(table, name)
        # A private cache also works while the run is still growing.
        self._cache = self._made(shared=False)
        try:
            self._cache.add(self._table(name), name)
        except OSError as error:
            text = f"{self._cache.folder}: no room for table {name} ({error.strerror})"
            raise TraceError(text) from error

    def _table(self, name: str) -> Table:
        if self._spans is None:
            self._spans = self._read(self.path)
        return self._spans.table(name)

    def _made(self, *, shared: bool = True) -> Cache:
        before = self._made_of = sources(self.path)
        spans = self._spans = self._read(self.path)
        shared = shared and sources(self.path) == before
        made = find_cache(self.path, before) if shared else None  # Reading may have left a cache.
        return made or make(self.path, before, spans, shared=shared)


def described(columns: Mapping[str, Iterable[str]]) -> Table:
    """Return a row for each column of tables: the table, the column, its unit and its meaning."""
    rows = [
        (table, column, *meaning(table, column)) for table, own in columns.items() for column in own
    ]
    heads = ("table", "column", "unit", "meaning")
    return Table("columns", tuple(Column(head, "text") for head in heads), rows)
