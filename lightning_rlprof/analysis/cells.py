"""Columns of a run's tables as arrays, in whatever form a table holds them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, ColumnRows, Table

__all__ = ["losses", "numbers", "read", "texts"]

_LOST = "left out"  # in every note of a loader that could not read some rows


def read(spans: Spans, name: str, remarks: list[str]) -> Table | None:
    """Return a table, None where the run has none.

    Why it cannot be told becomes a remark, and so do rows that its loader had to leave out.
    """
    if name not in spans.tables:
        return None
    try:
        table = spans.table(name)
    except TraceError as error:
        remarks.append(f"The table {name} could not be read: {error}.")
        return None
    if table.abstained is not None:
        remarks.append(f"The table {name} is missing: {table.abstained}.")
        return None
    remarks += [f"The table {name} is not whole: {text}." for text in losses(table)]
    return table


def losses(table: Table) -> list[str]:
    """Return what the note of a table says of rows that are lost."""
    return [text for text in table.note.split("; ") if _LOST in text]


def numbers(table: Table, name: str, nothing: int = 0) -> Int64s:
    """Return a column of integers as an array, `nothing` where one is not known."""
    column = _column(table, name)
    if not isinstance(column, tuple):
        filled: Int64s = np.ma.filled(column, nothing).astype(np.int64, copy=False)
        return filled
    codes, values = column
    own = [nothing if value is None else value for value in values]
    found: Int64s = np.array([*own, nothing], dtype=np.int64)
    return found[codes]


def texts(table: Table, name: str) -> tuple[Int64s, Sequence[str]]:
    """Return a column of texts as codes and distinct texts, the code -1 where one is not known.

    The codes may be the table's own: they are to be read.
    """
    codes, values = _column(table, name)
    places: dict[str, int] = {}
    own = [places.setdefault(str(value), len(places)) for value in values]
    if len(places) == len(own) and codes.dtype == np.int64:  # each text once: as they are
        return codes, list(places)
    return np.array([*own, -1], dtype=np.int64)[codes], list(places)


def _column(table: Table, name: str) -> Any:
    """Return an array, or codes and what they stand for, of a table in whatever form."""
    at = [column.name for column in table.columns].index(name)
    if isinstance(table.rows, ColumnRows):
        return table.rows.columns[at]
    places: dict[Cell, int] = {}
    cells = (row[at] for row in table.rows)
    codes = [-1 if cell is None else places.setdefault(cell, len(places)) for cell in cells]
    return np.array(codes, dtype=np.int64), list(places)
