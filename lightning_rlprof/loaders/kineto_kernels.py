"""Kernels of a torch.profiler trace joined to their launches, and to what the launches lay in."""

from typing import Any

import numpy as np

from lightning_rlprof.loaders.chrome_events import MISSING
from lightning_rlprof.loaders.chrome_kinds import KERNEL
from lightning_rlprof.loaders.chrome_scratch import Grown
from lightning_rlprof.loaders.kernels import COLUMNS, UNKNOWN, Kernels, kernel_columns
from lightning_rlprof.loaders.kineto_launches import placed
from lightning_rlprof.loaders.kineto_trace import KinetoTrace
from lightning_rlprof.table import ColumnRows, PartRows, Table

__all__ = ["kernels_of", "kernels_table"]

_UNREAD = "no kernels in it that can be read: some events are damaged or lost"
_PLAIN = ("device", "stream", "step", "launch_ns", "call_ns", "thread", "graph")


def kernels_of(trace: KinetoTrace, rank: int) -> tuple[Kernels, list[str]]:
    """Return the kernels by start, on the axis that begins at ``trace.zero_ns``, and remarks.

    Stage, step and range are as `placed` finds them.
    """
    rows, remarks = _placed(trace)
    return _kernels(trace, rank, rows, 0, len(rows)), remarks


def kernels_table(trace: KinetoTrace, rank: int) -> Table:
    """Return the same as a table, of which a part is in memory when it is asked for."""
    rows, remarks = _placed(trace)

    def read(low: int, high: int) -> ColumnRows:
        return ColumnRows(kernel_columns(_kernels(trace, rank, rows, low, high)))

    return Table("kernels", COLUMNS, PartRows(len(rows), read), "; ".join(remarks))


def _placed(trace: KinetoTrace) -> tuple[Grown, list[str]]:
    rows, remarks = placed(trace, trace.parts(KERNEL), trace.types(KERNEL))
    if not len(rows):
        lost = trace.counts.get(KERNEL) or trace.problems
        return rows, [_UNREAD if lost else "no kernels in it: no device was profiled"]
    return rows, [remark.format("kernels") for remark in remarks]


def _kernels(trace: KinetoTrace, rank: int, rows: Grown, low: int, high: int) -> Kernels:
    names = list(trace.columns.names)
    own: dict[str, Any] = {name: rows.part(name, low, high) for name in _PLAIN}
    for name in ("device", "stream"):
        own[name][own[name] == MISSING] = UNKNOWN
    own |= {name: (rows.part(name, low, high), names) for name in ("name", "stage", "range")}
    own |= {name: rows.part(name, low, high) - trace.zero_ns for name in ("start_ns", "end_ns")}
    return Kernels(rank=np.broadcast_to(np.int64(rank), high - low), **own)
