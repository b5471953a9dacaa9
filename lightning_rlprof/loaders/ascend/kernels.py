"""Kernels, collectives and copies of one Ascend capture, with launch, stage and step of each.

torch_npu has a queue: one thread puts a task in, and another one takes it out and launches it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import (
    KERNEL_SHEET,
    Capture,
    Frame,
    TableReader,
    coded_texts,
    texts_of,
)
from lightning_rlprof.loaders.ascend.csv_sheets import (
    Convert,
    microseconds,
    read_sheet,
    whole,
)
from lightning_rlprof.loaders.ascend.mstx import STRINGS, THREAD_BITS, Ranges
from lightning_rlprof.loaders.ascend.trace_view import (
    COMMUNICATION,
    COPIES,
    FlowKind,
    RowKind,
    TraceView,
)
from lightning_rlprof.loaders.chrome_events import MAX_TIME
from lightning_rlprof.loaders.host_calls import (
    NOWHERE,
    Launches,
    Stages,
    columns_named,
    counted,
    launch_remarks,
    stages_at,
)
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.event_times import plausible
from lightning_rlprof.tables.intervals import innermost
from lightning_rlprof.tables.kernels import (
    COLUMNS,
    NPU_COLUMNS,
    UNKNOWN,
    Coded,
    distinct,
    find,
    matches,
)
from lightning_rlprof.tables.table import Loss, with_name

_HARDWARE = "Ascend Hardware"
_Columns = TypeVar("_Columns", bound=tuple[Any, ...])

# Tasks of these types run an operator's code; other tasks copy, wait or signal.
_COMPUTE_TYPES = ("AI_", "AIV", "MIX", "KERNEL_", "DSA_", "DPU", "CCU")
DATABASE_TASK = ("startNs", "endNs", "deviceId", "streamId", "connectionId")
"""Columns of a database's tasks."""

_TASK = (*DATABASE_TASK, "globalTaskId")
_NO_STREAM = 2**32 - 1
_API, _CONNECTIONS = "PYTORCH_API", "CONNECTION_IDS"
_API_COLUMNS = ("startNs", "endNs", "globalTid", "connectionId")

# The keys are headings; later versions of CANN call blocks "Block Num".
_NPU_CELLS: Mapping[str, Convert | None] = {
    **dict.fromkeys(("type", "inputshapes")),
    **dict.fromkeys(("blockdim", "blocknum"), whole),
    **dict.fromkeys(("aicoretime(us)", "aivtime(us)"), microseconds),
}
_NPU_INFO = ("opType", "inputShapes", "blockDim", "blockNum")
_CORE_TIMES = {"aicore time": "aic_total_time", "vector time": "aiv_total_time"}
_COUNTERS = "TASK_PMU_INFO"
_TABLE, _INFO, _OPERATIONS = "TASK", "MEMCPY_INFO", "ENUM_MEMCPY_OPERATION"

# These tables contain kernels and collectives; some of their tasks have the type of a copy.
_OTHERS = ("COMPUTE_TASK_INFO", "COMMUNICATION_TASK_INFO")

# CANN names directions like this; managed memory and "other" have none.
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


class Calls(NamedTuple):
    """When, by which thread and for how long each task was launched.

    Unknown times and lengths are `UNKNOWN`, unknown threads `NOWHERE`. Traces have no lengths, as
    their arrows have only the beginning of a call.
    """

    time_ns: Int64s
    thread: Int64s
    length_ns: Int64s

    @classmethod
    def unknown(cls, count: int) -> "Calls":
        """Return as many unknown calls."""
        return cls(np.full(count, UNKNOWN), np.full(count, NOWHERE), np.full(count, UNKNOWN))

    def at(self, rows: Int64s) -> "Calls":
        """Return the calls at some rows, unknown ones for -1."""
        nothing = Calls.unknown(1)
        return Calls(*(np.append(*columns)[rows] for columns in zip(self, nothing, strict=True)))


@dataclass(frozen=True, eq=False)
class Tasks:
    """Kernels and collectives as columns; times are nanoseconds since 1970.

    Attributes:
        start_ns: Start on the device.
        end_ns: End on the device.
        device: Number of the device, `UNKNOWN` if it is not recorded.
        stream: Stream, `UNKNOWN` for collectives: they use several.
        name: Full name.
        step: Step as torch_npu counts it, `UNKNOWN` without.
        torch: Operators of torch that launched them.
        cann: Calls of CANN that launched them, on torch_npu's launching thread if it has a queue.
        remarks: What was lost.
        npu: Those of `NPU_COLUMNS` that were recorded, by name.
    """

    start_ns: Int64s
    end_ns: Int64s
    device: Int64s
    stream: Int64s
    name: Coded
    step: Int64s
    torch: Calls
    cann: Calls
    remarks: list[str]
    npu: Mapping[str, Any] = field(default_factory=dict)

    def at(self, rows: Int64s) -> "Tasks":
        """Return the tasks at some rows."""
        numbers = ("start_ns", "end_ns", "device", "stream", "step")
        own: dict[str, Any] = {name: getattr(self, name)[rows] for name in numbers}
        own |= {"torch": self.torch.at(rows), "cann": self.cann.at(rows)}
        npu = {name: _rows(column, rows) for name, column in self.npu.items()}
        return replace(self, name=_rows(self.name, rows), npu=npu, **own)


def _replaced(own: _Columns, rows: Mask, other: _Columns) -> _Columns:
    """Return columns with those of another at some rows."""
    return type(own)(*(np.where(rows, new, old) for old, new in zip(own, other, strict=True)))


def _rows(column: Any, rows: Int64s | Mask) -> Any:
    return (column[0][rows], column[1]) if isinstance(column, tuple) else column[rows]


def is_collective(name: str) -> bool:
    """Return whether a task with this name is a collective of HCCL."""
    return name.startswith(("hcom", "Hccl", "hccl"))


def has_kernels(opened: Capture) -> bool:
    """Return whether a capture may have kernels."""
    tables = any(map(opened.has, ("COMPUTE_TASK_INFO", "COMMUNICATION_OP", _TABLE)))
    return tables or opened.file(KERNEL_SHEET) is not None or opened.trace is not None


def read_tasks(opened: Capture) -> Tasks:
    """Return the kernels and collectives of a capture.

    The text format has them in ``kernel_details.csv`` from level1 on, and in the trace.

    Raises:
        TraceError: The files cannot be read.
    """
    if opened.database is not None:
        return _database_tasks(opened.database)
    sheet, view, remarks = opened.file(KERNEL_SHEET), None, []
    if opened.trace is not None:
        view = opened.read_trace(RowKind.DEVICE, RowKind.FLOWS)
        remarks += view.problems
    if sheet is not None:
        tasks = _sheet_tasks(sheet, view)
        remarks += tasks.remarks
        if view is None:
            remarks.append("launches are unknown: there is no trace_view.json")
        if view is None or len(tasks.start_ns):
            return replace(tasks, remarks=remarks)
    if view is None:
        raise TraceError(f"{opened.path}: contains no kernels")
    return replace(_trace_kernels(view), remarks=remarks)


def _sheet_tasks(path: Path, view: TraceView | None) -> Tasks:
    """Return the rows of ``kernel_details.csv``, with the launches of the trace."""
    times = dict.fromkeys(("starttime(us)", "duration(us)"), microseconds)
    numbers = dict.fromkeys(("streamid", "stepid", "deviceid"), whole)
    cells = {"name": None, **times, **numbers, **_NPU_CELLS}
    sheet = read_sheet(path, cells, needed=("name", *times))
    start, length = sheet.number("starttime(us)"), sheet.number("duration(us)")
    sound = plausible(start, start + length)
    start, stream = start[sound], sheet.number("streamid")[sound]
    device = sheet.number("deviceid")[sound]
    torch = cann = Calls.unknown(len(start))
    beside = 0
    if view is not None:
        torch, cann = trace_calls(view, start)
        # The trace has streams and devices, which a sheet of level0 lacks.
        traced = _trace_kernels(view)
        same = _find_near(traced.start_ns, start)
        if len(start):  # Without any row, all kernels are read from the trace.
            beside = int(np.count_nonzero(_find_near(start, traced.start_ns) < 0))
        stream = np.where(stream == UNKNOWN, np.append(traced.stream, UNKNOWN)[same], stream)
        device = np.where(device == UNKNOWN, np.append(traced.device, UNKNOWN)[same], device)
    codes, texts = sheet.text("name")
    lost = int(np.count_nonzero(~sound))
    remarks = [with_name(path.name, text) for text in sheet.problems]
    remarks += _lost(lost, f"{path.name}: skipped {{}} rows with impossible times")
    remarks += _lost(beside, f"{path.name}: {{}} kernels of the trace have no row")
    step = sheet.number("stepid")[sound]
    columns = (device, stream, (codes[sound], texts), step, torch, cann, remarks)
    old, new = sheet.number("blockdim"), sheet.number("blocknum")
    npu = _recorded(
        {
            "op type": sheet.text("type"),
            "input shapes": sheet.text("inputshapes"),
            "block dim": np.where(old == UNKNOWN, new, old),
            "aicore time": sheet.number("aicoretime(us)"),
            "vector time": sheet.number("aivtime(us)"),
        }
    )
    npu = {name: _rows(column, sound) for name, column in npu.items()}
    return Tasks(start, start + length[sound], *columns, npu)


def _lost(count: int, text: str) -> list[str]:
    """Return what is lost, if it is any; the text has a place for the count."""
    return [Loss(text.format(count), rows=count)] if count else []


def _recorded(cells: dict[str, Any]) -> dict[str, Any]:
    """Return those of `NPU_COLUMNS` in which any row is known; shapes without quotes."""
    codes, shapes = cells["input shapes"]
    cells["input shapes"] = distinct(codes, [text.strip('"') for text in shapes])
    return {
        name: column
        for name, column in cells.items()
        if (column[0] >= 0 if isinstance(column, tuple) else column != UNKNOWN).any()
    }


def _trace_kernels(view: TraceView) -> Tasks:
    rows = view.tables[RowKind.DEVICE]
    computes = matches((rows["task"], view.names), lambda text: text.startswith(_COMPUTE_TYPES))
    kernel = computes & np.isin(rows["lane"], hardware_lanes(view))
    keep = kernel | np.isin(rows["lane"], collective_lanes(view))
    return trace_tasks(view, {name: column[keep] for name, column in rows.items()})


def trace_tasks(view: TraceView, rows: Mapping[str, Int64s]) -> Tasks:
    """Return rows of a trace that was read for its arrows, too, as tasks with their launches."""
    unknown = np.full(len(rows["start_ns"]), UNKNOWN)
    return Tasks(
        rows["start_ns"],
        rows["end_ns"],
        lane_devices(view)[rows["lane"]],
        rows.get("stream", unknown),
        distinct(rows["name"], view.names),
        unknown,
        *trace_calls(view, rows["start_ns"]),
        [],
    )


def hardware_lanes(view: TraceView) -> Int64s:
    """Return the lanes of the device's streams, and those without a name in a truncated trace."""
    return view.lanes_of(_HARDWARE, None)


def collective_lanes(view: TraceView) -> Int64s:
    """Return the lanes with one row per collective, without those of its parts."""
    lanes = view.lanes_of(*COMMUNICATION).tolist()
    return np.array([lane for lane in lanes if (view.thread(lane) or "").startswith("Group")], int)


def lane_devices(view: TraceView) -> Int64s:
    """Return the device of each lane by its label, else by the number of its process.

    CANN's exporter numbers processes ``pid << 10 | layer << 5 | device``. The lowest bits are used
    if the upper part is a process that the trace names.
    """
    pids = {pid for _, pid, _ in view.metadata}
    found = []
    for lane, (pid, _) in enumerate(view.lanes):
        number = view.label(lane).partition(" ")[2]
        if number.isdecimal() and len(number) < 8:
            found.append(int(number))
        else:
            encoded = isinstance(pid, int) and pid >> 10 in pids and pid >= 1 << 10
            found.append(int(pid) & 31 if encoded else UNKNOWN)  # type: ignore[arg-type]
    return np.array([*found, UNKNOWN], np.int64)


def trace_calls(view: TraceView, start: Int64s) -> tuple[Calls, Calls]:
    """Follow the arrows from tasks back to operators of torch and calls of CANN."""
    flows, threads = view.tables[RowKind.FLOWS], np.append(view.threads(), NOWHERE)

    def arrows(kind: int) -> tuple[Int64s, Calls]:
        rows = {name: column[flows["kind"] == kind] for name, column in flows.items()}
        no_length = np.full(len(rows["id"]), UNKNOWN)
        return rows["id"], Calls(rows["start_ns"], threads[rows["lane"]], no_length)

    (torch_start, torch), (launched, cann) = arrows(FlowKind.TORCH), arrows(FlowKind.LAUNCH)
    number, ends = arrows(FlowKind.TASK)
    connection = np.append(number, UNKNOWN)[_find_near(ends.time_ns, start)]
    return (
        torch.at(_find_near(torch_start, start)),
        cann.at(find(launched, connection)),
    )


def _find_near(keys: Int64s, values: Int64s) -> Int64s:
    """Return what `find` does; two parts of the toolchain round a nanosecond differently."""
    rows = find(keys, values)
    for off in (-1, 1):
        rows = np.where(rows < 0, find(keys, values + off), rows)
    return rows


def _database_tasks(database: SqliteTables) -> Tasks:
    tasks = database.numbers("TASK", *_TASK)
    compute = database.numbers("COMPUTE_TASK_INFO", "globalTaskId", "name", *_NPU_INFO)
    at = find(compute["globalTaskId"], tasks["globalTaskId"])
    kernels = {name: column[at >= 0] for name, column in tasks.items()}
    kernels |= {name: compute[name][at[at >= 0]] for name in ("name", *_NPU_INFO)}
    kernels |= _core_times(database, kernels["globalTaskId"])
    collectives = database_collectives(database)
    unknown = np.full(len(collectives["name"]), UNKNOWN)
    collectives |= dict.fromkeys((*_NPU_INFO, *_CORE_TIMES), unknown)
    both, names = (kernels, collectives), (*DATABASE_TASK, "name", *_NPU_INFO, *_CORE_TIMES)
    rows = {name: np.concatenate([part[name] for part in both]) for name in names}
    sound = by_start(rows, rows["startNs"], rows["endNs"])
    lost = len(rows["name"]) - len(sound["name"])
    remarks = _lost(lost, "skipped {} tasks with impossible times")
    remarks += _lost(*_without_kernels(database, compute["globalTaskId"], tasks))
    old, new = sound["blockDim"], sound["blockNum"]
    npu = _recorded(
        {
            "op type": database.decode(sound["opType"], STRINGS),
            "input shapes": database.decode(sound["inputShapes"], STRINGS),
            "block dim": np.where(old == UNKNOWN, new, old),
            **{name: sound[name] for name in _CORE_TIMES},
        }
    )
    return replace(database_tasks(database, sound), remarks=remarks, npu=npu)


def _without_kernels(
    database: SqliteTables, described: Int64s, tasks: Mapping[str, Int64s]
) -> tuple[int, str]:
    """Return how many kernels one of two tables lacks that the other one has, and say so."""
    if not len(described):
        types = database.decode(database.numbers(_TABLE, "taskType")["taskType"], STRINGS)
        code = matches(types, lambda text: text.startswith(_COMPUTE_TYPES))
        return int(code.sum()), "kernels are not recorded: COMPUTE_TASK_INFO lacks {} tasks"
    missing = int(np.count_nonzero(find(tasks["globalTaskId"], described) < 0))
    return missing, "{} kernels are left out: TASK lacks their times"


def _core_times(database: SqliteTables, task: Int64s) -> dict[str, Int64s]:
    """Return how long matrix and vector cores were busy in each task; the counters are in ns."""
    rows = database.numbers(_COUNTERS, "globalTaskId", "name")
    value = database.reals(_COUNTERS, "value")["value"]
    column = database.decode(rows["name"], STRINGS)
    found = {}
    for name, counter in _CORE_TIMES.items():
        own = np.flatnonzero(matches(column, counter.__eq__) & (value >= 0) & (value < 2**62))
        at = find(rows["globalTaskId"][own], task)
        found[name] = np.append(np.rint(value[own]).astype(np.int64), UNKNOWN)[at]
    return found


def by_start(rows: Mapping[str, Int64s], start: Int64s, end: Int64s) -> dict[str, Int64s]:
    """Return rows by start, without those with impossible times."""
    sound = np.flatnonzero(plausible(start, end))
    order = sound[np.argsort(start[sound], kind="stable")]
    return {name: column[order] for name, column in rows.items()}


def database_collectives(database: SqliteTables) -> dict[str, Int64s]:
    """Return the collectives of a database as rows for `database_tasks`, with their payload."""
    rows = database.numbers(
        "COMMUNICATION_OP", *DATABASE_TASK, "opName", "groupName", "dataType", "count"
    )
    rows["name"] = rows.pop("opName")
    unknown = rows["deviceId"] == UNKNOWN
    if unknown.any():  # Older versions record no device for collectives, only for their tasks.
        tasks = database.numbers("TASK", "connectionId", "deviceId")
        first = find(tasks["connectionId"], rows["connectionId"][unknown])
        rows["deviceId"][unknown] = np.append(tasks["deviceId"], UNKNOWN)[first]
    return rows


def database_tasks(database: SqliteTables, rows: Mapping[str, Int64s]) -> Tasks:
    """Return rows with the columns `DATABASE_TASK` and ``name`` as tasks with their launches."""
    return Tasks(
        rows["startNs"],
        rows["endNs"],
        rows["deviceId"],
        np.where(rows["streamId"] == _NO_STREAM, UNKNOWN, rows["streamId"]),
        database.decode(rows["name"], STRINGS),
        np.full(len(rows["name"]), UNKNOWN),
        *_database_calls(database, rows["connectionId"], rows["startNs"]),
        [],
    )


def _database_calls(
    database: SqliteTables, connection: Int64s, start: Int64s
) -> tuple[Calls, Calls]:
    calls = database.numbers("CANN_API", *_API_COLUMNS)
    cann = _sound_calls(calls).at(find(calls["connectionId"], connection))
    return _torch_operators(database, connection, start), cann


def _torch_operators(database: SqliteTables, connection: Int64s, start: Int64s) -> Calls:
    """Find torch's operator of each connection, the last one before the task if it has several.

    Old versions number other arrows of torch in the same table, and some numbers collide.
    """
    pairs = database.numbers(_CONNECTIONS, "id", "connectionId")
    if not {"type", "connectionId"} <= database.columns.get(_API, frozenset()):
        return Calls.unknown(len(connection))
    where = "type = 50001 AND connectionId IS NOT NULL"
    calls = database.numbers(_API, *_API_COLUMNS, where=where)
    at = find(calls["connectionId"], pairs["id"])
    number, at = pairs["connectionId"][at >= 0], at[at >= 0]
    order = np.lexsort((calls["startNs"][at], number))
    calls = {name: column[at][order] for name, column in calls.items()}
    return _sound_calls(calls).at(_last_before(number[order], calls["startNs"], connection, start))


def _last_before(numbers: Int64s, times: Int64s, number: Int64s, before: Int64s) -> Int64s:
    """Return the last row of each number before a time, else its first row, -1 without any.

    Rows are sorted by number and time.
    """
    place = np.searchsorted(numbers, number, "right") - 1
    first = np.searchsorted(numbers, number, "left")
    for row in np.flatnonzero(place > first).tolist():
        candidates = times[first[row] : place[row] + 1]
        place[row] = first[row] + max(int(np.searchsorted(candidates, before[row], "right")) - 1, 0)
    return np.where((place >= first) & (number != UNKNOWN), place, -1)


def _sound_calls(calls: Mapping[str, Int64s]) -> Calls:
    """Return the rows of a table of calls, with impossible times as unknown."""
    start, end = calls["startNs"], calls["endNs"]
    begun = (start > 0) & (start < MAX_TIME)
    ended = (start > 0) & (end >= start) & (end < MAX_TIME)
    return Calls(
        np.where(begun, start, UNKNOWN),
        calls["globalTid"] & THREAD_BITS,
        np.where(ended, end - start, UNKNOWN),
    )


class QueueEnd(NamedTuple):
    """Calls at one end of the queue: thread, start, end, and the number of the queued task."""

    thread: Int64s
    start_ns: Int64s
    end_ns: Int64s
    number: Int64s

    def sound(self) -> "QueueEnd":
        """Return the calls with a number and plausible times, by number and start."""
        rows = np.flatnonzero(plausible(self.start_ns, self.end_ns) & (self.number != UNKNOWN))
        rows = rows[np.lexsort((self.start_ns[rows], self.number[rows]))]
        return QueueEnd(*(column[rows] for column in self))


def database_queue(database: SqliteTables) -> tuple[QueueEnd, QueueEnd]:
    """Return the calls that put tasks into the queue, and those that take them out."""
    present = {"type", "name", *_API_COLUMNS} <= database.columns.get(_API, frozenset())
    pairs = database.numbers(_CONNECTIONS, "id", "connectionId")

    def end(word: str) -> QueueEnd:
        named = f"name IN (SELECT id FROM {STRINGS} WHERE value LIKE '{word}%')"
        where = f"type = 50002 AND {named}" if present and STRINGS in database.columns else "0"
        rows = database.numbers(_API, *_API_COLUMNS, where=where)
        at = find(pairs["id"], rows["connectionId"])
        number = np.append(pairs["connectionId"], UNKNOWN)[at]
        thread = rows["globalTid"] & THREAD_BITS
        return QueueEnd(thread, rows["startNs"], rows["endNs"], number).sound()

    return end("enqueue"), end("dequeue")


def trace_queue(view: TraceView) -> tuple[QueueEnd, QueueEnd]:
    """Return the calls that put tasks into the queue, and those that take them out."""
    rows, threads = view.tables[RowKind.QUEUE], view.threads()

    def end(word: str) -> QueueEnd:
        chosen = matches((rows["category"], view.names), lambda text: text == word)
        thread = threads[rows["lane"][chosen]]
        columns = (rows[name][chosen] for name in ("start_ns", "end_ns", "number"))
        return QueueEnd(thread, *columns).sound()

    return end("enqueue"), end("dequeue")


def with_enqueuing_calls(tasks: Tasks, queue: tuple[QueueEnd, QueueEnd]) -> Tasks:
    """Return tasks with the calls that enqueued them in place of unknown operators of torch.

    torch_npu records the operators of kernels, but not those of many copies. Both ends of its
    queue have one number: that of the call around CANN's call, and that of the enqueuing call.
    """
    put, taken = queue
    around = innermost(*taken[:3], tasks.cann.thread, tasks.cann.time_ns)
    number, out = (np.append(of, UNKNOWN)[around] for of in (taken.number, taken.start_ns))
    at = _last_before(put.number, put.start_ns, number, out)
    calls = Calls(put.start_ns, put.thread, put.end_ns - put.start_ns).at(at)
    missing = (tasks.torch.time_ns == UNKNOWN) & (at >= 0) & (calls.time_ns <= out)
    return replace(tasks, torch=_replaced(tasks.torch, missing, calls))


class _Places(NamedTuple):
    """What each task belongs to: codes of names, -1 without, and the step, 0 without."""

    stage: Int64s
    step: Int64s
    range: Int64s


def task_frame(opened: Capture, tasks: Tasks) -> tuple[dict[str, Any], list[str]]:
    """Return tasks by start as columns of the table of kernels, and remarks on them.

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
    tasks = tasks.at(np.argsort(tasks.start_ns, kind="stable"))
    place, remarks = _place(tasks, ranges)
    counted = np.maximum(opened.rl_steps(tasks.step), 0)
    in_run = opened.stages_of_run is not None
    if in_run and not (opened.window[0] or len(ranges.marking.kind)):
        counted = np.zeros_like(counted)
    launch = _replaced(tasks.torch, tasks.torch.time_ns == UNKNOWN, tasks.cann)
    step = np.where(place.step > 0, place.step, counted)
    stage, step = opened.filled(distinct(place.stage, ranges.names), step, launch.time_ns)
    empty = [] if len(step) else ["this capture has no kernels; level0 and above record them"]
    return {
        "device": tasks.device,
        "stream": tasks.stream,
        "kernel": tasks.name,
        "start": tasks.start_ns,
        "duration": tasks.end_ns - tasks.start_ns,
        "stage": stage,
        "step": np.where(step > 0, step, UNKNOWN),
        "range": distinct(place.range, ranges.names),
        "launch": launch.time_ns,
        "launch duration": launch.length_ns,
        "thread": np.where(launch.time_ns == UNKNOWN, UNKNOWN, launch.thread),
        **tasks.npu,
    }, [*tasks.remarks, *remarks, *empty]


def _read_kernels(opened: Capture) -> tuple[Frame, list[str]]:
    problems = opened.timeline.problems  # They come first because they say why nothing can be read.
    frame, remarks = task_frame(opened, read_tasks(opened))
    return frame, remarks if opened.stages_of_run is None else [*problems, *remarks]


KERNELS = TableReader((*COLUMNS[1:], *NPU_COLUMNS), has_kernels, _read_kernels)
"""Kernels and collectives with the stage, step and range of each, and what CANN says of it."""


def _place(tasks: Tasks, ranges: Ranges) -> tuple[_Places, list[str]]:
    none = np.full(len(tasks.start_ns), -1)
    place = _Places(none, np.zeros_like(none), none)
    if not len(ranges.start_ns):
        return place, []
    calls = _attributing_calls(tasks, ranges)
    lost = calls.time_ns == UNKNOWN
    around, borrowed = _around(ranges, ranges.marking, calls.time_ns, calls.thread)
    place = _replaced(place, ~lost, around)
    by_device = np.zeros_like(lost)
    on_device = ranges.device_start_ns != UNKNOWN
    if on_device.any():
        placed = _device_ranges(ranges, on_device)
        found, _ = _around(placed, placed, tasks.start_ns, np.zeros_like(none))
        by_device = lost & (found.range >= 0)
        place, lost = _replaced(place, by_device, found), lost & ~by_device
    found, _ = _around(ranges, ranges.marking, tasks.start_ns, none)
    by_time = lost & (found.stage >= 0)
    place = _replaced(place, by_time, found)
    told = "kernels have no recorded launch: assigned to the"
    return place, [
        *counted(
            (np.count_nonzero(by_device), f"{told} range on the device"),
            (np.count_nonzero(by_time), f"{told} host's stage when they ran"),
        ),
        *launch_remarks(
            "kernels",
            np.count_nonzero(lost & ~by_time),
            np.count_nonzero(borrowed & (calls.time_ns != UNKNOWN)),
        ),
    ]


def _attributing_calls(tasks: Tasks, ranges: Ranges) -> Calls:
    """Choose the call that is used for attribution.

    torch_npu launches from a queue, later and on another thread. Ranges that went through a stream
    are marked on that thread, all others on the one that called torch. So a call of CANN on a
    thread with ranges comes first, then torch's operator, then CANN's call.
    """
    marking = np.isin(tasks.cann.thread, ranges.marking.thread)
    return _replaced(tasks.torch, marking | (tasks.torch.time_ns == UNKNOWN), tasks.cann)


def _around(
    ranges: Stages, stages: Stages, time_ns: Int64s, thread: Int64s
) -> tuple[_Places, Mask]:
    """Return the ranges around each call, and whether they are another thread's."""
    launches = Launches(np.where(time_ns == UNKNOWN, NOWHERE, 0), thread, time_ns)
    found = stages_at(stages, launches)
    place = _Places(found.stage, found.step, ranges.name_around(launches, found))
    return place, found.lent


def _device_ranges(ranges: Ranges, rows: Mask) -> Stages:
    """Return ranges with their times on the device, all on one lane."""
    lane = np.zeros(np.count_nonzero(rows), np.int64)
    times = (ranges.device_start_ns[rows], ranges.device_end_ns[rows])
    return Stages(lane, lane, ranges.kind[rows], ranges.name[rows], ranges.step[rows], *times)


def _copies(opened: Capture) -> tuple[Frame, list[str]]:
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
    if not len(size):  # This leaves out the remark that the capture has no kernels.
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
    # A trace has the lengths of few calls, so all of them become unknown.
    torch = tasks.torch._replace(length_ns=np.full(len(rows["bytes"]), UNKNOWN))
    tasks = replace(tasks, torch=torch)
    return tasks, distinct(rows["direction"], view.names), rows["bytes"]


MEMCPY = TableReader(
    columns_named(
        *("device", "stream", "kind", "bytes", "start", "duration", "stage", "step"),
        *("launch", "launch duration", "thread"),
    ),
    lambda opened: opened.has(_TABLE, "taskType") or opened.trace is not None,
    _copies,
)
"""Copies without those inside collectives, with their launches."""
