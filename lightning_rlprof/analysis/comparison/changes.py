"""Steps at which a run became slower or faster at equal work, its trend, and its outlier steps.

The whole step and each stage are scanned. Each possible step is tested by least squares, averaged
over all correlations of the pace, see `statistics.pace`. A change also has to fit better than a
trend, and to matter for the step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    MAX_VALUES,
    Model,
    Posterior,
    joined,
    with_one_more,
)
from lightning_rlprof.analysis.statistics.robust import spread_of
from lightning_rlprof.analysis.steps.step_matrix import WAITING
from lightning_rlprof.analysis.steps.time_categories import (
    Category,
    categories_of,
    category_of,
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
    "ratio: time of the step after the change over before, at equal work, with its 95% CI. delta: "
    "per step. cost: rank time in all steps since, negative if saved. stage: where most of it is."
)
_UNKNOWN_LENGTHS = (
    " Lengths of responses are not counted, so longer ones may explain these rows: "
    "count(lengths=...) in the rollout."
)
MIN_STEPS = 24
"""Steps needed: of fewer, a change cannot be separated from the pace of the machine."""

_MIN_STEPS_BESIDE = 6  # This many steps lie before and after each possible change.
_MAX_P_VALUE = 0.001
MIN_SHARE = 0.05
"""Share of the step that a change must have to be listed."""

# The interval of a change excludes this part of the least change; medians show the second.
_CLEAR, _PLAIN = 0.6, 0.7
_MIN_TREND = math.log(1.25)  # Hosts and devices drift by less over a run.
_MAX_SPREADS = 3.0  # Steps further from the running median are clipped.
_WINDOW = 5
_MIN_OUTLIER, _MIN_OUTLIER_SPREADS = math.log(1.5), 6.0
_MAX_OUTLIERS = 3
_MAX_CHANGES = 4
_MIN_RECURRENCES = 3  # A stage that ran less often is an event.
_MAX_RARE_SHARE = 0.5  # A stage in fewer of the steps does not belong to the usual step.

_ALL = "all"
_MIN_EXPLAINED_PART = 0.5  # If stages show this much of a step's change, the change is theirs.
_MAX_STEPS_APART = 3  # One change may show earlier or later in another row.


@dataclass(frozen=True, eq=False)
class _Series:
    """Times of one row by step: logarithms at equal work, what work explains, and its columns."""

    steps: Int64s
    ns: Float64s
    rest: Float64s
    usual: Float64s
    columns: Float64s
    is_stage: bool


def changes(spans: Spans, least: float = MIN_SHARE) -> Table:
    """List the steps at which the time of a step changed, its trend, and outlier steps.

    A level change is one of the step or of a stage, by 5% of the step or more, with 6 steps or more
    on either side; its 95% interval excludes 3%. Its p-value is below 0.001 over all possible steps
    and all stages, and it fits better than a trend. A trend is at least 25% over the run. An
    outlier takes at least 1.5 times its neighbors, and six spreads more. Warm-up steps are
    excluded, as is what recurs, such as evaluations and checkpoints. Abstains below 24 included
    steps.

    Args:
        spans: The run.
        least: Smallest share of the step that a level change is listed from.
    """
    if least == MIN_SHARE:
        return spans.once("changes", _find, spans.tables)
    return _find(spans, least)


def _find(spans: Spans, least: float = MIN_SHARE) -> Table:
    if not len(spans.rows(kind="step")):
        return Table("changes", _COLUMNS, abstained="no complete step was recorded")
    side = _without_recurring(sides([spans])[0])
    if side.steps < MIN_STEPS:
        reason = f"This run has {side.steps} complete steps; finding changes needs {MIN_STEPS}."
        return Table("changes", _COLUMNS, abstained=reason)
    stages = {name: _series(side, name) for name in side.stages}
    step = stages[STEP]
    ranks = len(spans.ranks)
    own = {name: each for name, each in stages.items() if name != STEP and each is not None}
    if step is None:
        return Table("changes", _COLUMNS, abstained="no step took any time")
    rows = [*_outliers(step, side, ranks), *_levels(step, own, ranks, least)]
    table = Table("changes", _COLUMNS, sorted(rows, key=lambda row: -int(row[8] or 0)), _NOTE)
    if any(may_be_longer_responses(spans, stage) for stage in table.column("stage")):
        return replace(table, note=_NOTE + _UNKNOWN_LENGTHS)
    return table


def may_be_longer_responses(spans: Spans, stage: Cell) -> bool:
    """Return whether a stage's time depends on responses whose lengths are not counted."""
    if "tokens_max" in spans.counters or Category.ROLLOUT not in categories_of(spans.names):
        return False
    name = str(stage).removeprefix(WAITING.format(""))
    return stage == _ALL or category_of(name) in (Category.ROLLOUT, Category.COMPUTE)


def _without_recurring(side: Side) -> Side:
    """Return the times of usual steps: one with an evaluation or a checkpoint is not a slow one.

    What such a stage takes beyond its usual time stays.
    """
    stages = dict(side.stages)
    for name, ns in side.stages.items():
        ran = ns > 0
        if name == STEP or not ran.any():
            continue
        if name in VALIDATIONS or (ran.sum() >= _MIN_RECURRENCES and ran.mean() <= _MAX_RARE_SHARE):
            usual = np.minimum(ns, np.int64(np.median(ns[ran])))
            stages[STEP] = stages[STEP] - usual
            stages[name] = ns - usual
    return replace(side, stages=stages)


def _series(side: Side, name: str) -> _Series | None:
    """Return a row's times in the steps in which it ran; None if these are too few."""
    work = shared_work([side], name)
    known = side.stages[name] > 0
    for (amount,) in work.values():
        known = known & np.isfinite(amount)
    if known.sum() < MIN_STEPS:
        work, known = {}, side.stages[name] > 0
    if known.sum() < MIN_STEPS:
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


def _outliers(step: _Series, side: Side, ranks: int) -> list[tuple[Cell, ...]]:
    """Return the steps that take far longer than their neighbors, the longest first."""
    usual = _running_median(step.rest)
    off = step.rest - usual
    far = np.flatnonzero(off > max(_MIN_OUTLIER, _MIN_OUTLIER_SPREADS * spread_of(off)))
    rows: list[tuple[Cell, ...]] = []
    for at in far[np.argsort(-off[far])][:_MAX_OUTLIERS].tolist():
        excess = step.ns[at] * -math.expm1(-off[at])
        number = int(step.steps[at])
        cost = (round(excess), 1, round(excess * ranks))
        head = (OUTLIER, number, _stage_of(side, number), math.exp(off[at]))
        rows.append((*head, None, None, *cost, None))
    return rows


def _stage_of(side: Side, number: int) -> str | None:
    """Return the stage that is longest in a step beyond its usual time, 0 if it seldom runs."""
    at = int(np.searchsorted(side.number, number))
    excess = {
        name: float(ns[at] - np.median(ns)) for name, ns in side.stages.items() if name != STEP
    }
    best = max(excess, key=excess.__getitem__, default=None)
    return best if best is not None and excess[best] > 0 else None


class _Level(NamedTuple):
    """A change of the level of a row, from a position on, among the steps of a segment.

    Attributes:
        name: Of the row.
        first: Step before which the segment begins.
        number: First step with the new level.
        last: Last step of the segment.
        bounds: Lower end, center and upper end of the step's ratio minus 1.
        per_step: Nanoseconds of it in each step.
        steps: How many steps it lasts.
        p_value: Its probability if the level is the same.
    """

    name: str
    first: int
    number: int
    last: int
    bounds: tuple[float, float, float]
    per_step: float
    steps: int
    p_value: float


def _levels(
    step: _Series, own: Mapping[str, _Series], ranks: int, least: float
) -> list[tuple[Cell, ...]]:
    """Return level changes of the step and of stages, or the trend if there are none."""
    asked = {
        name: each
        for name, each in own.items()
        if (each.is_stage or name == UNTRACED) and _may_matter(each, step, least)
    }
    chance = _MAX_P_VALUE / (1 + sum(each.is_stage for each in own.values()))
    of_step = _segments(STEP, step, step, chance, least)
    of_stages = [
        found
        for name, each in asked.items()
        for found in _segments(name, each, step, chance, least)
    ]
    blamed = {
        found: _stages_after(
            own,
            first=found.first,
            number=found.number,
            last=found.last,
            center=math.log1p(found.bounds[1]),
        )
        for found in of_step
    }
    chosen = {found: found.name for found in of_stages}
    for found in of_step:
        same = [each for each in of_stages if _same(each, found)]
        explained = abs(sum(each.per_step for each in same))
        if blamed[found] == _ALL or explained < _MIN_EXPLAINED_PART * abs(found.per_step):
            chosen[found] = blamed[found] or STEP
            for each in same:  # One event has one row.
                chosen.pop(each, None)
    largest = sorted(chosen, key=lambda found: -abs(found.per_step * found.steps))
    rows = [_level_row(found, chosen[found], ranks) for found in largest[:_MAX_CHANGES]]
    if not rows and (trend := _trend_row(step, own, ranks, chance)) is not None:
        rows.append(trend)
    return rows


def _same(a: _Level, b: _Level) -> bool:
    return abs(a.number - b.number) <= _MAX_STEPS_APART and a.per_step * b.per_step > 0


def _may_matter(series: _Series, step: _Series, least: float) -> bool:
    """Return whether the mean of a row at equal work moves enough between two parts of the run."""
    ns = float(series.usual.mean()) * np.exp(_clipped(series.rest))
    count = np.arange(1, len(ns) + 1)
    sums = np.cumsum(ns)
    split = slice(_MIN_STEPS_BESIDE - 1, len(ns) - _MIN_STEPS_BESIDE)
    before = (sums / count)[split]
    after = (sums[-1] - sums[split]) / (len(ns) - count[split])
    moved = np.abs(after - before).max(initial=0.0)
    return bool(moved >= _PLAIN * least * float(np.median(step.ns)))


def _segments(
    name: str, series: _Series, step: _Series, level: float, least: float
) -> list[_Level]:
    """Return the level changes of a row by binary segmentation."""
    found: list[_Level] = []
    waiting = [(0, len(series.steps), level)]
    while waiting and len(found) < _MAX_CHANGES:
        first, last, chance = waiting.pop(0)
        best = _best_split(name, series, step, (first, last), chance, least)
        if best is not None:
            at = int(np.searchsorted(series.steps, best.number))
            found.append(best)
            waiting += [(first, at, chance / 2), (at, last, chance / 2)]
    return found


def _clipped(rest: Float64s) -> Float64s:
    """Clip spikes about the running median, which keeps a change of the level."""
    usual = _running_median(rest)
    spread = _MAX_SPREADS * spread_of(rest - usual)
    return np.clip(rest, usual - spread, usual + spread) if spread > 0 else rest


def _best_split(
    name: str,
    series: _Series,
    step: _Series,
    segment: tuple[int, int],
    level: float,
    least: float,
) -> _Level | None:
    """Return where the level changes most surely between two positions, if it matters."""
    first, last = segment
    if last - first < MIN_STEPS:
        return None
    rest = _clipped(series.rest[first:last])
    models, splits = _models(
        series.steps[first:last], rest, series.columns[first:last], with_splits=True
    )
    evidence = [each.evidence for each in models[:-1]]
    best = int(np.argmax(evidence))
    known, line = models[best].known, models[-1]
    p_value = min(_chance(known) * len(splits), 1.0)
    if p_value > level or evidence[best] <= line.evidence:
        return None
    at = first + int(splits[best])
    after = float(np.mean(series.ns[at:last]))
    whole = float(np.mean(step.ns[step.steps >= series.steps[at]]))

    def of_step(change: float) -> float:
        delta = after * -math.expm1(-change)
        return delta / max(whole - delta, 1.0)

    middle, ends = known.quantile(0.5), known.interval(0.05)
    low, center, high = (of_step(each) for each in (ends[0], middle, ends[1]))
    plain = of_step(float(np.median(rest[at - first :]) - np.median(rest[: at - first])))
    sign = math.copysign(1, center)
    nearest = min(sign * low, sign * high)
    if sign * center < least or nearest < _CLEAR * least or sign * plain < _PLAIN * least:
        return None
    steps = series.steps
    return _Level(
        name=name,
        first=int(steps[first]),
        number=int(steps[at]),
        last=int(steps[last - 1]),
        bounds=(low, center, high),
        per_step=after * -math.expm1(-middle),
        steps=last - at,
        p_value=p_value,
    )


def _chance(known: Posterior) -> float:
    """Return the two-sided p-value of an effect of zero."""
    above = known.above(0.0)
    return 2 * (1 - above if known.quantile(0.5) > 0 else above)


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
    edge = max(-(-_MIN_STEPS_BESIDE * size // count), 2)
    splits = np.arange(edge, size - edge) if with_splits else np.zeros(0, dtype=np.int64)
    rise = (number - number[0]) / max(int(number[-1] - number[0]), 1)
    asked = np.concatenate([np.arange(size)[:, None] >= splits, rise[:, None]], axis=1)
    models = with_one_more(number, table, asked)
    block = 1 if size == count else -(-int(steps[-1] - steps[0] + 1) // MAX_VALUES)
    begins = steps[0] + (number - number[0]) * block
    return models, np.searchsorted(steps, begins[splits])


def _level_row(found: _Level, stage: str, ranks: int) -> tuple[Cell, ...]:
    low, center, high = (1 + each for each in found.bounds)
    cost = round(found.per_step * found.steps * ranks)
    return (
        *(LEVEL, found.number, stage, center, low, high),
        *(round(found.per_step), found.steps, cost, found.p_value),
    )


def _stages_after(
    own: Mapping[str, _Series], *, first: int, number: int, last: int, center: float
) -> str | None:
    """Return the row that has most of a change, or ``all`` if all stages changed alike.

    Args:
        own: The rows.
        first: Step before which nothing is compared.
        number: First step after the change.
        last: Last step.
        center: Logarithm of the step's ratio.
    """
    moved, levels = {}, []
    for name, each in own.items():
        before = (each.steps >= first) & (each.steps < number)
        after = (each.steps >= number) & (each.steps <= last)
        if min(before.sum(), after.sum()) < _MIN_STEPS_BESIDE:
            continue
        level = float(np.median(each.rest[after]) - np.median(each.rest[before]))
        if each.is_stage:
            levels.append(level)
        moved[name] = float(each.usual[after].mean()) * math.expm1(level)
    if not moved:
        return None
    if len(levels) > 2 and all(abs(level - center) < abs(center) / 2 for level in levels):
        return _ALL
    return max(moved, key=lambda name: moved[name] * math.copysign(1, center))


def _trend_row(
    step: _Series, own: Mapping[str, _Series], ranks: int, level: float
) -> tuple[Cell, ...] | None:
    models, _ = _models(step.steps, _clipped(step.rest), step.columns, with_splits=False)
    known = models[-1].known
    center = known.quantile(0.5)
    p_value = _chance(known)
    if p_value > level or abs(center) < _MIN_TREND:
        return None
    low, high = known.interval(0.05)
    rise = np.linspace(0, 1, len(step.ns))
    cost = float(np.sum(step.ns * -np.expm1(-center * rise)))
    blamed = _stages_after(
        own,
        first=int(step.steps[0]),
        number=int(step.steps[len(step.steps) // 2]),
        last=int(step.steps[-1]),
        center=center / 2,
    )
    return (
        *(TREND, int(step.steps[0]), blamed, math.exp(center), math.exp(low), math.exp(high)),
        *(round(cost / len(step.ns)), len(step.ns), round(cost * ranks), p_value),
    )
