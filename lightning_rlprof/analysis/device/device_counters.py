"""Hardware counters over time, such as SM activity: per rank, device and metric, by stage."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import optional_numbers
from lightning_rlprof.analysis.steps.partition import open_spans
from lightning_rlprof.analysis.steps.step_selection import CLOSED
from lightning_rlprof.records.records import BACKGROUND_METRICS
from lightning_rlprof.tables.arrays import Float64s, Int64s, group_sizes, group_starts
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    Column("metric", "text"),
    *columns_of("count", "rank", "device"),
    Column("stage", "text"),
    *columns_of("number", "mean", "p50", "p95", "min", "max"),
    Column("samples", "count"),
)
_NOTE = (
    "Mean and percentiles are over time: a value lasts until the next sample of its counter. A "
    "sample counts to the stage that its host was in."
)
_BACKGROUND_NOTE = (
    "Background metrics: a rate is the mean of the time between two samples, and counts to a stage "
    "that was open all that time."
)
_NO_COUNTERS = (
    "This run has no device counters. Record with background_metrics: true, nsys "
    "--gpu-metrics-devices or torch.profiler."
)
CAPTURED = ("counters", "gpu_metrics")
"""Tables of counters that profilers recorded in captures."""

COUNTERS = (*CAPTURED, BACKGROUND_METRICS)
"""All tables of counters."""
_ALL = "all"
_NONE = -1


class Samples(NamedTuple):
    """Samples as columns; -1 if rank, device or name are unknown.

    ``time`` is in nanoseconds, as is ``duration``: how long a rate lasted, which begins at its
    time; 0 of a value at one instant, which lasts until the next one; -1 of one in a capture, which
    also ends with it.
    """

    rank: Int64s
    device: Int64s
    metric: Int64s
    time: Int64s
    value: Float64s
    duration: Int64s

    def rows(self, at: Any) -> "Samples":
        """Return some samples, by positions or a mask."""
        columns: tuple[Any, ...] = self
        return Samples(*(column[at] for column in columns))


def device_counters(spans: Spans) -> Table:
    """Summarize every hardware counter over time, as a whole and in each stage.

    ``mean``, ``p50`` and ``p95`` weight each value with the time until the next sample of the same
    counter, or until the end of the capture. The last value has no weight. ``min``, ``max`` and
    ``samples`` are over all samples. Stage "all" is the whole recording.

    Abstains if the run has no counters.
    """
    notes: list[str] = []
    rows: list[tuple[Cell, ...]] = []
    for samples, metrics in counter_samples(spans, notes, COUNTERS):
        rows += _rows(spans, samples, metrics)
    if not rows:
        return Table("device_counters", _COLUMNS, abstained=" ".join([_NO_COUNTERS, *notes]))
    own = [_BACKGROUND_NOTE] if BACKGROUND_METRICS in spans.tables else []
    return Table("device_counters", _COLUMNS, rows, " ".join([*notes, _NOTE, *own]))


def counter_samples(
    spans: Spans, notes: list[str], tables: Sequence[str]
) -> Iterator[tuple[Samples, Sequence[str]]]:
    """Yield the samples with a value, and the names of their metrics, of tables of counters.

    What is left out is noted.
    """
    for name in tables:
        if (table := spans.try_table(name, notes)) is None:
            continue
        value = np.array(table.column("value"), dtype=np.float64)  # None becomes NaN.
        keep = np.isfinite(value)
        if lost := int(np.count_nonzero(~keep)):
            notes.append(f"Left out of {name}: {lost} samples without a value.")
        codes, metrics = table.texts("metric")
        rank, device = (optional_numbers(table, each, _NONE) for each in ("rank", "device"))
        time, duration = table.numbers("time"), optional_numbers(table, "duration", _NONE)
        yield Samples(rank, device, codes, time, value, duration).rows(keep), metrics


def background_samples(spans: Spans, metric: str) -> Samples | None:
    """Return the samples of a background metric by rank, device and time; None without any."""
    for samples, metrics in counter_samples(spans, [], (BACKGROUND_METRICS,)):
        if metric in metrics:
            own = samples.rows(samples.metric == metrics.index(metric))
            return own.rows(np.lexsort((own.time, own.device, own.rank))) if len(own.time) else None
    return None


def _rows(spans: Spans, samples: Samples, metrics: Sequence[str]) -> list[tuple[Cell, ...]]:
    """Summarize the counters of a table, ordered by metric, device and rank, the whole first."""
    ranks, rank = np.unique(samples.rank, return_inverse=True)
    devices, device = np.unique(samples.device, return_inverse=True)
    # Index -1, for no metric, reads the empty name.
    names, by_name = np.unique([*metrics, ""], return_inverse=True)
    widths = (len(names), len(devices), len(ranks))
    key = np.ravel_multi_index((by_name[samples.metric], device, rank), widths)
    order = np.lexsort((samples.time, key))
    samples, key = samples.rows(order), key[order]
    weight = _lasting(spans, key, samples)
    stage = _stages(spans, samples)
    keep = np.flatnonzero(stage != _NONE)
    width = len(spans.names) + 1
    groups = np.concatenate([key * width, key[keep] * width + stage[keep] + 1])
    at = np.append(np.arange(len(key)), keep)
    rows: list[tuple[Cell, ...]] = []
    for group, *cells in _summaries(groups, samples.value[at], weight[at]):
        whole, code = divmod(group, width)
        metric, at_device, at_rank = np.unravel_index(whole, widths)
        numbers = (int(ranks[at_rank]), int(devices[at_device]))
        place = (None if each == _NONE else each for each in numbers)
        stage_name = spans.names[code - 1] if code else _ALL
        rows.append((str(names[metric]) or None, *place, stage_name, *cells))
    return rows


def _lasting(spans: Spans, key: Int64s, samples: Samples) -> Int64s:
    """Return how long each value lasted: to the next sample, or to the end of the capture.

    A rate lasted for its duration.
    """
    time = samples.time
    lasting = np.diff(time, append=time[-1:])
    lasting[np.flatnonzero(np.diff(key))] = 0  # The last sample of a counter has no next one.
    rows = spans.rows(kind="region", name=CLOSED)
    for each in np.unique(spans.rank[rows]).tolist():
        closed = np.sort(spans.start_ns[rows[spans.rank[rows] == each]])
        own = np.flatnonzero((samples.rank == each) & (samples.duration < 0))
        at = np.searchsorted(closed, time[own], side="right")
        until = np.append(closed, np.iinfo(np.int64).max)[at]
        lasting[own] = np.minimum(lasting[own], until - time[own])
    return np.where(samples.duration > 0, samples.duration, lasting)


def _stages(spans: Spans, samples: Samples) -> Int64s:
    """Return the code of the innermost stage that each sample's host was in, or `_NONE`.

    In a run with one rank, a sample without a rank belongs to it. A rate belongs to a stage that
    was open all the time.
    """
    found = np.full(len(samples.time), _NONE)
    only = spans.ranks[0] if len(spans.ranks) == 1 else _NONE
    rank = np.where(samples.rank == _NONE, only, samples.rank)
    for each in np.unique(rank[rank != _NONE]).tolist():
        own = np.flatnonzero(rank == each)
        first, last = (
            samples.time[own],
            samples.time[own] + np.maximum(samples.duration[own] - 1, 0),
        )
        row, end = (open_spans(spans, "stage", each, times) for times in (first, last))
        found[own] = np.append(spans.name, _NONE)[np.where(row == end, row, _NONE)]
    return found


def _summaries(groups: Int64s, value: Float64s, weight: Int64s) -> list[tuple[Any, ...]]:
    """Return (group, mean, p50, p95, min, max, samples) of each group, ascending.

    A percentile is the least value that the counter did not exceed for that share of the time.
    """
    order = np.lexsort((value, groups))
    groups, value, weight = groups[order], value[order], weight[order]
    heads = group_starts(groups)
    count = group_sizes(heads, len(groups))
    total = np.add.reduceat(weight, heads)
    # If no times are known, all values count alike.
    weight = np.where(np.repeat(total, count) > 0, weight, 1)
    total = np.add.reduceat(weight, heads)
    mean = np.add.reduceat(value * weight, heads) / total
    reached = np.cumsum(weight)
    base = (reached - weight)[heads]
    columns = [groups[heads], mean]
    for percent in (50, 95):
        wanted = base + (total * percent + 99) // 100
        columns.append(value[np.searchsorted(reached, wanted)])
    columns += [value[heads], value[heads + count - 1], count]
    return list(zip(*(column.tolist() for column in columns), strict=True))
