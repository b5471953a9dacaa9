"""How fast matmuls and attention run, by shape, compared with the peak of the device.

FLOPs and bytes follow from the shapes of a call's inputs, see `work_of`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import NOT_RECORDED, DeviceWork, device_work
from lightning_rlprof.analysis.efficiency.operator_work import FLOAT8, HALF, Work, work_of
from lightning_rlprof.analysis.efficiency.peak_flops import (
    Peak,
    Type,
    recorded_device,
    unconfirmed_note,
)
from lightning_rlprof.analysis.operators import thread_lanes
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s, Mask, differs
from lightning_rlprof.tables.intervals import NONE, innermost
from lightning_rlprof.tables.kernels import find
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

TYPES: Mapping[str, Type] = {
    **dict.fromkeys(HALF, "bf16"),
    **dict.fromkeys(FLOAT8, "fp8"),
    "signed char": "int8",
}
"""Types of torch, and of the peak they are compared with; FP32 may run as TF32, so it has none."""

_COLUMNS = (
    *columns_of("text", "operator", "shapes", "type"),
    Column("calls", "count"),
    Column("time", "duration", "ns"),
    Column("share", "share"),
    Column("TFLOP/s", "number"),
    Column("% of peak", "share"),
    *columns_of("number", "TFLOP/s from", "TFLOP/s to"),
    Column("GB/s", "number"),
    Column("% of bandwidth", "share"),
    Column("arithmetic intensity", "number", "FLOP/byte"),
)
_TOTAL = "total"
_NO_SHAPES = (
    "{} no shapes of matmuls. Capture a step with torch.profiler or torch_npu.profiler and "
    "record_shapes (integrated: {{profile_record_shapes: true}})."
)
_HOST = "No kernels were recorded: times are host times."
_UNTIMED = "{} calls have no known kernel and count in no rate."
_UNKNOWN_PEAK = "The peak of {} is unknown."
_ABOVE = "Rates above the peak of the device are omitted."
_BOUNDS = "TFLOP/s of {} calls are bounds: {}."
_CACHED = "Rows above peak memory bandwidth hit the cache; their % of bandwidth is omitted."

_Row = tuple[Cell, ...]
_Kind = tuple[str, str, str | None, str | None]
"""Operator, dims, types and values of a call."""
_Peaks = tuple[Mapping[str, float], float | None]
"""TFLOP/s by type of torch, and GB/s."""


class _Timed(NamedTuple):
    """Calls of one kind: the short name of the kernel that did most of each, and their time.

    ``timed`` is how many of them have a known time.
    """

    kind: _Kind
    kernel: str | None
    time: int
    calls: int
    timed: int


class _Part(NamedTuple):
    """Calls of one row that cost the same: their time, number, and how many have a known time."""

    work: Work
    time: int
    calls: int
    timed: int


def matmuls(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Show how fast matmuls and attention ran, by operator, shapes and type.

    ``time`` is that of the kernels that the calls launched, or host time if the run has no kernels.
    ``share`` is relative to the time of all kernels and copies. ``TFLOP/s`` is FLOPs, see
    `work_of`, over that time. ``% of peak`` compares it with the device's dense peak of the
    type: 16-bit, FP8 or INT8.

    If shapes do not decide the FLOPs, ``TFLOP/s from`` and ``TFLOP/s to`` are bounds instead, and
    the note says why. Of calls inside one another, such as the parts of attention, the inner ones
    are shown.

    ``GB/s`` is inputs and outputs, each once, over the time; ``% of bandwidth`` compares it with
    the device's memory. ``arithmetic intensity`` is FLOPs per byte. The last row is the sum; its
    rate covers the rows whose FLOPs are known.
    """
    notes: list[str] = []
    work = device_work(spans, ranks, notes)
    calls = _read_calls(spans, work, notes)
    if not calls:
        of = "This run has" if ranks is None else f"Ranks {sorted(ranks)} have"
        return Table("matmuls", _COLUMNS, abstained=" ".join([_NO_SHAPES.format(of), *notes]))
    # Copies alone contain no time of matmuls.
    whole = int(work.duration.sum()) if work.kernel_count else None
    peaks = _peaks(spans, ranks, notes) if whole else ({}, None)
    if not whole:
        notes.append(_HOST)
    rows = sorted(_rows(calls, whole, peaks, notes), key=lambda row: -int(row[4] or 0))
    note = " ".join(dict.fromkeys(notes))
    return Table("matmuls", _COLUMNS, [*rows, _sum(rows, whole)], note)


def kernel_peaks(spans: Spans) -> dict[str, float]:
    """Return the share of the peak that kernels reach, by their short names.

    A kernel has the rate of the calls that it did most of, as `matmuls` times them: their FLOPs
    over the time of all that they launched. Calls whose FLOPs or peak are unknown count in none.
    """
    tops, _ = _peaks(spans, None, [])
    at_peak, spent = defaultdict[str, float](float), Counter[str]()
    for each in _read_calls(spans, device_work(spans), []) if tops else ():
        work = None if each.kernel is None else work_of(*each.kind)
        if work is None or work.least is None or work.least != work.most or work.type not in tops:
            continue
        at_peak[str(each.kernel)] += work.least * each.timed / tops[work.type] / 1_000
        spent[str(each.kernel)] += each.time
    shares = {name: at_peak[name] / ns for name, ns in spent.items() if ns}
    return {name: share for name, share in shares.items() if share <= 1}


def _read_calls(spans: Spans, work: DeviceWork, notes: list[str]) -> list[_Timed]:
    """Return the calls with known shapes by kind and kernel."""
    table = spans.try_table("shapes", notes)
    if table is None:
        return []
    rank, ranks = table.numbers("rank"), work.ranks
    rows = np.flatnonzero(np.ones_like(rank) if ranks is None else np.isin(rank, list(ranks)))
    columns = [table.texts(name) for name in ("operator", "dims", "types", "values")]
    start, duration = (table.numbers(name) for name in ("start", "duration"))
    thread = table.numbers("thread", NOT_RECORDED)
    rows = rows[~_outer(rows, rank, thread, start, start + duration)]
    start, duration, thread = start[rows], duration[rows], thread[rows]
    timed, kernel = np.ones(len(rows), bool), np.full(len(rows), NONE)
    called = thread != NOT_RECORDED  # Rows without a thread are kernels, which have their own time.
    if work.kernel_count and called.any():
        calls = (rank[rows], thread, start, start + duration)
        times = _kernel_time(work, *(each[called] for each in calls))
        duration[called], timed[called], kernel[called] = times
    alone = find(work.numbers("start"), np.where(called, UNKNOWN, start))
    kernel = np.where(np.append(work.rank, NONE)[alone] == rank[rows], alone, kernel)
    kind = np.zeros(len(rows), np.int64)
    coded = [(code[rows], [*texts, None]) for code, texts in columns]
    names = [each.short for each in work.short_names]
    coded.append((np.append(work.named[0], NONE)[kernel], [*names, None]))
    for code, texts in coded:
        kind = np.unique(kind * len(texts) + code + 1, return_inverse=True)[1]
    heads = np.unique(kind, return_index=True)[1]
    *kinds, kernels = ([texts[at] for at in code[heads]] for code, texts in coded)
    if untimed := len(rows) - np.count_nonzero(timed):
        notes.append(_UNTIMED.format(untimed))
    time = np.zeros(len(heads), np.int64)
    np.add.at(time, kind, duration)
    counts = (np.bincount(each, minlength=len(heads)) for each in (kind, kind[timed]))
    numbers = (each.tolist() for each in (time, *counts))
    return [*map(_Timed, zip(*kinds, strict=True), kernels, *numbers)]


def _outer(rows: Int64s, rank: Int64s, thread: Int64s, start: Int64s, end: Int64s) -> Mask:
    """Return which calls have another one inside, to which their work belongs."""
    found = np.zeros(len(start), bool)
    own = rows[thread[rows] != NOT_RECORDED]
    own = own[np.lexsort((-end[own], start[own], thread[own], rank[own]))]
    same = ~differs(rank[own], thread[own])[1:]
    found[own[:-1]] = same & (start[own[1:]] < end[own[:-1]])
    return found[rows]


def _kernel_time(
    work: DeviceWork, rank: Int64s, thread: Int64s, start: Int64s, end: Int64s
) -> tuple[Int64s, Mask, Int64s]:
    """Return the time of the kernels of each call, whether it launched any, and the longest."""
    kernels = slice(work.kernel_count)
    kernel_thread, launch = (work.numbers(name)[kernels] for name in ("thread", "launch"))
    threads = np.unique(thread)
    lane = thread_lanes(threads, rank, thread)
    kernel_lane = thread_lanes(threads, work.rank[kernels], kernel_thread)
    kernel_lane[launch == NOT_RECORDED] = NONE
    call = innermost(lane, start, end, kernel_lane, launch)
    found = np.zeros(len(start), np.int64)
    np.add.at(found, call[call >= 0], work.duration[kernels][call >= 0])
    order = np.argsort(work.duration[kernels], kind="stable")
    longest = np.full(len(start) + 1, NONE)  # The last stands for kernels of no call.
    longest[call[order]] = order
    return found, longest[:-1] != NONE, longest[:-1]


def _peaks(spans: Spans, ranks: Collection[int] | None, notes: list[str]) -> _Peaks:
    """Return TFLOP/s and GB/s of the devices, each if it is known and the same on all ranks."""
    heads = [head for rank, head in spans.headers.items() if ranks is None or rank in ranks]
    devices = [recorded_device(head) for head in heads]

    def common(of: Callable[[Peak], float | None]) -> float | None:
        found = {None if device is None else of(device) for device in devices}
        return found.pop() if len(found) == 1 else None

    by_type = {each: common(methodcaller("of", kind)) for each, kind in TYPES.items()}
    tflops = {each: peak for each, peak in by_type.items() if peak is not None}
    if HALF[0] not in tflops:
        named = ", ".join(sorted({head.hardware for head in heads} - {"unknown"}))
        notes.append(_UNKNOWN_PEAK.format(named or "the device"))
    if remark := unconfirmed_note(heads, "tflops", "gb_s"):
        notes.append(remark)
    return tflops, common(attrgetter("gb_s"))


def _rows(
    calls: list[_Timed], whole: int | None, peaks: _Peaks, notes: list[str]
) -> Iterator[_Row]:
    """Yield a row per operator, shapes and type; ``whole`` is the time of all kernels and copies.

    Calls that differ in numbers and flags alone, such as the batch of an engine, are summed.
    """
    tops, bandwidth = peaks
    rows: dict[tuple[str, str, str], list[_Part]] = {}
    bounded: Counter[str] = Counter()
    for kind, _, time, count, timed in calls:
        work = work_of(*kind) or Work(None, None, None, kind[1], "")
        if work.why:
            bounded[work.why] += count
        rows.setdefault((kind[0], work.text, work.type), []).append(_Part(work, time, count, timed))
    for (operator, text, own_type), parts in rows.items():
        time, count = sum(part.time for part in parts), sum(part.calls for part in parts)
        least = _total((part.work.least, part.timed) for part in parts)
        most = _total((part.work.most, part.timed) for part in parts)
        moved = _total((part.work.moved, part.timed) for part in parts)
        low, high = (_rate(amount, time, 1_000) for amount in (least, most))
        top = tops.get(own_type)
        if top is not None and low is not None and low > top:
            notes.append(_ABOVE)
            low = high = None
        exact = low if low == high else None
        bounds = (None, None) if exact is not None else (low, high)
        gb_s = _rate(moved, time, 1)
        of_bandwidth = _ratio(gb_s, bandwidth)
        if of_bandwidth is not None and of_bandwidth > 1:
            notes.append(_CACHED)
            of_bandwidth = None
        intensity = least / moved if least and least == most and moved else None
        head = (operator, text, own_type.removeprefix("c10::") or None, count, time)
        rates = (exact, _ratio(exact, top), *bounds, gb_s, of_bandwidth, intensity)
        yield (*head, time / whole if whole else None, *rates)
    notes += [_BOUNDS.format(count, why) for why, count in bounded.most_common()]


def _total(amounts: Iterable[tuple[int | None, int]]) -> int | None:
    """Return the sum of an amount over calls of known time, None if one is unknown."""
    total, known = 0, False
    for amount, timed in amounts:
        if timed:
            if amount is None:
                return None
            total, known = total + amount * timed, True
    return total if known else None


def _rate(amount: int | None, time: int, unit: int) -> float | None:
    """Return an amount over a time, in 10^9 a second, divided by ``unit``."""
    return amount / time / unit if amount is not None and time else None


def _ratio(rate: float | None, most: float | None) -> float | None:
    return rate / most if rate is not None and most else None


def _sum(rows: Sequence[Any], whole: int | None) -> _Row:
    """Return the sum; its rate covers the rows that have one, over their time."""
    count, time = (sum(row[at] for row in rows) for at in (3, 4))
    rated = [(row[6], row[4]) for row in rows if row[6] is not None]
    spent = sum(own for _, own in rated)
    rate = sum(rate * own for rate, own in rated) / spent if spent else None
    share = time / whole if whole else None
    return (_TOTAL, None, None, count, time, share, rate, *[None] * 6)
