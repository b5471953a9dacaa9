"""Query the tables of a run, or of many traces at once, by read-only SQL; Parquet caches them."""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.run_directory import mode_made_of
from lightning_rlprof.store.cache import Cache, find_cache, make, sources
from lightning_rlprof.store.column_meanings import meaning
from lightning_rlprof.store.duckdb_tables import VISIBLE, attach, quoted, reader, sql_columns
from lightning_rlprof.store.parquet import About, files_of, read_about, source_of
from lightning_rlprof.store.sql import (
    DEFAULT_LIMITS,
    Limits,
    answer,
    is_damage,
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
_FEW = 8

# Tables of the whole run; others are asked in the traces that it was put together from.
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


class JoinedTable(NamedTuple):
    """What is needed to ask a table of several traces.

    Attributes:
        name: Of the table.
        files: Those that hold it.
        columns: In SQL, in the order of the first file that has them, and whether they are times.
        parts: What each file is a part of.
        note: What the files say beside their rows.
    """

    name: str
    files: list[Path]
    columns: dict[str, bool]
    parts: list[Part]
    note: str

    def attach(self, connection: "DuckDBPyConnection") -> None:
        """Make it a view of its name: all rows on one axis, each with its rank."""
        about = {
            "file": np.array([*map(str, self.files)], dtype=object),
            "rank": np.array([-1 if part.rank is None else part.rank for part in self.parts]),
            "later": np.array([part.later_ns for part in self.parts], dtype=np.int64),
        }
        parts = f"{self.name} parts"
        connection.register(parts, about)
        options = f"union_by_name = true, filename = {text_literal(_FILE)}"
        connection.execute(
            f"CREATE TEMP VIEW {quoted(self.name)} AS SELECT {', '.join(self._picks())} "
            f"FROM read_parquet({source_of(self.files)}, {options}) d "
            f"JOIN {quoted(parts)} p ON d.{quoted(_FILE)} = p.file"
        )

    def _picks(self) -> list[str]:
        own = "nullif(p.rank, -1)"
        picks = [] if "rank" in self.columns else [f"{own} AS rank"]
        for column, is_time in self.columns.items():
            name = quoted(column)
            if is_time:
                picks.append(f"d.{name} + p.later AS {name}")
            else:
                value = f"coalesce(d.rank, {own})" if name == '"rank"' else f"d.{name}"
                picks.append(f"{value} AS {name}")
        return picks


def joined_table(name: str, parts: Sequence[Part]) -> JoinedTable | str:
    """Return the table of all parts that have it, or the reason for missing data.

    Args:
        name: Of the table.
        parts: All tables that they have are whole.

    Raises:
        TraceError: A file cannot be read.
    """
    there = {part.cache.file(name): part for part in parts if name in part.cache.tables}
    abouts = _abouts([*there]) if there else {}
    told = {path: about for path, about in abouts.items() if about["abstained"] is None}
    remarks: dict[str, None] = {}
    for path, about in abouts.items():
        text, rank = about["abstained"] or about["note"], there[path].rank
        if text:
            remarks[text if rank is None else f"rank {rank}: {text}"] = None
    note = "; ".join([*remarks][:_FEW])
    note += f"; and {len(remarks) - _FEW} more warnings" if len(remarks) > _FEW else ""
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
    return JoinedTable(name, [*files], columns, [*files.values()], note)


def _abouts(paths: Sequence[Path]) -> dict[Path, About]:
    """Return what each table tells beside its rows, in the order given."""
    import duckdb

    last = {path: files_of(path)[-1] for path in paths}
    source = source_of(last.values())
    query = f"SELECT file_name, value FROM parquet_kv_metadata({source}) WHERE key = 'rlprof'"
    try:
        with reader() as connection:
            found: dict[str, Any] = dict(connection.execute(query).fetchall())
        return {path: json.loads(found[str(file)]) for path, file in last.items()}
    except (duckdb.Error, ValueError, KeyError) as error:
        text = " ".join(str(error).split())
        raise TraceError(
            f"a cached table cannot be read ({text}); run rlprof ingest to rebuild it"
        ) from error


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
        self._joins = parts
        self._parts = self._joined()

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of all tables; those of device tools are made when a query names them."""
        return self._cache.tables

    def sql(self, query: str, rows: int | None = None, limits: Limits = DEFAULT_LIMITS) -> Table:
        """Return what one SELECT says; see `lightning_rlprof.store.sql.answer`.

        Raises:
            TraceError: The query is wrong or would do more than read, or names a table of which
                the run knows nothing; the text is one line.
        """
        notes: list[str] = []

        def ask(tables: _Told) -> Table:
            notes[:] = [each.note for each in tables.told.values()]
            told = listing(query, self.tables)
            return answer(told, tables.attach, tables.files, rows, limits)

        return _noted(self._ask(query, ask), notes)

    def describe(self) -> Table:
        """Return every column of every table that has data: its unit, and what it means."""
        return described({name: self._columns(name) for name in self.tables})

    def _columns(self, name: str) -> list[str]:
        try:
            return [str(row[0]) for row in self.sql(f'describe "{name}"').rows]
        except TraceError:  # without data
            return []

    def write(self, query: str, output: Path, limits: Limits = DEFAULT_LIMITS) -> int:
        """Write what one SELECT says to a .csv or .parquet file; return the number of rows.

        Raises:
            TraceError: As `sql`.
            OSError: The file cannot be written.
        """
        told = listing(query, self.tables)
        return self._ask(
            query,
            lambda tables: write_answer(
                told, tables.attach, tables.files, output, limits, mode_made_of(self.path)
            ),
        )

    def _joined(self) -> "Sequence[Part]":
        return self._joins(self._cache.facts() or {}) if self._joins else ()

    def _ask(self, query: str, ask: "Callable[[_Told], _Answer]") -> _Answer:
        tables = self._ready(query)
        try:
            return ask(tables)
        except TraceError as error:
            if is_damage(error):
                hint = f"if the cache is corrupt, delete {self._cache.folder.parent}"
                raise TraceError(f"{error}; {hint}, and rlprof rebuilds it") from error.__cause__
            raise _explained(error, self.tables, tables.without_data) from error.__cause__

    def _ready(self, query: str) -> "_Told":
        """Make the tables that a query names; keep why some of them abstained."""
        tables = _Told({}, {})
        asked = named(query, self.tables)
        wanted = [(part.cache, name) for part in self._parts for name in {*asked} - {*_WHOLE}]
        if not all(cache.has(name) for cache, name in wanted if name in cache.tables):
            self._parts = self._joined()  # a part was deleted: it may be there again, or is read
        for name in self.tables:
            joined = self._parts and name not in _WHOLE
            if name in asked:
                found = joined_table(name, self._parts) if joined else self._single(name)
                if isinstance(found, str):
                    tables.without_data[name] = found
                else:
                    tables.told[name] = found
            elif not joined and self._cache.has(name):
                tables.told[name] = _Single(name, files_of(self._cache.file(name)), "")
        return tables

    def _single(self, name: str) -> "_Single | str":
        if not self._cache.has(name):
            self._add(name)
        about = read_about(self._cache.file(name)) or {"note": "", "abstained": None}
        if about["abstained"] is not None:
            return str(about["abstained"])
        return _Single(name, files_of(self._cache.file(name)), about["note"])

    def _add(self, name: str) -> None:
        table = self._table(name)
        if sources(self.path) == self._made_of:
            with contextlib.suppress(OSError):  # a place that only others may write
                return self._cache.add(table, name)
        self._cache = self._made(shared=False)  # ours alone, also where the run is still growing
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
        made = find_cache(self.path, before) if shared else None  # reading may have left one
        return made or make(self.path, before, spans, shared=shared)


def ask(
    spans: "Spans", query: str, read: Callable[[str], Table], limits: Limits = DEFAULT_LIMITS
) -> Table:
    """Return what one SELECT says of a run that is in memory; nothing is written.

    Args:
        spans: The run.
        query: As `Store.sql`.
        read: Returns a table of the run by its name.
        limits: Of memory and time.

    Raises:
        TraceError: As `Store.sql`.
    """
    names = (*CORE, *spans.tables)
    tables = [read(name) for name in named(query, dict.fromkeys(names))]
    without_data = {table.name: table.abstained for table in tables if table.abstained is not None}
    told = [table for table in tables if table.abstained is None]

    def view(connection: "DuckDBPyConnection") -> None:
        for table in told:
            attach(connection, table)

    try:
        found = answer(listing(query, names), view, limits=limits)
        return _noted(found, [table.note for table in told])
    except TraceError as error:
        raise _explained(error, names, without_data) from error


def described(columns: Mapping[str, Iterable[str]]) -> Table:
    """Return a row for each column of tables: the table, the column, its unit and its meaning."""
    rows = [
        (table, column, *meaning(table, column)) for table, own in columns.items() for column in own
    ]
    heads = ("table", "column", "unit", "meaning")
    return Table("columns", tuple(Column(head, "text") for head in heads), rows)


class _Single(NamedTuple):
    """A table of the run's own cache, and what it says beside its rows."""

    name: str
    files: list[Path]
    note: str

    def attach(self, connection: "DuckDBPyConnection") -> None:
        """Make it a view of its name."""
        select = f"SELECT {VISIBLE} FROM read_parquet({source_of(self.files)})"
        connection.execute(f"CREATE VIEW {quoted(self.name)} AS {select}")


class _Told(NamedTuple):
    """The tables that can be asked, and why others cannot."""

    told: "dict[str, _Single | JoinedTable]"
    without_data: dict[str, str]

    @property
    def files(self) -> list[Path]:
        """All files that are read."""
        return [file for table in self.told.values() for file in table.files]

    def attach(self, connection: "DuckDBPyConnection") -> None:
        """Make each a view."""
        for table in self.told.values():
            table.attach(connection)


def _noted(answer: Table, notes: list[str]) -> Table:
    """Say with an answer what must be known of the tables that it comes from."""
    return replace(answer, note="; ".join(filter(None, [answer.note, *notes])))


def _explained(
    error: TraceError, tables: Iterable[str], without_data: Mapping[str, str]
) -> TraceError:
    """Say why a table abstained that was not found, else which tables there are."""
    found = re.search(r"Table with name (\w+)", str(error))
    if found is None:
        return error
    if found[1].lower() in without_data:
        return TraceError(f"table {found[1]} has no data: {without_data[found[1].lower()]}")
    text, _, _ = str(error).partition(" Did you mean")  # which knows only what is open
    return TraceError(f"{text} (there are: {', '.join(tables)})")
