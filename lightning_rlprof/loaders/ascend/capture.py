"""Captures of torch_npu.profiler: their files on disk, opened, with their ranges and tables.

A table has rows of several captures under the same columns, on one time axis.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.ascend.csv_sheets import microseconds, read_sheet
from lightning_rlprof.loaders.ascend.mstx import (
    MARKS_WANTED,
    Marks,
    Ranges,
    classify_ranges,
    database_marks,
    trace_marks,
)
from lightning_rlprof.loaders.ascend.trace_view import (
    TRACE_NAMES,
    TraceView,
    is_trace_view,
    read_trace_view,
)
from lightning_rlprof.loaders.chrome_events import MAX_TIME
from lightning_rlprof.loaders.join_ranks import Piece, join_tables
from lightning_rlprof.loaders.rank_names import rank_in_name
from lightning_rlprof.loaders.sqlite_tables import SqliteTables, is_sqlite
from lightning_rlprof.records.run_directory import capture_in_name, rank_files
from lightning_rlprof.tables.arrays import Int64s, distinct_tuples
from lightning_rlprof.tables.event_times import device_times, plausible
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, distinct, known
from lightning_rlprof.tables.table import Column, ColumnRows, Loss, Table, noted

OUTPUT = "ASCEND_PROFILER_OUTPUT"
"""Folder that the parser of torch_npu writes in a capture."""

_ENDING = "_ascend_pt"
_DATABASE = "ascend_pytorch_profiler*.db"
_MAX_EMPTY_FOLDERS = 50_000  # Folders in a row without a capture, after which the search ends.
_MAX_JSON_BYTES = 1 << 26  # Bytes; the JSON of a capture takes kilobytes.
_MAX_RANKS = 2**20
_NAME = re.compile(r"(.+)_(\d{1,9})_\d{17}_ascend_pt")
_INFO_FILE = re.compile(r"profiler_info(?:_(\d{1,7}))?\.json")
_DATABASE_FILE = re.compile(r"ascend_pytorch_profiler_(\d{1,7})\.db")

# Every database of torch_npu or msprof with any rows has one of these tables.
_KNOWN_TABLES = {"MSTX_EVENTS", "PYTORCH_API", "TASK", "CANN_API", "COMMUNICATION_OP"}
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

StagesOfRun = Callable[[int, Int64s], tuple[Coded, Int64s]]
"""Returns stage and step, 0 without, for times of a rank since 1970, which may be `UNKNOWN`."""


@dataclass(frozen=True, eq=False)
class Capture:
    """One capture: one rank in one window.

    `open_captures` opens it: it is read from its database if that can be opened, else from its text
    files, and what is not used is None.

    Attributes:
        path: A directory ``*_ascend_pt``, or one of its files.
        output: Folder of the parsed files of the text format, None without.
        trace: Its ``trace_view.json``, if there is one; alone, it may have any name.
        database_file: Its ``ascend_pytorch_profiler*.db``, if there is one.
        rank: Global rank, -1 if no file has it.
        info: Content of ``profiler_info*.json``.
        metadata: Content of ``profiler_metadata.json``, such as ``role`` and ``rlprof_*``.
        problems: What could not be read of it.
        database: The database, open.
        analysis: ``analysis.db`` next to it, likewise.
        device: Number of the rank's device, `UNKNOWN` without a database that has it.
        chip: Name of the device, "" without a database that has it.
        host: Name of the host, "" if unknown.
        stages_of_run: Returns stage and step of the run that the capture is part of; None if it
            is not part of a run.
    """

    path: Path
    output: Path | None = None
    trace: Path | None = None
    database_file: Path | None = None
    rank: int = -1
    info: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    database: SqliteTables | None = None
    analysis: SqliteTables | None = None
    device: int = UNKNOWN
    chip: str = ""
    host: str = ""
    stages_of_run: "StagesOfRun | None" = None

    @cached_property
    def timeline(self) -> "Timeline":
        """The ranges of the capture.

        Raises:
            TraceError: Nothing of it can be read; the text says why, and what to do.
        """
        return _read_timeline(self)

    def file(self, name: str) -> Path | None:
        """Return one of the parsed files of the text format, None if it is missing or not used."""
        path = None if self.output is None else self.output / name
        return path if path is not None and os.path.isfile(path) else None

    def read_trace(self, *wanted: int) -> TraceView:
        """Read some kinds of rows of the trace, see `read_trace_view`."""
        return read_trace_view(self.trace, *wanted)  # type: ignore[arg-type]

    def has(self, table: str, *names: str) -> bool:
        """Return whether the database has rows of a table with these columns."""
        return _has(self.database, table, *names)

    def has_analysis(self, table: str) -> bool:
        """Return whether ``analysis.db`` has rows of a table."""
        return _has(self.analysis, table)

    @property
    def window(self) -> tuple[int, str]:
        """First step and stage of the window; 0 and "" if rlprof did not record the capture."""
        names = [self.metadata.get("rlprof_window"), self.path.parent.name, self.path.name]
        return next(filter(None, (capture_in_name(str(name)) for name in names)), (0, ""))

    @property
    def groups(self) -> dict[str, list[Any]]:
        """Global ranks of each communicator, as the program passed them."""
        groups = self.metadata.get("parallel_group_info")
        found = {}
        for name, group in groups.items() if isinstance(groups, dict) else ():
            ranks = group.get("global_ranks") if isinstance(group, dict) else None
            if isinstance(ranks, list) and ranks:
                found[name] = ranks
        return found

    @property
    def process(self) -> tuple[str, int]:
        """Host and process id in the name of the directory; "" and 0 if it has another name."""
        found = _NAME.fullmatch(self.path.name)
        return (found[1], int(found[2])) if found else ("", 0)

    @property
    def recorded(self) -> tuple[int, int] | None:
        """Wall-clock times of the start and the end of the recording, None if unknown."""
        end, start = self.info.get("end_info"), self.info.get("start_info")
        try:
            ran = end["MonotonicTimeEnd"] - start["start_monotonic"]  # type: ignore[index]
            ended = int(end["collectionTimeEnd"])  # type: ignore[index]
            began = int(ended - ran)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return (began, ended) if 0 < began <= ended < MAX_TIME else None

    def option(self, name: str, block: str = "experimental_config") -> Any:
        """Return an option of the profiler, None if the files do not have it."""
        config = self.info.get("config")
        options = config.get(block) if isinstance(config, dict) else None
        return options.get(name) if isinstance(options, dict) else None

    @property
    def is_cpu_only(self) -> bool:
        """Whether the profiler was told to record no device."""
        activities = self.option("activities", "common_config")
        return isinstance(activities, list) and "NPU" not in str(activities)

    def rl_steps(self, counted: Int64s) -> Int64s:
        """Return RL steps for the steps that torch_npu counts, `UNKNOWN` if it counts none.

        In the capture of a single stage, torch_npu counts nothing and the step is that of the
        window.
        """
        first, stage = self.window
        return np.where((counted >= 0) & (counted < 2**60), counted, first if stage else UNKNOWN)

    def filled(self, stage: Coded, step: Int64s, launch_ns: Int64s) -> tuple[Coded, Int64s]:
        """Return stage and step of the run at each launch, if the capture knows neither."""
        if self.stages_of_run is None or (stage[0] >= 0).any() or (step > 0).any():
            return stage, step
        return self.stages_of_run(self.rank, launch_ns)


def _has(database: SqliteTables | None, table: str, *names: str) -> bool:
    try:
        return database is not None and database.has(table, *names)
    except TraceError:  # One page is damaged; other tables may be sound.
        return False


def is_ascend(path: Path) -> bool:
    """Return whether a path is output of torch_npu.profiler, or a directory with such captures.

    Directories and ``ascend_pytorch_profiler*.db`` are recognized by name, other SQLite files by
    their tables, traces by their first events.
    """
    if os.path.isdir(path):
        return next(_folders(path, []), None) is not None
    if not os.path.isfile(path):
        return False
    if path.match(_DATABASE):
        return True
    try:
        if not is_sqlite(path):
            return is_trace_view(path)
        tables = SqliteTables(path).columns
        return "STRING_IDS" in tables and not _KNOWN_TABLES.isdisjoint(tables)
    except TraceError:
        return False


def find_captures(path: Path, remarks: list[str] | None = None) -> list[Capture]:
    """Return the captures at a path by name, not opened; of a file only those of its format.

    Args:
        path: A directory or a file.
        remarks: Skipped folders are appended.

    Raises:
        TraceError: There are none.
    """
    if os.path.isdir(path):
        remarks = [] if remarks is None else remarks
        found = [_in_folder(folder) for folder in sorted(_folders(path, remarks))]
        if not found:
            text = f"{path}: contains no output of torch_npu.profiler (*{_ENDING})"
            raise TraceError("; ".join([text, *remarks]))
        return found
    if not is_ascend(path):
        expected = f"expected {TRACE_NAMES[0]} or {_DATABASE}"
        raise TraceError(f"{path}: not an output of torch_npu.profiler ({expected})")
    output = path.parent.absolute()
    folder = output.parent if output.name == OUTPUT else output
    if path.match(_DATABASE) or is_sqlite(path):
        return [_described(Capture(path, database_file=path), folder)]
    # The files beside a trace with another name may be of another capture.
    own = output if path.name in TRACE_NAMES else None
    return [_described(Capture(path, own, path), folder)]


def _folders(path: Path, remarks: list[str]) -> Iterator[Path]:
    """Yield the capture directories at and below a path.

    Links are not followed, and captures inside a run directory are skipped.
    """
    resolved = path.resolve()
    path = path if path.name == resolved.name else resolved  # The path "." has no name.
    if is_capture(path) or _has_output_files(path):
        yield path
        return

    def skip(error: OSError) -> None:
        remarks.append(Loss(f"skipped {error.filename}: it cannot be read ({error.strerror})"))

    empty = 0
    for at, names, _ in os.walk(path, onerror=skip):
        folder = Path(at)
        if folder != path and rank_files(folder):
            names.clear()
        captures = [name for name in sorted(names) if is_capture(folder / name)]
        yield from (folder / name for name in captures if not (folder / name).is_symlink())
        names[:] = sorted({*names}.difference(captures))
        empty = 0 if captures else empty + 1
        if empty > _MAX_EMPTY_FOLDERS:
            last = f"the last {_MAX_EMPTY_FOLDERS:,} folders contain no capture"
            remarks.append(f"the search for captures ended at {folder}: {last}")
            return


def is_capture(path: Path) -> bool:
    """Return whether a directory is one capture by its names, parsed or not."""
    return path.name == OUTPUT or path.name.endswith(_ENDING) or os.path.isdir(path / OUTPUT)


def _has_output_files(path: Path) -> bool:
    return _trace_in(path) is not None or any(path.glob(_DATABASE))


def _trace_in(output: Path) -> Path | None:
    return next(filter(os.path.isfile, (output / name for name in TRACE_NAMES)), None)


def _in_folder(path: Path) -> Capture:
    """Return the capture of a directory ``*_ascend_pt``, or of the output folder in it."""
    inner = path / OUTPUT
    output = inner if os.path.isdir(inner) else path
    if output.name != OUTPUT and not _has_output_files(path):
        return _described(Capture(path), path)
    databases = sorted(output.glob(_DATABASE))
    others = [f"{file.name} is left out: several databases" for file in databases[1:]]
    found = Capture(
        path,
        output,
        _trace_in(output),
        next(iter(databases), None),
        problems=tuple(others),
    )
    return _described(found, output.absolute().parent if path.name == OUTPUT else path)


def _described(capture: Capture, folder: Path) -> Capture:
    """Add the rank, and the content of the JSON files in the directory."""
    problems = [*capture.problems]
    file = next(iter(sorted(folder.glob("profiler_info*.json"))), None)
    info = _json(file, problems) if file else {}
    metadata = _json(folder / "profiler_metadata.json", problems)
    names = ((_INFO_FILE, file), (_DATABASE_FILE, capture.database_file))
    found = [pattern.fullmatch(path.name) for pattern, path in names if path]
    told = [metadata.get("rlprof_rank"), info.get("rank_id"), *(each and each[1] for each in found)]
    rank = _first_rank([rank_in_name(capture.trace.name) if capture.trace else None, *told])
    return replace(capture, rank=rank, info=info, metadata=metadata, problems=tuple(problems))


def _first_rank(told: Iterable[Any]) -> int:
    """Return the first valid rank, -1 without; torch_npu writes a number or a text."""
    texts = (text for text in map(str, told) if text.isdecimal() and len(text) < 8)
    return next((rank for rank in map(int, texts) if rank < _MAX_RANKS), -1)


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_JSON_BYTES), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, *NOT_JSON) as error:
        reason = error.strerror if isinstance(error, OSError) else "damaged or cut off"
        problems.append(f"{path.name} cannot be read ({reason})")
        return {}


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


def open_captures(path: Path) -> tuple[list[Capture], list[str]]:
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
            rank = guessed.setdefault(each.process, free + len(guessed))
            opened[at] = replace(each, rank=rank)
    if len(guessed) > 1 or (guessed and known):
        remarks.append(
            f"no file has the ranks of {len(guessed)} processes; rlprof numbered them from {free}"
        )
    return opened, remarks


def _open(capture: Capture) -> Capture:
    """Open the databases; without one that can be read, it is one of the text format."""
    problems = [*capture.problems]
    file = capture.database_file
    beside = file.parent / "analysis.db" if file else None
    analysis = _open_database(beside if beside and os.path.isfile(beside) else None, problems)
    database = _open_database(file, problems)
    opened = replace(capture, analysis=analysis, host=capture.process[0])
    if database is not None:
        try:
            opened = _with_properties(opened, database)
        except TraceError as error:
            problems.append(str(error))
    return replace(opened, problems=tuple(problems))


def _with_properties(opened: Capture, database: SqliteTables) -> Capture:
    """Add rank, host, device and metadata of the database, except what the files also have."""
    settings = {name: database.setting("META_DATA", name) for name in _METADATA}
    decoded = {name: _decoded(text) for name, text in settings.items() if text is not None}
    metadata = {**decoded, **opened.metadata}
    mapped = database.numbers("RANK_DEVICE_MAP", "rankId", "deviceId")
    devices = mapped["deviceId"].tolist()
    told = (metadata.get("rlprof_rank"), *mapped["rankId"].tolist())
    hosts, chips = database.texts("HOST_INFO", "hostName"), database.texts("NPU_INFO", "name")
    return replace(
        opened,
        output=None,
        trace=None,
        metadata=metadata,
        rank=_first_rank(told) if opened.rank < 0 else opened.rank,
        database=database,
        device=devices[0] if len(devices) == 1 and devices[0] >= 0 else UNKNOWN,
        chip=next(iter(chips[1]), ""),
        host=opened.host or next(iter(hosts[1]), ""),
    )


def _open_database(path: Path | None, problems: list[str]) -> SqliteTables | None:
    if path is None:
        return None
    try:
        tables = SqliteTables(path)
    except TraceError as error:
        problems.append(str(error))
        return None
    problems += [f"{path.name} {text}" for text in tables.problems]
    return tables


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except NOT_JSON:
        return text


def _read_timeline(capture: Capture) -> Timeline:
    problems, view, marks = list(capture.problems), None, Marks.none()
    if capture.database is not None:
        try:
            marks = database_marks(capture.database)
        except TraceError as error:
            problems.append(str(error))
    elif capture.trace is not None:
        view = capture.read_trace(*MARKS_WANTED)
        marks, problems = trace_marks(view), [*problems, *view.problems]
    elif not any(capture.file(name) for name in _SHEETS):
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
        first_ns = _first_start(capture) if view is None else view.first_ns
        first_ns = first_ns if first_ns > 0 else (capture.recorded or (UNKNOWN,))[0]
    return Timeline(marks, ranges, view is None or view.complete, first_ns, problems)


def _first_start(capture: Capture) -> int:
    starts = np.empty(0, np.int64)
    with suppress(TraceError):  # Reading the table reports the error.
        if capture.database is not None:
            tables = ("TASK", "COMMUNICATION_OP")
            columns = [capture.database.numbers(table, "startNs")["startNs"] for table in tables]
            starts = np.concatenate(columns)
        elif (file := capture.file(KERNEL_SHEET)) is not None:
            starts = read_sheet(file, {"starttime(us)": microseconds}).number("starttime(us)")
    return int(min(starts[plausible(starts, starts)], default=UNKNOWN))


class TableReader(NamedTuple):
    """Reads one table of a capture.

    Attributes:
        columns: Columns of the table, without the rank in front.
        available: Returns whether a capture may have rows; cheap.
        read: Returns the rows of a capture, and remarks; may take seconds.
    """

    columns: tuple[Column, ...]
    available: Callable[[Capture], bool]
    read: Callable[[Capture], tuple[Frame, list[str]]]


def read_table(name: str, reader: TableReader, captures: Sequence[Capture], zero_ns: int) -> Table:
    """Read one table of all captures that have it; unreadable captures are named in its note.

    Args:
        name: Name of the table.
        reader: Reads it.
        captures: Captures in the order of the rows.
        zero_ns: Wall-clock time of zero on the time axis.
    """
    alone = len(captures) == 1
    pieces = [
        Piece(() if alone else (each.rank,), -zero_ns, partial(_table_of, name, reader, each))
        for each in filter(reader.available, captures)
    ]
    return join_tables(name, pieces)


def _table_of(name: str, reader: TableReader, opened: Capture) -> Table:
    """Return the table of one capture with its rank, its device and all columns, since 1970."""
    frame, remarks = reader.read(opened)
    if {"device", "stream", "start", "duration"} <= frame.keys():
        frame, doubts = _checked(name, frame, opened.recorded)
        remarks = [*doubts, *remarks]
    first = next(iter(frame.values()))
    count = len(first[0] if isinstance(first, tuple) else first)
    cells: list[Any] = [np.full(count, opened.rank)]
    for column in reader.columns:
        own: Any = frame.get(column.name, np.full(count, UNKNOWN))
        if column.kind == "text" and column.name not in frame:
            own = np.full(count, -1), []
        elif column.name == "device":
            own = np.where(own == UNKNOWN, opened.device, own)
        if not isinstance(own, tuple):
            own = np.ma.masked_invalid(own) if own.dtype.kind == "f" else known(own)
        cells.append(own)
    columns = (Column("rank", "count"), *reader.columns)
    return Table(name, columns, ColumnRows(cells), **noted(remarks))


def _checked(
    name: str, frame: Mapping[str, Any], recorded: tuple[int, int] | None
) -> tuple[Frame, list[str]]:
    """Return what a device did without times that cannot be true, and what is wrong with them."""
    device, stream, start = frame["device"], frame["stream"], frame["start"]
    _, lane = distinct_tuples(np.array([device, stream]))
    lane = np.where(stream == UNKNOWN, -1, lane)
    no_launch = np.full(len(lane), -1)
    times = device_times(lane, start, start + frame["duration"], no_launch, recorded)
    called = next(frame[each] for each in ("kernel", "kind", "operation") if each in frame)
    rows = np.flatnonzero(~times.untimed)
    checked = {**frame, "duration": times.end_ns - start}
    kept = {
        each: (cells[0][rows], cells[1]) if isinstance(cells, tuple) else cells[rows]
        for each, cells in checked.items()
    }
    return kept, times.remarks({"memcpy": "copies"}.get(name, name), called)


def texts_of(column: Coded) -> list[str]:
    """Return the text of each row, "" if it is unknown."""
    codes, texts = column
    return [texts[code] if code >= 0 else "" for code in codes.tolist()]


def coded_texts(texts: Sequence[str]) -> Coded:
    """Return texts as a column in which "" is unknown."""
    codes, names = distinct(np.arange(len(texts)), texts)
    return np.where(np.array(texts, object) == "", -1, codes), names
