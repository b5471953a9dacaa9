"""FLOPs and bytes of matrix products and attention, by the shapes of their inputs."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec

from lightning_rlprof.errors import NOT_JSON

__all__ = ["FORMULAS", "HALF", "Work", "work_of"]

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
