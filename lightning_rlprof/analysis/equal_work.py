"""How one run's time compares with another's at equal work, and what changed work explains."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.drift import lasting
from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.intervals import shift_bounds, student, typical_shift
from lightning_rlprof.analysis.worked import expected

__all__ = ["Equal", "equal_work"]

_ROUNDS = 12
_CLOSE = 1e-6
_MOST = 2_000  # steps per run; more are thinned, which only widens the interval
_APART = 2  # times the correlation time is what `lasting` tells
_FREEDOM = 2.0
_SAME = 1e-6  # of the largest value: a column that changes less is a constant


class Equal(NamedTuple):
    """Two samples compared.

    Attributes:
        work: Mean time that B's work explains over A's; 1 where no work was given, None where
            work and run cannot be told apart.
        bounds: Of the typical ratio B/A at equal work; None where nothing is sure.
        lasting: For how many steps the pace lasts; 1 where steps are independent.
    """

    work: float | None
    bounds: tuple[float, float] | None
    lasting: int


class _Fit(NamedTuple):
    """Logarithm of time over what was expected less the shift; the lever; the shift; and work."""

    rest: Floats
    lever: Floats
    shift: float
    work: float


def equal_work(a: Floats, b: Floats, work: Sequence[tuple[Floats, Floats]], chance: float) -> Equal:
    """Regress the times of both runs together on their work, with a factor for the run.

    ``time = factor of the run * (a + b * work[0] + …) * noise``: `expected` fits the sum to times
    from which the factor was taken off, `typical_shift` the factor to what it leaves over, in turn
    until nothing changes. `shift_bounds` bounds the factor with the sum's coefficients free, so
    what they are unsure of widens it.

    Args:
        a: Times of run A, above zero.
        b: Times of run B.
        work: By counter what A and B had to do in these steps.
        chance: How often the bounds may miss.
    """
    run = np.repeat([-0.5, 0.5], [len(a), len(b)])
    columns = [np.concatenate(pair) for pair in work]
    columns = [each for each in columns if np.ptp(each) > _SAME * np.abs(each).max()]
    fit = _fit(np.concatenate([a, b]), run, columns)
    if fit is None:
        return Equal(None, None, 1)
    lasts = max(lasting(fit.rest[None, side]) for side in (run < 0, run > 0))
    found = _bounds(fit, run, chance) if lasts == 1 else _drifting(fit, lasts, columns, chance)
    if found is None:
        return Equal(fit.work, None, lasts)
    low, high = (float(np.exp(fit.shift + each)) for each in found)
    return Equal(fit.work, (low, high), lasts)


def _fit(ns: Floats, run: Floats, columns: Sequence[Floats]) -> _Fit | None:
    shift = float(np.log(np.median(ns[run > 0]) / np.median(ns[run < 0])))
    for _ in range(_ROUNDS):
        usual = expected(ns * np.exp(-shift * run), columns)
        rest, lever = np.log(ns / usual) - shift * run, _lever(run, usual, columns)
        more = typical_shift(rest, lever)
        if more is None:
            return None
        shift += more
        if abs(more) < _CLOSE:
            break
    work = float(usual[run > 0].mean() / usual[run < 0].mean()) if columns else 1.0
    return _Fit(np.log(ns / usual) - shift * run, lever, shift, work)


def _lever(run: Floats, usual: Floats, columns: Sequence[Floats]) -> Floats:
    """Return what of the run's factor no change of the fit's coefficients could have made."""
    table = np.stack([np.ones_like(usual), *columns], axis=1) / usual[:, None]
    table /= np.abs(table).max(axis=0)
    found: Floats = run - table @ np.linalg.lstsq(table, run, rcond=1e-9)[0]
    return found


def _bounds(fit: _Fit, run: Floats, chance: float) -> tuple[float, float] | None:
    """Bound the shift by ranks; very long runs are thinned."""
    some = [np.flatnonzero(side) for side in (run < 0, run > 0)]
    at = np.concatenate([each[:: -(-len(each) // _MOST)] for each in some])
    lever = fit.lever[at]
    return shift_bounds(fit.rest[at], lever - lever.mean(), chance)


def _drifting(
    fit: _Fit, lasts: int, columns: Sequence[Floats], chance: float
) -> tuple[float, float] | None:
    """Bound the shift by Student's t, with as many steps as say something new: too few for ranks.

    A mean's variance is greater by the correlation time; residuals beyond three spreads count as
    three, as they do for the correlation.
    """
    time = lasts / _APART
    freedom = len(fit.rest) / time - 2 - len(columns)
    if freedom < _FREEDOM:
        return None
    spread = 1.4826 * float(np.median(np.abs(fit.rest))) or float(fit.rest.std())
    rest = np.clip(fit.rest, -3 * spread, 3 * spread)
    error = np.sqrt(float(rest.var()) * time / float(fit.lever @ fit.lever))
    half = student(freedom, chance) * float(error)
    return -half, half
