"""Which of several series that wander lies above the others: the ranks of a job.

Each series is its level plus white noise plus a first-order autoregression, see `pace`. Levels of
healthy ranks differ a little, too; how much is weighed as the correlations are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.statistics.pace import PRIOR, Posterior, clipped, joined, rotated
from lightning_rlprof.tables.arrays import Float64s, Int64s

_SPREADS = np.array([0.0, 0.5, 1.0, 2.0, 5.0, 12.0, 30.0])  # of levels, by their own variance
_SPREAD_PRIOR = np.array([0.7, *[0.05] * 6])
_APART = (
    0.2  # healthy levels, by noise alone, lie no further apart: two noisy series show no spread
)


@dataclass(frozen=True, eq=False)
class Panel:
    """Levels of series under each correlation.

    Attributes:
        level: Generalized least squares mean; shape (points, series).
        rest: Weighted sum of squares about it; same shape.
        information: ``1' V^-1 1``; shape (points,).
        log_determinant: ``ln |V|``; shape (points,).
        values: Number of values of each series.
    """

    level: Float64s
    rest: Float64s
    information: Float64s
    log_determinant: Float64s
    values: int


def panel(steps: Int64s, series: Float64s) -> Panel:
    """Find the levels of series.

    Args:
        steps: Ascending step numbers.
        series: Shape (series, steps), without NaN.
    """
    table = np.stack([clipped(each) for each in series], axis=1)
    number, table = joined(steps, np.append(table, np.ones((len(table), 1)), axis=1))
    turned, weights, log_determinant = rotated(number, table)
    ones, values = turned[:, :, -1:], turned[:, :, :-1]
    square = np.append(
        (weights @ values**2).reshape(-1, len(series)), [np.sum(table[:, :-1] ** 2, axis=0)], axis=0
    )
    cross = np.append(
        (weights @ (values * ones)).reshape(-1, len(series)), [table[:, :-1].sum(axis=0)], axis=0
    )
    information = np.append((weights @ ones**2).ravel(), float(len(table)))
    level = cross / information[:, None]
    rest = np.maximum(square - level * cross, 1e-14 * np.maximum(square, 1e-300))
    return Panel(level, rest, information, log_determinant, len(table))


def above_the_others(found: Panel, suspect: int, others: Sequence[int]) -> Posterior:
    """Return what is known of a series' level above the mean of the others."""
    count = len(others)
    chosen = list(others)
    level = found.level[:, chosen]
    between = np.sum((level - level.mean(axis=1, keepdims=True)) ** 2, axis=1)
    spread = (1 + _SPREADS)[None, :] / found.information[:, None]
    total = found.rest[:, chosen].sum(axis=1)[:, None] + between[:, None] / spread
    freedom = count * (found.values - 1) + count - 1
    likelihood = -0.5 * (
        count * (found.log_determinant + np.log(found.information))[:, None]
        + (count - 1) * np.log(spread)
        + freedom * np.log(total)
    )
    weight = np.log(PRIOR)[:, None] + np.log(_SPREAD_PRIOR) + likelihood
    weight = np.exp(weight - weight.max())
    noise = total / freedom / found.information[:, None]
    most = _APART**2 + between[:, None] / max(count - 1, 1)
    error = np.sqrt((noise + np.minimum(noise * _SPREADS, most)) * (1 + 1 / count))
    center = np.broadcast_to((found.level[:, suspect] - level.mean(axis=1))[:, None], error.shape)
    return Posterior((weight / weight.sum()).ravel(), center.ravel(), error.ravel(), float(freedom))


_FEW = 3  # series, up to which the spread of levels cannot be known
_FEW_LEVEL, _FEW_LEAST = 0.1, 2.0  # so the level is a tenth, and the effect twice as large


def highest(
    steps: Int64s, series: Float64s, level: float, least: float
) -> dict[int, tuple[float, Posterior]]:
    """Return the series that lie above the others, with p-value and what is known of them.

    The j highest are taken out, and the j-th is tested against the rest, from a third of all series
    down to one; the first that is significant accuses all j (Rosner 1983).

    Args:
        steps: Ascending step numbers.
        series: Logarithms; shape (series, steps), without NaN.
        level: Chance that any healthy series is accused.
        least: How far above the others a series must be.
    """
    count = len(series)
    if count <= _FEW:
        level, least = level * _FEW_LEVEL, least * _FEW_LEAST
    found = panel(steps, series)
    order = np.argsort(-found.level[-1], kind="stable").tolist()
    for out in range(max((count - 1) // 3, 1), 0, -1):
        rest = order[out:]
        known = above_the_others(found, order[out - 1], rest)
        chance = min((1 - known.above(0.0)) * (count - out + 1), 1.0)
        if chance <= level and float(known.weight @ known.center) > least:
            return {each: (chance, above_the_others(found, each, rest)) for each in order[:out]}
    return {}
