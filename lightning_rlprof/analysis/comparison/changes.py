"""Steps at which a run became slower or faster at equal work, its trend, and its outlier steps.

Each possible step is tested by least squares, averaged over all correlations of the pace, see
`statistics.pace`. A change also has to fit better than a trend.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightning_rlprof.analysis.comparison.equal_work import fit
from lightning_rlprof.analysis.comparison.run_pair import (
    STEP,
    UNTRACED,
    Side,
    shared_work,
    sides,
)
from lightning_rlprof.analysis.statistics.pace import (
    LONGEST,
    Model,
    Posterior,
    joined,
    with_one_more,
)
from lightning_rlprof.records.records import VALIDATIONS
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

LEVEL, TREND, OUTLIER = "level", "trend", "outlier"
"""What changed: the level at a step, little by little over the run, or in one step alone."""

_COLUMNS = (
    Column("change", "text"),
    Column("step", "count"),
    Column("stage", "text"),
    *columns_of("ratio", "ratio", "CI low", "CI high"),
    Column("delta", "duration", "ns"),
    Column("steps", "count"),
    Column("cost", "duration", "ns"),
    Column("p-value", "number"),
)
_NOTE = (
    "ratio: time after the change over time before, at equal work, with its 95% CI. delta: per "
    "step. cost: rank time in all steps since, negative if saved. stage: where most of it is."
)
FEWEST_STEPS = 24
"""Steps needed: of fewer, a change cannot be separated from the pace of the machine."""

_EDGE = 6  # steps before the first and after the last possible change
_CHANCE = 0.001
_LEAST, _LEAST_PLAIN = math.log(1.10), math.log(1.07)  # by the model, and of plain medians
_LEAST_TREND = math.log(1.25)  # over the run: hosts and devices drift by less
_SPIKE = 3.0  # robust spreads about the running median, beyond which a step is clipped
_WINDOW = 5
_OUTLIER, _OUTLIER_SPREADS = math.log(1.5), 6.0
_MOST_OUTLIERS = 3
_MOST_CHANGES = 4


@dataclass(frozen=True, eq=False)
class _Series:
    """Times of one row by step: logarithms at equal work, what work explains, and its columns."""

    steps: Int64s
    ns: Float64s
    rest: Float64s
    usual: Float64s
    columns: Float64s
    is_stage: bool


def changes(spans: Spans) -> Table:
    """List the steps at which the time of a step changed, its trend, and outlier steps.

    A level change is at least 10%, with 6 steps or more on either side. Its p-value is below 0.001
    over all possible steps, and it fits better than a trend. A trend is at least 25% over the run.
    An outlier takes at least 1.5 times its neighbors, and six spreads more. Warm-up steps are
    excluded, as are validations. Abstains below 24 included steps.
    """
    if not len(spans.rows(kind="step")):
        return Table("changes", _COLUMNS, abstained="no complete step was recorded")
    side = _without_validations(sides([spans])[0])
    if side.steps < FEWEST_STEPS:
        reason = f"This run has {side.steps} complete steps; finding changes needs {FEWEST_STEPS}."
        return Table("changes", _COLUMNS, abstained=reason)
    stages = {name: _series(side, name) for name in side.stages}
    step = stages[STEP]
    ranks = len(spans.ranks)
    own = {name: each for name, each in stages.items() if name != STEP and each is not None}
    if step is None:
        return Table("changes", _COLUMNS, abstained="no step took any time")
    rows = [*_outliers(step, own, ranks), *_levels(step, own, ranks, _CHANCE)]
    return Table("changes", _COLUMNS, sorted(rows, key=lambda row: -int(row[8] or 0)), _NOTE)


def _without_validations(side: Side) -> Side:
    """Return the times of training: a step with a validation is not a slow one."""
    stages = {name: ns for name, ns in side.stages.items() if name not in VALIDATIONS}
    apart = [ns for name, ns in side.stages.items() if name in VALIDATIONS]
    stages[STEP] = side.stages[STEP] - np.sum(apart, axis=0, dtype=np.int64)
    return replace(side, stages=stages)


def _series(side: Side, name: str) -> _Series | None:
    """Return a row's times in the steps in which it ran; None if these are too few."""
    work = shared_work([side], name)
    known = side.stages[name] > 0
    for (amount,) in work.values():
        known = known & np.isfinite(amount)
    if known.sum() < FEWEST_STEPS:
        work, known = {}, side.stages[name] > 0
    if known.sum() < FEWEST_STEPS:
        return None
    ns = side.stages[name][known].astype(np.float64)
    fitted = fit([ns], [[amount[known]] for (amount,) in work.values()])
    is_stage = name not in (STEP, UNTRACED) and name not in side.waiting
    values = (fitted.rest[0], fitted.usual[0], fitted.columns)
    return _Series(side.number[known], ns, *values, is_stage)


def _running_median(values: Float64s) -> Float64s:
    edge = _WINDOW // 2
    padded = np.pad(values, edge, mode="edge")
    found: Float64s = np.median(np.lib.stride_tricks.sliding_window_view(padded, _WINDOW), axis=1)
    return found


def _spread(values: Float64s) -> float:
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _outliers(step: _Series, own: Mapping[str, _Series], ranks: int) -> list[tuple[Cell, ...]]:
    """Return the steps that take far longer than their neighbors, the longest first."""
    usual = _running_median(step.rest)
    off = step.rest - usual
    far = np.flatnonzero(off > max(_OUTLIER, _OUTLIER_SPREADS * _spread(off)))
    rows: list[tuple[Cell, ...]] = []
    for at in far[np.argsort(-off[far])][:_MOST_OUTLIERS].tolist():
        excess = step.ns[at] * -math.expm1(-off[at])
        number = int(step.steps[at])
        cost = (round(excess), 1, round(excess * ranks))
        head = (OUTLIER, number, _stage_of(own, number), math.exp(off[at]))
        rows.append((*head, None, None, *cost, None))
    return rows


def _stage_of(own: Mapping[str, _Series], number: int) -> str | None:
    """Return the stage that is longest in a step beyond its usual time."""
    excess = {}
    for name, each in own.items():
        at = np.flatnonzero(each.steps == number)
        if len(at):
            excess[name] = float(each.ns[at[0]] - np.median(each.ns))
    best = max(excess, key=excess.__getitem__, default=None)
    return best if best is not None and excess[best] > 0 else None


def _levels(
    step: _Series, own: Mapping[str, _Series], ranks: int, level: float
) -> list[tuple[Cell, ...]]:
    """Return level changes by binary segmentation, or the trend if that fits better."""
    rows: list[tuple[Cell, ...]] = []
    waiting = [(0, len(step.steps), level)]
    while waiting and len(rows) < _MOST_CHANGES:
        first, last, chance = waiting.pop(0)
        found = _best_split(step, first, last, chance)
        if found is None:
            continue
        at, known, p_value = found
        rows.append(_level_row(step, own, ranks, (first, at, last), known, p_value))
        waiting += [(first, at, chance / 2), (at, last, chance / 2)]
    if not rows and (trend := _trend_row(step, own, ranks, level)) is not None:
        rows.append(trend)
    return rows


def _clipped(rest: Float64s) -> Float64s:
    """Clip spikes about the running median, which keeps a change of the level."""
    usual = _running_median(rest)
    spread = _SPIKE * _spread(rest - usual)
    return np.clip(rest, usual - spread, usual + spread) if spread > 0 else rest


def _best_split(
    series: _Series, first: int, last: int, level: float
) -> tuple[int, Posterior, float] | None:
    """Return where the level changes between two positions, how, and the p-value."""
    if last - first < FEWEST_STEPS:
        return None
    rest = _clipped(series.rest[first:last])
    models, splits = _models(
        series.steps[first:last], rest, series.columns[first:last], with_splits=True
    )
    evidence = [each.evidence for each in models[:-1]]
    best = int(np.argmax(evidence))
    known, line = models[best].known, models[-1]
    away = 1 - known.above(0.0) if known.quantile(0.5) > 0 else known.above(0.0)
    p_value = min(2 * away * len(splits), 1.0)
    center = known.quantile(0.5)
    at = int(splits[best])
    plain = float(np.median(rest[at:]) - np.median(rest[:at]))
    if (
        p_value > level
        or abs(center) < _LEAST
        or plain * math.copysign(1, center) < _LEAST_PLAIN
        or evidence[best] <= line.evidence
    ):
        return None
    return first + at, known, p_value


def _models(
    steps: Int64s, rest: Float64s, columns: Float64s, *, with_splits: bool
) -> tuple[list[Model], Int64s]:
    """Test a change of the level at each possible step, and a trend, which is the last model.

    Returns:
        The models, and the position in the series of each split.
    """
    count = len(steps)
    table = np.concatenate([rest[:, None], np.ones((count, 1)), columns], axis=1)
    number, table = joined(steps, table)
    size = len(number)
    edge = max(-(-_EDGE * size // count), 2)
    splits = np.arange(edge, size - edge) if with_splits else np.zeros(0, dtype=np.int64)
    rise = (number - number[0]) / max(int(number[-1] - number[0]), 1)
    asked = np.concatenate([np.arange(size)[:, None] >= splits, rise[:, None]], axis=1)
    models = with_one_more(number, table, asked)
    block = 1 if size == count else -(-int(steps[-1] - steps[0] + 1) // LONGEST)
    begins = steps[0] + (number - number[0]) * block
    return models, np.searchsorted(steps, begins[splits])


def _level_row(
    step: _Series,
    own: Mapping[str, _Series],
    ranks: int,
    place: tuple[int, int, int],
    known: Posterior,
    p_value: float,
) -> tuple[Cell, ...]:
    first, at, last = place
    low, high = known.interval(0.05)
    center = known.quantile(0.5)
    per_step = float(np.mean(step.ns[at:last])) * -math.expm1(-center)
    steps = last - at
    blamed = _stages_after(
        own, int(step.steps[at]), int(step.steps[first]), int(step.steps[last - 1]), center
    )
    return (
        *(LEVEL, int(step.steps[at]), blamed, math.exp(center), math.exp(low), math.exp(high)),
        *(round(per_step), steps, round(per_step * steps * ranks), p_value),
    )


def _stages_after(
    own: Mapping[str, _Series], number: int, first: int, last: int, center: float
) -> str | None:
    """Return the row that has most of a change, or ``all`` if all stages changed alike."""
    moved, levels = {}, []
    for name, each in own.items():
        before = (each.steps >= first) & (each.steps < number)
        after = (each.steps >= number) & (each.steps <= last)
        if min(before.sum(), after.sum()) < _EDGE:
            continue
        level = float(np.median(each.rest[after]) - np.median(each.rest[before]))
        if each.is_stage:
            levels.append(level)
        moved[name] = float(each.usual[after].mean()) * math.expm1(level)
    if not moved:
        return None
    if len(levels) > 2 and all(abs(level - center) < abs(center) / 2 for level in levels):
        return "all"
    return max(moved, key=lambda name: moved[name] * math.copysign(1, center))


def _trend_row(
    step: _Series, own: Mapping[str, _Series], ranks: int, level: float
) -> tuple[Cell, ...] | None:
    models, _ = _models(step.steps, _clipped(step.rest), step.columns, with_splits=False)
    known = models[-1].known
    center = known.quantile(0.5)
    away = 1 - known.above(0.0) if center > 0 else known.above(0.0)
    if 2 * away > level or abs(center) < _LEAST_TREND:
        return None
    low, high = known.interval(0.05)
    rise = np.linspace(0, 1, len(step.ns))
    cost = float(np.sum(step.ns * -np.expm1(-center * rise)))
    half = int(step.steps[len(step.steps) // 2])
    blamed = _stages_after(own, half, int(step.steps[0]), int(step.steps[-1]), center / 2)
    return (
        *(TREND, int(step.steps[0]), blamed, math.exp(center), math.exp(low), math.exp(high)),
        *(round(cost / len(step.ns)), len(step.ns), round(cost * ranks), 2 * away),
    )
