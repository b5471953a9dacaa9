"""What one rank's excess costs the others: how much sooner they could have gone on without it."""

import numpy as np

from lightning_rlprof.analysis.exact import Floats

__all__ = ["lost_ns"]


def lost_ns(own_ns: Floats, effect: Floats, rank: int, first: int, last: int) -> int:
    """Return the time that all others waited because one rank was slower than they.

    Per step the ranks wait for the one whose own time is the longest. Without its excess, this
    rank's would be ``own / (1 + effect)``; by what the longest becomes shorter, every other rank
    could have gone on earlier. Two slow ranks hide each other: neither costs what both do.

    Args:
        own_ns: Own time; shape (ranks, steps). Steps where some rank's is not known cost nothing.
        effect: How much slower than the others each rank was, of the same shape.
        rank: Whose excess.
        first: First step.
        last: Last step, included.

    Example::

        >>> own, effect = np.array([[100.0], [100.0], [150.0]]), np.array([[0.0], [0.0], [0.5]])
        >>> lost_ns(own, effect, 2, 0, 0)
        100
    """
    own, excess = own_ns[:, first : last + 1], effect[rank, first : last + 1]
    known = ~np.isnan(own).any(axis=0) & ~np.isnan(excess)
    own, excess = own[:, known], np.maximum(excess[known], 0.0)
    if len(own) < 2 or not own.size:
        return 0
    others = np.delete(own, rank, axis=0).max(axis=0)
    sooner = np.maximum(own[rank], others) - np.maximum(own[rank] / (1.0 + excess), others)
    return round(float(sooner.sum()) * (len(own) - 1))
