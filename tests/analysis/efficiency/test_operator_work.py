"""FLOPs of fused operators: torch's registry, brute force over pairs, real calls, real traces."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import flop_registry

from lightning_rlprof.analysis.efficiency.matmuls import matmuls
from lightning_rlprof.analysis.efficiency.operator_work import (
    FORMULAS,
    Pairs,
    _Attention,
    _Mask,
    attended,
    work_of,
)
from lightning_rlprof.loaders.host_calls import NPU_PRODUCTS
from lightning_rlprof.loaders.load import load
from tests.effort import examples
from tests.places import SHARED_DATA

KINETO = SHARED_DATA / "kineto"
SDPA = "aten::_scaled_dot_product_"
ATTENTIONS = [each for each in FORMULAS if each.startswith(SDPA)]
COUNTED_BY_TORCH = [each for each in ATTENTIONS if "cpu" not in each]
QUERY, KEY, VALUE = [2, 8, 128, 64], [2, 8, 256, 64], [2, 8, 256, 32]
BF16 = json.dumps(["c10::BFloat16"] * 4)


def torchs(operator: str, *shapes: list[int], out: list[int] | None = None) -> int:
    found = getattr(torch.ops.aten, operator.removeprefix("aten::"))
    more = {} if out is None else {"out_shape": out}
    return int(flop_registry[found](*map(torch.Size, shapes), **more))


def formula(operator: str) -> _Attention:
    found = FORMULAS[operator].cost
    assert isinstance(found, _Attention)
    return found


def attention(operator: str, causal: str | None, *dims: list[int]) -> tuple[str, str]:
    """Return shapes and values as torch writes them for a call of that operator."""
    places = formula(operator)
    values = [""] * places.causal + ([] if causal is None else [causal])
    return json.dumps([[]] * places.query + list(dims)), json.dumps(values)


@pytest.mark.parametrize(
    ("operator", "dims"),
    [
        ("aten::mm", [[8, 16], [16, 32]]),
        ("aten::addmm", [[32], [8, 16], [16, 32], [], []]),
        ("aten::bmm", [[4, 8, 16], [4, 16, 32]]),
        ("aten::baddbmm", [[4, 8, 32], [4, 8, 16], [4, 16, 32], [], []]),
    ],
)
def test_products_are_counted_as_torch_counts_them(operator: str, dims: list[list[int]]) -> None:
    found = work_of(operator, json.dumps(dims), BF16, None)
    assert found is not None
    assert found.flops == torchs(operator, *[each for each in dims if each])
    batch = 4 if "bmm" in operator else 1
    assert found.moved == 2 * batch * (8 * 16 + 16 * 32 + 8 * 32)
    assert found.text.endswith("8x16 @ 4x16x32" if batch == 4 else "8x16 @ 16x32")
    assert found.type == "c10::BFloat16"


SIZES = st.lists(st.sampled_from([1, 1, 2, 3]), max_size=4)


@settings(deadline=None)
@given(SIZES, SIZES)
@example([3], [3])
@example([2, 3], [3])
@example([3], [2, 3, 1])
@example([2, 1, 2, 3], [3, 3, 1])
@example([2, 2], [3, 2])
@example([2, 1, 1], [3, 1, 1])
def test_a_matmul_is_counted_for_all_that_torch_multiplies(
    first: list[int], second: list[int]
) -> None:
    found = work_of("aten::matmul", json.dumps([first, second]), BF16, None)
    try:
        out = torch.matmul(*(torch.empty(each, device="meta") for each in (first, second))).numel()
    except RuntimeError:
        assert found is None
        return
    assert found is not None
    assert found.flops == 2 * out * first[-1]
    assert found.moved == 2 * (math.prod(first) + math.prod(second) + out)


@pytest.mark.parametrize("operator", COUNTED_BY_TORCH)
def test_attention_without_a_mask_is_counted_as_torch_counts_it(operator: str) -> None:
    dims, values = attention(operator, "False", QUERY, KEY, VALUE)
    found = work_of(operator, dims, BF16, values)
    assert found is not None
    grad = [[2, 8, 128, 32]] if "backward" in operator else []
    assert found.flops == torchs(operator, *grad, QUERY, KEY, VALUE)


@pytest.mark.parametrize("operator", ATTENTIONS)
def test_of_a_causal_mask_what_it_leaves_is_counted(operator: str) -> None:
    whole, left = (
        work_of(operator, dims, BF16, values)
        for dims, values in (
            attention(operator, flag, QUERY, QUERY, QUERY) for flag in ("False", "True")
        )
    )
    assert whole is not None
    assert left is not None
    assert whole.flops is not None
    assert left.flops == whole.flops * 129 // 256
    assert left.moved == whole.moved


@pytest.mark.parametrize("operator", ATTENTIONS)
def test_an_unknown_mask_leaves_bounds(operator: str) -> None:
    whole = [work_of(operator, *dims_types(operator, "False", QUERY))]
    for causal in (None, "maybe"):
        found = work_of(operator, *dims_types(operator, causal, QUERY))
        assert found is not None
        assert whole[0] is not None
        assert found.flops is None
        assert found.most == whole[0].flops
        assert found.least == (whole[0].flops or 0) * 129 // 256
        assert found.why == "the mask is not recorded"
        assert found.moved is not None


def dims_types(operator: str, causal: str | None, shape: list[int]) -> tuple[str, str, str]:
    dims, values = attention(operator, causal, shape, shape, shape)
    return dims, BF16, values


@pytest.mark.parametrize("operator", ATTENTIONS)
def test_a_causal_mask_of_unequal_sides_has_two_alignments(operator: str) -> None:
    dims, values = attention(operator, "True", QUERY, KEY, KEY)
    found = work_of(operator, dims, BF16, values)
    dims, values = attention(operator, "False", QUERY, KEY, KEY)
    whole = work_of(operator, dims, BF16, values)
    assert found is not None
    assert whole is not None
    assert whole.flops is not None
    first = sum(range(1, 129))
    per_pair = whole.flops // (128 * 256)
    assert (found.least, found.most) == (first * per_pair, (first + 128 * 128) * per_pair)
    assert found.why == "how the causal mask is aligned is not recorded"


NAMES = {"longest": "max_q", "pages": "block_table", "window": "window_size_left"}


@pytest.mark.parametrize(
    "operator",
    [name for name in FORMULAS if name.startswith("aten::") and "_attention" in name],
)
def test_places_are_those_of_torchs_signature(operator: str) -> None:
    found = getattr(torch.ops.aten, operator.removeprefix("aten::")).default._schema
    names = [argument.name for argument in found.arguments]
    places = formula(operator)
    assert names[places.query : places.query + 3] == ["query", "key", "value"]
    assert names[places.causal] in ("is_causal", "custom_mask_type")
    assert (names[places.causal] == "custom_mask_type") is places.efficient
    for place, kinds in (
        (places.lengths, ("cum_seq_q", "cu_seqlens_q")),
        (places.longest, ("max_q", "max_seqlen_q")),
        (places.window, ("window_size_left", "window_size")),
    ):
        assert place is None or names[place] in kinds


def test_what_the_loader_keeps_is_what_is_known_here() -> None:
    assert {name for name in FORMULAS if "::" in name} == NPU_PRODUCTS


@pytest.mark.parametrize(
    "dims",
    [
        *("", "x", "5", "{}", "[]", "[[1,2]]", "[[1,2],[3,4]]", "[[0,2],[2,1]]"),
        *("[[1,2],[2,-1]]", "[[1,2],[2,1.5]]", "[[1,true],[1,1]]", '[["a",2],[2,1]]', "[[1,2],5]"),
        *("[[1099511627776,2],[2,1]]", "[[1000000000000,100],[100,1000000000000]]", "[" * 5_000),
        "[[2,1,2],[3,2,1]]",
    ],
)
def test_shapes_that_cannot_be_are_unknown(dims: str) -> None:
    assert work_of("aten::mm", dims, BF16, None) is None
    assert work_of("aten::relu", "[[1,2],[2,3]]", BF16, None) is None


def test_bytes_are_unknown_where_the_type_is() -> None:
    for types in (None, "x", "[]", '["new type"]', "[5]"):
        found = work_of("aten::mm", "[[1,2],[2,3]]", types, None)
        assert found is not None
        assert (found.flops, found.moved) == (12, None)


@pytest.mark.deep
@given(st.text(), st.text() | st.none(), st.text() | st.none())
def test_no_text_is_a_crash(dims: str, types: str | None, values: str | None) -> None:
    for operator in FORMULAS:
        assert work_of(operator, dims, types, values) is None


def brute_force(queries: int, keys: int, left: int | None, right: int | None, shift: int) -> int:
    return sum(
        (left is None or key >= query + shift - left)
        and (right is None or key <= query + shift + right)
        for query, key in itertools.product(range(queries), range(keys))
    )


SIDES = st.none() | st.integers(0, 9)


@given(st.integers(0, 9), st.integers(0, 9), SIDES, SIDES, st.integers(-9, 9))
@settings(max_examples=examples(300), deadline=None)
def test_pairs_are_those_of_brute_force(
    queries: int, keys: int, left: int | None, right: int | None, shift: int
) -> None:
    found = attended(queries, keys, left=left, right=right, shift=shift)
    assert found == brute_force(queries, keys, left, right, shift)


def partitions(tokens: int, sequences: int, longest: int) -> list[list[int]]:
    lengths = itertools.product(range(longest + 1), repeat=sequences)
    return [list(each) for each in lengths if sum(each) == tokens]


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.sampled_from([True, False, None]),
    SIDES,
    SIDES,
)
@settings(max_examples=examples(150), deadline=None)
def test_bounds_of_packed_sequences_are_those_of_all_ways_to_cut_them(
    lengths: list[int], causal: bool | None, left: int | None, right: int | None
) -> None:
    tokens, longest = sum(lengths), max(lengths)
    found = _Mask(causal, left, right).packed(tokens, len(lengths), longest)
    if not longest:
        assert found is None
        return
    every = [
        sum(brute_force(each, each, left, end, 0) for each in cut)
        for cut in partitions(tokens, len(lengths), longest)
        for end in ({True: [0], False: [right], None: [0, right]}[causal])
    ]
    assert found is not None
    assert (found.least, found.most) == (min(every), max(every))
    assert bool(found.why) is (found.least != found.most)


FLASH = "aten::_flash_attention_forward"


def packed(
    lengths: list[int], *, causal: bool, window: int = -1, keys: int = 0
) -> list[str | None]:
    """Return what the profiler writes of flash attention of packed sequences."""
    tokens, longest = sum(lengths), max(lengths)
    cumulated = [len(lengths) + 1]
    dims = [[tokens, 4, 16], [tokens, 2, 16], [tokens, 2, 16], cumulated, cumulated]
    values = ["", "", "", "", "", f"{longest}", f"{longest}", "0.", f"{causal}", "False"]
    values += ["", f"{window}", "-1"]
    return [json.dumps(dims), BF16, json.dumps(values)]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6), st.booleans(), st.sampled_from([-1, 7])
)
@settings(max_examples=examples(100), deadline=None)
def test_packed_attention_lies_within_its_bounds(
    lengths: list[int], causal: bool, window: int
) -> None:
    found = work_of(FLASH, *packed(lengths, causal=causal, window=window))
    assert found is not None
    left = None if window < 0 else window
    pairs = sum(brute_force(each, each, left, 0 if causal else None, 0) for each in lengths)
    true = 4 * pairs * 4 * 16
    assert (found.least or 0) <= true <= (found.most or 0)
    if len(set(lengths)) == 1:
        assert found.flops == true
    if not causal and window < 0:  # torch counts each sequence whole
        ends = torch.tensor([0, *itertools.accumulate(lengths)])
        shape = torch.empty(sum(lengths), 4, 16, device="meta")
        count = flop_registry[torch.ops.aten._flash_attention_forward]
        longest = max(lengths)
        assert true == count(shape, shape, shape, ends, ends, longest, longest)


def test_the_reason_of_bounds_is_given() -> None:
    found = work_of(FLASH, *packed([10, 20, 30], causal=True))
    assert found is not None
    assert found.flops is None
    assert found.why == "the lengths of packed sequences are not recorded"
    assert found.moved == 2 * (60 * 4 * 16 + 2 * 60 * 2 * 16 + 60 * 4 * 16)
    dims, types, _ = packed([10, 20, 30], causal=True)
    without = work_of(FLASH, str(dims), types, None)
    assert without is not None
    assert (without.why, without.least) == ("the sliding window is not recorded", 60 * 4 * 4 * 16)


@pytest.mark.parametrize(
    ("operator", "dims", "values"),
    [
        ("flash_attn::_flash_attn_forward", [[2, 64, 4, 16]] * 3, "0. 0.25 True 15 0"),
        (
            "aten::_flash_attention_forward",
            [[2, 64, 4, 16]] * 3,
            "_ _ 64 64 0. True False 0.25 15 0",
        ),
        (
            "aten::_efficient_attention_forward",
            [[2, 64, 4, 16]] * 3,
            "_ _ _ 64 64 0. 1 False _ _ 16",
        ),
    ],
)
def test_a_sliding_window_leaves_fewer_pairs(
    operator: str, dims: list[list[int]], values: str
) -> None:
    texts = ["", "", "", *(text.strip("_") for text in values.split())]
    found = work_of(operator, json.dumps(dims), BF16, json.dumps(texts))
    assert found is not None
    assert found.flops == 2 * 4 * brute_force(64, 64, 15, 0, 0) * 2 * (16 + 16)


def engine_call(tokens: int, sequences: int) -> list[str]:
    """Return what vLLM's flash attention over pages gets for a batch."""
    pages = [512, 16, 2, 16]
    dims = [[tokens, 4, 16], pages, pages, [tokens, 4, 16], [sequences + 1], [], [sequences], []]
    values = [*[""] * 10, "8", "100", "0.", "0.25", "False", "True", "-1", "-1"]
    return [json.dumps([*dims, [sequences, 64]]), BF16, json.dumps(values)]


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 40)), max_size=4),
    st.lists(st.integers(1, 100), max_size=4),
)
@settings(max_examples=examples(100), deadline=None)
def test_attention_over_pages_lies_within_bounds(
    prefill: list[tuple[int, int]], decode: list[int]
) -> None:
    context = [(new, new + before) for new, before in prefill]
    tokens, sequences = sum(new for new, _ in context) + len(decode), len(context) + len(decode)
    if not tokens:
        return
    pairs = sum(brute_force(new, every, None, 0, every - new) for new, every in context)
    true = 4 * (pairs + sum(decode)) * 4 * 16
    bounds = work_of("_vllm_fa2_C::varlen_fwd", *engine_call(tokens, sequences))
    assert bounds is not None
    assert (bounds.least or 0) <= true <= (bounds.most or 0)
    assert bounds.why == "the lengths of contexts are not recorded"


def test_grouped_matmuls_are_those_of_each_group() -> None:
    rows, experts, ends = torch.randn(96, 32), torch.randn(4, 32, 16), [10, 10, 60, 96]
    starts = [0, *ends]
    whole = sum(2 * (end - start) * 32 * 16 for start, end in itertools.pairwise(starts))
    offsets = torch.tensor(ends, dtype=torch.int32)
    out = torch._grouped_mm(rows.bfloat16(), experts.bfloat16(), offs=offsets)
    dims = json.dumps([[96, 32], [4, 32, 16], [4]])
    found = work_of("aten::_grouped_mm", dims, BF16, None)
    assert found is not None
    assert found.flops == whole
    assert found.moved == 2 * (rows.numel() + experts.numel() + out.numel())
    for operator, first, second, flops in (
        ("aten::_grouped_mm", [4, 8, 32], [4, 32, 16], 4 * 2 * 8 * 32 * 16),
        ("aten::_grouped_mm", [8, 96], [96, 16], 2 * 8 * 96 * 16),
        ("aten::_grouped_mm", [4, 8, 32], [32, 64], 2 * 8 * 32 * 64),
    ):
        found = work_of(operator, json.dumps([first, second, [4]]), BF16, None)
        assert found is not None
        assert found.flops == flops
    assert work_of("aten::_grouped_mm", "[[96,31],[4,32,16],[4]]", BF16, None) is None


def experts_call(tokens: int, chosen: int, *, experts: int = 8, every: int = -1) -> list[str]:
    dims = [[tokens, 64], [experts, 2 * 48, 64], [experts, 64, 48]]
    values = ["", "", "", "", "", "silu", "False", f"{every}", "[128, 128]"]
    types = json.dumps(["c10::BFloat16", *["c10::Float8_e4m3fn"] * 2])
    return [json.dumps([*dims, *[[tokens, chosen]] * 2]), types, json.dumps(values)]


def test_fused_experts_are_the_matmuls_of_the_experts_that_tokens_chose() -> None:
    found = work_of("vllm::outplace_fused_experts", *experts_call(10, 2))
    assert found is not None
    gate, up, down = (2 * 64 * 48 for _ in range(3))
    assert found.flops == 10 * 2 * (gate + up + down)
    assert (found.moved, found.type) == (None, "c10::Float8_e4m3fn")


def test_experts_of_other_ranks_leave_a_bound() -> None:
    found = work_of("sglang::inplace_fused_experts", *experts_call(10, 2, experts=2, every=8))
    assert found is not None
    assert (found.least, found.most) == (0, 10 * 2 * 6 * 64 * 48)
    assert found.why == "how many tokens go to experts of other ranks is not recorded"


def test_a_real_forward_and_backward_on_the_cpu_count_as_torch_counts_them(tmp_path: Path) -> None:
    """Attention of the CPU, which torch's counter leaves out, counts as its math does."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    def flops(backend: SDPBackend, name: str) -> tuple[int, int]:
        inputs = [torch.randn(2, 4, 24, 16, requires_grad=True) for _ in range(3)]

        def attend() -> None:
            with sdpa_kernel([backend]):
                out = torch.nn.functional.scaled_dot_product_attention(*inputs)
            out.sum().backward()

        with FlopCounterMode(display=False) as counter:
            attend()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            attend()
        path = tmp_path / name
        profiler.export_chrome_trace(str(path))
        table = load(path).table("shapes")
        columns = (table.column(each) for each in ("operator", "dims", "types", "values"))
        found = [work_of(*row) for row in zip(*columns, strict=True)]  # type: ignore[arg-type]
        assert all(each is not None and each.flops is not None for each in found)
        return sum(each.flops or 0 for each in found if each), counter.get_total_flops()

    math_own, math_torch = flops(SDPBackend.MATH, "math.json")
    flash_own, flash_torch = flops(SDPBackend.FLASH_ATTENTION, "flash.json")
    forward = 4 * 2 * 4 * 24 * 24 * 16
    assert math_own == math_torch == 3 * forward
    assert flash_own == forward + forward * 5 // 2
    assert flash_torch == 0


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_attention_of_a_real_h100_is_half_the_matmuls_of_all_pairs() -> None:
    rows = matmuls(load(KINETO / "h100_qwen1.5-0.5b.json.gz")).rows
    (row,) = [row for row in rows if row[0] == "aten::_flash_attention_forward"]
    assert (row[1], row[3]) == ("16x559x16x64, 16x559x16x64, 16x559x16x64", 24)
    flops = 24 * 16 * 4 * (559 * 560 // 2) * 16 * 64
    assert row[6] == pytest.approx(flops / int(row[4]) / 1_000)  # type: ignore[call-overload]


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_attention_of_a_real_vllm_has_no_upper_bound() -> None:
    table = matmuls(load(KINETO / "vllm_prefill_decode_graph.json.gz"))
    rows = {row[0]: row for row in table.rows}
    row = rows["vllm::unified_attention_with_output"]
    assert (row[3], row[6], row[9]) == (24, None, None)
    assert "TFLOP/s of 24 calls are bounds: the lengths of contexts are not recorded." in table.note


def test_all_pairs_of_an_unrecorded_window_are_the_upper_bound() -> None:
    assert _Mask(True, known=False).pairs(3, 5) == Pairs(
        3, 15, "the sliding window is not recorded"
    )
