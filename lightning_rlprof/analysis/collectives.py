"""How much of each collective was transfer, told without comparing clocks of ranks.

A collective ends for all when the last rank has come and the data are through. So the shortest of
its durations is the transfer's, and what another rank spent beyond that it waited for the last one.
"""

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.sweep import differs
from lightning_rlprof.spans import Int64s

__all__ = ["UNMATCHED", "transfers"]

UNMATCHED = -1
"""Stands for a collective whose counterparts on other ranks are not known."""


def transfers(
    rank: Int64s,
    step: Int64s,
    name: Int64s,
    start_ns: Int64s,
    end_ns: Int64s,
    unsure_ns: int | None = 0,
) -> Int64s:
    """Return how long the transfer at the end of each collective took, or `UNMATCHED`.

    The n-th collective of a name in a step is the same on all ranks that have as many of them. It
    is `UNMATCHED` where ranks have different numbers, where only one rank has it, and where a rank
    was done before another began, by more than ``unsure_ns``, the ±u of times of two ranks; None,
    where that is not known, parts nothing. Columns have one row per collective.

    Example::

        >>> rank, zeros, came, went = np.array([[0, 1], [0, 0], [0, 7], [10, 10]])
        >>> transfers(rank, zeros, zeros, came, went).tolist()
        [3, 3]
    """
    found = np.full(len(rank), UNMATCHED, dtype=np.int64)
    order, heads = _groups(rank, step, name, start_ns)
    if len(heads):
        size = np.diff(np.append(heads, len(order)))
        least, sound = _shortest(start_ns[order], end_ns[order], heads, unsure_ns)
        found[order] = np.repeat(np.where(sound & (size > 1), least, UNMATCHED), size)
    return found


def _shortest(
    came: Int64s, went: Int64s, heads: Int64s, unsure_ns: int | None
) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """Return the shortest stay in each collective, and whether all were there at one time."""
    least = np.minimum.reduceat(went - came, heads)
    if unsure_ns is None:
        return least, np.full(len(heads), True)
    early = np.maximum.reduceat(came, heads) - np.minimum.reduceat(went, heads)
    return least, early <= unsure_ns


def _groups(rank: Int64s, step: Int64s, name: Int64s, start_ns: Int64s) -> tuple[Int64s, Int64s]:
    """Return rows so that those of one collective follow one another, and where each begins.

    Rows of a name in a step of which not all ranks have as many are left out.
    """
    order = np.lexsort((start_ns, rank, name, step))
    if not len(order):
        return order, order
    heads = np.flatnonzero(differs(step[order], name[order], rank[order]))
    count = np.diff(np.append(heads, len(order)))
    number = np.arange(len(order)) - np.repeat(heads, count)
    names = np.flatnonzero(differs(step[order[heads]], name[order[heads]]))
    alike = np.minimum.reduceat(count, names) == np.maximum.reduceat(count, names)
    kept = np.repeat(np.repeat(alike, np.diff(np.append(names, len(heads)))), count)
    order, number = order[kept], number[kept]
    again = np.lexsort((number, name[order], step[order]))
    order, number = order[again], number[again]
    return order, np.flatnonzero(differs(step[order], name[order], number))
