"""What the host called during an Ascend capture: operators, modules, Python, CANN."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.loaders.ascend.capture import Recorded
from lightning_rlprof.loaders.ascend.mstx import STEP
from lightning_rlprof.loaders.ascend.table_parts import Frame, Opened, Part, coded
from lightning_rlprof.loaders.ascend.trace_view import Kept, read_trace_view
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
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.loaders.stage_attribution import Launches, stages_at
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, Kernels, distinct, end_to_end

_TORCH, _CANN = "PYTORCH_API", "CANN_API"
_TOLD = ("startNs", "endNs", "globalTid", "name")
_THREAD = 2**32 - 1  # of a globalTid; the process stands above
_PYTHON, _OPERATOR, _RUNTIME, _MODULE = range(len(CALL_KINDS))
_CATEGORIES = {"cpu_op": _OPERATOR, "python_function": _PYTHON}  # all else is the runtime's
_TYPES = {50_001: _OPERATOR, 50_003: _PYTHON}
_LEVEL = re.compile(r"^\w+@")  # AscendCL@aclrtSynchronizeStream


class _Told(NamedTuple):
    """Calls in any order; times since 1970, `UNKNOWN` where autograd numbers nothing."""

    thread: Int64s
    name: Coded
    kind: Int64s
    start: Int64s
    end: Int64s
    sequence: Int64s
    forward: Int64s


def calls_part(
    recorded: Callable[[Opened], Recorded], filled: Callable[[Recorded, Kernels], Kernels]
) -> Part:
    """Return the table of calls: by thread and start, outer calls first, as of other devices.

    Operators of torch, modules and Python's functions are those of torch_npu; ``runtime`` are
    calls of CANN, and what hands tasks to the thread that launches them.

    Args:
        recorded: Gives the ranges of a capture.
        filled: Adds stage and step where the capture knows neither; times are since 1970.
    """

    def read(opened: Opened) -> tuple[Frame, list[str]]:
        told, problems = _told(opened)
        told = _in_order(told)
        capture = recorded(opened)
        placed = filled(capture, _placed(opened, capture, told))
        return _frame(told, placed), problems

    numbers = frozenset({"id", "parent", "forward"})
    return Part(CALL_COLUMNS[1:], _has, read, frozenset({"start"}), numbers)


def _has(opened: Opened) -> bool:
    return _in_database(opened) or opened.capture.trace is not None


def _in_database(opened: Opened) -> bool:
    return opened.has(_TORCH, *_TOLD, "type") or opened.has(_CANN, *_TOLD)


def _told(opened: Opened) -> tuple[_Told, list[str]]:
    if _in_database(opened):
        return _from_database(opened.database), []  # type: ignore[arg-type]
    return _from_trace(opened)


def _from_database(database: SqliteTables) -> _Told:
    names = (*_TOLD, "type", "sequenceNumber", "fwdThreadId")
    both = [database.numbers(table, *names) for table in (_TORCH, _CANN)]
    both[1]["type"] = np.full_like(both[1]["type"], UNKNOWN)
    rows = {name: np.concatenate([part[name] for part in both]) for name in names}
    kind = np.full(len(rows["type"]), _RUNTIME)
    for number, own in _TYPES.items():
        kind[rows["type"] == number] = own
    return _Told(
        rows["globalTid"] & _THREAD,
        coded(database, rows["name"]),
        kind,
        rows["startNs"],
        rows["endNs"],
        rows["sequenceNumber"],
        rows["fwdThreadId"],
    )


def _from_trace(opened: Opened) -> tuple[_Told, list[str]]:
    view = read_trace_view(opened.capture.trace, Kept.CALLS)  # type: ignore[arg-type]
    rows = view.tables[Kept.CALLS]
    kinds = [_CATEGORIES.get(text, _RUNTIME) for text in view.names]
    plain = [_LEVEL.sub("", text) for text in view.names]  # as databases spell calls of CANN
    name = np.where(rows["kind"] < 0, rows["name"] + len(plain), rows["name"])
    told = _Told(
        view.threads()[rows["lane"]],
        (name, [*view.names, *plain]),
        np.array([*kinds, _RUNTIME], np.int64)[rows["kind"]],
        rows["start_ns"],
        rows["end_ns"],
        rows["sequence"],
        rows["forward"],
    )
    return told, view.problems


def _in_order(told: _Told) -> _Told:
    """Return calls by thread and start, outer ones first, without those that cannot be true."""
    code, texts = told.name
    steps = [at for at, text in enumerate(texts) if text.startswith(STEP)]
    keep = plausible(told.start, np.where(told.end >= told.start, told.end - told.start, -1))
    keep &= ~((told.kind == _OPERATOR) & np.isin(code, steps))
    rows = np.flatnonzero(keep)
    keys = (told.kind, -told.end, told.start, told.thread)
    rows = rows[np.lexsort([key[rows] for key in keys])]
    modules = np.array([*(text.startswith(MODULE) for text in texts), False])[code[rows]]
    columns: dict[str, Any] = {
        name: getattr(told, name)[rows] for name in _Told._fields if name != "name"
    }
    columns["kind"] = np.where(modules & (columns["kind"] == _PYTHON), _MODULE, columns["kind"])
    return _Told(name=distinct(code[rows], texts), **columns)


def _placed(opened: Opened, capture: Recorded, told: _Told) -> Kernels:
    """Return stage and step of each call: those around its start, as of something launched then."""
    count, ranges = len(told.start), capture.ranges
    nobody = np.zeros(count, np.int64)
    found = stages_at(ranges.stages(), Launches(nobody, told.thread, told.start))
    first, stage = opened.capture.window
    step = np.where(found.step > 0, found.step, first if stage else 0)
    unknown = np.full(count, UNKNOWN)
    return Kernels(
        np.full(count, opened.rank),
        unknown,
        unknown,
        told.name,
        told.start,
        told.end,
        distinct(found.stage, ranges.names),
        step,
        (unknown * 0 - 1, []),
        told.start,
    )


def _frame(told: _Told, placed: Kernels) -> Frame:
    changed = np.flatnonzero(np.diff(told.thread, prepend=told.thread[:1] - 1))
    lane = np.repeat(np.arange(len(changed)), np.diff(np.append(changed, len(told.thread))))
    parents = Nesting().parents(lane, told.start, told.end, told.kind == _RUNTIME)
    return {
        "thread": told.thread,
        "name": _plain(told.name),
        "kind": (told.kind, CALL_KINDS),
        "start": placed.start_ns,
        "duration": told.end - told.start,
        "id": np.arange(1, len(lane) + 1),
        "parent": np.where(parents > 0, parents, UNKNOWN),
        "stage": placed.stage,
        "step": np.where(placed.step > 0, placed.step, UNKNOWN),
        "forward": _forward(told, lane),
    }


def _plain(names: Coded) -> Coded:
    return end_to_end([(names[0], [text.removeprefix(MODULE) for text in names[1]])])


def _forward(told: _Told, lane: Int64s) -> Int64s:
    """Return the number of the forward operator of each backward one, else `UNKNOWN`."""
    rows = np.flatnonzero((told.sequence >= 0) & (told.kind == _OPERATOR))
    numbered = Grown(NUMBERED)
    columns = {"sequence": told.sequence[rows], "start_ns": told.start[rows], "row": rows}
    places = {"lane": lane[rows], "process": rows * 0, "backward": told.forward[rows] > 0}
    numbered.add({**columns, **places})
    found = np.full(len(lane), UNKNOWN)
    for block in forwards(numbered):
        found[block["row"]] = block["forward"]
    return found
