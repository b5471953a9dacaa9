"""Tables that are a CSV file in the text format: memory and steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.loaders.ascend.capture import Frame, OpenCapture, TableReader
from lightning_rlprof.loaders.ascend.csv_sheets import (
    LARGEST_TIME,
    Convert,
    device,
    kibibytes,
    mebibytes,
    microseconds,
    read_sheet,
    scaled,
    whole,
)
from lightning_rlprof.loaders.ascend.mstx import STRINGS
from lightning_rlprof.tables.kernels import UNKNOWN, end_to_end
from lightning_rlprof.tables.table import Column, with_name


class _Cell(NamedTuple):
    """One column: its heading in the file, how to convert it (None: a text), its database name."""

    column: Column
    heading: str
    convert: Convert | None
    name: str = ""


def _sheet_table(
    file: str,
    cells: tuple[_Cell, ...],
    needed: tuple[str, ...],
    table: Callable[[OpenCapture], bool],
    from_database: Callable[[OpenCapture], Frame],
) -> TableReader:
    """Return the reader of a file, or of a table in the database; all versions write `needed`."""

    def read(opened: OpenCapture) -> tuple[Frame, list[str]]:
        if (path := opened.file(file)) is None:
            return from_database(opened), []
        sheet = read_sheet(path, {cell.heading: cell.convert for cell in cells}, needed)
        frame = {
            cell.column.name: sheet.number(cell.heading)
            if cell.convert
            else sheet.text(cell.heading)
            for cell in cells
        }
        if "step" in frame:
            frame["step"] = opened.rl_steps(sheet.number("step"))
        return frame, [with_name(file, text) for text in sheet.problems]

    return TableReader(
        tuple(cell.column for cell in cells),
        lambda opened: table(opened) or opened.file(file) is not None,
        read,
    )


def _from_table(
    opened: OpenCapture,
    table: str,
    cells: tuple[_Cell, ...],
    texts: tuple[str, str] = (STRINGS, "value"),
) -> dict[str, Any]:
    """Read a table of the database; texts are numbers of rows in another one."""
    database: Any = opened.database
    rows = database.numbers(table, *(cell.name for cell in cells))
    return {
        cell.column.name: rows[cell.name]
        if cell.convert
        else database.decode(rows[cell.name], *texts)
        for cell in cells
    }


def _size(name: str) -> Column:
    return Column(name, "count", "bytes")


def _time(name: str) -> Column:
    return Column(name, "time", "ns")


_TOTALS = ("allocated", "reserved", "active")
_DEVICE = Column("device", "count")
_MEMORY_CELLS = (
    _Cell(_DEVICE, "devicetype", device, "deviceId"),
    _Cell(Column("component", "text"), "component", None, "component"),
    _Cell(_time("time"), "timestamp(us)", microseconds, "timestamp"),
    *(
        _Cell(_size(total), f"total{total}(mb)", mebibytes, f"total{total.title()}")
        for total in _TOTALS
    ),
)


def _memory(opened: OpenCapture) -> Frame:
    database: Any = opened.database
    frame = _from_table(opened, "MEMORY_RECORD", _MEMORY_CELLS)
    # The text format has the memory of the process in the same file, a database in this table.
    process = database.numbers("NPU_MEM", "deviceId", "type", "timestampNs", "ddr", "hbm")
    types = database.strings(process["type"], STRINGS)
    app = np.isin(process["type"], [number for number, text in types.items() if text == "app"])
    devices, _, times, ddr, hbm = (column[app] for column in process.values())
    sound = (np.minimum(ddr, hbm) >= 0) & (np.maximum(ddr, hbm) < LARGEST_TIME)
    unknown = np.full(len(times), UNKNOWN)
    of_process = {
        "device": devices,
        "time": times,
        **dict.fromkeys(_TOTALS, unknown),
        "reserved": np.where(sound, ddr + hbm, UNKNOWN),
    }
    component = end_to_end([frame["component"], (np.zeros(len(times), np.int64), ["APP"])])
    columns = {name: np.concatenate([frame[name], own]) for name, own in of_process.items()}
    return {**columns, "component": component}


MEMORY = _sheet_table(
    "memory_record.csv",
    _MEMORY_CELLS,
    ("component", "timestamp(us)", "totalallocated(mb)", "totalreserved(mb)"),
    lambda opened: opened.has("MEMORY_RECORD"),
    _memory,
)
"""Memory of torch's allocator (PTA), CANN's (GE) and the process (APP) over time."""

_ALLOCATION_CELLS = (
    _Cell(_DEVICE, "devicetype", device, "deviceId"),
    _Cell(Column("operator", "text"), "name", None, "name"),
    _Cell(_size("size"), "size(kb)", kibibytes, "size"),
    _Cell(_time("allocated at"), "allocationtime(us)", microseconds, "allocationTime"),
    _Cell(_time("released at"), "releasetime(us)", microseconds, "releaseTime"),
    _Cell(Column("lifetime", "duration", "ns"), "duration(us)", microseconds, "duration"),
    *(
        _Cell(
            _size(total),
            f"allocationtotal{total}(mb)",
            mebibytes,
            f"allocationTotal{total.title()}",
        )
        for total in _TOTALS
    ),
)
OPERATOR_MEMORY = _sheet_table(
    "operator_memory.csv",
    _ALLOCATION_CELLS,
    ("name", "size(kb)", "allocationtime(us)", "releasetime(us)", "duration(us)"),
    lambda opened: opened.has("OP_MEMORY"),
    lambda opened: _from_table(opened, "OP_MEMORY", _ALLOCATION_CELLS),
)
"""Allocations of each operator, with all memory allocated at that time."""

_MODULE_CELLS = (
    _Cell(_DEVICE, "device", device, "deviceId"),
    _Cell(Column("module", "text"), "component", None, "moduleId"),
    _Cell(_time("time"), "timestamp(us)", microseconds, "timestampNs"),
    _Cell(_size("reserved"), "totalreserved(mb)", mebibytes, "totalReserved"),
)
MODULE_MEMORY = _sheet_table(
    "npu_module_mem.csv",
    _MODULE_CELLS,
    ("component", "timestamp(us)", "totalreserved(mb)"),
    lambda opened: opened.has("NPU_MODULE_MEM"),
    lambda opened: _from_table(opened, "NPU_MODULE_MEM", _MODULE_CELLS, ("ENUM_MODULE", "name")),
)
"""Memory that each module of CANN reserves over time."""

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
    (
        _Cell(_DEVICE, "deviceid", whole),
        _Cell(Column("step", "count"), "step", whole),
        *(
            _Cell(Column(part, "duration", "ns"), heading, microseconds)
            for part, heading in _STEP_PARTS.items()
        ),
    ),
    ("step", "computing", "free", "stage"),
    lambda opened: opened.has_analysis(_STEP_TABLE),
    _steps,
)
"""Parts of each step on the device. As in torch_npu, ``stage`` is the length of the whole step."""
