"""The shapes of matrix products in an Ascend capture, as torch.profiler's traces tell them."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.loaders.ascend_kept import Kept
from lightning_rlprof.loaders.ascend_marks import STRINGS
from lightning_rlprof.loaders.ascend_parts import Frame, Opened, Part, coded
from lightning_rlprof.loaders.ascend_times import plausible
from lightning_rlprof.loaders.ascend_trace import read_trace_view
from lightning_rlprof.loaders.kernels import Coded
from lightning_rlprof.loaders.products import NPU_PRODUCTS, PRODUCTS
from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import Column

__all__ = ["SHAPES"]

_CALLS = "PYTORCH_API"
_TOLD = ("startNs", "endNs", "globalTid", "name")
_SHAPES = ("inputShapes", "inputDtypes")
_THREAD = 2**32 - 1  # of a globalTid; the process stands above
_LONGEST = 1_000  # characters of the shapes of one call


def _has(opened: Opened) -> bool:
    return opened.has(_CALLS, *_TOLD, *_SHAPES) or opened.capture.trace is not None


def _read(opened: Opened) -> tuple[Frame, list[str]]:
    """Read calls that multiply matrices by thread and start; torch_npu tells no values."""
    in_database = opened.has(_CALLS, *_TOLD, *_SHAPES)
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
    rows = database.numbers(_CALLS, *_TOLD, *_SHAPES, where=where)
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
        Column("start", "duration", "ns"),
        Column("duration", "duration", "ns"),
        Column("dims", "text"),
        Column("types", "text"),
        Column("values", "text"),
    ),
    _has,
    _read,
)
"""Matrix products with the shapes of their inputs; there are some where shapes were recorded."""
