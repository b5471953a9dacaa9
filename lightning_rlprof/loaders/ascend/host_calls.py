"""Calls of the host in an Ascend capture: operators, modules, Python, CANN, and waits."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.loaders.ascend.capture import MarkedCapture, OpenCapture
from lightning_rlprof.loaders.ascend.mstx import STEP, THREAD_BITS
from lightning_rlprof.loaders.ascend.table_reader import Frame, TableReader, decode
from lightning_rlprof.loaders.ascend.trace_view import RowKind, read_trace_view
from lightning_rlprof.loaders.ascend.units import plausible
from lightning_rlprof.loaders.chrome.spill import Grown
from lightning_rlprof.loaders.host_calls import (
    CALL_COLUMNS,
    CALL_KINDS,
    MODULE,
    NUMBERED,
    Nesting,
    forwards,
)
from lightning_rlprof.loaders.stage_attribution import Launches, stages_at
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, Kernels, distinct, end_to_end
from lightning_rlprof.tables.table import Column

_TORCH, _CANN = "PYTORCH_API", "CANN_API"
_CALL = ("startNs", "endNs", "globalTid", "name")
_PYTHON, _OPERATOR, _RUNTIME, _MODULE = range(len(CALL_KINDS))
_CATEGORIES = {"cpu_op": _OPERATOR, "python_function": _PYTHON}  # all others are of the runtime
_TYPES = {50_001: _OPERATOR, 50_003: _PYTHON}
_LEVEL = re.compile(r"^\w+@")  # AscendCL@aclrtSynchronizeStream
_WAITS = re.compile(r"Synchronize|aclrtMemcpy$")  # names of calls that wait for the device


class _Calls(NamedTuple):
    """Calls in any order; times since 1970, `UNKNOWN` without a number of autograd."""

    thread: Int64s
    name: Coded
    kind: Int64s
    start: Int64s
    end: Int64s
    sequence: Int64s
    forward: Int64s


def calls_reader(
    marked: Callable[[OpenCapture], MarkedCapture],
    fill: Callable[[MarkedCapture, Kernels], Kernels],
) -> TableReader:
    """Return the reader of the table of calls: by thread and start, outer calls first.

    Operators of torch, modules and Python functions are those of torch_npu. ``runtime`` are calls
    of CANN, and calls that pass tasks to the launching thread.

    Args:
        marked: Returns the ranges of a capture.
        fill: Adds stage and step if the capture marks neither; times are since 1970.
    """

    def read(opened: OpenCapture) -> tuple[Frame, list[str]]:
        calls, problems = (
            (_from_database(opened), []) if _in_database(opened) else _from_trace(opened)
        )
        calls = _in_order(calls)
        capture = marked(opened)
        return _frame(calls, fill(capture, _placed(opened, capture, calls))), problems

    return TableReader(
        CALL_COLUMNS[1:],
        lambda opened: _in_database(opened) or opened.trace is not None,
        read,
        row_numbers=frozenset({"id", "parent", "forward"}),
    )


def _in_database(opened: OpenCapture) -> bool:
    return opened.has(_TORCH, *_CALL, "type") or opened.has(_CANN, *_CALL)


def _from_database(opened: OpenCapture) -> _Calls:
    database: Any = opened.database
    names = (*_CALL, "type", "sequenceNumber", "fwdThreadId")
    both = [database.numbers(table, *names) for table in (_TORCH, _CANN)]
    both[1]["type"] = np.full_like(both[1]["type"], UNKNOWN)
    rows = {name: np.concatenate([part[name] for part in both]) for name in names}
    kind = np.full(len(rows["type"]), _RUNTIME)
    for number, code in _TYPES.items():
        kind[rows["type"] == number] = code
    return _Calls(
        rows["globalTid"] & THREAD_BITS,
        decode(database, rows["name"]),
        kind,
        rows["startNs"],
        rows["endNs"],
        rows["sequenceNumber"],
        rows["fwdThreadId"],
    )


def _from_trace(opened: OpenCapture) -> tuple[_Calls, list[str]]:
    view = read_trace_view(opened.trace, RowKind.CALLS)  # type: ignore[arg-type]
    rows = view.tables[RowKind.CALLS]
    kinds = [_CATEGORIES.get(text, _RUNTIME) for text in view.names]
    plain = [_LEVEL.sub("", text) for text in view.names]  # as databases name calls of CANN
    name = np.where(rows["kind"] < 0, rows["name"] + len(plain), rows["name"])
    calls = _Calls(
        view.threads()[rows["lane"]],
        (name, [*view.names, *plain]),
        np.array([*kinds, _RUNTIME], np.int64)[rows["kind"]],
        rows["start_ns"],
        rows["end_ns"],
        rows["sequence"],
        rows["forward"],
    )
    return calls, view.problems


def _in_order(calls: _Calls) -> _Calls:
    """Return calls by thread and start, outer ones first, without impossible times and steps."""
    code, texts = calls.name
    steps = [at for at, text in enumerate(texts) if text.startswith(STEP)]
    keep = plausible(calls.start, np.where(calls.end >= calls.start, calls.end - calls.start, -1))
    keep &= ~((calls.kind == _OPERATOR) & np.isin(code, steps))
    rows = np.flatnonzero(keep)
    keys = (calls.kind, -calls.end, calls.start, calls.thread)
    rows = rows[np.lexsort([key[rows] for key in keys])]
    modules = np.array([*(text.startswith(MODULE) for text in texts), False])[code[rows]]
    columns: dict[str, Any] = {
        name: getattr(calls, name)[rows] for name in _Calls._fields if name != "name"
    }
    columns["kind"] = np.where(modules & (columns["kind"] == _PYTHON), _MODULE, columns["kind"])
    return _Calls(name=distinct(code[rows], texts), **columns)


def _placed(opened: OpenCapture, capture: MarkedCapture, calls: _Calls) -> Kernels:
    """Return stage and step around the start of each call, in the form of kernels launched then."""
    count, ranges = len(calls.start), capture.ranges
    process = np.zeros(count, np.int64)
    found = stages_at(ranges.stages(), Launches(process, calls.thread, calls.start))
    first, stage = opened.capture.window
    step = np.where(found.step > 0, found.step, first if stage else 0)
    unknown = np.full(count, UNKNOWN)
    return Kernels(
        np.full(count, opened.rank),
        unknown,
        unknown,
        calls.name,
        calls.start,
        calls.end,
        distinct(found.stage, ranges.names),
        step,
        (unknown * 0 - 1, []),
        calls.start,
    )


def _frame(calls: _Calls, placed: Kernels) -> Frame:
    changed = np.flatnonzero(np.diff(calls.thread, prepend=calls.thread[:1] - 1))
    lane = np.repeat(np.arange(len(changed)), np.diff(np.append(changed, len(calls.thread))))
    parents = Nesting().parents(lane, calls.start, calls.end, calls.kind == _RUNTIME)
    return {
        "thread": calls.thread,
        "name": _plain(calls.name),
        "kind": (calls.kind, CALL_KINDS),
        "start": placed.start_ns,
        "duration": calls.end - calls.start,
        "id": np.arange(1, len(lane) + 1),
        "parent": np.where(parents > 0, parents, UNKNOWN),
        "stage": placed.stage,
        "step": np.where(placed.step > 0, placed.step, UNKNOWN),
        "forward": _forward(calls, lane),
    }


def _plain(names: Coded) -> Coded:
    return end_to_end([(names[0], [text.removeprefix(MODULE) for text in names[1]])])


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


def _waits(opened: OpenCapture) -> tuple[Frame, list[str]]:
    if opened.has(_CANN, *_WAIT):
        database: Any = opened.database
        rows, problems = database.numbers(_CANN, *_WAIT), []
        start, end = rows["startNs"], rows["endNs"]
        code, names = decode(database, rows["name"])
    else:
        view = read_trace_view(opened.trace, RowKind.CALLS)  # type: ignore[arg-type]
        calls, problems = view.tables[RowKind.CALLS], view.problems
        of_cann = calls["kind"] < 0
        start, end = calls["start_ns"][of_cann], calls["end_ns"][of_cann]
        code, names = distinct(calls["name"][of_cann], view.names)
    waits = np.array([*(_WAITS.search(name) is not None for name in names), False])
    keep = waits[code] & (start > 0) & (end >= start)
    kinds = distinct(code[keep], [_LEVEL.sub("", name) for name in names])
    return {"kind": kinds, "start": start[keep], "duration": (end - start)[keep]}, problems


_WAIT = ("startNs", "endNs", "name")
SYNC = TableReader(
    (
        Column("kind", "text"),
        Column("start", "time", "ns"),
        Column("duration", "duration", "ns"),
    ),
    lambda opened: opened.has(_CANN, *_WAIT) or opened.trace is not None,
    _waits,
)
"""Calls of CANN in which the host waits for the device."""
