"""Memory from phase to phase: what stays after each stage, what it adds, and which one leaks."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.growth import (
    FLAT,
    LEAK,
    MAY_LEAK,
    Growth,
    grows,
)
from lightning_rlprof.analysis.steps.step_selection import counted, in_included
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Float64s, Int64s, group_starts
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

ALL, REST = "all", "rest of step"
_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")
_COMPONENTS = {
    "host": ("host_rss_bytes", "host_limit_bytes"),
    "torch": ("device_allocated_bytes", "device_total_bytes"),
    "torch reserved": ("device_reserved_bytes", "device_total_bytes"),
    "device": ("device_used_bytes", "device_total_bytes"),
    "non-PyTorch": ("device_other_bytes", "device_total_bytes"),
}
"""By component: the counter of its bytes, and that of its limit."""
_ALONE, _MINOR = 1.5, 0.1  # of the growth of all: what one phase may add to be named for it
_MOST_NOTES = 3
_MIB = 2**20

_COLUMNS = (
    Column("rank", "count"),
    *columns_of("text", "component", "phase", "verdict"),
    Column("residual", "count", "bytes"),
    *columns_of("number", "added per step", "CI low", "CI high", unit="bytes"),
    *columns_of("number", "residual per step", "residual low", "residual high", unit="bytes"),
    *columns_of("count", "steps", "steps left", "fewest left", "most left"),
)
_NO_MEMORY = "This run has no memory of its stages: it is recorded at the end of stages of 1 ms"
_NOTE = (
    "residual: median at the end of the phase. added per step: what the phase adds to the end of "
    "the phase before it, with its 99% CI."
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
    left: tuple[int | None, ...] = (None, None, None)

    def cells(self) -> tuple[Cell, ...]:
        own = self.series
        head = (self.rank, self.component, own.phase, self.verdict, int(np.median(own.residual)))
        slopes = [
            each
            for found in (self.added, grows(own.present, own.residual))
            for each in (found.per_step, found.low, found.high)
        ]
        return (*head, *slopes, len(own.present), *self.left)

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
    release more than the growth, of which one keeps memory. ``steps left`` is until the limit of
    the container, machine or device, if that was recorded. Excluded steps are left out.

    Abstains if no stage has memory.
    """
    found: list[_Row] = []
    for component, (_, limit) in _COMPONENTS.items():
        found += _with_forecasts(spans, limit, _rows(spans, component))
    if not found:
        return Table("memory_phases", _COLUMNS, abstained=_NO_MEMORY)
    excluded = counted(spans, spans.rows(kind="step")).note
    note = " ".join(filter(None, [*_sentences(found), excluded, _NOTE]))
    return Table("memory_phases", _COLUMNS, [row.cells() for row in found], note)


def growth_of_rank(spans: Spans, rank: int, component: str | None) -> tuple[Growth, Int64s] | None:
    """Return how a component grows on a rank, and its steps; None if no span counted it."""
    if component not in _COMPONENTS:
        return None
    whole = next(iter(_rows(spans, component, rank)), None)
    return None if whole is None else (whole.added, whole.series.steps)


def leaking_phases(spans: Spans, rank: int, component: str | None) -> list[str]:
    """Return the phases of a rank that leak a component, the one that adds most first."""
    if component not in _COMPONENTS:
        return []
    return _phases([row for row in _rows(spans, component, rank) if row.is_leak])


def _phases(rows: list[_Row]) -> list[str]:
    own = [row for row in rows if row.series.phase != ALL and row.is_leak]
    return [row.series.phase for row in sorted(own, key=lambda row: -(row.added.per_step or 0.0))]


def _rows(spans: Spans, component: str, only: int | None = None) -> list[_Row]:
    """Return the rows of each rank: all phases together, then each phase by its end in a step."""
    rows, values = spans.amounts(_COMPONENTS[component][0], np.int64)
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
    change = np.diff(values, prepend=values[:1])  # of a rank's first: a constant
    own = (spans.step[rows] > 0) & in_included(spans, rows)
    if not own.any():  # a profiler recorded it, which excludes the steps
        own = spans.step[rows] > 0
    phase = np.where(is_step, len(spans.names), spans.name[rows])
    columns = [each[own] for each in (spans.rank[rows], spans.step[rows], phase, values, change)]
    found: list[_Row] = []
    for at in np.split(np.arange(own.sum()), group_starts(columns[0])[1:]) if own.any() else ():
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
        last = some[np.flatnonzero(np.diff(at[some], append=len(numbers)))]  # of each step
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


def _with_forecasts(spans: Spans, limit: str, rows: list[_Row]) -> list[_Row]:
    """Add the steps that are left to the ranks that leak, if the limit is known.

    Ranks of one host share its memory: what they have and what they leak adds up.
    """
    limits, values = spans.amounts(limit, np.int64)
    known = dict(zip(spans.rank[limits].tolist(), values.tolist(), strict=True))
    sharing: dict[str, list[_Row]] = {}
    for row in rows:
        if row.series.phase == ALL:
            name = spans.headers[row.rank].host if row.component == "host" else str(row.rank)
            sharing.setdefault(name, []).append(row)
    left: dict[int, tuple[int | None, ...]] = {}
    for group in sharing.values():
        leaks = [row.added for row in group if row.is_leak]
        room = min((known[row.rank] for row in group if row.rank in known), default=None)
        if leaks and room is not None:
            room -= sum(int(row.series.residual[-1]) for row in group)
            middle, least, most = (
                max(0, int(room / sum(getattr(each, of) or 0.0 for each in leaks)))
                for of in ("per_step", "high", "low")
            )
            left |= {row.rank: (middle, least, most) for row in group if row.is_leak}
    return [row._replace(left=left.get(row.rank, row.left)) if row.is_leak else row for row in rows]


def _sentences(rows: list[_Row]) -> list[str]:
    """Return a sentence on each rank and component that leaks, the fastest ones."""
    texts = []
    leaks = [row for row in rows if row.series.phase == ALL and row.is_leak]
    for row in sorted(leaks, key=lambda row: -(row.added.per_step or 0.0))[:_MOST_NOTES]:
        own = [each for each in rows if (each.rank, each.component) == (row.rank, row.component)]
        names = _phases(own)
        where = f"in {', '.join(names)}" if names else "in a phase that is unclear"
        own_rates = (row.added.per_step, row.added.low, row.added.high)
        rate, low, high = ((each or 0.0) / _MIB for each in own_rates)
        text = f"Rank {row.rank}, {row.component}: leak of {rate:.3g} MiB per step"
        text += f" (99% CI {low:.3g}–{high:.3g}) {where}"
        steps, least, most = row.left
        if steps is not None:
            text += f", out of memory in about {steps:,} steps ({least:,}–{most:,})"
        texts.append(f"{text}.")
    return texts
