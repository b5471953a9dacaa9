"""Untraced time of steps: between which two stages, how often, how long."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.stages.partition import (
    UNTRACED,
    Flat,
    Partition,
    Segments,
    partition,
)
from lightning_rlprof.analysis.statistics.group_summary import Totals, mean, totals
from lightning_rlprof.analysis.step_selection import Counted, counted
from lightning_rlprof.tables.arrays import Int64s, Mask
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
    choice = counted(spans, cut.steps)
    names = (*spans.names, "step boundary")
    sums, steps = _sum_by_names(cut, spans, choice.mask)
    worst = cut.steps[steps]
    whole = _step_time(cut, spans, choice)
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

    def where(self, keep: Mask) -> "Gaps":
        """Return only these."""
        return self if keep.all() else Gaps(*(column[keep] for column in self))


def _sum_by_names(cut: Partition, spans: Spans, mask: Mask) -> tuple[Totals, Int64s]:
    """Sum the gaps of some steps by the stages around them.

    Returns:
        The sums, and the step of the longest gap of each group, the last one if several. A group is
        ``name before the gap * (number of names + 1) + name after it``.
    """
    own, edge = cut.divided, len(spans.names)
    if isinstance(own, Flat) and own.each:
        return _sum_by_place(own, mask, edge)
    found = find_gaps(cut, spans)
    found = found.where(mask[found.step])
    keys = found.after * (edge + 1) + found.before
    sums = totals(keys, found.ns)
    return sums, found.step[_last_of_longest(keys, found.ns, sums.group, sums.max)]


def _sum_by_place(own: Flat, mask: Mask, edge: int) -> tuple[Totals, Int64s]:
    """Do the same if all steps have the same stages: a gap's place determines its names."""
    ns = np.empty((len(mask), own.each + 1), dtype=np.int64)
    ns[:, :-1], ns[:, -1] = own.start_ns.reshape(-1, own.each), own.end
    ns[:, 1:] -= own.end_ns.reshape(-1, own.each)
    ns[:, 0] -= own.begin
    ns = ns if mask.all() else ns[mask]
    names = own.name[: own.each]
    group = np.append(edge, names) * (edge + 1) + np.append(names, edge)
    count, total, longest = np.count_nonzero(ns, axis=0), ns.sum(axis=0), ns.max(axis=0)
    worst = np.zeros_like(group)
    row, place = np.nonzero(ns == longest)
    np.maximum.at(worst, place, np.flatnonzero(mask)[row])
    some = np.argsort(group)
    some = some[count[some] > 0]
    count, total = count[some], total[some]
    return Totals(group[some], count, total, mean(total, count), longest[some]), worst[some]


def _step_time(cut: Partition, spans: Spans, choice: Counted) -> int:
    """Return the time of the included steps."""
    if isinstance(cut.divided, Flat):
        return int((cut.divided.end - cut.divided.begin)[choice.mask].sum())
    cells = cut.cells(spans)
    return int(cells.ns[choice.mask[cells.step]].sum())


def find_gaps(cut: Partition, spans: Spans) -> Gaps:
    """Return the untraced time of all steps."""
    own, edge = cut.divided, len(spans.names)
    return _flat_gaps(own, edge) if isinstance(own, Flat) else _segment_gaps(own, spans, edge)


def _flat_gaps(own: Flat, edge: int) -> Gaps:
    """Return the time before, between and after the stages of every step."""
    steps = np.arange(len(own.begin))
    edges = np.full_like(steps, edge)
    ns = _insert(own, own.start_ns, own.end, behind=True)
    ns -= _insert(own, own.end_ns, own.begin, behind=False)
    after = _insert(own, own.name, edges, behind=False)
    before = _insert(own, own.name, edges, behind=True)
    return Gaps(np.repeat(steps, own.size + 1), ns, after, before).where(ns > 0)


def _insert(own: Flat, values: Int64s, more: Int64s, *, behind: bool) -> Int64s:
    """Insert one more value before or behind those of each step's stages."""
    return np.insert(values, own.first + own.size * behind, more)


def _segment_gaps(cut: Segments, spans: Spans, edge: int) -> Gaps:
    """Merge neighboring segments without a stage."""
    bare = np.flatnonzero(cut.stage == UNTRACED)
    joined = (np.diff(bare) == 1) & (np.diff(cut.step[bare]) == 0)
    breaks = np.flatnonzero(~joined)
    first = np.concatenate([bare[:1], bare[breaks + 1]])
    last = np.concatenate([bare[breaks], bare[-1:]])
    names = np.append(np.append(spans.name, UNTRACED)[cut.stage], UNTRACED)
    step = np.append(cut.step, -1)  # index -1 and index len read this -1: no step
    after = np.where(step[first - 1] == step[first], names[first - 1], edge)
    before = np.where(step[last + 1] == step[last], names[last + 1], edge)
    return Gaps(cut.step[first], cut.end_ns[last] - cut.start_ns[first], after, before)


def _last_of_longest(keys: Int64s, ns: Int64s, groups: Int64s, longest: Int64s) -> Int64s:
    """Return for each group the index of its longest gap, the last one if several."""
    if len(groups) and int(groups[-1]) < len(keys):  # few names: a lookup is faster
        limits = np.zeros(int(groups[-1]) + 1, dtype=np.int64)
        limits[groups] = longest
        at = np.flatnonzero(ns == limits[keys])
    else:
        at = np.flatnonzero(ns == longest[np.searchsorted(groups, keys)])
    found = np.zeros(len(groups), dtype=np.int64)
    np.maximum.at(found, np.searchsorted(groups, keys[at]), at)
    return found
