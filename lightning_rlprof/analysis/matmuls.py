"""How fast matrix products and attention run, shape by shape, beside the peak of the device."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.call_tree import NONE, UNKNOWN
from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.analysis.device_work import device_work
from lightning_rlprof.analysis.flops import bandwidth_of, peak_of
from lightning_rlprof.analysis.nested import enclosing, holding, open_at
from lightning_rlprof.analysis.operator_flops import HALF, Work, work_of
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["matmuls"]

_COLUMNS = (
    Column("operator", "text"),
    Column("shapes", "text"),
    Column("type", "text"),
    Column("calls", "count"),
    Column("time", "duration", "ns"),
    Column("share", "share"),
    Column("TFLOP/s", "number"),
    Column("of peak", "share"),
    Column("GB/s", "number"),
    Column("of bandwidth", "share"),
    Column("FLOP/byte", "number"),
)
_TOTAL = "total"
_NONE = (
    "no shapes of matrix products were recorded{}; torch.profiler and torch_npu.profiler record "
    "them with record_shapes (integrated: {{profile_record_shapes: true}})"
)
_HOST = "No kernels were recorded: the times are those of the host."
_UNTIMED = "Of {} calls no kernel is known to be theirs: they count in no rate."
_UNKNOWN_PEAK = "The peak of {} is not known."
_ABOVE = "What is above the peak of the device is refused."
_CACHED = "What came faster than the device's memory gives it was in its cache: no share of that."

_Row = tuple[Cell, ...]
_Kind = tuple[str, str, str | None, str | None]


class _Calls(NamedTuple):
    """Calls: their kind, how long each took, whether that is known, and all kinds.

    A kind is operator, dims, types, values.
    """

    kind: Int64s
    took: Int64s
    timed: npt.NDArray[np.bool_]
    kinds: Sequence[_Kind]


class _Most(NamedTuple):
    """What the device can do at most, None where that is not known."""

    tflops: float | None
    gb_s: float | None


def matmuls(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Tell how fast matrix products and attention ran, by operator, shapes and type.

    ``time`` is that of the kernels which the calls launched, on the host where none were recorded;
    ``share`` is of the time of all kernels and copies. ``TFLOP/s`` is FLOPs, see `work_of`, over
    that time, ``of peak`` what part of the device's dense peak that is, for 16-bit types where it
    is known. ``GB/s`` is inputs and outputs, each once, over the time, ``of bandwidth`` what part
    of that of the device's memory, ``FLOP/byte`` FLOPs per byte of these. The last row is the sum;
    its rate is over those whose FLOPs are known.
    """
    remarks: list[str] = []
    calls = _calls(spans, ranks, remarks)
    if calls is None:
        why = _NONE.format("" if ranks is None else f" of ranks {sorted(ranks)}")
        return Table("matmuls", _COLUMNS, abstained="; ".join([why, *remarks]))
    whole = int(device_work(spans, ranks, remarks).duration.sum()) or None
    whole = whole if _kernels(spans, ranks) else None  # copies alone tell no product's time
    most = _most(spans, ranks, remarks) if whole else _Most(None, None)
    remarks += [] if whole else [_HOST]
    rows = sorted(_rows(calls, whole, most, remarks), key=lambda row: -int(row[4] or 0))
    note = " ".join(dict.fromkeys(remarks))
    return Table("matmuls", _COLUMNS, [*rows, _sum(rows, calls, whole)], note)


def _calls(spans: Spans, ranks: Collection[int] | None, remarks: list[str]) -> _Calls | None:
    """Return the calls whose shapes are known, None without."""
    table = read(spans, "shapes", remarks)
    if table is None:
        return None
    rank = numbers(table, "rank")
    rows = np.flatnonzero(np.ones_like(rank) if ranks is None else np.isin(rank, list(ranks)))
    thread, start = (numbers(table, name)[rows] for name in ("thread", "start"))
    order = np.lexsort((start, thread, rank[rows]))
    rows, start = rows[order], start[order]
    columns = [texts(table, name) for name in ("operator", "dims", "types", "values")]
    kind = np.zeros(len(rows), np.int64)
    for code, own in columns:
        kind = np.unique(kind * (len(own) + 1) + code[rows] + 1, return_inverse=True)[1]
    heads = rows[np.unique(kind, return_index=True)[1]]
    told = [([*own, None], code[heads].tolist()) for code, own in columns]
    kinds = [*zip(*([own[at] for at in code] for own, code in told), strict=True)]
    took, timed = numbers(table, "duration")[rows], np.ones(len(rows), bool)
    if own_kernels := _kernels(spans, ranks):
        took, timed = _took(own_kernels, rank[rows], thread[order], start, took)
    if lost := len(rows) - np.count_nonzero(timed):
        remarks.append(_UNTIMED.format(lost))
    return _Calls(kind, took, timed, kinds) if len(rows) else None


def _took(
    table: Table, rank: Int64s, thread: Int64s, start: Int64s, length: Int64s
) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """Return the time of the kernels that each call launched, and which launched any."""
    threads = np.unique(thread)
    lane = rank * len(threads) + np.searchsorted(threads, thread)
    by, launch = numbers(table, "thread", UNKNOWN), numbers(table, "launch", UNKNOWN)
    at = np.searchsorted(threads, by)
    known = (np.append(threads, UNKNOWN)[at] == by) & (by != UNKNOWN) & (launch != UNKNOWN)
    from_lane = np.where(known, numbers(table, "rank") * len(threads) + at, NONE)
    holder = holding(enclosing(lane, start, start + length), start, start + length)
    call = open_at(lane, start, start + length, holder, from_lane, launch)
    found = np.zeros(len(start), np.int64)
    np.add.at(found, call[call >= 0], numbers(table, "duration")[call >= 0])
    return found, np.bincount(call[call >= 0], minlength=len(start)) > 0


def _kernels(spans: Spans, ranks: Collection[int] | None) -> Table | None:
    """Return the kernels, None where these ranks have none."""
    table = read(spans, "kernels", [])
    if table is None:
        return None
    own = numbers(table, "rank")
    return table if (len(own) if ranks is None else np.isin(own, list(ranks)).any()) else None


def _most(spans: Spans, ranks: Collection[int] | None, remarks: list[str]) -> _Most:
    """Return what the device can do, where it is known and the same on all ranks."""
    heads = spans.headers.items()
    there = {head.hardware for rank, head in heads if ranks is None or rank in ranks}
    most = [{of(name) for name in there} for of in (peak_of, bandwidth_of)]
    found = _Most(*(each.pop() if len(each) == 1 else None for each in most))
    if found.tflops is None:
        named = sorted(set(there) - {"unknown"})
        remarks.append(_UNKNOWN_PEAK.format(", ".join(named) or "the device"))
    return found


def _rows(calls: _Calls, whole: int | None, most: _Most, remarks: list[str]) -> Iterator[_Row]:
    """Yield a row per kind of call whose work is known."""
    sums = np.zeros((3, len(calls.kinds)), np.int64)
    for own, values in zip(sums, (calls.took, np.ones_like(calls.took), calls.timed), strict=True):
        np.add.at(own, calls.kind, values)
    for kind, time, count, number in zip(calls.kinds, *sums.tolist(), strict=True):
        work = work_of(*kind) or Work(None, None, kind[1], "")
        rate = _over(work.flops, number, time, 1_000)
        part = _part(rate, most.tflops if work.type in HALF else None)
        if part is not None and part > 1:
            remarks.append(_ABOVE)
            rate = part = None
        flow = _over(work.moved, number, time, 1)
        of_flow = _part(flow, most.gb_s)
        if of_flow is not None and of_flow > 1:
            remarks.append(_CACHED)
            of_flow = None
        name, shown = kind[0], work.type.removeprefix("c10::") or None
        share = time / whole if whole else None
        intensity = work.flops / work.moved if work.flops and work.moved else None
        rates = (rate, part, flow, of_flow, intensity)
        yield (name, work.text, shown, count, time, share, *rates)


def _part(rate: float | None, most: float | None) -> float | None:
    return rate / most if rate is not None and most else None


def _over(each: int | None, number: int, time: int, unit: int) -> float | None:
    """Return how much was done in a time, in units of 10^9 a second, times ``unit``."""
    return each * number / time / unit if each is not None and time else None


def _sum(rows: Sequence[_Row], calls: _Calls, whole: int | None) -> _Row:
    """Return the sum; its rate is of the rows that have one, over their time."""
    time = sum(int(row[4] or 0) for row in rows)
    rated = [(float(row[6]), int(row[4] or 0)) for row in rows if row[6] is not None]
    spent = sum(own for _, own in rated)
    rate = sum(rate * own for rate, own in rated) / spent if spent else None
    share = time / whole if whole else None
    return (_TOTAL, None, None, len(calls.kind), time, share, rate, None, None, None, None)
