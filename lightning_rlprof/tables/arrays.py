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
