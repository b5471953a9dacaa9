"""Tables given to DuckDB as they lie in memory: numbers uncopied, each text once."""

from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlprof.frames import columns_of
from lightning_rlprof.table import Column, Table

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["attach", "quoted", "sql_name"]


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


def attach(connection: "DuckDBPyConnection", table: Table) -> None:
    """Make a table a view of its name; the connection keeps the arrays alive.

    Columns of text are joined from the texts that differ; what is not known is NULL.
    """
    numbers: dict[str, Any] = {}
    picks, joins = [], []
    for at, (column, cells) in enumerate(zip(table.columns, columns_of(table), strict=True)):
        source = f"d.c{at}"
        if isinstance(cells, tuple):
            numbers[f"c{at}"] = cells[0]
            texts = f"{table.name} texts {at}"
            values = np.array([*map(_clean, cells[1])], dtype=object)
            connection.register(texts, {"code": np.arange(len(values)), "text": values})
            joins.append(f"LEFT JOIN {quoted(texts)} t{at} ON d.c{at} = t{at}.code")
            source = f"t{at}.text"
        else:
            numbers[f"c{at}"] = np.ma.getdata(cells)
            if np.ma.is_masked(cells):  # DuckDB before 2.0 overlooks a mask
                numbers[f"m{at}"] = np.ma.getmaskarray(cells)
                source = f"CASE WHEN d.m{at} THEN NULL ELSE d.c{at} END"
        kind = _type(column, cells)
        picks.append(f"CAST({source} AS {kind}) AS {quoted(sql_name(column))}")
    data = f"{table.name} numbers"
    connection.register(data, numbers)
    connection.execute(
        f"CREATE TEMP VIEW {quoted(table.name)} AS "
        f"SELECT {', '.join(picks)} FROM {quoted(data)} d {' '.join(joins)}"
    )


def _type(column: Column, cells: Any) -> str:
    if isinstance(cells, tuple) or column.kind == "text":
        return "VARCHAR"
    if column.kind in ("share", "ratio", "number") or (len(cells) and cells.dtype.kind == "f"):
        return "DOUBLE"
    return "BIGINT"


def _clean(text: Any) -> str:
    return str(text).encode("utf-8", "replace").decode()
