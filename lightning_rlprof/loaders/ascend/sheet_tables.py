"""Tables that are a CSV file in the text format: memory and steps."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lightning_rlprof.loaders.ascend.capture import Frame, OpenCapture, TableReader
from lightning_rlprof.loaders.ascend.csv_sheets import (
    LARGEST_TIME,
    Convert,
    device,
    mebibytes,
    microseconds,
    read_sheet,
    scaled,
    whole,
)
from lightning_rlprof.loaders.ascend.mstx import STRINGS
from lightning_rlprof.loaders.host_calls import columns_named
from lightning_rlprof.tables.kernels import UNKNOWN, end_to_end
from lightning_rlprof.tables.table import Column, with_name

_Cells = Mapping[Column, tuple[str, Convert | None]]
"""The heading of each column in a file, and how to convert it; None: a text."""


def _sheet_table(
    file: str,
    cells: _Cells,
    needed: tuple[str, ...],
    table: Callable[[OpenCapture], bool],
    from_database: Callable[[OpenCapture], Frame],
) -> TableReader:
    """Return the reader of a file, or of a table in the database; all versions write `needed`."""

    def read(opened: OpenCapture) -> tuple[Frame, list[str]]:
        if (path := opened.file(file)) is None:
            return from_database(opened), []
        sheet = read_sheet(path, dict(cells.values()), needed)
        frame = {
            column.name: sheet.number(heading) if convert else sheet.text(heading)
            for column, (heading, convert) in cells.items()
        }
        if "step" in frame:
            frame["step"] = opened.rl_steps(sheet.number("step"))
        return frame, [with_name(file, text) for text in sheet.problems]

    return TableReader(
        tuple(cells),
        lambda opened: table(opened) or opened.file(file) is not None,
        read,
    )


_DEVICE, _STEP, _COMPONENT, _WHEN = columns_named("device", "step", "component", "time")
_TOTALS = ("allocated", "reserved", "active")
_RECORD = "MEMORY_RECORD"


def _memory(opened: OpenCapture) -> Frame:
    database: Any = opened.database
    totals = {name: f"total{name.title()}" for name in _TOTALS}
    rows = database.numbers(_RECORD, "deviceId", "timestamp", "component", *totals.values())
    component = database.decode(rows["component"], STRINGS)
    # The text format has the memory of the process in the same file, a database in this table.
    process = database.numbers("NPU_MEM", "deviceId", "type", "timestampNs", "ddr", "hbm")
    types = database.strings(process["type"], STRINGS)
    app = np.isin(process["type"], [number for number, text in types.items() if text == "app"])
    devices, _, times, ddr, hbm = (column[app] for column in process.values())
    sound = (np.minimum(ddr, hbm) >= 0) & (np.maximum(ddr, hbm) < LARGEST_TIME)
    unknown = np.full(len(times), UNKNOWN)
    of_process = {
        **dict.fromkeys(_TOTALS, unknown),
        "reserved": np.where(sound, ddr + hbm, UNKNOWN),
    }
    return {
        "device": np.concatenate([rows["deviceId"], devices]),
        "component": end_to_end([component, (np.zeros(len(times), np.int64), ["APP"])]),
        "time": np.concatenate([rows["timestamp"], times]),
        **{name: np.concatenate([rows[totals[name]], own]) for name, own in of_process.items()},
    }


MEMORY = _sheet_table(
    "memory_record.csv",
    {
        _DEVICE: ("devicetype", device),
        _COMPONENT: ("component", None),
        _WHEN: ("timestamp(us)", microseconds),
        **{own: (f"total{own.name}(mb)", mebibytes) for own in columns_named(*_TOTALS)},
    },
    ("component", "timestamp(us)", "totalallocated(mb)", "totalreserved(mb)"),
    lambda opened: opened.has(_RECORD),
    _memory,
)
"""Memory of torch's allocator (PTA), CANN's (GE) and the process (APP) over time."""

_STEP_TABLE = "StepTraceTime"
_STEP_PARTS = {  # our column, and the heading of the file
    "computing": "computing",
    "communication not overlapped": "communication(notoverlapped)",
    "overlapped": "overlapped",
    "communication": "communication",
    "free": "free",
    "stage": "stage",
    "bubble": "bubble",
    "communication not overlapped and exclude receive": (
        "communication(notoverlappedandexcludereceive)"
    ),
    "preparing": "preparing",
}


def _steps(opened: OpenCapture) -> Frame:
    analysis: Any = opened.analysis
    numbers = analysis.numbers(_STEP_TABLE, "deviceId", "step")
    names = {part: part.replace(" ", "_") for part in _STEP_PARTS}
    microseconds_of = analysis.reals(_STEP_TABLE, *names.values())
    return {
        "device": numbers["deviceId"],
        "step": opened.rl_steps(numbers["step"]),
        **{part: scaled(microseconds_of[name].tolist(), 1000) for part, name in names.items()},
    }


STEP_TRACE = _sheet_table(
    "step_trace_time.csv",
    {
        _DEVICE: ("deviceid", whole),
        _STEP: ("step", whole),
        **{
            Column(part, "duration", "ns"): (heading, microseconds)
            for part, heading in _STEP_PARTS.items()
        },
    },
    ("step", "computing", "free", "stage"),
    lambda opened: opened.has_analysis(_STEP_TABLE),
    _steps,
)
"""Parts of each step on the device. As in torch_npu, ``stage`` is the length of the whole step."""
