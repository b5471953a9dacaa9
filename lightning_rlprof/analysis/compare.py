"""What changed between two runs, stage by stage, told from the noise between steps."""

from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.counted import FEWEST, counted
from lightning_rlprof.analysis.intervals import shift_interval
from lightning_rlprof.analysis.partition import UNTRACED, partition
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["compare"]

_COLUMNS = (
    Column("stage", "text"),
    Column("A", "duration", "ns"),
    Column("B", "duration", "ns"),
    Column("delta", "duration", "ns"),
    Column("B/A", "ratio"),
    Column("verdict", "text"),
    Column("low", "duration", "ns"),
    Column("high", "duration", "ns"),
)
# Stages that a change did not touch were seen 4 % apart in two runs on one quiet machine.
_SMALL = 0.05
_NOTE = (
    "Time per step, mean over ranks. low and high bound the typical change with 99 % confidence, "
    "judged by the steps of these two runs. small: under 5 %, which two runs of the same code can "
    "be apart. mixed: most steps moved one way, a few long ones the mean the other way."
)


@dataclass(frozen=True)
class _Side:
    """Exclusive time per step, mean over ranks: stages by name, in the order of the steps."""

    stages: dict[str, Int64s]
    steps: int
    note: str


def compare(a: Spans, b: Spans) -> Table:
    """Compare the mean exclusive time per step of every stage, and of the whole step.

    ``verdict`` is ``faster`` or ``slower`` only where the interval of the Mann-Whitney test
    (Hodges-Lehmann, 99 %) leaves out zero; else ``within noise``, or ``too few steps`` where no
    such interval exists, ``small`` where it stays within 5 % of A, and ``mixed`` where the typical
    step went one way and the mean the other.
    Abstains when a run has fewer than three steps that count.
    """
    sides = _side(a), _side(b)
    for name, side in zip("AB", sides, strict=True):
        if side.steps < FEWEST:
            reason = f"run {name} has {side.steps} complete steps, {FEWEST} are needed"
            return Table("compare", _COLUMNS, abstained=reason)
    names = dict.fromkeys([*sides[0].stages, *sides[1].stages])
    rows = [_row(name, *sides) for name in names]
    rows.sort(key=_rank)
    notes = [f"{name}: {side.note}" for name, side in zip("AB", sides, strict=True) if side.note]
    return Table("compare", _COLUMNS, rows, " ".join([_NOTE, *notes]))


def _rank(row: tuple[Cell, ...]) -> tuple[bool, bool, float]:
    """Sort the largest change first, then untraced, then the whole step."""
    return row[0] == "step", row[0] == "untraced", -abs(float(row[3] or 0))


def _side(spans: Spans) -> _Side:
    cut = partition(spans)
    choice = counted(spans, cut.steps)
    cells = cut.cells(spans)
    numbers, place = np.unique(spans.step[cut.steps[choice.mask]], return_inverse=True)
    at = np.full(len(cut.steps), -1, dtype=np.int64)
    at[choice.mask] = place
    ranks = np.bincount(place, minlength=len(numbers))
    stages = {}
    for code in np.unique(cells.name).tolist():
        mine = (cells.name == code) & (at[cells.step] >= 0)
        sums = np.zeros(len(numbers), dtype=np.int64)
        np.add.at(sums, at[cells.step[mine]], cells.ns[mine])
        if sums.any():
            stages["untraced" if code == UNTRACED else spans.names[code]] = sums // ranks
    walls = np.zeros(len(numbers), dtype=np.int64)
    for times in stages.values():
        walls += times
    return _Side({**stages, "step": walls}, len(numbers), choice.note)


def _row(name: str, a: _Side, b: _Side) -> tuple[Cell, ...]:
    none = np.zeros(0, dtype=np.int64)
    left, right = a.stages.get(name, none), b.stages.get(name, none)
    left = left if len(left) else np.zeros(a.steps, dtype=np.int64)
    right = right if len(right) else np.zeros(b.steps, dtype=np.int64)
    before, after = round(int(left.sum()) / a.steps), round(int(right.sum()) / b.steps)
    delta, interval = after - before, shift_interval(left, right)
    low, high = interval or (None, None)
    ratio = after / before if before else None
    if name in a.stages and name in b.stages:
        verdict = _verdict(before, delta, interval)
    else:
        verdict = "only in B" if name in b.stages else "only in A"
    return name, before, after, delta, ratio, verdict, low, high


def _verdict(before: int, delta: int, interval: tuple[int, int] | None) -> str:
    if interval is None:
        return "too few steps"
    low, high = interval
    if low <= 0 <= high:
        return "within noise"
    if (delta > 0) != (low > 0):  # a few long steps outweigh what happened to all the others
        return "mixed"
    if max(-low, high) < _SMALL * before:
        return "small"
    return "slower" if low > 0 else "faster"
