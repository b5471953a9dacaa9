"""For how many steps a rank keeps its pace, and steps joined so that each says something new."""

import numpy as np

from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.others import middle

__all__ = ["joined", "lasting"]

_LAGS = 3  # neighbours that are asked whether steps depend on each other at all
_SURE = 3.3  # standard errors: a healthy run that is called drifting loses most of its evidence
_SEVERAL = 4  # ranks, of which one may go its own way
_MEDIAN = 1.2533  # a median's standard error by a mean's
_WINDOW = 5.0  # correlation times over which correlations are summed (Sokal 1997)
_APART = 2.0  # correlation times a block lasts: neighbours then have less than 0.16 in common


def lasting(effect: Floats) -> int:
    """Return how many steps have to be joined into one until they say something independent.

    One where a step tells nothing of the next. Otherwise twice the integrated correlation time
    ``1 + 2 * (r1 + r2 + …)``. Correlations are the median of the ranks', of four or more without
    the highest: one rank that is slow for a while is no drift of all.

    Args:
        effect: How much slower than the others; shape (ranks, steps), NaN where a step says
            nothing.

    Example::

        >>> random = np.random.default_rng(0)
        >>> noise = random.normal(size=(8, 200))
        >>> lasting(noise), lasting(np.cumsum(noise, axis=1)) > 20
        (1, True)
    """
    steps = effect.shape[1]
    time = _time(effect, *effect.shape) if steps > _LAGS + 1 else 1.0
    return int(min(np.ceil(_APART * time), steps)) if time > 1 else 1


def joined(effect: Floats, size: int) -> Floats:
    """Return the medians of so many steps each, the first ones first; what is left over goes.

    Args:
        effect: Shape (ranks, steps, …).
        size: Steps a block; 1 changes nothing.
    """
    if size <= 1:
        return effect
    blocks = effect.shape[1] // size
    shape = (len(effect), blocks, size, *effect.shape[2:])
    return middle(effect[:, : blocks * size].reshape(shape), axis=2)


def _time(effect: Floats, ranks: int, steps: int) -> float:
    """Return the correlation time of one series, 1 where none is proven."""
    rest = effect - middle(effect, axis=1)[:, None]
    spread = middle(np.abs(rest), axis=1)[:, None] * 1.4826
    rest = np.clip(rest, -3 * spread, 3 * spread)  # a hiccup is no pace
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


def _correlation(rest: Floats, power: Floats, lag: int) -> float:
    """Return the median over ranks of the correlation with so many steps later.

    Values were taken from their own median, which makes it too small by about one over the steps.
    """
    known = power > 0
    found = np.sort(_mean(rest[:, :-lag] * rest[:, lag:])[known] / power[known])
    own = float(np.median(found[:-1] if len(found) >= _SEVERAL else found))
    return own + 1.0 / float(rest.shape[1])


def _mean(values: Floats) -> Floats:
    """Return the mean over steps, NaN left out; 0 where there is nothing else."""
    count = np.maximum(np.sum(~np.isnan(values), axis=1), 1)
    found: Floats = np.nan_to_num(values).sum(axis=1) / count
    return found
