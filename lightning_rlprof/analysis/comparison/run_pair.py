"""Two runs side by side: time and work per step of every stage, under names that both have."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.stages.partition import partition
from lightning_rlprof.analysis.step_selection import FEWEST, counted, recent
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
    called = _common_names(*names), _common_names(*names[::-1])
    # One after the other: what the first one was cut into goes with it.
    first = _side(*runs.pop(0), called[0])
    return first, _side(*runs.pop(), called[1])


def _stage_names(spans: Spans) -> list[str]:
    codes = np.unique(spans.name[spans.rows(kind="stage")])
    return [spans.names[code] for code in codes.tolist()]


def _common_names(own: list[str], others: list[str]) -> dict[str, str]:
    """Return the common name of each stage; not that of another row, such as untraced."""
    common = align_stage_names(own, others).items()
    return {name: f"{to} (stage)" if to in (STEP, _UNTRACED) else to for name, to in common}


def _side(spans: Spans, note: str, called: Mapping[str, str]) -> Side:
    cut = partition(spans)
    choice = counted(spans, cut.steps)
    mine = spans.step[cut.steps[choice.mask]]
    _, place, ranks = np.unique(mine, return_inverse=True, return_counts=True)
    column = np.full(len(cut.steps), -1, dtype=np.int64)  # of each step row; -1: left out
    column[choice.mask] = place
    names = tuple(dict.fromkeys([*called.values(), _UNTRACED]))
    code = {name: row for row, name in enumerate(names)}
    # Untraced time is the last row, and the name of code -1.
    row_of = np.array([*(code[called.get(name, _UNTRACED)] for name in spans.names), -1])

    cells = cut.cells(spans)
    at = column[cells.step]
    inside = at >= 0
    sums = np.zeros((len(names), len(ranks)), dtype=np.int64)
    np.add.at(sums, (row_of[cells.name[inside]], at[inside]), cells.ns[inside])
    sums //= ranks
    walls = sums.sum(axis=0)
    warm = _warm(walls)
    some = np.flatnonzero(sums[:, warm:].any(axis=1)).tolist()
    stages = {names[row]: sums[row, warm:] for row in some} | {STEP: walls[warm:]}
    note = " ".join(filter(None, [note, choice.note]))

    rows, step = cut.stages(spans)
    column_of = np.full(len(spans), -1)  # of each span that is a stage
    column_of[rows] = column[step]
    work = _work(spans, column_of, row_of, ranks, (*names, STEP), warm)
    return Side(stages, work, len(walls) - warm, warm, note)


def _work(
    spans: Spans,
    column_of: Int64s,
    row_of: Int64s,
    ranks: Int64s,
    names: tuple[str, ...],
    warm: int,
) -> dict[str, dict[str, Float64s]]:
    found: dict[str, dict[str, Float64s]] = {name: {} for name in names}
    for counter in WORK:
        own, values = spans.amounts(counter)
        own, values = own[column_of[own] >= 0], values[column_of[own] >= 0]
        cell = row_of[spans.name[own]], column_of[own]
        amount, count = np.zeros((2, len(names), len(ranks)))
        np.add.at(amount, cell, values)
        np.add.at(count, cell, 1)
        amount[-1], count[-1], per = amount.sum(axis=0), count.sum(axis=0), ranks
        if counter == REPLICAS:  # a property, not an amount; of a stage, not of the step
            count[-1], per = 0, count.astype(np.int64)
        mean = np.where(count > 0, amount / np.maximum(per, 1), np.nan)[:, warm:]
        for name, series in zip(names, mean, strict=True):
            if not np.isnan(series).all():
                found[name][counter] = series
    return found


def _warm(walls: Int64s) -> int:
    """Return how many steps at the start warm up; three are left in any case."""
    if not len(walls):
        return 0
    most = min(-(-len(walls) // _MOST_WARM), max(len(walls) - FEWEST, 0))
    slow = walls[:most] > _SLOW_START * np.quantile(walls, _USUAL)
    return int(np.argmin(np.append(slow, False)))
