"""Types of the arrays that tables, loaders and analyses hand to each other."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]
"""An array of 64-bit integers."""

Float64s: TypeAlias = npt.NDArray[np.float64]
"""An array of 64-bit floats."""

Mask: TypeAlias = npt.NDArray[np.bool_]
"""An array of yes and no."""
