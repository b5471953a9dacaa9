"""Memory of each stage at its highest, and from phase to phase: what stays, and which one leaks."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.group_summary import rows_by_group
from lightning_rlprof.analysis.statistics.growth import (
    FLAT,
    LEAK,
    MAY_LEAK,
    Growth,
    grows,
)
from lightning_rlprof.analysis.steps.partition import open_spans
from lightning_rlprof.analysis.steps.step_selection import CLOSED, counted, in_included
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

ALL, REST = "all", "rest of step"
_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")
_TORCH = ("device_allocated_bytes", "device_peak_bytes", "device_reserved_bytes")
_COMPONENTS = {
    "host": "host_rss_bytes",
    "child processes": "children_rss_bytes",
    "torch": "device_allocated_bytes",
    "torch reserved": "device_reserved_bytes",
    "device": "device_used_bytes",
    "non-PyTorch": "device_other_bytes",
}
"""By component the counter of its bytes."""
# A phase leaks if it adds at least a tenth of the growth and, if another phase frees memory, at
# most 1.5 times.
_ALONE, _MINOR = 1.5, 0.1

_COLUMNS = (
    Column("stage", "text"),
    Column("rank", "count"),
    Column("component", "text"),
    *columns_of("count", "device", "step"),
    Column("peak", "count", "bytes"),
    Column("peak at", "duration", "ns"),
    *columns_of("count", "reserved", "fragmentation", "start", "end", unit="bytes"),
    Column("samples", "count"),
)
_NOTE = "peak, reserved: maximum. fragmentation: reserved beyond allocated at the peak."
_NO_MEMORY = (
    "This run has no memory data. Capture a step with profile_with_memory: true, or with "
    "memory.level."
)
_PHASE_COLUMNS = (
    Column("rank", "count"),
    Column("component", "text"),
    *columns_of("text", "phase", "verdict"),
    Column("residual", "count", "bytes"),
    *columns_of("number", "added per step", "CI low", "CI high", unit="bytes"),
    Column("steps", "count"),
)
_NO_PHASES = "This run has no memory of its stages: it is recorded at the end of stages of 1 ms"
_PHASE_NOTE = (
    "residual: median at the end of the phase. added per step: what the phase adds to the end of "
    "the phase before it, with its 99% CI."
)
_NONE = -1
_UNKNOWN = -(2**63) + 1  # Frees of earlier allocations can make real bytes negative.

Group = tuple[int, str | None, int | None]
"""Rank, component and device."""


def memory(spans: Spans) -> Table:
    """Return the highest memory of every stage on every rank, the largest first.

    It comes from the counters of spans, and from the samples of a profiler's table ``memory``.
    ``peak`` is the most that was allocated, ``peak at`` when: of counters, the end of a span.
    ``reserved`` is the maximum, ``fragmentation`` what was reserved beyond it at the peak, where
    both are known. ``start`` and ``end`` are the first and last allocated bytes. Stage "all" is the
    whole recording. Whether memory grows, `memory_phases` says.

    Abstains if the run has neither.
    """
    notes: list[str] = []
    found = _from_spans(spans) | _from_table(spans, notes)
    rows: list[tuple[Any, ...]] = []
    largest: dict[tuple[str | None, str], int] = {}  # The keys are stage and component.
    for (rank, component, device), samples in found.items():
        for stage, own in samples.by_stage(spans.names):
            cells = _cells(own)
            rows.append((stage, rank, component, device, *cells))
            here = max(cells[1] or 0, cells[3] or 0, largest.get((component, stage), 0))
            largest[component, stage] = here
    if not rows:
        return Table("memory", _COLUMNS, abstained=" ".join([_NO_MEMORY, *notes]))

    def rank_of(row: tuple[Any, ...]) -> tuple[Any, ...]:
        stage, _, component, *_ = row
        whole = largest[component, ALL]
        return -whole, component or "", stage != ALL, -largest[component, stage], stage

    rows.sort(key=rank_of)
    return Table("memory", _COLUMNS, rows, " ".join([*notes, _NOTE]))


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

    def by_stage(self, names: Sequence[str]) -> "Iterator[tuple[str, _Samples]]":
        """Yield all samples as those of `ALL`, then those of each stage."""
        yield ALL, self
        columns: tuple[Any, ...] = self
        for code in np.unique(self.stage[self.stage != _NONE]).tolist():
            yield names[code], _Samples(*(each[self.stage == code] for each in columns))


def _from_table(spans: Spans, notes: list[str]) -> dict[Group, _Samples]:
    """Read the table ``memory``, and carry values to the edges of stages and steps."""
    table = spans.try_table("memory", notes)
    if table is None or not len(table.rows):
        return {}
    codes, names = table.texts("component")
    key = (table.numbers("rank"), codes, table.numbers("device", _NONE))
    columns = [table.numbers(name, _UNKNOWN) for name in ("time", "allocated", "reserved")]
    found = {}
    for group in rows_by_group(*key):
        rows = group[np.argsort(columns[0][group], kind="stable")]
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
    rows = spans.rows(rank=rank)
    rows = rows[np.isin(spans.kind[rows], [_STAGE, _STEP])]
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
    """Read the counters of spans: a sample at the end of each stage and step."""
    found: dict[Group, _Samples] = {}
    for component, counter in _COMPONENTS.items():
        if component == "torch reserved":  # It is a column of torch.
            continue
        names = _TORCH if component == "torch" else (counter, "", "")
        recorded = [spans.amounts(name, np.int64).rows for name in names]
        rows = np.unique(np.concatenate(recorded))
        rows = rows[np.isin(spans.kind[rows], [_STAGE, _STEP])]
        values = np.array([spans.per_row(name, _UNKNOWN, rows) for name in names])
        for group in rows_by_group(spans.rank[rows]):
            at = group[np.argsort(spans.end_ns[rows[group]], kind="stable")]
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


def _cells(samples: _Samples) -> tuple[Any, ...]:
    """Return the cells of a row after its device."""
    highest = int(np.argmax(samples.peak))
    time, allocated, peak, reserved = (int(column[highest]) for column in samples[:4])
    known = samples.allocated[samples.allocated != _UNKNOWN].tolist()
    same_time = reserved >= allocated == peak != _UNKNOWN
    is_known, step = peak != _UNKNOWN, int(samples.step[highest])
    most_reserved = int(samples.reserved.max())
    return (
        step if is_known and step != _NONE else None,
        peak if is_known else None,
        time if is_known else None,
        most_reserved if most_reserved != _UNKNOWN else None,
        reserved - allocated if same_time else None,
        known[0] if known else None,
        known[-1] if known else None,
        int(np.count_nonzero(samples.recorded)),
    )


class _Series(NamedTuple):
    """Memory of one phase over steps: at its end, and what it has added by then.

    ``steps`` are all steps of the rank, ``present`` those in which the phase ended.
    """

    phase: str
    present: Int64s
    residual: Int64s
    steps: Int64s
    added: Int64s


class _Row(NamedTuple):
    """One phase of one rank; `cells` are those of the table."""

    rank: int
    component: str
    series: _Series
    verdict: str
    added: Growth

    def cells(self) -> tuple[Cell, ...]:
        own, added = self.series, self.added
        head = (self.rank, self.component, own.phase, self.verdict, int(np.median(own.residual)))
        return (*head, added.per_step, added.low, added.high, len(own.present))

    @property
    def is_leak(self) -> bool:
        return self.verdict == LEAK


def memory_phases(spans: Spans) -> Table:
    """Return what memory stays after each stage of the training thread, what it adds, and leaks.

    What a phase adds is the memory at its end less that at the end of the phase before it. Over the
    steps these sums are the growth of ``all``, which has the verdict on the rank:

    - ``leak``: memory grows from block to block of the steps, and not much slower at the end.
    - ``plateau``: it grew, and does so no longer. ``may leak``: whether it continues is unclear.
    - ``sawtooth``: it grows, and is released. ``flat``: none of these.
    - ``too few steps``: fewer than 16, see `lightning_rlprof.analysis.statistics.growth`.

    If ``all`` leaks, so do the phases that add as much; ``may leak`` are then phases that add and
    release more than the growth, of which one keeps memory. Excluded steps are left out.

    Abstains if no stage has memory.
    """
    found = [row for component in _COMPONENTS for row in _rows(spans, component)]
    if not found:
        return Table("memory_phases", _PHASE_COLUMNS, abstained=_NO_PHASES)
    excluded = counted(spans, spans.rows(kind="step")).note
    note = " ".join(filter(None, [excluded, _PHASE_NOTE]))
    return Table("memory_phases", _PHASE_COLUMNS, [row.cells() for row in found], note)


def leaking_phases(spans: Spans, rank: int, component: str) -> list[str]:
    """Return the phases of a rank that leak a component, the one that adds most first."""
    return _phases([row for row in _rows(spans, component, rank) if row.is_leak])


def _phases(rows: list[_Row]) -> list[str]:
    own = [row for row in rows if row.series.phase != ALL and row.is_leak]
    return [row.series.phase for row in sorted(own, key=lambda row: -(row.added.per_step or 0.0))]


def _rows(spans: Spans, component: str, only: int | None = None) -> list[_Row]:
    """Return the rows of each rank: all phases together, then each phase by its end in a step."""
    rows, values = spans.amounts(_COMPONENTS[component], np.int64)
    if not len(rows):
        return []
    is_step = spans.kind[rows] == _STEP
    steps = spans.rows(kind="step")
    keep = is_step | (spans.kind[rows] == _STAGE)
    has_steps = np.isin(spans.rank[rows], spans.rank[steps])
    keep &= ~has_steps | np.isin(spans.thread[rows], spans.thread[steps])
    if only is not None:
        keep &= spans.rank[rows] == only
    rows, values, is_step = rows[keep], values[keep], is_step[keep]
    order = np.lexsort((-spans.start_ns[rows], is_step, spans.end_ns[rows], spans.rank[rows]))
    rows, values, is_step = rows[order], values[order], is_step[order]
    change = np.diff(values, prepend=values[:1])  # The first change of a rank is a constant.
    own = (spans.step[rows] > 0) & in_included(spans, rows)
    if not own.any():  # A profiler recorded it, which excludes the steps.
        own = spans.step[rows] > 0
    phase = np.where(is_step, len(spans.names), spans.name[rows])
    columns = [each[own] for each in (spans.rank[rows], spans.step[rows], phase, values, change)]
    found: list[_Row] = []
    for at in rows_by_group(columns[0]):
        rank, *mine = (column[at] for column in columns)
        series = _series([*spans.names, REST], *mine)
        tokens = _tokens(spans, int(rank[0]), series[0].steps)
        slopes = [grows(each.steps, each.added, tokens) for each in series]
        judged = zip(series, _verdicts(series, slopes), slopes, strict=True)
        found += [_Row(int(rank[0]), component, *each) for each in judged]
    return found


def _tokens(spans: Spans, rank: int, steps: Int64s) -> Float64s | None:
    """Return what a rank counted in each of some steps; None if it counted nothing in one."""
    rows, values = spans.amounts("tokens")
    own = (spans.rank[rows] == rank) & (spans.kind[rows] == _STAGE)
    own &= np.isin(spans.step[rows], steps)
    found = np.zeros(len(steps))
    np.add.at(found, np.searchsorted(steps, spans.step[rows[own]]), values[own])
    return found if (found > 0).all() else None


def _series(
    names: list[str], step: Int64s, phase: Int64s, values: Int64s, change: Int64s
) -> list[_Series]:
    """Return the series of all phases together, then of each phase in the order of a step."""
    numbers, at = np.unique(step, return_inverse=True)

    def of(some: Int64s, name: str) -> _Series:
        added = np.zeros(len(numbers), np.int64)
        np.add.at(added, at[some], change[some])
        some = some[np.argsort(at[some], kind="stable")]
        # The last row of each step remains.
        last = some[np.flatnonzero(np.diff(at[some], append=len(numbers)))]
        return _Series(name, step[last], values[last], numbers, np.cumsum(added))

    codes, first = np.unique(phase, return_index=True)
    in_order = codes[np.argsort(first)].tolist()
    every = np.arange(len(step))
    return [of(every, ALL), *(of(every[phase == code], names[code]) for code in in_order)]


def _verdicts(series: list[_Series], slopes: list[Growth]) -> list[str]:
    """Return the verdict on all phases together, then on each."""
    phases, (whole, *each) = series[1:], slopes
    if whole.verdict != LEAK:
        alone = (grows(own.present, own.residual).verdict for own in phases)
        return [whole.verdict, *(FLAT if own in (LEAK, MAY_LEAK) else own for own in alone)]
    rate = whole.per_step or 0.0
    frees = [(slope.high or 0.0) < 0 for slope in each]
    most = _ALONE * rate if any(frees) else np.inf
    leaks = [slope.rises and _MINOR * rate <= (slope.per_step or 0.0) <= most for slope in each]
    if any(leaks):
        return [LEAK, *(LEAK if own else FLAT for own in leaks)]
    unclear = (slope.rises or down for slope, down in zip(each, frees, strict=True))
    return [LEAK, *(MAY_LEAK if own else FLAT for own in unclear)]
