"""Two runs side by side: time and work per step of every stage, under names that both have."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.stages.partition import Partition, partition
from lightning_rlprof.analysis.step_selection import FEWEST, Counted, counted, recent
from lightning_rlprof.analysis.time_categories import align_stage_names
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans

STEP, _UNTRACED = "step", "untraced"
"""Names the row of the whole step."""

REPLICAS = "replicas"
"""Counter that says by how many replicas a stage's work was shared."""

WORK = ("tokens", "tokens_sq", "samples", "batch", REPLICAS)
"""Counters that say how much a stage had to do, and how many replicas shared it."""

_SLOW_START = 1.5  # times what nine of ten steps take at most: a first step above it warms up
_USUAL = 0.9
_OFTEN = 0.5
_MOST_WARM = 10  # one step in ten may be warm-up


@dataclass(frozen=True, eq=False)
class Side:
    """What is compared of a run, by the steps that count and do not warm up.

    Attributes:
        stages: Exclusive time per step, mean over ranks, by stage; `STEP` is the sum of all.
        work: Mean over ranks of what a stage counted per step, by stage and counter, NaN where it
            counted nothing; of `STEP` that of all stages.
        steps: How many steps.
        warm: How many at the start were left out.
        note: What else was left out.
    """

    stages: Mapping[str, Int64s]
    work: Mapping[str, Mapping[str, Float64s]]
    steps: int
    warm: int
    note: str


Pair = tuple[Float64s, Float64s]
"""The same numbers per step in A and in B."""


def shared_work(a: Side, b: Side, stage: str) -> dict[str, Pair]:
    """Return what both runs counted in a stage, by counter; of the whole step where it has none.

    A counter that is missing in half of the steps of a run does not count.
    """
    own = _shared(a, b, stage)
    amounts = own if set(own) - {REPLICAS} else own | _shared(a, b, STEP)
    return {name: amounts[name] for name in WORK if name in amounts}


def _shared(a: Side, b: Side, stage: str) -> dict[str, Pair]:
    left, right = a.work.get(stage, {}), b.work.get(stage, {})
    pairs = {name: (left[name], right[name]) for name in left if name in right}
    return {name: pair for name, pair in pairs.items() if _known(pair)}


def _known(pair: Pair) -> bool:
    return all(np.isfinite(each).mean() > _OFTEN for each in pair)


def sides(a: Spans, b: Spans) -> tuple[Side, Side]:
    """Return both runs, their stages under common names; of very large ones the last steps."""
    runs = [recent(spans) for spans in (a, b)]
    names = [_stage_names(spans) for spans, _ in runs]
    called = (
        _apart(align_stage_names(names[0], names[1])),
        _apart(align_stage_names(names[1], names[0])),
    )
    # One after the other: what the first one was cut into goes with it.
    first = _side(*runs.pop(0), called[0])
    return first, _side(*runs.pop(), called[1])


def _apart(called: Mapping[str, str]) -> dict[str, str]:
    """Rename a stage whose name is that of another row, such as untraced."""
    rows = (STEP, _UNTRACED)
    return {own: f"{name} (stage)" if name in rows else name for own, name in called.items()}


def _stage_names(spans: Spans) -> list[str]:
    codes = np.unique(spans.name[spans.rows(kind="stage")])
    return [spans.names[code] for code in codes.tolist()]


@dataclass(frozen=True, eq=False)
class _Frame:
    """Where things go: step rows to columns (-1: left out), names to rows; ranks per column."""

    at: Int64s
    ranks: Int64s
    row: Int64s
    names: tuple[str, ...]


def _side(spans: Spans, note: str, called: Mapping[str, str]) -> Side:
    cut = partition(spans)
    choice = counted(spans, cut.steps)
    frame = _frame(spans, cut, choice, called)
    cells = cut.cells(spans)
    step = frame.at[cells.step]
    inside = step >= 0
    sums = np.zeros((len(frame.names), len(frame.ranks)), dtype=np.int64)
    np.add.at(sums, (frame.row[cells.name[inside]], step[inside]), cells.ns[inside])
    sums //= np.maximum(frame.ranks, 1)
    walls = sums.sum(axis=0)
    warm = _warm(walls)
    some = np.flatnonzero(sums[:, warm:].any(axis=1)).tolist()
    stages = {frame.names[at]: sums[at, warm:] for at in some} | {STEP: walls[warm:]}
    work = _work(spans, cut, frame, warm)
    note = " ".join(filter(None, [note, choice.note]))
    return Side(stages, work, len(walls) - warm, warm, note)


def _frame(spans: Spans, cut: Partition, choice: Counted, called: Mapping[str, str]) -> _Frame:
    mine = cut.steps[choice.mask]
    numbers, place = np.unique(spans.step[mine], return_inverse=True)
    at = np.full(len(cut.steps), -1, dtype=np.int64)
    at[choice.mask] = place
    names = tuple(dict.fromkeys([*called.values(), _UNTRACED]))
    rows = {name: row for row, name in enumerate(names)}
    row = [rows[called.get(name, _UNTRACED)] for name in spans.names]
    by_code = np.array([*row, rows[_UNTRACED]], dtype=np.int64)  # `UNTRACED`, -1, reads the last
    return _Frame(at, np.bincount(place, minlength=len(numbers)), by_code, names)


def _warm(walls: Int64s) -> int:
    """Return how many steps at the start warm up; three are left in any case."""
    if not len(walls):
        return 0
    most = min(-(-len(walls) // _MOST_WARM), max(len(walls) - FEWEST, 0))
    slow = walls[:most] > _SLOW_START * np.quantile(walls, _USUAL)
    return int(np.argmin(np.append(slow, False)))


def _work(spans: Spans, cut: Partition, frame: _Frame, warm: int) -> dict[str, dict[str, Float64s]]:
    rows, step = cut.stages(spans)
    order = np.argsort(rows, kind="stable")
    rows, step = rows[order], frame.at[step[order]]
    found: dict[str, dict[str, Float64s]] = {name: {} for name in (*frame.names, STEP)}
    for counter in WORK:
        own, values = spans.amounts(counter)
        if not len(own) or not len(rows):
            continue
        place = np.minimum(np.searchsorted(rows, own), len(rows) - 1)
        told = (rows[place] == own) & (step[place] >= 0)
        at = frame.row[spans.name[own[told]]], step[place[told]]
        sums, count = np.zeros((2, len(frame.names), len(frame.ranks)))
        np.add.at(sums, at, values[told])
        np.add.at(count, at, 1)
        if counter == REPLICAS:  # a property, not an amount; of a stage, not of the step
            each = [*_over(sums, count, count), np.full(len(frame.ranks), np.nan)]
        else:
            whole = _over(sums.sum(axis=0), frame.ranks, count.sum(axis=0))
            each = [*_over(sums, frame.ranks, count), whole]
        for name, series in zip((*frame.names, STEP), each, strict=True):
            if not np.isnan(series[warm:]).all():
                found[name][counter] = series[warm:]
    return found


def _over(sums: Float64s, per: Float64s | Int64s, count: Float64s) -> Float64s:
    found: Float64s = np.where(count > 0, sums / np.maximum(per, 1), np.nan)
    return found
