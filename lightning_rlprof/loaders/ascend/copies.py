"""Copies of an Ascend capture, between host and device and on a device, with what launched them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.ascend.capture import Recorded
from lightning_rlprof.loaders.ascend.kernels import kernels_of
from lightning_rlprof.loaders.ascend.table_parts import Cells, Frame, Opened, Part, coded
from lightning_rlprof.loaders.ascend.tasks import (
    Tasks,
    database_calls,
    database_queue,
    handed_over,
    hardware_lanes,
    lane_devices,
    places,
    trace_calls,
    trace_queue,
)
from lightning_rlprof.loaders.ascend.trace_view import COPIES, Kept, read_trace_view
from lightning_rlprof.loaders.ascend.units import plausible
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
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
# Tasks that are parts of others, whatever their type is.
_OTHERS = ("COMPUTE_TASK_INFO", "COMMUNICATION_TASK_INFO")
_NO_STREAM = 2**32 - 1
# As CANN spells from where to where; managed memory and "other" tell neither.
_DIRECTIONS = {
    "host to host": "HtoH",
    "host to device": "HtoD",
    "host to device ex": "HtoD",
    "device to host": "DtoH",
    "device to host ex": "DtoH",
    "device to device": "DtoD",
    "addr device to device": "DtoD",
}
# The first copies between memories of devices, the other one from a host or to it.
_ENGINES = {"SDMA_SQE": "DtoD", "PCIE_DMA_SQE": "PCIe"}


class _Told(NamedTuple):
    """Copies by start: what ran, what engine did, CANN's word for the direction, and bytes."""

    tasks: Tasks
    engine: Coded
    direction: Coded
    size: Int64s


def copies_part(
    recorded: Callable[[Opened], Recorded], filled: Callable[[Recorded, Kernels], Kernels]
) -> Part:
    """Return the table of copies, without those that are parts of a collective.

    ``kind`` is ``HtoD``, ``DtoH``, ``DtoD`` or ``HtoH``, and ``PCIe`` where it went that way and
    CANN does not say from where to where; the database says neither, nor are there ``bytes``,
    where CANN was not asked for the calls of its runtime.

    Args:
        recorded: Gives the ranges of a capture.
        filled: Adds stage and step where the capture knows neither; times are since 1970.
    """

    def read(opened: Opened) -> tuple[Frame, list[str]]:
        told, problems = _told(opened)
        capture = recorded(opened)
        kernels, remarks = kernels_of(
            told.tasks, capture.ranges, opened.rank, opened.capture.window
        )
        said = [text.replace("kernels", "copies") for text in remarks] if len(told.size) else []
        return _frame(opened, told, filled(capture, kernels)), [*problems, *said]

    return Part(_COLUMNS, _has, read, frozenset({"start", "launch"}))


def _has(opened: Opened) -> bool:
    return opened.has(_TABLE, "taskType") or opened.capture.trace is not None


def _told(opened: Opened) -> tuple[_Told, list[str]]:
    if opened.has(_TABLE, "taskType"):
        return _from_database(opened.database), []  # type: ignore[arg-type]
    return _from_trace(opened)


def _from_database(database: SqliteTables) -> _Told:
    rows = database.numbers(_TABLE, *_TIMES, "globalTaskId", "taskType")
    code, types = coded(database, rows["taskType"])
    keep = np.isin(code, [at for at, text in enumerate(types) if text in COPIES])
    number = rows["globalTaskId"]
    for table in _OTHERS:
        own = database.numbers(table, "globalTaskId")["globalTaskId"]
        keep &= (number == UNKNOWN) | ~np.isin(number, own)
    at = _in_order(keep, rows["startNs"], rows["endNs"])
    start, end, device, stream, connection = (rows[name][at] for name in _TIMES)
    info = database.numbers(_INFO, "globalTaskId", "size", "memcpyOperation")
    told = places(info["globalTaskId"], number[at], slack=0)
    size, operation = (np.append(info[name], UNKNOWN)[told] for name in ("size", "memcpyOperation"))
    direction = coded(database, operation, _OPERATIONS, "name")
    stream = np.where(stream == _NO_STREAM, UNKNOWN, stream)
    engine = distinct(code[at], types)
    unknown = np.full(len(at), UNKNOWN)
    torch, cann = database_calls(database, connection, start)
    called = (handed_over(torch, cann, database_queue(database)), cann)
    tasks = Tasks(start, end, device, stream, engine, unknown, *called, [])
    return _Told(tasks, engine, direction, np.where(size >= 0, size, UNKNOWN))


def _from_trace(opened: Opened) -> tuple[_Told, list[str]]:
    wanted = (Kept.COPIES, Kept.FLOWS, Kept.QUEUE)
    view = read_trace_view(opened.capture.trace, *wanted)  # type: ignore[arg-type]
    rows = view.tables[Kept.COPIES]
    keep = np.isin(rows["lane"], hardware_lanes(view))
    at = _in_order(keep, rows["start_ns"], rows["end_ns"])
    rows = {name: column[at] for name, column in rows.items()}
    engine = distinct(rows["kind"], view.names)
    stream = np.where(rows["stream"] < 0, UNKNOWN, rows["stream"])
    device = lane_devices(view)[rows["lane"]]
    unknown = np.full(len(at), UNKNOWN)
    torch, cann = trace_calls(view, rows["start_ns"])
    called = (handed_over(torch, cann, trace_queue(view)), cann)
    tasks = Tasks(rows["start_ns"], rows["end_ns"], device, stream, engine, unknown, *called, [])
    told = _Told(tasks, engine, distinct(rows["direction"], view.names), rows["bytes"])
    return told, view.problems


def _in_order(keep: npt.NDArray[np.bool_], start: Int64s, end: Int64s) -> Int64s:
    """Return some rows by start, without those whose times cannot be true."""
    ordered = (start > 0) & (end >= start)
    rows = np.flatnonzero(keep & plausible(start, np.where(ordered, end - start, UNKNOWN)))
    found: Int64s = rows[np.argsort(start[rows], kind="stable")]
    return found


def _frame(opened: Opened, told: _Told, kernels: Kernels) -> Frame:
    frame: dict[str, Cells] = {
        "device": np.where(kernels.device == UNKNOWN, opened.device, kernels.device),
        "stream": kernels.stream,
        "kind": _kinds(told),
        "bytes": told.size,
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


def _kinds(told: _Told) -> Coded:
    """Return from where to where each copies, by CANN's word, else by the engine."""
    kinds = [*dict.fromkeys((*_DIRECTIONS.values(), *_ENGINES.values()))]
    by_word, by_engine = (
        np.array([*(kinds.index(words[text]) if text in words else -1 for text in texts), -1])[code]
        for (code, texts), words in ((told.direction, _DIRECTIONS), (told.engine, _ENGINES))
    )
    return distinct(np.where(by_word < 0, by_engine, by_word), kinds)
