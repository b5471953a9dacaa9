"""Tails of Student's t, for tests at very small p-values."""

import math

import numpy as np

from lightning_rlprof.tables.arrays import Float64s

_REACH, _STEP = 38.0, 0.005  # normal tails below 1e-315 are no floats
_GRID = np.arange(0.0, _REACH, _STEP)
_LOG_TAIL = np.log([0.5 * math.erfc(z / math.sqrt(2)) for z in _GRID.tolist()])


def student_tail(value: Float64s, freedom: float) -> Float64s:
    """Return how likely Student's t with these degrees of freedom is above a value.

    Turned into a normal value by Wallace (1959): within 2% of the tail for 3 degrees and more.

    Example::

        >>> student_tail(np.array([0.0, 2.0, -2.0]), 60.0).round(3).tolist()
        [0.5, 0.025, 0.975]
    """
    size = np.sqrt(freedom * np.log1p(value**2 / freedom))
    normal = (8 * freedom + 1) / (8 * freedom + 3) * size
    tail = np.exp(np.interp(normal, _GRID, _LOG_TAIL))
    return np.where(value >= 0, tail, 1 - tail)
