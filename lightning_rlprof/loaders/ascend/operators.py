"""Operators of torch, modules and types of kernels in an Ascend capture, summed up by name.

The shapes of matrix products in an Ascend capture, as torch.profiler's traces tell them.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.ascend.csv_sheets import microseconds, read_sheet, whole
from lightning_rlprof.loaders.ascend.mstx import STEP, STRINGS
from lightning_rlprof.loaders.ascend.table_parts import Frame, Opened, Part, coded
from lightning_rlprof.loaders.ascend.trace_view import Kept, read_trace_view
from lightning_rlprof.loaders.ascend.units import LARGEST_TIME, plausible, scaled
from lightning_rlprof.loaders.host_calls import NPU_PRODUCTS, PRODUCTS
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import Coded
from lightning_rlprof.tables.table import Column

_CALLS, _DETAILS, _TYPES = "PYTORCH_API", "operator_details.csv", "op_statistic.csv"
_TOLD = (_CALLS, "type", "name")  # columns without which nothing tells calls apart
_COMPUTE = "COMPUTE_TASK_INFO"
_OPERATOR, _PYTHON = 50_001, 50_003  # types of calls
_SOME = 65_536
_MODULE = "nn.Module: "


def _operators(opened: Opened) -> tuple[Frame, list[str]]:
    """Sum up operators by name: from the database, else torch_npu's own list, else the trace."""
    file = opened.capture.file(_DETAILS)
    if not opened.has(*_TOLD) and file is not None:
        return _detailed(file)
    return _called(opened, Kept.OPERATORS, f"type = {_OPERATOR}", "operator")


def _modules(opened: Opened) -> tuple[Frame, list[str]]:
    """Sum up modules by name; ``self`` is without the modules inside."""
    named = f"name IN (SELECT id FROM {STRINGS} WHERE value LIKE '{_MODULE}%')"
    return _called(opened, Kept.MODULES, f"type = {_PYTHON} AND {named}", "module")


def _called(opened: Opened, kept: int, where: str, heading: str) -> tuple[Frame, list[str]]:
    if opened.has(*_TOLD):
        database: Any = opened.database
        rows = database.numbers(_CALLS, "startNs", "endNs", "globalTid", "name", where=where)
        names, remarks = coded(database, rows["name"]), []
        start, end, lane = rows["startNs"], rows["endNs"], rows["globalTid"]
    else:
        view = read_trace_view(opened.capture.trace, kept)  # type: ignore[arg-type]
        rows, remarks = view.tables[kept], view.problems
        start, end, lane = rows["start_ns"], rows["end_ns"], rows["lane"]
        names = (rows["name"], view.names)
    steps = [code for code, text in enumerate(names[1]) if text.startswith(STEP)]
    keep = (start > 0) & (end >= start) & (end < LARGEST_TIME)
    keep &= (names[0] >= 0) & ~np.isin(names[0], steps)
    columns = (lane[keep], start[keep], end[keep])
    summed = _summed((names[0][keep], names[1]), columns[2] - columns[1], _own(*columns))
    return {heading: _plain(summed.pop("name")), **summed}, remarks


def _plain(names: Any) -> Coded:
    return names[0], [text.removeprefix(_MODULE) for text in names[1]]


def _own(lane: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return how long each was at work itself: without those that it holds on its lane."""
    own = end - start
    order = np.lexsort((-end, start, lane))
    columns = (order, lane[order], start[order], end[order])
    around: list[tuple[int, int, int]] = []  # lane, end and row
    for row, at, begin, until in _rows(*columns):
        while around and (around[-1][0] != at or around[-1][1] < until or around[-1][1] <= begin):
            around.pop()
        if around:
            own[around[-1][2]] -= until - begin
        around.append((at, until, row))
    return own


def _rows(*columns: Int64s) -> Iterator[tuple[int, ...]]:
    """Yield rows of columns; some ten thousand at a time become Python objects."""
    for first in range(0, len(columns[0]), _SOME):
        yield from zip(*(column[first : first + _SOME].tolist() for column in columns), strict=True)


def _summed(names: Coded, total: Int64s, own: Int64s) -> dict[str, Any]:
    """Return one row per name, those first that take longest themselves."""
    codes, at, calls = np.unique(names[0], return_inverse=True, return_counts=True)
    sums = []
    for column in (total, own):
        summed = np.zeros(len(codes), np.int64)
        np.add.at(summed, at, column)
        sums.append(summed)
    order = np.argsort(-sums[1], kind="stable")
    return {
        "name": (codes[order], names[1]),
        "calls": calls[order],
        "total": sums[0][order],
        "self": sums[1][order],
    }


def _detailed(file: Any) -> tuple[Frame, list[str]]:
    """Sum up torch_npu's own list, which also knows how long the device took for each."""
    headings = [
        f"{of}{what}duration(us)" for of in ("host", "device") for what in ("total", "self")
    ]
    wanted = dict.fromkeys(headings, microseconds)
    sheet = read_sheet(file, wanted, ("name",), needed=("name", *headings))
    columns = [np.maximum(sheet.number(heading), 0) for heading in headings]
    host = _summed(sheet.text("name"), columns[0], columns[1])
    device = _summed(sheet.text("name"), columns[2], columns[3])
    place = {code: row for row, code in enumerate(device["name"][0].tolist())}
    rows = [place[code] for code in host["name"][0].tolist()]
    frame = {"operator": host.pop("name"), **host, "device total": device["total"][rows]}
    remarks = [f"{file.name}: {text}" for text in sheet.problems]
    return frame | {"device self": device["self"][rows]}, remarks


def _types(opened: Opened) -> tuple[Frame, list[str]]:
    """Read how often kernels of each type ran and how long: CANN's statistics, or count them."""
    file = opened.capture.file(_TYPES)
    if opened.has(_COMPUTE, "opType", "taskType") or file is None:
        return _counted(opened.database), []  # type: ignore[arg-type]
    times = {name: f"{word}time(us)" for name, word in _TIMES.items()}
    wanted = {"count": whole, "deviceid": whole, **dict.fromkeys(times.values(), microseconds)}
    told = ("optype", "coretype")
    sheet = read_sheet(file, wanted, told, needed=(*told, "count", *times.values()))
    return {
        "device": sheet.number("deviceid"),
        "type": sheet.text("optype"),
        "core": sheet.text("coretype"),
        "kernels": sheet.number("count"),
        **{name: sheet.number(heading) for name, heading in times.items()},
    }, [f"{file.name}: {text}" for text in sheet.problems]


def _counted(database: SqliteTables) -> Frame:
    lasted = "endNs - startNs"
    rows = database.rows(
        "SELECT deviceId, opType, c.taskType, COUNT(*), "
        f"SUM({lasted}), MIN({lasted}), AVG({lasted}), MAX({lasted}) "
        f"FROM TASK t JOIN {_COMPUTE} c ON t.globalTaskId = c.globalTaskId "
        f"WHERE startNs > 0 AND endNs >= startNs AND endNs < {LARGEST_TIME} "
        "GROUP BY 1, 2, 3 ORDER BY 5 DESC"
    )
    device, kind, core, *sums = (
        scaled([row[at] for row in rows], 1) for at in range(4 + len(_TIMES))
    )
    frame = dict(zip(("kernels", *_TIMES), sums, strict=True))
    return {"device": device, "type": coded(database, kind), "core": coded(database, core), **frame}


_TIMES = {"total": "total", "shortest": "min", "mean": "avg", "longest": "max"}
_SUMS = (
    Column("calls", "count"),
    Column("total", "duration", "ns"),
    Column("self", "duration", "ns"),
)


def _has_calls(opened: Opened) -> bool:
    return opened.has(*_TOLD) or opened.capture.trace is not None


OPERATORS = Part(
    (
        Column("operator", "text"),
        *_SUMS,
        Column("device total", "duration", "ns"),
        Column("device self", "duration", "ns"),
    ),
    lambda opened: _has_calls(opened) or opened.capture.file(_DETAILS) is not None,
    _operators,
)
"""Operators of torch by name, on the host."""

MODULES = Part((Column("module", "text"), *_SUMS), _has_calls, _modules)
"""Modules by name, on the host; there are some where ``profile_with_module`` was on."""

OPERATOR_TYPES = Part(
    (
        Column("device", "count"),
        Column("type", "text"),
        Column("core", "text"),
        Column("kernels", "count"),
        *(Column(name, "duration", "ns") for name in _TIMES),
    ),
    lambda opened: (
        opened.has(_COMPUTE, "opType", "taskType") or opened.capture.file(_TYPES) is not None
    ),
    _types,
)
"""Kernels by type and core."""


_ASCEND_SHAPES_CALLS = "PYTORCH_API"
_ASCEND_SHAPES_TOLD = ("startNs", "endNs", "globalTid", "name")
_SHAPES = ("inputShapes", "inputDtypes")
_THREAD = 2**32 - 1  # of a globalTid; the process stands above
_LONGEST = 1_000  # characters of the shapes of one call


def _has(opened: Opened) -> bool:
    return (
        opened.has(_ASCEND_SHAPES_CALLS, *_ASCEND_SHAPES_TOLD, *_SHAPES)
        or opened.capture.trace is not None
    )


def _read(opened: Opened) -> tuple[Frame, list[str]]:
    """Read calls that multiply matrices by thread and start; torch_npu tells no values."""
    in_database = opened.has(_ASCEND_SHAPES_CALLS, *_ASCEND_SHAPES_TOLD, *_SHAPES)
    found, remarks = _in_database(opened) if in_database else _in_trace(opened)
    thread, start, end = (found[name] for name in ("thread", "start", "end"))
    told = plausible(start, np.where(end >= start, end - start, -1)) & (found["dims"][0] >= 0)
    rows = np.flatnonzero(told)
    rows = rows[np.lexsort((-end[rows], start[rows], thread[rows]))]
    rows = rows[~_calls_another(found["operator"], thread, start, end, rows)]
    frame = {name: _at(cells, rows) for name, cells in found.items()}
    return {**frame, "duration": (end - start)[rows]}, remarks


def _in_database(opened: Opened) -> tuple[dict[str, Any], list[str]]:
    database: Any = opened.database
    names = ", ".join(f"'{name}'" for name in sorted(NPU_PRODUCTS))
    where = f"name IN (SELECT id FROM {STRINGS} WHERE value IN ({names}))"
    rows = database.numbers(_ASCEND_SHAPES_CALLS, *_ASCEND_SHAPES_TOLD, *_SHAPES, where=where)
    dims, types = sorted((coded(database, rows[name]) for name in _SHAPES), key=_words)
    return {
        "thread": rows["globalTid"] & _THREAD,
        "operator": coded(database, rows["name"]),
        "start": rows["startNs"],
        "end": rows["endNs"],
        "dims": _as_json(dims, _sizes),
        "types": _as_json(types, str),
    }, []


def _words(column: Coded) -> int:
    """Count the texts that name types: torch_npu has written each of the two into the other."""
    codes, texts = column
    told = np.unique(codes[codes >= 0]).tolist()
    return sum(re.search("[a-z]", texts[code]) is not None for code in told)


def _in_trace(opened: Opened) -> tuple[dict[str, Any], list[str]]:
    view = read_trace_view(opened.capture.trace, Kept.SHAPES)  # type: ignore[arg-type]
    rows = view.tables[Kept.SHAPES]
    texts = [_text(name) for name in view.names]
    return {
        "thread": view.threads()[rows["lane"]],
        "operator": (rows["name"], view.names),
        "start": rows["start_ns"],
        "end": rows["end_ns"],
        "dims": _as_json((rows["dims"], texts), _sizes),
        "types": _as_json((rows["types"], texts), str),
    }, view.problems


def _text(written: str) -> str:
    """Return a text that stands as JSON, "" where it is none."""
    try:
        return msgspec.json.decode(written, type=str)
    except NOT_JSON:
        return ""


def _sizes(written: str) -> list[int]:
    return [int(size) for size in written.split(",")] if written else []


def _as_json(column: Coded, read: Callable[[str], Any]) -> Coded:
    """Return lists as JSON that torch_npu writes as "32,9216;4096,9216;"; -1 where it has none."""
    codes, texts = column
    own: list[str] = [*texts]
    for code in np.unique(codes[codes >= 0]).tolist():
        own[code] = _listed(texts[code], read)
    there = np.array([*(bool(text.strip("; \r\n")) for text in texts), False])
    return np.where(there[codes], codes, -1), own


def _listed(written: str, read: Callable[[str], Any]) -> str:
    """Return a list as JSON; what is written in another way stays as it is, so that it is seen."""
    parts = [part.strip() for part in written.split(";")]
    if len(written) <= _LONGEST:
        with suppress(ValueError):
            return msgspec.json.encode([read(part) for part in parts]).decode()
    return "; ".join(parts)[:_LONGEST]


def _calls_another(
    operator: Coded, thread: Int64s, start: Int64s, end: Int64s, rows: Int64s
) -> Any:
    """Tell which rows another product is made in: on the CPU ``matmul`` calls one."""
    code, names = operator
    outer = np.array([*(name not in PRODUCTS for name in names), False])[code[rows]]
    inside = np.zeros(len(rows), bool)
    inside[:-1] = thread[rows[1:]] == thread[rows[:-1]]
    inside[:-1] &= (start[rows[1:]] < end[rows[:-1]]) & (end[rows[1:]] <= end[rows[:-1]])
    inside[:-1] &= ~outer[1:]
    return outer & inside


def _at(cells: Int64s | Coded, rows: Int64s) -> Any:
    return (cells[0][rows], cells[1]) if isinstance(cells, tuple) else cells[rows]


SHAPES = Part(
    (
        Column("thread", "count"),
        Column("operator", "text"),
        Column("start", "time", "ns"),
        Column("duration", "duration", "ns"),
        Column("dims", "text"),
        Column("types", "text"),
        Column("values", "text"),
    ),
    _has,
    _read,
)
"""Matrix products with the shapes of their inputs; there are some where shapes were recorded."""
