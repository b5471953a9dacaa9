"""Where the untraced time lies: between which two stages, how often, how long."""

from collections.abc import Collection

import numpy as np

from lightning_rlprof.analysis.counted import counted
from lightning_rlprof.analysis.partition import UNTRACED, Partition, partition
from lightning_rlprof.analysis.statistics import summarize
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["gaps"]

_COLUMNS = (
    Column("after", "text"),
    Column("before", "text"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("mean", "duration", "ns"),
    Column("max", "duration", "ns"),
    Column("count", "count"),
    Column("worst rank", "count"),
    Column("worst step", "count"),
)


def gaps(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """List the gaps between stages, largest total first; they add up to "untraced" exactly."""
    cut = partition(spans, ranks)
    if not len(cut.steps):
        return Table("gaps", _COLUMNS, abstained="no step was recorded to its end")
    choice = counted(spans, cut.steps)
    whole = int((cut.end_ns - cut.start_ns)[choice.mask[cut.step]].sum())
    first, last = _runs(cut)
    keep = choice.mask[cut.step[first]]
    first, last = first[keep], last[keep]
    names = (*spans.names, "step boundary")
    after, before = _neighbours(spans, cut, first, last, len(spans.names))
    length = cut.end_ns[last] - cut.start_ns[first]
    keys = after * len(names) + before
    found = summarize(keys, length)
    worst = np.lexsort((length, keys))[np.cumsum(found.count) - 1]
    step = cut.steps[cut.step[first[worst]]]
    numbers = (found.total, found.mean, found.max, found.count, spans.rank[step], spans.step[step])
    rows: list[tuple[Cell, ...]] = []
    for key, *cells in zip(found.group.tolist(), *(each.tolist() for each in numbers), strict=True):
        after_name, before_name = names[key // len(names)], names[key % len(names)]
        rows.append((after_name, before_name, cells[0] / whole, *cells))
    rows.sort(key=lambda row: row[2] or 0.0, reverse=True)
    return Table("gaps", _COLUMNS, rows, choice.note)


def _runs(cut: Partition) -> tuple[Int64s, Int64s]:
    """Return the first and last segment of every untraced stretch within one step."""
    bare = np.flatnonzero(cut.label == UNTRACED)
    joined = (np.diff(bare) == 1) & (np.diff(cut.step[bare]) == 0)
    breaks = np.flatnonzero(~joined)
    first = np.concatenate([bare[:1], bare[breaks + 1]])
    last = np.concatenate([bare[breaks], bare[-1:]])
    return first, last


def _neighbours(
    spans: Spans, cut: Partition, first: Int64s, last: Int64s, edge: int
) -> tuple[Int64s, Int64s]:
    """Return the stages before and after each stretch, ``edge`` where the step begins or ends."""
    names = np.append(cut.names(spans), UNTRACED)
    step = np.append(cut.step, -1)  # index -1 and index len both read a step that is none
    after = np.where(step[first - 1] == step[first], names[first - 1], edge)
    before = np.where(step[last + 1] == step[last], names[last + 1], edge)
    return after, before
