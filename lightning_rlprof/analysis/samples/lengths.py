"""How long responses were: the histogram of lengths that stages counted."""

import numpy as np

from lightning_rlprof.analysis.steps.step_selection import in_included
from lightning_rlprof.records.records import bin_start
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Histogram, Spans
from lightning_rlprof.tables.table import Cell, Column, Table

LENGTHS = "lengths"
"""Name of the histogram."""

_COLUMNS = (
    Column("stage", "text"),
    Column("samples", "count"),
    Column("p50", "count"),
    Column("p95", "count"),
    Column("longest", "count"),
    Column("share of longest", "share"),
)
_NOTE = (
    "Lengths are kept in bins of 19%, and shown by the least of their bin. share of longest: in "
    "the last bin, such as responses that reach the limit."
)


def lengths(spans: Spans) -> Table:
    """Return for each stage how long its samples were, all ranks together.

    Abstains if no stage counted lengths, ``count(lengths=[...])``. Excluded steps are left out.
    """
    found = included_lengths(spans)
    if not len(found.rows):
        reason = "No stage counted lengths. Call count(lengths=[...]) in the stage that generates."
        return Table("lengths", _COLUMNS, abstained=reason)
    rows: list[tuple[Cell, ...]] = []
    names = spans.name[found.rows]
    for code in np.unique(names).tolist():
        own = names == code
        counts = bin_counts(found.bins[own], found.counts[own])
        low, high = (round(bin_start(quantile_bin(counts, part))) for part in (0.5, 0.95))
        last = int(np.flatnonzero(counts)[-1])
        total = int(counts.sum())
        share = float(counts[last]) / total
        rows.append((spans.names[code], total, low, high, round(bin_start(last)), share))
    rows.sort(key=lambda row: -int(row[1] or 0))
    return Table("lengths", _COLUMNS, rows, _NOTE)


def included_lengths(spans: Spans) -> Histogram:
    """Return the lengths of included steps, and those outside steps."""
    found = spans.histogram(LENGTHS)
    keep = in_included(spans, found.rows)
    return Histogram(*(column[keep] for column in found))


def bin_counts(bins: Int64s, counts: Int64s) -> Int64s:
    """Sum counts by bin, from bin 0 on."""
    return np.bincount(bins, counts).astype(np.int64)


def quantile_bin(counts: Int64s, part: float) -> int:
    """Return the bin that holds a quantile.

    Example::

        >>> quantile_bin(np.array([0, 2, 2]), 0.5), quantile_bin(np.array([0, 2, 2]), 0.95)
        (1, 2)
    """
    sums = np.cumsum(counts)
    return int(np.searchsorted(sums, part * sums[-1]))
