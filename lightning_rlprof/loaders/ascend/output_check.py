"""Check whether torch_npu's parser wrote everything that the raw data contains.

``analyse.done`` proves nothing, as it is also written after a failure. A trace file proves little,
as host operators alone make one. So each kind of row that the raw data has is searched for.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture_folder import Capture
from lightning_rlprof.loaders.chrome.byte_source import Source
from lightning_rlprof.loaders.chrome.event_stream import ChromeStream
from lightning_rlprof.loaders.sqlite_tables import SqliteTables

_RANGES, _HOST, _DEVICE = "MSTX ranges", "host operators", "device tasks"
_TABLES = {_RANGES: "MSTX_EVENTS", _HOST: "PYTORCH_API", _DEVICE: "TASK"}
_TASKS = ("stars_soc", "hwts")  # prefixes of CANN's raw files with tasks
_HARDWARE = b'"Ascend Hardware"'
# Old exporters of CANN write mark_id where newer ones write event_type.
_RANGE_KEYS = (b'"event_type"', b'"mark_id"')


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
    missing = _missing_in_trace(capture.trace, expected) if "text" in wanted else ""
    if "db" in wanted:
        missing = "; ".join(
            filter(None, (missing, _missing_in_database(capture.database, expected)))
        )
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
    """Return the kinds of rows in the raw data."""
    folder, kinds = capture.path, set()
    if _any_bytes(folder.glob("FRAMEWORK/torch.op_range")):
        kinds.add(_HOST)
    marked = capture.option("_mstx") or capture.option("_msprof_tx")
    if marked and _is_device_profiled(capture) and device_data(folder):
        kinds.add(_RANGES)  # rlprof marks one in every capture, to check MSTX
    tasks = [each for name in _TASKS for each in folder.glob(f"PROF_*/device_*/data/{name}.data*")]
    if capture.option("_profiler_level") != "Level_none" and _any_bytes(tasks):
        kinds.add(_DEVICE)
    return kinds


def _any_bytes(paths: Iterable[Path]) -> bool:
    return any(path.suffix != ".done" and path.stat().st_size for path in paths)


def _missing_in_trace(path: Path | None, expected: set[str]) -> str:
    if path is None:
        return "trace_view.json is missing"
    try:
        with Source(path) as source:
            stream = ChromeStream(source, msgspec.json.Decoder(list[_Event]))
            found = _kinds(stream)
    except TraceError as error:
        return _short_text(error, path)
    if stream.problems or stream.lost or not stream.complete:
        broken = f"{stream.lost} events are broken" if stream.lost else "it contains no events"
        why = "; ".join(stream.problems) or broken
        return f"trace_view.json cannot be read ({why})"
    return _without("trace_view.json", expected - found)


class _Event(msgspec.Struct, gc=False):
    """The fields by which kinds differ, not decoded: unexpected values lose no event."""

    ph: msgspec.Raw = msgspec.Raw()
    pid: msgspec.Raw = msgspec.Raw()
    cat: msgspec.Raw = msgspec.Raw()
    args: msgspec.Raw = msgspec.Raw()


def _kinds(stream: ChromeStream[_Event]) -> set[str]:
    """Return the kinds of rows in a trace; names of processes may come after their rows."""
    found, busy, hardware = set(), set(), set()
    for batch in stream:
        for event in batch:
            if bytes(event.ph) == b'"M"':
                if _HARDWARE in bytes(event.args):
                    hardware.add(bytes(event.pid))
                continue
            busy.add(bytes(event.pid))
            if bytes(event.cat) == b'"cpu_op"':
                found.add(_HOST)
            elif _RANGES not in found and any(key in bytes(event.args) for key in _RANGE_KEYS):
                found.add(_RANGES)
    return found | ({_DEVICE} if busy & hardware else set())


def _missing_in_database(path: Path | None, expected: set[str]) -> str:
    if path is None:
        return "the database ascend_pytorch_profiler*.db is missing"
    try:
        tables = SqliteTables(path)
        filled = {kind for kind, table in _TABLES.items() if tables.has(table)}
    except TraceError as error:
        return _short_text(error, path)
    return _without(path.name, expected - filled) if tables.columns else f"{path.name} is empty"


def _short_text(error: TraceError, path: Path) -> str:
    return str(error).replace(str(path), path.name, 1)


def _without(name: str, kinds: set[str]) -> str:
    return f"{name} has no {' and no '.join(sorted(kinds))}" if kinds else ""
