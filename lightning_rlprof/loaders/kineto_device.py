"""Copies and collectives of a torch.profiler trace, joined to their launches, as tables."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.chrome_events import MISSING
from lightning_rlprof.loaders.chrome_kinds import COLLECTIVE, COPY, PARAMETERS
from lightning_rlprof.loaders.kernels import UNKNOWN, Coded, distinct, known
from lightning_rlprof.loaders.kineto_launches import Placed, placed
from lightning_rlprof.loaders.kineto_trace import KinetoTrace
from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import Column, ColumnRows, Table

__all__ = ["collective_table", "copy_kind", "copy_table", "operation_of"]

_Rows = Mapping[str, npt.NDArray[Any]]

_BEFORE = (Column("rank", "count"), Column("device", "count"), Column("stream", "count"))
_AFTER = (
    Column("start", "duration", "ns"),
    Column("duration", "duration", "ns"),
    Column("stage", "text"),
    Column("step", "count"),
    Column("launch", "duration", "ns"),
)
_COPIES = (
    *_BEFORE,
    Column("kind", "text"),
    Column("bytes", "count", "bytes"),
    *_AFTER,
    Column("launch duration", "duration", "ns"),
)
_COLLECTIVES = (
    *_BEFORE,
    Column("operation", "text"),
    Column("group", "text"),
    Column("group size", "count"),
    Column("number", "count"),
    Column("bytes", "count", "bytes"),
    Column("dtype", "text"),
    *_AFTER,
)

# "Memcpy HtoD (Pinned -> Device)" (CUDA, ROCm), "CopyHostToDevice" (ROCm before 6), "Memcpy M2D"
# and "zeCommandListAppendMemoryCopy(M2D)" (XPU).
_BRIEF = re.compile(r"\b([HDAP])to([HDAP])\b")
_LONG = re.compile(r"(Host|Device)To(Host|Device)")
_LEVEL_ZERO = re.compile(r"\b([HDM])2([HDM])\b")
_FILLS = re.compile(r"memset|fill", re.IGNORECASE)

# Sizes of torch's types as c10::toString writes them.
_SIZES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "ComplexHalf", "UInt32", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat", "UInt64"), 8),
    "ComplexDouble": 16,
}
_LARGEST_COUNT = 2**50  # elements; sixteen times as many bytes still fit into 64 bits

# Without lines and in the order in which they are tried: some begin like others.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "crossdevicereduce": "all_reduce",
    **dict.fromkeys(("broadcast", "barrier", "reduce", "scatter", "gather", "send", "recv")),
}
_BACKEND = re.compile(r"(?:nccl|rccl|xccl|gloo|ucc|mpi):(\S+)")
_KERNEL = re.compile(r"(?:[nrxsm]ccl\w*?Kernel|oneccl)\w*?_([A-Z]\w*)|(cross_device_reduce)")


def copy_kind(name: str) -> str | None:
    """Return from where to where an event of that name copies, or that it sets.

    Example::

        >>> copy_kind("Memcpy HtoD (Pinned -> Device)"), copy_kind("Memset (Device)")
        ('HtoD', 'memset')
        >>> copy_kind("CopyDeviceToHost"), copy_kind("Memcpy M2D"), copy_kind("flush")
        ('DtoH', 'HtoD', None)
    """
    if found := _BRIEF.search(name) or _LONG.search(name):
        return f"{found[1][0]}to{found[2][0]}"
    if found := _LEVEL_ZERO.search(name):
        return "to".join(side.replace("M", "H") for side in found.groups())
    return "memset" if _FILLS.search(name) else None


def operation_of(text: str) -> str:
    """Return the one name of an operation, however torch spells it.

    Example::

        >>> [operation_of(each) for each in ("allreduce", "_allgather_base", "all_to_allv")]
        ['all_reduce', 'all_gather', 'all_to_all']
        >>> operation_of("ReduceScatter_Sum_f32_RING_LL"), operation_of("coalesced")
        ('reduce_scatter', 'coalesced')
    """
    joined = text.replace("_", "").lower()
    found = next((each for each in _OPERATIONS if joined.startswith(each)), None)
    return text.strip("_").lower() if found is None else _OPERATIONS[found] or found


def copy_table(trace: KinetoTrace, rank: int) -> Table:
    """Return one row per copy between memories, and per setting of one, by start."""
    place = placed(trace, trace.parts(COPY), trace.types(COPY))
    rows = place.rows.rows()
    middle = [
        _renamed(rows["name"], list(trace.columns.names), copy_kind),
        known(rows["bytes"], nothing=MISSING),
    ]
    cells = [*_before(rows, rank), *middle, *_after(trace, rows), known(rows["call_ns"])]
    return Table("memcpy", _COPIES, ColumnRows(cells), _note(trace, place, "copies", COPY))


def collective_table(trace: KinetoTrace, rank: int) -> Table:
    """Return one row per kernel of a collective, by start.

    What was sent is told by the kernel's arguments, else by those of the ``record_param_comms``
    that its External id names. Without either the operation is that of the annotation around the
    launch (``nccl:all_reduce``), else that in the kernel's name, and no more is known.
    """
    place = _placed(trace)
    rows = place.rows.rows()
    names = list(trace.columns.names)
    size, number = (known(rows[name], nothing=MISSING) for name in ("size", "number"))
    middle = [
        _operations(rows, rows["range"], names),
        distinct(rows["group"], names),
        size,
        number,
        known(_bytes(rows, names)),
        distinct(rows["type"], names),
    ]
    cells = [*_before(rows, rank), *middle, *_after(trace, rows)]
    note = _note(trace, place, "collectives", COLLECTIVE, PARAMETERS)
    return Table("collectives", _COLLECTIVES, ColumnRows(cells), note)


def _placed(trace: KinetoTrace) -> Placed:
    rows, parameters = trace.rows(COLLECTIVE, PARAMETERS)
    rows = {**rows, **_told(rows, parameters)}
    types = {name: column.dtype.type for name, column in rows.items()}
    return placed(trace, [rows], types)


def _before(rows: _Rows, rank: int) -> list[Any]:
    device, stream = (known(rows[name], nothing=MISSING) for name in ("device", "stream"))
    return [np.broadcast_to(np.int64(rank), len(rows["name"])), device, stream]


def _after(trace: KinetoTrace, rows: _Rows) -> list[Any]:
    return [
        rows["start_ns"] - trace.zero_ns,
        rows["end_ns"] - rows["start_ns"],
        distinct(rows["stage"], list(trace.columns.names)),
        known(np.maximum(rows["step"], 0), nothing=0),
        known(rows["launch_ns"]),
    ]


def _note(trace: KinetoTrace, place: Placed, what: str, *kinds: int) -> str:
    remarks = [remark.format(what) for remark in place.remarks]
    return "; ".join([*trace.losses(*kinds), *remarks])


def _renamed(
    codes: npt.NDArray[Any], names: list[str], name_of: Callable[[str], str | None]
) -> Coded:
    """Return a column of texts under other names, -1 for those that have none."""
    there, own = np.unique(codes, return_inverse=True)
    found = [None if code < 0 else name_of(names[code]) for code in there.tolist()]
    texts = [each for each in dict.fromkeys(found) if each is not None]
    places = [-1 if each is None else texts.index(each) for each in found]
    return np.array(places, np.int64)[own], texts


def _told(rows: _Rows, parameters: _Rows) -> dict[str, npt.NDArray[Any]]:
    """Return what was sent, for kernels that do not tell it from the operator that launched them.

    Only where that is sure: one operator has that External id.
    """
    ids, first, count = np.unique(parameters["external"], return_index=True, return_counts=True)
    sure = (count == 1) & (ids != MISSING)
    ids, first = ids[sure], first[sure]
    at = np.minimum(np.searchsorted(ids, rows["external"]), max(len(ids) - 1, 0))
    silent = np.flatnonzero(rows["operation"] < 0)
    silent = silent[ids[at[silent]] == rows["external"][silent]] if len(ids) else silent[:0]
    found = {}
    for name in ("operation", "group", "type", "size", "number", "incoming", "outgoing"):
        found[name] = rows[name].copy()
        found[name][silent] = parameters[name][first[at[silent]]]
    return found


def _operations(rows: _Rows, around: npt.NDArray[Any], names: list[str]) -> Coded:
    told, texts = _renamed(rows["operation"], names, operation_of)
    marked, marks = _renamed(around, names, _marked)
    named, kernels = _renamed(rows["name"], names, _named)
    codes = np.where(named < 0, -1, named + len(texts) + len(marks))
    codes = np.where(marked < 0, codes, marked + len(texts))
    return distinct(np.where(told < 0, codes, told), [*texts, *marks, *kernels])


def _marked(annotation: str) -> str | None:
    found = _BACKEND.match(annotation)
    return operation_of(found[1]) if found else None


def _named(kernel: str) -> str | None:
    found = _KERNEL.search(kernel)
    operation = operation_of(found[1] or found[2]) if found else None
    return operation if operation in {*_OPERATIONS.values(), *_OPERATIONS} else None


def _bytes(rows: _Rows, names: list[str]) -> Int64s:
    """Return the larger of what came in and went out, `UNKNOWN` without one or a type's size."""
    types, own = np.unique(rows["type"], return_inverse=True)
    sizes = [0 if code < 0 else _size(names[code]) for code in types.tolist()]
    size = np.array(sizes, np.int64)[own]
    count = np.maximum(rows["incoming"], rows["outgoing"])
    least = np.minimum(rows["incoming"], rows["outgoing"])
    sound = (size > 0) & (least >= 0) & (count < _LARGEST_COUNT)
    return np.where(sound, np.where(sound, count, 0) * size, UNKNOWN)


def _size(dtype: str) -> int:
    """Return the bytes of one element, 0 where that is not known."""
    return 1 if dtype.startswith("Float8_") else _SIZES.get(dtype, 0)
