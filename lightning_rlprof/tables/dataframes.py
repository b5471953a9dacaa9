"""Columns as numpy arrays, and as frames of pandas, polars and Arrow, each imported when asked for.

Columns are what `lightning_rlprof.tables.table.Table.arrays` returns: by name, an array of numbers
that is masked where a value is not known, or ``(codes, texts)`` with a code below 0 for it.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from lightning_rlprof.errors import RlprofError


def to_numpy(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return an array per column: a masked one where something is not known, texts as objects."""
    return {name: to_array(cells) for name, cells in columns.items()}


def to_pandas(columns: Mapping[str, Any]) -> Any:
    """Return a ``pandas.DataFrame``; whole numbers stay whole where some are not known.

    Raises:
        RlprofError: pandas is not installed.
    """
    pandas = _library("pandas")

    def series(cells: Any) -> Any:
        array = to_array(cells)
        if not isinstance(array, np.ma.MaskedArray):
            return array
        if array.dtype.kind == "f":
            return array.filled(np.nan)
        mask = np.ma.getmaskarray(array)
        return pandas.arrays.IntegerArray(array.data.astype(np.int64), mask)

    return pandas.DataFrame({name: series(cells) for name, cells in columns.items()})


def to_polars(columns: Mapping[str, Any]) -> Any:
    """Return a ``polars.DataFrame``.

    Raises:
        RlprofError: polars is not installed.
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

    return polars.DataFrame([series(name, cells) for name, cells in columns.items()])


def to_arrow(columns: Mapping[str, Any]) -> Any:
    """Return a ``pyarrow.Table``; texts are dictionaries, so each is held once.

    Raises:
        RlprofError: pyarrow is not installed.
    """
    arrow = _library("pyarrow")

    def array(cells: Any) -> Any:
        if isinstance(cells, tuple):
            codes = arrow.array(cells[0], arrow.int32(), mask=cells[0] < 0)
            return arrow.DictionaryArray.from_arrays(codes, arrow.array(cells[1], arrow.string()))
        return arrow.array(np.ma.getdata(cells), mask=np.ma.getmaskarray(cells))

    return arrow.table({name: array(cells) for name, cells in columns.items()})


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise RlprofError(f"{name} is not installed here; pip install {name}") from error


def to_array(cells: Any) -> Any:
    """Return one column as one array, texts as objects."""
    if not isinstance(cells, tuple):
        return cells if np.ma.is_masked(cells) else np.ma.getdata(cells)
    codes, texts = cells
    return np.array([*texts, None], dtype=object)[np.where(codes < 0, len(texts), codes)]
