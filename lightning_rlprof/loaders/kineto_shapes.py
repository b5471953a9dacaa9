"""The shapes of matrix products and attention in a torch.profiler trace, as a table."""

from typing import Any

import numpy as np

from lightning_rlprof.loaders.chrome_kinds import SHAPES
from lightning_rlprof.loaders.chrome_scratch import Grown
from lightning_rlprof.loaders.chrome_sort import in_order
from lightning_rlprof.loaders.kernels import distinct
from lightning_rlprof.loaders.kineto_trace import KinetoTrace
from lightning_rlprof.table import Column, ColumnRows, PartRows, Table

__all__ = ["shape_table"]

_COLUMNS = (
    Column("rank", "count"),
    Column("thread", "count"),
    Column("operator", "text"),
    Column("start", "duration", "ns"),
    Column("duration", "duration", "ns"),
    Column("dims", "text"),
    Column("types", "text"),
    Column("values", "text"),
)
_NONE = (
    "no shapes of matrix products were recorded; torch.profiler records them with record_shapes "
    "(integrated: {profile_record_shapes: true})"
)


def shape_table(trace: KinetoTrace, rank: int) -> Table:
    """Return one row per call of an operator that multiplies matrices, by start.

    ``dims``, ``types`` and ``values`` are those of its inputs, as the JSON that torch writes.
    """
    rows = Grown(trace.types(SHAPES))
    for block in in_order(trace.parts(SHAPES), "start_ns"):
        told = block["dims"] >= 0
        rows.add({name: column[told] for name, column in block.items()})
    note = "; ".join(trace.losses(SHAPES))
    if not len(rows):
        return Table("shapes", _COLUMNS, note=note, abstained=_NONE)
    names, idents = list(trace.columns.names), trace.idents

    def read(low: int, high: int) -> ColumnRows:
        part = rows.rows(low, high)
        cells: list[Any] = [
            np.broadcast_to(np.int64(rank), high - low),
            idents[part["lane"]],
            distinct(part["name"], names),
            part["start_ns"] - trace.zero_ns,
            part["end_ns"] - part["start_ns"],
            *(distinct(part[name], names) for name in ("dims", "types", "values")),
        ]
        return ColumnRows(cells)

    return Table("shapes", _COLUMNS, PartRows(len(rows), read), note)
