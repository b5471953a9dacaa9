"""Whole spans that no step's partition holds: regions, and stages beside the training thread."""

from collections.abc import Collection, Iterator

import numpy as np

from lightning_rlprof.analysis.counted import Counted, counted
from lightning_rlprof.analysis.partition import home, select
from lightning_rlprof.analysis.statistics import summarize
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["background", "regions"]

_STATISTICS = (
    Column("total", "duration", "ns"),
    Column("mean", "duration", "ns"),
    Column("p50", "duration", "ns"),
    Column("p95", "duration", "ns"),
    Column("max", "duration", "ns"),
    Column("count", "count"),
)
_OUTSIDE = "outside steps"


def background(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum stages of other threads than the training's (``in background``) or ``outside steps``.

    They run beside the steps, so they have no share of them. A span belongs where it starts.
    """
    columns = (Column("stage", "text"), Column("where", "text"), *_STATISTICS)
    steps, rows = select(spans, "step", ranks), select(spans, "stage", ranks)
    choice = counted(spans, steps)
    rows = rows[home(spans, steps, rows, spans.thread) < 0]
    table: list[tuple[Cell, ...]] = [
        (name, _OUTSIDE if outside else "in background", *cells)
        for name, outside, cells in _sums(spans, steps, choice, rows)
    ]
    return Table("background", columns, table, choice.note)


def regions(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum regions: data fetch, training step, optimizer, checkpoints, validation, annotations.

    Regions lie in one another and in stages, so their shares of the counted steps' time do not
    add up to one. A span belongs where it starts.
    """
    where = Column("where", "text")
    columns = (Column("region", "text"), where, Column("share", "share"), *_STATISTICS)
    steps, rows = select(spans, "step", ranks), select(spans, "region", ranks)
    choice = counted(spans, steps)
    whole = int(spans.duration_ns[steps[choice.mask]].sum())
    table: list[tuple[Cell, ...]] = [
        (name, _OUTSIDE, None, *cells) if outside else (name, "in steps", cells[0] / whole, *cells)
        for name, outside, cells in _sums(spans, steps, choice, rows)
    ]
    return Table("regions", columns, table, choice.note)


def _sums(
    spans: Spans, steps: Int64s, choice: Counted, rows: Int64s
) -> Iterator[tuple[str, bool, list[int]]]:
    """Yield (name, outside steps, statistics), largest total first; other steps are left out."""
    step = home(spans, steps, rows, spans.rank)
    keep = (step < 0) | np.append(choice.mask, True)[step]
    rows, outside = rows[keep], (step[keep] < 0).astype(np.int64)
    found = summarize(spans.name[rows] * 2 + outside, spans.duration_ns[rows])
    columns = (found.total, found.mean, found.p50, found.p95, found.max, found.count)
    for at in np.argsort(-found.total, kind="stable").tolist():
        code, place = divmod(int(found.group[at]), 2)
        yield spans.names[code], bool(place), [int(column[at]) for column in columns]
