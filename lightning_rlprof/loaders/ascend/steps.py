"""Where the device's time goes in each step of an Ascend capture, and what overlapped.

Calls of CANN in which the host waits for the device.
"""

import re
from typing import Any

import numpy as np

from lightning_rlprof.loaders.ascend.csv_sheets import microseconds, read_sheet, whole
from lightning_rlprof.loaders.ascend.table_parts import Cells, Frame, Opened, Part, coded
from lightning_rlprof.loaders.ascend.tasks import lane_devices
from lightning_rlprof.loaders.ascend.trace_view import LANES, WAITS, Kept, read_trace_view
from lightning_rlprof.loaders.ascend.units import scaled
from lightning_rlprof.tables.kernels import UNKNOWN, distinct
from lightning_rlprof.tables.table import Column

_FILE, _TABLE, _LANES = "step_trace_time.csv", "StepTraceTime", "OVERLAP_ANALYSIS"
_PROCESS = "Overlap Analysis"
# Heading here, column of the database; the file's headings have brackets around the same words.
_PARTS = {
    "computing": "computing",
    "communication not overlapped": "communication_not_overlapped",
    "overlapped": "overlapped",
    "communication": "communication",
    "free": "free",
    "stage": "stage",
    "bubble": "bubble",
    "communication not overlapped and exclude receive": (
        "communication_not_overlapped_and_exclude_receive"
    ),
    "preparing": "preparing",
}


def _step_trace(opened: Opened) -> tuple[Frame, list[str]]:
    """Read one row per step and device, in nanoseconds."""
    database = opened.analysis if opened.analysed(_TABLE) else None
    if database is not None:
        numbers = database.numbers(_TABLE, "deviceId", "step")
        reals = database.reals(_TABLE, *_PARTS.values())
        device = numbers["deviceId"]
        return {
            "device": np.where(device == UNKNOWN, opened.device, device),
            "step": opened.steps(numbers["step"]),
            **{name: scaled(reals[column].tolist(), 1000) for name, column in _PARTS.items()},
        }, []
    file: Any = opened.capture.file(_FILE)
    headings = {name: _heading(name) for name in _PARTS}
    wanted = {
        **dict.fromkeys(("deviceid", "step"), whole),
        **dict.fromkeys(headings.values(), microseconds),
    }
    sheet = read_sheet(file, wanted, needed=("step", "computing", "free", "stage"))
    frame: dict[str, Cells] = {name: sheet.number(own) for name, own in headings.items()}
    frame |= {"step": opened.steps(sheet.number("step")), "device": sheet.number("deviceid")}
    return frame, [f"{file.name}: {text}" for text in sheet.problems]


def _heading(name: str) -> str:
    first, _, rest = name.partition(" ")
    return first + (f"({rest.replace(' ', '')})" if rest else "")


def _overlap(opened: Opened) -> tuple[Frame, list[str]]:
    """Read when the device computed, communicated, did both at once or nothing."""
    if opened.has(_LANES):
        database: Any = opened.database
        rows = database.numbers(_LANES, "deviceId", "startNs", "endNs", "type")
        kind = np.where((rows["type"] >= 0) & (rows["type"] < len(LANES)), rows["type"], -1)
        device, start, end = rows["deviceId"], rows["startNs"], rows["endNs"]
        remarks = []
    else:
        view = read_trace_view(opened.capture.trace, Kept.DEVICE)  # type: ignore[arg-type]
        table = view.tables[Kept.DEVICE]
        lanes = view.lanes_of(_PROCESS).tolist()
        of_lane = {lane: LANES.index(t) for lane in lanes if (t := view.thread(lane)) in LANES}
        keep = np.isin(table["lane"], list(of_lane))
        lane, start, end = (table[name][keep] for name in ("lane", "start_ns", "end_ns"))
        kind = np.array([of_lane[each] for each in lane.tolist()], np.int64)
        device, remarks = lane_devices(view)[lane], view.problems
    sound = (start > 0) & (end >= start)
    return {
        "device": device[sound],
        "part": (kind[sound], list(LANES)),
        "start": start[sound],
        "duration": (end - start)[sound],
    }, remarks


_DEVICE = Column("device", "count")

STEP_TRACE = Part(
    (
        _DEVICE,
        Column("step", "count"),
        *(Column(name, "duration", "ns") for name in _PARTS),
    ),
    lambda opened: opened.analysed(_TABLE) or opened.capture.file(_FILE) is not None,
    _step_trace,
)
"""Parts of each step; ``stage`` is the whole of it on the device, as torch_npu calls it."""

OVERLAP = Part(
    (
        _DEVICE,
        Column("part", "text"),
        Column("start", "time", "ns"),
        Column("duration", "duration", "ns"),
    ),
    lambda opened: opened.has(_LANES) or opened.capture.trace is not None,
    _overlap,
)
"""Stretches of time by what the device did in them."""


_ASCEND_WAITS_TABLE, _COLUMNS = "CANN_API", ("startNs", "endNs", "name")
_LEVEL = re.compile(r"^\w+@")  # AscendCL@aclrtSynchronizeStream


def _sync(opened: Opened) -> tuple[Frame, list[str]]:
    """Read one row per call that waits."""
    if opened.has(_ASCEND_WAITS_TABLE, *_COLUMNS):
        database: Any = opened.database
        rows, remarks = database.numbers(_ASCEND_WAITS_TABLE, *_COLUMNS), []
        start, end = rows["startNs"], rows["endNs"]
        code, names = coded(database, rows["name"])
    else:
        view = read_trace_view(opened.capture.trace, Kept.WAITS)  # type: ignore[arg-type]
        table, remarks = view.tables[Kept.WAITS], view.problems
        start, end = table["start_ns"], table["end_ns"]
        code, names = distinct(table["name"], view.names)
    waits = np.array([*(WAITS.search(name) is not None for name in names), False])
    keep = waits[code] & (start > 0) & (end >= start)
    kinds = distinct(code[keep], [_LEVEL.sub("", name) for name in names])
    return {"kind": kinds, "start": start[keep], "duration": (end - start)[keep]}, remarks


SYNC = Part(
    (
        Column("kind", "text"),
        Column("start", "time", "ns"),
        Column("duration", "duration", "ns"),
    ),
    lambda opened: opened.has(_ASCEND_WAITS_TABLE, *_COLUMNS) or opened.capture.trace is not None,
    _sync,
)
"""Waits of the host for the device, by the call."""
