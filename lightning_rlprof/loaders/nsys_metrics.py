"""Samples of GPU metrics in an Nsight Systems export."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_rlprof.loaders.kernels import UNKNOWN, Coded, known
from lightning_rlprof.loaders.nsys_export import Export
from lightning_rlprof.loaders.nsys_ranges import pid_of, possible
from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import Column, ColumnRows, Table

__all__ = ["METRICS", "metric_table"]

METRICS = "GPU_METRICS"
"""The table in the export."""

_NAMES = "TARGET_INFO_GPU_METRICS"
_KERNEL, _DEVICES = "CUPTI_ACTIVITY_KIND_KERNEL", "TARGET_INFO_CUDA_DEVICE"
_COLUMNS = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("time", "duration", "ns"),
    Column("metric", "text"),
    Column("value", "number"),
)


def metric_table(export: Export, ranks: Mapping[int, int], zero_ns: int) -> Table:
    """Return one row per sample in the order of the file; metrics without a name have none.

    The rank is that of the processes whose kernels ran on the GPU, not known where those are of
    several ranks, of none, or where the export does not say which GPU is which device.

    Args:
        export: The export.
        ranks: Rank of each process, by globalPid.
        zero_ns: Where the axis of the times begins, in the export's time.
    """
    rows = export.numbers(METRICS, "timestamp", "typeId", "metricId")
    value = export.reals(METRICS, "value")["value"]
    sound = possible(rows["timestamp"]) & (np.isfinite(value) if len(value) else False)
    rows = {name: column[sound] for name, column in rows.items()}
    kind = rows["typeId"]
    gpu = np.where(kind == UNKNOWN, UNKNOWN, kind & 0xFF)  # the lowest byte
    own = np.array([*_ranks(export, ranks), UNKNOWN], np.int64)
    cells: list[Any] = [
        known(own[np.where(kind == UNKNOWN, -1, gpu)]),
        known(gpu),
        rows["timestamp"] - zero_ns,
        _named(export, kind, rows["metricId"]),
        value[sound] if len(value) else value,
    ]
    lost = np.count_nonzero(~sound)
    note = f"{lost} samples are left out: they have no time or no value" if lost else ""
    return Table("gpu_metrics", _COLUMNS, ColumnRows(cells), note=note)


def _ranks(export: Export, ranks: Mapping[int, int]) -> list[int]:
    """Return the rank of each GPU by its number, up to 255."""
    devices = export.numbers(_DEVICES, "pid", "cudaId", "gpuId")
    columns = (column.tolist() for column in devices.values())
    place = {(pid, cuda): gpu for pid, cuda, gpu in zip(*columns, strict=True)}
    users: dict[int, set[int]] = {}
    if {"globalPid", "deviceId"} <= export.columns.get(_KERNEL, frozenset()):
        for process, device in export.rows(f"SELECT DISTINCT globalPid, deviceId FROM {_KERNEL}"):
            if process in ranks and (pid_of(process), device) in place:
                users.setdefault(place[pid_of(process), device], set()).add(ranks[process])
    own = [users.get(gpu, set()) for gpu in range(256)]
    return [next(iter(each)) if len(each) == 1 else UNKNOWN for each in own]


def _named(export: Export, kind: Int64s, metric: Int64s) -> Coded:
    """Return names of metrics, which are numbered anew for each type of source."""
    there = export.numbers(_NAMES, "typeId", "metricId")
    codes, names = export.texts(_NAMES, "metricName")
    keys = zip(there["typeId"].tolist(), there["metricId"].tolist(), strict=True)
    known = dict(zip(keys, codes.tolist(), strict=False))
    kinds, at_kind = np.unique(kind, return_inverse=True)
    metrics, at_metric = np.unique(metric, return_inverse=True)
    pairs, at_pair = np.unique(at_kind * len(metrics) + at_metric, return_inverse=True)
    both = (kinds[pairs // len(metrics)].tolist(), metrics[pairs % len(metrics)].tolist())
    own = [known.get(pair, -1) for pair in zip(*both, strict=True)]
    return np.array(own, dtype=np.int64)[at_pair], names
