"""Give tables to DuckDB without copying their numbers, and share one DuckDB per process."""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_rlprof.system.process import give_back
from lightning_rlprof.tables.table import Column, Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

VISIBLE = "COLUMNS('^[^ ]+$')"
"""Selects what a table's file shows: the columns of codes have a space in their name, no other."""

HIDDEN = "code"
"""Begins the name of a column of codes."""


# A thing has one name in all tables, and no name is a word that SQL reserves.
_NAMES = {
    ("kernel", "text"): "name",
    ("operator", "text"): "name",
    ("metric", "text"): "name",
    ("group", "text"): "communicator",
    ("group size", "count"): "communicator_size",
}
_START, _DURATION, _END = "start_ns", "duration_ns", "end_ns"


def sql_name(column: Column) -> str:
    """Return the name of a column in SQL: those of times and durations end in their unit.

    Example::

        >>> sql_name(Column("mean wait", "duration", "ns")), sql_name(Column("end_ns", "time"))
        ('mean_wait_ns', 'end_ns')
        >>> sql_name(Column("kernel", "text")), sql_name(Column("group", "text"))
        ('name', 'communicator')
    """
    if (column.name, column.kind) in _NAMES:
        return _NAMES[column.name, column.kind]
    name = "_".join(column.name.split())
    return (
        f"{name}_ns" if column.kind in ("duration", "time") and not name.endswith("_ns") else name
    )


def sql_columns(columns: Iterable[Column]) -> list[Column]:
    """Return columns as SQL has them: what has a start and a duration has an end, too.

    Example::

        >>> columns = [Column("start", "time", "ns"), Column("duration", "duration", "ns")]
        >>> [column.name for column in sql_columns(columns)]
        ['start_ns', 'duration_ns', 'end_ns']
    """
    found = [Column(sql_name(each), each.kind, each.unit) for each in columns]
    names = [each.name for each in found]
    if _lacks_end(names):
        found.insert(names.index(_DURATION) + 1, Column(_END, "time", "ns"))
    return found


def _lacks_end(names: Sequence[str]) -> bool:
    return _START in names and _DURATION in names and _END not in names


def quoted(name: str) -> str:
    """Return a name as SQL spells it whatever is in it; DuckDB before 2.0 takes no zero in one."""
    return '"' + name.replace('"', '""').replace("\0", "\N{SYMBOL FOR NULL}") + '"'


def code_name(at: int) -> str:
    """Return what the codes of the column of that number are called, where they are kept."""
    return f"{HIDDEN} {at}"


def occurring(codes: Any, texts: Sequence[Any]) -> Any:
    """Tell of each text whether its code occurs.

    Example::

        >>> occurring(np.array([2, -1, 0]), ["gemm", "never", "copy"])
        array([ True, False,  True])
    """
    return np.bincount(codes[codes >= 0], minlength=len(texts)) > 0


class Told(NamedTuple):
    """The texts of a column.

    Attributes:
        texts: By their code.
        there: Whether each occurs.
        number: Of each that occurs, or did in rows before these, from 0; -1 of others.
    """

    texts: Sequence[Any]
    there: Any
    number: Any


Texts = Mapping[int, Told]
"""Of each column of texts, by its place."""


def attach(connection: "DuckDBPyConnection", table: Table) -> None:
    """Make a table a view of its name; the connection keeps the arrays alive.

    Columns of text are joined from the texts that differ; what is not known is NULL. DuckDB before
    2.0 has rows without a text last, where a query asks for no order.
    """
    columns = table.arrays()
    picks, joins = [], []
    for at, (column, cells) in enumerate(zip(table.columns, columns, strict=True)):
        own = f"d.c{at}"
        if isinstance(cells, tuple):
            room, own = f"{table.name} texts {at}", f"t{at}.text"
            code = np.flatnonzero(occurring(*cells))
            texts = _cleaned(cells[1], code)[code]
            connection.register(room, {"code": code, "text": texts})
            joins.append(f"LEFT JOIN {quoted(room)} t{at} ON d.c{at} = t{at}.code")
        picks.append(_pick(own, column, cells))
    picks = _with_end(picks, table.columns)
    data = f"{table.name} numbers"
    source = _registered(connection, data, _numbers_of(columns))
    select = f"SELECT {', '.join(picks)} FROM {source} d {' '.join(joins)}"
    connection.execute(f"CREATE TEMP VIEW {quoted(table.name)} AS {select}")


def given(
    connection: "DuckDBPyConnection", table: Table, before: Texts | None = None
) -> tuple[str, list[Any], Texts]:
    """Give a table to DuckDB to be written; the connection keeps the arrays alive.

    With the number of each text, from 0 in each column, -1 where there is none; what is not known
    is NULL. Nothing is joined: no order of rows is promised behind a join.

    Args:
        connection: To a database in memory.
        table: With columns.
        before: Texts of earlier rows of the same table, whose numbers stay.

    Returns:
        What selects the table, its columns, and their texts.
    """
    columns = table.arrays()
    texts, numbers = _texts_in(columns, before), _numbers_of(columns)
    for at, told in texts.items():
        codes = np.maximum(columns[at][0], -1)  # A missing text reads the last row.
        numbers[f"c{at}"] = _cleaned(told.texts, np.flatnonzero(told.there))[codes]
        numbers[f"k{at}"] = np.append(told.number, np.int32(-1))[codes]
    picks = [
        _pick(f"c{at}", column, cells)
        for at, (column, cells) in enumerate(zip(table.columns, columns, strict=True))
    ]
    picks = _with_end(picks, table.columns)
    picks += [f"k{at} AS {quoted(code_name(at))}" for at in texts]
    source = _registered(connection, f"{table.name} numbers", numbers)
    return f"SELECT {', '.join(picks)} FROM {source}", columns, texts


def _with_end(picks: list[str], columns: Sequence[Column]) -> list[str]:
    """Add the end to what picks each column, if `sql_columns` does."""
    names = [sql_name(each) for each in columns]
    if not _lacks_end(names):
        return picks
    start, duration = (f"CAST(c{names.index(each)} AS BIGINT)" for each in (_START, _DURATION))
    at = names.index(_DURATION) + 1
    return [*picks[:at], f"{start} + {duration} AS {_END}", *picks[at:]]


def _pick(own: str, column: Column, cells: Any) -> str:
    return f"CAST({own} AS {sql_type(column, cells)}) AS {quoted(sql_name(column))}"


def _numbers_of(columns: Sequence[Any]) -> dict[str, Any]:
    """Return columns as numbers alone: ``c0`` or its codes, and ``m0`` where some are not known."""
    numbers: dict[str, Any] = {}
    for at, cells in enumerate(columns):
        if isinstance(cells, tuple):
            numbers[f"c{at}"] = cells[0]
        else:
            numbers[f"c{at}"] = np.ma.getdata(cells)
            if np.ma.is_masked(cells):
                numbers[f"m{at}"] = np.ma.getmaskarray(cells)  # DuckDB before 2.0 ignores a mask.
    return numbers


def _registered(connection: "DuckDBPyConnection", name: str, numbers: Mapping[str, Any]) -> str:
    """Give arrays to DuckDB; return what selects them, NULL where ``m`` of a column says so."""
    connection.register(name, numbers)
    picks = [
        f"CASE WHEN m{each[1:]} THEN NULL ELSE {each} END AS {each}"
        if f"m{each[1:]}" in numbers
        else each
        for each in numbers
        if each[0] != "m"
    ]
    return f"(SELECT {', '.join(picks)} FROM {quoted(name)})"


def _texts_in(columns: Sequence[Any], before: Texts | None) -> Texts:
    found = {}
    for at, cells in enumerate(columns):
        if isinstance(cells, tuple):
            there = occurring(*cells)
            number = before[at].number if before else np.full(len(there), -1, np.int32)
            new = np.flatnonzero(there & (number < 0))
            number[new] = np.arange(len(new)) + number.max(initial=-1) + 1
            found[at] = Told(cells[1], there, number)
    return found


def _cleaned(texts: Sequence[Any], code: Any) -> Any:
    """Return some of the texts at their codes, as UTF-8 can hold them, else None; and None last."""
    found = np.full(len(texts) + 1, None, dtype=object)
    found[code] = [_clean(texts[at]) for at in code.tolist()]
    return found


def sql_type(column: Column, cells: Any) -> str:
    """Return the type in SQL of a column that holds such cells."""
    if isinstance(cells, tuple) or column.kind == "text":
        return "VARCHAR"
    if column.kind in ("share", "ratio", "number") or (len(cells) and cells.dtype.kind == "f"):
        return "DOUBLE"
    return "BIGINT"


def _clean(text: Any) -> str:
    return str(text).encode("utf-8", "replace").decode()


# All our files have the same time, so DuckDB 1.4 cannot see that a file in its cache has changed.
# DuckDB 1.5 samples arrays of objects and fails if it finds only None; ours always contain texts.
_BOTH = (
    "temp_directory = ''",
    "enable_external_file_cache = false",
    "pandas_analyze_sample = 0",
)
# With one thread, the same table always becomes the same bytes.
_WRITER = ("threads = 1", "memory_limit = '1GB'")


def without_progress_bar(connection: "DuckDBPyConnection") -> None:
    """Let DuckDB print no progress, which it does on standard output after two seconds.

    In Jupyter without ipywidgets it is off, and even to switch it off is an error.
    """
    if connection.execute("SELECT current_setting('enable_progress_bar')").fetchall()[0][0]:
        connection.execute("SET enable_progress_bar = false")


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
    without_progress_bar(connection)
    for setting in (*_BOTH, *settings):
        connection.execute(f"SET GLOBAL {setting}")  # Cursors take only global settings.
    return connection
