"""Copies of an Ascend capture between host and device and on the device, and their launches."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lightning_rlprof.loaders.ascend.capture import OpenCapture
from lightning_rlprof.loaders.ascend.kernels import task_frame
from lightning_rlprof.loaders.ascend.mstx import STRINGS
from lightning_rlprof.loaders.ascend.table_reader import Frame, TableReader, coded_texts, texts_of
from lightning_rlprof.loaders.ascend.tasks import (
    DATABASE_TASK,
    Tasks,
    by_start,
    database_queue,
    database_tasks,
    hardware_lanes,
    trace_queue,
    trace_tasks,
    with_enqueuing_calls,
)
from lightning_rlprof.loaders.ascend.trace_view import COPIES, RowKind, TraceView
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, distinct, find, matches
from lightning_rlprof.tables.table import Column

_TABLE, _INFO, _OPERATIONS = "TASK", "MEMCPY_INFO", "ENUM_MEMCPY_OPERATION"
# Tasks of kernels and collectives; some of them have the type of a copy.
_OTHERS = ("COMPUTE_TASK_INFO", "COMMUNICATION_TASK_INFO")
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
    """Copies: tasks named by their engine, CANN's name of the direction, and bytes."""

    tasks: Tasks
    direction: Coded
    size: Int64s


def _read(opened: OpenCapture) -> tuple[Frame, list[str]]:
    """Read copies by start.

    ``kind`` is ``HtoD``, ``DtoH``, ``DtoD`` or ``HtoH``, and ``PCIe`` if only the engine is known.
    CANN records direction and ``bytes`` only together with the calls of its runtime. Without them
    a database has neither, and a trace the engine alone.
    """
    if opened.database is not None:
        copies = _from_database(opened.database)
    else:
        copies = _from_trace(opened.read_trace(RowKind.COPIES, RowKind.FLOWS, RowKind.QUEUE))
    frame, remarks = task_frame(opened, copies.tasks)
    if not len(copies.size):  # the remark is on kernels
        remarks = copies.tasks.remarks
    own = {"kind": _kinds(copies), "bytes": copies.size}
    return {**frame, **own}, [text.replace("kernels", "copies") for text in remarks]


def _from_database(database: SqliteTables) -> _Copies:
    rows = database.numbers(_TABLE, *DATABASE_TASK, "globalTaskId", "taskType")
    keep = matches(database.decode(rows["taskType"], STRINGS), COPIES.__contains__)
    for table in _OTHERS:
        others = database.numbers(table, "globalTaskId")["globalTaskId"]
        keep &= (rows["globalTaskId"] == UNKNOWN) | ~np.isin(rows["globalTaskId"], others)
    rows = {name: column[keep] for name, column in rows.items()}
    rows = by_start(rows, rows["startNs"], rows["endNs"])
    info = database.numbers(_INFO, "globalTaskId", "size", "memcpyOperation")
    described = find(info["globalTaskId"], rows["globalTaskId"])
    size, operation = (
        np.append(info[name], UNKNOWN)[described] for name in ("size", "memcpyOperation")
    )
    direction = database.decode(operation, _OPERATIONS, "name")
    tasks = database_tasks(database, {**rows, "name": rows["taskType"]})
    tasks = with_enqueuing_calls(tasks, database_queue(database))
    return _Copies(tasks, direction, np.where(size >= 0, size, UNKNOWN))


def _from_trace(view: TraceView) -> _Copies:
    rows = view.tables[RowKind.COPIES]
    keep = np.isin(rows["lane"], hardware_lanes(view))
    rows = {name: column[keep] for name, column in rows.items()}
    rows = by_start(rows, rows["start_ns"], rows["end_ns"])
    tasks = replace(trace_tasks(view, {**rows, "name": rows["task"]}), remarks=view.problems)
    tasks = with_enqueuing_calls(tasks, trace_queue(view))
    # A trace has the lengths of few calls, so of none.
    torch = tasks.torch._replace(length_ns=np.full(len(rows["bytes"]), UNKNOWN))
    tasks = replace(tasks, torch=torch)
    return _Copies(tasks, distinct(rows["direction"], view.names), rows["bytes"])


def _kinds(copies: _Copies) -> Coded:
    """Return the direction of each copy by CANN's name, else by the engine."""
    both = zip(texts_of(copies.direction), texts_of(copies.tasks.name), strict=True)
    return coded_texts([_DIRECTIONS.get(name) or _ENGINES.get(engine, "") for name, engine in both])


MEMCPY = TableReader(
    (
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
    ),
    lambda opened: opened.has(_TABLE, "taskType") or opened.trace is not None,
    _read,
)
"""Copies without those inside collectives, with their launches."""
