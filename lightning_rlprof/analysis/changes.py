"""When a rank was slow: the stretch of steps in which "slower than the others" piles up."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.spans import Int64s

__all__ = ["Stretches", "stretches"]

_WHILE_SLOW = 0.8  # how often a slow rank is beyond the threshold; only the power depends on it
_RAREST, _MOST = 0.05, 0.5  # bounds of how often a healthy one is


@dataclass(frozen=True, eq=False)
class Stretches:
    """The most telling stretch of each series: its first and last step, and its p value."""

    first: Int64s
    last: Int64s
    chance: Floats


def stretches(effect: Floats, threshold: float) -> Stretches:
    """Find in each series the stretch in which values above the threshold are most out of place.

    A step above the threshold adds ``ln(0.8 / q)``, one below ``ln(0.2 / (1 - q))``; the stretch is
    the one with the greatest sum S (Page's CUSUM, 1954). q is how often the *other* ranks are off
    by the threshold in either direction, never taken below 5 %. For a rank like the others exp(S)
    averages 1 from any one beginning, so S is reached by chance with at most ``steps * exp(-S)``
    (Ville 1939).

    Args:
        effect: How much slower than the others, relative; shape (ranks, steps, series), NaN for
            steps that say nothing.
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


def _scores(known: npt.NDArray[np.bool_], off: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return what a step above and one not above the threshold adds, by rank and series."""
    trials, times = known.sum(axis=1), off.sum(axis=1)
    others = trials.sum(axis=0) - trials, times.sum(axis=0) - times
    usual = np.clip((others[1] + 1) / (others[0] + 2), _RAREST, _MOST)
    return np.log(_WHILE_SLOW / usual), np.log((1 - _WHILE_SLOW) / (1 - usual))
