"""Every step on its own: how long it took and what each stage took of it."""

from collections.abc import Collection

import numpy as np

from lightning_rlprof.analysis.counted import STATES, states
from lightning_rlprof.analysis.exclusive import UNTRACED, Cells
from lightning_rlprof.analysis.partition import partition
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Column, ColumnRows, Table

__all__ = ["steps"]

_MOST_STAGES = 30


def steps(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """List every step of every rank; the stages and ``untraced`` add up to ``wall`` exactly.

    Stages beyond the thirty with the most time are summed in a column "other stages". ``state``
    is ``complete``, ``capture`` (a recorder's heavy tool was on in this step) or ``interrupted``.
    """
    cut = partition(spans, ranks)
    cells = cut.cells(spans)
    shown, rest = _longest(cells, len(cut.steps), len(spans.names))
    names = [*(spans.names[code] for code in shown.tolist()), *["other stages"] * rest]
    columns = (
        Column("rank", "count"),
        Column("step", "count"),
        Column("state", "text"),
        Column("wall", "duration", "ns"),
        *(Column(name, "duration", "ns") for name in names),
        Column("untraced", "duration", "ns"),
    )
    if not len(cut.steps):
        return Table("steps", columns, abstained="no step was recorded to its end")
    times = _times(cells, shown, len(cut.steps), len(names))
    state = (states(spans, cut.steps), STATES)
    who = (spans.rank[cut.steps], spans.step[cut.steps])
    return Table("steps", columns, ColumnRows([*who, state, times.sum(axis=0), *times]))


def _longest(cells: Cells, steps: int, names: int) -> tuple[Int64s, bool]:
    """Return the stages with the most time, longest first, and whether there are others."""
    (totals,) = cells.sums(np.zeros(steps, dtype=np.int64), 1, names)
    order = np.argsort(-totals[1:], kind="stable")
    order = order[totals[1:][order] > 0]
    return order[:_MOST_STAGES], len(order) > _MOST_STAGES


def _times(cells: Cells, shown: Int64s, steps: int, width: int) -> Int64s:
    """Return exclusive time per column and step; the last column is untraced."""
    names = cells.name if cells.columns else cells.names
    column = np.full(max(int(names.max(initial=0)), 0) + 2, width - 1, dtype=np.int64)
    column[shown + 1] = np.arange(len(shown))
    column[UNTRACED + 1] = width
    times = np.zeros((width + 1, steps), dtype=np.int64)
    if cells.columns:
        np.add.at(times.ravel(), column[names + 1] * steps + cells.step, cells.ns)
        return times
    for place, ns in zip(column[names + 1].tolist(), cells.ns.reshape(steps, -1).T, strict=True):
        times[place] += ns
    return times
