"""What each rank recorded: its steps, the time in and outside them, and how it ended."""

import numpy as np

from lightning_rlprof.analysis.partition import partition
from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["coverage"]

_STEP = KINDS.index("step")
_COLUMNS = (
    Column("rank", "count"),
    Column("host", "text"),
    Column("device", "text"),
    Column("spans", "count"),
    Column("steps", "count"),
    Column("in steps", "duration", "ns"),
    Column("outside steps", "duration", "ns"),
    Column("ended", "text"),
)


def coverage(spans: Spans) -> Table:
    """List the ranks; ``in steps`` and ``outside steps`` add up to first event to last exactly."""
    cut = partition(spans)
    cells = cut.cells(spans)
    inside = np.zeros(max(spans.ranks, default=0) + 1, dtype=np.int64)
    np.add.at(inside, spans.rank[cut.steps][cells.step], cells.ns)
    rows: list[tuple[Cell, ...]] = []
    for rank, header in spans.headers.items():
        mine = spans.rows(rank=rank)
        first = int(spans.start_ns[mine].min()) if len(mine) else 0
        last = int(spans.end_ns[mine].max()) if len(mine) else 0
        steps = int(np.count_nonzero(spans.kind[mine] == _STEP))
        ended = spans.statuses.get(rank) or "file just stops"
        took = int(inside[rank])
        times = (took, last - first - took)
        rows.append((rank, header.host, header.hardware, len(mine), steps, *times, ended))
    return Table("coverage", _COLUMNS, rows)
