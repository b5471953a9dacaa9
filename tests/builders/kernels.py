"""Tables of kernels out of columns, as readers of traces return them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import COLUMNS, UNKNOWN, Coded, known
from lightning_rlprof.tables.table import ColumnRows, Table, noted

_LAUNCHES = ("launch_ns", "call_ns", "thread", "graph")  # where nothing is known of them: None


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
        launch_ns: When it was launched, on the same axis; `UNKNOWN` where that was not recorded.
            None, as for those that follow, where nothing is known of launches.
        call_ns: How long the call took that launched it.
        thread: Identity of the thread that launched it.
        graph: Number of the replay of a graph that it ran in, else `UNKNOWN`; all that one call
            replayed have one number.
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
    launch_ns: Int64s | None = None
    call_ns: Int64s | None = None
    thread: Int64s | None = None
    graph: Int64s | None = None


def kernel_table(kernels: Kernels, remarks: Iterable[str] = ()) -> Table:
    """Return one row per kernel, in the order given.

    Columns: rank, device, stream, kernel, start and duration in nanoseconds; stage, step and range
    that its launch is known to lie in; when the launch began, how long the call took, and its
    thread; the number of the graph's replay that the kernel ran in. None: not known, or none.

    Args:
        kernels: The columns.
        remarks: What the reader must know, e.g. that some launches were not recorded.
    """
    return Table("kernels", COLUMNS, ColumnRows(kernel_columns(kernels)), **noted(remarks))


def kernel_columns(kernels: Kernels) -> list[Any]:
    """Return the columns of that table, for `ColumnRows`."""
    return [
        kernels.rank,
        known(kernels.device),
        known(kernels.stream),
        kernels.name,
        kernels.start_ns,
        kernels.end_ns - kernels.start_ns,
        kernels.stage,
        known(np.maximum(kernels.step, 0), nothing=0),
        kernels.range,
        *(
            known(np.full(len(kernels.rank), UNKNOWN) if column is None else column)
            for column in (getattr(kernels, name) for name in _LAUNCHES)
        ),
    ]
