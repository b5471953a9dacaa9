"""Types of the arrays that tables, loaders and analyses exchange, and groups of equal rows."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]
"""An array of 64-bit integers."""

Float64s: TypeAlias = npt.NDArray[np.float64]
"""An array of 64-bit floats."""

Mask: TypeAlias = npt.NDArray[np.bool_]
"""An array of yes and no."""

UNKNOWN = -1
"""Stands for a code, an index or an amount that was not recorded; never a valid value of these."""

_LARGEST_CODE = 2**62


def differs(*columns: npt.NDArray[Any]) -> Mask:
    """Mark the rows that differ from the row before in any column; the first one does.

    Example::

        >>> differs(np.array([3, 3, 5]), np.array([1, 1, 1])).tolist()
        [True, False, True]
    """
    changed = np.zeros(len(columns[0]), dtype=bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def group_starts(*columns: npt.NDArray[Any]) -> Int64s:
    """Return the first row of each group of equal rows that follow one another.

    Example::

        >>> group_starts(np.array([3, 3, 5]), np.array([1, 1, 1])).tolist()
        [0, 2]
    """
    return np.flatnonzero(differs(*columns))


def distinct_tuples(columns: Int64s) -> tuple[Int64s, Int64s]:
    """Return the distinct tuples of some columns, ascending, and which one each row is.

    Much faster than `numpy.unique` of two dimensions: a million rows take half a second.

    Args:
        columns: Whole numbers; shape (columns, rows).

    Example::

        >>> tuples, place = distinct_tuples(np.array([[7, 3, 7], [1, 2, 1]]))
        >>> tuples.tolist(), place.tolist()
        ([[3, 7], [2, 1]], [1, 0, 1])
    """
    code, width = np.zeros(columns.shape[1], np.int64), 1
    for column in columns if columns.shape[1] else ():
        low, size = int(column.min()), int(column.max()) - int(column.min()) + 1
        if width * size >= _LARGEST_CODE:  # would not fit: number what occurs
            used, code = np.unique(code, return_inverse=True)
            values, own = np.unique(column, return_inverse=True)
            width, size = len(used), len(values)
        else:
            own = column - low
        code, width = code * size + own, width * size
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    return columns[:, first], place


def group_sizes(starts: Int64s, rows: int) -> Int64s:
    """Return how many rows each group has.

    Args:
        starts: The first row of each group, as from `group_starts`.
        rows: Number of all rows.

    Example::

        >>> group_sizes(np.array([0, 2]), 3).tolist()
        [2, 1]
    """
    return np.diff(starts, append=rows)
