"""Tables as arrays, and as what pandas, polars and Arrow make of them; each imported when asked."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    from lightning_rlprof.table import Table

__all__ = ["columns_of", "to_arrow", "to_numpy", "to_pandas", "to_polars"]

_WHOLE = 2**63


def to_numpy(table: "Table") -> dict[str, Any]:
    """Return an array per column: a masked one where something is not known, texts as objects.

    Raises:
        RlprofError: The table abstained.
    """
    return {name: _array(cells) for name, cells in _told(table)}


def to_pandas(table: "Table") -> Any:
    """Return a ``pandas.DataFrame``; whole numbers stay whole where some are not known.

    Raises:
        RlprofError: The table abstained, or pandas is not installed.
    """
    pandas = _library("pandas")

    def series(cells: Any) -> Any:
        array = _array(cells)
        if not isinstance(array, np.ma.MaskedArray):
            return array
        if array.dtype.kind == "f":
            return array.filled(np.nan)
        mask = np.ma.getmaskarray(array)
        return pandas.arrays.IntegerArray(array.data.astype(np.int64), mask)

    return pandas.DataFrame({name: series(cells) for name, cells in _told(table)})


def to_polars(table: "Table") -> Any:
    """Return a ``polars.DataFrame``.

    Raises:
        RlprofError: The table abstained, or polars is not installed.
    """
    polars = _library("polars")

    def series(name: str, cells: Any) -> Any:
        if isinstance(cells, tuple):
            codes, texts = cells
            values = polars.Series(name, [*texts, None], dtype=polars.String)
            return values.gather(np.where(codes < 0, len(texts), codes))
        values = polars.Series(name, np.ma.getdata(cells))
        if isinstance(cells, np.ma.MaskedArray):
            values = values.set(polars.Series(np.ma.getmaskarray(cells)), None)
        return values

    return polars.DataFrame([series(name, cells) for name, cells in _told(table)])


def to_arrow(table: "Table") -> Any:
    """Return a ``pyarrow.Table``; texts are dictionaries, so each is held once.

    Raises:
        RlprofError: The table abstained, or pyarrow is not installed.
    """
    arrow = _library("pyarrow")

    def array(cells: Any) -> Any:
        if isinstance(cells, tuple):
            codes = arrow.array(cells[0], arrow.int32(), mask=cells[0] < 0)
            return arrow.DictionaryArray.from_arrays(codes, arrow.array(cells[1], arrow.string()))
        return arrow.array(np.ma.getdata(cells), mask=np.ma.getmaskarray(cells))

    return arrow.table({name: array(cells) for name, cells in _told(table)})


def columns_of(table: "Table") -> list[Any]:
    """Return each column as an array of numbers, masked where not known, or as (codes, texts).

    A code below 0 is "not known". Whole numbers beyond 64 bits become floats.
    """
    rows: Any = table.rows
    own = getattr(rows, "columns", None)
    if own is None:
        cells = ([row[at] for row in rows] for at in range(len(table.columns)))
        return [
            _cells(each, column.kind) for each, column in zip(cells, table.columns, strict=True)
        ]
    return [_coded(*each) if isinstance(each, tuple) else _plain(each) for each in own]


def _told(table: "Table") -> list[tuple[str, Any]]:
    if table.abstained is not None:
        raise RlprofError(f"table {table.name} is not told: {table.abstained}")
    names = [column.name for column in table.columns]
    return list(zip(names, columns_of(table), strict=True))


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise RlprofError(f"{name} is not installed here; pip install {name}") from error


def _array(cells: Any) -> Any:
    if not isinstance(cells, tuple):
        return cells if np.ma.is_masked(cells) else np.ma.getdata(cells)
    codes, texts = cells
    return np.array([*texts, None], dtype=object)[np.where(codes < 0, len(texts), codes)]


def _plain(cells: Any) -> Any:
    return cells if cells.dtype.kind in "iuf" else _cells(cells.tolist(), "text")


def _coded(codes: Any, values: Sequence[Any]) -> Any:
    """Keep texts as codes; numbers that are coded because some are not known become a column."""
    if not len(values) or any(isinstance(value, str) for value in values):
        return codes, [str(value) for value in values]
    known = np.array(_numbers(values))
    return np.ma.masked_array(known[codes], mask=codes < 0)


def _cells(cells: list[Any], kind: str) -> Any:
    if kind == "text" or any(isinstance(cell, str) for cell in cells):
        place: dict[str, int] = {}
        codes = [-1 if cell is None else place.setdefault(str(cell), len(place)) for cell in cells]
        return np.array(codes, dtype=np.int64), list(place)
    known = _numbers([0 if cell is None else cell for cell in cells])
    mask = np.array([cell is None for cell in cells], dtype=bool)
    return np.ma.masked_array(np.array(known, dtype=None if known else np.int64), mask=mask)


def _numbers(cells: Sequence[Any]) -> list[Any]:
    """Return numbers that one array can hold: floats where one is, or is beyond 64 bits."""
    if all(isinstance(cell, int) and -_WHOLE <= cell < _WHOLE for cell in cells):
        return [int(cell) for cell in cells]
    return [float(cell) for cell in cells]
