"""How far one sample lies from another at equal other things, without assuming a distribution."""

import math
from statistics import NormalDist

import numpy as np

from lightning_rlprof.analysis.exact import Floats

__all__ = ["shift_bounds", "student", "typical_shift"]

_LEAST = 1e-9  # mean square of a lever: below, the shift cannot be told from the other columns
_REACH = 1e6  # of the values' range: a crossing beyond says nothing
_CLOSE = 1e-10  # of the range searched
_TIE = 1e-9  # ranks: so little is rounding


def typical_shift(values: Floats, lever: Floats) -> float | None:
    """Return by how much values grow along a lever, None where the lever tells nothing.

    Of two samples, with a lever of -1/2 and 1/2 less its mean, this is Hodges' and Lehmann's
    estimate (1963): the median of all differences.

    Example::

        >>> lever = np.repeat([-0.5, 0.5], 8)
        >>> round(typical_shift(np.tile(np.arange(8.0), 2) + 100 * lever, lever), 6)
        100.0
    """
    return _crossing(values, lever, 0.0) if _long(lever) else None


def shift_bounds(values: Floats, lever: Floats, chance: float = 0.01) -> tuple[float, float] | None:
    """Bound the shift along a lever, or None where the values are too few to.

    A rank test turned round: ``S(d) = sum(lever * rank(values - d * lever))`` falls as d grows,
    and d is believed while S is within what shuffled ranks give (normal quantile, exact variance).
    Of two samples that is the Mann-Whitney test; with a lever from which other columns were
    projected it is the aligned rank test of a regression (Adichie 1978).

    Args:
        values: What a regression left over.
        lever: What is asked about, orthogonal to all other columns, to a constant too.
        chance: How often the bounds may miss, on both sides together.

    Example::

        >>> lever = np.repeat([-0.5, 0.5], 8)
        >>> low, high = shift_bounds(np.tile(np.arange(8.0), 2) + 100 * lever, lever)
        >>> round(low, 6), round(high, 6)
        (96.0, 104.0)
    """
    size = len(values)
    sure = NormalDist().inv_cdf(1 - chance / 2)
    limit = sure * float(np.sqrt(lever @ lever * size * (size + 1) / 12))
    if not _long(lever) or _sum(-lever, lever) >= -limit:  # S never gets lower than this
        return None
    return _crossing(values, lever, limit), _crossing(values, lever, -limit)


def student(freedom: float, chance: float) -> float:
    """Return what Student's t exceeds, on either side, with a chance; Hill's algorithm 396 (1970).

    Args:
        freedom: Degrees of freedom, 2 or more; need not be whole.
        chance: Of both sides together.

    Example::

        >>> round(student(7, 0.01), 2), round(student(1e6, 0.05), 2)
        (3.5, 1.96)
    """
    n = freedom
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = float((d * chance) ** (2 / n))
    if y <= a + 0.05:
        part = 1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)
        return math.sqrt(n * ((part * y - 1) * (n + 1) / (n + 2) + 1 / y))
    x = NormalDist().inv_cdf(chance / 2)
    y = x * x
    c += 0.3 * (n - 4.5) * (x + 0.6) if n < 5 else 0.0
    c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
    y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
    return math.sqrt(n * math.expm1(a * y * y))


def _long(lever: Floats) -> bool:
    return len(lever) > 1 and float(lever @ lever) > _LEAST * len(lever)


def _crossing(values: Floats, lever: Floats, at: float) -> float:
    """Return the d at which S falls through a height; the middle of where it rests there."""
    reach = max(float(np.ptp(values)), 1e-9) / float(np.sqrt(lever @ lever / len(lever)))
    low, high = -reach, reach
    while _sum(values - low * lever, lever) <= at and low > -_REACH * reach:
        low *= 2
    while _sum(values - high * lever, lever) >= at and high < _REACH * reach:
        high *= 2
    return (_last(values, lever, at, low, high, 1) + _last(values, lever, at, low, high, -1)) / 2


def _last(values: Floats, lever: Floats, at: float, low: float, high: float, resting: int) -> float:
    """Halve until the place is known; where S rests at the height, go on up or down."""
    close, tie = _CLOSE * (high - low), _TIE * len(values)
    while high - low > close:
        middle = (low + high) / 2
        off = _sum(values - middle * lever, lever) - at
        if off > tie or (abs(off) <= tie and resting > 0):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _sum(values: Floats, lever: Floats) -> float:
    """Return the lever's sum over centred ranks; values that are equal share theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2
    return float((rank - (len(values) + 1) / 2)[place] @ lever)
