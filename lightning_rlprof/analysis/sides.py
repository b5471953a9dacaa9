"""Two runs side by side: time and work per step of every stage, under names that both have."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.canonical import paired
from lightning_rlprof.analysis.counted import FEWEST, Counted, counted
from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.partition import UNTRACED, Partition, partition
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["STEP", "WORK", "Side", "sides"]

STEP, _UNTRACED = "step", "untraced"
WORK = ("tokens", "tokens_sq", "samples", "batch", "replicas")
"""Counters that say how much a stage had to do, and how many shared it."""

_SLOW_START = 1.5  # times the median of all steps: a first step that takes longer warms up
_MOST_WARM = 10  # one step of so many, or a part of it, may be warm-up


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
    work: Mapping[str, Mapping[str, Floats]]
    steps: int
    warm: int
    note: str


def sides(a: Spans, b: Spans) -> tuple[Side, Side]:
    """Return both runs, their stages under common names."""
    names = [_stage_names(spans) for spans in (a, b)]
    both = ((a, paired(names[0], names[1])), (b, paired(names[1], names[0])))
    first, second = (_side(spans, called) for spans, called in both)
    return first, second


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


def _side(spans: Spans, called: Mapping[str, str]) -> Side:
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
    some = [at for at in np.flatnonzero(sums[:, warm:].any(axis=1)).tolist()]
    stages = {frame.names[at]: sums[at, warm:] for at in some} | {STEP: walls[warm:]}
    work = _work(spans, cut, frame, warm)
    return Side(stages, work, len(walls) - warm, warm, choice.note)


def _frame(spans: Spans, cut: Partition, choice: Counted, called: Mapping[str, str]) -> _Frame:
    mine = cut.steps[choice.mask]
    numbers, place = np.unique(spans.step[mine], return_inverse=True)
    at = np.full(len(cut.steps), -1, dtype=np.int64)
    at[choice.mask] = place
    names = tuple(dict.fromkeys([*called.values(), _UNTRACED]))
    rows = {name: row for row, name in enumerate(names)}
    row = [rows[called.get(name, _UNTRACED)] for name in spans.names]
    # The code of untraced, -1, reads the last one.
    by_code = np.array([*row, rows[_UNTRACED]], dtype=np.int64)
    assert by_code[UNTRACED] == rows[_UNTRACED]
    return _Frame(at, np.bincount(place, minlength=len(numbers)), by_code, names)


def _warm(walls: Int64s) -> int:
    """Return how many steps at the start warm up; three are left in any case."""
    if not len(walls):
        return 0
    most = min(-(-len(walls) // _MOST_WARM), max(len(walls) - FEWEST, 0))
    slow = walls[:most] > _SLOW_START * np.median(walls)
    return int(np.argmin(np.append(slow, False)))


def _work(
    spans: Spans, cut: Partition, frame: _Frame, warm: int
) -> dict[str, Mapping[str, Floats]]:
    rows, step = cut.stages(spans)
    order = np.argsort(rows, kind="stable")
    rows, step = rows[order], frame.at[step[order]]
    found: dict[str, dict[str, Floats]] = {name: {} for name in (*frame.names, STEP)}
    for counter in WORK:
        if counter not in spans.counters or not len(rows):
            continue
        own, values = spans.counters[counter]
        place = np.minimum(np.searchsorted(rows, own), len(rows) - 1)
        told = (rows[place] == own) & (step[place] >= 0)
        at = frame.row[spans.name[own[told]]], step[place[told]]
        shape = (len(frame.names), len(frame.ranks))
        sums, count = np.zeros(shape), np.zeros(shape)
        np.add.at(sums, at, values[told].astype(np.float64))
        np.add.at(count, at, 1)
        per = (count, count.sum(axis=0)) if counter == "replicas" else (frame.ranks, frame.ranks)
        whole = _over(sums.sum(axis=0), per[1], count.sum(axis=0))[warm:]
        each = _over(sums, per[0], count)[:, warm:]
        for name, series in zip((*frame.names, STEP), (*each, whole), strict=True):
            if not np.isnan(series).all():
                found[name][counter] = series
    return dict(found)


def _over(sums: Floats, per: Floats | Int64s, count: Floats) -> Floats:
    found: Floats = np.where(count > 0, sums / np.maximum(per, 1), np.nan)
    return found
