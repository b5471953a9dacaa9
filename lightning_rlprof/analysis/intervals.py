"""How far one sample lies from another, without assuming a distribution."""

import math

import numpy as np

from lightning_rlprof.spans import Int64s

__all__ = ["shift_interval"]

_ALPHA = 0.01
_NORMAL = 2.5758293035489004  # two-sided 99 % quantile of the normal distribution
_EXACT = 25  # up to here the distribution of U is counted, beyond it is close to normal
_MOST = 1_000  # values per side; more are thinned, which only widens the interval


def shift_interval(a: Int64s, b: Int64s) -> tuple[int, int] | None:
    """Bound the shift from a to b with 99 % confidence, or None when there are too few values.

    The interval belongs to the Mann-Whitney test: the k-th smallest and k-th largest of all
    differences ``b - a`` (Hodges and Lehmann 1963), k from the distribution of U under no shift.

    Example::

        >>> shift_interval(np.arange(8), np.arange(8) + 100)
        (96, 104)
    """
    a, b = _thin(a), _thin(b)
    rank = _critical(len(a), len(b))
    if rank < 1:
        return None
    differences = (b[:, None] - a[None, :]).ravel()
    last = len(differences) - rank
    ordered = np.partition(differences, [rank - 1, last])
    return int(ordered[rank - 1]), int(ordered[last])


def _thin(values: Int64s) -> Int64s:
    return values[:: -(-len(values) // _MOST)] if len(values) > _MOST else values


def _critical(n: int, m: int) -> int:
    """Return the greatest k with ``P(U < k) <= alpha / 2`` for samples of n and m values."""
    if n > _EXACT or m > _EXACT:
        spread = math.sqrt(n * m * (n + m + 1) / 12)
        return math.floor(n * m / 2 - _NORMAL * spread)
    counts = np.zeros(n * m + 1)
    counts[0] = 1.0
    for i in range(1, n + 1):  # the Gaussian binomial coefficient, factor by factor
        for at in range(len(counts) - 1, m + i - 1, -1):
            counts[at] -= counts[at - m - i]
        for at in range(i, len(counts)):
            counts[at] += counts[at - i]
    tail = np.cumsum(counts) / math.comb(n + m, n)
    return int(np.searchsorted(tail, _ALPHA / 2, "right"))
