"""How much memory each stage takes on each rank, at its highest."""

import numpy as np

from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import Counter, Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["memory"]

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
    Column("at end", "count", "bytes"),
    Column("reserved", "count", "bytes"),
    Column("used", "count", "bytes"),
    Column("others", "count", "bytes"),
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
