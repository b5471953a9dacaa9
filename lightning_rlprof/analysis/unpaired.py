"""Launches that have no kernel: what a device tool lost, or what went into a graph."""

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["LOST", "Unpaired", "unpaired"]

LOST = 0.05
"""Share of the launches; the last ones of a capture have no kernel even where nothing was lost."""

_LAUNCH = re.compile(r"(cuda|cu|hip)\w*Launch(Cooperative)?Kernel\w*")
_UNKNOWN = -1


class Unpaired(NamedTuple):
    """How many launches of kernels were recorded, and how many of these have no kernel."""

    launches: int
    alone: int

    @property
    def lossy(self) -> bool:
        """Whether so many have none that what looks idle may have been busy: above `LOST`."""
        return self.alone > LOST * self.launches


def unpaired(spans: Spans) -> Unpaired | None:
    """Count the calls that launch one kernel each, and those of which no kernel was recorded.

    A kernel and its launch are two records: in a whole trace each launch has its kernel, but for
    the last ones of a capture and those that a graph captured. None where calls or kernels were
    not recorded.
    """
    calls, kernels = (read(spans, name, []) for name in ("calls", "kernels"))
    if calls is None or kernels is None:
        return None
    code, names = texts(calls, "name")
    launches = np.array([*(_LAUNCH.fullmatch(name) is not None for name in names), False])[code]
    if not launches.any():
        return None
    rank, start = (numbers(calls, name)[launches] for name in ("rank", "start"))
    of, launch = numbers(kernels, "rank"), numbers(kernels, "launch", _UNKNOWN)
    alone = 0
    for each in np.unique(rank).tolist():
        alone += int(np.count_nonzero(~_among(start[rank == each], launch[of == each])))
    return Unpaired(len(start), alone)


def _among(values: Int64s, others: Int64s) -> npt.NDArray[np.bool_]:
    """Tell which values are among others; quick where both come by time, as they do."""
    others = np.sort(others, kind="stable")
    place = np.searchsorted(others, values)
    found: npt.NDArray[np.bool_] = np.append(others, _UNKNOWN)[place] == values
    return found
