"""Compare two runs at equal work, stage by stage, with confidence intervals.

`equal_work` separates the change of time that work explains from the rest; `compare` turns it into
a table with verdicts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.comparison.comparability import HARDLY, comparability, score_of
from lightning_rlprof.analysis.comparison.run_pair import (
    REPLICAS,
    STEP,
    Pair,
    Side,
    shared_work,
    sides,
)
from lightning_rlprof.analysis.statistics.rank_tests import shift_bounds, student, typical_shift
from lightning_rlprof.analysis.statistics.robust import expected
from lightning_rlprof.analysis.statistics.time_series import lasting
from lightning_rlprof.analysis.step_selection import FEWEST
from lightning_rlprof.tables.arrays import Float64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_ROUNDS = 12
_CLOSE = 1e-6
_MOST = 2_000  # steps per run; more are thinned, which only widens the interval
_APART = 2  # `lasting` returns this times the correlation time
_FREEDOM = 2.0
_SAME = 1e-6  # of the largest value: a column that changes less is a constant


class Equal(NamedTuple):
    """Two samples compared.

    Attributes:
        work: Mean time that B's work explains over A's; 1 without work, None if work and run can't
            be separated.
        bounds: Of the typical ratio B/A at equal work; None without enough data.
        lasting: Number of autocorrelated steps that count as one; 1 if steps are independent.
    """

    work: float | None
    bounds: tuple[float, float] | None
    lasting: int


class _Fit(NamedTuple):
    """Logarithm of time over what was expected less the shift; the lever; the shift; and work."""

    rest: Float64s
    lever: Float64s
    shift: float
    work: float


def equal_work(
    a: Float64s, b: Float64s, work: Sequence[tuple[Float64s, Float64s]], chance: float
) -> Equal:
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
    if lasts > 1:
        found = _drifting(fit, lasts, columns, chance)
    else:  # very long runs are thinned
        halves = np.split(np.arange(len(run)), [len(a)])
        at = np.concatenate([half[:: -(-len(half) // _MOST)] for half in halves])
        lever = fit.lever[at]
        found = shift_bounds(fit.rest[at], lever - lever.mean(), chance)
    if found is None:
        return Equal(fit.work, None, lasts)
    low, high = (float(np.exp(fit.shift + each)) for each in found)
    return Equal(fit.work, (low, high), lasts)


def _fit(ns: Float64s, run: Float64s, columns: Sequence[Float64s]) -> _Fit | None:
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


def _lever(run: Float64s, usual: Float64s, columns: Sequence[Float64s]) -> Float64s:
    """Return what of the run's factor no change of the fit's coefficients could have made."""
    table = np.stack([np.ones_like(usual), *columns], axis=1) / usual[:, None]
    table /= np.abs(table).max(axis=0)
    found: Float64s = run - table @ np.linalg.lstsq(table, run, rcond=1e-9)[0]
    return found


def _drifting(
    fit: _Fit, lasts: int, columns: Sequence[Float64s], chance: float
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


INCONCLUSIVE = "inconclusive"
"""The verdict if the data can neither show nor exclude a change."""

_COLUMNS = (
    Column("stage", "text"),
    Column("A", "duration", "ns"),
    Column("B", "duration", "ns"),
    Column("adjusted", "ratio"),
    Column("verdict", "text"),
    Column("raw B/A", "ratio"),
    Column("work B/A", "ratio"),
    Column("CI low", "ratio"),
    Column("CI high", "ratio"),
    Column("delta", "duration", "ns"),
    Column("adjusted by", "text"),
)
_CHANCE = 0.01  # of any wrong interval in the whole table
# Stages that a change did not touch were seen 4 % apart in two runs on one quiet machine.
_SMALL = 1.05
_UNCOUNTED = "work not counted"
_NOTE = (
    "A, B: time per step, mean over ranks. raw B/A: their ratio. work B/A: how much more work B "
    "did. adjusted: B/A at equal work. CI low and CI high: 99% CI of it in the typical step, for "
    "all rows together. unchanged: within 5%. minor: significant but within 5%. mixed: mean and "
    "typical step disagree."
)
_PLAIN = (
    "Stages without counted work are judged by the raw ratio. Call count(tokens=...) in the stage."
)


def compare(a: Spans, b: Spans) -> Table:
    """Compare the mean exclusive time per step of every stage, and of the whole step.

    ``raw B/A`` = ``work B/A`` x ``adjusted``, see `equal_work`. ``verdict`` is ``faster`` or
    ``slower`` if the interval excludes 1, ``minor`` if it also stays within 5% (1/1.05 to 1.05),
    ``unchanged`` if it contains 1 and stays within, else ``inconclusive``. It is ``mixed`` if the
    ratio of means lies over 5% beyond it. Intervals are Bonferroni's over all rows. Stages are
    paired by the meaning of their names, and warm-up steps are excluded, see `sides`. Abstains if a
    run has fewer than three included steps.
    """
    pair = sides(a, b)
    for name, side in zip("AB", pair, strict=True):
        if side.steps < FEWEST:
            reason = f"Run {name} has {side.steps} complete steps; a comparison needs {FEWEST}."
            return Table("compare", _COLUMNS, abstained=reason)
    names = list(dict.fromkeys([*pair[0].stages, *pair[1].stages]))
    both = sum(name in pair[0].stages and name in pair[1].stages for name in names)
    found = [_row(name, *pair, _CHANCE / both) for name in names]
    rows = [row for row, _ in sorted(found, key=lambda each: _rank(each[0]))]
    lasting = max(size for _, size in found)
    return Table("compare", _COLUMNS, rows, " ".join(_remarks(a, b, pair, rows, lasting)))


def _rank(row: tuple[Cell, ...]) -> tuple[bool, bool, float]:
    """Sort the largest change first, then untraced, then the whole step."""
    return row[0] == STEP, row[0] == "untraced", -abs(float(row[9] or 0))


def _remarks(
    a: Spans, b: Spans, pair: tuple[Side, Side], rows: list[tuple[Cell, ...]], lasting: int
) -> list[str]:
    found = [_NOTE]
    if any(row[-1] == _UNCOUNTED for row in rows):
        found.append(_PLAIN)
    if lasting > 1:
        found.append(f"Step times are autocorrelated ({lasting} steps), so intervals are wider.")
    for name, side in zip("AB", pair, strict=True):
        if side.warm:
            found.append(f"{name}: the first {side.warm} steps are excluded as warm-up.")
        if side.note:
            found.append(f"{name}: {side.note}")
    score = score_of(comparability(a, b, pair))
    if score < HARDLY:
        found.append(f"Comparability score {score:.2f} of 1: don't rely on this comparison.")
    return found


def _row(name: str, a: Side, b: Side, chance: float) -> tuple[tuple[Cell, ...], int]:
    """Return a stage's row, and for how many steps its pace lasts."""
    total = [int(np.sum(side.stages.get(name, 0))) for side in (a, b)]
    before, after = round(total[0] / a.steps), round(total[1] / b.steps)
    if not all(total):
        verdict = INCONCLUSIVE
        if name not in a.stages or name not in b.stages:
            verdict = "only in A" if name in a.stages else "only in B"
        return (name, before, after, None, verdict, *[None] * 4, after - before, None), 1
    ratio = (total[1] / b.steps) / (total[0] / a.steps)
    counters, times, often = _amounts(name, a, b)
    equal = equal_work(*times, list(counters.values()), chance)
    work = None if equal.work is None else equal.work * often
    adjusted = None if work is None else ratio / work
    told = work if counters or often != 1 else None
    by = ", ".join(counters) or _UNCOUNTED
    verdict, bounds = _verdict(equal, adjusted), equal.bounds or (None, None)
    cells = (name, before, after, adjusted, verdict, ratio, told, *bounds, after - before, by)
    return cells, equal.lasting


def _amounts(name: str, a: Side, b: Side) -> tuple[dict[str, Pair], Pair, float]:
    """Return work and times of a stage in the steps in which it ran, and how much oftener in B."""
    work = _per_replica(shared_work(a, b, name))
    ran = [side.stages[name] > 0 for side in (a, b)]
    keep = []
    for at in (0, 1):
        known = [np.isfinite(pair[at]) for pair in work.values()]
        keep.append(np.all([ran[at], *known], axis=0))
    if not all(each.any() for each in keep):  # counted in other steps than it ran in
        work, keep = {}, ran
    amounts = {counter: (x[keep[0]], y[keep[1]]) for counter, (x, y) in work.items()}
    times = [side.stages[name][kept] for side, kept in zip((a, b), keep, strict=True)]
    often = float(np.mean(ran[1]) / np.mean(ran[0]))
    return amounts, (times[0].astype(np.float64), times[1].astype(np.float64)), often


def _per_replica(work: dict[str, Pair]) -> dict[str, Pair]:
    """Return amounts of work per replica if replicas are counted; replicas alone are a share."""
    shared = work.get(REPLICAS)
    if shared is None or not all(np.nanmin(each) > 0 for each in shared):
        return {name: pair for name, pair in work.items() if name != REPLICAS}
    a, b = shared
    amounts = {f"{name} / replicas": (x / a, y / b) for name, (x, y) in work.items()}
    del amounts[f"{REPLICAS} / {REPLICAS}"]
    return amounts or {"1 / replicas": (1 / a, 1 / b)}


def _verdict(equal: Equal, mean: float | None) -> str:
    if equal.bounds is None or mean is None:
        return INCONCLUSIVE
    low, high = equal.bounds
    if not low / _SMALL <= mean <= high * _SMALL:
        return "mixed"
    close = low * _SMALL >= 1 and high <= _SMALL
    if low <= 1 <= high:
        return "unchanged" if close else INCONCLUSIVE
    if close:
        return "minor"
    return "slower" if low > 1 else "faster"
