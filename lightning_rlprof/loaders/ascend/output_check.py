"""Look into what torch_npu's analysis wrote: does it hold what the raw data beside it promises.

``analyse.done`` is no proof, it is written after a failure, too. Nor is a file that is there: the
host's operators alone make a trace. So each kind of rows is looked for that the raw data has.
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

_RANGES, _HOST, _DEVICE = "MSTX ranges", "operators of the host", "tasks of the device"
_TABLES = {_RANGES: "MSTX_EVENTS", _HOST: "PYTORCH_API", _DEVICE: "TASK"}
_TASKS = ("stars_soc", "hwts")  # what CANN's raw files with tasks begin with
_HARDWARE = b'"Ascend Hardware"'
# Old exporters of CANN write mark_id where newer ones write event_type.
_RANGE_KEYS = (b'"event_type"', b'"mark_id"')


class Content(NamedTuple):
    """What lies in the folder of an analysis.

    Attributes:
        wrote: Names of its files.
        lacks: Why it is not what the raw data promises, empty where it is.
        remark: What the raw data itself lacks, empty where nothing.
    """

    wrote: tuple[str, ...]
    lacks: str
    remark: str = ""


def check_content(capture: Capture, exports: Sequence[str] = ()) -> Content:
    """Look into every file that a capture should have after its analysis.

    Reads all of ``trace_view.json``, some 8 s per gigabyte, in a few megabytes of memory.

    Args:
        capture: What stands for an ``…_ascend_pt`` directory.
        exports: ``text``, ``db`` or both; what it was recorded for where empty.
    """
    if capture.output is None:
        return Content((), "it was never analysed")
    wrote = tuple(sorted(path.name for path in capture.output.glob("*") if path.is_file()))
    wanted = exports or _recorded_for(capture)
    promised = _promised(capture)
    lacks = _lacks_text(capture.trace, promised) if "text" in wanted else ""
    if "db" in wanted:
        lacks = "; ".join(filter(None, (lacks, _lacks_db(capture.database, promised))))
    without = _watched_device(capture) and not device_data(capture.path)
    return Content(wrote, lacks, "no data of the device (no PROF_ folder)" if without else "")


def _recorded_for(capture: Capture) -> set[str]:
    """Return the formats that it was recorded for, the text where nothing tells one."""
    told = capture.option("_export_type")
    named = {str(each).lower() for each in (told if isinstance(told, list) else [told])}
    return named & {"text", "db"} or {"text"}


def has_raw_data(directory: Path) -> bool:
    """Tell whether there is anything to analyse, as the analysis itself looks for it."""
    return (directory / "FRAMEWORK").is_dir() or bool(device_data(directory))


def device_data(directory: Path) -> list[Path]:
    """Return the folders in which CANN recorded."""
    return [path for path in directory.glob("PROF_*") if path.is_dir()]


def _watched_device(capture: Capture) -> bool:
    return "NPU" in str(capture.option("activities", "common_config"))


def _promised(capture: Capture) -> set[str]:
    """Return the kinds of rows that the raw data holds."""
    folder, kinds = capture.path, set()
    if _any_bytes(folder.glob("FRAMEWORK/torch.op_range")):
        kinds.add(_HOST)
    marked = capture.option("_mstx") or capture.option("_msprof_tx")
    if marked and _watched_device(capture) and device_data(folder):
        kinds.add(_RANGES)  # our recorder puts one into every window, to hear whether MSTX works
    tasks = [each for name in _TASKS for each in folder.glob(f"PROF_*/device_*/data/{name}.data*")]
    if capture.option("_profiler_level") != "Level_none" and _any_bytes(tasks):
        kinds.add(_DEVICE)
    return kinds


def _any_bytes(paths: Iterable[Path]) -> bool:
    return any(path.suffix != ".done" and path.stat().st_size for path in paths)


def _lacks_text(path: Path | None, promised: set[str]) -> str:
    if path is None:
        return "trace_view.json is missing"
    try:
        with Source(path) as source:
            stream = ChromeStream(source, msgspec.json.Decoder(list[_Event]))
            found = _kinds(stream)
    except TraceError as error:
        return _by_name(error, path)
    if stream.problems or stream.lost or not stream.complete:
        broken = f"{stream.lost} events are broken" if stream.lost else "it holds no events"
        why = "; ".join(stream.problems) or broken
        return f"trace_view.json cannot be read ({why})"
    return _lacking("trace_view.json", promised - found)


class _Event(msgspec.Struct, gc=False):
    """What tells kinds apart, undecoded: whatever stands there costs no event."""

    ph: msgspec.Raw = msgspec.Raw()
    pid: msgspec.Raw = msgspec.Raw()
    cat: msgspec.Raw = msgspec.Raw()
    args: msgspec.Raw = msgspec.Raw()


def _kinds(stream: ChromeStream[_Event]) -> set[str]:
    """Return the kinds of rows in a trace; processes are known by name, wherever that stands."""
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


def _lacks_db(path: Path | None, promised: set[str]) -> str:
    if path is None:
        return "the database ascend_pytorch_profiler*.db is missing"
    try:
        tables = SqliteTables(path)
        filled = {kind for kind, table in _TABLES.items() if tables.has(table)}
    except TraceError as error:
        return _by_name(error, path)
    return _lacking(path.name, promised - filled) if tables.columns else f"{path.name} is empty"


def _by_name(error: TraceError, path: Path) -> str:
    return str(error).replace(str(path), path.name, 1)


def _lacking(name: str, kinds: set[str]) -> str:
    return f"{name} holds no {' and no '.join(sorted(kinds))}" if kinds else ""
