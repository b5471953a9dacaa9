"""How fast matrix products and attention run, shape by shape, beside the peak of the device.

FLOPs and bytes of matrix products and attention, by the shapes of their inputs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.device.work import device_work
from lightning_rlprof.analysis.efficiency.peak_flops import bandwidth_of, peak_of
from lightning_rlprof.analysis.operators.call_tree import UNKNOWN
from lightning_rlprof.errors import NOT_JSON
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.interval_nesting import NONE, enclosing, holding, open_at
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

HALF = ("c10::BFloat16", "c10::Half")
"""Types whose peak is known of devices."""

_Dims = list[list[int]]
_SIZES = {
    **dict.fromkeys(("float", "c10::complex<c10::Half>", "int", "unsigned int"), 4),
    **dict.fromkeys(("double", "c10::complex<float>", "long int", "long"), 8),
    **dict.fromkeys(HALF, 2),
    **dict.fromkeys(("signed char", "unsigned char", "bool"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e5m2"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fnuz", "c10::Float8_e5m2fnuz"), 1),
}
_MOST, _LARGEST = 2**59, 2**40  # bytes stay below 64 bits


class Work(NamedTuple):
    """What one call has to do.

    Attributes:
        flops: Floating-point operations, a multiply and an add each one; None where not known.
        moved: Bytes of its inputs and outputs, each once; None where not known.
        text: Its shapes for people: ``8944x1024 @ 1024x1024``.
        type: The type of its first matrix, as torch's C++ names it.
    """

    flops: int | None
    moved: int | None
    text: str
    type: str


class _Formula(NamedTuple):
    """Where the matrices stand among the inputs, and what is counted of them.

    ``counted`` returns FLOPs and the elements of inputs and outputs, None where shapes do not fit.
    """

    inputs: slice
    counted: Callable[[_Dims, bool | None], tuple[int | None, int] | None]
    causal: int | None = None


def _product(dims: _Dims, _: bool | None) -> tuple[int | None, int] | None:
    """Count [.., m, k] @ [.., k, n]: 2 m k n, times the batch."""
    first, second = dims
    if len(first) != len(second) or len(first) not in (2, 3) or first[:-2] != second[:-2]:
        return None
    if first[-1] != second[-2]:
        return None
    out = prod(first[:-1]) * second[-1]
    return 2 * out * first[-1], prod(first) + prod(second) + out


def _broadcast(dims: _Dims, _: bool | None) -> tuple[int | None, int] | None:
    """Count as torch.matmul does: a vector stands for a row or a column, batches are broadcast."""
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


def _attention(dims: _Dims, causal: bool | None, *, backward: bool = False) -> Any:
    """Count softmax(q k') v: two products forward, five backward, of what a causal mask leaves."""
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


def _backward(dims: _Dims, causal: bool | None) -> Any:
    return _attention(dims, causal, backward=True)


_PLAIN, _ADDED = _Formula(slice(0, 2), _product), _Formula(slice(1, 3), _product)
_SDPA = "aten::_scaled_dot_product_"
FORMULAS: Mapping[str, _Formula] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm"), _PLAIN),
    "aten::matmul": _Formula(slice(0, 2), _broadcast),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), _ADDED),
    f"{_SDPA}flash_attention": _Formula(slice(0, 3), _attention, 4),
    f"{_SDPA}efficient_attention": _Formula(slice(0, 3), _attention, 6),
    f"{_SDPA}cudnn_attention": _Formula(slice(0, 3), _attention, 6),
    f"{_SDPA}flash_attention_backward": _Formula(slice(1, 4), _backward, 11),
    f"{_SDPA}efficient_attention_backward": _Formula(slice(1, 4), _backward, 11),
    f"{_SDPA}cudnn_attention_backward": _Formula(slice(1, 4), _backward, 14),
}
"""By operator. ``causal`` is the place of ``is_causal`` in torch's signature
(aten/src/ATen/native/native_functions.yaml)."""


def work_of(operator: str, dims: str, types: str | None, values: str | None) -> Work | None:
    """Return what a call has to do, by the JSON that torch.profiler writes; None where unknown.

    FLOPs as torch.utils.flop_counter counts them: ``2 m k n`` of a product, what is added beside it
    left out. Of attention under a causal mask only what the mask leaves, which torch counts whole.

    Example::

        >>> work_of("aten::mm", "[[4,8],[8,2]]", '["float","float"]', None)
        Work(flops=128, moved=224, text='4x8 @ 8x2', type='float')
    """
    formula = FORMULAS.get(operator)
    own = None if formula is None else _inputs(dims, formula.inputs)
    if formula is None or own is None:
        return None
    found = formula.counted(own, _flag(values, formula.causal))
    if found is None or max(found[0] or 0, found[1]) > _MOST:
        return None
    kind = _at(_read(types, list[Any]), formula.inputs.start)
    kind = kind if isinstance(kind, str) else ""
    size = _SIZES.get(kind)
    text = (" @ " if formula.causal is None else ", ").join(
        "x".join(map(str, each)) for each in own
    )
    return Work(found[0], None if size is None else found[1] * size, text, kind)


def _inputs(dims: str, place: slice) -> _Dims | None:
    """Return the shapes of the matrices among a call's inputs, None where one cannot be true."""
    shapes = _read(dims, list[list[Any]])
    own: Any = [] if shapes is None else shapes[place]
    sizes = [size for each in own for size in each]
    sound = all(type(size) is int and 0 < size < _LARGEST for size in sizes)
    return own if sound and len(own) == place.stop - place.start else None


def _flag(values: str | None, place: int | None) -> bool | None:
    """Return a truth value among a call's arguments, None where it is not told."""
    if place is None:
        return None
    told = _at(_read(values, list[Any]), place)
    return {"True": True, "False": False}.get(told) if isinstance(told, str) else None


def _at(values: Sequence[Any] | None, place: int) -> Any:
    return values[place] if values is not None and place < len(values) else None


def _read(text: str | None, kind: Any) -> Any:
    try:
        return None if text is None else msgspec.json.decode(text, type=kind)
    except NOT_JSON:
        return None


_COLUMNS = (
    Column("operator", "text"),
    Column("shapes", "text"),
    Column("type", "text"),
    Column("calls", "count"),
    Column("time", "duration", "ns"),
    Column("share", "share"),
    Column("TFLOP/s", "number"),
    Column("% of peak", "share"),
    Column("GB/s", "number"),
    Column("% of bandwidth", "share"),
    Column("arithmetic intensity", "number"),
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
    table = spans.try_table("shapes", remarks)
    if table is None:
        return None
    rank = table.numbers("rank")
    rows = np.flatnonzero(np.ones_like(rank) if ranks is None else np.isin(rank, list(ranks)))
    thread, start = (table.numbers(name)[rows] for name in ("thread", "start"))
    order = np.lexsort((start, thread, rank[rows]))
    rows, start = rows[order], start[order]
    columns = [table.texts(name) for name in ("operator", "dims", "types", "values")]
    kind = np.zeros(len(rows), np.int64)
    for code, own in columns:
        kind = np.unique(kind * (len(own) + 1) + code[rows] + 1, return_inverse=True)[1]
    heads = rows[np.unique(kind, return_index=True)[1]]
    told = [([*own, None], code[heads].tolist()) for code, own in columns]
    kinds = [*zip(*([own[at] for at in code] for own, code in told), strict=True)]
    took, timed = table.numbers("duration")[rows], np.ones(len(rows), bool)
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
    by, launch = table.numbers("thread", UNKNOWN), table.numbers("launch", UNKNOWN)
    at = np.searchsorted(threads, by)
    known = (np.append(threads, UNKNOWN)[at] == by) & (by != UNKNOWN) & (launch != UNKNOWN)
    from_lane = np.where(known, table.numbers("rank") * len(threads) + at, NONE)
    holder = holding(enclosing(lane, start, start + length), start, start + length)
    call = open_at(lane, start, start + length, holder, from_lane, launch)
    found = np.zeros(len(start), np.int64)
    np.add.at(found, call[call >= 0], table.numbers("duration")[call >= 0])
    return found, np.bincount(call[call >= 0], minlength=len(start)) > 0


def _kernels(spans: Spans, ranks: Collection[int] | None) -> Table | None:
    """Return the kernels, None where these ranks have none."""
    table = spans.try_table("kernels", [])
    if table is None:
        return None
    own = table.numbers("rank")
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
