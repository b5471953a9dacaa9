"""Captures opened: databases, ranks, and what each of them holds in whichever format."""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.ascend.capture_folder import Capture, find_captures
from lightning_rlprof.loaders.ascend.csv_sheets import microseconds, read_sheet
from lightning_rlprof.loaders.ascend.kernels import kernels_of
from lightning_rlprof.loaders.ascend.mstx import (
    MARKS_WANTED,
    Marks,
    Ranges,
    database_marks,
    ranges_of,
    trace_marks,
)
from lightning_rlprof.loaders.ascend.table_parts import Opened
from lightning_rlprof.loaders.ascend.tasks import (
    TASKS_WANTED,
    Tasks,
    database_tasks,
    sheet_tasks,
    trace_tasks,
)
from lightning_rlprof.loaders.ascend.trace_view import TraceView, read_trace_view
from lightning_rlprof.loaders.ascend.units import plausible
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.kernels import UNKNOWN, Kernels

_KERNELS = "kernel_details.csv"
_TEXT = (_KERNELS, "step_trace_time.csv", "memory_record.csv", "operator_details.csv")
_LARGE = {"TASK", "COMPUTE_TASK_INFO", "COMMUNICATION_OP", "PYTORCH_API", "CANN_API", "OP_MEMORY"}
_METADATA = ("role", "rlprof_window", "rlprof_rank", "rlprof_run", "parallel_group_info")


@dataclass(frozen=True, eq=False)
class Recorded:
    """One capture with its ranges.

    Attributes:
        opened: The capture.
        ranges: What it marked.
        complete: Whether its files were read to their ends.
        first_ns: Wall-clock time of the first thing in it, `UNKNOWN` where nothing tells.
        problems: What is missing or doubtful.
    """

    opened: Opened
    ranges: Ranges
    complete: bool
    first_ns: int
    problems: list[str]


def open_captures(path: Path) -> tuple[list[Opened], list[str]]:
    """Open the captures that a path stands for; say which ranks are guessed, which folders shut.

    Raises:
        TraceError: There are none.
    """
    remarks: list[str] = []
    opened = [_open(capture) for capture in find_captures(path, remarks)]
    taken = {each.rank for each in opened if each.rank >= 0}
    free = max(taken, default=-1) + 1
    ranks: dict[tuple[str, int], int] = {}
    for at, each in enumerate(opened):
        if each.rank < 0:
            who = (each.capture.host, each.capture.pid)
            rank = ranks.setdefault(who, free + len(ranks))
            opened[at] = replace(each, rank=rank)
    guessed = len(ranks) > 1 or (ranks and taken)
    problem = f"ranks of {len(ranks)} processes are guessed, counting from {free}"
    return opened, [*remarks, *([f"{problem}: nothing says them"] if guessed else [])]


def _open(capture: Capture) -> Opened:
    analysis = capture.output / "analysis.db" if capture.output else None
    if os.path.isfile(capture.path) and capture.database is None:
        analysis = None  # it belongs to the other format
    analysed, problems = _database(analysis if analysis and os.path.isfile(analysis) else None)
    database, more = _database(capture.database)
    capture = replace(capture, problems=(*capture.problems, *problems, *more))
    alone = Opened(capture, -1 if capture.rank is None else capture.rank, None, analysed)
    alone = replace(alone, host=capture.host)
    if database is None:
        return alone
    try:
        return _asked(replace(alone, database=database), database)
    except TraceError as error:
        return replace(alone, capture=replace(capture, problems=(*capture.problems, str(error))))


def _asked(opened: Opened, database: SqliteTables) -> Opened:
    """Add what the database says of itself; files beside it know better."""
    told = {name: database.setting("META_DATA", name) for name in _METADATA}
    said = {name: _json(text) for name, text in told.items() if text is not None}
    capture = replace(opened.capture, metadata={**said, **opened.capture.metadata})
    mapped = database.numbers("RANK_DEVICE_MAP", "rankId", "deviceId")
    ranks = [capture.metadata.get("rlprof_rank"), *mapped["rankId"].tolist()]
    sound = [int(each) for each in map(str, ranks) if each.isdecimal() and len(each) < 8]
    devices = mapped["deviceId"].tolist()
    hosts, chips = database.texts("HOST_INFO", "hostName"), database.texts("NPU_INFO", "name")
    return replace(
        opened,
        capture=capture,
        rank=next(iter(sound), -1) if opened.rank < 0 else opened.rank,
        device=devices[0] if len(devices) == 1 and devices[0] >= 0 else UNKNOWN,
        chip=next(iter(chips[1]), ""),
        host=opened.host or next(iter(hosts[1]), ""),
    )


def _database(path: Path | None) -> tuple[SqliteTables | None, list[str]]:
    if path is None:
        return None, []
    try:
        tables = SqliteTables(path)
        problems = [f"{path.name} {text}" for text in tables.problems]
    except TraceError as error:
        return None, [str(error)]
    for table in sorted(_LARGE & tables.columns.keys()):
        try:  # the first row and the last one: all of them would take as long as reading it
            tables.has(table)
            tables.rows(f"SELECT 1 FROM {table} ORDER BY rowid DESC LIMIT 1")
        except TraceError:
            problems.append(f"{path.name} is damaged in its table {table}")
    return tables, problems


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except NOT_JSON:
        return text


def read_capture(opened: Opened) -> Recorded:
    """Read the ranges of a capture, from its database if that has any, else from its trace.

    Raises:
        TraceError: Nothing of it can be read; the text says why, and what to do.
    """
    capture = opened.capture
    marks, view, problems = _marks(opened)
    if marks is None:
        if not any(capture.file(name) for name in _TEXT):
            raise TraceError("; ".join(problems) or _nothing(capture))
        marks = _NO_MARKS
    ranges = ranges_of(marks, capture.window)
    problems += ranges.problems
    activities = capture.option("activities", "common_config")
    if isinstance(activities, list) and not any("NPU" in str(each) for each in activities):
        problems.append("its times may be off by hundreds of ms: only the CPU was profiled")
    starts = [int(ranges.start_ns.min())] if len(ranges.start_ns) else []
    if not starts:
        starts = [each for each in (_first(opened, view), capture.began_ns) if each > 0]
    complete = view is None or view.complete
    return Recorded(opened, ranges, complete, starts[0] if starts else UNKNOWN, problems)


_EMPTY = np.empty(0, np.int64)
_NO_MARKS = Marks(_EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, [], np.empty(0, bool), _EMPTY, _EMPTY)


def _marks(opened: Opened) -> tuple[Marks | None, TraceView | None, list[str]]:
    """Return what was marked, None if no file tells, with the trace if it was read."""
    capture = opened.capture
    problems = list(capture.problems)
    if opened.database is not None:
        try:
            marks = database_marks(opened.database)
            if len(marks.name) or capture.trace is None:
                return marks, None, problems
        except TraceError as error:
            problems.append(str(error))
    if capture.trace is None:
        return None, None, problems
    try:
        view = read_trace_view(capture.trace, *MARKS_WANTED)
    except TraceError as error:
        return None, None, [*problems, str(error)]
    return trace_marks(view), view, [*problems, *view.problems]


def _first(opened: Opened, view: TraceView | None) -> int:
    """Return when the first thing began, of a capture that marks nothing."""
    if view is not None:
        return view.first_ns
    starts = [_EMPTY]
    for table in ("TASK", "COMMUNICATION_OP"):
        if opened.database is not None and opened.has(table, "startNs"):
            with suppress(TraceError):  # whoever reads the table will say it
                starts.append(opened.database.numbers(table, "startNs")["startNs"])
    file = opened.capture.file(_KERNELS)
    if len(starts) == 1 and file is not None:
        with suppress(TraceError):
            times = read_sheet(file, {"starttime(us)": microseconds})
            starts.append(times.number("starttime(us)"))
    found = np.concatenate(starts)
    return int(min(found[plausible(found, np.zeros_like(found))], default=UNKNOWN))


def _nothing(capture: Capture) -> str:
    if capture.output is None:
        return f"{capture.path}: is not analysed yet: run `rlprof analyse {capture.path}`"
    return f"{capture.path}: holds nothing that can be read: neither a trace nor a database"


def has_kernels(opened: Opened) -> bool:
    """Tell whether a capture may hold kernels."""
    there = opened.has("COMPUTE_TASK_INFO") or opened.has("COMMUNICATION_OP")
    sheet = opened.capture.file(_KERNELS)
    return there or sheet is not None or opened.capture.trace is not None


def read_capture_kernels(recorded: Recorded) -> tuple[Kernels, list[str]]:
    """Return the kernels of a capture, times since 1970, and what must be known about them.

    Raises:
        TraceError: The files cannot be read.
    """
    opened, ranges = recorded.opened, recorded.ranges
    tasks, remarks = read_tasks(opened)
    kernels, more = kernels_of(tasks, ranges, opened.rank, opened.capture.window)
    return kernels, [*remarks, *more]


def read_tasks(opened: Opened) -> tuple[Tasks, list[str]]:
    """Return what the device ran, from the best source there is, and what was lost.

    Raises:
        TraceError: The files cannot be read.
    """
    problems: list[str] = []
    if opened.has("COMPUTE_TASK_INFO") or opened.has("COMMUNICATION_OP"):
        try:
            return database_tasks(opened.database), []  # type: ignore[arg-type]
        except TraceError as error:
            problems.append(str(error))
    sheet, trace, view = opened.capture.file(_KERNELS), opened.capture.trace, None
    try:
        view = read_trace_view(trace, *TASKS_WANTED) if trace else None
        problems += view.problems if view else []
    except TraceError as error:
        problems.append(str(error))
    return _text_tasks(opened, sheet, view, problems)


def _text_tasks(
    opened: Opened, sheet: Path | None, view: TraceView | None, problems: list[str]
) -> tuple[Tasks, list[str]]:
    """Return the tasks of the sheet, of the trace where that has none; with what was lost."""
    tasks = None
    if sheet is not None:
        try:
            tasks = sheet_tasks(sheet, view)
        except TraceError as error:
            problems.append(str(error))
    if view is not None and (tasks is None or not len(tasks.start_ns)):
        return trace_tasks(view), [*problems, *(tasks.remarks if tasks else [])]
    if tasks is None:
        raise TraceError("; ".join(problems) or f"{opened.capture.path}: holds no kernels")
    if opened.capture.trace is None:
        problems.append("launches are not known: there is no trace_view.json")
    return tasks, problems
