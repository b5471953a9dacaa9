"""Untraced time of steps: between which two stages, how often, how long."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.stages.partition import UNTRACED, Partition, partition
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.analysis.step_selection import counted
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

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
        return Table("gaps", _COLUMNS, abstained="no complete step was recorded")
    choice, found = counted(spans, cut.steps), find_gaps(cut, spans)
    found = Gaps(*(column[choice.mask[found.step]] for column in found))
    names = (*spans.names, "step boundary")
    keys = found.after * len(names) + found.before
    sums = summarize(keys, found.ns)
    order = np.lexsort((found.ns, keys))
    last = order[np.cumsum(sums.count) - 1]  # the longest of each pair, the last one if several
    worst = cut.steps[found.step[last]]
    cells = cut.cells(spans)
    whole = int(cells.ns[choice.mask[cells.step]].sum())
    numbers = (sums.total, sums.mean, sums.max, sums.count, spans.rank[worst], spans.step[worst])
    rows: list[tuple[Cell, ...]] = []
    for key, *row in zip(sums.group.tolist(), *(each.tolist() for each in numbers), strict=True):
        after, before = names[key // len(names)], names[key % len(names)]
        rows.append((after, before, row[0] / whole, *row))
    rows.sort(key=lambda row: row[2] or 0.0, reverse=True)
    return Table("gaps", _COLUMNS, rows, choice.note)


class Gaps(NamedTuple):
    """Untraced time ranges, each as long as possible within one step, by thread and time.

    Attributes:
        step: Index into ``Partition.steps``.
        ns: Its length; never zero.
        after: Index into ``Spans.names`` of the stage before it; ``len(names)`` at a step's start.
        before: Index of the stage behind it; ``len(names)`` at a step's end.
    """

    step: Int64s
    ns: Int64s
    after: Int64s
    before: Int64s


def find_gaps(cut: Partition, spans: Spans) -> Gaps:
    """Return the untraced time of all steps: neighboring segments without a stage are one gap."""
    own, edge = cut.divided, len(spans.names)
    bare = np.flatnonzero(own.stage == UNTRACED)
    breaks = np.flatnonzero((np.diff(bare) > 1) | (np.diff(own.step[bare]) != 0))
    first = np.concatenate([bare[:1], bare[breaks + 1]])
    last = np.concatenate([bare[breaks], bare[-1:]])
    names = np.append(np.append(spans.name, UNTRACED)[own.stage], UNTRACED)
    step = np.append(own.step, -1)  # index -1 and index len read this -1: no step
    after = np.where(step[first - 1] == step[first], names[first - 1], edge)
    before = np.where(step[last + 1] == step[last], names[last + 1], edge)
    return Gaps(own.step[first], own.end_ns[last] - own.start_ns[first], after, before)
