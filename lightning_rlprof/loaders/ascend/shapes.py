"""Matrix products in an Ascend capture with the shapes of their inputs."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.loaders.ascend.capture import OpenCapture
from lightning_rlprof.loaders.ascend.mstx import STRINGS, THREAD_BITS
from lightning_rlprof.loaders.ascend.table_reader import Frame, TableReader
from lightning_rlprof.loaders.ascend.trace_view import RowKind, TraceView
from lightning_rlprof.loaders.ascend.units import plausible
from lightning_rlprof.loaders.host_calls import NPU_PRODUCTS, PRODUCTS
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import Coded, matches
from lightning_rlprof.tables.table import Column

_CALLS = "PYTORCH_API"
_CALL = ("startNs", "endNs", "globalTid", "name")
_SHAPES = ("inputShapes", "inputDtypes")
_MAX_LENGTH = 1_000  # characters of the shapes of one call


def _read(opened: OpenCapture) -> tuple[Frame, list[str]]:
    """Read calls that multiply matrices by thread and start; torch_npu records no values."""
    if opened.database is not None:
        found, remarks = _from_database(opened.database), []
    else:
        view = opened.read_trace(RowKind.SHAPES)
        found, remarks = _from_trace(view), view.problems
    thread, start, end = (found[name] for name in ("thread", "start", "end"))
    rows = np.flatnonzero(plausible(start, end) & (found["dims"][0] >= 0))
    rows = rows[np.lexsort((-end[rows], start[rows], thread[rows]))]
    rows = rows[~_calls_another(found["operator"], thread, start, end, rows)]
    frame = {name: _at(cells, rows) for name, cells in found.items()}
    return {**frame, "duration": (end - start)[rows]}, remarks


def _from_database(database: SqliteTables) -> dict[str, Any]:
    names = ", ".join(f"'{name}'" for name in sorted(NPU_PRODUCTS))
    where = f"name IN (SELECT id FROM {STRINGS} WHERE value IN ({names}))"
    rows = database.numbers(_CALLS, *_CALL, *_SHAPES, where=where)
    dims, types = sorted((database.decode(rows[name], STRINGS) for name in _SHAPES), key=_types_in)
    return {
        "thread": rows["globalTid"] & THREAD_BITS,
        "operator": database.decode(rows["name"], STRINGS),
        "start": rows["startNs"],
        "end": rows["endNs"],
        "dims": _as_json(dims, _sizes),
        "types": _as_json(types, str),
    }


def _types_in(column: Coded) -> int:
    """Count the texts that name types; older versions of torch_npu swap the two columns."""
    codes, texts = column
    used = np.unique(codes[codes >= 0]).tolist()
    return sum(re.search("[a-z]", texts[code]) is not None for code in used)


def _from_trace(view: TraceView) -> dict[str, Any]:
    rows = view.tables[RowKind.SHAPES]
    return {
        "thread": view.threads()[rows["lane"]],
        "operator": (rows["name"], view.names),
        "start": rows["start_ns"],
        "end": rows["end_ns"],
        "dims": _as_json((rows["dims"], view.names), _sizes),
        "types": _as_json((rows["types"], view.names), str),
    }


def _sizes(written: str) -> list[int]:
    return [int(size) for size in written.split(",")] if written else []


def _as_json(column: Coded, read: Callable[[str], Any]) -> Coded:
    """Return lists such as "32,9216;4096,9216;" of torch_npu as JSON; -1 for empty ones."""
    codes, texts = column
    lists: list[str] = [*texts]
    for code in np.unique(codes[codes >= 0]).tolist():
        lists[code] = _list_as_json(texts[code], read)
    filled = np.array([*(bool(text.strip("; \r\n")) for text in texts), False])
    return np.where(filled[codes], codes, -1), lists


def _list_as_json(written: str, read: Callable[[str], Any]) -> str:
    """Return a list as JSON; an unknown notation stays as it is, so that it is noticed."""
    parts = [part.strip() for part in written.split(";")]
    if len(written) <= _MAX_LENGTH:
        with suppress(ValueError):
            return msgspec.json.encode([read(part) for part in parts]).decode()
    return "; ".join(parts)[:_MAX_LENGTH]


def _calls_another(
    operator: Coded, thread: Int64s, start: Int64s, end: Int64s, rows: Int64s
) -> Any:
    """Return which rows call another product, as ``matmul`` does on the CPU."""
    code, names = operator
    outer = matches((code[rows], names), lambda name: name not in PRODUCTS)
    inside = np.zeros(len(rows), bool)
    inside[:-1] = thread[rows[1:]] == thread[rows[:-1]]
    inside[:-1] &= (start[rows[1:]] < end[rows[:-1]]) & (end[rows[1:]] <= end[rows[:-1]])
    inside[:-1] &= ~outer[1:]
    return outer & inside


def _at(cells: Int64s | Coded, rows: Int64s) -> Any:
    return (cells[0][rows], cells[1]) if isinstance(cells, tuple) else cells[rows]


SHAPES = TableReader(
    (
        Column("thread", "count"),
        Column("operator", "text"),
        Column("start", "time", "ns"),
        Column("duration", "duration", "ns"),
        Column("dims", "text"),
        Column("types", "text"),
        Column("values", "text"),
    ),
    lambda opened: opened.has(_CALLS, *_CALL, *_SHAPES) or opened.trace is not None,
    _read,
)
"""Matrix products with the shapes of their inputs, if shapes were recorded."""
