"""Time series of steps: autocorrelation, blocks of independent steps, and ranges of slow steps."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.statistics.robust import nan_median
from lightning_rlprof.tables.arrays import Float64s, Int64s

_LAGS = 3  # neighboring steps that show whether there is autocorrelation
_SURE = 3.3  # standard errors: false autocorrelation costs most of the evidence
_SEVERAL = 4  # ranks from which on the most correlated one is ignored
_MEDIAN = 1.2533  # a median's standard error by a mean's
_WINDOW = 5.0  # correlation times over which correlations are summed (Sokal 1997)
_APART = 2.0  # correlation times a block lasts: neighbours then have less than 0.16 in common


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
    spread = nan_median(np.abs(rest), axis=1)[:, None] * 1.4826
    rest = np.clip(rest, -3 * spread, 3 * spread)  # outliers are not autocorrelation
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
    own = float(np.median(found[:-1] if len(found) >= _SEVERAL else found))
    return own + 1.0 / float(rest.shape[1])


def _mean(values: Float64s) -> Float64s:
    """Return the mean over steps, NaN left out; 0 where there is nothing else."""
    count = np.maximum(np.sum(~np.isnan(values), axis=1), 1)
    found: Float64s = np.nan_to_num(values).sum(axis=1) / count
    return found


_WHILE_SLOW = 0.8  # how often a slow rank is beyond the threshold; only the power depends on it
_RAREST, _MOST = 0.05, 0.5  # bounds of how often a healthy one is


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
    usual = np.clip((others[1] + 1) / (others[0] + 2), _RAREST, _MOST)
    return np.log(_WHILE_SLOW / usual), np.log((1 - _WHILE_SLOW) / (1 - usual))
