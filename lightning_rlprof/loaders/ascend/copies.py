"""Copies of an Ascend capture between host and device and on the device, and their launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.ascend.capture import MarkedCapture, OpenCapture
from lightning_rlprof.loaders.ascend.kernels import place_tasks
from lightning_rlprof.loaders.ascend.table_reader import Cells, Frame, TableReader, decode
from lightning_rlprof.loaders.ascend.tasks import (
    Tasks,
    database_calls,
    database_queue,
    enqueuing_calls,
    find_near,
    hardware_lanes,
    lane_devices,
    trace_calls,
    trace_queue,
)
from lightning_rlprof.loaders.ascend.trace_view import COPIES, RowKind, read_trace_view
from lightning_rlprof.loaders.ascend.units import plausible
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, Kernels, distinct
from lightning_rlprof.tables.table import Column

_COLUMNS = (
    Column("device", "count"),
    Column("stream", "count"),
    Column("kind", "text"),
    Column("bytes", "count", "bytes"),
    Column("start", "time", "ns"),
    Column("duration", "duration", "ns"),
    Column("stage", "text"),
    Column("step", "count"),
    Column("launch", "time", "ns"),
    Column("launch duration", "duration", "ns"),
    Column("thread", "count"),
)
_TABLE, _INFO, _OPERATIONS = "TASK", "MEMCPY_INFO", "ENUM_MEMCPY_OPERATION"
_TIMES = ("startNs", "endNs", "deviceId", "streamId", "connectionId")
# Tasks of kernels and collectives; some of them have the type of a copy.
_OTHERS = ("COMPUTE_TASK_INFO", "COMMUNICATION_TASK_INFO")
_NO_STREAM = 2**32 - 1
# CANN's names of directions; managed memory and "other" have none.
_DIRECTIONS = {
    "host to host": "HtoH",
    "host to device": "HtoD",
    "host to device ex": "HtoD",
    "device to host": "DtoH",
    "device to host ex": "DtoH",
    "device to device": "DtoD",
    "addr device to device": "DtoD",
}
# The first copies between devices, the second from or to a host.
_ENGINES = {"SDMA_SQE": "DtoD", "PCIE_DMA_SQE": "PCIe"}


class _Copies(NamedTuple):
    """Copies by start: tasks, their engine, CANN's name of the direction, and bytes."""

    tasks: Tasks
    engine: Coded
    direction: Coded
    size: Int64s


def copies_reader(
    marked: Callable[[OpenCapture], MarkedCapture],
    fill: Callable[[MarkedCapture, Kernels], Kernels],
) -> TableReader:
    """Return the reader of the table of copies, without those inside collectives.

    ``kind`` is ``HtoD``, ``DtoH``, ``DtoD`` or ``HtoH``, and ``PCIe`` if only the engine is known.
    CANN records direction and ``bytes`` only together with the calls of its runtime. Without them
    a database has neither, and a trace the engine alone.

    Args:
        marked: Returns the ranges of a capture.
        fill: Adds stage and step if the capture marks neither; times are since 1970.
    """

    def read(opened: OpenCapture) -> tuple[Frame, list[str]]:
        copies, problems = (
            (_from_database(opened), []) if _in_database(opened) else _from_trace(opened)
        )
        capture = marked(opened)
        kernels, remarks = place_tasks(
            copies.tasks, capture.ranges, opened.rank, opened.capture.window
        )
        if len(copies.size):
            problems = [*problems, *(text.replace("kernels", "copies") for text in remarks)]
        return _frame(opened, copies, fill(capture, kernels)), problems

    return TableReader(
        _COLUMNS,
        lambda opened: _in_database(opened) or opened.trace is not None,
        read,
    )


def _in_database(opened: OpenCapture) -> bool:
    return opened.has(_TABLE, "taskType")


def _from_database(opened: OpenCapture) -> _Copies:
    database: Any = opened.database
    rows = database.numbers(_TABLE, *_TIMES, "globalTaskId", "taskType")
    code, types = decode(database, rows["taskType"])
    keep = np.isin(code, [at for at, text in enumerate(types) if text in COPIES])
    number = rows["globalTaskId"]
    for table in _OTHERS:
        others = database.numbers(table, "globalTaskId")["globalTaskId"]
        keep &= (number == UNKNOWN) | ~np.isin(number, others)
    at = _by_start(keep, rows["startNs"], rows["endNs"])
    start, end, device, stream, connection = (rows[name][at] for name in _TIMES)
    info = database.numbers(_INFO, "globalTaskId", "size", "memcpyOperation")
    described = find_near(info["globalTaskId"], number[at], slack=0)
    size, operation = (
        np.append(info[name], UNKNOWN)[described] for name in ("size", "memcpyOperation")
    )
    direction = decode(database, operation, _OPERATIONS, "name")
    stream = np.where(stream == _NO_STREAM, UNKNOWN, stream)
    engine = distinct(code[at], types)
    unknown = np.full(len(at), UNKNOWN)
    torch, cann = database_calls(database, connection, start)
    calls = (enqueuing_calls(torch, cann, database_queue(database)), cann)
    tasks = Tasks(start, end, device, stream, engine, unknown, *calls, [])
    return _Copies(tasks, engine, direction, np.where(size >= 0, size, UNKNOWN))


def _from_trace(opened: OpenCapture) -> tuple[_Copies, list[str]]:
    wanted = (RowKind.COPIES, RowKind.FLOWS, RowKind.QUEUE)
    view = read_trace_view(opened.trace, *wanted)  # type: ignore[arg-type]
    rows = view.tables[RowKind.COPIES]
    keep = np.isin(rows["lane"], hardware_lanes(view))
    at = _by_start(keep, rows["start_ns"], rows["end_ns"])
    rows = {name: column[at] for name, column in rows.items()}
    start, end = rows["start_ns"], rows["end_ns"]
    engine = distinct(rows["kind"], view.names)
    stream = np.where(rows["stream"] < 0, UNKNOWN, rows["stream"])
    device = lane_devices(view)[rows["lane"]]
    torch, cann = trace_calls(view, start)
    calls = (enqueuing_calls(torch, cann, trace_queue(view)), cann)
    tasks = Tasks(start, end, device, stream, engine, np.full(len(at), UNKNOWN), *calls, [])
    copies = _Copies(tasks, engine, distinct(rows["direction"], view.names), rows["bytes"])
    return copies, view.problems


def _by_start(keep: npt.NDArray[np.bool_], start: Int64s, end: Int64s) -> Int64s:
    """Return the rows to keep by start, without those with impossible times."""
    ordered = (start > 0) & (end >= start)
    rows = np.flatnonzero(keep & plausible(start, np.where(ordered, end - start, UNKNOWN)))
    found: Int64s = rows[np.argsort(start[rows], kind="stable")]
    return found


def _frame(opened: OpenCapture, copies: _Copies, kernels: Kernels) -> Frame:
    frame: dict[str, Cells] = {
        "device": np.where(kernels.device == UNKNOWN, opened.device, kernels.device),
        "stream": kernels.stream,
        "kind": _kinds(copies),
        "bytes": copies.size,
        "start": kernels.start_ns,
        "duration": kernels.end_ns - kernels.start_ns,
        "stage": kernels.stage,
        "step": np.where(kernels.step > 0, kernels.step, UNKNOWN),
    }
    calls = {
        "launch": kernels.launch_ns,
        "launch duration": kernels.call_ns,
        "thread": kernels.thread,
    }
    return frame | {name: column for name, column in calls.items() if column is not None}


def _kinds(copies: _Copies) -> Coded:
    """Return the direction of each copy by CANN's name, else by the engine."""
    kinds = [*dict.fromkeys((*_DIRECTIONS.values(), *_ENGINES.values()))]
    by_name, by_engine = (
        np.array([*(kinds.index(words[text]) if text in words else -1 for text in texts), -1])[code]
        for (code, texts), words in ((copies.direction, _DIRECTIONS), (copies.engine, _ENGINES))
    )
    return distinct(np.where(by_name < 0, by_engine, by_name), kinds)
