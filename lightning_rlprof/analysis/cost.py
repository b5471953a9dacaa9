"""What one rank's excess costs the others: how much sooner they could have gone on without it."""

import numpy as np

from lightning_rlprof.analysis.exact import Floats

__all__ = ["lost_ns"]


def lost_ns(own_ns: Floats, excess_ns: Floats, rank: int, first: int, last: int) -> int:
    """Return the time that all others waited because one rank was slower than they.

    Per step the ranks wait for the one whose own time is the longest. Without its excess, this
    rank's would be shorter by just that; by what the longest becomes shorter, every other rank
    could have gone on earlier. Two slow ranks hide each other: neither costs what both do.

    Args:
        own_ns: Own time; shape (ranks, steps). A rank of which it is not known waits for nobody.
        excess_ns: How much less it would have taken at the others' pace, not below 0; likewise.
        rank: Whose excess.
        first: First step.
        last: Last step, included.

    Example::

        >>> own, excess = np.array([[100.0], [100.0], [150.0]]), np.array([[0.0], [0.0], [50.0]])
        >>> lost_ns(own, excess, 2, 0, 0)
        100
    """
    own, excess = own_ns[:, first : last + 1], excess_ns[rank, first : last + 1]
    others = np.delete(own, rank, axis=0)
    count = np.sum(~np.isnan(others), axis=0)
    known = (count > 0) & ~np.isnan(own[rank]) & ~np.isnan(excess)
    if not known.any():
        return 0
    longest, mine = np.fmax.reduce(others[:, known], axis=0), own[rank, known]
    sooner = np.maximum(mine, longest)
    sooner -= np.maximum(mine - excess[known], longest)
    return round(float(sooner @ count[known]))
