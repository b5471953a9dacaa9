"""Compare runs at equal work, stage by stage, with confidence intervals.

`judge` finds the change of every stage; `compare` turns it into a table with verdicts, and `gate`
into one for CI: whether a step is at most a share slower at equal work.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.comparison.equal_work import (
    Change,
    Fit,
    between_runs,
    between_steps,
    fit,
    range_bounds,
)
from lightning_rlprof.analysis.comparison.run_pair import (
    HARDLY,
    STEP,
    UNTRACED,
    Amounts,
    Side,
    comparability,
    score_of,
    shared_work,
    sides,
)
from lightning_rlprof.analysis.comparison.settings import REPLICAS
from lightning_rlprof.analysis.statistics.pace import orthonormal
from lightning_rlprof.analysis.steps.step_selection import MIN_STEPS
from lightning_rlprof.tables.arrays import Float64s, Mask
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

INCONCLUSIVE = "inconclusive"
"""The verdict if the data can neither show nor exclude a change."""

AS_THE_REST = "as the rest"
"""The verdict if the whole step may have changed, and this stage with it."""

_COLUMNS = (
    Column("stage", "text"),
    *columns_of("duration", "A", "B", unit="ns"),
    Column("adjusted", "ratio"),
    Column("verdict", "text"),
    *columns_of("ratio", "raw B/A", "work B/A", "CI low", "CI high", "relative low"),
    Column("relative high", "ratio"),
    Column("changed", "text"),
    Column("detectable", "share"),
    Column("steps needed", "count"),
    Column("delta", "duration", "ns"),
    Column("adjusted by", "text"),
)
STEP_CHANCE = 0.005  # People ask about the step first, so half of 1% is for it.
_STAGES_CHANCE = 0.005  # All stages share the other half, each with two intervals.

# Stages that a change did not touch were seen 4% apart in two runs on one quiet machine.
_SMALL = math.log(1.05)
_EQUAL_CHANCE = 0.05  # A change of just that size is called none this often.
_UNCOUNTED = "work not counted"
_NOTE = (
    "Times are per step, the mean of all ranks. adjusted: B/A at equal work, with its 99% CI in "
    "the typical step, for all rows together. unchanged: within 5%, with 95% on each side. minor: "
    "significant but within 5%. mixed: mean and typical step disagree."
)
_PLAIN = (
    "Stages without counted work are judged by the raw ratio. Call count(tokens=...) in the stage."
)

MACHINE = "All stages changed alike: the machine rather than the code."
"""What to say if no stage changed more than the others, but the step did."""

_MIN_STAGE_SHARE = 0.01  # A stage with less of the step says nothing of the machine.
_MAX_APART = 0.1  # Other stages are not compared with one further from the median change.
_MIN_STAGES = 3  # Of fewer it is unknown which of them changed apart from the others.
_POWER_QUANTILE = 0.84  # Eighty percent of a normal distribution lie below it.
_MAX_FACTOR = 20  # If this multiple of the steps does not decide, no number will.
_SURE_OF_WANDER = 0.95

FAIL, PASS = "FAIL", "PASS"
# Both are one-sided: to fail by the step or by all stages, and to pass.
_FAIL_CHANCE, _PASS_CHANCE = 0.0025, 0.05


@dataclass(frozen=True, eq=False)
class Judged:
    """One row compared: a stage, untraced time, or the whole step.

    Attributes:
        name: Of the row.
        before: Mean time per step of A in ns, after: of B.
        work: How much more time B's work explains; None if work and run can't be separated.
        raw: B/A as it is; None if only one side has the stage.
        change: What is known of B/A at equal work; None without enough data.
        relative: The same beside the other stages; None unless there are two comparable ones.
        own: Whether this stage changed apart from the others; None if unknown.
        counted: Names of the counters that work was measured by.
    """

    name: str
    before: int
    after: int
    work: float | None = None
    raw: float | None = None
    change: Change | None = None
    relative: Change | None = None
    own: bool | None = None
    counted: tuple[str, ...] = ()
    chance: float = STEP_CHANCE

    @property
    def adjusted(self) -> float | None:
        """B/A at equal work, of the means."""
        return None if self.work is None or self.raw is None else self.raw / self.work


@dataclass(frozen=True, eq=False)
class _Stage:
    """Times and work of one stage in the steps in which it ran, by run."""

    name: str
    steps: list[Mask]
    times: list[Float64s]
    often: Float64s  # Share of the steps in which it ran, by run.
    work: Mapping[str, Amounts]
    fitted: Fit


@dataclass(frozen=True, eq=False)
class Judgement:
    """Everything that is known of the change from the baseline to the candidate runs."""

    rows: list[Judged]
    baseline: list[Side]
    candidate: list[Side]
    abstained: str | None = None
    machine: bool = False
    by_name: Mapping[str, Judged] = field(default_factory=dict)


def judge(baseline: Sequence[Spans], candidate: Sequence[Spans]) -> Judgement:
    """Find the change of the time per step of every stage, and of the whole step.

    Of one run a side, its steps say how sure the change is; of several, the spread between runs.
    Stages are paired by the meaning of their names; warm-up steps are excluded, see `sides`.
    """
    found = sides([*baseline, *candidate])
    first = len(baseline)
    for name, side in zip(_names(first, len(candidate)), found, strict=True):
        if side.steps < MIN_STEPS:
            reason = f"Run {name} has {side.steps} complete steps; a comparison needs {MIN_STEPS}."
            return Judgement([], found[:first], found[first:], reason)
    names = list(dict.fromkeys(name for side in found for name in side.stages))
    stages = {name: _stage(name, found) for name in names}
    chance = _STAGES_CHANCE / (2 * max(sum(each is not None for each in stages.values()) - 1, 1))
    rows = {
        name: _judged(name, stages[name], found, first, STEP_CHANCE if name == STEP else chance)
        for name in names
    }
    own = _beside_the_others(rows, stages, found, first, chance)
    rows |= own
    step = rows[STEP].change
    machine = (
        bool(own)
        and not any(each.own for each in own.values())
        and step is not None
        and (step.exceeds(0.0, STEP_CHANCE / 2) or step.stays_below(0.0, STEP_CHANCE / 2))
    )
    return Judgement(list(rows.values()), found[:first], found[first:], None, machine, rows)


def _names(baseline: int, candidate: int) -> list[str]:
    """Return what to call the runs: A and B, or A1, A2, … with several."""
    return [
        letter if count == 1 else f"{letter}{at + 1}"
        for letter, count in (("A", baseline), ("B", candidate))
        for at in range(count)
    ]


def _stage(name: str, runs: Sequence[Side]) -> _Stage | None:
    """Return a stage that ran in all runs, None if it did not."""
    if not all(name in run.stages and run.stages[name].any() for run in runs):
        return None
    ran = [run.stages[name] > 0 for run in runs]
    work = _per_replica(shared_work(runs, name))
    known = [
        np.all([ran[at], *(np.isfinite(each[at]) for each in work.values())], axis=0)
        for at in range(len(runs))
    ]
    if not all(each.any() for each in known):  # It was counted in other steps than it ran in.
        work, known = {}, ran
    times = [
        run.stages[name][each].astype(np.float64) for run, each in zip(runs, known, strict=True)
    ]
    work = {
        counter: tuple(each[keep] for each, keep in zip(amounts, known, strict=True))
        for counter, amounts in work.items()
    }
    often = np.array([each.mean() for each in ran])
    return _Stage(name, known, times, often, work, fit(times, list(work.values())))


def _per_replica(work: dict[str, Amounts]) -> dict[str, Amounts]:
    """Return amounts of work per replica if replicas are counted; replicas alone are a share."""
    shared = work.get(REPLICAS)
    if shared is None or not all(np.nanmin(each) > 0 for each in shared):
        return {name: each for name, each in work.items() if name != REPLICAS}
    amounts = {
        f"{name} / replicas": tuple(x / by for x, by in zip(each, shared, strict=True))
        for name, each in work.items()
        if name != REPLICAS
    }
    return amounts or {"1 / replicas": tuple(1 / each for each in shared)}


def _judged(
    name: str, stage: _Stage | None, runs: Sequence[Side], first: int, chance: float
) -> Judged:
    before, after = (
        sum(int(run.stages[name].sum()) for run in side if name in run.stages)
        / sum(run.steps for run in side)
        for side in (runs[:first], runs[first:])
    )
    row = Judged(name, round(before), round(after), chance=chance)
    if stage is None:
        return row
    work: float | None = None
    change = _change(stage.fitted.rest, stage.fitted.columns, stage, runs, first)
    if change is not None:
        usual = [
            np.concatenate(each)
            for each in (stage.fitted.usual[:first], stage.fitted.usual[first:])
        ]
        often = float(stage.often[first:].mean() / stage.often[:first].mean())
        work = float(usual[1].mean() / usual[0].mean()) * often
    return replace(row, work=work, raw=after / before, change=change, counted=tuple(stage.work))


def _change(
    rest: Sequence[Float64s], columns: Float64s, stage: _Stage, runs: Sequence[Side], first: int
) -> Change | None:
    """Return what is known of a change, by the steps of two runs or by the levels of more."""
    if len(runs) > 2:
        candidate = np.arange(len(runs)) >= first
        return Change(between_runs(Fit(list(rest), [], columns).levels, candidate))
    steps = [run.number[keep] for run, keep in zip(runs, stage.steps, strict=True)]
    known = between_steps(rest, columns, steps)
    return None if known is None else Change(known, range_bounds(*rest))


def _beside_the_others(
    rows: Mapping[str, Judged],
    stages: Mapping[str, _Stage | None],
    runs: Sequence[Side],
    first: int,
    chance: float,
) -> dict[str, Judged]:
    """Compare each stage with all others, so that the common pace of a machine cancels.

    The others are those whose change is near the median of all stages. The stage furthest from the
    median is judged first. If it changed apart from the others, it no longer belongs to what the
    others are compared with, and the next one is judged.

    Returns:
        The rows of the stages that could be compared, with `Judged.relative` and `Judged.own`.
    """
    step = rows[STEP].before
    no_work = {STEP, UNTRACED}.union(*(run.waiting for run in runs))
    with_change = {
        name: stage
        for name, stage in stages.items()
        if stage is not None and name not in no_work and rows[name].change is not None
    }
    large = [name for name in with_change if rows[name].before >= _MIN_STAGE_SHARE * step]
    if len(large) < _MIN_STAGES:
        return {}
    level = {name: _middle(rows[name]) for name in large}
    median = float(np.median(list(level.values())))
    alike = [name for name in large if abs(level[name] - median) <= _MAX_APART]
    order = sorted(large, key=lambda name: -abs(level[name] - median))
    apart: list[str] = []
    for name in order[: len(order) - 2]:
        change = _relative(
            name, [each for each in alike if each not in apart], with_change, runs, first
        )
        if change is None or _direction(change, chance) == 0:
            break
        apart.append(name)
    found = {}
    rest = [each for each in alike if each not in apart]
    for name in with_change:
        change = _relative(name, rest, with_change, runs, first)
        if change is not None:
            own = _direction(change, chance) != 0
            found[name] = replace(rows[name], relative=change, own=own, chance=chance)
    return found


def _middle(row: Judged) -> float:
    known = row.change.known if row.change is not None else None
    return 0.0 if known is None else float(known.weight @ known.center)


def _direction(change: Change, chance: float) -> int:
    """Return 1 if slower, -1 if faster, 0 if neither is sure."""
    if change.exceeds(0.0, chance / 2):
        return 1
    return -1 if change.stays_below(0.0, chance / 2) else 0


def _relative(
    name: str,
    others: Sequence[str],
    stages: Mapping[str, _Stage],
    runs: Sequence[Side],
    first: int,
) -> Change | None:
    """Return the change of a stage beside that of the other stages together."""
    stage = stages[name]
    some = [stages[other] for other in others if other != name]
    if len(some) < _MIN_STAGES - 1:
        return None
    rests, keeps, amounts = [], [], []
    for at, run in enumerate(runs):
        sums = np.zeros((2, run.steps))
        for other in some:
            sums[0, other.steps[at]] += other.times[at]
            sums[1, other.steps[at]] += other.fitted.usual[at]
        both = (sums[1] > 0)[stage.steps[at]]
        if both.sum() < MIN_STEPS:
            return None
        inside = np.flatnonzero(stage.steps[at])[both]
        rests.append(stage.fitted.rest[at][both] - np.log(sums[0, inside] / sums[1, inside]))
        keep = np.zeros(run.steps, dtype=bool)
        keep[inside] = True
        keeps.append(keep)
        amounts.append(both)
    columns = stage.fitted.columns[np.concatenate(amounts)]
    columns = orthonormal(list(columns.T)) if columns.shape[1] else columns
    kept = _Stage(name, keeps, [], stage.often, {}, stage.fitted)
    return _change(rests, columns, kept, runs, first)


def compare(
    a: Spans | Sequence[Spans], b: Spans | Sequence[Spans], judged: Judgement | None = None
) -> Table:
    """Compare the mean exclusive time per step of every stage, and of the whole step.

    ``raw B/A`` = ``work B/A`` x ``adjusted``. ``verdict`` is ``faster`` or ``slower`` if the
    interval excludes 1, and ``minor`` if the change is also within 5%. If the interval contains 1,
    it is ``unchanged`` within 5%, else ``inconclusive``. It is ``mixed`` if the ratio of means lies
    over 5% beyond the interval. Within 5% is tested at 5% a side (two one-sided tests, Schuirmann
    1987).
    ``relative low`` and ``high`` bound the change beside the other stages; a common pace of the
    machine cancels in it. If only that is sure, it decides; ``changed`` says which of them did:
    ``this stage`` or ``whole step``. ``slower than the rest`` is a stage of 0.96x if the others
    became faster still. ``detectable`` is the smallest change that these runs would
    show with 80% chance; ``steps needed`` how many steps a run would decide an inconclusive row.

    Args:
        a: The baseline run, or several.
        b: The candidate run, or several.
        judged: What `judge` found of them, if it was asked already.
    """
    runs = [[side] if isinstance(side, Spans) else list(side) for side in (a, b)]
    table = table_of(judged or judge(*runs))
    if table.abstained is None and all(len(side) == 1 for side in runs):
        score = score_of(comparability(runs[0][0], runs[1][0]))
        if score < HARDLY:
            note = f"Comparability score {score:.2f} of 1: don't rely on this comparison."
            return replace(table, note=f"{table.note} {note}")
    return table


def table_of(judged: Judgement) -> Table:
    """Return the table of `compare`."""
    if judged.abstained is not None:
        return Table("compare", _COLUMNS, abstained=judged.abstained)
    rows = [_row(each, judged) for each in judged.rows]
    rows.sort(key=_rank)
    return Table("compare", _COLUMNS, rows, " ".join(_remarks(judged)))


def _rank(row: tuple[Cell, ...]) -> tuple[bool, bool, float]:
    """Sort the largest change first, then untraced, then the whole step."""
    return row[0] == STEP, row[0] == UNTRACED, -abs(float(row[14] or 0))


def _row(row: Judged, judged: Judgement) -> tuple[Cell, ...]:
    low, high = ratios(row.change, row.chance)
    relative = ratios(row.relative, row.chance)
    found = verdict(row)
    alone = not row.before or not row.after
    if row.raw is None and alone:
        found = "only in B" if not row.before else "only in A"
    detectable = needed = None
    if row.change is not None:
        detectable = math.expm1(smallest_change(row.change, row.chance / 2))
        if found == INCONCLUSIVE and len(judged.baseline) == len(judged.candidate) == 1:
            steps = min(judged.baseline[0].steps, judged.candidate[0].steps)
            needed = steps_needed(row.change, steps, (_SMALL, _EQUAL_CHANCE), (0.0, row.chance / 2))
    changed = None
    if row.own is not None and found not in ("unchanged", INCONCLUSIVE, AS_THE_REST):
        changed = "this stage" if row.own else "whole step"
    by = ", ".join(row.counted) or (_UNCOUNTED if row.raw is not None else None)
    work = row.work if row.counted or (row.work is not None and row.work != 1) else None
    return (
        *(row.name, row.before, row.after, row.adjusted, found, row.raw, work, low, high),
        *(*relative, changed, detectable, needed, row.after - row.before, by),
    )


def ratios(change: Change | None, chance: float) -> tuple[float | None, float | None]:
    """Return the bounds of B/A that it misses with a chance; None if nothing is known."""
    if change is None:
        return None, None
    low, high = change.interval(chance)
    return math.exp(min(low, 700.0)), math.exp(min(high, 700.0))


def verdict(row: Judged) -> str:
    """Return what to call the change of a row."""
    if row.change is None or row.adjusted is None:
        return INCONCLUSIVE
    low, high = row.change.interval(row.chance)
    if not low - _SMALL <= math.log(row.adjusted) <= high + _SMALL:
        return "mixed"
    found = _called(row.change, row.chance)
    if found not in (INCONCLUSIVE, "unchanged") or row.relative is None:
        return found
    relative = _called(row.relative, row.chance)
    if relative in (INCONCLUSIVE, found):
        return found
    if relative == ("faster" if row.adjusted > 1 else "slower"):
        return f"{relative} than the rest"  # If the rest is at 0.8x, 0.96x is slower.
    return AS_THE_REST if relative == "unchanged" else relative


def _called(change: Change, chance: float) -> str:
    """Return what a change is called: equivalence is tested at 5% a side (Schuirmann 1987)."""
    low, high = change.interval(chance)
    least, most = change.interval(2 * _EQUAL_CHANCE)
    close = least >= -_SMALL and most <= _SMALL
    if low <= 0 <= high:
        return "unchanged" if close else INCONCLUSIVE
    if close:
        return "minor"
    return "slower" if low > 0 else "faster"


def smallest_change(change: Change, chance: float) -> float:
    """Return the smallest change (logarithm) that these runs would show with 80% chance.

    Args:
        change: What is known.
        chance: How often no change may be taken for one, on one side.
    """
    known = change.known
    return known.quantile(1 - chance) - known.quantile(0.5) + _POWER_QUANTILE * known.spread


def steps_needed(
    change: Change, steps: int, below: tuple[float, float], above: tuple[float, float]
) -> int | None:
    """Return from how many steps a run there would be a decision with 80% chance.

    Args:
        change: What is known.
        steps: Number of steps of either run.
        below: Logarithm of the ratio that the change may be shown to be below, and how often
            wrongly; above: the same the other way.

    Returns:
        None if over 20 times as many steps were needed.
    """
    known = change.known
    middle = abs(known.quantile(0.5))
    error = 0.0
    for distance, chance in ((below[0] - middle, below[1]), (middle - above[0], above[1])):
        sure = (known.quantile(1 - chance) - known.quantile(0.5)) / known.spread
        error = max(error, distance / (sure + _POWER_QUANTILE))
    return known.values_needed(steps, error, _MAX_FACTOR * steps) if error > 0 else None


def _remarks(judged: Judgement) -> list[str]:
    found = [_NOTE]
    if any(row.raw is not None and not row.counted for row in judged.rows):
        found.append(_PLAIN)
    runs = [*judged.baseline, *judged.candidate]
    names = _names(len(judged.baseline), len(judged.candidate))
    if len(runs) == 2:
        found.append("The intervals are about these two runs, not about what repeats would show.")
    step = judged.by_name[STEP].change
    if step is not None and step.known.wander > _SURE_OF_WANDER:
        found.append("Step times are autocorrelated, so intervals are wider.")
    if judged.machine:
        found.append(MACHINE)
    for name, side in zip(names, runs, strict=True):
        if side.note:
            found.append(f"{name}: {side.note}")
    return found


class Gate(NamedTuple):
    """Result of the gate: ``PASS``, ``FAIL`` or ``INCONCLUSIVE``, why, and the slower stages."""

    result: str
    text: str
    slower: list[str]


def gate(judged: Judgement, limit: float, noise: float = 0.0, score: float = 1.0) -> Gate:
    """Decide whether the step is at most a share slower at equal work.

    It fails if the step is slower than the limit with 99.75%, or a stage with as much over all
    stages. It passes if the step is not slower than the limit with 95% (non-inferiority).

    Args:
        judged: What is known.
        limit: Share, such as 0.03.
        noise: Spread between runs of one code, such as 0.01, for one run a side.
        score: Of `comparability`; runs that hardly compare never pass.
    """
    if judged.abstained is not None:
        return Gate(INCONCLUSIVE.upper(), judged.abstained, [])
    margin = math.log1p(limit)
    changes = {row.name: row.change for row in judged.rows if row.change is not None}
    for run in (*judged.baseline, *judged.candidate):
        for name in (UNTRACED, *run.waiting):
            changes.pop(name, None)
    if noise:
        spread = math.sqrt(2) * noise
        changes = {name: Change(each.known.widened(spread)) for name, each in changes.items()}
    stages = max(len(changes) - 1, 1)
    slower = [
        name
        for name, change in changes.items()
        if change.exceeds(margin, _FAIL_CHANCE / (1 if name == STEP else stages))
    ]
    if slower:
        texts = [f"{name} {_percent_change(judged.by_name[name])}" for name in slower]
        return Gate(FAIL, f"{', '.join(texts)}; the limit is {100 * limit:g}%", slower)
    if score < HARDLY:
        return Gate(INCONCLUSIVE.upper(), f"comparability score {score:.2f} is below {HARDLY}", [])
    return _passes(judged, changes.get(STEP), margin, limit)


def _passes(judged: Judgement, step: Change | None, margin: float, limit: float) -> Gate:
    undecided = INCONCLUSIVE.upper()
    if step is None:
        return Gate(undecided, "the step has too little data", [])
    if step.stays_below(margin, _PASS_CHANCE):
        text = f"step is at most {100 * limit:g}% slower at equal work"
        return Gate(PASS, f"{text}; no stage is significantly slower than that", [])
    least = math.expm1(margin + smallest_change(step, _FAIL_CHANCE))
    text = f"these runs would show a slowdown of {least:.1%} or more"
    if len(judged.baseline) == len(judged.candidate) == 1:
        steps = min(judged.baseline[0].steps, judged.candidate[0].steps)
        needed = steps_needed(step, steps, (margin, _PASS_CHANCE), (margin, _FAIL_CHANCE))
        text += (
            "; more steps do not help"
            if needed is None
            else f"; about {needed} steps a run would decide"
        )
    else:
        text += "; record more runs"
    return Gate(undecided, text, [])


def _percent_change(row: Judged) -> str:
    """Return a change with its interval: ``+12.0% (99% CI 8.0% to 15.1%)``."""
    low, high = ratios(row.change, row.chance)
    value, least, most = (float(each or 1) - 1 for each in (row.adjusted, low, high))
    return f"{value:+.1%} (99% CI {least:.1%} to {most:.1%})"
