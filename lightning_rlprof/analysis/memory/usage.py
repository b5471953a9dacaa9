"""Memory of each stage at its highest, and over time: peaks, fragmentation, growth per step."""

from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.memory.phases import growth_of_rank
from lightning_rlprof.analysis.statistics.growth import Growth, grows
from lightning_rlprof.analysis.steps.partition import open_spans
from lightning_rlprof.analysis.steps.step_selection import CLOSED
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, group_starts
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")

_PEAK, _HOST = "device_peak_bytes", "host_rss_bytes"
_COUNTERS = (
    _PEAK,
    "device_allocated_bytes",
    "device_reserved_bytes",
    "device_used_bytes",
    "device_other_bytes",
    _HOST,
)
_COLUMNS = (
    Column("stage", "text"),
    *columns_of("count", "rank", "step"),
    *columns_of("count", "peak", "end", "reserved", "used", "non-PyTorch", "host", unit="bytes"),
    Column("spans", "count"),
)
_NOTE = "Each column is the maximum over the spans with memory data."
_NON_PYTORCH = (
    "non-PyTorch: used on the device beyond what torch's allocator reserves here, by other "
    "processes or by this one (contexts, NCCL, other libraries)."
)
_WHOLE_STEP = "whole step"

_TIMELINE_COLUMNS = (
    Column("rank", "count"),
    Column("component", "text"),
    Column("device", "count"),
    Column("stage", "text"),
    Column("peak", "count", "bytes"),
    Column("peak at", "duration", "ns"),
    *columns_of("count", "reserved", "fragmentation", "start", "end", unit="bytes"),
    *columns_of("number", "growth per step", "CI low", "CI high", unit="bytes"),
    Column("steps", "count"),
    Column("verdict", "text"),
    Column("samples", "count"),
)
_SPAN_COUNTERS = {
    "torch": ("device_allocated_bytes", _PEAK, "device_reserved_bytes"),
    "host": (_HOST, "", ""),
    "child processes": ("children_rss_bytes", "", ""),
}
"""By component: counters of allocated, peak and reserved bytes; "" for none."""
_TIMELINE_NOTE = (
    "peak, reserved: maximum. fragmentation: reserved beyond allocated at the peak. growth per "
    "step and verdict: those of memory_phases, else of each step's lowest allocated bytes."
)
_NO_MEMORY = (
    "This run has no memory data. Capture a step with profile_with_memory: true, or with "
    "memory.level."
)
_ALL = "all"
_NONE = -1
_UNKNOWN = -(2**63) + 1  # bytes: frees of earlier allocations can make real ones negative

Group = tuple[int, str | None, int | None]
"""Rank, component and device."""


def memory(spans: Spans) -> Table:
    """Return the maximum memory of every stage on every rank, the largest first.

    ``peak`` is the most that torch allocated within a span, ``end`` what was allocated when it
    ended. ``reserved``, ``used``, ``non-PyTorch`` and ``host`` (resident memory of the process) are
    values at the end of a span. ``step`` is the step of the peak, or of the highest ``host`` if no
    device recorded peaks. Captured steps as a whole have a row, too.

    Abstains if no span has memory.
    """
    recorded = [spans.amounts(name, np.int64).rows for name in _COUNTERS]
    rows = _stages_and_steps(spans, np.unique(np.concatenate(recorded)))
    if not len(rows):
        return Table("memory", _COLUMNS, abstained=_NO_MEMORY)
    names = [*spans.names, _WHOLE_STEP]
    name = np.where(spans.kind[rows] == _STEP, len(spans.names), spans.name[rows])
    keys, group, count = np.unique(
        spans.rank[rows] * len(names) + name, return_inverse=True, return_counts=True
    )
    highest, step = np.empty((2, len(_COUNTERS), len(keys)), np.int64)
    for at, counter in enumerate(_COUNTERS):
        values = spans.per_row(counter, _UNKNOWN)[rows]
        order = np.lexsort((-values, group))
        first = order[group_starts(group[order])]
        highest[at] = values[first]
        step[at] = np.where(highest[at] == _UNKNOWN, _UNKNOWN, spans.step[rows[first]])
    decisive = 0 if (highest[0] != _UNKNOWN).any() else -1  # the peak, else the host
    largest = np.zeros(len(names), np.int64)
    np.maximum.at(largest, keys % len(names), highest[decisive])
    cells: list[tuple[Cell, ...]] = []
    for at in np.lexsort((keys % len(names), -largest[keys % len(names)])).tolist():
        rank, code = divmod(int(keys[at]), len(names))
        of_peak = int(step[0 if highest[0, at] != _UNKNOWN else -1, at])
        sizes = map(_known, highest[:, at].tolist())
        cells.append((names[code], rank, _known(of_peak), *sizes, int(count[at])))
    note = f"{_NOTE} {_NON_PYTORCH}" if "device_other_bytes" in spans.counters else _NOTE
    return Table("memory", _COLUMNS, cells, note)


def _stages_and_steps(spans: Spans, rows: Int64s) -> Int64s:
    return rows[np.isin(spans.kind[rows], [_STAGE, _STEP])]


def _known(size: int) -> int | None:
    return None if size == _UNKNOWN else size


class _Samples(NamedTuple):
    """Memory of one group by time; `_UNKNOWN` for bytes that were not recorded.

    ``recorded`` is False for values that are only carried to the edge of a stage or step.
    """

    time: Int64s
    allocated: Int64s
    peak: Int64s
    reserved: Int64s
    stage: Int64s
    step: Int64s
    recorded: Mask

    def rows(self, at: Int64s) -> "_Samples":
        """Return some samples."""
        columns: tuple[Any, ...] = self
        return _Samples(*(column[at] for column in columns))


def memory_timeline(spans: Spans) -> Table:
    """Return peak, fragmentation and growth of memory per rank, device and stage.

    They come from the profiler's table ``memory``, else from the counters of captured spans; then
    ``peak at`` is the end of a span. ``reserved`` is the maximum, ``start`` and ``end`` are the
    first and last allocated bytes. Stage "all" is the whole recording. Its growth and ``verdict``
    are those of `memory_phases` if spans counted the component, else of each step's lowest bytes.

    Abstains if the run has neither.
    """
    notes: list[str] = []
    found = _from_table(spans, notes) or _from_spans(spans)
    rows = [
        row for group, samples in found.items() for row in _timeline_rows(spans, group, samples)
    ]
    reason = None if rows else " ".join([_NO_MEMORY, *notes])
    note = " ".join([*notes, _TIMELINE_NOTE])
    return Table("memory timeline", _TIMELINE_COLUMNS, rows, note, reason)


def _from_table(spans: Spans, notes: list[str]) -> dict[Group, _Samples]:
    """Read the table ``memory``, and carry values to the edges of stages and steps."""
    table = spans.try_table("memory", notes)
    if table is None or not len(table.rows):
        return {}
    codes, names = table.texts("component")
    key = (table.numbers("rank"), codes, table.numbers("device", _NONE))
    columns = [table.numbers(name, _UNKNOWN) for name in ("time", "allocated", "reserved")]
    order = np.lexsort((columns[0], *key[::-1]))
    found = {}
    for rows in np.split(order, group_starts(*(column[order] for column in key))[1:]):
        rank, code, device = (int(column[rows[0]]) for column in key)
        name = names[code] if code >= 0 else None
        found[rank, name, None if device == _NONE else device] = _carried(
            spans, rank, *(column[rows] for column in columns)
        )
    return found


def _carried(
    spans: Spans, rank: int, time: Int64s, allocated: Int64s, reserved: Int64s
) -> _Samples:
    """Add the values at the edges of stages and steps, within the same capture."""
    rows = _stages_and_steps(spans, spans.rows(rank=rank))
    edges = np.unique(np.concatenate([spans.start_ns[rows], spans.end_ns[rows]]))
    edges = edges[(edges > time[0]) & (edges < time[-1])]
    before = np.searchsorted(time, edges, side="right") - 1
    closed = np.sort(spans.start_ns[spans.rows(kind="region", name=CLOSED, rank=rank)])
    same_capture = np.searchsorted(closed, time[before]) == np.searchsorted(closed, edges)
    new = np.flatnonzero(same_capture & (time[before] < edges))
    time, at = np.append(time, edges[new]), np.append(np.arange(len(time)), before[new])
    order = np.argsort(time, kind="stable")
    time, carried = time[order], allocated[at[order]]
    stage, step = (open_spans(spans, kind, rank, time) for kind in ("stage", "step"))
    return _Samples(
        time,
        carried,
        carried,
        reserved[at[order]],
        np.append(spans.name, _NONE)[stage],
        np.append(spans.step, _NONE)[step],
        order < len(allocated),
    )


def _from_spans(spans: Spans) -> dict[Group, _Samples]:
    """Read the counters of captured spans: a sample at the end of each span."""
    found: dict[Group, _Samples] = {}
    for component, names in _SPAN_COUNTERS.items():
        recorded = [spans.amounts(name, np.int64).rows for name in names]
        rows = _stages_and_steps(spans, np.unique(np.concatenate(recorded)))
        values = np.array([spans.per_row(name, _UNKNOWN)[rows] for name in names])
        order = np.lexsort((spans.end_ns[rows], spans.rank[rows]))
        for at in np.split(order, group_starts(spans.rank[rows])[1:]) if len(rows) else ():
            own, (allocated, peak, reserved) = rows[at], values[:, at]
            found[int(spans.rank[own[0]]), component, None] = _Samples(
                spans.end_ns[own],
                allocated,
                np.maximum(peak, allocated),
                reserved,
                np.where(spans.kind[own] == _STAGE, spans.name[own], _NONE),
                spans.step[own],
                np.ones(len(own), bool),
            )
    return found


def _timeline_rows(spans: Spans, group: Group, samples: _Samples) -> list[tuple[Cell, ...]]:
    """Return the row of a group as a whole, then of each stage, the highest first."""
    rows = []
    for code in np.unique(samples.stage[samples.stage != _NONE]).tolist():
        own = samples.rows(np.flatnonzero(samples.stage == code))
        steps, lowest = _lowest_by_step(own)
        rows.append((*group, spans.names[code], *_cells(own, grows(steps, lowest), len(steps))))
    rows.sort(key=lambda row: -max(row[4] or 0, row[6] or 0))
    rank, component, _ = group
    counted = growth_of_rank(spans, rank, component)
    if counted is None:
        steps, lowest = _lowest_by_step(samples)
        counted = grows(steps, lowest), steps
    whole, steps = counted
    return [(*group, _ALL, *_cells(samples, whole, len(steps), whole.verdict)), *rows]


def _cells(
    samples: _Samples, grown: Growth, steps: int, verdict: str | None = None
) -> tuple[Any, ...]:
    """Return the cells of a row after its stage."""
    highest = int(np.argmax(samples.peak))
    time, allocated, peak, reserved = (int(column[highest]) for column in samples[:4])
    known = samples.allocated[samples.allocated != _UNKNOWN].tolist()
    same_time = reserved >= allocated == peak != _UNKNOWN
    return (
        _known(peak),
        None if peak == _UNKNOWN else time,
        _known(int(samples.reserved.max())),
        reserved - allocated if same_time else None,
        known[0] if known else None,
        known[-1] if known else None,
        *(grown.per_step, grown.low, grown.high, steps, verdict),
        int(np.count_nonzero(samples.recorded)),
    )


def _lowest_by_step(samples: _Samples) -> tuple[Int64s, Int64s]:
    """Return steps with known bytes, and the least allocated, else reserved, bytes in each."""
    is_known = samples.allocated != _UNKNOWN
    used = samples.allocated if is_known.any() else samples.reserved
    keep = np.flatnonzero((samples.step > 0) & (used != _UNKNOWN))
    order = keep[np.lexsort((used[keep], samples.step[keep]))]
    first = order[group_starts(samples.step[order])]
    return samples.step[first], used[first]
