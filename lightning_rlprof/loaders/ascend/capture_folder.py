"""Captures of torch_npu.profiler on disk: their files, and the JSON that describes them."""

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.ascend.units import LARGEST_TIME
from lightning_rlprof.loaders.sqlite_tables import SqliteTables, is_sqlite
from lightning_rlprof.records.run_directory import capture_in_name, rank_files
from lightning_rlprof.tables.table import Loss

OUTPUT = "ASCEND_PROFILER_OUTPUT"
"""Folder that the parser of torch_npu writes in a capture."""

_ENDING, _TRACE = "_ascend_pt", "trace_view.json"
_DATABASE = "ascend_pytorch_profiler*.db"
_MAX_EMPTY_FOLDERS = 50_000  # in a row, then the tree is considered unrelated
_MAX_JSON_BYTES = 1 << 26  # the JSON of a capture takes kilobytes
_MAX_RANKS = 2**20
_NAME = re.compile(r"(.+)_(\d{1,9})_\d{17}_ascend_pt")
_INFO_FILE = re.compile(r"profiler_info(?:_(\d{1,7}))?\.json")
_DATABASE_FILE = re.compile(r"ascend_pytorch_profiler_(\d{1,7})\.db")
# Every database of torch_npu or msprof with any rows has one of these tables.
_KNOWN_TABLES = {"MSTX_EVENTS", "PYTORCH_API", "TASK", "CANN_API", "COMMUNICATION_OP"}


@dataclass(frozen=True)
class Capture:
    """One capture: one rank in one window.

    Attributes:
        path: A directory ``*_ascend_pt``, or one of its files.
        output: Folder of the parsed files, None without.
        trace: Its ``trace_view.json``, if there is one.
        database: Its ``ascend_pytorch_profiler*.db``, if there is one.
        rank: Global rank, None if no file has it.
        info: Content of ``profiler_info*.json``.
        metadata: Content of ``profiler_metadata.json``, such as ``role`` and ``rlprof_*``.
        problems: Files of these that could not be read.
    """

    path: Path
    output: Path | None
    trace: Path | None
    database: Path | None
    rank: int | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def file(self, name: str) -> Path | None:
        """Return one of the parsed files of the text format, None if it is missing."""
        if self.output is None or (os.path.isfile(self.path) and self.trace is None):
            return None
        path = self.output / name
        return path if os.path.isfile(path) else None

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
    def began_ns(self) -> int:
        """Wall-clock time of the start, 0 if unknown."""
        end, start = self.info.get("end_info"), self.info.get("start_info")
        try:
            ran = end["MonotonicTimeEnd"] - start["start_monotonic"]  # type: ignore[index]
            began = int(end["collectionTimeEnd"] - ran)  # type: ignore[index]
        except (KeyError, TypeError, ValueError, OverflowError):
            return 0
        return began if 0 < began < LARGEST_TIME else 0

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


def is_ascend(path: Path) -> bool:
    """Return whether a path is output of torch_npu.profiler, or a directory with such captures.

    ``*_ascend_pt``, the folder in it, ``trace_view.json`` and ``ascend_pytorch_profiler*.db`` are
    recognized by name, other SQLite files by their tables.
    """
    if os.path.isdir(path):
        return next(_folders(path, []), None) is not None
    if not os.path.isfile(path):
        return False
    if path.name == _TRACE or path.match(_DATABASE):
        return True
    try:
        tables = SqliteTables(path).columns if is_sqlite(path) else {}
        return "STRING_IDS" in tables and not _KNOWN_TABLES.isdisjoint(tables)
    except TraceError:
        return False


def find_captures(path: Path, remarks: list[str] | None = None) -> list[Capture]:
    """Return the captures at a path by name; of a file only those of its format.

    Args:
        path: A directory or a file.
        remarks: Skipped folders are appended.

    Raises:
        TraceError: There are none.
    """
    if os.path.isdir(path):
        remarks = [] if remarks is None else remarks
        found = [each for folder in sorted(_folders(path, remarks)) for each in _in_folder(folder)]
        if not found:
            text = f"{path}: contains no output of torch_npu.profiler (*{_ENDING})"
            raise TraceError("; ".join([text, *remarks]))
        return found
    if not is_ascend(path):
        raise TraceError(
            f"{path}: not an output of torch_npu.profiler (expected {_TRACE} or {_DATABASE})"
        )
    output = path.parent.absolute()
    folder = output.parent if output.name == OUTPUT else output
    files = (path, None) if path.name == _TRACE else (None, path)
    return [_described(Capture(path, output, *files), folder)]


def _folders(path: Path, remarks: list[str]) -> Iterator[Path]:
    """Yield the capture directories at and below a path, the nearest first.

    Links are not followed, and captures inside a run directory are skipped.
    """
    resolved = path.resolve()
    path = path if path.name == resolved.name else resolved  # "." has no name
    if is_capture(path) or _has_output_files(path):
        yield path
        return
    waiting, empty = deque([path]), 0
    while waiting and empty < _MAX_EMPTY_FOLDERS:
        empty += 1
        for each in _subfolders(waiting.popleft(), path, remarks):
            if is_capture(each):
                empty = 0
                yield each
            else:
                waiting.append(each)
    if waiting:
        remarks.append(
            f"skipped {len(waiting)} folders, such as {waiting[0]}: the last "
            f"{_MAX_EMPTY_FOLDERS:,} folders contain no capture"
        )


def is_capture(path: Path) -> bool:
    """Return whether a directory is one capture by its names, parsed or not."""
    return path.name == OUTPUT or path.name.endswith(_ENDING) or os.path.isdir(path / OUTPUT)


def _subfolders(folder: Path, top: Path, remarks: list[str]) -> list[Path]:
    """Return the folders in a folder, sorted; none of a run directory below the top."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError as error:
        remarks.append(Loss(f"skipped {folder}: it cannot be read ({error.strerror})"))
        return []
    return sorted(found) if folder == top or not rank_files(folder) else []


def _has_output_files(path: Path) -> bool:
    return os.path.isfile(path / _TRACE) or any(path.glob(_DATABASE))


def _in_folder(path: Path) -> list[Capture]:
    """Return the captures of a directory ``*_ascend_pt``, or of the output folder in it.

    There is one for each database, as several ranks may write into one folder. All other files
    belong to the rank in ``profiler_info*.json``, else to the first database.
    """
    inner = path / OUTPUT
    output = inner if os.path.isdir(inner) else path
    if output.name != OUTPUT and not _has_output_files(path):
        return [_described(Capture(path, None, None, None), path)]
    trace = output / _TRACE
    folder = output.absolute().parent if path.name == OUTPUT else path
    whole = Capture(path, output, trace if os.path.isfile(trace) else None, None)
    rank = _described(whole, folder).rank
    databases = sorted(sorted(output.glob(_DATABASE)), key=lambda each: _number(each) != rank)
    if len(databases) < 2:
        return [_described(replace(whole, database=next(iter(databases), None)), folder)]
    first = replace(whole, database=databases[0])
    found = [first, *(Capture(each, None, None, each) for each in databases[1:])]
    return [
        each if (number := _number(each.database)) is None else replace(each, rank=number)
        for each in (_described(capture, folder) for capture in found)
    ]


def _number(database: Path | None) -> int | None:
    """Return the rank in the name of a database."""
    named = _DATABASE_FILE.fullmatch(database.name) if database else None
    return _rank(named[1]) if named else None


def _described(capture: Capture, folder: Path) -> Capture:
    """Add the rank, and the content of the JSON files in the directory."""
    problems: list[str] = []
    number = _number(capture.database)
    files = sorted(folder.glob("profiler_info*.json"))
    file = min(files, key=lambda each: each.name != f"profiler_info_{number}.json", default=None)
    info = _json(file, problems) if file else {}
    metadata = _json(folder / "profiler_metadata.json", problems)
    named = _INFO_FILE.fullmatch(file.name) if file else None
    ranks = (
        metadata.get("rlprof_rank"),
        info.get("rank_id"),
        named[1] if named else None,
        number,
    )
    rank = next((n for each in ranks if (n := _rank(each)) is not None), None)
    parts = (capture.path, capture.output, capture.trace, capture.database)
    return Capture(*parts, rank, info, metadata, tuple(problems))


def _rank(value: Any) -> int | None:
    """Return a valid rank; torch_npu writes a number or a text, and -1 for none."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 8 and int(text) < _MAX_RANKS else None


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
