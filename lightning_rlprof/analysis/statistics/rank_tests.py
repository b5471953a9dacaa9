"""Tests of ranks over steps: tails, intervals for medians, and steps that depend on one another."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.statistics.robust import MAD_TO_SPREAD, nan_median
from lightning_rlprof.tables.arrays import Float64s, Int64s

# Beyond this reach, normal tails are below 1e-315, too small for floats.
_REACH, _STEP = 38.0, 0.005
_GRID = np.arange(0.0, _REACH, _STEP)
_LOG_TAIL = np.log([0.5 * math.erfc(z / math.sqrt(2)) for z in _GRID.tolist()])

_LAGS = 3  # This many neighboring steps show whether there is autocorrelation.
_SURE = 3.3  # False autocorrelation costs most of the evidence, so it takes many standard errors.
_MIN_RANKS = 4  # From four ranks on, the most correlated one is ignored.
_MEDIAN = 1.2533  # A median's standard error is a mean's times this.
_WINDOW = 5.0  # Correlations are summed over this many correlation times (Sokal 1997).
_APART = 2.0  # Blocks of this many correlation times have less than 0.16 in common.
_WHILE_SLOW = 0.8  # A slow rank is beyond the threshold this often; only the power depends on it.
_MIN_USUAL, _MAX_USUAL = 0.05, 0.5  # A healthy rank is beyond it at least and at most this often.


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


def lasting(effect: Float64s) -> int:
    """Return how many steps to join into one block so that blocks are independent.

    One if steps are not autocorrelated. Otherwise twice the integrated correlation time
    ``1 + 2 * (r1 + r2 + …)``. Correlations are the median over ranks, of four or more without the
    highest, so that one rank that is slow for a while doesn't count.

    Args:
        effect: Slowdown relative to the others; shape (ranks, steps), NaN for no data.

    Example::

        >>> random = np.random.default_rng(0)
        >>> noise = random.normal(size=(8, 200))
        >>> lasting(noise), lasting(np.cumsum(noise, axis=1)) > 20
        (1, True)
    """
    steps = effect.shape[1]
    time = _time(effect, *effect.shape) if steps > _LAGS + 1 else 1.0
    return int(min(np.ceil(_APART * time), steps)) if time > 1 else 1


def joined(effect: Float64s, size: int) -> Float64s:
    """Return the medians of blocks of steps; steps that fill no block are dropped.

    Args:
        effect: Shape (ranks, steps, …).
        size: Steps per block; 1 changes nothing.
    """
    if size <= 1:
        return effect
    blocks = effect.shape[1] // size
    shape = (len(effect), blocks, size, *effect.shape[2:])
    return nan_median(effect[:, : blocks * size].reshape(shape), axis=2)


def _time(effect: Float64s, ranks: int, steps: int) -> float:
    """Return the integrated correlation time, 1 if no autocorrelation is significant."""
    rest = effect - nan_median(effect, axis=1)[:, None]
    spread = nan_median(np.abs(rest), axis=1)[:, None] * MAD_TO_SPREAD
    rest = np.clip(rest, -3 * spread, 3 * spread)  # Outliers are not autocorrelation.
    power = _mean(rest**2)
    if not (power > 0).any():
        return 1.0
    near = sum((_correlation(rest, power, lag) for lag in range(1, _LAGS + 1)), 0.0)
    if near <= _SURE * _MEDIAN * np.sqrt(_LAGS / (ranks * steps)):
        return 1.0
    time = 1.0
    for lag in range(1, steps // 2):
        time += 2 * _correlation(rest, power, lag)
        if lag >= _WINDOW * time:
            break
    return max(float(time), 1.0)


def _correlation(rest: Float64s, power: Float64s, lag: int) -> float:
    """Return the median over ranks of the correlation at a lag.

    Values are relative to their own median, which makes it too small by about one over the steps.
    """
    known = power > 0
    found = np.sort(_mean(rest[:, :-lag] * rest[:, lag:])[known] / power[known])
    own = float(np.median(found[:-1] if len(found) >= _MIN_RANKS else found))
    return own + 1.0 / float(rest.shape[1])


def _mean(values: Float64s) -> Float64s:
    """Return the mean over steps, NaN left out; 0 where there is nothing else."""
    count = np.maximum(np.sum(~np.isnan(values), axis=1), 1)
    found: Float64s = np.nan_to_num(values).sum(axis=1) / count
    return found


@dataclass(frozen=True, eq=False)
class Stretches:
    """The most significant range of each series: its first and last step, and its p-value."""

    first: Int64s
    last: Int64s
    chance: Float64s


def stretches(effect: Float64s, threshold: float) -> Stretches:
    """Find in each series the range of steps with significantly many values above a threshold.

    A step above the threshold adds ``ln(0.8 / q)``, one below ``ln(0.2 / (1 - q))``; the range is
    the one with the greatest sum S (Page's CUSUM, 1954). q is how often the *other* ranks are off
    by the threshold in either direction, at least 5%. For a rank like the others exp(S) averages 1
    from any one start, so S is reached by chance with at most ``steps * exp(-S)`` (Ville 1939).

    Args:
        effect: Slowdown relative to the others; shape (ranks, steps, series), NaN for no data.
        threshold: What counts as slow.
    """
    known = ~np.isnan(effect)
    above = known & (np.nan_to_num(effect) > threshold)
    gain, loss = _scores(known, known & (np.abs(np.nan_to_num(effect)) > threshold))
    shape = gain.shape
    score, best = np.zeros(shape), np.zeros(shape)
    start, first, last = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for step in range(effect.shape[1]):
        start = np.where(score > 0, start, step)
        score = score + np.where(above[:, step], gain, np.where(known[:, step], loss, 0.0))
        score = np.maximum(score, 0.0)
        better = score > best
        best = np.where(better, score, best)
        first, last = np.where(better, start, first), np.where(better, step, last)
    trials = known.sum(axis=1)
    return Stretches(first, last, np.minimum(trials * np.exp(-best), 1.0))


def _scores(known: npt.NDArray[np.bool_], off: npt.NDArray[np.bool_]) -> tuple[Float64s, Float64s]:
    """Return what a step above and one not above the threshold adds, by rank and series."""
    trials, times = known.sum(axis=1), off.sum(axis=1)
    others = trials.sum(axis=0) - trials, times.sum(axis=0) - times
    usual = np.clip((others[1] + 1) / (others[0] + 2), _MIN_USUAL, _MAX_USUAL)
    return np.log(_WHILE_SLOW / usual), np.log((1 - _WHILE_SLOW) / (1 - usual))
