"""How fast matmuls and attention run, by shape, compared with the peak of the device.

FLOPs and bytes follow from the shapes of a call's inputs, see `work_of`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightning_rlprof.analysis.device.work import NOT_RECORDED, DeviceWork, device_work
from lightning_rlprof.analysis.efficiency.peak_flops import (
    Type,
    bandwidth_of,
    peak_of,
    unconfirmed_note,
)
from lightning_rlprof.analysis.operators.call_tree import thread_lanes
from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.interval_nesting import NONE, innermost
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

HALF = ("c10::BFloat16", "c10::Half")
_FLOAT8 = tuple(f"c10::Float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))
TYPES: Mapping[str, Type] = {
    **dict.fromkeys(HALF, "bf16"),
    **dict.fromkeys(_FLOAT8, "fp8"),
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
_CACHED = "Rows above peak memory bandwidth hit the cache; their % of bandwidth is omitted."

_Row = tuple[Cell, ...]
_Kind = tuple[str, str, str | None, str | None]
"""Operator, dims, types and values of a call."""
_Timed = tuple[_Kind, int, int, int]
"""Kind of calls, their time, their number, and that of calls whose time is known."""
_Peaks = tuple[Mapping[str, float], float | None]
"""TFLOP/s by type of torch, and GB/s."""
_Dims = list[list[int]]
_SIZES = {
    **dict.fromkeys(("float", "c10::complex<c10::Half>", "int", "unsigned int"), 4),
    **dict.fromkeys(("double", "c10::complex<float>", "long int", "long"), 8),
    **dict.fromkeys(HALF, 2),
    **dict.fromkeys(("signed char", "unsigned char", "bool"), 1),
    **dict.fromkeys(_FLOAT8, 1),
}
_MOST, _LARGEST = 2**59, 2**40  # bytes stay below 64 bits


def matmuls(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Show how fast matmuls and attention ran, by operator, shapes and type.

    ``time`` is that of the kernels that the calls launched, or host time if the run has no kernels.
    ``share`` is relative to the time of all kernels and copies. ``TFLOP/s`` is FLOPs, see
    `work_of`, over that time. ``% of peak`` compares it with the device's dense peak of the
    type: 16-bit, FP8 or INT8.

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
    whole = int(work.duration.sum()) if work.kernel_count else None  # copies are no matmul's time
    peaks = _peaks(spans, ranks, notes) if whole else ({}, None)
    if not whole:
        notes.append(_HOST)
    rows = sorted(_rows(calls, whole, peaks, notes), key=lambda row: -int(row[4] or 0))
    note = " ".join(dict.fromkeys(notes))
    return Table("matmuls", _COLUMNS, [*rows, _sum(rows, whole)], note)


def _read_calls(spans: Spans, work: DeviceWork, notes: list[str]) -> list[_Timed]:
    """Return the calls with known shapes by kind."""
    table = spans.try_table("shapes", notes)
    if table is None:
        return []
    rank, ranks = table.numbers("rank"), work.ranks
    rows = np.flatnonzero(np.ones_like(rank) if ranks is None else np.isin(rank, list(ranks)))
    columns = [table.texts(name) for name in ("operator", "dims", "types", "values")]
    kind = np.zeros(len(rows), np.int64)
    for code, texts in columns:
        kind = np.unique(kind * (len(texts) + 1) + code[rows] + 1, return_inverse=True)[1]
    heads = rows[np.unique(kind, return_index=True)[1]]
    coded = [([*texts, None], code[heads].tolist()) for code, texts in columns]
    kinds = [*zip(*([texts[at] for at in codes] for texts, codes in coded), strict=True)]
    start, duration = (table.numbers(name)[rows] for name in ("start", "duration"))
    thread, timed = table.numbers("thread", NOT_RECORDED)[rows], np.ones(len(rows), bool)
    called = thread != NOT_RECORDED  # the others are kernels, which have their own time
    if work.kernel_count and called.any():
        calls = (rank[rows], thread, start, start + duration)
        own = _kernel_time(work, *(column[called] for column in calls))
        duration[called], timed[called] = own
    if untimed := len(rows) - np.count_nonzero(timed):
        notes.append(_UNTIMED.format(untimed))
    time = np.zeros(len(kinds), np.int64)
    np.add.at(time, kind, duration)
    counts = (np.bincount(each, minlength=len(kinds)) for each in (kind, kind[timed]))
    return [*zip(kinds, time.tolist(), *(each.tolist() for each in counts), strict=True)]


def _kernel_time(
    work: DeviceWork, rank: Int64s, thread: Int64s, start: Int64s, end: Int64s
) -> tuple[Int64s, Mask]:
    """Return the time of the kernels that each call launched, and whether it launched any."""
    kernels = slice(work.kernel_count)
    kernel_thread, launch = (work.numbers(name)[kernels] for name in ("thread", "launch"))
    threads = np.unique(thread)
    lane = thread_lanes(threads, rank, thread)
    kernel_lane = thread_lanes(threads, work.rank[kernels], kernel_thread)
    kernel_lane[launch == NOT_RECORDED] = NONE
    call = innermost(lane, start, end, kernel_lane, launch)
    found = np.zeros(len(start), np.int64)
    np.add.at(found, call[call >= 0], work.duration[kernels][call >= 0])
    return found, np.bincount(call[call >= 0], minlength=len(start)) > 0


def _peaks(spans: Spans, ranks: Collection[int] | None, notes: list[str]) -> _Peaks:
    """Return TFLOP/s and GB/s of the devices, each if it is known and the same on all ranks."""
    heads = spans.headers.items()
    devices = {head.hardware for rank, head in heads if ranks is None or rank in ranks}

    def common(of: Callable[[str], float | None]) -> float | None:
        found = {of(name) for name in devices}
        return found.pop() if len(found) == 1 else None

    by_type = {each: common(partial(peak_of, kind=kind)) for each, kind in TYPES.items()}
    tflops = {each: peak for each, peak in by_type.items() if peak is not None}
    if HALF[0] not in tflops:
        named = ", ".join(sorted(devices - {"unknown"}))
        notes.append(_UNKNOWN_PEAK.format(named or "the device"))
    if remark := unconfirmed_note(devices, "tflops", "gb_s"):
        notes.append(remark)
    return tflops, common(bandwidth_of)


def _rows(
    calls: list[_Timed], whole: int | None, peaks: _Peaks, notes: list[str]
) -> Iterator[_Row]:
    """Yield a row per kind of call; ``whole`` is the time of all kernels and copies."""
    tops, bandwidth = peaks
    for kind, time, count, timed in calls:
        work = work_of(*kind) or Work(None, None, kind[1], "")
        tflops = _rate(work.flops, timed, time, 1_000)
        of_peak = _ratio(tflops, tops.get(work.type))
        if of_peak is not None and of_peak > 1:
            notes.append(_ABOVE)
            tflops = of_peak = None
        gb_s = _rate(work.moved, timed, time, 1)
        of_bandwidth = _ratio(gb_s, bandwidth)
        if of_bandwidth is not None and of_bandwidth > 1:
            notes.append(_CACHED)
            of_bandwidth = None
        intensity = work.flops / work.moved if work.flops and work.moved else None
        head = (kind[0], work.text, work.type.removeprefix("c10::") or None, count, time)
        rates = (tflops, of_peak, gb_s, of_bandwidth, intensity)
        yield (*head, time / whole if whole else None, *rates)


def _rate(each: int | None, number: int, time: int, unit: int) -> float | None:
    """Return an amount per call over a time, in 10^9 a second, divided by ``unit``."""
    return each * number / time / unit if each is not None and time else None


def _ratio(rate: float | None, most: float | None) -> float | None:
    return rate / most if rate is not None and most else None


def _sum(rows: Sequence[Any], whole: int | None) -> _Row:
    """Return the sum; its rate covers the rows that have one, over their time."""
    count, time = (sum(row[at] for row in rows) for at in (3, 4))
    rated = [(row[6], row[4]) for row in rows if row[6] is not None]
    spent = sum(own for _, own in rated)
    rate = sum(rate * own for rate, own in rated) / spent if spent else None
    share = time / whole if whole else None
    return (_TOTAL, None, None, count, time, share, rate, None, None, None, None)


class Work(NamedTuple):
    """What one call computes and moves.

    Attributes:
        flops: Floating-point operations; a multiply and an add count one each. None if unknown.
        moved: Bytes of its inputs and outputs, each once; None if unknown.
        text: Its shapes as text: ``8944x1024 @ 1024x1024``.
        type: The type of its first matrix, as torch's C++ names it.
    """

    flops: int | None
    moved: int | None
    text: str
    type: str


class _Formula(NamedTuple):
    """Which inputs of an operator are the matrices, and what it costs.

    Attributes:
        inputs: Position of the matrices among the inputs.
        cost: Returns FLOPs and the elements of inputs and outputs, None if shapes do not fit.
        causal: Position of ``is_causal`` among the inputs.
    """

    inputs: slice
    cost: Callable[[_Dims, bool | None], tuple[int | None, int] | None]
    causal: int | None = None


def _matmul(dims: _Dims, _: bool | None) -> tuple[int | None, int] | None:
    """Count [.., m, k] @ [.., k, n]: 2 m k n, times the batch.

    As in torch.matmul, a vector is a row or a column, and batches are broadcast.
    """
    first, second = dims
    if not first or not second:
        return None
    rows = first if len(first) > 1 else [1, *first]
    columns = second if len(second) > 1 else [*second, 1]
    ones = [1] * abs(len(rows) - len(columns))
    shorter, longer = sorted((rows[:-2], columns[:-2]), key=len)
    batches = [*zip(ones + shorter, longer, strict=True)]
    if rows[-1] != columns[-2] or any(1 not in pair and len({*pair}) > 1 for pair in batches):
        return None
    out = prod(map(max, batches)) * rows[-2] * columns[-1]
    return 2 * out * rows[-1], prod(first) + prod(second) + out


def _attention(
    dims: _Dims, causal: bool | None, *, backward: bool = False
) -> tuple[int | None, int] | None:
    """Count softmax(q k') v: two matmuls forward, five backward, of what a causal mask leaves."""
    query, key, value = dims
    if {len(each) for each in dims} != {4} or query[3] != key[3] or key[2] != value[2]:
        return None
    batch, heads, rows, size = query
    pairs = rows * (rows + 1) // 2 if causal else rows * key[2]
    known = causal is not None and (not causal or rows == key[2])  # else it depends on the kernel
    out = batch * heads * rows * value[3]
    elements = sum(map(prod, dims)) + out
    each = 3 * size + 2 * value[3] if backward else size + value[3]
    return (2 * batch * heads * pairs * each if known else None), elements * (1 + backward)


_SDPA = "aten::_scaled_dot_product_"
_backward = partial(_attention, backward=True)
FORMULAS: Mapping[str, _Formula] = {
    **dict.fromkeys(
        ("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::matmul"),
        _Formula(slice(0, 2), _matmul),
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), _Formula(slice(1, 3), _matmul)),
    **{
        f"{batch}MatMul{version}": _Formula(slice(0, 2), _matmul)
        for batch in ("", "Batch")
        for version in ("", "V2", "V3")
    },
    f"{_SDPA}flash_attention": _Formula(slice(0, 3), _attention, 4),
    f"{_SDPA}efficient_attention": _Formula(slice(0, 3), _attention, 6),
    f"{_SDPA}cudnn_attention": _Formula(slice(0, 3), _attention, 6),
    f"{_SDPA}flash_attention_backward": _Formula(slice(1, 4), _backward, 11),
    f"{_SDPA}efficient_attention_backward": _Formula(slice(1, 4), _backward, 11),
    f"{_SDPA}cudnn_attention_backward": _Formula(slice(1, 4), _backward, 14),
}
"""By operator, after torch's signatures (aten/src/ATen/native/native_functions.yaml).

``MatMul`` and the like are kernels of CANN.
"""


def work_of(operator: str, dims: str, types: str | None, values: str | None) -> Work | None:
    """Return what a call computes and moves, from JSON of torch.profiler; None if unknown.

    FLOPs are counted as torch.utils.flop_counter does: ``2 m k n`` for a matmul, without what is
    added to it. Unlike torch, attention under a causal mask counts only what the mask leaves.

    Example::

        >>> work_of("aten::mm", "[[4,8],[8,2]]", '["float","float"]', None)
        Work(flops=128, moved=224, text='4x8 @ 8x2', type='float')
    """
    formula = FORMULAS.get(operator)
    if formula is None:
        return None
    inputs = formula.inputs
    matrices = _list(dims)[inputs]
    if len(matrices) < inputs.stop - inputs.start or not all(map(_is_shape, matrices)):
        return None
    flag = "" if formula.causal is None else _at(_list(values), formula.causal)
    found = formula.cost(matrices, {"True": True, "False": False}.get(flag))
    if found is None or max(found[0] or 0, found[1]) > _MOST:
        return None
    kind = _at(_list(types), inputs.start)
    size = _SIZES.get(kind)
    shapes = ("x".join(map(str, each)) for each in matrices)
    text = (" @ " if formula.causal is None else ", ").join(shapes)
    return Work(found[0], None if size is None else found[1] * size, text, kind)


def _list(text: str | None) -> list[Any]:
    """Return what a JSON list contains, nothing if the text is none."""
    try:
        found: list[Any] = msgspec.json.decode(text or "[]", type=list[Any])
    except NOT_JSON:
        return []
    return found


def _is_shape(sizes: Any) -> bool:
    """Return whether this is a possible shape of a matrix."""
    return isinstance(sizes, list) and all(
        type(size) is int and 0 < size < _LARGEST for size in sizes
    )


def _at(values: list[Any], place: int) -> str:
    """Return the text at a place, "" if there is none."""
    found = values[place] if place < len(values) else ""
    return found if isinstance(found, str) else ""
