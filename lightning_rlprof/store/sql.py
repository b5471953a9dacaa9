"""Run one read-only SELECT in a DuckDB that may open nothing but the tables of a run."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.duckdb_tables import quoted
from lightning_rlprof.tables.table import FORMULA, Column, ColumnRows, Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation


T = TypeVar("T")
Attach = Callable[["DuckDBPyConnection"], None]

# Without a place to spill, nothing is written; a query that needs more than the memory fails.
_SETTINGS = (
    "temp_directory = ''",
    "enable_progress_bar = false",  # it stands on standard output, after two seconds
    "allow_persistent_secrets = false",
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    "python_enable_replacements = false",
    "enable_external_access = false",
    "lock_configuration = true",
)
# Functions that change settings: before DuckDB 2.0 a locked configuration does not keep them off.
_SWITCH = re.compile(r"\b(?:en|dis)able_\w+\"?\s*\(", re.I)
_SHOW_TABLES = re.compile(r"\s*show\s+(all\s+)?tables\s*;?\s*", re.I)
_OPEN = 256  # files that are open for other reasons
_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
_FORMATS = {".csv": "FORMAT csv, HEADER", ".parquet": "FORMAT parquet, COMPRESSION zstd"}


def answer(
    query: str, attach: Attach, paths: Iterable[Path] = (), rows: int | None = None
) -> Table:
    """Return what one SELECT says, in columns; whole sums are 64-bit integers.

    Args:
        query: One SELECT, WITH, FROM, DESCRIBE, SHOW or SUMMARIZE.
        attach: Makes the tables, before everything else is closed.
        paths: Files that the tables are read from.
        rows: Most rows; the note then counts all.

    Raises:
        TraceError: The query is wrong, or would do more than read; the text is one line.
    """
    with closed(attach, paths) as connection:
        select, columns, picks = _checked(connection, query)

        def ask() -> tuple[list[Any], str]:
            limit = "" if rows is None else f" LIMIT {rows + 1}"
            found = connection.sql(f"SELECT {picks} FROM {_inner(select, columns)}{limit}")
            cells = found.fetchnumpy()
            arrays = [cells[f"c{at}"] for at in range(len(columns))]
            if rows is None or len(arrays[0]) <= rows:
                return arrays, ""
            count = connection.sql(f"SELECT count(*) FROM ({select}\n)").fetchall()[0][0]
            return [array[:rows] for array in arrays], f"the first {rows:,} of {count:,} rows"

        arrays, note = _asked(connection, ask)
    return Table("answer", columns, ColumnRows([*map(_held, arrays)]), note=note)


def write_answer(query: str, attach: Attach, paths: Iterable[Path], output: Path) -> int:
    """Write what one SELECT says to a .csv or .parquet file, row groups at a time; return its rows.

    The file is whole or not there at all.

    Raises:
        TraceError: As `answer`, or the name ends in neither.
        OSError: It cannot be written.
    """
    form = _FORMATS.get(output.suffix)
    if form is None:
        raise TraceError(f"{output}: -o needs a name that ends in .csv or .parquet")
    part = output.with_name(f".{output.name}.part")
    part.unlink(missing_ok=True)
    part.open("xb").close()  # says why not, in the system's words
    try:
        with closed(attach, [*paths, part]) as connection:
            select, columns, picks = _checked(connection, query)
            cells = [
                _no_formula(at) if output.suffix == ".csv" and each.kind == "text" else f"c{at}"
                for at, each in enumerate(columns)
            ]
            names = ", ".join(
                f"{cell} AS {quoted(each.name)}" for cell, each in zip(cells, columns, strict=True)
            )
            select = f"SELECT {names} FROM (SELECT {picks} FROM {_inner(select, columns)})"
            target = f"{text_literal(part)} ({form}, USE_TMP_FILE false)"
            copy = f"COPY ({select}) TO {target}"
            done = _asked(connection, lambda: connection.execute(copy).fetchall())
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)
    return int(done[0][0])


def _no_formula(at: int) -> str:
    """Return what `lightning_rlprof.tables.table.no_formula` makes of a column of texts."""
    runs = f"c{at} <> '' AND contains({text_literal(FORMULA)}, c{at}[1])"
    return f"CASE WHEN {runs} THEN chr(39) || c{at} ELSE c{at} END"


def closed(attach: Attach, paths: Iterable[Path] = ()) -> "DuckDBPyConnection":
    """Return a DuckDB in memory with some tables, which opens no file but these from now on."""
    import duckdb

    paths = [*paths]
    _allow_open(len(paths))
    listed = ", ".join(text_literal(path) for path in paths)
    connection = duckdb.connect(":memory:")
    try:
        connection.execute("SET pandas_analyze_sample = 0")  # see `duck`
        attach(connection)
        for setting in (f"allowed_paths = [{listed}]", *_SETTINGS):
            connection.execute(f"SET {setting}")
    except duckdb.Error as error:
        connection.close()
        raise TraceError(_line(error)) from error
    return connection


def _allow_open(files: int) -> None:
    """Raise the limit of open files of this process, as far as the system allows.

    DuckDB opens some thirty ahead on each core, and usual limits are 1,024: a job has more ranks.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * files + _OPEN
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def is_damage(error: TraceError) -> bool:
    """Return whether an error of `answer` may come from a damaged file, not from the query."""
    import duckdb

    query = (duckdb.ParserException, duckdb.CatalogException, duckdb.BinderException)
    others = (duckdb.PermissionException, duckdb.DataError, duckdb.OutOfMemoryException)
    return error.__cause__ is not None and not isinstance(error.__cause__, (*query, *others))


def named(query: str, names: Iterable[str]) -> list[str]:
    """Return which of these tables a query may ask for: those that it has as a word."""
    words = {word.lower() for word in re.findall(r"\w+", query)}
    return [name for name in names if name.lower() in words]


def listing(query: str, names: Iterable[str]) -> str:
    """Return a query, and ``SHOW TABLES`` as a SELECT of names: most are no tables before use."""
    if not _SHOW_TABLES.fullmatch(query):
        return query
    return f"SELECT unnest([{', '.join(map(text_literal, sorted(names)))}]) AS name"


def text_literal(text: object) -> str:
    """Return a text as SQL spells it."""
    return "'" + str(text).replace("'", "''") + "'"


def _checked(connection: "DuckDBPyConnection", query: str) -> tuple[str, tuple[Column, ...], str]:
    """Return the one SELECT that a query is, its columns, and the casts to fetch them by."""
    import duckdb

    try:
        query.encode()  # a terminal hands on bytes that are none, which DuckDB does not take
        statements = connection.extract_statements(query)
        kinds = [statement.type.name for statement in statements]
        if kinds != ["SELECT"]:
            what = " and ".join(kinds) or "nothing"
            raise TraceError(f"only a single read-only SELECT is supported; this is {what}")
        if found := _SWITCH.search(query):
            raise TraceError(
                f"only a single read-only SELECT is supported; {found[0]}) changes settings"
            )
        select = _without_end(statements[0].query)
        # At the top DuckDB 2 allows WITH t AS (COPY … TO …), and would write before it answers.
        connection.sql(f"SELECT * FROM ({select}\n)")
        relation = connection.sql(select)
    except duckdb.Error as error:
        raise TraceError(_line(error)) from error
    except UnicodeEncodeError as error:
        raise TraceError("the query is not valid UTF-8") from error
    if relation is None:
        raise TraceError("only a single read-only SELECT is supported; this one returns nothing")
    picks, columns = _picked(relation)
    return select, columns, picks


def _without_end(statement: str) -> str:
    """Return a statement without the semicolons that end it, and comments behind them."""
    import duckdb

    text = statement.encode()  # places of tokens are those of bytes
    for at, kind in reversed(duckdb.tokenize(statement)):
        if text[at : at + 1] == b";":
            text = text[:at]
        elif kind != duckdb.token_type.comment:
            break
    return text.decode()


def _inner(select: str, columns: Sequence[Column]) -> str:
    names = ", ".join(f"c{at}" for at in range(len(columns)))
    return f"({select}\n) AS answer({names})"  # the new line ends a comment


def _picked(relation: "DuckDBPyRelation") -> tuple[str, tuple[Column, ...]]:
    """Return casts to what a table holds, and the columns, each name once."""
    picks, columns, taken = [], [], set[str]()
    for at, (name, kind) in enumerate(zip(relation.columns, map(str, relation.types), strict=True)):
        own = name
        while own.lower() in taken:
            own += "_"
        taken.add(own.lower())
        cast, column = _cast(own, kind)
        picks.append(f"CAST(c{at} AS {cast}) AS c{at}" if cast else f"c{at}")
        columns.append(column)
    return ", ".join(picks), tuple(columns)


def _cast(name: str, kind: str) -> tuple[str, Column]:
    """Return the type to fetch a column as ("" as it is), and how it is shown."""
    if kind in _WHOLE or kind in ("HUGEINT", "UHUGEINT", "UBIGINT", "BOOLEAN", '"NULL"'):
        if name.endswith("_ns") and not name.endswith("unix_ns"):
            return "BIGINT", Column(name, "duration", "ns")
        whole = "UBIGINT" if kind == "UBIGINT" else "BIGINT"
        return whole, Column(name, "count", "bytes" if name.endswith("bytes") else "")
    if kind in ("FLOAT", "DOUBLE") or kind.startswith("DECIMAL"):
        return "DOUBLE", Column(name, "number", "ns" if name.endswith("_ns") else "")
    return "VARCHAR", Column(name, "text")


def _held(array: Any) -> Any:
    """Return a column for `ColumnRows`: texts stay apart, NaN is not known."""
    if array.dtype.kind == "f":
        return np.ma.masked_invalid(array)
    return array


def _asked(connection: "DuckDBPyConnection", ask: Callable[[], T]) -> T:
    """Return what a function asks of DuckDB, and let Ctrl-C interrupt it.

    The main thread, which hears of signals, has it asked by another one; as Python ends, there is
    none to be had. An error of DuckDB becomes one line.
    """
    import duckdb

    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    try:
        _elsewhere(work)
        return answer.result()
    except duckdb.Error as error:
        raise TraceError(_line(error)) from error
    except BaseException:
        while not answer.done():  # out of a signal's handler; between two queries none hears it
            with contextlib.suppress(KeyboardInterrupt):  # a second one
                connection.interrupt()
                wait([answer], timeout=0.05)
        raise


def _elsewhere(work: Callable[[], None]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return work()
    try:
        threading.Thread(target=work, name="rlprof-sql", daemon=True).start()
    except RuntimeError:  # at the interpreter's end
        work()


def _line(error: Exception) -> str:
    """Return a message of DuckDB without the picture of the query."""
    text = str(error).split("\nLINE ", 1)[0]
    return f"SQL: {' '.join(text.split())}"
