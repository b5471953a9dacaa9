"""What the counters of device tools stood at: per rank, device and metric, and in each stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rlprof.analysis.stages.partition import paint
from lightning_rlprof.analysis.step_selection import CLOSED
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_COLUMNS = (
    Column("metric", "text"),
    Column("rank", "count"),
    Column("device", "count"),
    Column("stage", "text"),
    Column("mean", "number"),
    Column("p50", "number"),
    Column("p95", "number"),
    Column("min", "number"),
    Column("max", "number"),
    Column("samples", "count"),
)
_NOTE = (
    "A value holds until the next one of its counter; mean and percentiles are over time. A sample "
    "counts to the stage that its host was in when it was taken."
)
_TABLES = ("counters", "gpu_metrics")
_ALL = "all"
_NONE = -1


@dataclass(frozen=True, eq=False)
class _Samples:
    """Samples as columns; `_NONE` where rank or device are not known."""

    rank: Int64s
    device: Int64s
    metric: tuple[Int64s, Sequence[str]]
    time: Int64s
    value: Float64s


def device_counters(spans: Spans) -> Table:
    """Summarize every counter of device tools over time, as a whole and in each stage.

    ``mean``, ``p50`` and ``p95`` weigh each value with the time that it held: until the next sample
    of the same counter, or the end of the capture. The last one holds for no time that is known.
    ``min``, ``max`` and ``samples`` are of all. Stage "all" is the whole recording.

    Abstains where no device tool recorded counters.
    """
    remarks: list[str] = []
    read_ones = [_samples(spans, name, remarks) for name in _TABLES]
    found = [each for each in read_ones if each is not None and len(each.time)]
    if not found:
        reason = " ".join(["no device tool recorded counters", *remarks])
        return Table("device_counters", _COLUMNS, abstained=reason)
    rows = [row for each in found for row in _rows(spans, each)]
    return Table("device_counters", _COLUMNS, rows, " ".join([*remarks, _NOTE]))


def _samples(spans: Spans, name: str, remarks: list[str]) -> _Samples | None:
    """Read one table; samples without a value are left out, and said."""
    table = spans.try_table(name, remarks)
    if table is None:
        return None
    value = np.array(table.column("value"), dtype=np.float64)  # None becomes nan
    keep = np.isfinite(value)
    if lost := int(np.count_nonzero(~keep)):
        remarks.append(f"Left out of {name}: {lost} samples without a value.")
    names = {column.name for column in table.columns}
    codes, metrics = table.texts("metric")
    nothing = np.full(len(value), _NONE)
    return _Samples(
        (table.numbers("rank", _NONE) if "rank" in names else nothing)[keep],
        (table.numbers("device", _NONE) if "device" in names else nothing)[keep],
        (codes[keep], metrics),
        table.numbers("time")[keep],
        value[keep],
    )


def _rows(spans: Spans, samples: _Samples) -> list[tuple[Cell, ...]]:
    """Summarize one table's counters, ordered by metric, device and rank, the whole first."""
    codes, metrics = samples.metric
    ranks, rank = np.unique(samples.rank, return_inverse=True)
    devices, device = np.unique(samples.device, return_inverse=True)
    by_name = np.argsort(np.argsort(np.array([*metrics, ""], dtype=object)))  # the last for none
    widths = (len(metrics) + 1, len(devices), len(ranks))
    key = np.ravel_multi_index((by_name[codes], device, rank), widths)
    order = np.lexsort((samples.time, key))
    key, time, value = key[order], samples.time[order], samples.value[order]
    weight = _held(spans, key, time, samples.rank[order])
    stage = _stages(spans, samples.rank[order], time)
    keep = np.flatnonzero(stage != _NONE)
    width = len(spans.names) + 1
    groups = np.concatenate([key * width, key[keep] * width + stage[keep] + 1])
    own = np.append(np.arange(len(key)), keep)
    names = sorted([*metrics, ""])
    rows: list[tuple[Cell, ...]] = []
    for group, *figures in _summaries(groups, value[own], weight[own]):
        whole, code = divmod(group, width)
        metric, at_device, at_rank = (int(at) for at in np.unravel_index(whole, widths))
        who = (ranks[at_rank].item(), devices[at_device].item())
        label = spans.names[code - 1] if code else _ALL
        known = [None if each == _NONE else each for each in who]
        rows.append((names[metric] or None, *known, label, *figures))
    return rows


def _held(spans: Spans, key: Int64s, time: Int64s, rank: Int64s) -> Int64s:
    """Return how long each sample's value held: to the next one, or to the end of the capture."""
    held = np.diff(time, append=time[-1:])
    held[np.flatnonzero(np.diff(key))] = 0  # the last one of its counter
    rows = spans.rows(kind="region", name=CLOSED)
    for each in np.unique(spans.rank[rows]).tolist():
        closed = np.sort(spans.start_ns[rows[spans.rank[rows] == each]])
        own = np.flatnonzero(rank == each)
        at = np.searchsorted(closed, time[own], side="right")
        until = np.append(closed, np.iinfo(np.int64).max)[at]
        held[own] = np.minimum(held[own], until - time[own])
    return held


def _stages(spans: Spans, rank: Int64s, time: Int64s) -> Int64s:
    """Return the code of the stage that each sample's host was in, the one begun last.

    A sample whose rank is not known is the rank's where the run has one alone.
    """
    found = np.full(len(time), _NONE)
    only = spans.ranks[0] if len(spans.ranks) == 1 else _NONE
    whose = np.where(rank == _NONE, only, rank)
    for each in np.unique(whose[whose != _NONE]).tolist():
        rows = spans.rows(kind="stage", rank=each)
        if len(rows):
            edges = np.concatenate([spans.start_ns[rows], spans.end_ns[rows]])
            times, places = np.unique(edges, return_inverse=True)
            label = paint(places[: len(rows)], places[len(rows) :], len(times) - 1)
            own = np.flatnonzero(whose == each)
            at = np.searchsorted(times, time[own], side="right")  # 0 before all, then the cells
            row = np.concatenate([[_NONE], label, [_NONE]])[at]
            found[own] = np.where(row == _NONE, _NONE, spans.name[rows[row]])
    return found


def _summaries(groups: Int64s, value: Float64s, weight: Int64s) -> list[tuple[Any, ...]]:
    """Return (group, mean, p50, p95, min, max, samples) of each group, ascending.

    A percentile is the least value at or below which the counter was for that share of the time.
    """
    order = np.lexsort((value, groups))
    groups, value, weight = groups[order], value[order], weight[order]
    heads = np.flatnonzero(np.diff(groups, prepend=-1))
    count = np.diff(np.append(heads, len(groups)))
    total = np.add.reduceat(weight, heads)
    weight = np.where(np.repeat(total, count) > 0, weight, 1)  # nothing known: all alike
    total = np.add.reduceat(weight, heads)
    mean = np.add.reduceat(value * weight, heads) / total
    before = np.cumsum(weight) - weight
    base = before[heads]
    reached = np.cumsum(weight)
    figures = [groups[heads], mean]
    for percent in (50, 95):
        wanted = base + (total * percent + 99) // 100
        figures.append(value[np.searchsorted(reached, wanted)])
    figures += [value[heads], value[heads + count - 1], count]
    return list(zip(*(column.tolist() for column in figures), strict=True))
