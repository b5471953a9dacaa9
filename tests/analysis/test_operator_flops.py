"""FLOPs of matrix products and attention: those of torch's own counter, but for causal masks."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import flop_registry

from lightning_rlprof.analysis.operator_flops import FORMULAS, work_of
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.products import NPU_PRODUCTS

SDPA = "aten::_scaled_dot_product_"
ATTENTIONS = [each for each in FORMULAS if each.startswith(SDPA)]
QUERY, KEY, VALUE = [2, 8, 128, 64], [2, 8, 256, 64], [2, 8, 256, 32]
BF16 = '["c10::BFloat16","c10::BFloat16","c10::BFloat16","c10::BFloat16"]'


def torchs(operator: str, *shapes: list[int], out: list[int] | None = None) -> int:
    found = getattr(torch.ops.aten, operator.removeprefix("aten::"))
    more = {} if out is None else {"out_shape": out}
    return int(flop_registry[found](*map(torch.Size, shapes), **more))


def attention(operator: str, causal: str | None, *dims: list[int]) -> tuple[str, str]:
    """Return shapes and values as torch writes them for a call of that operator."""
    first, place = FORMULAS[operator].inputs.start, FORMULAS[operator].causal
    assert place is not None
    values = [""] * place + ([] if causal is None else [causal])
    return json.dumps([[]] * first + list(dims)), json.dumps(values)


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


@pytest.mark.parametrize("operator", ATTENTIONS)
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
def test_flops_of_attention_are_unknown_where_the_mask_is(operator: str) -> None:
    for causal, key in ((None, QUERY), ("maybe", QUERY), ("True", [2, 8, 256, 64])):
        dims, values = attention(operator, causal, QUERY, key, key)
        found = work_of(operator, dims, BF16, values)
        assert found is not None
        assert found.flops is None
        assert found.moved is not None


@pytest.mark.parametrize("operator", ATTENTIONS)
def test_the_place_of_the_mask_is_that_of_torchs_signature(operator: str) -> None:
    schema = getattr(torch.ops.aten, operator.removeprefix("aten::")).default._schema
    names = [argument.name for argument in schema.arguments]
    place = FORMULAS[operator].causal
    assert place is not None
    assert names[place] == "is_causal"
    assert names[FORMULAS[operator].inputs] == ["query", "key", "value"]


def test_what_the_loader_keeps_is_what_is_known_here() -> None:
    assert set(FORMULAS) == NPU_PRODUCTS


@pytest.mark.parametrize(
    "dims",
    [
        *("", "x", "5", "{}", "[]", "[[1,2]]", "[[1,2],[3,4]]", "[[1],[1]]", "[[0,2],[2,1]]"),
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


@given(st.text(), st.text() | st.none(), st.text() | st.none())
def test_no_text_is_a_crash(dims: str, types: str | None, values: str | None) -> None:
    for operator in FORMULAS:
        assert work_of(operator, dims, types, values) is None


def test_a_real_trace_of_torch_tells_what_was_multiplied(tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    def multiply() -> None:
        torch.bmm(torch.ones(5, 7, 9), torch.ones(5, 9, 4))
        torch.nn.functional.linear(torch.ones(7, 9), torch.ones(3, 9), torch.ones(3))

    with FlopCounterMode(display=False) as counter:
        multiply()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        multiply()
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    table = load(tmp_path / "t.json").table("shapes")
    columns = (table.column(each) for each in ("operator", "dims", "types", "values"))
    found = [work_of(*row) for row in zip(*columns, strict=True)]  # type: ignore[arg-type]
    assert [each.text for each in found if each] == ["5x7x9 @ 5x9x4", "7x9 @ 9x3"]
    assert sum(each.flops or 0 for each in found if each) == counter.get_total_flops()
