"""Nonparametric tests: binomial tails, Holm's correction, and intervals for medians and shifts."""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from lightning_rlprof.tables.arrays import Float64s


@lru_cache(maxsize=256)
def at_least(trials: int, chance: float = 0.5) -> Float64s:
    """Return for k = 0 … trials how likely k successes or more are, each with the given chance.

    Sums of the binomial distribution, smallest terms first; the array is shared, do not write.

    Example::

        >>> at_least(3).round(9).tolist()
        [1.0, 0.875, 0.5, 0.125]
    """
    if not 0.0 < chance < 1.0:
        raise ValueError(f"chance {chance} must be between 0 and 1")
    log = np.log(np.arange(1, trials + 1, dtype=float))
    factorial = np.concatenate([[0.0], np.cumsum(log)])
    k = np.arange(trials + 1)
    terms = factorial[-1] - factorial - factorial[::-1]
    terms = np.exp(terms + k * np.log(chance) + (trials - k) * np.log1p(-chance))
    tail: Float64s = np.minimum(np.cumsum(terms[::-1])[::-1], 1.0)
    tail[0] = 1.0
    tail.setflags(write=False)
    return tail


def sign_test(values: Float64s) -> Float64s:
    """Return per series the p-value of its number of values above zero, for a median of zero.

    One-sided and exact. Values of exactly zero count against it; NaN doesn't count.

    Args:
        values: Series along axis 1; shape (ranks, steps) or (ranks, steps, …).

    Example::

        >>> sign_test(np.array([[1.0, 2.0, 0.5, np.nan]])).round(9).tolist()
        [0.125]
    """
    trials = np.sum(~np.isnan(values), axis=1)
    above = np.sum(values > 0, axis=1)
    found = np.ones(trials.shape)
    for number in np.unique(trials).tolist():
        here = trials == number
        found[here] = at_least(number)[above[here]]
    return found


def holm(chances: Float64s) -> Float64s:
    """Correct for multiple tests by Holm's step-down: controls the chance of any error.

    Args:
        chances: p-values of one family, any shape; the result has the same.

    Example::

        >>> holm(np.array([0.01, 0.04, 0.5])).tolist()
        [0.03, 0.08, 0.5]
    """
    flat = chances.ravel()
    order = np.argsort(flat, kind="stable")
    factor = len(flat) - np.arange(len(flat))
    found = np.empty(len(flat))
    found[order] = np.minimum(np.maximum.accumulate(flat[order] * factor), 1.0)
    return found.reshape(chances.shape)


def median_bounds(values: Float64s, confidence: float = 0.95) -> tuple[float, float] | None:
    """Bound the median of what the values were drawn from, or None where they are too few.

    The k-th smallest and k-th largest value, k as the binomial distribution has it: exact for any
    continuous distribution, and never narrower than asked for. NaN is left out.

    Example::

        >>> median_bounds(np.arange(8.0))
        (0.0, 7.0)
    """
    ordered = np.sort(values[~np.isnan(values)])
    tail = at_least(len(ordered))
    # With k values cut off on a side, the median lies beyond with P(X <= k) = P(X >= n - k).
    cut = int(np.sum(tail[::-1] <= (1.0 - confidence) / 2)) - 1
    if cut < 0:
        return None
    return float(ordered[cut]), float(ordered[-1 - cut])


_LEAST = 1e-9  # mean square of a lever that is needed to separate the shift from other columns
_REACH = 1e6  # of the values' range: a crossing beyond says nothing
_CLOSE = 1e-10  # of the range searched
_TIE = 1e-9  # ranks: so little is rounding


def typical_shift(values: Float64s, lever: Float64s) -> float | None:
    """Return by how much values grow along a lever, None if the lever is too short.

    Of two samples, with a lever of -1/2 and 1/2 less its mean, this is Hodges' and Lehmann's
    estimate (1963): the median of all differences.

    Example::

        >>> lever = np.repeat([-0.5, 0.5], 8)
        >>> round(typical_shift(np.tile(np.arange(8.0), 2) + 100 * lever, lever), 6)
        100.0
    """
    return _crossing(values, lever, 0.0) if _long(lever) else None


def shift_bounds(
    values: Float64s, lever: Float64s, chance: float = 0.01
) -> tuple[float, float] | None:
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


def _long(lever: Float64s) -> bool:
    return len(lever) > 1 and float(lever @ lever) > _LEAST * len(lever)


def _crossing(values: Float64s, lever: Float64s, at: float) -> float:
    """Return the d at which S falls through a height; the middle of where it rests there."""
    reach = max(float(np.ptp(values)), 1e-9) / float(np.sqrt(lever @ lever / len(lever)))
    low, high = -reach, reach
    while _sum(values - low * lever, lever) <= at and low > -_REACH * reach:
        low *= 2
    while _sum(values - high * lever, lever) >= at and high < _REACH * reach:
        high *= 2
    return (_last(values, lever, at, low, high, 1) + _last(values, lever, at, low, high, -1)) / 2


def _last(
    values: Float64s, lever: Float64s, at: float, low: float, high: float, resting: int
) -> float:
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


def _sum(values: Float64s, lever: Float64s) -> float:
    """Return the lever's sum over centred ranks; values that are equal share theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2
    return float((rank - (len(values) + 1) / 2)[place] @ lever)
