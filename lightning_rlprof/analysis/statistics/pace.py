"""Effects in step times whose pace wanders: least squares averaged over all plausible correlations.

The pace of a machine is white noise plus a first-order autoregression. One run rarely shows how
long its pace lasts, so no single correlation is estimated and believed: `Grams` holds the sums of
squares under each point of a grid, and `posterior` weighs the points by how well they explain the
data (restricted likelihood times a prior; the same idea as Müller, JBES 32(3), 2014).

`panel` holds several series that wander, the ranks of a job: which of them lies above the others.
Each is its level plus white noise plus a first-order autoregression. Levels of healthy ranks differ
a little, too; how much is weighed as the correlations are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_rlprof.analysis.statistics.rank_tests import student_tail
from lightning_rlprof.analysis.statistics.robust import spread_of
from lightning_rlprof.tables.arrays import Float64s, Int64s

_CORRELATIONS = np.array([0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.985])
_CORRELATION_PRIOR = np.array([0.15, 0.15, 0.15, 0.10, 0.10, 0.12, 0.08, 0.07, 0.05, 0.03])
_SHARES = np.array([0.1, 0.25, 0.5, 0.75, 0.85, 0.92, 0.96, 0.98, 1.0])
_SHARE_PRIOR = np.array([0.175, 0.2, 0.225, 0.15, 0.08, 0.06, 0.05, 0.03, 0.03])
_WHITE = 0.5  # Prior of white noise, which is the last point of the grid.

# A coarser grid had 15% false alarms in 300 steps of AR(.95); this one has 1.2%.
PRIOR = np.append((1 - _WHITE) * np.outer(_CORRELATION_PRIOR, _SHARE_PRIOR).ravel(), _WHITE)
"""Prior of the grid's points; the last one is white noise."""

_PER_VALUE = np.append(
    1 / ((1 - _SHARES) + _SHARES * ((1 + _CORRELATIONS) / (1 - _CORRELATIONS))[:, None]).ravel(),
    1.0,
)

LEAST_CHANCE = 1e-12
"""The smallest p-value that is shown: below it, no model of noise is believed."""

MAX_VALUES = 300
"""Number of values of a series up to which it is taken as it is."""

# Values further away than this many spreads are clipped; the second is for heavy tails.
_SPREADS, _HEAVY_SPREADS = 4.0, 3.0
_HEAVY = 0.02  # Tails are heavy if a larger share is beyond `_SPREADS`: white noise has 0.006%.

# The variance between levels may be this multiple of the variance of one level.
_LEVEL_SPREADS = np.array([0.0, 0.5, 1.0, 2.0, 5.0, 12.0, 30.0])
_LEVEL_PRIOR = np.array([0.7, *[0.05] * 6])
# Healthy levels lie no further apart, even if series are too noisy to show their spread.
_APART = 0.2
_FEW = 3  # With this many series or fewer, the spread of levels is unknown.
# The level is then a tenth, and the effect must be twice as large.
_FEW_LEVEL, _FEW_LEAST = 0.1, 2.0


@lru_cache(maxsize=64)
def _information(values: int) -> Float64s:
    """Return ``1' V^-1 1`` of a series without gaps at each point of the grid."""
    size = min(values, MAX_VALUES)
    sums = grams(np.arange(size), np.ones((size, 1))).products[:, 0, 0]
    found: Float64s = sums + (values - size) * _PER_VALUE
    return found


@dataclass(frozen=True, eq=False)
class Grams:
    """Sums of products of the columns of a series under each point of the grid.

    Attributes:
        products: ``Z' V^-1 Z`` of the columns Z; shape (points, columns, columns).
        log_determinant: ``ln |V|``; shape (points,).
        values: Number of values of the series.
    """

    products: Float64s
    log_determinant: Float64s
    values: int

    def __add__(self, other: "Grams") -> "Grams":
        """Join two independent series, such as two runs."""
        return Grams(
            self.products + other.products,
            self.log_determinant + other.log_determinant,
            self.values + other.values,
        )


@lru_cache(maxsize=16)
def _rotations(steps: bytes) -> tuple[Float64s, Float64s, Float64s]:
    """Return eigenvectors and inverse eigenvalues of ``V`` at each grid point but the last.

    ``V = (1 - share) I + share * correlation^|i - j|``; all shares have the same eigenvectors.

    Returns:
        Vectors (correlations, values, values), one over eigenvalues (correlations, shares,
        values), and ``ln |V|`` (points,).
    """
    at = np.frombuffer(steps, dtype=np.int64)
    apart = np.abs(at[:, None] - at[None, :])
    values, vectors = np.linalg.eigh(_CORRELATIONS[:, None, None] ** apart)
    scale = (1 - _SHARES)[None, :, None] + _SHARES[None, :, None] * values[:, None, :]
    scale = np.maximum(scale, 1e-9)
    return vectors, 1 / scale, np.append(np.log(scale).sum(axis=2).ravel(), 0.0)


def rotated(steps: Int64s, table: Float64s) -> tuple[Float64s, Float64s, Float64s]:
    """Return columns turned so that ``V`` is diagonal, with its inverse diagonal.

    Args:
        steps: Ascending step numbers; missing ones stay gaps.
        table: Shape (values, columns).

    Returns:
        Turned columns (correlations, values, columns), weights (correlations, shares, values) and
        ``ln |V|`` (points,). White noise, the grid's last point, needs neither turning nor weights.
    """
    vectors, weights, log_determinant = _rotations(np.ascontiguousarray(steps, np.int64).tobytes())
    return np.swapaxes(vectors, 1, 2) @ table, weights, log_determinant


def grams(steps: Int64s, table: Float64s) -> Grams:
    """Return the sums of products of the columns of one series.

    Args:
        steps: Ascending step numbers; missing ones stay gaps.
        table: Shape (values, columns).
    """
    turned, weights, log_determinant = rotated(steps, table)
    weighted = turned[:, None] * weights[..., None]
    products = np.swapaxes(weighted, 2, 3) @ turned[:, None]
    columns = table.shape[1]
    white = table.T @ table
    every = np.concatenate([products.reshape(-1, columns, columns), white[None]])
    return Grams(every, log_determinant, len(table))


@dataclass(frozen=True, eq=False)
class Posterior:
    """What is known of an effect: a mixture of Student's t distributions, one per grid point."""

    weight: Float64s
    center: Float64s
    error: Float64s
    freedom: float

    @property
    def spread(self) -> float:
        """Standard error of the effect, over all correlations."""
        return math.sqrt(float(self.weight @ self.error**2))

    @property
    def wander(self) -> float:
        """How sure it is that pace wanders: that values are not independent."""
        return 1 - float(self.weight[-1]) if len(self.weight) == len(PRIOR) else 0.0

    def values_needed(self, have: int, error: float, most: int) -> int | None:
        """Return from how many values on the standard error would be this small.

        A value adds ``1 / f(0)`` to what is known of the mean, f the spectrum of the pace.

        Args:
            have: Number of values that it is known from.
            error: What the standard error should be.
            most: None if more than this many were needed.
        """
        if len(self.weight) != len(PRIOR):
            return None
        own = _information(have)
        for count in np.unique(np.geomspace(have, most, 200).astype(int)).tolist():
            scale = own / (own + (count - have) * _PER_VALUE)
            if math.sqrt(float(self.weight @ (self.error**2 * scale))) <= error:
                return int(count)
        return None

    def above(self, bound: float) -> float:
        """Return the probability that the effect is greater than a bound, never quite 0 or 1.

        Example::

            >>> one = np.ones(1)
            >>> Posterior(one, one, one, 60.0).above(1.0)
            0.5
        """
        tail = student_tail((bound - self.center) / self.error, self.freedom)
        return min(max(float(self.weight @ tail), LEAST_CHANCE), 1 - LEAST_CHANCE)

    def quantile(self, chance: float) -> float:
        """Return what the effect stays below with a chance."""
        low, high = (self._edge(sign) for sign in (-1.0, 1.0))
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if 1 - self.above(middle) < chance else (low, middle)
        return (low + high) / 2

    def interval(self, chance: float) -> tuple[float, float]:
        """Return the bounds that the effect misses with a chance, on both sides together."""
        return self.quantile(chance / 2), self.quantile(1 - chance / 2)

    def scaled(self, part: float) -> "Posterior":
        """Return what is known of a part of the effect."""
        return Posterior(self.weight, self.center * part, self.error * part**0.5, self.freedom)

    def _edge(self, sign: float) -> float:
        far = float(np.max(self.error[self.weight > 0])) + 1e-12
        middle = float(self.weight @ self.center)
        while (
            self.above(middle + sign * far) > 1e-12
            if sign > 0
            else (self.above(middle - far) < 1 - 1e-12)
        ):
            far *= 2
            if far > 1e6:
                break
        return middle + sign * far

    def widened(self, spread: float) -> "Posterior":
        """Return the posterior with an independent error of this spread added."""
        return Posterior(self.weight, self.center, np.hypot(self.error, spread), self.freedom)


def posterior(sums: Grams, effect: int) -> Posterior | None:
    """Weigh all correlations, and return what is known of one column's coefficient.

    Args:
        sums: Of columns ``[y, X]``: the first is explained by the others.
        effect: Which column of X, counted from 0.

    Returns:
        None if there are too few values, or if X doesn't determine the coefficient.
    """
    products = sums.products
    size = products.shape[1] - 1
    freedom = sums.values - size
    if freedom < 1:
        return None
    square = products[:, 1:, 1:]
    scale = np.sqrt(np.einsum("gii->gi", square))
    if not (scale > 0).all():
        return None
    scaled = square / (scale[:, :, None] * scale[:, None, :])
    if np.linalg.cond(scaled[-1]) > 1e10:
        return None
    inverse = np.linalg.inv(scaled)
    cross = products[:, 1:, 0] / scale
    beta = np.einsum("gij,gj->gi", inverse, cross)
    rest = products[:, 0, 0] - np.einsum("gi,gi->g", beta, cross)
    rest = np.maximum(rest, 1e-14 * np.maximum(products[:, 0, 0], 1e-300))
    log_square = np.linalg.slogdet(scaled)[1] + 2 * np.log(scale).sum(axis=1)
    likelihood = -0.5 * (sums.log_determinant + log_square + freedom * np.log(rest))
    weight = np.log(PRIOR) + likelihood
    weight = np.exp(weight - weight.max())
    error = np.sqrt(rest / freedom * inverse[:, effect, effect]) / scale[:, effect]
    center = beta[:, effect] / scale[:, effect]
    return Posterior(weight / weight.sum(), center, np.maximum(error, 1e-15), float(freedom))


def clipped(values: Float64s) -> Float64s:
    """Return values with outliers moved to four robust spreads from the median.

    Three if over 2% of the values lie beyond, as with garbage collection or Student's t(2).

    Example::

        >>> clipped(np.append(np.arange(99.0), 1000.0)).max().round(1).item()
        197.8
    """
    middle = float(np.median(values))
    spread = spread_of(values)
    if spread == 0:
        return values
    far = np.mean(np.abs(values - middle) > _SPREADS * spread) > _HEAVY
    most = (_HEAVY_SPREADS if far else _SPREADS) * spread
    return np.clip(values, middle - most, middle + most)


def joined(steps: Int64s, table: Float64s) -> tuple[Int64s, Float64s]:
    """Join neighboring steps by their means until at most `MAX_VALUES` values are left.

    Args:
        steps: Ascending step numbers.
        table: Shape (values, columns).
    """
    if len(steps) <= MAX_VALUES:
        return steps, table
    size = -(-(int(steps[-1]) - int(steps[0]) + 1) // MAX_VALUES)
    block = (steps - steps[0]) // size
    number, first, count = np.unique(block, return_index=True, return_counts=True)
    return number, np.add.reduceat(table, first, axis=0) / count[:, None]


def orthonormal(columns: Sequence[Float64s], least: float = 1e-6) -> Float64s:
    """Return an orthonormal basis of centered columns; near-constant ones are left out.

    Returns:
        Shape (values, columns that remain).
    """
    size = len(columns[0]) if columns else 0
    table = [each - each.mean() for each in columns]
    table = [
        each / np.linalg.norm(each)
        for each, own in zip(table, columns, strict=True)
        if np.linalg.norm(each) > least * np.linalg.norm(own)
    ]
    if not table:
        return np.zeros((size, 0))
    left, weight, _ = np.linalg.svd(np.stack(table, axis=1), full_matrices=False)
    return left[:, weight > least * weight[0]]


@dataclass(frozen=True, eq=False)
class Model:
    """How well a column explains a series: log evidence, and what is known of its coefficient."""

    evidence: float
    known: Posterior


def with_one_more(number: Int64s, table: Float64s, asked: Float64s) -> list[Model]:
    """Explain a series by some columns and one more, for each of many columns in turn.

    Args:
        number: Ascending step numbers.
        table: Columns ``[y, X]`` of the series, as of `posterior`; shape (values, columns).
        asked: The columns of which each is added alone; shape (values, columns asked).
    """
    size, width = table.shape
    turned, weights, log_determinant = rotated(number, np.concatenate([table, asked], axis=1))
    weights = np.concatenate([weights.reshape(-1, size), np.ones((1, size))])
    correlation = np.repeat(np.arange(len(turned)), (len(weights) - 1) // len(turned))
    evidence, center, error = (np.empty((len(weights), asked.shape[1])) for _ in range(3))
    freedom = size - width
    for point, weight in enumerate(weights):
        own = (
            turned[correlation[point]]
            if point < len(correlation)
            else np.concatenate([table, asked], axis=1)
        )
        base, extra = own[:, 1:width], own[:, width:]
        weighted = base * weight[:, None]
        square = weighted.T @ base
        inverse = np.linalg.pinv(square)
        cross = weighted.T @ extra
        y = own[:, 0]
        along = weighted.T @ y
        moved = inverse @ cross
        alone = np.maximum(
            (weight[:, None] * extra**2).sum(axis=0) - (cross * moved).sum(axis=0), 1e-12
        )
        pull = extra.T @ (weight * y) - moved.T @ along
        left = float(y @ (weight * y) - along @ inverse @ along)
        rest_square = np.maximum(left - pull**2 / alone, 1e-14 * max(left, 1e-300))
        evidence[point] = -0.5 * (
            log_determinant[point]
            + np.linalg.slogdet(square)[1]
            + np.log(alone)
            + freedom * np.log(rest_square)
        )
        center[point] = pull / alone
        error[point] = np.sqrt(rest_square / freedom / alone)
    evidence += np.log(PRIOR)[:, None]
    top = evidence.max(axis=0)
    weight = np.exp(evidence - top)
    total = weight.sum(axis=0)
    return [
        Model(
            float(top[at] + math.log(total[at])),
            Posterior(weight[:, at] / total[at], center[:, at], error[:, at], float(freedom)),
        )
        for at in range(asked.shape[1])
    ]


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
    spread = (1 + _LEVEL_SPREADS)[None, :] / found.information[:, None]
    total = found.rest[:, chosen].sum(axis=1)[:, None] + between[:, None] / spread
    freedom = count * (found.values - 1) + count - 1
    likelihood = -0.5 * (
        count * (found.log_determinant + np.log(found.information))[:, None]
        + (count - 1) * np.log(spread)
        + freedom * np.log(total)
    )
    weight = np.log(PRIOR)[:, None] + np.log(_LEVEL_PRIOR) + likelihood
    weight = np.exp(weight - weight.max())
    noise = total / freedom / found.information[:, None]
    most = _APART**2 + between[:, None] / max(count - 1, 1)
    error = np.sqrt((noise + np.minimum(noise * _LEVEL_SPREADS, most)) * (1 + 1 / count))
    center = np.broadcast_to((found.level[:, suspect] - level.mean(axis=1))[:, None], error.shape)
    return Posterior((weight / weight.sum()).ravel(), center.ravel(), error.ravel(), float(freedom))


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
