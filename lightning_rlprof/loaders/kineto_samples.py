"""Changes of memory and samples of counters in a torch.profiler trace, as tables."""

import re
from typing import Any

import numpy as np

from lightning_rlprof.loaders.chrome_events import MISSING
from lightning_rlprof.loaders.chrome_kinds import COUNTER, MEMORY
from lightning_rlprof.loaders.chrome_scratch import Grown
from lightning_rlprof.loaders.chrome_sort import ROWS, in_order
from lightning_rlprof.loaders.kernels import UNKNOWN, known
from lightning_rlprof.loaders.kineto_trace import KinetoTrace
from lightning_rlprof.table import Column, ColumnRows, PartRows, Table

__all__ = ["counter_table", "memory_table"]

_TIME = Column("time", "duration", "ns")
_MEMORY = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("component", "text"),
    _TIME,
    Column("allocated", "count", "bytes"),
    Column("reserved", "count", "bytes"),
)
_COUNTERS = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("metric", "text"),
    _TIME,
    Column("value", "number"),
)
# https://github.com/pytorch/pytorch/blob/main/c10/core/DeviceType.h, those that have memory
_DEVICES = {
    **{0: "CPU", 1: "CUDA", 6: "HIP", 7: "FPGA", 8: "MAIA", 9: "XLA", 12: "XPU", 13: "MPS"},
    **{15: "HPU", 16: "VE", 18: "IPU", 19: "MTIA", 20: "PrivateUse1"},
}
_GPU = re.compile(r"GPU (\d{1,6})")


def memory_table(trace: KinetoTrace, rank: int) -> Table:
    """Return what torch's allocators held after each change, by time; the CPU has no number."""
    rows = Grown(trace.types(MEMORY))
    for block in in_order(trace.parts(MEMORY), "start_ns"):
        rows.add(block)
    codes: dict[int, int] = {}
    for part in rows.parts(ROWS):
        for kind in np.unique(part["kind"]).tolist():
            codes.setdefault(kind, len(codes))
    texts = [_DEVICES.get(each, f"device type {each}") for each in codes]
    kinds = np.sort(np.array([*codes], np.int64))
    order = np.array([codes[kind] for kind in kinds.tolist()], np.int64)

    def read(low: int, high: int) -> ColumnRows:
        kind, device, time, allocated, reserved = (
            rows.part(name, low, high)
            for name in ("kind", "device", "start_ns", "allocated", "reserved")
        )
        code = order[np.searchsorted(kinds, kind)] if len(kind) else kind
        cells: list[Any] = [
            np.broadcast_to(np.int64(rank), len(kind)),
            known(np.where(kind == 0, MISSING, device), nothing=MISSING),
            (np.where(kind == MISSING, -1, code), texts),
            time - trace.zero_ns,
            known(allocated, nothing=MISSING),
            known(reserved, nothing=MISSING),
        ]
        return ColumnRows(cells)

    return Table("memory", _MEMORY, PartRows(len(rows), read), "; ".join(trace.losses(MEMORY)))


def counter_table(trace: KinetoTrace, rank: int) -> Table:
    """Return the samples of all counters by time; the device is that of the process they are of.

    A counter of several series has a metric for each: its name and that of the series.
    """
    rows = Grown(trace.types(COUNTER))
    for block in in_order(trace.parts(COUNTER), "start_ns"):
        rows.add(block)
    lanes = list(trace.columns.lanes)
    devices = {pid: _device(label) for pid, label in trace.columns.labels.items()}
    device = np.array([devices.get(pid, UNKNOWN) for pid, _ in lanes] or [UNKNOWN], np.int64)
    names = list(trace.columns.names)

    def read(low: int, high: int) -> ColumnRows:
        lane, name, time, value = (
            rows.part(each, low, high) for each in ("lane", "name", "start_ns", "value")
        )
        cells: list[Any] = [
            np.broadcast_to(np.int64(rank), len(lane)),
            known(device[lane]),
            (name.astype(np.int64), names),
            time - trace.zero_ns,
            value,
        ]
        return ColumnRows(cells)

    note = "; ".join(trace.losses(COUNTER))
    return Table("counters", _COUNTERS, PartRows(len(rows), read), note)


def _device(label: str) -> int:
    found = _GPU.fullmatch(label)
    return int(found[1]) if found else UNKNOWN
