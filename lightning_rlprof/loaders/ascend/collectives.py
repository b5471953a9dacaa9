"""Collectives of an Ascend capture with their payload, and the stage and step of each."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import Recorded, read_tasks
from lightning_rlprof.loaders.ascend.communication import COMMUNICATION
from lightning_rlprof.loaders.ascend.hccl import group_hash, operation_in, payload
from lightning_rlprof.loaders.ascend.kernels import kernels_of
from lightning_rlprof.loaders.ascend.mstx import (
    COLLECTIVES,
    MARKS_WANTED,
    Marks,
    database_marks,
    described,
    trace_marks,
)
from lightning_rlprof.loaders.ascend.table_parts import Cells, Frame, Opened, Part, coded
from lightning_rlprof.loaders.ascend.tasks import Calls, Tasks, collective_lanes, places
from lightning_rlprof.loaders.ascend.trace_view import Kept, read_trace_view
from lightning_rlprof.loaders.ascend.units import scaled
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.loaders.stage_attribution import NOWHERE
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, Kernels, distinct
from lightning_rlprof.tables.table import Column

_OPERATORS, _MARKS = "COMMUNICATION_OP", "MSTX_EVENTS"
_COLUMNS = (
    Column("device", "count"),
    Column("stream", "count"),
    Column("operation", "text"),
    Column("group", "text"),
    Column("group size", "count"),
    Column("number", "count"),
    Column("bytes", "count", "bytes"),
    Column("dtype", "text"),
    Column("start", "time", "ns"),
    Column("duration", "duration", "ns"),
    Column("stage", "text"),
    Column("step", "count"),
    Column("launch", "time", "ns"),
)


@dataclass(frozen=True, eq=False)
class _Told:
    """Collectives by start, and what the files tell of each; group "" and dtype "" are not told."""

    tasks: Tasks
    group: list[str]
    dtype: list[str]
    count: Int64s


def collectives_part(
    recorded: Callable[[Opened], Recorded], filled: Callable[[Recorded, Kernels], Kernels]
) -> Part:
    """Return the table of collectives: one row per operation, with what it carried.

    The group is a text with the same number on all of its ranks. ``number`` is the one in the
    operator's name. Bytes are the larger of what this rank gave and got.

    Args:
        recorded: Gives the ranges of a capture.
        filled: Adds stage and step where the capture knows neither; times are since 1970.
    """

    def read(opened: Opened) -> tuple[Frame, list[str]]:
        told = _told(opened)
        if told is None:
            return {column.name: np.empty(0, np.int64) for column in _COLUMNS[:1]}, [_NOTHING]
        capture = recorded(opened)
        kernels, remarks = kernels_of(
            told.tasks, capture.ranges, opened.rank, opened.capture.window
        )
        return _frame(opened, told, filled(capture, kernels)), remarks

    return Part(_COLUMNS, _has, read, frozenset({"start", "launch"}))


_NOTHING = "no collectives in it"


def _has(opened: Opened) -> bool:
    known = opened.has(_OPERATORS) or opened.has(_MARKS)
    return known or opened.capture.trace is not None


def _told(opened: Opened) -> _Told | None:
    """Read the best source there is, None where no collective is in any."""
    if opened.has(_OPERATORS):
        return _from_database(opened, opened.database)  # type: ignore[arg-type]
    if opened.capture.trace is not None and (told := _from_trace(opened)) is not None:
        return told
    return _from_marks(opened)


def _from_database(opened: Opened, database: SqliteTables) -> _Told:
    names = ("opName", "startNs", "endNs", "groupName", "dataType", "count")
    rows = database.numbers(_OPERATORS, *names)
    sound = (rows["startNs"] > 0) & (rows["endNs"] >= rows["startNs"])
    order = np.argsort(rows["startNs"], kind="stable")
    rows = {name: column[order[sound[order]]] for name, column in rows.items()}
    types = database.strings(rows["dataType"], "ENUM_HCCL_DATA_TYPE", "name")
    name = coded(database, rows["opName"])
    return _Told(
        _launched(read_tasks(opened)[0], name, rows["startNs"], rows["endNs"]),
        [group_hash(each) for each in _spelled(coded(database, rows["groupName"]))],
        [types.get(each, "") for each in rows["dataType"].tolist()],
        rows["count"],
    )


def _from_trace(opened: Opened) -> _Told | None:
    """Read the lanes of the groups; which groups these are stands in the analysis alone."""
    view = read_trace_view(opened.capture.trace, Kept.COLLECTIVES)  # type: ignore[arg-type]
    rows = view.tables[Kept.COLLECTIVES]
    keep = np.flatnonzero(np.isin(rows["lane"], collective_lanes(view)))
    keep = keep[np.argsort(rows["start_ns"][keep], kind="stable")]
    if not len(keep):
        return None
    rows = {name: column[keep] for name, column in rows.items()}
    name = distinct(rows["name"], view.names)
    groups = _analysed_groups(opened)
    return _Told(
        _launched(read_tasks(opened)[0], name, rows["start_ns"], rows["end_ns"]),
        [groups.get(each, "") for each in _spelled(name)],
        [view.names[code] if code >= 0 else "" for code in rows["kind"].tolist()],
        rows["count"],
    )


def _analysed_groups(opened: Opened) -> dict[str, str]:
    """Return the group of each operator by name, as far as an analysis tells it."""
    try:
        frame = COMMUNICATION.read(opened)[0]
    except TraceError:  # the table that is read of it says so
        return {}
    if "group" not in frame:
        return {}
    return dict(zip(_spelled(frame["operator"]), _spelled(frame["group"]), strict=True))


def _marks(opened: Opened) -> Marks | None:
    if opened.has(_MARKS):
        return database_marks(opened.database)  # type: ignore[arg-type]
    if opened.capture.trace is None:
        return None
    return trace_marks(read_trace_view(opened.capture.trace, *MARKS_WANTED))


def _from_marks(opened: Opened) -> _Told | None:
    """Read what HCCL marks of itself, which is all that there is below level0."""
    marks = _marks(opened)
    if marks is None:
        return None
    shown = marks.shadow_start_ns != UNKNOWN
    start = np.where(shown, marks.shadow_start_ns, marks.start_ns)
    keep = np.flatnonzero([marks.texts[code] == COLLECTIVES for code in marks.domain.tolist()])
    keep = keep[np.argsort(start[keep], kind="stable")]
    if not len(keep):
        return None
    said = [described(marks.texts[code]) for code in marks.name[keep].tolist()]
    text = [[str(each.get(key, "")) for each in said] for key in ("opName", "groupName")]
    unknown = np.full(len(keep), UNKNOWN)
    tasks = Tasks(
        start[keep],
        np.where(shown, marks.shadow_end_ns, marks.end_ns)[keep],
        unknown,
        unknown,
        _coded(text[0]),
        unknown,
        Calls(marks.start_ns[keep], marks.thread[keep]),
        Calls(unknown, np.full(len(keep), NOWHERE)),
        [],
    )
    types = [str(each.get("dataType", "")).upper() for each in said]
    count = scaled([str(each.get("count")) for each in said], 1)
    return _Told(tasks, list(map(group_hash, text[1])), types, count)


def _launched(tasks: Tasks, name: Coded, start: Int64s, end: Int64s) -> Tasks:
    """Return collectives with what is known of the same among all tasks, by name and start."""
    codes, texts = tasks.name
    own = {text: code for code, text in enumerate(name[1])}
    place = np.array([*(own.get(text, -1) for text in texts), -1], np.int64)[codes]
    rows = np.flatnonzero(place >= 0)
    at = np.append(rows, -1)[places(tasks.start_ns[rows], start)]
    at = np.where(np.append(place, -2)[at] == name[0], at, -1)

    def calls(own: Calls) -> Calls:
        return Calls(
            np.append(own.time_ns, UNKNOWN)[at],
            np.append(own.thread, NOWHERE)[at],
            None if own.length_ns is None else np.append(own.length_ns, UNKNOWN)[at],
        )

    device, stream, step = (
        np.append(own, UNKNOWN)[at] for own in (tasks.device, tasks.stream, tasks.step)
    )
    both = (calls(tasks.torch), calls(tasks.cann))
    return Tasks(start, end, device, stream, name, step, *both, [])


def _frame(opened: Opened, told: _Told, kernels: Kernels) -> Frame:
    names = [operation_in(name) for name in _spelled(kernels.name)]
    group = [own or end for own, (_, end, _) in zip(told.group, names, strict=True)]
    sizes = _sizes(opened)
    size = np.array([sizes.get(each, UNKNOWN) for each in group], np.int64)
    operation = [name for name, _, _ in names]
    frame: dict[str, Cells] = {
        "device": np.where(kernels.device == UNKNOWN, opened.device, kernels.device),
        "stream": kernels.stream,
        "operation": _coded(operation),
        "group": _coded(group),
        "group size": size,
        "number": np.array([number for _, _, number in names], np.int64),
        "bytes": payload(operation, told.dtype, told.count, size),
        "dtype": _coded(told.dtype),
        "start": kernels.start_ns,
        "duration": kernels.end_ns - kernels.start_ns,
        "stage": kernels.stage,
        "step": np.where(kernels.step > 0, kernels.step, UNKNOWN),
    }
    return frame if kernels.launch_ns is None else {**frame, "launch": kernels.launch_ns}


def _sizes(opened: Opened) -> dict[str, int]:
    """Return how many ranks each group has, by its hash, as the program told torch_npu."""
    groups = opened.capture.metadata.get("parallel_group_info")
    found = {}
    for name, group in groups.items() if isinstance(groups, dict) else ():
        ranks = group.get("global_ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and ranks:
            found[group_hash(str(name))] = len(ranks)
    return found


def _spelled(column: Cells) -> list[str]:
    codes, texts = column
    return [texts[code] if code >= 0 else "" for code in codes.tolist()]


def _coded(texts: list[str]) -> Coded:
    """Return texts as a column in which the empty one is not known."""
    codes, names = distinct(np.arange(len(texts)), texts)
    return np.where(np.array(texts, object) == "", -1, codes), names
