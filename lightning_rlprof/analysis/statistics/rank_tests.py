"""Nonparametric tests: binomial tails, Holm's correction, and intervals for medians."""

from functools import lru_cache

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
