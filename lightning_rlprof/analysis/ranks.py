"""Which rank takes longest in each stage, and by how much; differences, no verdicts."""

import numpy as np

from lightning_rlprof.analysis.counted import FEWEST, Counted, counted
from lightning_rlprof.analysis.partition import UNTRACED, Partition, partition
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["ranks"]

_COLUMNS = (
    Column("stage", "text"),
    Column("slowest rank", "count"),
    Column("its time per step", "duration", "ns"),
    Column("median of others", "duration", "ns"),
    Column("ratio", "ratio"),
    Column("steps", "count"),
)
_NOTE = (
    "Differences, no verdicts: the rank with the longest time may have had more work, or have "
    "waited for the others."
)


def ranks(spans: Spans) -> Table:
    """Name per stage the rank with the most exclusive time per step, beside others that run it.

    Abstains with one rank. With fewer than three steps no rank is named.
    """
    cut = partition(spans)
    choice = counted(spans, cut.steps)
    numbers, count = np.unique(spans.rank[cut.steps][choice.mask], return_counts=True)
    if len(numbers) < 2:
        return Table("ranks", _COLUMNS, abstained="ranks are compared where two or more have steps")
    fewest = int(count.min())
    if fewest < FEWEST:
        reason = f"a rank has {fewest} steps, too few to compare ranks ({FEWEST} needed)"
        return Table("ranks", _COLUMNS, abstained=reason)
    totals = _totals(spans, cut, choice, numbers)
    means = totals // count[:, None]
    rows: list[tuple[Cell, ...]] = []
    for code in np.argsort(-totals.sum(axis=0), kind="stable").tolist():
        if not totals[:, code].any():
            continue
        worst = int(np.argmax(means[:, code]))
        ran = np.delete(means[:, code], worst)
        ran = ran[ran > 0]
        others = int(np.median(ran)) if len(ran) else None
        name = "untraced" if code - 1 == UNTRACED else spans.names[code - 1]
        own = int(means[worst, code])
        ratio = own / others if others else None
        rows.append((name, int(numbers[worst]), own, others, ratio, fewest))
    return Table("ranks", _COLUMNS, rows, f"{choice.note} {_NOTE}".strip())


def _totals(spans: Spans, cut: Partition, choice: Counted, ranks: Int64s) -> Int64s:
    """Return exclusive time in the counted steps by rank and name, untraced first."""
    place = np.searchsorted(ranks, spans.rank[cut.steps])
    place[~choice.mask] = -1
    return cut.cells(spans).sums(place, len(ranks), len(spans.names))
