"""Parse raw output of torch_npu.profiler with torch_npu, several captures at a time.

The parser may fail without an error, and writes ``analyse.done`` after a failure, too. A trace file
proves little, as host operators alone make one. So each kind of row that the raw data has is
searched for in the files that it wrote.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from lightning_rlprof.errors import RecorderError, TraceError
from lightning_rlprof.loaders.ascend.capture import OUTPUT, Capture, find_captures
from lightning_rlprof.loaders.chrome_events import read_batches
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.system.subprocess_python import Interpreter, InterpreterError, ask

_GET_TORCH_NPU = (
    'pip install "lightning-rlprof[npu]" on a machine with CANN and source its set_env.sh, '
    "or move the raw data to a machine that has both"
)

Export = Literal["text", "db"]
"""Formats that the parser writes."""

State = Literal["cached", "up to date", "failed"]
"""Result for one directory: parsed now, parsed before, or failed."""

_SUFFIX = "_ascend_pt"
_POLL_S = 0.1
_MAX_MESSAGE = 300  # Characters.
_IMPORT_TIMEOUT_S = 300.0
# The parser forks, sets the start method of multiprocessing and refuses to run in daemons, so each
# directory is parsed in a process that is not a daemon.
_PARSE = """
import json
from torch_npu.profiler.profiler import analyse
analyse(sys.argv[1], **json.loads(sys.argv[2]))
"""
_ERROR = re.compile(r"^\[[-\d :]+\] \[ERROR\] \[\d+\] \S+: ")
_RANGES, _HOST, _DEVICE = "MSTX ranges", "host operators", "device tasks"
_TABLES = {_RANGES: "MSTX_EVENTS", _HOST: "PYTORCH_API", _DEVICE: "TASK"}
_TASKS = ("stars_soc", "hwts")  # CANN's raw files with tasks have these prefixes.
_HARDWARE = b'"Ascend Hardware"'
_RANGE_KEY = b'"event_type"'


@dataclass(frozen=True)
class Outcome:
    """Result of parsing one ``…_ascend_pt`` directory.

    Attributes:
        path: The directory.
        rank: Rank of its data, None if the files do not contain it.
        state: ``cached`` (parsed now), ``up to date`` (parsed before and complete) or ``failed``.
        files: Names of the files in its output folder.
        message: Why it failed, or what the raw data lacks and which errors the parser printed.
        seconds: How long the parser ran.
    """

    path: Path
    rank: int | None
    state: State
    files: tuple[str, ...] = ()
    message: str = ""
    seconds: float = 0.0


class Options(NamedTuple):
    """How to parse.

    Attributes:
        jobs: Directories parsed at a time; each uses several processes, and a few times its size
            in memory.
        timeout_s: Longest time for one directory.
        exports: Formats to write; if empty, those chosen when it was recorded.
        reparse: Parse again what is up to date.
    """

    jobs: int = 1
    timeout_s: float = 3600.0
    exports: Sequence[Export] = ()
    reparse: bool = False


def ascend_directories(paths: Sequence[Path]) -> list[Path]:
    """Return the ``…_ascend_pt`` directories at and below the paths, sorted, without duplicates.

    Links are not followed.

    Raises:
        TraceError: One of the paths is not a directory, or contains no such directory.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise TraceError(f"{path}: {'is a file' if path.exists() else 'no such directory'}")
        named = next((each for each in (path, path.resolve()) if each.name.endswith(_SUFFIX)), None)
        below = (each for each in path.rglob(f"*{_SUFFIX}") if each.is_dir())
        directories = [named] if named else [each for each in below if not each.is_symlink()]
        if not directories:
            raise TraceError(
                f"{path}: contains no *{_SUFFIX} directory; torch_npu.profiler writes one per "
                "capture"
            )
        for directory in directories:
            found.setdefault(directory.resolve(), directory)
    return sorted(found.values())


def parse_captures(
    directories: Sequence[Path],
    options: Options,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Parse the directories that are not up to date, and return one outcome per directory.

    Each directory is parsed in a separate process. That process is killed with its children after
    ``timeout_s``, and when this process ends. `check_content` checks the output before and after,
    so a second call resumes an interrupted one. The parser empties the output folder first.

    Args:
        directories: See `ascend_directories`.
        options: How to parse.
        progress: Called with (directories done, all directories).

    Raises:
        RecorderError: Something has to be parsed, but torch_npu or CANN is missing here.
    """
    outcomes = {each: found for each in directories if (found := _without_parser(each, options))}
    todo = [each for each in directories if each not in outcomes]
    if todo:
        _check_parser(todo)
    report = progress or (lambda done, total: None)
    report(len(outcomes), len(directories))
    for done in _run(todo, options):
        outcomes[done.path] = done
        report(len(outcomes), len(directories))
    return [outcomes[directory] for directory in directories]


def _without_parser(directory: Path, options: Options) -> Outcome | None:
    """Return the outcome of a directory that is up to date or cannot be parsed, else None."""
    raw, capture = has_raw_data(directory), find_captures(directory)[0]
    if not (options.reparse and raw):
        before = check_content(capture, options.exports)
        if not before.missing:
            return Outcome(directory, _rank(capture), "up to date", before.files, before.note)
    if not raw:
        message = f"{before.missing}, and it has no raw data (FRAMEWORK, PROF_*) to parse"
    elif not os.access(directory, os.W_OK):
        message = "the directory is read-only: copy it to a writable place and parse the copy"
    else:
        return None
    return Outcome(directory, _rank(capture), "failed", (), message)


def _rank(capture: Capture) -> int | None:
    return None if capture.rank < 0 else capture.rank


def _check_parser(todo: Sequence[Path]) -> None:
    """Raise RecorderError where torch_npu or msprof is missing."""
    try:
        ask("import torch_npu.profiler.profiler", timeout_s=_IMPORT_TIMEOUT_S)
    except InterpreterError as error:
        raise RecorderError(
            f"parsing needs torch_npu, which cannot be imported ({error}): {_GET_TORCH_NPU}"
        ) from error
    if shutil.which("msprof") is None and any(device_data(directory) for directory in todo):
        raise RecorderError(f"parsing needs msprof of CANN, which is not on PATH: {_GET_TORCH_NPU}")


def _run(todo: Sequence[Path], options: Options) -> Iterator[Outcome]:
    waiting, running = list(todo), list[_Parser]()
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                running.append(_Parser(waiting.pop(0), options))
            for parser in [parser for parser in running if parser.ended()]:
                running.remove(parser)
                yield parser.outcome()
            time.sleep(_POLL_S if running else 0)
    finally:
        for parser in running:
            parser.stop()


class _Parser:
    def __init__(self, directory: Path, options: Options) -> None:
        self._directory, self._options = directory, options
        self._began = time.monotonic()
        # This limits the parser's pool for several directories; for one, it starts more processes.
        keywords: dict[str, Any] = {"max_process_number": 1}
        keywords |= {"export_type": [*options.exports]} if options.exports else {}
        self._process = Interpreter(_PARSE, str(directory.absolute()), json.dumps(keywords))
        self._status: int | None = None

    def ended(self) -> bool:
        self._status = self._process.wait(0)
        return self._status is not None or self._seconds() > self._options.timeout_s

    def stop(self) -> None:
        """Kill the process, and remove the partial output of one that did not end."""
        self._process.stop()
        if self._status is None:
            shutil.rmtree(self._directory / OUTPUT, ignore_errors=True)

    def outcome(self) -> Outcome:
        output = self._process.output().replace(f"{self._directory.resolve()}/", "")
        seconds, errors = self._seconds(), _printed_errors(output)
        self.stop()
        capture = find_captures(self._directory)[0]
        content = check_content(capture, self._options.exports)
        messages = [content.missing or content.note]
        if self._status is None:
            limit = self._options.timeout_s
            messages = [f"stopped after {limit:g} s (--timeout)"]
        elif self._status:
            messages.append(f"its process ended with status {self._status}")
        # Errors of the parser matter even if its output is complete.
        messages.append(errors and f"torch_npu: {errors}")
        state: State = "failed" if content.missing else "cached"
        message = "; ".join(filter(None, messages))
        return Outcome(self._directory, _rank(capture), state, content.files, message, seconds)

    def _seconds(self) -> float:
        return time.monotonic() - self._began


def _printed_errors(output: str) -> str:
    """Return the first two errors that were printed (later ones follow from them).

    If there are none, return the last line if it is an exception's. Spinners are skipped.
    """
    lines = [line.strip().lstrip("|/-\\") for line in re.split(r"[\r\n\b]+", output)]
    errors = [_ERROR.sub("", line) for line in lines if _ERROR.match(line)][:2]
    last = next(filter(None, reversed(lines)), "")
    if not errors and re.match(r"[\w.]+(Error|Exception)\b", last):
        errors = [last]
    text = " / ".join(errors)
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 1]}…"


class Content(NamedTuple):
    """What the output folder of a capture contains.

    Attributes:
        files: Names of its files.
        missing: What the raw data has and the output lacks, "" if it is complete.
        note: What the raw data itself lacks, "" if nothing.
    """

    files: tuple[str, ...]
    missing: str
    note: str = ""


def check_content(capture: Capture, exports: Sequence[str] = ()) -> Content:
    """Check the files that a capture should have after parsing.

    Reads all of ``trace_view.json``: about 8 s per gigabyte, in a few megabytes of memory.

    Args:
        capture: The capture in an ``…_ascend_pt`` directory.
        exports: ``text``, ``db`` or both; if empty, those chosen when it was recorded.
    """
    if capture.output is None:
        return Content((), "it is not parsed yet")
    files = tuple(sorted(path.name for path in capture.output.glob("*") if path.is_file()))
    wanted = exports or _recorded_formats(capture)
    expected = _recorded_kinds(capture)
    text = _missing_in_trace(capture.trace, expected) if "text" in wanted else ""
    database = _missing_in_database(capture.database_file, expected) if "db" in wanted else ""
    missing = "; ".join(filter(None, (text, database)))
    no_device = _is_device_profiled(capture) and not device_data(capture.path)
    return Content(files, missing, "no device data (no PROF_* folder)" if no_device else "")


def _recorded_formats(capture: Capture) -> set[str]:
    """Return the formats chosen when it was recorded, text by default."""
    chosen = capture.option("_export_type")
    named = {str(each).lower() for each in (chosen if isinstance(chosen, list) else [chosen])}
    return named & {"text", "db"} or {"text"}


def has_raw_data(directory: Path) -> bool:
    """Return whether a directory has raw data, by the same test as torch_npu's parser."""
    return (directory / "FRAMEWORK").is_dir() or bool(device_data(directory))


def device_data(directory: Path) -> list[Path]:
    """Return the folders with raw data of CANN."""
    return [path for path in directory.glob("PROF_*") if path.is_dir()]


def _is_device_profiled(capture: Capture) -> bool:
    return "NPU" in str(capture.option("activities", "common_config"))


def _recorded_kinds(capture: Capture) -> set[str]:
    folder, kinds = capture.path, set()
    if _any_bytes(folder.glob("FRAMEWORK/torch.op_range")):
        kinds.add(_HOST)
    marked = capture.option("_mstx") or capture.option("_msprof_tx")
    if marked and _is_device_profiled(capture) and device_data(folder):
        kinds.add(_RANGES)  # Every capture contains a range of rlprof, which checks MSTX.
    tasks = [each for name in _TASKS for each in folder.glob(f"PROF_*/device_*/data/{name}.data*")]
    if capture.option("_profiler_level") != "Level_none" and _any_bytes(tasks):
        kinds.add(_DEVICE)
    return kinds


def _any_bytes(paths: Iterable[Path]) -> bool:
    return any(path.suffix != ".done" and path.stat().st_size for path in paths)


def _missing_in_trace(path: Path | None, expected: set[str]) -> str:
    if path is None:
        return "trace_view.json is missing"
    found, busy, hardware = set[str](), set[bytes](), set[bytes]()

    def look(events: list[_Event]) -> None:
        for event in events:
            if bytes(event.ph) == b'"M"':
                if _HARDWARE in bytes(event.args):
                    hardware.add(bytes(event.pid))
                continue
            busy.add(bytes(event.pid))
            if bytes(event.cat) == b'"cpu_op"':
                found.add(_HOST)
            elif _RANGES not in found and _RANGE_KEY in bytes(event.args):
                found.add(_RANGES)

    try:
        stream = read_batches(path, msgspec.json.Decoder(list[_Event]).decode, look)
    except TraceError as error:
        return str(error).replace(str(path), path.name, 1)
    if stream.problems or stream.lost or not stream.complete:
        why = "; ".join(stream.problems) or f"{stream.lost} events are broken"
        return f"trace_view.json cannot be read ({why})"
    # Names of processes may come after their rows.
    found |= {_DEVICE} if busy & hardware else set()
    return _without("trace_view.json", expected - found)


class _Event(msgspec.Struct, gc=False):
    """The fields by which kinds differ, not decoded: unexpected values lose no event."""

    ph: msgspec.Raw = msgspec.Raw()
    pid: msgspec.Raw = msgspec.Raw()
    cat: msgspec.Raw = msgspec.Raw()
    args: msgspec.Raw = msgspec.Raw()


def _missing_in_database(path: Path | None, expected: set[str]) -> str:
    if path is None:
        return "the database ascend_pytorch_profiler*.db is missing"
    try:
        tables = SqliteTables(path)
        filled = {kind for kind, table in _TABLES.items() if tables.has(table)}
    except TraceError as error:
        return str(error).replace(str(path), path.name, 1)
    return _without(path.name, expected - filled) if tables.columns else f"{path.name} is empty"


def _without(name: str, kinds: set[str]) -> str:
    return f"{name} has no {' and no '.join(sorted(kinds))}" if kinds else ""
