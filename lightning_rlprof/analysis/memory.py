"""How much memory each stage takes on each rank, at its highest.

Memory over time: peaks, fragmentation, and whether what is held grows from step to step.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from lightning_rlprof.analysis.stages.partition import paint
from lightning_rlprof.analysis.step_selection import CLOSED
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.spans import Counter, Spans
from lightning_rlprof.tables.table import Cell, Column, Table

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
    Column("rank", "count"),
    Column("step", "count"),
    Column("peak", "count", "bytes"),
    Column("end", "count", "bytes"),
    Column("reserved", "count", "bytes"),
    Column("used", "count", "bytes"),
    Column("non-PyTorch", "count", "bytes"),
    Column("host", "count", "bytes"),
    Column("spans", "count"),
)
_NOTE = "The highest of each, over the spans of captures."
_OTHERS = (
    "“others” is what is used on the device beyond what torch's allocator holds here: other "
    "processes, and what this one holds outside of it."
)
_WHOLE = "whole step"

Highest = dict[int, tuple[int, int]]
"""Per rank and stage, as one number: bytes, and the step of the first span that had them."""


def memory(spans: Spans) -> Table:
    """Return the highest memory of every stage on every rank, those that take most first.

    ``peak`` is allocated by torch within a span, ``at end`` when it ends; reserved, used, others
    and host (the process's resident memory) stand as a span ends. ``step`` is where the peak was,
    or the host's highest where no device told a peak. A captured step as a whole is a row, too.

    Abstains where no span has memory.
    """
    known = {name: spans.amounts(name, np.int64) for name in _COUNTERS if name in spans.counters}
    highest = {name: _highest(spans, counter) for name, counter in known.items()}
    count = _count(spans, list(known.values()))
    if not count:
        reason = "no span has memory: capture a step with memory.level or profile_with_memory"
        return Table("memory", _COLUMNS, abstained=reason)
    width = len(spans.names) + 1
    lead = _PEAK if _PEAK in highest else _HOST
    most: dict[int, int] = {}
    for group, (size, _) in highest.get(lead, {}).items():
        most[group % width] = max(size, most.get(group % width, 0))
    rows: list[tuple[Cell, ...]] = []
    for group in sorted(count, key=lambda group: (-most.get(group % width, 0), group % width)):
        rank, code = divmod(group, width)
        stage = spans.names[code] if code < len(spans.names) else _WHOLE
        sizes = [highest.get(name, {}).get(group, (None, None)) for name in _COUNTERS]
        step = sizes[-1][1] if sizes[0][1] is None else sizes[0][1]
        rows.append((stage, rank, step, *(size for size, _ in sizes), count[group]))
    others = f" {_OTHERS}" if "device_other_bytes" in known else ""
    return Table("memory", _COLUMNS, rows, f"{_NOTE}{others}")


def _highest(spans: Spans, counter: Counter) -> Highest:
    rows, groups, keep = _groups(spans, counter.rows)
    values = counter.values[keep]
    order = np.lexsort((rows, -values, groups))
    first = order[np.flatnonzero(np.diff(groups[order], prepend=-1))]
    found = zip(groups[first], values[first], spans.step[rows[first]], strict=True)
    return {int(group): (int(value), int(step)) for group, value, step in found}


def _count(spans: Spans, counters: list[Counter]) -> dict[int, int]:
    """Count the spans that have any memory, by rank and stage."""
    every = [counter.rows for counter in counters] or [np.empty(0, np.int64)]
    _, groups, _ = _groups(spans, np.unique(np.concatenate(every)))
    found, counts = np.unique(groups, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _groups(spans: Spans, rows: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return the rows of stages and steps, each one's rank and stage, and where they were."""
    kinds = spans.kind[rows]
    keep = np.flatnonzero((kinds == _STAGE) | (kinds == _STEP))
    rows = rows[keep]
    code = np.where(kinds[keep] == _STEP, len(spans.names), spans.name[rows])
    return rows, spans.rank[rows] * (len(spans.names) + 1) + code, keep


_MEMORY_TIMELINE_COLUMNS = (
    Column("rank", "count"),
    Column("component", "text"),
    Column("device", "count"),
    Column("stage", "text"),
    Column("peak", "count", "bytes"),
    Column("peak at", "duration", "ns"),
    Column("reserved", "count", "bytes"),
    Column("fragmentation", "count", "bytes"),
    Column("start", "count", "bytes"),
    Column("end", "count", "bytes"),
    Column("growth per step", "number", "bytes"),
    Column("CI low", "number", "bytes"),
    Column("CI high", "number", "bytes"),
    Column("steps", "count"),
    Column("growing", "text"),
    Column("samples", "count"),
)
_SIZES = (Column("allocated", "count", "bytes"), Column("reserved", "count", "bytes"))
_SERIES = (
    _MEMORY_TIMELINE_COLUMNS[1],
    _MEMORY_TIMELINE_COLUMNS[2],
    Column("time", "duration", "ns"),
    *_SIZES,
)
_COUNTED = {
    "torch": ("device_allocated_bytes", "device_peak_bytes", "device_reserved_bytes"),
    "host": ("host_rss_bytes",),
}
_MEMORY_TIMELINE_NOTE = (
    "Peak and reserved are the highest, fragmentation is what was reserved beyond the allocated at "
    "the peak. Growth is the slope of the lowest allocated of each step, with its 99 % interval."
)
_NOTHING = "no memory was recorded: profile_with_memory, or memory.level in a capture"
_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")
_ALL = "all"
_NONE = -1
_UNKNOWN = -(2**63) + 1  # bytes: what the CPU freed of before may make them negative
_FEWEST = 8  # steps below which nothing is said of a leak
_MOST = 1_000  # steps of which all pairs are compared; more are thinned evenly
_NORMAL = 2.5758293035489004  # two-sided 99 % quantile of the normal distribution

Group = tuple[int, str | None, int | None]
"""Rank, component and device."""


@dataclass(frozen=True, eq=False)
class _Samples:
    """What one group held, by time; `_UNKNOWN` for bytes that are not known.

    ``own`` is False for what only carries the value before to the edge of a stage.
    """

    time: Int64s
    allocated: Int64s
    peak: Int64s
    reserved: Int64s
    stage: Int64s
    step: Int64s
    own: Mask

    def rows(self, at: Int64s) -> "_Samples":
        """Return some samples."""
        return _Samples(*(getattr(self, each.name)[at] for each in fields(self)))

    @property
    def held(self) -> Int64s:
        """Allocated bytes, or the reserved where nothing is known of any allocated."""
        return self.allocated if (self.allocated != _UNKNOWN).any() else self.reserved


def memory_timeline(spans: Spans) -> Table:
    """Return per rank, device and stage peak, fragmentation and growth of what is held.

    From the device tools' table ``memory``, else from what spans of captures counted; then
    ``peak at`` is the end of a span. ``reserved`` is the highest, ``at start`` and ``at end`` the
    first and last allocated, stage "all" the whole recording. ``leak`` is "yes" where growth lies
    above zero with 99 % confidence, "no" where it does not, and not told below eight steps.

    Abstains where neither is there.
    """
    remarks: list[str] = []
    found = _of_table(spans, remarks) or _of_spans(spans)
    rows = [row for group, samples in found.items() for row in _rows(spans, group, samples)]
    nothing = None if rows else " ".join([_NOTHING, *remarks])
    return Table(
        "memory timeline",
        _MEMORY_TIMELINE_COLUMNS,
        rows,
        " ".join([*remarks, _MEMORY_TIMELINE_NOTE]),
        nothing,
    )


def series(spans: Spans, rank: int, points: int = 1_000) -> Table:
    """Return what one rank held over time, thinned to about as many points, extremes kept.

    Of each stretch of time the samples with the least and the most allocated stay (reserved, where
    nothing is known of it), and the first and the last of all: no peak is lost. ``points`` are
    those of each component and device.

    Raises:
        ValueError: ``points`` is below 2.
    """
    if points < 2:
        raise ValueError(f"points={points}: a series needs 2 at least")
    remarks: list[str] = []
    found = _of_table(spans, remarks) or _of_spans(spans)
    rows: list[tuple[Cell, ...]] = []
    for group in [each for each in found if each[0] == rank]:
        samples = found[group].rows(_thinned(found[group], points))
        sizes = (_known(samples.allocated), _known(samples.reserved))
        rows += [(*group[1:], *each) for each in zip(samples.time.tolist(), *sizes, strict=True)]
    nothing = None if rows else " ".join([_NOTHING, *remarks])
    return Table("memory series", _SERIES, rows, " ".join(remarks), nothing)


def growth(steps: Int64s, values: Int64s) -> tuple[float | None, float | None, float | None]:
    """Return the median slope of values over ascending steps, and its 99 % interval.

    Theil and Sen: the median of the slopes of all pairs, bounded by the k-th smallest and the k-th
    largest, k from the variance of Kendall's S (doi:10.1080/01621459.1968.10480934). The bounds are
    None with too few steps for them, the slope with fewer than two.

    Example::

        >>> growth(np.arange(9), 5 * np.arange(9))
        (5.0, 5.0, 5.0)
    """
    thin = -(-len(steps) // _MOST) or 1
    steps, values = steps[::thin], values[::thin]
    count = len(steps)
    if count < 2:
        return None, None, None
    first, second = np.triu_indices(count, 1)
    slopes = np.sort((values[second] - values[first]) / (steps[second] - steps[first]))
    spread = _NORMAL * np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    k = int((len(slopes) - spread) // 2)
    middle = float(np.median(slopes))
    return (middle, float(slopes[k - 1]), float(slopes[-k])) if k > 0 else (middle, None, None)


def _of_table(spans: Spans, remarks: list[str]) -> dict[Group, _Samples]:
    """Read the table ``memory``, and carry values to where stages and steps begin and end."""
    table = spans.try_table("memory", remarks)
    if table is None or not len(table.rows):
        return {}
    codes, names = table.texts("component")
    who = (table.numbers("rank"), codes, table.numbers("device", _NONE))
    columns = [table.numbers(name, _UNKNOWN) for name in ("time", "allocated", "reserved")]
    order = np.lexsort((columns[0], *who[::-1]))
    changed = np.any([np.diff(column[order]) != 0 for column in who], axis=0)
    found = {}
    for own in np.split(order, np.flatnonzero(changed) + 1):
        rank, code, device = (int(column[own[0]]) for column in who)
        name = names[code] if code >= 0 else None
        found[rank, name, None if device == _NONE else device] = _carried(
            spans, rank, *(column[own] for column in columns)
        )
    return found


def _carried(
    spans: Spans, rank: int, time: Int64s, allocated: Int64s, reserved: Int64s
) -> _Samples:
    """Add what held at the edges of stages and steps, as long as the same capture ran."""
    rows = spans.rows(rank=rank)
    rows = rows[np.isin(spans.kind[rows], [_STAGE, _STEP])]
    edges = np.unique(np.concatenate([spans.start_ns[rows], spans.end_ns[rows]]))
    edges = edges[(edges > time[0]) & (edges < time[-1])]
    before = np.searchsorted(time, edges, side="right") - 1
    closed = np.sort(spans.start_ns[spans.rows(kind="region", name=CLOSED, rank=rank)])
    alike = np.searchsorted(closed, time[before]) == np.searchsorted(closed, edges)
    new = np.flatnonzero(alike & (time[before] < edges))
    time, at = np.append(time, edges[new]), np.append(np.arange(len(time)), before[new])
    order = np.argsort(time, kind="stable")
    time, held = time[order], allocated[at[order]]
    stage, step = (_around(spans, kind, rank, time) for kind in (_STAGE, _STEP))
    return _Samples(
        time,
        held,
        held,
        reserved[at[order]],
        np.append(spans.name, _NONE)[stage],
        np.append(spans.step, _NONE)[step],
        order < len(allocated),
    )


def _around(spans: Spans, kind: int, rank: int, time: Int64s) -> Int64s:
    """Return the row of the span of a kind around each time that began last, or `_NONE`."""
    rows = spans.rows(kind=KINDS[kind], rank=rank)
    edges = np.concatenate([spans.start_ns[rows], spans.end_ns[rows]])
    times, places = np.unique(edges, return_inverse=True)
    label = paint(places[: len(rows)], places[len(rows) :], len(times) - 1)
    at = np.concatenate([[_NONE], label, [_NONE]])[np.searchsorted(times, time, side="right")]
    found: Int64s = np.append(rows, _NONE)[at]
    return found


def _of_spans(spans: Spans) -> dict[Group, _Samples]:
    """Read what spans of captures counted: a sample as each of them ends."""
    found: dict[Group, _Samples] = {}
    for component, names in _COUNTED.items():
        counted = [spans.amounts(name, np.int64) for name in names]
        rows = np.unique(np.concatenate([counter.rows for counter in counted]))
        rows = rows[np.isin(spans.kind[rows], [_STAGE, _STEP])]
        for rank in np.unique(spans.rank[rows]).tolist():
            own = rows[spans.rank[rows] == rank]
            own = own[np.argsort(spans.end_ns[own], kind="stable")]
            values = [_counted(spans, counter, own) for counter in counted]
            allocated, peak, reserved = (*values, *[np.full(len(own), _UNKNOWN)] * 2)[:3]
            found[rank, component, None] = _Samples(
                spans.end_ns[own],
                allocated,
                np.maximum(peak, allocated),
                reserved,
                np.where(spans.kind[own] == _STAGE, spans.name[own], _NONE),
                spans.step[own],
                np.ones(len(own), bool),
            )
    return found


def _counted(spans: Spans, counter: Counter, rows: Int64s) -> Int64s:
    """Return a counter of some spans, `_UNKNOWN` where they have none."""
    found = np.full(len(spans), _UNKNOWN)
    found[counter.rows] = counter.values
    return found[rows]


def _rows(spans: Spans, group: Group, samples: _Samples) -> list[tuple[Cell, ...]]:
    """Return the row of a group as a whole, then of each stage, the highest first."""
    rows = [
        (*group, spans.names[code], *_figures(samples.rows(np.flatnonzero(samples.stage == code))))
        for code in np.unique(samples.stage[samples.stage != _NONE]).tolist()
    ]
    rows.sort(key=lambda row: -max(row[4] or 0, row[6] or 0))
    return [(*group, _ALL, *_figures(samples)), *rows]


def _figures(samples: _Samples) -> tuple[Any, ...]:
    """Return the cells of a row after its stage."""
    highest = int(np.argmax(samples.peak))
    peak, reserved = int(samples.peak[highest]), int(samples.reserved.max())
    then, beside = int(samples.allocated[highest]), int(samples.reserved[highest])
    known = samples.allocated[samples.allocated != _UNKNOWN].tolist()
    numbers, values = _floors(samples)
    slope, low, high = growth(numbers, values)
    enough = low is not None and len(numbers) >= _FEWEST
    return (
        None if peak == _UNKNOWN else peak,
        None if peak == _UNKNOWN else int(samples.time[highest]),
        None if reserved == _UNKNOWN else reserved,
        beside - then if beside >= then == peak != _UNKNOWN else None,
        known[0] if known else None,
        known[-1] if known else None,
        slope,
        low,
        high,
        len(numbers),
        ("yes" if low > 0 else "no") if enough and low is not None else None,
        int(np.count_nonzero(samples.own)),
    )


def _floors(samples: _Samples) -> tuple[Int64s, Int64s]:
    """Return steps and the least that was held in each; what is not known is left out."""
    held = samples.held
    keep = np.flatnonzero((samples.step > 0) & (held != _UNKNOWN))
    order = keep[np.lexsort((held[keep], samples.step[keep]))]
    heads = np.flatnonzero(np.diff(samples.step[order], prepend=_NONE))
    return samples.step[order][heads], held[order][heads]


def _thinned(samples: _Samples, points: int) -> Int64s:
    """Return which samples to keep: the least and the most of each stretch, first and last."""
    time = samples.time
    if len(time) <= points:
        return np.arange(len(time))
    bucket = (time - time[0]) * (points // 2) // (int(time[-1] - time[0]) + 1)
    order = np.lexsort((samples.held, bucket))
    heads = np.flatnonzero(np.diff(bucket[order], prepend=_NONE))
    tails = np.append(heads[1:], len(order)) - 1
    return np.unique(np.concatenate([order[heads], order[tails], [0, len(time) - 1]]))


def _known(values: Int64s) -> list[int | None]:
    return [None if each == _UNKNOWN else each for each in values.tolist()]
