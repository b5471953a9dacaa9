"""Read torch.profiler traces (CUDA, ROCm, XPU, CPU) as spans and tables.

Kernels, copies and collectives come with their launches, and with the stage, step and range of
these. Other tables: memory and counters over time, shapes of matmuls and attention, host calls.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.chrome_events import MISSING, read_head
from lightning_rlprof.loaders.host_calls import (
    CALL_KINDS,
    MODULE,
    NUMBERED,
    Launches,
    Nesting,
    columns_named,
    forwards,
    stages_at,
)
from lightning_rlprof.loaders.kineto.trace import (
    Kind,
    KinetoTrace,
    ident,
    place,
    read_trace,
    told,
)
from lightning_rlprof.loaders.rank_names import labels_of_verl, rank_in_name
from lightning_rlprof.loaders.spill import Columns, Grown, beside, in_order
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import EXPORT, FORMAT, Header
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import parents
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, distinct, known
from lightning_rlprof.tables.spans import NO_PARENT, Spans, Thread, warning_of
from lightning_rlprof.tables.table import ColumnRows, PartRows, Table, noted

_UNREAD = "no readable kernels: some events are damaged or lost"

# These devices have memory: https://github.com/pytorch/pytorch/blob/main/c10/core/DeviceType.h
_DEVICES = {
    **{0: "CPU", 1: "CUDA", 6: "HIP", 7: "FPGA", 8: "MAIA", 9: "XLA", 12: "XPU", 13: "MPS"},
    **{15: "HPU", 16: "VE", 18: "IPU", 19: "MTIA", 20: "PrivateUse1"},
}
_GPU = re.compile(r"GPU (\d{1,6})")
_NO_SHAPES = (
    "no shapes of matmuls were recorded. Record them with torch.profiler and record_shapes "
    "(integrated: {profile_record_shapes: true})"
)
_PYTHON, _RUNTIME, _MODULE = (CALL_KINDS.index(kind) for kind in ("python", "runtime", "module"))

# The order is that of `CALL_KINDS`: of two calls that begin and end together, the outer one comes
# first.
_SOURCES = (Kind.PYTHON, Kind.OPERATOR, Kind.LAUNCH)
_CALL_TYPES: dict[str, type[np.generic]] = {
    **dict.fromkeys(("lane", "name", "stage"), np.int32),
    "kind": np.int8,
    **dict.fromkeys(("start_ns", "length_ns", "parent", "step"), np.int64),
}
_Rows = Mapping[str, npt.NDArray[Any]]

# Copies are called "Memcpy HtoD (Pinned -> Device)" (CUDA, ROCm), "CopyHostToDevice" (ROCm before
# 6), "Memcpy M2D" and "zeCommandListAppendMemoryCopy(M2D)" (XPU).
_BRIEF = re.compile(r"\b([HDAP])to([HDAP])\b")
_LONG = re.compile(r"(Host|Device)To(Host|Device)")
_LEVEL_ZERO = re.compile(r"\b([HDM])2([HDM])\b")
_FILLS = re.compile(r"memset|fill", re.IGNORECASE)

# Bytes of PyTorch's types, as c10::toString writes their names.
_BYTES_OF_TYPES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16", "UInt16"), 2),
    **dict.fromkeys(("Int", "Float", "ComplexHalf", "UInt32", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat", "UInt64"), 8),
    "ComplexDouble": 16,
}
_LARGEST_COUNT = 2**50  # Elements; sixteen times as many bytes still fit into 64 bits.

# Names have no underscores here. They are tried in this order, as some names begin alike.
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
_KERNEL_OPERATION = re.compile(
    r"(?:[nrxsm]ccl\w*?Kernel|oneccl)\w*?_([A-Z]\w*)|(cross_device_reduce)"
)
MOST_RANKS = 2**20  # No job has more ranks; a larger number is damage.
_WORLD = re.compile(r"rank[-_]?\d{1,7}-of-(\d{1,7})")
_ROLE = re.compile(r"_([^_]+)_rank\d+-of-\d")
_Frame = dict[str, Any]


def kernels_table(trace: KinetoTrace, rank: int) -> Table:
    """Return the kernels as a table whose rows are read in parts."""
    rows, remarks = place(trace, trace.grown(Kind.KERNEL), "kernels")
    if not len(rows):
        lost = trace.columns.counts[Kind.KERNEL] or trace.problems
        remarks = [_UNREAD if lost else "no kernels: no device was profiled"]
    names = list(trace.columns.names)

    def cells(part: Columns, _: int) -> _Frame:
        return _device_work(trace, part, {"kernel": (part["name"], names)})

    return _table_in_parts("kernels", rank, rows, cells, remarks)


def _device_work(
    trace: KinetoTrace, rows: Columns, own: Mapping[str, Any], without: Sequence[str] = ()
) -> _Frame:
    """Return columns of what `place` found, with those of one table in front of the times."""
    names = list(trace.columns.names)
    every = {
        "device": known(rows["device"], nothing=MISSING),
        "stream": known(rows["stream"], nothing=MISSING),
        **own,
        "start": rows["start_ns"] - trace.zero_ns,
        "duration": rows["end_ns"] - rows["start_ns"],
        "stage": (rows["stage"], names),
        "step": known(np.maximum(rows["step"], 0), nothing=0),
        "range": (rows["range"], names),
        "launch": known(rows["launch_ns"]),
        "launch duration": known(rows["call_ns"]),
        "thread": known(rows["thread"]),
        "graph": known(rows["graph"]),
    }
    return {name: cells for name, cells in every.items() if name not in without}


def _table_in_parts(
    name: str,
    rank: int,
    rows: Grown,
    cells: Callable[[Columns, int], _Frame],
    remarks: Sequence[str],
) -> Table:
    """Return a table whose cells are made of some rows at a time, from one number on."""

    def read(low: int, high: int) -> ColumnRows:
        frame = cells(rows.rows(low, high), low)
        return ColumnRows([np.broadcast_to(np.int64(rank), high - low), *frame.values()])

    columns = columns_named("rank", *cells(rows.rows(0, 0), 0))
    return Table(name, columns, PartRows(len(rows), read), **noted(remarks))


def memory_table(trace: KinetoTrace, rank: int) -> Table:
    """Return the memory of torch's allocators after each change, by time; the CPU has no number."""
    rows = _by_time(trace, Kind.MEMORY)
    kinds = sorted({kind for part in rows.parts() for kind in np.unique(part["kind"]).tolist()})
    texts = [_DEVICES.get(kind, f"device type {kind}") for kind in kinds]

    def cells(part: Columns, _: int) -> _Frame:
        kind = part["kind"]
        return {
            "device": known(np.where(kind == 0, MISSING, part["device"]), nothing=MISSING),
            "component": (np.where(kind == MISSING, -1, np.searchsorted(kinds, kind)), texts),
            "time": part["start_ns"] - trace.zero_ns,
            "allocated": known(part["allocated"], nothing=MISSING),
            "reserved": known(part["reserved"], nothing=MISSING),
        }

    return _table_in_parts("memory", rank, rows, cells, trace.losses(Kind.MEMORY))


def counter_table(trace: KinetoTrace, rank: int) -> Table:
    """Return the samples of all counters by time; the device is that of the process they are of.

    A counter of several series has a metric for each: its name and that of the series.
    """
    rows = _by_time(trace, Kind.COUNTER)
    lanes = list(trace.columns.lanes)
    devices = {pid: _device(label) for pid, label in trace.columns.labels.items()}
    device = np.array([devices.get(pid, UNKNOWN) for pid, _ in lanes] or [UNKNOWN], np.int64)
    names = list(trace.columns.names)

    def cells(part: Columns, _: int) -> _Frame:
        return {
            "device": known(device[part["lane"]]),
            "metric": (part["name"].astype(np.int64), names),
            "time": part["start_ns"] - trace.zero_ns,
            "value": part["value"],
        }

    return _table_in_parts("counters", rank, rows, cells, trace.losses(Kind.COUNTER))


def _by_time(trace: KinetoTrace, kind: int) -> Grown:
    grown = trace.grown(kind)
    rows = Grown(grown.types)
    for block in in_order(grown.parts(), "start_ns"):
        rows.add(block)
    return rows


def _device(label: str) -> int:
    found = _GPU.fullmatch(label)
    return int(found[1]) if found else UNKNOWN


def shape_table(trace: KinetoTrace, rank: int) -> Table:
    """Return one row per call of an operator that multiplies matrices, by start.

    ``dims``, ``types`` and ``values`` are those of its inputs, as the JSON that torch writes.
    """
    grown = trace.grown(Kind.SHAPES)
    rows = Grown(grown.types)
    for block in in_order(grown.parts(), "start_ns"):
        told = block["dims"] >= 0
        rows.add({name: column[told] for name, column in block.items()})
    losses = trace.losses(Kind.SHAPES)
    names, idents = list(trace.columns.names), trace.idents

    def cells(part: Columns, _: int) -> _Frame:
        return {
            "thread": idents[part["lane"]],
            "operator": distinct(part["name"], names),
            "start": part["start_ns"] - trace.zero_ns,
            "duration": part["end_ns"] - part["start_ns"],
            **{name: distinct(part[name], names) for name in ("dims", "types", "values")},
        }

    found = _table_in_parts("shapes", rank, rows, cells, losses)
    return found if len(rows) else replace(found, rows=(), abstained=_NO_SHAPES)


def call_table(trace: KinetoTrace, rank: int) -> Table:
    """Return one row per call of the host, by thread and start, outer calls first.

    A module's name stands without torch's ``nn.Module: ``. Stage and step are those around the
    start of the call, of the training thread for threads without marks.
    """
    placed, numbered = _collect_calls(trace)
    rows = Grown({**_CALL_TYPES, "forward": np.int64})
    for part in beside(placed, in_order(forwards(numbered), "row"), {"forward": 0}):
        rows.add(part)
    names = list(trace.columns.names)
    texts = [name.removeprefix(MODULE) for name in names]

    def cells(part: Columns, low: int) -> _Frame:
        return {
            "thread": trace.idents[part["lane"]],
            "name": (part["name"], texts),
            "kind": (part["kind"], CALL_KINDS),
            "start": part["start_ns"],
            "duration": part["length_ns"],
            "id": np.arange(low + 1, low + 1 + len(part["lane"])),
            "parent": known(part["parent"], nothing=0),
            "stage": (part["stage"], names),
            "step": known(part["step"], nothing=0),
            "forward": known(part["forward"], nothing=0),
        }

    return _table_in_parts("calls", rank, rows, cells, trace.losses(*_SOURCES))


def _collect_calls(trace: KinetoTrace) -> tuple[Grown, Grown]:
    """Return the calls in order, with what is around them, and those that autograd numbers."""
    rows, numbered = Grown(_CALL_TYPES), Grown(NUMBERED)
    trace.grown(Kind.OPERATOR)  # Reading the operators may add names, so it comes first.
    nesting, stages, processes = Nesting(), trace.ranges.marking, trace.columns.processes
    modules = np.array([name.startswith(MODULE) for name in trace.columns.names] or [False])
    for block in in_order(_calls(trace), "thread", "start_ns", "last"):
        lane, start, end = block["lane"].astype(np.int64), block["start_ns"], -block["last"]
        block["kind"][(block["kind"] == _PYTHON) & modules[block["name"]]] = _MODULE
        found = stages_at(stages, Launches(processes[lane], lane, start))
        own = np.flatnonzero(block["sequence"] >= 0)
        told = {name: block[name][own] for name in ("sequence", "start_ns", "lane")}
        process, backward = processes[lane[own]], block["forward"][own] > 0
        numbered.add({**told, "row": own + len(rows), "process": process, "backward": backward})
        rows.add(
            {
                **{name: block[name] for name in ("lane", "name", "kind")},
                "start_ns": start - trace.zero_ns,
                "length_ns": end - start,
                "parent": nesting.parents(lane, start, end, block["kind"] == _RUNTIME),
                "stage": found.stage,
                "step": np.where(found.step > 0, found.step, trace.file_step),
            }
        )
    return rows, numbered


def _calls(trace: KinetoTrace) -> Iterator[Columns]:
    """Yield the calls of all sources."""
    for kind, source in enumerate(_SOURCES):
        for part in trace.grown(source).parts():
            nothing = np.full(len(part["lane"]), MISSING)
            yield {
                **{name: part[name] for name in ("lane", "name", "start_ns")},
                "thread": trace.idents[part["lane"]],
                "last": -part["end_ns"],
                "kind": np.full(len(nothing), kind, np.int8),
                "sequence": part.get("sequence", nothing),
                "forward": part.get("forward", nothing),
            }


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
    grown, remarks = place(trace, trace.grown(Kind.COPY), "copies")
    rows = grown.rows()
    own = {
        "kind": _rename_texts(rows["name"], list(trace.columns.names), copy_kind),
        "bytes": known(rows["bytes"], nothing=MISSING),
    }
    frame = _device_work(trace, rows, own, without=("range",))
    return _whole_table("memcpy", rank, frame, [*trace.losses(Kind.COPY), *remarks])


def collective_table(trace: KinetoTrace, rank: int) -> Table:
    """Return one row per kernel of a collective, by start.

    The bytes come from the kernel's arguments, else by those of the ``record_param_comms``
    that its External id names. Without either the operation is that of the annotation around the
    launch (``nccl:all_reduce``), else that in the kernel's name, and no more is known.
    """
    found = _with_parameters(
        trace.grown(Kind.COLLECTIVE).rows(), trace.grown(Kind.PARAMETERS).rows()
    )
    work = Grown({name: column.dtype.type for name, column in found.items()})
    work.add(found)
    grown, remarks = place(trace, work, "collectives")
    rows = grown.rows()
    names = list(trace.columns.names)
    own = {
        "operation": _operations(rows, rows["range"], names),
        "group": (rows["group"], names),
        "group size": known(rows["size"], nothing=MISSING),
        "number": known(rows["number"], nothing=MISSING),
        "bytes": known(_bytes(rows, names)),
        "dtype": (rows["type"], names),
    }
    more = ("range", "launch duration", "thread", "graph")
    frame = _device_work(trace, rows, own, without=more)
    return _whole_table(
        "collectives", rank, frame, [*trace.losses(Kind.COLLECTIVE, Kind.PARAMETERS), *remarks]
    )


def _whole_table(name: str, rank: int, frame: _Frame, remarks: Sequence[str]) -> Table:
    cells = [np.broadcast_to(np.int64(rank), len(frame["start"])), *frame.values()]
    return Table(name, columns_named("rank", *frame), ColumnRows(cells), **noted(remarks))


def _rename_texts(
    codes: npt.NDArray[Any], names: list[str], name_of: Callable[[str], str | None]
) -> Coded:
    """Return a column of texts under other names, -1 for those that have none."""
    there, own = np.unique(codes, return_inverse=True)
    found = [None if code < 0 else name_of(names[code]) for code in there.tolist()]
    texts = [each for each in dict.fromkeys(found) if each is not None]
    places = [-1 if each is None else texts.index(each) for each in found]
    return np.array(places, np.int64)[own], texts


def _with_parameters(rows: _Rows, parameters: _Rows) -> dict[str, npt.NDArray[Any]]:
    """Return what was sent, for kernels that do not tell it from the operator that launched them.

    Only where that is sure: one operator has that External id.
    """
    ids, first, count = np.unique(parameters["external"], return_index=True, return_counts=True)
    sure = (count == 1) & (ids != MISSING)
    ids, first = ids[sure], first[sure]
    at = np.minimum(np.searchsorted(ids, rows["external"]), max(len(ids) - 1, 0))
    silent = np.flatnonzero(rows["operation"] < 0)
    silent = silent[ids[at[silent]] == rows["external"][silent]] if len(ids) else silent[:0]
    found = dict(rows)
    for name in ("operation", "group", "type", "size", "number", "incoming", "outgoing"):
        found[name] = rows[name].copy()
        found[name][silent] = parameters[name][first[at[silent]]]
    return found


def _operations(rows: _Rows, around: npt.NDArray[Any], names: list[str]) -> Coded:
    told, texts = _rename_texts(rows["operation"], names, operation_of)
    marked, marks = _rename_texts(around, names, _operation_of_annotation)
    named, kernels = _rename_texts(rows["name"], names, _operation_of_kernel)
    codes = np.where(named < 0, -1, named + len(texts) + len(marks))
    codes = np.where(marked < 0, codes, marked + len(texts))
    return distinct(np.where(told < 0, codes, told), [*texts, *marks, *kernels])


def _operation_of_annotation(annotation: str) -> str | None:
    found = _BACKEND.match(annotation)
    return operation_of(found[1]) if found else None


def _operation_of_kernel(kernel: str) -> str | None:
    found = _KERNEL_OPERATION.search(kernel)
    operation = operation_of(found[1] or found[2]) if found else None
    return operation if operation in {*_OPERATIONS.values(), *_OPERATIONS} else None


def _bytes(rows: _Rows, names: list[str]) -> Int64s:
    """Return the larger of what came in and went out, `UNKNOWN` without one or a type's size."""
    types, own = np.unique(rows["type"], return_inverse=True)
    sizes = [0 if code < 0 else _bytes_per_element(names[code]) for code in types.tolist()]
    size = np.array(sizes, np.int64)[own]
    count = np.maximum(rows["incoming"], rows["outgoing"])
    least = np.minimum(rows["incoming"], rows["outgoing"])
    sound = (size > 0) & (least >= 0) & (count < _LARGEST_COUNT)
    return np.where(sound, np.where(sound, count, 0) * size, UNKNOWN)


def _bytes_per_element(dtype: str) -> int:
    """Return the bytes of one element, 0 where that is not known."""
    return 1 if dtype.startswith("Float8_") else _BYTES_OF_TYPES.get(dtype, 0)


class Distributed(msgspec.Struct):
    """What torch writes of the job before the events."""

    rank: int = -1
    world_size: int = 0


class _Device(msgspec.Struct):
    name: str = ""


def is_chrome_trace(path: Path) -> bool:
    """Tell by its content whether a file is a Chrome trace, compressed or not."""
    try:
        return path.is_file() and read_head(path).events
    except TraceError:
        return False


def is_export(path: Path) -> bool:
    """Return whether rlprof exported this file; it does not count as a trace of a folder."""
    try:
        top = read_head(path).top if path.is_file() else {}
    except TraceError:
        return False
    return told(top, "otherData", dict[str, Any], {}).items() >= EXPORT.items()


def read_kineto(path: Path, *, every: bool = False) -> Spans:
    """Read a trace: its annotations are the spans, all else are tables.

    Kernels are the table ``kernels``, and beside it are those of ``memcpy``, ``collectives``,
    ``calls``, ``memory``, ``counters`` and ``shapes`` that the trace has anything for. The first of
    these that is asked for reads the file again.

    A stage is an annotation with a stage's name, ``ProfilerStep#N`` is step N; all others are
    regions. Operators and Python functions are not spans. Where no ``ProfilerStep`` is around, the
    step is the one in the file's name, as `TorchProfilerRecorder` writes it.

    Args:
        path: A plain file or .gz; one that is cut off is read up to the cut.
        every: All tables will be asked for: read what they need at once.

    Raises:
        TraceError: It cannot be read or is not a Chrome trace.
    """
    trace = read_trace(path, every=every)
    header = _header(trace)
    rank = header.rank
    problems = [(text, Code.TRACE_DOUBTFUL) for text in trace.problems]
    if not trace.unix_ns:
        text = "recording time unknown: no base time in the trace"
        problems.append((text, Code.TIME_UNKNOWN))
    elif "baseTimeNanoseconds" not in trace.top:
        text = "no base time in the trace; its times count from 1970, as before torch 2.3"
        problems.append((text, Code.TRACE_DOUBTFUL))
    return Spans(
        path,
        **_columns(trace, rank),
        headers={rank: header},
        statuses={rank: "finished" if trace.complete else None},
        warnings=tuple(warning_of(rank, text, code) for text, code in problems),
        unix_ns=trace.unix_ns,
        tables={name: partial(read, trace, rank) for name, read in _readers(trace)},
    )


def _columns(trace: KinetoTrace, rank: int) -> dict[str, Any]:
    ranges, zero, texts = trace.ranges, trace.zero_ns, list(trace.columns.names)
    names, name = np.unique(ranges.name, return_inverse=True)
    lanes, thread = np.unique(ranges.thread, return_inverse=True)
    ids = np.arange(1, len(name) + 1)
    return {
        "names": tuple(texts[code] for code in names.tolist()),
        "threads": tuple(_threads(trace, lanes.tolist(), rank)),
        "name": name,
        "kind": ranges.kind.astype(np.int64),
        "rank": np.broadcast_to(np.int64(rank), len(name)),
        "step": np.where(ranges.step > 0, ranges.step, trace.file_step),
        "start_ns": ranges.start_ns - zero,
        "end_ns": ranges.end_ns - zero,
        "thread": thread,
        "id": ids,
        "parent": np.append(ids, NO_PARENT)[parents(ranges.thread, ranges.start_ns, ranges.end_ns)],
    }


def _readers(trace: KinetoTrace) -> Iterator[tuple[str, Callable[[KinetoTrace, int], Table]]]:
    """Yield the tables that the trace has anything for; kernels always, to say what lacks."""
    yield "kernels", kernels_table
    for name, read, kinds in (
        ("memcpy", copy_table, (Kind.COPY,)),
        ("collectives", collective_table, (Kind.COLLECTIVE,)),
        ("memory", memory_table, (Kind.MEMORY,)),
        ("counters", counter_table, (Kind.COUNTER,)),
        ("shapes", shape_table, (Kind.OPERATOR,)),
        # The largest table comes last: if tables are written in order, the trace is not needed
        # then.
        ("calls", call_table, (Kind.OPERATOR, Kind.PYTHON, Kind.LAUNCH)),
    ):
        if any(trace.columns.counts[kind] for kind in kinds):
            yield name, read


def _header(trace: KinetoTrace) -> Header:
    """Put together who recorded: the trace says some of it, the file's name some more."""
    top = trace.top
    job = told(top, "distributedInfo", Distributed, Distributed())
    rank, world = _place(job, trace.path.name)
    role = _ROLE.search(trace.path.name)
    devices = [device.name for device in told(top, "deviceProperties", list[_Device], [])]
    counts = trace.columns.counts
    # A trace ends with the names of its devices.
    device_kinds = (Kind.KERNEL, Kind.COPY, Kind.LAUNCH)  # A launch is proof of a device, too.
    no_device = trace.complete and not any(counts[kind] for kind in device_kinds)
    lanes = list(trace.columns.lanes)
    pids = (lanes[lane][0] for lane in trace.ranges.thread[:1].tolist())
    return Header(
        format=FORMAT,
        run_id=told(top, "trace_id", str, "") or trace.path.name,
        rank=rank,
        world_size=world,
        role=labels_of_verl(trace.path.name)[0] or (role[1] if role else ""),
        host=told(top, "host_name", str, ""),
        pid=next((pid for pid in pids if isinstance(pid, int)), 0),
        device=next(filter(None, devices), "cpu" if no_device else "unknown"),
        unix_ns=trace.unix_ns,
        clock_ns=0,
        versions={
            key: bytes(value)[:40].decode(errors="replace").strip('"')
            for key, value in top.items()
            if key.endswith("_version")
        },
    )


def _place(job: Distributed, name: str) -> tuple[int, int]:
    """Return rank and world size, the first of those told that can be true."""
    of = _WORLD.search(name)
    ranks = (job.rank, rank_in_name(name) or 0)
    rank = next((each for each in ranks if 0 <= each < MOST_RANKS), 0)
    worlds = (job.world_size, int(of[1]) if of else 0)
    return rank, next((each for each in worlds if rank < each <= MOST_RANKS), rank + 1)


def _threads(trace: KinetoTrace, lanes: list[int], rank: int) -> list[Thread]:
    keys = list(trace.columns.lanes)
    several = len({keys[lane][0] for lane in lanes}) > 1
    found = []
    for lane in lanes:
        pid, tid = keys[lane]
        name = trace.columns.thread_names.get((pid, tid), f"thread {tid}")
        found.append(
            Thread(rank, ident(tid, lane), f"{name} of process {pid}" if several else name)
        )
    return found
