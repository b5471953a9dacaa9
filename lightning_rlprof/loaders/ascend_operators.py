"""Operators of torch, modules and types of kernels in an Ascend capture, summed up by name."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_rlprof.loaders.ascend_csv import microseconds, read_sheet, whole
from lightning_rlprof.loaders.ascend_kept import Kept
from lightning_rlprof.loaders.ascend_marks import STEP, STRINGS
from lightning_rlprof.loaders.ascend_parts import Frame, Opened, Part, coded
from lightning_rlprof.loaders.ascend_times import LARGEST_TIME, scaled
from lightning_rlprof.loaders.ascend_trace import read_trace_view
from lightning_rlprof.loaders.kernels import Coded
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import Column

__all__ = ["MODULES", "OPERATORS", "OPERATOR_TYPES"]

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
