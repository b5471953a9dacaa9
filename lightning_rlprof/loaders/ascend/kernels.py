"""Kernels, collectives and copies of one Ascend capture, with the stage and step of each."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.loaders.ascend.capture import (
    Frame,
    OpenCapture,
    TableReader,
    coded_texts,
    texts_of,
)
from lightning_rlprof.loaders.ascend.mstx import STRINGS, Ranges
from lightning_rlprof.loaders.ascend.tasks import (
    DATABASE_TASK,
    Calls,
    Tasks,
    by_start,
    database_queue,
    database_tasks,
    hardware_lanes,
    has_kernels,
    read_tasks,
    trace_queue,
    trace_tasks,
    with_enqueuing_calls,
)
from lightning_rlprof.loaders.ascend.trace_view import COPIES, RowKind, TraceView
from lightning_rlprof.loaders.host_calls import NOWHERE, Launches, Stages, stages_at
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.intervals import innermost
from lightning_rlprof.tables.kernels import (
    COLUMNS,
    NPU_COLUMNS,
    UNKNOWN,
    Coded,
    Kernels,
    distinct,
    find,
    matches,
)
from lightning_rlprof.tables.table import Column


class _Places(NamedTuple):
    """What each task belongs to: codes of names, -1 without, and the step, 0 without."""

    stage: Int64s
    step: Int64s
    range: Int64s

    def replaced(self, rows: Mask, other: "_Places") -> "_Places":
        """Return these places, with those of another at some rows."""
        columns = zip(self, other, strict=True)
        return _Places(*(np.where(rows, new, old) for old, new in columns))


def place_tasks(opened: OpenCapture, tasks: Tasks) -> tuple[Kernels, list[str]]:
    """Return tasks by start as kernels with stage, step and range, and remarks on them.

    A task belongs to the ranges around its launch. These are the ranges of the launching thread,
    or, if it marks none, of the training thread. Without a launch, a task belongs to the ranges
    that went through a stream and were open on the device when it ran. Without those, it belongs
    to the ranges that the host was in. Times are since 1970.

    Without a range that has a step, the step is the one that torch_npu counts; rlprof sets that
    count. In the capture of a single stage, it is the step of the window. In a run, a capture that
    marks neither stages nor steps and whose window is unknown has no steps: the count of torch_npu
    does not match the run's.

    Raises:
        TraceError: The files cannot be read.
    """
    ranges = opened.timeline.ranges
    place, remarks = _place(tasks, ranges)
    counted = np.maximum(opened.rl_steps(tasks.step), 0)
    if opened.fill is not None and not (opened.capture.window[0] or ranges.has_stages):
        counted = np.zeros_like(counted)
    step = np.where(place.step > 0, place.step, counted)
    launch = tasks.torch.replaced(tasks.torch.time_ns == UNKNOWN, tasks.cann)
    order = np.argsort(tasks.start_ns, kind="stable")
    kernels = Kernels(
        np.full(len(order), opened.rank, np.int64),
        tasks.device[order],
        tasks.stream[order],
        (tasks.name[0][order], tasks.name[1]),
        tasks.start_ns[order],
        tasks.end_ns[order],
        distinct(place.stage[order], ranges.names),
        step[order],
        distinct(place.range[order], ranges.names),
        launch.time_ns[order],
        launch.length_ns[order],
        np.where(launch.time_ns == UNKNOWN, UNKNOWN, launch.thread)[order],
        npu=tasks.at(order).npu,
    )
    empty = [] if len(order) else ["this capture has no kernels; level0 and above record them"]
    return kernels, [*tasks.remarks, *remarks, *empty]


def task_frame(opened: OpenCapture, tasks: Tasks) -> tuple[dict[str, Any], list[str]]:
    """Return tasks as columns of the table of kernels, and remarks on them."""
    kernels, remarks = place_tasks(opened, tasks)
    if opened.fill is not None:
        kernels = opened.fill(kernels)
    return {
        "device": kernels.device,
        "stream": kernels.stream,
        "kernel": kernels.name,
        "start": kernels.start_ns,
        "duration": kernels.end_ns - kernels.start_ns,
        "stage": kernels.stage,
        "step": np.where(kernels.step > 0, kernels.step, UNKNOWN),
        "range": kernels.range,
        "launch": kernels.launch_ns,
        "launch duration": kernels.call_ns,
        "thread": kernels.thread,
        **kernels.npu,
    }, remarks


def columns_named(*names: str) -> list[Column]:
    """Return columns of the table of kernels."""
    known = {column.name: column for column in COLUMNS}
    return [known[name] for name in names]


KERNELS = TableReader(
    (*COLUMNS[1:], *NPU_COLUMNS), has_kernels, lambda opened: task_frame(opened, read_tasks(opened))
)
"""Kernels and collectives with the stage, step and range of each, and what CANN says of it."""


def _place(tasks: Tasks, ranges: Ranges) -> tuple[_Places, list[str]]:
    none = np.full(len(tasks.start_ns), -1)
    place = _Places(none, np.zeros_like(none), none)
    if not len(ranges.start_ns):
        return place, []
    calls = _attributing_calls(tasks, ranges)
    lost = calls.time_ns == UNKNOWN
    around, borrowed = _around(ranges, ranges.stages(), calls.time_ns, calls.thread)
    place = place.replaced(~lost, around)
    by_device = np.zeros_like(lost)
    on_device = ranges.device_start_ns != UNKNOWN
    if on_device.any():
        found, _ = _around(*_device_ranges(ranges, on_device), tasks.start_ns, np.zeros_like(none))
        by_device = lost & (found.range >= 0)
        place, lost = place.replaced(by_device, found), lost & ~by_device
    found, _ = _around(ranges, ranges.stages(), tasks.start_ns, none)
    by_time = lost & (found.stage >= 0)
    place = place.replaced(by_time, found)
    texts = [
        (by_device, "kernels have no recorded launch: assigned to the range on the device"),
        (by_time, "kernels have no recorded launch: assigned to the host's stage when they ran"),
        (lost & ~by_time, "kernels have no recorded launch: their stage may be unknown"),
        (
            borrowed & (calls.time_ns != UNKNOWN),
            "kernels were launched by threads without ranges, such as autograd's: assigned to the "
            "training thread's stage",
        ),
    ]
    return place, [f"{count} {text}" for rows, text in texts if (count := np.count_nonzero(rows))]


def _attributing_calls(tasks: Tasks, ranges: Ranges) -> Calls:
    """Choose the call that is used for attribution.

    torch_npu launches from a queue, later and on another thread. Ranges that went through a stream
    are marked on that thread, all others on the one that called torch. So a call of CANN on a
    thread with ranges comes first, then torch's operator, then CANN's call.
    """
    marking = np.isin(tasks.cann.thread, ranges.stages().thread)
    return tasks.torch.replaced(marking | (tasks.torch.time_ns == UNKNOWN), tasks.cann)


def _around(
    ranges: Ranges, stages: Stages, time_ns: Int64s, thread: Int64s
) -> tuple[_Places, Mask]:
    """Return the ranges around each call, and whether they are another thread's."""
    process = np.where(time_ns == UNKNOWN, NOWHERE, 0)
    found = stages_at(stages, Launches(process, thread, time_ns))
    columns = (ranges.thread, ranges.start_ns, ranges.end_ns)
    inner = innermost(*columns, thread, time_ns)
    borrowed = innermost(*columns, found.thread, time_ns)
    name = np.append(ranges.name, -1)[np.where(inner < 0, borrowed, inner)]
    return _Places(found.stage, found.step, name), found.lent


def _device_ranges(ranges: Ranges, rows: Mask) -> tuple[Ranges, Stages]:
    """Return ranges with their times on the device, all on one lane."""
    lane = np.zeros(np.count_nonzero(rows), np.int64)
    columns = (ranges.kind[rows], ranges.name[rows], ranges.step[rows])
    times = (ranges.device_start_ns[rows], ranges.device_end_ns[rows])
    placed = Ranges(lane, *times, columns[1], ranges.names, columns[0], columns[2], *times, [])
    return placed, Stages(lane, lane, *columns, *times)


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


def _copies(opened: OpenCapture) -> tuple[Frame, list[str]]:
    """Read copies by start.

    ``kind`` is ``HtoD``, ``DtoH``, ``DtoD`` or ``HtoH``, and ``PCIe`` if only the engine is known.
    CANN records direction and ``bytes`` only together with the calls of its runtime. Without them
    a database has neither, and a trace the engine alone.
    """
    if opened.database is not None:
        tasks, direction, size = _database_copies(opened.database)
    else:
        view = opened.read_trace(RowKind.COPIES, RowKind.FLOWS, RowKind.QUEUE)
        tasks, direction, size = _trace_copies(view)
    frame, remarks = task_frame(opened, tasks)
    if not len(size):  # the remark is on kernels
        remarks = tasks.remarks
    both = zip(texts_of(direction), texts_of(tasks.name), strict=True)
    kinds = [_DIRECTIONS.get(name) or _ENGINES.get(engine, "") for name, engine in both]
    own = {"kind": coded_texts(kinds), "bytes": size}
    return {**frame, **own}, [type(text)(text.replace("kernels", "copies")) for text in remarks]


def _database_copies(database: SqliteTables) -> tuple[Tasks, Coded, Int64s]:
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
    return tasks, direction, np.where(size >= 0, size, UNKNOWN)


def _trace_copies(view: TraceView) -> tuple[Tasks, Coded, Int64s]:
    rows = view.tables[RowKind.COPIES]
    keep = np.isin(rows["lane"], hardware_lanes(view))
    rows = {name: column[keep] for name, column in rows.items()}
    rows = by_start(rows, rows["start_ns"], rows["end_ns"])
    tasks = replace(trace_tasks(view, {**rows, "name": rows["task"]}), remarks=view.problems)
    tasks = with_enqueuing_calls(tasks, trace_queue(view))
    # A trace has the lengths of few calls, so of none.
    torch = tasks.torch._replace(length_ns=np.full(len(rows["bytes"]), UNKNOWN))
    tasks = replace(tasks, torch=torch)
    return tasks, distinct(rows["direction"], view.names), rows["bytes"]


MEMCPY = TableReader(
    (
        *columns_named("device", "stream"),
        Column("kind", "text"),
        Column("bytes", "count", "bytes"),
        *columns_named("start", "duration", "stage", "step"),
        *columns_named("launch", "launch duration", "thread"),
    ),
    lambda opened: opened.has(_TABLE, "taskType") or opened.trace is not None,
    _copies,
)
"""Copies without those inside collectives, with their launches."""
