"""What an Ascend device ran, kernels and collectives, with the calls that launched it.

torch_npu's queue: what one thread hands over another one launches, later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_rlprof.loaders.ascend.csv_sheets import microseconds, read_sheet, whole
from lightning_rlprof.loaders.ascend.mstx import STRINGS
from lightning_rlprof.loaders.ascend.trace_view import COMMUNICATION, QUEUE, Flow, Kept, TraceView
from lightning_rlprof.loaders.ascend.units import LARGEST_TIME, plausible
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.loaders.stage_attribution import NOWHERE
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.interval_nesting import innermost
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, distinct

TASKS_WANTED = (Kept.DEVICE, Kept.FLOWS)
"""What `trace_tasks` and `sheet_tasks` need of a trace."""

_HARDWARE = "Ascend Hardware"
# Types of tasks that run an operator's code; the others copy, wait or signal.
_RUNS = ("AI_", "AIV", "MIX", "KERNEL_", "DSA_", "DPU", "CCU")
_TASK = ("startNs", "endNs", "deviceId", "streamId", "connectionId", "globalTaskId")
_THREAD = 2**32 - 1  # of a globalTid; the process stands above
_NO_STREAM = 2**32 - 1


@dataclass(frozen=True, eq=False)
class Calls:
    """When, by which thread and for how long each task was launched.

    `UNKNOWN`, and `NOWHERE` for threads, where that is not known; lengths are None in texts, whose
    arrows tell beginnings alone.
    """

    time_ns: Int64s
    thread: Int64s
    length_ns: Int64s | None = None


@dataclass(frozen=True, eq=False)
class Tasks:
    """Kernels and collectives as columns; times are nanoseconds since 1970.

    Attributes:
        start_ns: Start on the device.
        end_ns: End on the device.
        device: Number of the device, `UNKNOWN` where it is not told.
        stream: Stream; collectives use several, so they have none.
        name: Full name.
        step: Step as torch_npu counts it, `UNKNOWN` without.
        torch: Operators of torch that launched them.
        cann: Calls of CANN that launched them, on a thread of torch_npu's own if it queues tasks.
        remarks: What was lost.
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


def sheet_tasks(path: Path, view: TraceView | None) -> Tasks:
    """Return the rows of ``kernel_details.csv``; their launches stand in the trace alone.

    Raises:
        TraceError: The file cannot be read.
    """
    times = dict.fromkeys(("starttime(us)", "duration(us)"), microseconds)
    wanted = {**times, **dict.fromkeys(("streamid", "stepid", "deviceid"), whole)}
    sheet = read_sheet(path, wanted, ("name",), needed=("name", *times))
    start, length = sheet.number("starttime(us)"), sheet.number("duration(us)")
    sound = plausible(start, length)
    start, stream = start[sound], sheet.number("streamid")[sound]
    device = sheet.number("deviceid")[sound]
    torch, cann = (Calls(np.full(len(start), UNKNOWN), np.full(len(start), NOWHERE)),) * 2
    if view is not None:
        torch, cann = trace_calls(view, start)
        seen = trace_tasks(view)  # knows what level0 leaves out of the sheet
        same = places(seen.start_ns, start)
        stream = np.where(stream == UNKNOWN, np.append(seen.stream, UNKNOWN)[same], stream)
        device = np.where(device == UNKNOWN, np.append(seen.device, UNKNOWN)[same], device)
    codes, texts = sheet.text("name")
    lost = np.count_nonzero(~sound)
    remarks = [f"{path.name}: {text}" for text in sheet.problems]
    remarks += [f"{path.name}: {lost} rows are left out: their times are wrong"] if lost else []
    step = sheet.number("stepid")[sound]
    columns = (device, stream, (codes[sound], texts), step, torch, cann, remarks)
    return Tasks(start, start + length[sound], *columns)


def trace_tasks(view: TraceView) -> Tasks:
    """Return what the device's lanes of a trace hold, where there is no ``kernel_details.csv``."""
    rows = view.tables[Kept.DEVICE]
    runs = [code for code, text in enumerate(view.names) if text.startswith(_RUNS)]
    kernel = np.isin(rows["kind"], runs) & np.isin(rows["lane"], hardware_lanes(view))
    keep = np.flatnonzero(kernel | np.isin(rows["lane"], collective_lanes(view)))
    rows = {name: column[keep] for name, column in rows.items()}
    return Tasks(
        rows["start_ns"],
        rows["end_ns"],
        lane_devices(view)[rows["lane"]],
        np.where(rows["stream"] < 0, UNKNOWN, rows["stream"]),
        distinct(rows["name"], view.names),
        np.full(len(keep), UNKNOWN),
        *trace_calls(view, rows["start_ns"]),
        [],
    )


def hardware_lanes(view: TraceView) -> Int64s:
    """Return the lanes of the device's streams; in a trace cut off they may have no name."""
    return view.lanes_of(_HARDWARE, None)


def collective_lanes(view: TraceView) -> Int64s:
    """Return the lanes that hold one row per collective, and not those of its parts."""
    lanes = view.lanes_of(*COMMUNICATION).tolist()
    return np.array([lane for lane in lanes if (view.thread(lane) or "").startswith("Group")], int)


def lane_devices(view: TraceView) -> Int64s:
    """Return the device of each lane: as labelled, else as the number of the process tells it.

    The exporter of CANN numbers processes ``pid << 10 | layer << 5 | device``; where the upper part
    is a process that the trace names itself, the lowest bits are the device.
    """
    pids = {pid for _, pid, _ in view.told}
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
    """Follow the arrows back from tasks: to operators of torch, and to calls of CANN."""
    flows, threads = view.tables[Kept.FLOWS], np.append(view.threads(), NOWHERE)
    kinds = (Flow.TORCH, Flow.LAUNCH, Flow.TASK)
    torch, launch, task = (
        {name: column[flows["kind"] == kind] for name, column in flows.items()} for kind in kinds
    )
    connection = np.append(task["id"], UNKNOWN)[places(task["start_ns"], start)]
    found = (
        (torch, places(torch["id"], start)),
        (launch, places(launch["id"], connection, slack=0)),
    )
    calls = [
        Calls(
            np.append(rows["start_ns"], UNKNOWN)[at],
            np.append(threads[rows["lane"]], NOWHERE)[at],
        )
        for rows, at in found
    ]
    return calls[0], calls[1]


def places(keys: Int64s, values: Int64s, slack: int = 1) -> Int64s:
    """Return where each value is among keys, give or take the slack, -1 where it is not.

    Two parts of the toolchain round a nanosecond differently, hence the slack.
    """
    order = np.argsort(keys, kind="stable")
    ordered = np.append(keys[order], UNKNOWN)
    found = np.full(len(values), -1)
    for off in range(-slack, slack + 1):
        near = values + off
        at = np.minimum(np.searchsorted(ordered[:-1], near), len(keys))
        exact = (ordered[at] == near) & ((found < 0) | (off == 0)) & (values != UNKNOWN)
        found[exact] = np.append(order, -1)[at[exact]]
    return found


def database_tasks(database: SqliteTables) -> Tasks:
    """Return the tasks of a database that compute, and its collectives."""
    tasks = database.numbers("TASK", *_TASK)
    compute = database.numbers("COMPUTE_TASK_INFO", "globalTaskId", "name")
    at = places(compute["globalTaskId"], tasks["globalTaskId"], slack=0)
    rows = {name: column[at >= 0] for name, column in tasks.items()}
    rows["name"] = compute["name"][at[at >= 0]]
    both = _with_collectives(database, rows, tasks)
    start, end = both["startNs"], both["endNs"]
    ordered = (start > 0) & (end >= start) & (end < LARGEST_TIME)
    sound = plausible(start, np.where(ordered, end - start, UNKNOWN))
    both = {name: column[sound] for name, column in both.items()}
    strings = database.strings(both["name"], STRINGS)
    codes = {number: code for code, number in enumerate(strings)}
    name = np.array([codes.get(each, -1) for each in both["name"].tolist()], np.int64)
    lost = np.count_nonzero(~sound)
    return Tasks(
        both["startNs"],
        both["endNs"],
        both["deviceId"],
        np.where(both["streamId"] == _NO_STREAM, UNKNOWN, both["streamId"]),
        distinct(name, list(strings.values())),
        np.full(len(name), UNKNOWN),
        *database_calls(database, both["connectionId"], both["startNs"]),
        [f"{lost} tasks are left out: their times are wrong"] if lost else [],
    )


def _with_collectives(
    database: SqliteTables, rows: Mapping[str, Int64s], tasks: Mapping[str, Int64s]
) -> dict[str, Int64s]:
    """Put the collectives behind; older versions do not tell their device, their tasks do."""
    own = database.numbers("COMMUNICATION_OP", *_TASK[:5], "opName")
    first = places(tasks["connectionId"], own["connectionId"], slack=0)
    told = np.append(tasks["deviceId"], UNKNOWN)[first]
    own["deviceId"] = np.where(own["deviceId"] == UNKNOWN, told, own["deviceId"])
    own["name"] = own["opName"]
    return {name: np.concatenate([rows[name], own[name]]) for name in (*_TASK[:5], "name")}


def database_calls(
    database: SqliteTables, connection: Int64s, start: Int64s
) -> tuple[Calls, Calls]:
    """Return what launched tasks, by connection and start: operators of torch, calls of CANN."""
    return _operators(database, connection, start), _api(database, connection)


def _operators(database: SqliteTables, connection: Int64s, start: Int64s) -> Calls:
    """Find torch's operator of each connection, the last one before the task if there are several.

    Old versions number other arrows of torch's in the same table, and some numbers meet.
    """
    pairs = database.numbers("CONNECTION_IDS", "id", "connectionId")
    nothing = np.full(len(connection), UNKNOWN)
    nobody = Calls(nothing, np.full(len(connection), NOWHERE), nothing)
    if not {"type", "connectionId"} <= database.columns.get("PYTORCH_API", frozenset()):
        return nobody
    calls = database.numbers(
        "PYTORCH_API",
        "startNs",
        "endNs",
        "globalTid",
        "connectionId",
        where="type = 50001 AND connectionId IS NOT NULL",
    )
    at = places(calls["connectionId"], pairs["id"], slack=0)
    number, at = pairs["connectionId"][at >= 0], at[at >= 0]
    order = np.lexsort((calls["startNs"][at], number))
    calls = {name: column[at][order] for name, column in calls.items()}
    return calls_at(calls, last_before(number[order], calls["startNs"], connection, start))


def last_before(numbers: Int64s, times: Int64s, number: Int64s, before: Int64s) -> Int64s:
    """Return the last row of each number that is before a moment, else its first, -1 without any.

    Rows come by number and time.
    """
    place = np.searchsorted(numbers, number, "right") - 1
    first = np.searchsorted(numbers, number, "left")
    for row in np.flatnonzero(place > first).tolist():
        own = times[first[row] : place[row] + 1]
        place[row] = first[row] + max(int(np.searchsorted(own, before[row], "right")) - 1, 0)
    return np.where((place >= first) & (number != UNKNOWN), place, -1)


def _api(database: SqliteTables, connection: Int64s) -> Calls:
    calls = database.numbers("CANN_API", "connectionId", "startNs", "endNs", "globalTid")
    return calls_at(calls, places(calls["connectionId"], connection, slack=0))


def calls_at(calls: Mapping[str, Int64s], rows: Int64s) -> Calls:
    """Return some rows of a table of calls, nothing for those below 0."""
    start, end = calls["startNs"], calls["endNs"]
    sound = (start > 0) & (end >= start) & (end < LARGEST_TIME)
    return Calls(
        np.append(np.where((start > 0) & (start < LARGEST_TIME), start, UNKNOWN), UNKNOWN)[rows],
        np.append(calls["globalTid"] & _THREAD, NOWHERE)[rows],
        np.append(np.where(sound, end - start, UNKNOWN), UNKNOWN)[rows],
    )


_CALLS, _NUMBERS = "PYTORCH_API", "CONNECTION_IDS"
_COLUMNS = ("startNs", "endNs", "globalTid", "connectionId")
_OF_QUEUE = f"type = 50002 AND name IN (SELECT id FROM {STRINGS} WHERE value LIKE '{{}}%')"


class Ends(NamedTuple):
    """Calls at one end of the queue: thread, start, end, and the number of what went through."""

    thread: Int64s
    start_ns: Int64s
    end_ns: Int64s
    number: Int64s

    def sound(self) -> "Ends":
        """Return those whose times can be true and that have a number, by number and start."""
        length = np.where(self.end_ns >= self.start_ns, self.end_ns - self.start_ns, UNKNOWN)
        rows = np.flatnonzero(plausible(self.start_ns, length) & (self.number != UNKNOWN))
        rows = rows[np.lexsort((self.start_ns[rows], self.number[rows]))]
        return Ends(*(column[rows] for column in self))


def database_queue(database: SqliteTables) -> tuple[Ends, Ends]:
    """Return the calls that put something in, and those that take it out."""
    there = {"type", "name", *_COLUMNS} <= database.columns.get(_CALLS, frozenset())
    there = there and STRINGS in database.columns
    pairs = database.numbers(_NUMBERS, "id", "connectionId")
    both = []
    for word in QUEUE:
        where = _OF_QUEUE.format(word) if there else "0"
        rows = database.numbers(_CALLS, *_COLUMNS, where=where)
        at = places(pairs["id"], rows["connectionId"], slack=0)
        thread = calls_at(rows, np.arange(len(at))).thread
        number = np.append(pairs["connectionId"], UNKNOWN)[at]
        both.append(Ends(thread, rows["startNs"], rows["endNs"], number).sound())
    return both[0], both[1]


def trace_queue(view: TraceView) -> tuple[Ends, Ends]:
    """Return the calls that put something in, and those that take it out."""
    rows, threads = view.tables[Kept.QUEUE], view.threads()
    both = []
    for word in QUEUE:
        code = view.names.index(word) if word in view.names else UNKNOWN
        own = {name: column[rows["kind"] == code] for name, column in rows.items()}
        times = (own["start_ns"], own["end_ns"])
        both.append(Ends(threads[own["lane"]], *times, own["number"]).sound())
    return both[0], both[1]


def handed_over(torch: Calls, cann: Calls, queue: tuple[Ends, Ends]) -> Calls:
    """Return torch's operators, and where there is none the call that handed over what CANN did.

    torch_npu tells the operators of kernels itself, of many copies it does not. Both ends of its
    queue have one number: that of the range around CANN's call, and that of the call that is
    wanted.

    Args:
        torch: The operator of each task.
        cann: The call of CANN of each task.
        queue: Both ends.
    """
    given, taken = queue
    around = innermost(*taken[:3], cann.thread, cann.time_ns)
    number, out = (np.append(of, UNKNOWN)[around] for of in (taken.number, taken.start_ns))
    at = last_before(given.number, given.start_ns, number, out)
    before = np.append(given.start_ns, UNKNOWN)[at] <= out
    wanted = (torch.time_ns == UNKNOWN) & (at >= 0) & before
    length = None
    if torch.length_ns is not None:
        lengths = np.append(given.end_ns - given.start_ns, UNKNOWN)[at]
        length = np.where(wanted, lengths, torch.length_ns)
    return Calls(
        np.where(wanted, np.append(given.start_ns, UNKNOWN)[at], torch.time_ns),
        np.where(wanted, np.append(given.thread, UNKNOWN)[at], torch.thread),
        length,
    )
