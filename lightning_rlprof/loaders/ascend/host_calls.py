"""Calls of the host in an Ascend capture: operators, modules, Python, CANN, waits, and matmuls.

Shapes of kernels of matmuls, attention and experts are those that CANN records of them.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightning_rlprof.loaders.ascend.capture import (
    KERNEL_SHEET,
    Capture,
    Frame,
    TableReader,
    coded_texts,
    texts_of,
)
from lightning_rlprof.loaders.ascend.csv_sheets import microseconds, read_sheet
from lightning_rlprof.loaders.ascend.mstx import STRINGS, THREAD_BITS
from lightning_rlprof.loaders.ascend.trace_view import STEP, RowKind, TraceView
from lightning_rlprof.loaders.host_calls import (
    CALL_COLUMNS,
    CALL_KINDS,
    MODULE,
    NPU_PRODUCTS,
    NUMBERED,
    PRODUCTS,
    Launches,
    Nesting,
    columns_named,
    forwards,
    stages_at,
)
from lightning_rlprof.loaders.spill import Grown
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.event_times import plausible
from lightning_rlprof.tables.intervals import nested_order
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, distinct, end_to_end, find, matches

_TORCH, _CANN = "PYTORCH_API", "CANN_API"
_CALL = ("startNs", "endNs", "globalTid", "name")
_PYTHON, _OPERATOR, _RUNTIME, _MODULE = range(len(CALL_KINDS))
# All other categories are calls of the runtime.
_CATEGORIES = {"cpu_op": _OPERATOR, "python_function": _PYTHON}
_TYPES = {50_001: _OPERATOR, 50_003: _PYTHON}
_LEVEL = re.compile(r"^\w+@")  # It matches AscendCL@ in AscendCL@aclrtSynchronizeStream.
_WAITS = re.compile(r"Synchronize|aclrtMemcpy$")  # These calls wait for the device.
_TASKS, _INFO = "TASK", "COMPUTE_TASK_INFO"
_TEXTS = ("inputShapes", "inputDataTypes", "inputFormats", "outputShapes", "outputFormats")
_MATMUL = re.compile(r"(Batch)?MatMul(V\d)?|QuantBatchMatmulV3|WeightQuantBatchMatmulV2")
_ATTENTION = re.compile(r"FlashAttentionScore(Grad)?")
_INFERENCE = re.compile(r"(FusedInferAttentionScore|IncreFlashAttention|PromptFlashAttention)")
_GROUPED = re.compile(r"GroupedMatmul(SwigluQuant)?")
# The shapes of torch_npu's operators do not decide the work of these kernels.
_FUSED = (_ATTENTION, _INFERENCE, _GROUPED)
_KINDS = (_MATMUL, *_FUSED)
_PLAIN = frozenset({"ND", "NCHW"})  # Shapes in these formats are those of the matrices.
_TORCH_TYPES = {  # PyTorch's C++ uses these names.
    "FLOAT": "float",
    "FLOAT16": "c10::Half",
    **dict.fromkeys(("BF16", "BFLOAT16"), "c10::BFloat16"),
    "INT8": "signed char",
    "INT32": "int",
}
_SHAPES = ("inputShapes", "inputDtypes")
_MAX_LENGTH = 1_000  # Characters of the shapes of one call.


class _Calls(NamedTuple):
    """Calls in any order; times since 1970, `UNKNOWN` without a number of autograd."""

    thread: Int64s
    name: Coded
    kind: Int64s
    start: Int64s
    end: Int64s
    sequence: Int64s
    forward: Int64s


def _read(opened: Capture) -> tuple[Frame, list[str]]:
    """Read calls by thread and start, outer calls first."""
    calls, problems = _calls(opened, _TORCH, _CANN)
    calls = _in_order(calls)
    changed = np.flatnonzero(np.diff(calls.thread, prepend=calls.thread[:1] - 1))
    lane = np.repeat(np.arange(len(changed)), np.diff(np.append(changed, len(calls.thread))))
    parents = Nesting().parents(lane, calls.start, calls.end, calls.kind == _RUNTIME)
    code, texts = calls.name
    stage, step = _places(opened, calls)
    return {
        "thread": calls.thread,
        "name": distinct(code, [text.removeprefix(MODULE) for text in texts]),
        "kind": (calls.kind, CALL_KINDS),
        "start": calls.start,
        "duration": calls.end - calls.start,
        "id": np.arange(1, len(lane) + 1),
        "parent": np.where(parents > 0, parents, UNKNOWN),
        "stage": stage,
        "step": np.where(step > 0, step, UNKNOWN),
        "forward": _forward(calls, lane),
    }, problems


def _calls(opened: Capture, *tables: str) -> tuple[_Calls, list[str]]:
    """Return the calls in tables of the database, or all calls of the trace, and problems."""
    if opened.database is not None:
        return _from_database(opened.database, *tables), []
    view = opened.read_trace(RowKind.CALLS)
    return _from_trace(view), view.problems


def _from_database(database: SqliteTables, *tables: str) -> _Calls:
    names = (*_CALL, "type", "sequenceNumber", "fwdThreadId")
    parts = [database.numbers(table, *names) for table in tables]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in names}
    of_torch = np.repeat([table == _TORCH for table in tables], [len(p["name"]) for p in parts])
    kind = np.full(len(rows["type"]), _RUNTIME)
    for number, code in _TYPES.items():
        kind[of_torch & (rows["type"] == number)] = code
    return _Calls(
        rows["globalTid"] & THREAD_BITS,
        database.decode(rows["name"], STRINGS),
        kind,
        rows["startNs"],
        rows["endNs"],
        rows["sequenceNumber"],
        rows["fwdThreadId"],
    )


def _from_trace(view: TraceView) -> _Calls:
    rows = view.tables[RowKind.CALLS]
    kinds = [_CATEGORIES.get(text, _RUNTIME) for text in view.names]
    # Databases name calls of CANN without a level.
    plain = [_LEVEL.sub("", text) for text in view.names]
    name = np.where(rows["category"] < 0, rows["name"] + len(plain), rows["name"])
    return _Calls(
        view.threads()[rows["lane"]],
        (name, [*view.names, *plain]),
        np.array([*kinds, _RUNTIME], np.int64)[rows["category"]],
        rows["start_ns"],
        rows["end_ns"],
        rows["sequence"],
        rows["forward"],
    )


def _in_order(calls: _Calls) -> _Calls:
    """Return calls by thread and start, outer ones first, without impossible times and steps."""
    code, texts = calls.name
    steps = matches(calls.name, lambda text: text.startswith(STEP))
    keep = plausible(calls.start, calls.end) & ~((calls.kind == _OPERATOR) & steps)
    rows = np.flatnonzero(keep)
    keys = (calls.kind, -calls.end, calls.start, calls.thread)
    rows = rows[np.lexsort([key[rows] for key in keys])]
    modules = matches((code[rows], texts), lambda text: text.startswith(MODULE))
    columns: dict[str, Any] = {
        name: getattr(calls, name)[rows] for name in _Calls._fields if name != "name"
    }
    columns["kind"] = np.where(modules & (columns["kind"] == _PYTHON), _MODULE, columns["kind"])
    return _Calls(name=distinct(code[rows], texts), **columns)


def _places(opened: Capture, calls: _Calls) -> tuple[Coded, Int64s]:
    """Return stage and step around the start of each call."""
    ranges, (first, stage) = opened.timeline.ranges, opened.window
    process = np.zeros(len(calls.start), np.int64)
    found = stages_at(ranges.marking, Launches(process, calls.thread, calls.start))
    stages = distinct(found.stage, ranges.names)
    step = np.where(found.step > 0, found.step, first if stage else 0)
    return opened.filled(stages, step, calls.start)


def _forward(calls: _Calls, lane: Int64s) -> Int64s:
    """Return the number of the forward operator of each backward one, else `UNKNOWN`."""
    rows = np.flatnonzero((calls.sequence >= 0) & (calls.kind == _OPERATOR))
    numbered = Grown(NUMBERED)
    columns = {"sequence": calls.sequence[rows], "start_ns": calls.start[rows], "row": rows}
    places = {"lane": lane[rows], "process": rows * 0, "backward": calls.forward[rows] > 0}
    numbered.add({**columns, **places})
    found = np.full(len(lane), UNKNOWN)
    for block in forwards(numbered):
        found[block["row"]] = block["forward"]
    return found


def _waits(opened: Capture) -> tuple[Frame, list[str]]:
    calls, problems = _calls(opened, _CANN)
    code, texts = calls.name
    keep = (calls.start > 0) & (calls.end >= calls.start) & (calls.kind == _RUNTIME)
    keep &= matches(calls.name, _WAITS.search)
    start = calls.start[keep]
    kinds = distinct(code[keep], texts)
    return {"kind": kinds, "start": start, "duration": calls.end[keep] - start}, problems


CALLS = TableReader(
    CALL_COLUMNS[1:],
    lambda opened: (
        opened.has(_TORCH, *_CALL, "type") or opened.has(_CANN, *_CALL) or opened.trace is not None
    ),
    _read,
)
"""Calls of the host by thread and start, outer calls first.

Operators of torch, modules and Python functions are those of torch_npu. ``runtime`` are calls of
CANN, and calls that pass tasks to the launching thread.
"""

SYNC = TableReader(
    columns_named("kind", "start", "duration"),
    lambda opened: opened.has(_CANN, *_CALL) or opened.trace is not None,
    _waits,
)
"""Calls of CANN in which the host waits for the device."""


def _products(opened: Capture) -> tuple[Frame, list[str]]:
    """Read what multiplies matrices; torch_npu records no values.

    These are calls by thread and start, or, without shapes of calls, kernels by start. Attention
    and grouped matmuls are always kernels, as the shapes of their calls don't decide their work.
    """
    found, remarks = _called_products(opened) if _has_called_products(opened) else ({}, [])
    if not has_matmul_kernels(opened):
        return found, remarks
    called = bool(found) and len(found["start"]) > 0
    kernels = {**read_matmul_kernels(opened, fused_only=called)}
    if not called:
        return kernels, remarks
    kernels["thread"] = np.full(len(kernels["start"]), UNKNOWN)
    return {name: _joined(found[name], kernels[name]) for name in found}, remarks


def _joined(first: Any, second: Any) -> Any:
    """Return a column of both, of numbers or of texts."""
    if isinstance(first, tuple):
        return end_to_end([first, second])
    return np.concatenate([first, second])


def _has_called_products(opened: Capture) -> bool:
    return opened.has(_TORCH, *_CALL, *_SHAPES) or opened.trace is not None


def _called_products(opened: Capture) -> tuple[dict[str, Any], list[str]]:
    if opened.database is not None:
        found, remarks = _database_products(opened.database), []
    else:
        view = opened.read_trace(RowKind.SHAPES)
        found, remarks = _trace_products(view), view.problems
    found |= {"dims": _as_json(found["dims"], _sizes), "types": _as_json(found["types"], str)}
    thread, start, end = (found[name] for name in ("thread", "start", "end"))
    rows = np.flatnonzero(plausible(start, end) & (found["dims"][0] >= 0))
    rows = rows[nested_order(thread[rows], start[rows], end[rows])]
    rows = rows[~_calls_another(found["operator"], thread, start, end, rows)]
    texts = {name: (found[name][0][rows], found[name][1]) for name in ("operator", "dims", "types")}
    times = {"start": start[rows], "duration": (end - start)[rows]}
    return {**texts, **times, "thread": thread[rows]}, remarks


def _database_products(database: SqliteTables) -> dict[str, Any]:
    names = ", ".join(f"'{name}'" for name in sorted(NPU_PRODUCTS))
    where = f"name IN (SELECT id FROM {STRINGS} WHERE value IN ({names}))"
    rows = database.numbers(_TORCH, *_CALL, *_SHAPES, where=where)
    dims, types = sorted((database.decode(rows[name], STRINGS) for name in _SHAPES), key=_types_in)
    return {
        "thread": rows["globalTid"] & THREAD_BITS,
        "operator": database.decode(rows["name"], STRINGS),
        "start": rows["startNs"],
        "end": rows["endNs"],
        "dims": dims,
        "types": types,
    }


def _types_in(column: Coded) -> int:
    """Count the texts that name types; older versions of torch_npu swap the two columns."""
    codes, texts = column
    used = np.unique(codes[codes >= 0]).tolist()
    return sum(re.search("[a-z]", texts[code]) is not None for code in used)


def _trace_products(view: TraceView) -> dict[str, Any]:
    rows = view.tables[RowKind.SHAPES]
    return {
        "thread": view.threads()[rows["lane"]],
        "operator": (rows["name"], view.names),
        "start": rows["start_ns"],
        "end": rows["end_ns"],
        "dims": (rows["dims"], view.names),
        "types": (rows["types"], view.names),
    }


def _sizes(written: str) -> list[int]:
    return [int(size) for size in written.split(",")] if written else []


def _as_json(column: Coded, read: Callable[[str], Any]) -> Coded:
    """Return lists such as "32,9216;4096,9216;" of torch_npu as JSON; -1 for empty ones."""
    codes, texts = column
    lists: list[str] = [*texts]
    for code in np.unique(codes[codes >= 0]).tolist():
        lists[code] = _list_as_json(texts[code], read)
    filled = matches(column, lambda text: text.strip("; \r\n"))
    return np.where(filled, codes, -1), lists


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


SHAPES = TableReader(
    columns_named("thread", "operator", "start", "duration", "dims", "types", "values"),
    lambda opened: _has_called_products(opened) or has_matmul_kernels(opened),
    _products,
)
"""Matrix products with the shapes of their inputs, if shapes were recorded.

Rows without a thread are kernels: their time is that on the device.
"""


def has_matmul_kernels(opened: Capture) -> bool:
    """Return whether a capture may have kernels with shapes."""
    return opened.has(_INFO, "opType", *_TEXTS) or opened.file(KERNEL_SHEET) is not None


def read_matmul_kernels(opened: Capture, *, fused_only: bool = False) -> Frame:
    """Read them by start: when they ran, and their shapes, without a thread.

    Matmuls are ``[m, k]`` times ``[k, n]``: CANN multiplies matrices as they lie in memory, so some
    are transposed, and the shape of the output tells. Shapes of blocked formats stay as they are.

    - Attention of training: the statistics of the softmax, query, key, value, mask.
    - Attention of inference: query, key, value.
    - Grouped matmuls: rows, weights, output.

    Args:
        opened: The capture.
        fused_only: Leave out plain matmuls.
    """
    if opened.database is not None:
        kind, start, end, texts = _kernels_from_database(opened.database)
    else:
        kind, start, end, texts = _from_sheet(opened)
    kinds = _FUSED if fused_only else _KINDS
    found = matches(kind, lambda text: any(each.fullmatch(text) for each in kinds))
    rows = np.flatnonzero(found & plausible(start, end) & (texts[0][0] >= 0))
    rows = rows[np.argsort(start[rows], kind="stable")]
    columns = [[text.strip('"') for text in texts_of((code[rows], own))] for code, own in texts]
    columns.insert(0, texts_of((kind[0][rows], kind[1])))
    known = {each: _as_dims(*each) for each in set(zip(*columns, strict=True))}
    shapes = [known[each] for each in zip(*columns, strict=True)]
    return {
        "operator": (kind[0][rows], kind[1]),
        "start": start[rows],
        "duration": (end - start)[rows],
        "dims": coded_texts([dims for dims, _ in shapes]),
        "types": coded_texts([types for _, types in shapes]),
    }


def _from_sheet(opened: Capture) -> tuple[Coded, Int64s, Int64s, list[Coded]]:
    times = dict.fromkeys(("starttime(us)", "duration(us)"), microseconds)
    headings = [name.lower() for name in _TEXTS]
    cells: dict[str, Any] = {"type": None, **dict.fromkeys(headings), **times}
    sheet = read_sheet(opened.file(KERNEL_SHEET), cells)  # type: ignore[arg-type]
    start = sheet.number("starttime(us)")
    length = sheet.number("duration(us)")
    end = np.where((start == UNKNOWN) | (length == UNKNOWN), UNKNOWN, start + length)
    return sheet.text("type"), start, end, [sheet.text(each) for each in headings]


def _kernels_from_database(database: SqliteTables) -> tuple[Coded, Int64s, Int64s, list[Coded]]:
    info = database.numbers(_INFO, "globalTaskId", "opType", *_TEXTS)
    tasks = database.numbers(_TASKS, "globalTaskId", "startNs", "endNs")
    at = find(tasks["globalTaskId"], info["globalTaskId"])
    start, end = (np.append(tasks[name], UNKNOWN)[at] for name in ("startNs", "endNs"))
    texts = [database.decode(info[name], STRINGS) for name in _TEXTS]
    return database.decode(info["opType"], STRINGS), start, end, texts


def _as_dims(
    kind: str, shapes: str, types: str, formats: str, output: str, out: str
) -> tuple[str, str]:
    """Return shapes and types as JSON.

    Example::

        >>> _as_dims("MatMul", "32,16;8,16;8", "FLOAT;FLOAT;FLOAT", "ND;ND;ND", "32,8", "FORMAT_ND")
        ('[[32,16],[16,8]]', '["float","float","float"]')
        >>> _as_dims("MatMul", "2,1,16,16;8,16", "DT_BF16", "FRACTAL_NZ;ND", "32,8", "ND")[0]
        '2,1,16,16;8,16'
        >>> _as_dims("GroupedMatmul", "32,16;4,16,8;", "DT_BF16", "ND;ND", "32,8", "ND")[0]
        '[[32,16],[4,16,8],[32,8]]'
    """
    names = [name.removeprefix("DT_") for name in types.split(";")]
    found = [_TORCH_TYPES.get(name, name) for name in names] if types else []
    fits = [name.removeprefix("FORMAT_") in _PLAIN for name in formats.split(";")]
    if _MATMUL.fullmatch(kind):
        plain = all(fits[:2]) and out.removeprefix("FORMAT_") in _PLAIN
        dims = _matrices(shapes, output) if plain else None
    else:
        dims = _fused(kind, shapes, output, fits)
        if _ATTENTION.fullmatch(kind):
            # The statistics are float, but only the type of the query matters.
            found = found[:1] * 4
    text = shapes if dims is None else msgspec.json.encode(dims).decode()
    return text, msgspec.json.encode(found).decode() if found else ""


def _fused(kind: str, shapes: str, output: str, fits: list[bool]) -> list[list[int]] | None:
    """Return the shapes that decide the work of attention and grouped matmuls."""
    try:
        given, made = ([_cann_sizes(each) for each in text.split(";")] for text in (shapes, output))
    except ValueError:
        return None
    if len(given) < 3 - (_GROUPED.fullmatch(kind) is not None) or not all(fits[:1]):
        return None
    # The first of several outputs may belong to only one of many groups.
    if _GROUPED.fullmatch(kind):
        single = [each for each in made if each]
        weights = given[1] if fits[1:2] == [True] else []
        return [given[0], weights, single[0]] if single and len(single[0]) > 1 else None
    if _INFERENCE.fullmatch(kind):
        return given[:3]
    # Statistics are [.., heads, length, 8] or, if packed, [tokens, heads, 8]. They are an output,
    # and an input of gradients.
    rest = [*made, *given[3:]]
    statistics = [each for each in rest if len(each) in (3, 4) and each[-1] == 8]
    masks = [each for each in given[3:] if len(each) > 1 and each not in statistics]
    if not statistics or prod(given[0]) % max(prod(statistics[0]) // 8, 1):
        return None
    if kind.endswith("Grad"):  # The gradient and the output are not masks.
        masks = [each for each in masks if each[:-1] != given[0][:-1]]
    return [statistics[0], *given[:3], masks[0] if masks else []]


def _matrices(shapes: str, output: str) -> list[list[int]] | None:
    """Return the shapes of both matrices, None if they do not fit the output's."""
    try:
        first, second = (_cann_sizes(each) for each in shapes.split(";")[:2])
        *_, rows, columns = _cann_sizes(output)
    except ValueError:
        return None
    if min(len(first), len(second)) < 2:
        return None
    for inner in dict.fromkeys(first[-2:]):
        fits = sorted(first[-2:]) == sorted((rows, inner))
        if fits and sorted(second[-2:]) == sorted((inner, columns)):
            return [[*first[:-2], rows, inner], [*second[:-2], inner, columns]]
    return None


def _cann_sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")] if text.strip() else []
