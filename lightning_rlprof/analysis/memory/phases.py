"""Memory from phase to phase: what stays after each stage, what it adds, and which one leaks."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.memory.usage import growth
from lightning_rlprof.analysis.steps.step_selection import counted, in_included
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Float64s, Int64s, group_starts
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

ALL, REST = "all", "rest of step"
LEAK, MAY_LEAK, SAWTOOTH, PLATEAU, FLAT = "leak", "may leak", "sawtooth", "plateau", "flat"
TOO_FEW = "too few steps"

FEWEST_STEPS = 26
"""Steps below which nothing is judged: two in each block."""

_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")
_COMPONENTS = {
    "host": ("host_rss_bytes", "host_limit_bytes"),
    "torch": ("device_allocated_bytes", "device_total_bytes"),
    "torch reserved": ("device_reserved_bytes", "device_total_bytes"),
    "device": ("device_used_bytes", "device_total_bytes"),
    "non-PyTorch": ("device_other_bytes", "device_total_bytes"),
}
"""By component: the counter of its bytes, and that of its limit."""
_BLOCKS = 13
_UNSURE = 1  # of 12 rises between blocks, how many may fall: without growth 2 or more do, by 99.7%
_UNDONE = 0.25  # of a rise: what falls by more was released
_SLOWER = 0.5  # of the slope in the second quarter: what grows less in the last one stops
_ALONE, _MINOR = 1.5, 0.1  # of the growth of all: what one phase may add to be named for it
_SURE = 2.576  # two-sided 99% quantile of the normal distribution
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


class _Slope(NamedTuple):
    """Growth in bytes per step, and its interval; None with too few steps."""

    middle: float | None
    low: float | None
    high: float | None


class _Row(NamedTuple):
    """One phase of one rank; `cells` are those of the table."""

    rank: int
    component: str
    series: _Series
    verdict: str
    added: _Slope
    left: tuple[int | None, ...] = (None, None, None)

    def cells(self) -> tuple[Cell, ...]:
        own = self.series
        residual = growth(own.present, own.residual)
        head = (self.rank, self.component, own.phase, self.verdict, int(np.median(own.residual)))
        return (*head, *self.added, *residual, len(own.present), *self.left)

    @property
    def is_leak(self) -> bool:
        return self.verdict == LEAK


def memory_phases(spans: Spans) -> Table:
    """Return what memory stays after each stage of the training thread, what it adds, and leaks.

    What a phase adds is the memory at its end less that at the end of the phase before it. Over the
    steps these sums are the growth of ``all``, which has the verdict on the rank:

    - ``leak``: memory grows from block to block of the steps, and not much slower at the end.
    - ``plateau``: it grew, and does so no longer. ``sawtooth``: it grows, and is released.
    - ``flat``: none of these. ``too few steps``: fewer than `FEWEST_STEPS`.

    If ``all`` leaks, so do the phases that add as much; ``may leak`` are phases that add and
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


def leaking_phases(spans: Spans, rank: int, component: str | None) -> list[str]:
    """Return the phases of a rank that leak a component, the one that adds most first."""
    if component not in _COMPONENTS:
        return []
    return _phases([row for row in _rows(spans, component, rank) if row.is_leak])


def _phases(rows: list[_Row]) -> list[str]:
    own = [row for row in rows if row.series.phase != ALL and row.is_leak]
    return [row.series.phase for row in sorted(own, key=lambda row: -(row.added.middle or 0.0))]


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
        slopes = [_slope(each.steps, each.added) for each in series]
        judged = zip(series, _verdicts(series, slopes), slopes, strict=True)
        found += [_Row(int(rank[0]), component, *each) for each in judged]
    return found


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


def _slope(steps: Int64s, added: Int64s) -> _Slope:
    """Return the slope of what was added, and an interval from the rises between blocks of steps.

    The interval is valid for noise that accumulates, as that of sums does: then rises are
    independent, and their median is outside of it with a probability of 0.6%.
    """
    middle = growth(steps, added)[0]
    if len(steps) < FEWEST_STEPS:
        return _Slope(middle, None, None)
    rises = np.sort(np.diff(_blocks(added)) / np.diff(_blocks(steps)))
    return _Slope(middle, float(rises[_UNSURE]), float(rises[-1 - _UNSURE]))


def _blocks(values: Int64s) -> Float64s:
    return np.array([np.median(block) for block in np.array_split(values, _BLOCKS)])


def _verdicts(series: list[_Series], slopes: list[_Slope]) -> list[str]:
    """Return the verdict on all phases together, then on each."""
    whole, *phases = series
    verdict = _verdict(whole.steps, whole.added, slopes[0])
    if verdict != LEAK:
        each = (_verdict(own.present, own.residual) for own in phases)
        return [verdict, *(FLAT if own == LEAK else own for own in each)]
    rate = slopes[0].middle or 0.0
    adds = [_grows(own.added, slope) for own, slope in zip(phases, slopes[1:], strict=True)]
    frees = [(slope.high or 0.0) < 0 for slope in slopes[1:]]
    most = _ALONE * rate if any(frees) else np.inf
    leaks = [
        up and _MINOR * rate <= (slope.middle or 0.0) <= most
        for up, slope in zip(adds, slopes[1:], strict=True)
    ]
    if any(leaks):
        return [LEAK, *(LEAK if each else FLAT for each in leaks)]
    return [
        LEAK,
        *(MAY_LEAK if up or down else FLAT for up, down in zip(adds, frees, strict=True)),
    ]


def _verdict(steps: Int64s, values: Int64s, slope: _Slope | None = None) -> str:
    if len(steps) < FEWEST_STEPS:
        return TOO_FEW
    if _grows(values, slope or _slope(steps, values)):
        parts = np.array_split(np.arange(len(steps)), 4)
        second, last = (growth(steps[at], values[at])[0] or 0.0 for at in (parts[1], parts[3]))
        return LEAK if last >= _SLOWER * second else PLATEAU
    quarter, block = len(values) // 4, -(-len(values) // _BLOCKS)
    if values[-quarter:].min() > values[:block].max():
        return PLATEAU
    rises = int(np.sign(np.diff(values)).sum())
    return SAWTOOTH if rises > _SURE * np.sqrt(len(values)) else FLAT


def _grows(values: Int64s, slope: _Slope) -> bool:
    """Tell whether memory grows from block to block, and is not released."""
    if slope.low is None or slope.low <= 0:
        return False
    blocks = _blocks(values)
    fall = float((np.maximum.accumulate(blocks) - blocks).max())
    return fall <= _UNDONE * float(blocks[-1] - blocks[0])


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
            rates = [sum(each or 0.0 for each in column) for column in zip(*leaks, strict=True)]
            middle, least, most = (max(0, int(room / rates[at])) for at in (0, 2, 1))
            left |= {row.rank: (middle, least, most) for row in group if row.is_leak}
    return [row._replace(left=left.get(row.rank, row.left)) if row.is_leak else row for row in rows]


def _sentences(rows: list[_Row]) -> list[str]:
    """Return a sentence on each rank and component that leaks, the fastest ones."""
    texts = []
    leaks = [row for row in rows if row.series.phase == ALL and row.is_leak]
    for row in sorted(leaks, key=lambda row: -(row.added.middle or 0.0))[:_MOST_NOTES]:
        own = [each for each in rows if (each.rank, each.component) == (row.rank, row.component)]
        names = _phases(own)
        where = f"in {', '.join(names)}" if names else "in a phase that is unclear"
        rate, low, high = ((each or 0.0) / _MIB for each in row.added)
        text = f"Rank {row.rank}, {row.component}: leak of {rate:.3g} MiB per step"
        text += f" (99% CI {low:.3g}–{high:.3g}) {where}"
        steps, least, most = row.left
        if steps is not None:
            text += f", out of memory in about {steps:,} steps ({least:,}–{most:,})"
        texts.append(f"{text}.")
    return texts
