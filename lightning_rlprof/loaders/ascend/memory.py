"""Memory of the device over time, by operator and by CANN module, in an Ascend capture."""

from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.loaders.ascend.capture import OpenCapture
from lightning_rlprof.loaders.ascend.csv_sheets import (
    Sheet,
    kibibytes,
    mebibytes,
    microseconds,
    read_sheet,
)
from lightning_rlprof.loaders.ascend.mstx import STRINGS
from lightning_rlprof.loaders.ascend.table_reader import Cells, Frame, TableReader, decode
from lightning_rlprof.loaders.ascend.units import LARGEST_TIME
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, distinct
from lightning_rlprof.tables.table import Column

_RECORDS, _OPERATORS, _MODULES = "MEMORY_RECORD", "OP_MEMORY", "NPU_MODULE_MEM"
_RECORD_FILE, _OPERATOR_FILE = "memory_record.csv", "operator_memory.csv"
_MODULE_FILE = "npu_module_mem.csv"
_DEVICE = Column("device", "count")
_TOTALS = ("allocated", "reserved", "active")


def _memory(opened: OpenCapture) -> tuple[Frame, list[str]]:
    """Read the memory of torch's allocator (PTA), CANN's (GE) and the process (APP) over time."""
    if opened.has(_RECORDS):
        return _memory_in_database(opened.database), []  # type: ignore[arg-type]
    sheet, file = _sheet(opened, _RECORD_FILE, "timestamp(us)", [f"total{t}(mb)" for t in _TOTALS])
    return {
        "device": _device(sheet, "devicetype"),
        "component": sheet.text("component"),
        "time": sheet.number("timestamp(us)"),
        **{total: sheet.number(f"total{total}(mb)") for total in _TOTALS},
    }, _problems(file, sheet)


def _memory_in_database(database: SqliteTables) -> Frame:
    names = ("deviceId", "component", "timestamp", *(f"total{t.title()}" for t in _TOTALS))
    rows = database.numbers(_RECORDS, *names)
    codes, texts = decode(database, rows["component"])
    device, time, *totals = (rows[name] for name in names if name != "component")
    # The text format has the memory of the process in the same file, a database in this table.
    process = database.numbers("NPU_MEM", "deviceId", "type", "timestampNs", "ddr", "hbm")
    types = database.strings(process["type"], STRINGS)
    app = np.isin(process["type"], [number for number, text in types.items() if text == "app"])
    ddr, hbm = (process[name][app] for name in ("ddr", "hbm"))
    sound = (np.minimum(ddr, hbm) >= 0) & (np.maximum(ddr, hbm) < LARGEST_TIME)
    size = np.where(sound, ddr + hbm, UNKNOWN)
    reserved: dict[str, Int64s] = {"reserved": size}
    unknown = np.full(len(size), UNKNOWN)
    return {
        "device": np.concatenate([device, process["deviceId"][app]]),
        "component": distinct(
            np.concatenate([codes, np.full(len(size), len(texts))]), [*texts, "APP"]
        ),
        "time": np.concatenate([time, process["timestampNs"][app]]),
        **{
            total: np.concatenate([column, reserved.get(total, unknown)])
            for total, column in zip(_TOTALS, totals, strict=True)
        },
    }


def _operator_memory(opened: OpenCapture) -> tuple[Frame, list[str]]:
    """Read when each allocation of an operator was made and released."""
    if opened.has(_OPERATORS):
        return _allocations_in_database(opened.database), []  # type: ignore[arg-type]
    times = ("allocationtime(us)", "releasetime(us)", "duration(us)")
    totals = [f"allocationtotal{total}(mb)" for total in _TOTALS]
    file: Any = opened.file(_OPERATOR_FILE)
    wanted = {
        "size(kb)": kibibytes,
        **dict.fromkeys(times, microseconds),
        **dict.fromkeys(totals, mebibytes),
    }
    needed = ("name", "size(kb)", *times)
    sheet = read_sheet(file, wanted, ("name", "devicetype"), needed)
    return {
        "device": _device(sheet, "devicetype"),
        "operator": sheet.text("name"),
        "size": sheet.number("size(kb)"),
        "allocated at": sheet.number(times[0]),
        "released at": sheet.number(times[1]),
        "lifetime": sheet.number(times[2]),
        **{total: sheet.number(name) for total, name in zip(_TOTALS, totals, strict=True)},
    }, _problems(file, sheet)


def _allocations_in_database(database: SqliteTables) -> Frame:
    names = {
        "device": "deviceId",
        "operator": "name",
        "size": "size",
        "allocated at": "allocationTime",
        "released at": "releaseTime",
        "lifetime": "duration",
        **{total: f"allocationTotal{total.title()}" for total in _TOTALS},
    }
    rows = database.numbers(_OPERATORS, *names.values())
    frame: dict[str, Cells] = {heading: rows[name] for heading, name in names.items()}
    return frame | {"operator": decode(database, rows["name"])}


def _module_memory(opened: OpenCapture) -> tuple[Frame, list[str]]:
    """Read the memory that each module of CANN reserves over time."""
    if opened.has(_MODULES):
        database: Any = opened.database
        rows = database.numbers(_MODULES, "deviceId", "moduleId", "timestampNs", "totalReserved")
        return {
            "device": rows["deviceId"],
            "module": decode(database, rows["moduleId"], "ENUM_MODULE", "name"),
            "time": rows["timestampNs"],
            "reserved": rows["totalReserved"],
        }, []
    sheet, file = _sheet(opened, _MODULE_FILE, "timestamp(us)", ["totalreserved(mb)"])
    return {
        "device": _device(sheet, "device"),
        "module": sheet.text("component"),
        "time": sheet.number("timestamp(us)"),
        "reserved": sheet.number("totalreserved(mb)"),
    }, _problems(file, sheet)


def _sheet(opened: OpenCapture, name: str, time: str, sizes: list[str]) -> tuple[Sheet, Path]:
    file: Any = opened.file(name)
    wanted = {time: microseconds, **dict.fromkeys(sizes, mebibytes)}
    needed = ("component", time, *(size for size in sizes if "active" not in size))
    return read_sheet(file, wanted, ("component", "devicetype", "device"), needed), file


def _device(sheet: Sheet, heading: str) -> Int64s:
    """Return the number in "NPU:0"."""
    codes, texts = sheet.text(heading)
    numbers = [text.rpartition(":")[2] for text in texts]
    found = [int(each) if each.isdecimal() and len(each) < 8 else UNKNOWN for each in numbers]
    return np.array([*found, UNKNOWN], np.int64)[codes]


def _problems(file: Path, sheet: Sheet) -> list[str]:
    return [f"{file.name}: {text}" for text in sheet.problems]


def _reader(table: str, file: str, columns: tuple[Column, ...], read: Any) -> TableReader:
    return TableReader(
        (_DEVICE, *columns),
        lambda opened: opened.has(table) or opened.file(file) is not None,
        read,
    )


_TIME = Column("time", "time", "ns")
_SIZES = tuple(Column(total, "count", "bytes") for total in _TOTALS)

MEMORY = _reader(_RECORDS, _RECORD_FILE, (Column("component", "text"), _TIME, *_SIZES), _memory)
"""Memory by component and time."""

OPERATOR_MEMORY = _reader(
    _OPERATORS,
    _OPERATOR_FILE,
    (
        Column("operator", "text"),
        Column("size", "count", "bytes"),
        Column("allocated at", "time", "ns"),
        Column("released at", "time", "ns"),
        Column("lifetime", "duration", "ns"),
        *_SIZES,
    ),
    _operator_memory,
)
"""Allocations of each operator, with all memory allocated at that time."""

MODULE_MEMORY = _reader(
    _MODULES,
    _MODULE_FILE,
    (Column("module", "text"), _TIME, Column("reserved", "count", "bytes")),
    _module_memory,
)
"""Memory of CANN's modules."""
