"""Kernels of a torch.profiler trace joined to their launches, and to what the launches lay in."""

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.chrome_events import MISSING
from lightning_rlprof.loaders.chrome_kinds import KERNEL
from lightning_rlprof.loaders.chrome_scratch import Settled
from lightning_rlprof.loaders.kernels import UNKNOWN, Kernels
from lightning_rlprof.loaders.kineto_launches import placed
from lightning_rlprof.loaders.kineto_trace import KinetoTrace

__all__ = ["kernels_of"]

_PLACED = ("stage", "step", "range", "launch_ns", "call_ns", "thread", "graph")


def kernels_of(trace: KinetoTrace, rank: int) -> tuple[Kernels, list[str]]:
    """Return the kernels by start, on the axis that begins at ``trace.zero_ns``, and remarks.

    Stage, step and range are as `placed` finds them. Columns of many kernels cannot be written to:
    they lie in a temporary file.
    """
    order = np.argsort(trace.column("start_ns", KERNEL), kind="stable").astype(np.int32)

    def sorted_(name: str) -> npt.NDArray[Any]:
        return trace.column(name, KERNEL)[order]

    settled = Settled()
    place = placed(trace, {name: sorted_(name) for name in ("start_ns", "lane", "launch")})
    for name in _PLACED:
        settled.add(getattr(place, name))
    remarks = [remark.format("kernels") for remark in place.remarks]
    del place
    for name in ("device", "stream"):
        column = sorted_(name)
        settled.add(np.where(column == MISSING, UNKNOWN, column))
    settled.add(sorted_("name"))
    for name in ("start_ns", "end_ns"):
        settled.add(sorted_(name) - trace.zero_ns)
    kernels = _kernels(settled, list(trace.columns.names), rank)
    return kernels, remarks if len(order) else ["no kernels in it: no device was profiled"]


def _kernels(settled: Settled, names: list[str], rank: int) -> Kernels:
    stage, step, inside, launch, call, thread, graph, *rest = settled.columns()
    device, stream, name, start, end = rest
    return Kernels(
        rank=np.broadcast_to(np.int64(rank), len(start)),
        device=device,
        stream=stream,
        name=(name, names),
        start_ns=start,
        end_ns=end,
        stage=(stage, names),
        step=step,
        range=(inside, names),
        launch_ns=launch,
        call_ns=call,
        thread=thread,
        graph=graph,
    )
