"""FLOPs and bytes of matmuls, attention and experts, from the shapes of one call's inputs.

A profiler records shapes and numbers, but not what tensors contain. So the lengths of packed
sequences, the context of a decoded token and some masks are unknown. Then FLOPs have a lower and an
upper bound, and the reason.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import msgspec

from lightning_rlprof.errors import NOT_JSON

HALF = ("c10::BFloat16", "c10::Half")
FLOAT8 = tuple(f"c10::Float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))

_SIZES = {
    **dict.fromkeys(("float", "c10::complex<c10::Half>", "int", "unsigned int"), 4),
    **dict.fromkeys(("double", "c10::complex<float>", "long int", "long"), 8),
    **dict.fromkeys(HALF, 2),
    **dict.fromkeys(("signed char", "unsigned char", "bool"), 1),
    **dict.fromkeys(FLOAT8, 1),
}
_MAX_ELEMENTS, _MAX_SIZE = 2**59, 2**40  # The bytes of this many elements fit into 64 bits.

MASK = "the mask is not recorded"
LENGTHS = "the lengths of packed sequences are not recorded"
CONTEXT = "the lengths of contexts are not recorded"
WINDOW = "the sliding window is not recorded"
ALIGNMENT = "how the causal mask is aligned is not recorded"
LAYOUT = "which dimension is the length is not recorded"
ELSEWHERE = "how many tokens go to experts of other ranks is not recorded"
"""Reasons for bounds."""

_Shape = list[int]

_SDPA = "aten::_scaled_dot_product_"


class Work(NamedTuple):
    """What one call computes and moves.

    Attributes:
        least: Floating-point operations at least; a multiply and an add count one each. None if
            unknown.
        most: The same at most; equal to ``least`` if shapes decide it.
        moved: Bytes of its inputs and outputs, each once; None if unknown.
        text: Its shapes as text: ``8944x1024 @ 1024x1024``.
        type: The type that it multiplies, as torch's C++ names it.
        why: Why there are bounds instead of a number; else empty.
    """

    least: int | None
    most: int | None
    moved: int | None
    text: str
    type: str
    why: str = ""

    @property
    def flops(self) -> int | None:
        """The FLOPs, None if unknown or only bounded."""
        return self.least if self.least == self.most else None


class _Call(NamedTuple):
    """The inputs of a call.

    Attributes:
        dims: Shape of each input; empty for numbers and flags.
        values: Number or flag of each input, as text; empty for tensors.
    """

    dims: list[Any]
    values: list[Any]

    def shape(self, at: int | None) -> _Shape:
        """Return the shape of an input, empty if it is not a tensor or the shape is impossible."""
        found = self.dims[at] if at is not None and at < len(self.dims) else []
        return found if _is_shape(found) else []

    def number(self, at: int | None) -> int | None:
        text = _at(self.values, at)
        return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None

    def flag(self, at: int | None) -> bool | None:
        return {"True": True, "False": False}.get(_at(self.values, at))


class _Cost(NamedTuple):
    """What a formula finds.

    Attributes:
        shapes: Those to show.
        least: FLOPs at least.
        most: FLOPs at most.
        elements: Elements of inputs and outputs, None if unknown.
        why: Why there are bounds.
    """

    shapes: Sequence[_Shape]
    least: int | None
    most: int | None
    elements: int | None
    why: str = ""


class Pairs(NamedTuple):
    """How many pairs of query and key an attention computes, per head.

    Attributes:
        least: At least.
        most: At most, None if unknown.
        why: Why they differ.
    """

    least: int
    most: int | None
    why: str = ""


def attended(
    queries: int, keys: int, *, left: int | None, right: int | None, shift: int = 0
) -> int:
    """Count the keys that all queries attend to: query i those from i + shift - left on.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        left: Keys before the query's own place; None for all.
        right: Keys after it; None for all, 0 under a causal mask.
        shift: Place of the first query among the keys: ``keys - queries`` if the mask is aligned
            at the last ones, as in flash-attention, 0 if at the first ones.

    Example::

        >>> attended(3, 3, left=None, right=0), attended(4, 4, left=1, right=0)
        (6, 7)
    """

    def below(first: int) -> int:
        """Sum min(max(first + i, 0), keys) over the queries."""
        return _capped(first + queries - 1, keys) - _capped(first - 1, keys)

    end = queries * keys if right is None else below(shift + right + 1)
    return end - (0 if left is None else below(shift - left))


def _capped(last: int, cap: int) -> int:
    """Sum min(i, cap) over i from 1 to ``last``."""
    if last < 0:
        return 0
    whole = min(last, cap)
    return whole * (whole + 1) // 2 + (last - whole) * cap


class _Mask(NamedTuple):
    """Which keys a query attends to.

    Attributes:
        causal: None if unknown.
        left: Window before the query, None without one.
        right: Window behind it.
        known: Whether windows would have been recorded.
        last: Whether the mask is aligned at the last queries and keys; None if unknown.
    """

    causal: bool | None
    left: int | None = None
    right: int | None = None
    known: bool = True
    last: bool | None = True

    def pairs(self, queries: int, keys: int) -> Pairs:
        """Return the pairs of one sequence."""
        if not self.known:
            return Pairs(min(queries, keys), queries * keys, WINDOW)
        ends = {True: (0,), False: (self.right,), None: (0, self.right)}[self.causal]
        shifts = {0, keys - queries} if self.last is None else {(keys - queries) * self.last}
        found = [
            attended(queries, keys, left=self.left, right=end, shift=shift)
            for end in ends
            for shift in shifts
        ]
        why = MASK if self.causal is None else ALIGNMENT
        return Pairs(min(found), max(found), why if min(found) < max(found) else "")

    def packed(self, tokens: int, sequences: int, longest: int | None) -> Pairs | None:
        """Return the pairs of sequences that attend to themselves; None if it cannot be.

        Pairs grow faster than lengths. So they are fewest if all are equally long, and most if as
        many as possible have the largest length.
        """
        longest = tokens if longest is None else longest
        if min(sequences, longest) < 1 or tokens > sequences * longest:
            return None
        length, more = divmod(tokens, sequences)
        few = [self.pairs(each, each).least for each in (length, length + 1)]
        full, rest = divmod(tokens, longest)
        many = [self.pairs(each, each) for each in (longest, rest)]
        least = few[0] * (sequences - more) + few[1] * more
        most = (many[0].most or 0) * full + (many[1].most or 0)
        return Pairs(least, most, "" if least == most else many[0].why or LENGTHS)


def _matmul(call: _Call, *, at: int = 0) -> _Cost | None:
    """Count [.., m, k] @ [.., k, n]: 2 m k n, times the batch.

    As in torch.matmul, a vector is a row or a column, and batches are broadcast.
    """
    first, second = call.shape(at), call.shape(at + 1)
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
    flops = 2 * out * rows[-1]
    return _Cost([first, second], flops, flops, prod(first) + prod(second) + out)


def _grouped(call: _Call, *, offsets: int = 2) -> _Cost | None:
    """Count a matmul per group of rows: 2 m k n over all rows, however they are grouped."""
    first, second = call.shape(0), call.shape(1)
    if {len(first), len(second)} - {2, 3} or first[-1] != second[-2]:
        return None
    groups = (call.shape(offsets) or [0])[0]
    rows, inner, columns = first[-2], first[-1], second[-1]
    if len(first) == len(second) == 3:
        if first[0] != second[0]:
            return None
        out = flops = first[0] * rows * columns
    else:
        flops = rows * columns
        out = flops * (groups if len(first) == len(second) == 2 else 1)
    flops *= 2 * inner
    return _Cost([first, second], flops, flops, prod(first) + prod(second) + out)


def _experts(call: _Call) -> _Cost | None:
    """Count both matmuls of fused experts: for each token, those of the experts chosen for it.

    Bytes depend on how many experts are chosen at all, which is not recorded.
    """
    tokens, up, down, weights, chosen = (call.shape(at) for at in range(5))
    if [len(each) for each in (tokens, up, down, weights, chosen)] != [2, 3, 3, 2, 2]:
        return None
    if up[2] != tokens[1] or down[1] != tokens[1] or chosen[0] != tokens[0]:
        return None
    flops = 2 * prod(chosen) * tokens[1] * (up[1] + down[2])
    others = [call.number(at) or 0 for at in range(5, len(call.values))]
    # A number above the local experts counts the experts of all ranks.
    elsewhere = any(each > up[0] for each in others)
    why = ELSEWHERE if elsewhere else ""
    return _Cost([tokens, up, down, chosen], 0 if why else flops, flops, None, why)


@dataclass(frozen=True)
class _Attention:
    """Where an operator has its inputs.

    Attributes:
        query: Position of the query; key and value follow.
        causal: Of ``is_causal``, or of the kind of mask of efficient attention.
        heads_first: [batch, heads, length, size] instead of [batch, length, heads, size].
        lengths: Of the cumulative lengths of packed sequences, queries then keys.
        longest: Of the largest length of queries; that of keys follows.
        window: Of the window before the query; that behind it may follow.
        pages: Of the table of pages of the KV cache.
        backward: Whether it computes gradients.
        efficient: Whether ``causal`` is a kind of mask: none, or aligned at the first or last.
    """

    query: int
    causal: int
    heads_first: bool = False
    lengths: int | None = None
    longest: int | None = None
    window: int | None = None
    pages: int | None = None
    backward: bool = False
    efficient: bool = False

    def mask(self, call: _Call) -> _Mask:
        if self.efficient:
            kind = call.number(self.causal)
            window = call.number(self.window)
            left = window - 1 if window and window > 0 else None
            return _Mask(
                None if kind is None else kind > 0, left, None, bool(call.values), kind == 2
            )
        sides = [call.number(self.window), call.number((self.window or -2) + 1)]
        left, right = (side if side is not None and side >= 0 else None for side in sides)
        known = self.window is None or bool(call.values)
        last = None if self.heads_first else True
        return _Mask(call.flag(self.causal), left, right, known, last)

    def __call__(self, call: _Call) -> _Cost | None:
        """Count softmax(q k') v: two matmuls forward, five backward, of what the mask leaves."""
        query, key, value = (call.shape(self.query + at) for at in range(3))
        lengths = call.shape(self.lengths)
        pages = call.shape(self.pages)
        # The sequences are packed in a batch of one.
        if lengths and len(query) == 4 and query[0] == 1:
            query, key, value = query[1:], key[1:], value[1:]
        rank = 3 if lengths else 4
        if len(query) != rank or {len(key), len(value)} != {4 if pages else rank}:
            return None
        if query[-1] != key[-1] or key[:-1] != value[:-1]:
            return None
        place = -2 if self.heads_first and not lengths else -3
        heads = query[-5 - place]
        mask = self.mask(call)
        if lengths:
            pairs = self._packed(call, mask, query, key, lengths[0] - 1, bool(pages))
        else:
            own = mask.pairs(query[place], key[place])
            pairs = Pairs(query[0] * own.least, query[0] * (own.most or 0), own.why)
        if pairs is None:
            return None
        out = prod(query[:-1]) * value[-1]
        elements = None if pages else sum(map(prod, (query, key, value))) + out
        size, of_value = query[-1], value[-1]
        each = 2 * heads * (3 * size + 2 * of_value if self.backward else size + of_value)
        most = None if pairs.most is None else pairs.most * each
        moved = None if elements is None else elements * (1 + self.backward)
        return _Cost([query, key, value], pairs.least * each, most, moved, pairs.why)

    def _packed(
        self, call: _Call, mask: _Mask, query: _Shape, key: _Shape, sequences: int, paged: bool
    ) -> Pairs | None:
        """Return the pairs of packed sequences, whose keys may lie in pages."""
        tokens = query[0]
        most = [call.number(self.longest), call.number((self.longest or -2) + 1)]
        if not paged and tokens == key[0] and most[0] == most[1]:
            return mask.packed(tokens, sequences, most[0])
        if not paged and sequences == 1:
            return mask.pairs(tokens, key[0])
        longest = most[1] if paged else most[1] or key[0]
        seen = tokens * longest if longest else None
        if paged:  # Every query sees itself and all earlier tokens.
            own = mask.packed(tokens, sequences, most[0])
            return None if own is None else Pairs(own.least, seen, CONTEXT)
        return Pairs(0, seen, LENGTHS)


def _unified(call: _Call) -> _Cost | None:
    """Count vLLM's attention, which does prefill and decoding; contexts are not recorded."""
    query, key, value = (call.shape(at) for at in range(3))
    if {len(query), len(key), len(value)} != {3} or query[2] != key[2]:
        return None
    least = 2 * prod(query[:2]) * (query[2] + value[2])
    return _Cost([query, key, value], least, None, None, CONTEXT)


def _cann_attention(call: _Call, *, backward: bool = False) -> _Cost | None:
    """Count CANN's FlashAttentionScore: statistics of each query and head, query, key, value, mask.

    The statistics' shape, [batch, heads, length, 8] or packed [tokens, heads, 8], decides which
    dimensions of the others are heads and lengths.
    """
    statistics, query, key, value, mask = (call.shape(at) for at in range(5))
    ranks = {len(each) for each in (query, key, value)}
    if len(statistics) == 3 and ranks == {3}:
        batch, heads, queries = 1, statistics[1], query[0]
        lengths, why = {key[0]}, LENGTHS
    elif len(statistics) == 4 and ranks in ({3}, {4}):
        batch, heads, queries, _ = statistics
        # These are [batch, length, ..] and the reverse.
        layouts = {1: (batch, queries), 0: (queries, batch)}
        if ranks == {4}:
            layouts[2] = (batch, heads)
        lengths = {key[at] for at, first in layouts.items() if (*query[:2],) == first}
        why = MASK if mask else LAYOUT if len(lengths) > 1 else ""
    else:
        return None
    size, rest = divmod(prod(query), batch * heads * queries)
    if rest or not lengths:
        return None
    of_value = size * prod(value) // prod(key)
    each = 2 * heads * (3 * size + 2 * of_value if backward else size + of_value)
    fewest = 1 if why in (LENGTHS, MASK) else min(lengths)
    least, most = (batch * queries * keys * each for keys in (fewest, max(lengths)))
    out = prod(query) // size * of_value
    moved = (prod(query) + prod(key) + prod(value) + out) * (1 + backward)
    return _Cost([query, key, value], least, most, moved, why)


def _cann_inference(call: _Call) -> _Cost | None:
    """Count CANN's attention of inference: query, key, value. Pages hide the contexts."""
    query, key, value = (call.shape(at) for at in range(3))
    if not query or not key or not value:
        return None
    each = 4 * prod(query)
    plain = len(query) == len(key) == 4 and (query[0], query[3]) == (key[0], key[3])
    most = each * max(key[1:3]) if plain else None
    return _Cost([query, key, value], each, most, None, MASK if plain else CONTEXT)


def _cann_grouped(call: _Call, *, halved: bool = False) -> _Cost | None:
    """Count CANN's GroupedMatmul: rows, weights, output; SwiGLU halves the output."""
    rows, weights, out = (call.shape(at) for at in range(3))
    if len(rows) != 2 or len(out) not in (2, 3):
        return None
    flops = 2 * prod(rows) * out[-1] * (1 + halved)
    elements = prod(rows) + prod(weights) + prod(out) if len(weights) == 3 else None
    return _Cost([rows, weights or out], flops, flops, elements)


class _Formula(NamedTuple):
    """How an operator is counted.

    Attributes:
        cost: The formula.
        typed: Position of the input whose type is multiplied.
        sign: What joins the shapes.
    """

    cost: Callable[[_Call], _Cost | None]
    typed: int = 0
    sign: str = " @ "


def _attends(query: int, causal: int, **places: Any) -> _Formula:
    return _Formula(_Attention(query, causal, **places), query, ", ")


_PRODUCT = _Formula(_matmul)
_SECOND = _Formula(partial(_matmul, at=1), 1)
_FUSED_EXPERTS = _Formula(_experts, 1, ", ")

FORMULAS: Mapping[str, _Formula] = {
    **dict.fromkeys(
        (
            *("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm"),
            *("aten::matmul", "sgl_kernel::fp8_scaled_mm"),
        ),
        _PRODUCT,
    ),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "_C::cutlass_scaled_mm"), _SECOND),
    **{
        f"{batch}MatMul{version}": _PRODUCT
        for batch in ("", "Batch")
        for version in ("", "V2", "V3")
    },
    **dict.fromkeys(("QuantBatchMatmulV3", "WeightQuantBatchMatmulV2"), _PRODUCT),
    "aten::_grouped_mm": _Formula(_grouped),
    "aten::_scaled_grouped_mm": _Formula(partial(_grouped, offsets=4)),
    "aten::_scaled_grouped_mm_v2": _Formula(partial(_grouped, offsets=8)),
    **dict.fromkeys(
        (
            *("vllm::inplace_fused_experts", "vllm::outplace_fused_experts"),
            *("sglang::inplace_fused_experts", "sglang::outplace_fused_experts"),
        ),
        _FUSED_EXPERTS,
    ),
    f"{_SDPA}flash_attention": _attends(0, 4, heads_first=True),
    f"{_SDPA}efficient_attention": _attends(0, 6, heads_first=True),
    f"{_SDPA}cudnn_attention": _attends(0, 6, heads_first=True),
    f"{_SDPA}flash_attention_for_cpu": _attends(0, 4, heads_first=True),
    f"{_SDPA}flash_attention_backward": _attends(1, 11, heads_first=True, backward=True),
    f"{_SDPA}efficient_attention_backward": _attends(1, 11, heads_first=True, backward=True),
    f"{_SDPA}cudnn_attention_backward": _attends(1, 14, heads_first=True, backward=True),
    f"{_SDPA}flash_attention_for_cpu_backward": _attends(1, 7, heads_first=True, backward=True),
    "aten::_flash_attention_forward": _attends(0, 8, lengths=3, longest=5, window=11),
    "aten::_flash_attention_backward": _attends(
        1, 11, lengths=6, longest=8, window=15, backward=True
    ),
    "aten::_efficient_attention_forward": _attends(
        0, 9, lengths=4, longest=6, window=13, efficient=True
    ),
    "aten::_efficient_attention_backward": _attends(
        1, 14, lengths=6, longest=8, window=18, efficient=True, backward=True
    ),
    "aten::_cudnn_attention_forward": _attends(0, 10, heads_first=True, lengths=4, longest=6),
    "aten::_cudnn_attention_backward": _attends(
        1, 14, heads_first=True, lengths=9, longest=11, backward=True
    ),
    "flash_attn::_flash_attn_forward": _attends(0, 5, window=6),
    "flash_attn::_flash_attn_backward": _attends(1, 11, window=12, backward=True),
    "flash_attn::_flash_attn_varlen_forward": _attends(
        0, 9, lengths=3, longest=5, window=10, pages=15
    ),
    "flash_attn::_flash_attn_varlen_backward": _attends(
        1, 15, lengths=9, longest=11, window=16, backward=True
    ),
    "_vllm_fa2_C::varlen_fwd": _attends(0, 15, lengths=4, longest=10, window=16, pages=8),
    **dict.fromkeys(
        ("vllm::unified_attention", "vllm::unified_attention_with_output"),
        _Formula(_unified, 0, ", "),
    ),
    "FlashAttentionScore": _Formula(_cann_attention, 1, ", "),
    "FlashAttentionScoreGrad": _Formula(partial(_cann_attention, backward=True), 1, ", "),
    **dict.fromkeys(
        ("FusedInferAttentionScore", "IncreFlashAttention", "PromptFlashAttention"),
        _Formula(_cann_inference, 0, ", "),
    ),
    "GroupedMatmul": _Formula(_cann_grouped),
    "GroupedMatmulSwigluQuant": _Formula(partial(_cann_grouped, halved=True)),
}
"""By operator, after the signatures of torch (aten/src/ATen/native/native_functions.yaml),
flash-attention (flash_attn_interface.py), vLLM and SGLang.

Names without a namespace are kernels of CANN.
"""


def work_of(operator: str, dims: str, types: str | None, values: str | None) -> Work | None:
    """Return what a call computes and moves, from JSON of torch.profiler; None if unknown.

    FLOPs are counted as torch.utils.flop_counter does: ``2 m k n`` for a matmul, without what is
    added to it. Unlike torch, attention counts only what a causal mask and a window leave.

    Args:
        operator: Its name in the trace.
        dims: Shapes of its inputs.
        types: Their types.
        values: Those of its inputs that are numbers or flags.

    Example::

        >>> work_of("aten::mm", "[[4,8],[8,2]]", '["float","float"]', None)
        Work(least=128, most=128, moved=224, text='4x8 @ 8x2', type='float', why='')
    """
    formula = FORMULAS.get(operator)
    if formula is None:
        return None
    found = formula.cost(_Call(_list(dims), _list(values)))
    if found is None or max(found.least or 0, found.most or 0, found.elements or 0) > _MAX_ELEMENTS:
        return None
    kind = _at(_list(types), formula.typed)
    size = _SIZES.get(kind)
    text = formula.sign.join("x".join(map(str, each)) for each in found.shapes)
    moved = None if size is None or found.elements is None else found.elements * size
    return Work(found.least, found.most, moved, text, kind, found.why)


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
        type(size) is int and 0 < size < _MAX_SIZE for size in sizes
    )


def _at(values: list[Any], place: int | None) -> str:
    """Return the text at a place, "" if there is none."""
    found = values[place] if place is not None and 0 <= place < len(values) else ""
    return found if isinstance(found, str) else ""
