"""Tables given to DuckDB as they lie in memory: numbers uncopied, each text once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlprof.frames import columns_of
from lightning_rlprof.table import Column, Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["HIDDEN", "VISIBLE", "attach", "code_name", "quoted", "sql_name", "texts_used"]

VISIBLE = "COLUMNS('^[^ ]+$')"
"""Selects what a table's file shows: the columns of codes have a space in their name, no other."""

HIDDEN = "code"
"""Begins the name of a column of codes."""


def sql_name(column: Column) -> str:
    """Return what a column is called in SQL: a duration says its unit.

    Example::

        >>> sql_name(Column("mean wait", "duration", "ns")), sql_name(Column("end_ns", "duration"))
        ('mean_wait_ns', 'end_ns')
    """
    name = "_".join(column.name.split())
    return f"{name}_ns" if column.kind == "duration" and not name.endswith("_ns") else name


def quoted(name: str) -> str:
    """Return a name as SQL spells it whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def code_name(at: int) -> str:
    """Return what the codes of the column of that number are called, where they are kept."""
    return f"{HIDDEN} {at}"


def texts_used(codes: Any, texts: Sequence[Any]) -> tuple[Any, Any]:
    """Return codes of the texts that occur alone, below 0 as before, and which these are.

    Example::

        >>> texts_used(np.array([2, -1, 0]), ["gemm", "never", "copy"])
        (array([ 1, -1,  0], dtype=int32), array([0, 2]))
    """
    occurs = np.bincount(codes[codes >= 0], minlength=len(texts)) > 0
    place = np.append(np.cumsum(occurs) - 1, -1).astype(np.int32)
    return place[np.maximum(codes, -1)], np.flatnonzero(occurs)


def attach(connection: "DuckDBPyConnection", table: Table, *, codes: bool = False) -> None:
    """Make a table a view of its name; the connection keeps the arrays alive.

    Columns of text are joined from the texts that differ; what is not known is NULL.

    Args:
        connection: To a database in memory.
        table: With columns.
        codes: Add the codes of each column of texts, as `texts_used` numbers them.
    """
    numbers: dict[str, Any] = {}
    picks, joins, hidden = [], [], []
    for at, (column, cells) in enumerate(zip(table.columns, columns_of(table), strict=True)):
        if isinstance(cells, tuple):
            numbers[f"c{at}"], used = texts_used(*cells)
            texts = f"{table.name} texts {at}"
            _register(connection, texts, [cells[1][text] for text in used])
            joins.append(f"LEFT JOIN {quoted(texts)} t{at} ON d.c{at} = t{at}.code")
            hidden += [f"d.c{at} AS {quoted(code_name(at))}"] if codes else []
            source = f"t{at}.text"
        else:
            source = _numbers(numbers, at, cells)
        picks.append(f"CAST({source} AS {_type(column, cells)}) AS {quoted(sql_name(column))}")
    data = f"{table.name} numbers"
    connection.register(data, numbers)
    connection.execute(
        f"CREATE TEMP VIEW {quoted(table.name)} AS "
        f"SELECT {', '.join([*picks, *hidden])} FROM {quoted(data)} d {' '.join(joins)}"
    )


def _numbers(numbers: dict[str, Any], at: int, cells: Any) -> str:
    """Add a column of numbers to those that are registered; return how SQL reads it."""
    numbers[f"c{at}"] = np.ma.getdata(cells)
    if not np.ma.is_masked(cells):
        return f"d.c{at}"
    numbers[f"m{at}"] = np.ma.getmaskarray(cells)  # DuckDB before 2.0 overlooks a mask
    return f"CASE WHEN d.m{at} THEN NULL ELSE d.c{at} END"


def _register(connection: "DuckDBPyConnection", name: str, texts: Sequence[Any]) -> None:
    values = np.array([*map(_clean, texts)], dtype=object)
    connection.register(name, {"code": np.arange(len(values), dtype=np.int32), "text": values})


def _type(column: Column, cells: Any) -> str:
    if isinstance(cells, tuple) or column.kind == "text":
        return "VARCHAR"
    if column.kind in ("share", "ratio", "number") or (len(cells) and cells.dtype.kind == "f"):
        return "DOUBLE"
    return "BIGINT"


def _clean(text: Any) -> str:
    return str(text).encode("utf-8", "replace").decode()
