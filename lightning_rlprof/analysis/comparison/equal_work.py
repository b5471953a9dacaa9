"""The change of a time between runs, apart from what their work explains.

``time = factor of the run * (a + b * work[0] + …) * noise``: `fit` finds the sum and the factors,
`between_steps` and `between_runs` say how sure the difference of the factors is. See
docs/internals/statistics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.statistics.pace import (
    Posterior,
    clipped,
    grams,
    joined,
    orthonormal,
    posterior,
)
from lightning_rlprof.analysis.statistics.robust import expected
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask

_ROUNDS = 12
_CLOSE = 1e-6
_SAME = 1e-6  # A column that changes by less of its largest value is a constant.
_MIN_STEPS_OF_NOISE = 8  # A run with fewer steps says nothing of its noise.
_MAX_SLOPE_DIFFERENCE = 0.5  # Slopes that differ by less of the steeper one are one trend.

_NOISE, _NOISE_FREEDOM = 0.01, 4  # Runs of one code differ by 1%, with four degrees of freedom.

# A level may lie this far beyond what its steps showed.
_BEYOND, _BEYOND_SHORT = math.log(1.10), math.log(1.20)
_STEPS, _STEPS_SHORT = 24, 12
_LOW, _HIGH = 0.02, 0.98


@dataclass(frozen=True, eq=False)
class Fit:
    """What work explains of the times of some runs.

    Attributes:
        rest: By run, the logarithm of time over what work explains.
        usual: By run, what work explains, on one scale for all runs.
        columns: How ``ln(usual)`` changes with its coefficients; shape (values, columns), all runs.
    """

    rest: list[Float64s]
    usual: list[Float64s]
    columns: Float64s

    @property
    def levels(self) -> Float64s:
        """Logarithm of each run's factor."""
        rest = np.concatenate([clipped(each) for each in self.rest])
        return _levels(rest, _runs(self.rest), self.columns)


def fit(times: Sequence[Float64s], work: Sequence[Sequence[Float64s]] = ()) -> Fit:
    """Regress the times of all runs together on their work, with a factor for each run.

    Args:
        times: By run, the time per step in ns, above zero.
        work: By counter, then by run, the amounts of the same steps.
    """
    ns, run = np.concatenate(times), _runs(times)
    amounts = [np.concatenate(each) for each in work]
    amounts = [each for each in amounts if np.ptp(each) > _SAME * np.abs(each).max()]
    levels = np.log([np.median(each) for each in times])
    levels -= levels.mean()
    for _ in range(_ROUNDS):
        usual = expected(ns * np.exp(-levels[run]), amounts)
        columns = orthonormal([each / usual for each in (np.ones_like(ns), *amounts)])
        if not amounts:
            columns = columns[:, :0]
        rest = np.log(ns / usual)
        before = levels
        levels = _levels(
            np.concatenate([clipped(rest[run == at]) for at in range(len(times))]), run, columns
        )
        levels = levels - levels.mean()
        if np.abs(levels - before).max() < _CLOSE:
            break
    split = np.cumsum([len(each) for each in times])[:-1]
    return Fit(np.split(rest, split), np.split(usual, split), columns)


def _runs(times: Sequence[Float64s]) -> Int64s:
    return np.repeat(np.arange(len(times)), [len(each) for each in times])


def _levels(rest: Float64s, run: Int64s, columns: Float64s) -> Float64s:
    """Return one level per run by least squares beside the columns."""
    table = np.concatenate([run[:, None] == np.arange(run[-1] + 1), columns], axis=1)
    found: Float64s = np.linalg.lstsq(table, rest, rcond=1e-9)[0][: run[-1] + 1]
    return found


def between_steps(
    rest: Sequence[Float64s], columns: Float64s, steps: Sequence[Int64s]
) -> Posterior | None:
    """Return what is known of the change from the first run to the second, by their steps.

    Args:
        rest: Logarithms of times, of two runs.
        columns: What else may explain them; shape (values of both runs, columns).
        steps: Step numbers of both runs.

    Returns:
        None if a run has fewer than 8 steps, or if work and run can't be separated.
    """
    if min(map(len, rest)) < _MIN_STEPS_OF_NOISE:
        return None
    if np.array_equal(rest[0], rest[1]):  # The run is compared with itself.
        return Posterior(np.ones(1), np.zeros(1), np.full(1, 1e-15), float(len(rest[0])))
    parts = np.split(columns, [len(rest[0])])
    values = [clipped(each) for each in rest]
    rises = [each - each.mean() for each in steps]
    slopes = [float(t @ y / max(t @ t, 1.0)) for t, y in zip(rises, values, strict=True)]
    shared = abs(slopes[1] - slopes[0]) < _MAX_SLOPE_DIFFERENCE * max(map(abs, slopes))
    for with_trend in (True, False) if shared else (False,):  # Work may rise as steps do.
        found = []
        for run, sign in enumerate((-0.5, 0.5)):
            ones = np.ones(len(values[run]))
            table = [values[run], sign * ones, ones, *parts[run].T]
            table += [rises[run]] if with_trend else []
            found.append(grams(*joined(steps[run], np.stack(table, axis=1))))
        known = posterior(found[0] + found[1], 0)
        if known is not None:
            return known
    return None


def between_runs(levels: Float64s, sides: Mask) -> Posterior:
    """Return what is known of the change between two sets of runs, by the levels of the runs.

    The spread of runs of one code is estimated from the runs of each side, with a prior of 1%
    (Kalibera and Jones, ISMM 2013: repeat where the variance is).

    Args:
        levels: Logarithm of each run's factor.
        sides: False for each run of the baseline, True for each candidate.
    """
    a, b = levels[~sides], levels[sides]
    freedom = len(levels) - 2
    squares = float(np.sum((a - a.mean()) ** 2) + np.sum((b - b.mean()) ** 2))
    variance = (_NOISE_FREEDOM * _NOISE**2 + squares) / (_NOISE_FREEDOM + freedom)
    error = math.sqrt(variance * (1 / len(a) + 1 / len(b)))
    center = float(b.mean() - a.mean())
    one = np.ones(1)
    return Posterior(one, center * one, error * one, float(_NOISE_FREEDOM + freedom))


def range_bounds(a: Float64s, b: Float64s) -> tuple[float, float]:
    """Bound the change from A to B by where their values lie, whatever their correlation.

    The level of a run is assumed to lie within what its steps showed, plus 10% (20% with 12 to 23
    steps) or a quarter of the range. So no step of B came near one of A if this excludes 0. Below
    12 steps the bounds are infinite.
    """
    least = min(len(a), len(b))
    if least < _STEPS_SHORT:
        return -math.inf, math.inf
    (low_a, high_a), (low_b, high_b) = (np.quantile(each, [_LOW, _HIGH]) for each in (a, b))
    beyond = _BEYOND if least >= _STEPS else _BEYOND_SHORT
    width = max(beyond, float(high_a - low_a + high_b - low_b) / 4)
    return float(low_b - high_a) - width, float(high_b - low_a) + width


@dataclass(frozen=True, eq=False)
class Change:
    """The logarithm of B/A at equal work: what steps or runs say of it, and bounds by ranges."""

    known: Posterior
    widest: tuple[float, float] = (-math.inf, math.inf)

    def interval(self, chance: float) -> tuple[float, float]:
        """Return the bounds that the change misses with a chance, on both sides together."""
        low, high = self.known.interval(chance)
        low, high = max(low, self.widest[0]), min(high, self.widest[1])
        return min(low, high), max(low, high)

    def exceeds(self, bound: float, chance: float) -> bool:
        """Return whether the change is above a bound, but for this chance."""
        return self.widest[0] >= bound or self.known.above(bound) >= 1 - chance

    def stays_below(self, bound: float, chance: float) -> bool:
        """Return whether the change is below a bound, but for this chance."""
        return self.widest[1] <= bound or self.known.above(bound) <= chance
