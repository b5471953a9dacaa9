"""Captures opened: their databases, rank, host and device, their ranges, and their tables.

A table has rows of several captures under the same columns, on one time axis.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.ascend.capture_folder import Capture, find_captures
from lightning_rlprof.loaders.ascend.csv_sheets import microseconds, read_sheet
from lightning_rlprof.loaders.ascend.mstx import (
    MARKS_WANTED,
    Marks,
    Ranges,
    classify_ranges,
    database_marks,
    trace_marks,
)
from lightning_rlprof.loaders.ascend.trace_view import TraceView, read_trace_view
from lightning_rlprof.loaders.ascend.units import plausible
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, Kernels, distinct, end_to_end, known
from lightning_rlprof.tables.table import Column, ColumnRows, Loss, Table, noted, with_name

KERNEL_SHEET = "kernel_details.csv"
"""The file of the text format with a row per kernel."""

COMMUNICATION_FILE = "communication.json"
"""CANN's analysis of each collective in the text format."""

LINKS_FILE = "communication_matrix.json"
"""CANN's analysis of each link between two ranks, likewise."""

_SHEETS = (KERNEL_SHEET, COMMUNICATION_FILE, LINKS_FILE, "step_trace_time.csv", "memory_record.csv")
_METADATA = ("role", "rlprof_window", "rlprof_rank", "rlprof_run", "parallel_group_info")
Cells = Int64s | npt.NDArray[np.float64] | Coded
"""One column: integers with `UNKNOWN`, numbers with NaN, or texts."""

Frame = Mapping[str, Cells]
"""Columns of one capture by name; times are nanoseconds since 1970."""


@dataclass(frozen=True, eq=False)
class OpenCapture:
    """One capture with its databases open.

    A capture is read from one format: from its database if that can be opened, else from its text
    files.

    Attributes:
        capture: Its files.
        rank: Global rank.
        database: ``ascend_pytorch_profiler*.db``, None without one that can be read.
        analysis: ``analysis.db`` next to it, likewise.
        device: Number of the rank's device, `UNKNOWN` without a database that has it.
        chip: Name of the device, "" without a database that has it.
        host: Name of the host, "" if unknown.
        fill: Adds stage and step of the run that the capture is part of to kernels that have
            neither; times are since 1970. None if it is not part of a run.
    """

    capture: Capture
    rank: int
    database: SqliteTables | None = None
    analysis: SqliteTables | None = None
    device: int = UNKNOWN
    chip: str = ""
    host: str = ""
    fill: Callable[[Kernels], Kernels] | None = None

    @cached_property
    def timeline(self) -> "Timeline":
        """The ranges of the capture.

        Raises:
            TraceError: Nothing of it can be read; the text says why, and what to do.
        """
        return _read_timeline(self)

    @property
    def trace(self) -> Path | None:
        """``trace_view.json``, None if the capture is read from its database."""
        return self.capture.trace if self.database is None else None

    def read_trace(self, *wanted: int) -> TraceView:
        """Read some kinds of rows of the trace, see `read_trace_view`."""
        return read_trace_view(self.trace, *wanted)  # type: ignore[arg-type]

    def file(self, name: str) -> Path | None:
        """Return another file of the text format, None if it is missing or not used."""
        return self.capture.file(name) if self.database is None else None

    def has(self, table: str, *names: str) -> bool:
        """Return whether the database has rows of a table with these columns."""
        return _has(self.database, table, *names)

    def has_analysis(self, table: str) -> bool:
        """Return whether ``analysis.db`` has rows of a table."""
        return _has(self.analysis, table)

    def rl_steps(self, counted: Int64s) -> Int64s:
        """Return RL steps for the steps that torch_npu counts, `UNKNOWN` if it counts none.

        In the capture of a single stage, torch_npu counts nothing and the step is that of the
        window.
        """
        first, stage = self.capture.window
        return np.where((counted >= 0) & (counted < 2**60), counted, first if stage else UNKNOWN)


def _has(database: SqliteTables | None, table: str, *names: str) -> bool:
    try:
        return database is not None and database.has(table, *names)
    except TraceError:  # a damaged page; the other tables may be sound
        return False


@dataclass(frozen=True, eq=False)
class Timeline:
    """The ranges that one capture marks.

    Attributes:
        marks: Everything that it marks with MSTX.
        ranges: MSTX ranges and steps.
        complete: Whether the files were read to their ends.
        first_ns: Wall-clock time of the first event, `UNKNOWN` if no file has it.
        problems: What is missing or doubtful.
    """

    marks: Marks
    ranges: Ranges
    complete: bool
    first_ns: int
    problems: list[str]


def open_captures(path: Path) -> tuple[list[OpenCapture], list[str]]:
    """Open the captures at a path, with remarks on guessed ranks and skipped folders.

    Raises:
        TraceError: There are none.
    """
    remarks: list[str] = []
    opened = [_open(capture) for capture in find_captures(path, remarks)]
    known = {each.rank for each in opened if each.rank >= 0}
    free = max(known, default=-1) + 1
    guessed: dict[tuple[str, int], int] = {}
    for at, each in enumerate(opened):
        if each.rank < 0:
            rank = guessed.setdefault(each.capture.process, free + len(guessed))
            opened[at] = replace(each, rank=rank)
    if len(guessed) > 1 or (guessed and known):
        remarks.append(
            f"no file has the ranks of {len(guessed)} processes; rlprof numbered them from {free}"
        )
    return opened, remarks


def _open(capture: Capture) -> OpenCapture:
    database, problems = _open_database(capture.database)
    path = capture.output / "analysis.db" if capture.output and capture.database else None
    analysis, more = _open_database(path if path and os.path.isfile(path) else None)
    capture = replace(capture, problems=(*capture.problems, *more, *problems))
    rank = -1 if capture.rank is None else capture.rank
    opened = OpenCapture(capture, rank, analysis=analysis, host=capture.process[0])
    if database is None:
        return opened
    try:
        return _with_properties(replace(opened, database=database), database)
    except TraceError as error:
        return replace(opened, capture=replace(capture, problems=(*capture.problems, str(error))))


def _with_properties(opened: OpenCapture, database: SqliteTables) -> OpenCapture:
    """Add rank, host, device and metadata of the database, except what the files also have."""
    settings = {name: database.setting("META_DATA", name) for name in _METADATA}
    decoded = {name: _json(text) for name, text in settings.items() if text is not None}
    capture = replace(opened.capture, metadata={**decoded, **opened.capture.metadata})
    mapped = database.numbers("RANK_DEVICE_MAP", "rankId", "deviceId")
    ranks = map(str, [capture.metadata.get("rlprof_rank"), *mapped["rankId"].tolist()])
    valid = [int(each) for each in ranks if each.isdecimal() and len(each) < 8]
    devices = mapped["deviceId"].tolist()
    hosts, chips = database.texts("HOST_INFO", "hostName"), database.texts("NPU_INFO", "name")
    return replace(
        opened,
        capture=capture,
        rank=next(iter(valid), -1) if opened.rank < 0 else opened.rank,
        device=devices[0] if len(devices) == 1 and devices[0] >= 0 else UNKNOWN,
        chip=next(iter(chips[1]), ""),
        host=opened.host or next(iter(hosts[1]), ""),
    )


def _open_database(path: Path | None) -> tuple[SqliteTables | None, list[str]]:
    if path is None:
        return None, []
    try:
        tables = SqliteTables(path)
    except TraceError as error:
        return None, [str(error)]
    return tables, [f"{path.name} {text}" for text in tables.problems]


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except NOT_JSON:
        return text


def _read_timeline(opened: OpenCapture) -> Timeline:
    capture = opened.capture
    problems, view, marks = list(capture.problems), None, Marks.none()
    if opened.database is not None:
        try:
            marks = database_marks(opened.database)
        except TraceError as error:
            problems.append(str(error))
    elif opened.trace is not None:
        view = opened.read_trace(*MARKS_WANTED)
        marks, problems = trace_marks(view), [*problems, *view.problems]
    elif not any(opened.file(name) for name in _SHEETS):
        parse = f"not parsed yet. Run: rlprof ascend parse {capture.path}"
        empty = "contains neither a trace nor a database that can be read"
        why = parse if capture.output is None else empty
        raise TraceError("; ".join(problems) or f"{capture.path}: {why}")
    ranges = classify_ranges(marks, capture.window)
    problems += ranges.problems
    if capture.is_cpu_only:
        problems.append("its times may be off by hundreds of ms: only the CPU was profiled")
    if len(ranges.start_ns):
        first_ns = int(ranges.start_ns.min())
    else:
        first_ns = _first_start(opened) if view is None else view.first_ns
        first_ns = first_ns if first_ns > 0 else capture.began_ns or UNKNOWN
    return Timeline(marks, ranges, view is None or view.complete, first_ns, problems)


def _first_start(opened: OpenCapture) -> int:
    starts = np.empty(0, np.int64)
    with suppress(TraceError):  # reading the table reports it
        if opened.database is not None:
            tables = ("TASK", "COMMUNICATION_OP")
            columns = [opened.database.numbers(table, "startNs")["startNs"] for table in tables]
            starts = np.concatenate(columns)
        elif (file := opened.file(KERNEL_SHEET)) is not None:
            starts = read_sheet(file, {"starttime(us)": microseconds}).number("starttime(us)")
    return int(min(starts[plausible(starts, starts)], default=UNKNOWN))


class TableReader(NamedTuple):
    """Reads one table of a capture.

    Attributes:
        columns: Columns of the table, without the rank in front.
        available: Returns whether a capture may have rows; cheap.
        read: Returns the rows of a capture, and remarks; may take seconds.
        row_numbers: Columns that refer to rows of the table, from 1 in each capture.
    """

    columns: tuple[Column, ...]
    available: Callable[[OpenCapture], bool]
    read: Callable[[OpenCapture], tuple[Frame, list[str]]]
    row_numbers: frozenset[str] = frozenset()


def read_table(
    name: str, reader: TableReader, captures: Sequence[OpenCapture], zero_ns: int
) -> Table:
    """Read one table of all captures that have it; unreadable captures are named in its note.

    Args:
        name: Name of the table.
        reader: Reads it.
        captures: Captures in the order of the rows.
        zero_ns: Wall-clock time of zero on the time axis.
    """
    columns = (Column("rank", "count"), *reader.columns)
    frames: list[dict[str, Cells]] = []
    remarks: list[str] = []
    for opened in filter(reader.available, captures):
        try:
            frame, own_remarks = reader.read(opened)
            frames.append(_complete(frame, reader, opened, sum(len(f["rank"]) for f in frames)))
        except TraceError as error:
            remarks.append(Loss(error))  # which names the file
            continue
        name_of_capture = opened.capture.path.name
        alone = len(captures) == 1
        remarks += [text if alone else with_name(name_of_capture, text) for text in own_remarks]
    if not frames:
        return Table(name, columns, abstained="; ".join(remarks))
    cells = [
        _joined([frame[column.name] for frame in frames], zero_ns * (column.kind == "time"))
        for column in columns
    ]
    return Table(name, columns, ColumnRows(cells), **noted(remarks))


def texts_of(column: Coded) -> list[str]:
    """Return the text of each row, "" if it is unknown."""
    codes, texts = column
    return [texts[code] if code >= 0 else "" for code in codes.tolist()]


def coded_texts(texts: Sequence[str]) -> Coded:
    """Return texts as a column in which "" is unknown."""
    codes, names = distinct(np.arange(len(texts)), texts)
    return np.where(np.array(texts, object) == "", -1, codes), names


def _complete(
    frame: Frame, reader: TableReader, opened: OpenCapture, rows_before: int
) -> dict[str, Cells]:
    """Add the rank, its device and missing columns; continue numbers of rows."""
    first = next(iter(frame.values()))
    count = len(first[0] if isinstance(first, tuple) else first)
    missing: dict[str, Cells] = {
        "text": (np.full(count, -1), []),
        "number": np.full(count, np.nan),
    }
    complete: dict[str, Cells] = {"rank": np.full(count, opened.rank)}
    for column in reader.columns:
        cells: Any = frame.get(column.name, missing.get(column.kind, np.full(count, UNKNOWN)))
        if column.name == "device":
            cells = np.where(cells == UNKNOWN, opened.device, cells)
        if column.name in reader.row_numbers:
            cells = np.where(cells == UNKNOWN, UNKNOWN, cells + rows_before)
        complete[column.name] = cells
    return complete


def _joined(parts: list[Any], zero_ns: int) -> Any:
    """Join one column of all captures, with None for unknown cells."""
    if isinstance(parts[0], tuple):
        return end_to_end(parts)
    joined = np.concatenate(parts)
    if joined.dtype.kind == "f":
        values, at = np.unique(joined, return_inverse=True)
        return np.where(np.isnan(joined), -1, at), values.tolist()
    return known(np.where(joined == UNKNOWN, UNKNOWN, joined - zero_ns))
