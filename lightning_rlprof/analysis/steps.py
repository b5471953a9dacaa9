"""Every step on its own: how long it took and what each stage took of it."""

from collections.abc import Collection

import numpy as np

from lightning_rlprof.analysis.counted import states
from lightning_rlprof.analysis.partition import UNTRACED, Cells, partition
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["steps"]

_MOST_STAGES = 30


def steps(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """List every step of every rank; the stages and ``untraced`` add up to ``wall`` exactly.

    Stages beyond the thirty with the most time are summed in a column "other stages". ``state``
    is ``complete``, ``capture`` (a recorder's heavy tool was on in this step) or ``interrupted``.
    """
    cut = partition(spans, ranks)
    cells = cut.cells(spans)
    shown = _longest(cells, len(spans.names))
    extra = ["other stages"] if len(np.unique(cells.name[cells.name >= 0])) > len(shown) else []
    names = [*(spans.names[code] for code in shown.tolist()), *extra]
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
    matrix = _matrix(cells, shown, len(cut.steps), len(names))
    who = (spans.rank[cut.steps].tolist(), spans.step[cut.steps].tolist())
    each = zip(*who, states(spans, cut.steps), matrix.tolist(), strict=True)
    rows: list[tuple[Cell, ...]] = [
        (rank, step, state, sum(times), *times) for rank, step, state, times in each
    ]
    return Table("steps", columns, rows)


def _longest(cells: Cells, names: int) -> Int64s:
    """Return the stages with the most time, longest first."""
    totals = np.zeros(names + 1, dtype=np.int64)
    np.add.at(totals, cells.name + 1, cells.ns)
    order = np.argsort(-totals[1:], kind="stable")[:_MOST_STAGES]
    return order[totals[1:][order] > 0]


def _matrix(cells: Cells, shown: Int64s, steps: int, width: int) -> Int64s:
    """Return exclusive time per step and column; the last column is untraced."""
    column = np.full(max(int(cells.name.max(initial=0)), 0) + 2, width - 1, dtype=np.int64)
    column[shown + 1] = np.arange(len(shown))
    column[UNTRACED + 1] = width
    matrix = np.zeros((steps, width + 1), dtype=np.int64)
    np.add.at(matrix, (cells.step, column[cells.name + 1]), cells.ns)
    return matrix
