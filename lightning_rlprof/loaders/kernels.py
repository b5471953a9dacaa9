"""The table of device kernels, the same whatever recorded them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import Column, ColumnRows, Table

__all__ = ["Coded", "Kernels", "kernel_table"]

Coded = tuple[Int64s, Sequence[str]]
"""A column of texts: a code per row and the text of each code; below 0 is "not known"."""

_COLUMNS = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("stream", "count"),
    Column("kernel", "text"),
    Column("start", "duration", "ns"),
    Column("duration", "duration", "ns"),
    Column("stage", "text"),
    Column("step", "count"),
    Column("range", "text"),
)


@dataclass(frozen=True, eq=False)
class Kernels:
    """Kernels as columns of one length.

    Attributes:
        rank: Global rank of the process that launched it.
        device: Number of the device as the process counts it.
        stream: Stream (CUDA, ROCm) or queue.
        name: Full name.
        start_ns: On the axis of the `Spans` that they belong to.
        end_ns: On the same axis.
        stage: RL stage that its launch lies in.
        step: RL step that its launch lies in; below 1 where that is not known.
        range: Innermost marked range (NVTX, record_function) that its launch lies in.
    """

    rank: Int64s
    device: Int64s
    stream: Int64s
    name: Coded
    start_ns: Int64s
    end_ns: Int64s
    stage: Coded
    step: Int64s
    range: Coded


def kernel_table(kernels: Kernels, note: str = "") -> Table:
    """Return one row per kernel, in the order given.

    Columns: rank, device, stream, kernel, start and duration in nanoseconds, stage, step and range;
    the last three are None where the launch is not known to lie in one.

    Args:
        kernels: The columns.
        note: What the reader must know, e.g. that some launches were not recorded.
    """
    steps, codes = np.unique(kernels.step, return_inverse=True)
    known = np.where(kernels.step < 1, -1, codes)  # a code below 0 reads as None
    columns: list[Any] = [
        kernels.rank,
        kernels.device,
        kernels.stream,
        kernels.name,
        kernels.start_ns,
        kernels.end_ns - kernels.start_ns,
        kernels.stage,
        (known, steps.tolist()),
        kernels.range,
    ]
    return Table("kernels", _COLUMNS, ColumnRows(columns), note=note)
