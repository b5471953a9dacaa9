"""Difference of two traces by operator or kernel: due to count, and due to duration."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.kernel_names import kernel_names
from lightning_rlprof.analysis.device.work import OTHERS, device_work
from lightning_rlprof.analysis.operators import (
    UNATTRIBUTED,
    CallTree,
    call_tree,
)
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import NONE
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

By = Literal["operators", "kernels"]
"""What two traces are compared by."""

TOTAL = "total"
"""Names the last row, the sum of all others."""

_COLUMNS = (
    *columns_of("duration", "A", "B", "delta", "due to count", "due to duration", unit="ns"),
    Column("B/A", "ratio"),
    *columns_of("number", "A count", "B count"),
)
_NOTE = (
    "delta = due to count (more or fewer calls, each as long as in A) + due to duration (longer or "
    "shorter calls). One capture of each run can't separate a change from noise: compare the runs "
    "by stage for that."
)

_FEW = 8  # An error names at most this many stages.

_Row = tuple[Any, ...]


class _Side(NamedTuple):
    """One trace: time and number of calls by name, and over how many steps or ranks."""

    time: Counter[Cell]
    calls: Counter[Cell]
    over: int


class _Work(NamedTuple):
    """Calls, kernels or copies as columns of one length; ``step`` is 0 outside of steps."""

    rank: Int64s
    name: Int64s
    duration: Int64s
    stage: Int64s
    step: Int64s
    names: Sequence[str]
    stages: Sequence[str]


class _Pieces(NamedTuple):
    """What is timed in a trace, and what is counted; the same but for operators on a device."""

    timed: _Work
    counted: _Work


def trace_diff(
    a: Spans, b: Spans, *, by: By = "operators", stage: str | None = None, top: int | None = None
) -> Table:
    """Compare two traces by operator, or by kernel and copy, those first that changed most.

    ``A`` and ``B`` are per step and rank. For kernels they are their own time; for operators, the
    time of what they launched, or host time if one trace has no kernels. ``delta = B - A`` is
    ``due to count`` (``(n_B - n_A) · m_A``, n calls of mean length m) plus ``due to duration``
    (``n_B · (m_B - m_A)``). What only one trace has is all ``due to count``.

    Args:
        a: Trace A.
        b: Trace B.
        by: Unit of comparison.
        stage: Include only launches in this stage, under any framework's name of it.
        top: Number of rows to show; one more sums all `OTHERS`. None: all rows.

    Raises:
        RlprofError: Neither trace has the stage.
    """
    remarks: list[str] = []
    full: dict[Cell, str] = {}
    if by == "kernels":
        columns = (Column("short name", "text"), *_COLUMNS, Column("kernel", "text"))
        pieces = _by_kernel(a, b, remarks, full)
    else:
        columns = (Column("operator", "text"), *_COLUMNS)
        pieces = _by_operator(a, b, remarks)
    if isinstance(pieces, str):
        why = " ".join(dict.fromkeys([pieces, *remarks]))
        return Table("trace_diff", columns, abstained=why)
    _check_stage(stage, pieces)
    stepped = all((each.timed.step > 0).any() for each in pieces)
    sides = [_side(each, stage, stepped=stepped) for each in pieces]
    names = dict.fromkeys(name for side in sides for name in (*side.time, *side.calls))
    rows = [_row(name, *sides) for name in names]
    # The largest changes come first, then what takes longest.
    rows.sort(key=lambda row: (-abs(row[3]), -row[2], str(row[0])))
    shown = rows[:top]
    if len(rows) > len(shown):
        shown.append(_sum(OTHERS, rows[len(shown) :]))
    what = "step and rank" if stepped else "rank (one of the traces has no steps)"
    where = "" if stage is None else f" in {stage}"
    times = f"Time{where} per {what}: {sides[0].over:,} of A and {sides[1].over:,} of B."
    outside = _outside(pieces) if stepped else ""
    note = " ".join(dict.fromkeys(filter(None, [times, outside, _NOTE, *remarks])))
    shown.append(_sum(TOTAL, rows))
    if by == "kernels":
        shown = [(*row, full.get(row[0])) for row in shown]
    return Table("trace_diff", columns, shown, note)


def _by_kernel(
    a: Spans, b: Spans, remarks: list[str], full: dict[Cell, str]
) -> list[_Pieces] | str:
    """Return what devices ran, or why that cannot be compared; full names go to ``full``."""
    found = [_device_work(spans, remarks) for spans in (a, b)]
    for name, work in zip("AB", found, strict=True):
        if not len(work.rank):
            return f"Run {name} has no device kernels. Capture a step with a profiler."
    names = [*dict.fromkeys(name for work in found for name in work.names if name)]
    short = {name: own.short for name, own in zip(names, kernel_names(names), strict=True)}
    full.update({short[name]: name for name in reversed(names)})
    works = (work._replace(names=[short.get(name, "") for name in work.names]) for work in found)
    return [_Pieces(work, work) for work in works]


def _by_operator(a: Spans, b: Spans, remarks: list[str]) -> list[_Pieces] | str:
    """Return the time of operators on the device where both have it, else on the host."""
    hosts, devices = [], []
    for name, spans in zip("AB", (a, b), strict=True):
        calls = spans.try_table("calls", remarks)
        tree = None if calls is None else call_tree(calls, "operator")
        if calls is None or tree is None or not len(tree.name):
            return f"Run {name} has no operators. Capture a step with torch.profiler."
        stage, stages = calls.texts("stage")
        step = calls.numbers("step")[tree.row]
        codes = tree.rank, tree.name, tree.self_ns(), stage[tree.row], step
        hosts.append(_Work(*codes, tree.names, stages))
        found = device_work(spans, None, remarks)
        if found.tables:
            work = _device_work(spans, remarks)
            devices.append(_of_callers(work, tree, tree.launching(found, calls)))
    if len(devices) == len(hosts):
        return [_Pieces(*pair) for pair in zip(devices, hosts, strict=True)]
    remarks.append("Times are of the host, because one of the runs has no kernels.")
    return [_Pieces(host, host) for host in hosts]


def _device_work(spans: Spans, remarks: list[str]) -> _Work:
    work = device_work(spans, None, remarks)
    (name, names), (stage, stages) = work.named, work.stages()
    return _Work(work.rank, name, work.duration, stage, work.numbers("step", 0), names, stages)


def _of_callers(work: _Work, tree: CallTree, call: Int64s) -> _Work:
    """Return pieces of work by the name of the operator that launched each."""
    name = np.where(call == NONE, len(tree.names), np.append(tree.name, 0)[call])
    return work._replace(name=name, names=[*tree.names, UNATTRIBUTED])


def _check_stage(stage: str | None, pieces: Iterable[_Pieces]) -> None:
    if stage is None:
        return
    works = [each.timed for each in pieces]
    seen = ((each.stages, np.unique(each.stage[each.stage >= 0]).tolist()) for each in works)
    there = sorted({stages[code] for stages, codes in seen for code in codes})
    if standard_stage(stage) not in map(standard_stage, there):
        told = ", ".join(there[:_FEW]) + (", ..." if there[_FEW:] else "") or "none"
        raise RlprofError(f"no launches in stage {stage!r}. Stages in these traces: {told}")


def _side(pieces: _Pieces, stage: str | None, *, stepped: bool) -> _Side:
    timed, counted = pieces
    step = timed.step if stepped else np.zeros_like(timed.step)
    steps, code = np.unique(step, return_inverse=True)
    pairs = (timed.rank * len(steps) + code)[(step > 0) | (not stepped)]
    time, pieces_of = _sums(timed, stage, stepped=stepped)
    calls = _sums(counted, stage, stepped=stepped)[1]
    if UNATTRIBUTED in pieces_of:  # No call launched this work, so its pieces are counted.
        calls[UNATTRIBUTED] = pieces_of[UNATTRIBUTED]
    return _Side(time, calls, len(np.unique(pairs)))


def _sums(work: _Work, stage: str | None, *, stepped: bool) -> tuple[Counter[Cell], Counter[Cell]]:
    """Return the time of the work of each name, and how many pieces there are."""
    keep = (work.step > 0) | (not stepped)
    if stage is not None:
        alike = [standard_stage(name) == standard_stage(stage) for name in work.stages]
        keep &= np.array([*alike, False])[work.stage]
    # An index of -1, for unknown, reads the last item.
    names = [*(name or None for name in work.names), None]
    sums = np.zeros((2, len(names)), np.int64)
    np.add.at(sums[0], work.name[keep], work.duration[keep])
    np.add.at(sums[1], work.name[keep], 1)
    time, calls = Counter[Cell](), Counter[Cell]()
    for at in np.flatnonzero(sums[1]).tolist():
        time[names[at]] += int(sums[0, at])
        calls[names[at]] += int(sums[1, at])
    return time, calls


def _row(name: Cell, a: _Side, b: _Side) -> _Row:
    calls, others = (Fraction(side.calls[name], side.over) for side in (a, b))
    before, after = (Fraction(side.time[name], side.over) for side in (a, b))
    delta = round(after) - round(before)
    more = delta if bool(calls) != bool(others) else 0
    if calls and others:
        more = round(before * (others - calls) / calls)
    times = (round(before), round(after), delta, more, delta - more)
    return (name, *times, _ratio(*times[:2]), float(calls), float(others))


def _ratio(before: int, after: int) -> float | None:
    return after / before if before else None


def _sum(name: str, rows: Sequence[_Row]) -> _Row:
    times = [sum(row[at] for row in rows) for at in range(1, 6)]
    calls = [math.fsum(row[at] for row in rows) for at in (7, 8)]
    return (name, *times, _ratio(*times[:2]), *calls)


def _outside(pieces: Iterable[_Pieces]) -> str:
    """Say how much of the time is outside of steps: mostly work of the step before the first."""
    shares = []
    for work, _ in pieces:
        outside, whole = (int(ns.sum()) for ns in (work.duration[work.step <= 0], work.duration))
        shares.append(outside / max(whole, 1))
    if not any(shares):
        return ""
    return f"Excluded, outside of steps: {shares[0]:.0%} of A's time, {shares[1]:.0%} of B's."
