"""Collectives of an Ascend capture: how much, how fast, and how long they waited."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.ascend.csv_sheets import microseconds, read_sheet
from lightning_rlprof.loaders.ascend.hccl import BYTES
from lightning_rlprof.loaders.ascend.mstx import (
    COLLECTIVES,
    MARKS_WANTED,
    Marks,
    database_marks,
    described,
    trace_marks,
)
from lightning_rlprof.loaders.ascend.table_parts import Cells, Frame, Opened, Part, coded
from lightning_rlprof.loaders.ascend.tasks import collective_lanes, lane_devices
from lightning_rlprof.loaders.ascend.trace_view import Kept, TraceView, read_trace_view
from lightning_rlprof.loaders.ascend.units import LARGEST_TIME, scaled
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN
from lightning_rlprof.tables.table import Column

_FILE, _KERNELS = "communication.json", "kernel_details.csv"
_TIMES, _BANDWIDTHS, _OPERATORS = "CommAnalyzerTime", "CommAnalyzerBandwidth", "COMMUNICATION_OP"
_STEP = re.compile(r"step(\d{1,15})")
# The analysis keeps starts as doubles of microseconds; in a real one they are 13.4 µs late as well.
_NEAR_NS = 1_000_000
_MOST = 1 << 28  # a kilobyte per collective and step
# Milliseconds of an operator, by our heading: what the file calls them, and the database.
_MEASURED = {
    "duration": ("Elapse Time(ms)", "elapse_time"),
    "transfer": ("Transit Time(ms)", "transit_time"),
    "wait": ("Wait Time(ms)", "wait_time"),
    "synchronization": ("Synchronization Time(ms)", "synchronization_time"),
    "idle": ("Idle Time(ms)", "idle_time"),
}
_INSIDE_SDMA = {"HCCS", "PCIE", "SIO"}  # links whose bytes SDMA counts as well


@dataclass
class _Operator:
    """One collective; times in milliseconds and sizes in 10**6 bytes, as the files have them."""

    name: str
    group: str
    kind: str
    step: int
    start: float | None
    measured: Mapping[str, Any]
    links: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def moved(self) -> tuple[Any, Any]:
        """Return size and time of all links, each byte once; None for each where none moved."""
        own = [pair for link, pair in self.links.items() if link not in _INSIDE_SDMA]
        sizes, times = zip(*own, strict=True) if own else ((), ())
        return sum(_numbers(sizes)) or None, sum(_numbers(times)) or None


def _numbers(values: Any) -> list[float]:
    return [value for value in values if isinstance(value, int | float)]


def _communication(opened: Opened) -> tuple[Frame, list[str]]:
    """Read the best source there is: the analysis, else operators alone, else the trace's lanes."""
    if opened.analysed(_TIMES):
        exact = _starts(opened)
        return _frame(opened, list(_from_analysis(opened.analysis)), exact), []  # type: ignore[arg-type]
    file = opened.capture.file(_FILE)
    if file is not None:
        return _frame(opened, list(_from_file(file)), _starts(opened)), []
    if opened.has(_OPERATORS):
        return _from_operators(opened.database), [_UNANALYSED]  # type: ignore[arg-type]
    trace = opened.capture.trace
    view = read_trace_view(trace, *MARKS_WANTED, Kept.DEVICE) if trace else None
    if view is not None and len(lanes := collective_lanes(view)):
        return _from_lanes(view, lanes), [*view.problems, _UNANALYSED]
    marks = database_marks(opened.database) if opened.database else trace_marks(view)  # type: ignore[arg-type]
    frame = _from_marks(marks)
    return frame, [_MARKED if len(frame["start"]) else "no collectives in it"]


_UNANALYSED = "transfer, wait and bandwidth of collectives are known from level1 on"
_MARKED = (
    "of collectives only MSTX tells: they last as long as the device was in their range, or the "
    "host where the device has none"
)


def _frame(opened: Opened, rows: list[_Operator], exact: Callable[[str, int], int]) -> Frame:
    """Put operators into columns, with the starts of the device's own rows."""
    moved = [row.moved() for row in rows]
    size, time = scaled([s for s, _ in moved], 10**6), scaled([t for _, t in moved], 10**6)
    there = (size > 0) & (time > 0)
    about = scaled([row.start for row in rows], 1000).tolist()
    frame: dict[str, Cells] = {
        "operator": _texts([row.name for row in rows]),
        "kind": _texts([row.kind for row in rows]),
        "group": _texts([row.group for row in rows]),
        "step": opened.steps(np.array([row.step for row in rows], np.int64)),
        "start": np.array(
            [exact(row.name, ns) for row, ns in zip(rows, about, strict=True)], np.int64
        ),
        "size": size,
        "bandwidth": np.where(there, size / np.where(there, time, 1), np.nan),
    }
    for heading in _MEASURED:
        frame[heading] = scaled([row.measured.get(heading) for row in rows], 10**6)
    return frame


def _texts(values: list[str]) -> tuple[Any, list[str]]:
    texts, codes = np.unique(np.array(values, dtype=object), return_inverse=True)
    return codes, texts.tolist()


def _starts(opened: Opened) -> Callable[[str, int], int]:
    """Return what finds the exact start of a collective by its name and by about when it was."""
    if opened.has(_OPERATORS, "opName", "startNs"):
        database: Any = opened.database
        rows = database.numbers(_OPERATORS, "opName", "startNs")
        codes, texts = coded(database, rows["opName"])
        starts = rows["startNs"].tolist()
    elif (file := opened.capture.file(_KERNELS)) is not None:
        sheet = read_sheet(file, {"starttime(us)": microseconds}, ("name",))
        (codes, texts), starts = sheet.text("name"), sheet.number("starttime(us)").tolist()
    else:
        return lambda _, about: about
    known: dict[str, list[int]] = {}
    for code, start in zip(codes.tolist(), starts, strict=True):
        if code >= 0 and texts[code].startswith(("hcom", "Hccl", "hccl")):
            known.setdefault(texts[code], []).append(start)

    def exact(name: str, about: int) -> int:
        near = min(known.get(name, ()), key=lambda start: abs(start - about), default=UNKNOWN)
        return near if about != UNKNOWN and abs(near - about) < _NEAR_NS else about

    return exact


def _from_analysis(database: SqliteTables) -> Iterator[_Operator]:
    links: dict[tuple[str, ...], dict[str, tuple[Any, Any]]] = {}
    key = ("hccl_op_name", "group_name", "step")
    columns = ", ".join((*key, "transport_type", "transit_size", "transit_time"))
    if database.has(_BANDWIDTHS):  # a row per packet size repeats the link's own numbers
        for *own, link, size, time in database.rows(f"SELECT {columns} FROM {_BANDWIDTHS}"):
            links.setdefault(tuple(own), {})[str(link)] = (size, time)
    names = ", ".join(column for _, column in _MEASURED.values())
    columns = f"{', '.join(key)}, type, start_timestamp, {names}"
    for name, group, step, kind, start, *measured in database.rows(
        f"SELECT {columns} FROM {_TIMES}"
    ):
        yield _Operator(
            str(name),
            str(group),
            str(kind),
            _step(str(step)),
            start,
            dict(zip(_MEASURED, measured, strict=True)),
            links.get((name, group, step), {}),
        )


def _step(text: str) -> int:
    found = _STEP.fullmatch(text)
    return int(found[1]) if found else UNKNOWN


def _from_file(file: Path) -> Iterator[_Operator]:
    try:
        with file.open("rb") as opened:
            steps = msgspec.json.decode(
                opened.read(_MOST), type=dict[str, dict[str, dict[str, Any]]]
            )
    except (OSError, *NOT_JSON) as error:
        raise TraceError(f"{file}: cannot be read: damaged or cut off") from error
    for step, kinds in steps.items():
        for kind, operators in kinds.items():
            for key, own in operators.items():
                if "@" in key and isinstance(own, dict):  # the others are sums
                    yield _described(key, kind, _step(step), own)


def _described(key: str, kind: str, step: int, own: Mapping[str, Any]) -> _Operator:
    times, bandwidths = (
        told if isinstance(told := own.get(f"Communication {part} Info"), dict) else {}
        for part in ("Time", "Bandwidth")
    )
    name, _, group = key.rpartition("@")
    links = {
        link: (of.get("Transit Size(MB)"), of.get("Transit Time(ms)"))
        for link, of in bandwidths.items()
        if isinstance(of, dict)
    }
    measured = {heading: times.get(key) for heading, (key, _) in _MEASURED.items()}
    return _Operator(name, group, kind, step, times.get("Start Timestamp(us)"), measured, links)


def _from_operators(database: SqliteTables) -> Frame:
    """Read operators without an analysis; their bytes are those of one rank's buffer."""
    names = ("opName", "groupName", "startNs", "endNs", "deviceId", "dataType", "count")
    rows = database.numbers(_OPERATORS, *names)
    types = database.strings(rows["dataType"], "ENUM_HCCL_DATA_TYPE", "name")
    each = np.array([BYTES.get(types.get(t, ""), 0) for t in rows["dataType"].tolist()], np.int64)
    counted = (rows["count"] >= 0) & (rows["count"] < 2**56) & (each > 0)
    start, end = rows["startNs"], rows["endNs"]
    sound = (start > 0) & (end >= start) & (end < LARGEST_TIME)
    return {
        "operator": coded(database, rows["opName"]),
        "group": coded(database, rows["groupName"]),
        "device": rows["deviceId"],
        "start": np.where((start > 0) & (start < LARGEST_TIME), start, UNKNOWN),
        "duration": np.where(sound, end - start, UNKNOWN),
        "size": np.where(counted, rows["count"] * each, UNKNOWN),
    }


def _from_lanes(view: TraceView, lanes: Int64s) -> Frame:
    rows = view.tables[Kept.DEVICE]
    keep = np.isin(rows["lane"], lanes)
    return {
        "device": lane_devices(view)[rows["lane"][keep]],
        "operator": (rows["name"][keep], view.names),
        "start": rows["start_ns"][keep],
        "duration": (rows["end_ns"] - rows["start_ns"])[keep],
    }


def _from_marks(marks: Marks) -> Frame:
    """Read what HCCL marks of itself, which is all that there is below level0."""
    keep = np.flatnonzero([marks.texts[code] == COLLECTIVES for code in marks.domain.tolist()])
    told = [described(marks.texts[code]) for code in marks.name[keep].tolist()]
    shown = marks.shadow_start_ns[keep] != UNKNOWN
    start = np.where(shown, marks.shadow_start_ns[keep], marks.start_ns[keep])
    end = np.where(shown, marks.shadow_end_ns[keep], marks.end_ns[keep])
    counts = scaled([str(each.get("count")) for each in told], 1)
    each = [BYTES.get(str(one.get("dataType")).upper(), 0) for one in told]
    counted = (counts >= 0) & (counts < 2**56) & (np.array(each, np.int64) > 0)
    return {
        "operator": _texts([str(one.get("opName", "")) for one in told]),
        "group": _texts([str(one.get("groupName", "")) for one in told]),
        "start": start,
        "duration": end - start,
        "size": np.where(counted, counts * np.array(each, np.int64), UNKNOWN),
    }


def _has(opened: Opened) -> bool:
    parts = (opened.capture.file(_FILE), opened.capture.trace)
    databases = opened.analysed(_TIMES) or opened.has(_OPERATORS) or opened.has("MSTX_EVENTS")
    return databases or parts != (None, None)


COMMUNICATION = Part(
    (
        Column("device", "count"),
        Column("step", "count"),
        Column("operator", "text"),
        Column("kind", "text"),
        Column("group", "text"),
        Column("start", "time", "ns"),
        *(Column(heading, "duration", "ns") for heading in _MEASURED),
        Column("size", "count", "bytes"),
        Column("bandwidth", "number", "GB/s"),
    ),
    _has,
    _communication,
)
"""One row per collective; size and bandwidth are of what this rank moved over all links."""
