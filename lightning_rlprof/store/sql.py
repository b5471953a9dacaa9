"""Run one read-only SELECT in a DuckDB that may open nothing but the tables of a run."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.duckdb_tables import quoted, without_progress_bar
from lightning_rlprof.system.files import draft_of
from lightning_rlprof.system.process import machine_bytes, resident_bytes
from lightning_rlprof.tables.table import FORMULA, Column, ColumnRows, Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation


T = TypeVar("T")
Attach = Callable[["DuckDBPyConnection"], None]

# Without a place to spill, nothing is written; a query that needs more than the memory fails.
_SETTINGS = (
    "temp_directory = ''",
    "allow_persistent_secrets = false",
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    "python_enable_replacements = false",
    "enable_external_access = false",
    "lock_configuration = true",
)
# These functions change settings; before DuckDB 2.0 a locked configuration does not block them.
_SWITCH = re.compile(r"\b(?:en|dis)able_\w+\"?\s*\(", re.I)
_SHOW_TABLES = re.compile(r"\s*show\s+(all\s+)?tables\s*;?\s*", re.I)
# Nested brackets; DuckDB's time to refuse them grows with the third power of their number.
_DEEPEST = 200
_OPEN = 256  # Files that may be open for other reasons.
_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
_GB = 10**9
_OUTSIDE = 1.25  # DuckDB keeps its part of the limit; answers and long texts are outside of it.
# Seconds; one call of an SQL function can't be interrupted, and may take minutes.
_PATIENCE_S = 2.0
ABANDONED = "rlprof: a query that can't be interrupted"
"""Name of a thread that an answer is no longer waited for; it ends when DuckDB lets it."""

_FORMATS = {".csv": "FORMAT csv, HEADER", ".parquet": "FORMAT parquet, COMPRESSION zstd"}


class Limits(NamedTuple):
    """What a query may use until it ends with an error.

    Attributes:
        memory_gb: Memory in units of 10^9 bytes; None for 2, or half of a smaller machine's.
        timeout_s: Seconds; None for any time.
    """

    memory_gb: float | None = None
    timeout_s: float | None = None

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes."""
        if self.memory_gb is not None:
            return int(self.memory_gb * _GB)
        return min(2 * _GB, (machine_bytes() or 4 * _GB) // 2)


DEFAULT_LIMITS = Limits()
"""What a query may use unless the caller says otherwise."""


def answer(
    query: str,
    attach: Attach,
    paths: Iterable[Path] = (),
    rows: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Table:
    """Return what one SELECT says, in columns; whole sums are 64-bit integers.

    Args:
        query: One SELECT, WITH, FROM, DESCRIBE, SHOW or SUMMARIZE.
        attach: Makes the tables, before everything else is closed.
        paths: Files that the tables are read from.
        rows: Most rows; the note then counts all.
        limits: Of memory and time.

    Raises:
        TraceError: The query is wrong, would do more than read, or needs more than its limits;
            the text is one line.
    """

    def ask(connection: "DuckDBPyConnection") -> Table:
        select, columns, picks = _checked(connection, query)
        limit = "" if rows is None else f" LIMIT {rows + 1}"
        found = connection.sql(f"SELECT {picks} FROM {_inner(select, columns)}{limit}")
        cells = found.fetchnumpy()
        arrays = [cells[f"c{at}"] for at in range(len(columns))]
        note = ""
        if rows is not None and len(arrays[0]) > rows:
            count = connection.sql(f"SELECT count(*) FROM ({select}\n)").fetchall()[0][0]
            note = f"the first {rows:,} of {count:,} rows"
        shown = [  # NaN stands for unknown.
            np.ma.masked_invalid(array[:rows]) if array.dtype.kind == "f" else array[:rows]
            for array in arrays
        ]
        return Table("answer", columns, ColumnRows(shown), note=note)

    return _within(limits, attach, paths, ask)


def write_answer(
    query: str,
    attach: Attach,
    paths: Iterable[Path],
    output: Path,
    limits: Limits = DEFAULT_LIMITS,
    mode: int | None = None,
) -> int:
    """Write what one SELECT says to a .csv or .parquet file, row groups at a time; return its rows.

    The file is whole or not there at all.

    Raises:
        TraceError: As `answer`, or the name ends in neither.
        OSError: It cannot be written.
    """
    form = _FORMATS.get(output.suffix)
    if form is None:
        raise TraceError(f"{output}: -o needs a name that ends in .csv or .parquet")

    def copy(part: Path, connection: "DuckDBPyConnection") -> int:
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
        return int(connection.execute(f"COPY ({select}) TO {target}").fetchall()[0][0])

    with draft_of(output, mode) as part:
        return _within(limits, attach, [*paths, part], partial(copy, part))


def _no_formula(at: int) -> str:
    """Return what `lightning_rlprof.tables.table.no_formula` makes of a column of texts."""
    runs = f"c{at} <> '' AND contains({text_literal(FORMULA)}, c{at}[1])"
    return f"CASE WHEN {runs} THEN chr(39) || c{at} ELSE c{at} END"


def closed(
    attach: Attach, paths: Iterable[Path] = (), memory_bytes: int = 2 * _GB
) -> "DuckDBPyConnection":
    """Return a DuckDB in memory with some tables, which opens no file but these from now on."""
    import duckdb

    paths = [*paths]
    _allow_open(len(paths))
    listed = ", ".join(text_literal(path) for path in paths)
    connection = duckdb.connect(":memory:")
    try:
        connection.execute(f"SET memory_limit = '{memory_bytes}B'")
        connection.execute("SET pandas_analyze_sample = 0")  # The reason is in `duckdb_tables`.
        without_progress_bar(connection)
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

    _check_depth(query)
    try:
        query.encode()  # A terminal may pass on bytes that are not UTF-8, which DuckDB refuses.
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


def _check_depth(query: str) -> None:
    """Refuse brackets so deep that it takes seconds to find one that does not close."""
    depth = 0
    for bracket in re.findall(r"[(\[{)\]}]", query):
        depth += 1 if bracket in "([{" else -1
        if depth > _DEEPEST:
            raise TraceError(f"SQL: brackets are nested more than {_DEEPEST} deep")


def _without_end(statement: str) -> str:
    """Return a statement without the semicolons that end it, and comments behind them."""
    import duckdb

    text = statement.encode()  # Places of tokens count bytes.
    for at, kind in reversed(duckdb.tokenize(statement)):
        if text[at : at + 1] == b";":
            text = text[:at]
        elif kind != duckdb.token_type.comment:
            break
    return text.decode()


def _inner(select: str, columns: Sequence[Column]) -> str:
    names = ", ".join(f"c{at}" for at in range(len(columns)))
    return f"({select}\n) AS answer({names})"  # The new line ends a comment.


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


def _within(
    limits: Limits,
    attach: Attach,
    paths: Iterable[Path],
    ask: "Callable[[DuckDBPyConnection], T]",
) -> T:
    """Return what a function asks of DuckDB; limits, Ctrl-C and other signals interrupt it.

    Another thread has the connection, so that this one can wait and watch. An error of DuckDB
    becomes one line.
    """
    import duckdb

    found: Future[T] = Future()
    opened: list[DuckDBPyConnection] = []

    def work() -> None:
        try:
            with closed(attach, paths, limits.memory_bytes) as connection:
                opened.append(connection)
                answer = ask(connection)
            found.set_result(answer)
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
        return _watched(found, limits)
    except duckdb.OutOfMemoryException as error:
        raise TraceError(_too_large(limits)) from error
    except duckdb.Error as error:
        raise TraceError(_line(error)) from error
    except BaseException:
        stop_at = monotonic() + _PATIENCE_S
        while not found.done() and monotonic() < stop_at:
            # After one Ctrl-C, a second one may come.
            with contextlib.suppress(KeyboardInterrupt, duckdb.Error):
                # DuckDB ignores an interrupt between two queries, so this is repeated.
                for connection in opened:
                    connection.interrupt()
                wait([found], timeout=0.05)
        raise
    finally:
        if not found.done():
            thread.name = ABANDONED
        else:  # The thread is about to end, and the interpreter must not end before it.
            thread.join()


def _watched(found: "Future[T]", limits: Limits) -> T:
    """Wait for an answer as long as its limits allow; raises TraceError beyond."""
    most = (resident_bytes() or 0) + _OUTSIDE * limits.memory_bytes
    until = float("inf") if limits.timeout_s is None else monotonic() + limits.timeout_s
    while not found.done():
        wait([found], timeout=max(0.0, min(0.05, until - monotonic())))
        if not found.done() and monotonic() >= until:
            raise TraceError(
                f"SQL: the query took longer than its limit of {limits.timeout_s:g} s; "
                "allow more with --timeout (in Python timeout_s)"
            )
        if not found.done() and (resident_bytes() or 0) > most:
            raise TraceError(_too_large(limits))
    return found.result()


def _too_large(limits: Limits) -> str:
    return (
        f"SQL: out of memory: the query needs more than its limit of "
        f"{limits.memory_bytes / _GB:.3g} GB, or than there is; "
        "select less, or allow more with --memory (in Python memory_gb)"
    )


def _line(error: Exception) -> str:
    """Return a message of DuckDB without the picture of the query."""
    text = str(error).split("\nLINE ", 1)[0]
    return f"SQL: {' '.join(text.split())}"
