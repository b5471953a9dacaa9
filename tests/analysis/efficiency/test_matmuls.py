"""Rates of matmuls: kernels of each call, exact times, peaks that are known or not, bounds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_rlprof.analysis.efficiency.matmuls import kernel_peaks, matmuls
from lightning_rlprof.analysis.efficiency.operator_work import work_of
from lightning_rlprof.analysis.kernels import kernels
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from tests.builders.calls import Copy, Kernel, run
from tests.builders.runs import header
from tests.places import SHARED_DATA

KINETO = SHARED_DATA / "kineto"
SHAPES = (
    *(Column(name, "count") for name in ("rank", "thread")),
    Column("operator", "text"),
    *(Column(name, "duration", "ns") for name in ("start", "duration")),
    *(Column(name, "text") for name in ("dims", "types", "values")),
)
BF16, MM = '["c10::BFloat16","c10::BFloat16"]', "[[1000,500],[500,2000]]"
H100 = "NVIDIA H100 80GB HBM3"  # 989.4 TFLOP/s


def product(start: int, end: int, dims: str = MM, types: str = BF16, **changes: object):
    row = {"rank": 0, "thread": 7, "operator": "aten::mm", "start": start, "duration": end - start}
    return tuple({**row, "dims": dims, "types": types, "values": None, **changes}.values())


def measured(shapes: list[tuple], *own: Kernel, device: str = H100, copies=None) -> Spans:
    spans = run(None, own or None, copies)
    tables = {**spans.tables, "shapes": lambda: Table("shapes", SHAPES, shapes)}
    heads = {rank: header(rank, 2, device=device) for rank in (0, 1)}
    return replace(spans, tables=tables, headers=heads)


def rows_of(table: Table) -> list[dict[str, object]]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def test_a_matmul_has_its_rate_and_its_share_of_the_peak() -> None:
    kernels = [Kernel("gemm", 0, 5_000, launch=150), Kernel("gemm", 0, 3_000, launch=350)]
    shapes = [product(100, 200), product(300, 400)]
    first, total = rows_of(matmuls(measured(shapes, *kernels, Kernel("x", 0, 2_000))))
    flops, moved = 2 * 1000 * 500 * 2000, 2 * (500_000 + 1_000_000 + 2_000_000)
    assert first == {
        "operator": "aten::mm",
        "shapes": "1000x500 @ 500x2000",
        "type": "BFloat16",
        "calls": 2,
        "time": 8_000,
        "share": 0.8,
        "TFLOP/s": pytest.approx(2 * flops / 8e-6 / 1e12),
        "% of peak": pytest.approx(2 * flops / 8e-6 / 989.4e12),
        "TFLOP/s from": None,
        "TFLOP/s to": None,
        "GB/s": pytest.approx(2 * moved / 8e-6 / 1e9),
        "% of bandwidth": pytest.approx(2 * moved / 8e-6 / 3350e9),
        "arithmetic intensity": pytest.approx(flops / moved),
    }
    assert (total["operator"], total["calls"], total["time"]) == ("total", 2, 8_000)
    assert total["TFLOP/s"] == pytest.approx(first["TFLOP/s"])


def test_kernels_belong_to_the_call_open_on_their_thread_as_they_were_launched() -> None:
    shapes = [
        product(100, 200),
        product(100, 200, "[[2,2],[2,2]]", thread=9),
        product(100, 200, "[[3,3],[3,3]]", rank=1),
        product(300, 400, "[[4,4],[4,4]]"),
    ]
    found = matmuls(
        measured(
            shapes,
            Kernel("a", 0, 10, launch=199),
            Kernel("b", 0, 20, launch=100, thread=9),
            Kernel("c", 0, 40, launch=150, rank=1),
            *(Kernel("between", 0, 80, launch=at) for at in (99, 200, 250, 400)),
            Kernel("elsewhere", 0, 160, launch=150, thread=8),
            Kernel("unknown", 0, 320),
        )
    )
    times = dict(zip(found.column("shapes"), found.column("time"), strict=True))
    assert times == {
        "3x3 @ 3x3": 40,
        "2x2 @ 2x2": 20,
        "1000x500 @ 500x2000": 10,
        "4x4 @ 4x4": 0,
        None: 70,
    }
    assert matmuls(measured(shapes), ranks=[1]).column("shapes") == ["3x3 @ 3x3", None]


def test_of_calls_inside_one_another_the_inner_one_is_shown() -> None:
    outer = product(100, 400, operator="aten::_scaled_dot_product_flash_attention")
    inner = product(150, 300, operator="aten::_flash_attention_forward")
    found = matmuls(measured([outer, inner], Kernel("fmha", 0, 10, launch=200)))
    assert found.column("operator") == ["aten::_flash_attention_forward", "total"]
    assert found.note == ""


def test_rows_of_one_shape_sum_their_calls_whatever_numbers_they_have() -> None:
    dims = "[[1,64,2,16],[1,64,2,16],[1,64,2,16]]"
    calls = [
        product(at, at + 50, dims, operator="flash_attn::_flash_attn_forward", values=values)
        for at, values in (
            (100, '["","","","0.","1.","True"]'),
            (200, '["","","","0.","1.","False"]'),
        )
    ]
    found = matmuls(measured(calls, *(Kernel("k", 0, 1_000, launch=at) for at in (110, 210))))
    row, _ = rows_of(found)
    pairs = 64 * 65 // 2 + 64 * 64
    assert (row["calls"], row["time"]) == (2, 2_000)
    assert row["TFLOP/s"] == pytest.approx(4 * 2 * 16 * pairs / 2_000 / 1_000)


def test_what_is_above_the_peak_is_refused() -> None:
    found = matmuls(measured([product(0, 9)], Kernel("gemm", 0, 1, launch=5)))
    assert rows_of(found)[0]["TFLOP/s"] is None
    assert rows_of(found)[0]["% of peak"] is None
    assert "Rates above the peak of the device are omitted." in found.note


def test_what_came_out_of_the_cache_has_no_share_of_the_memory() -> None:
    row = product(0, 9, dims="[[64,64],[64,64]]")  # 24,576 bytes, at 3,350 a nanosecond 7.3 ns
    for took, part in ((8, 24_576 / 8 / 3_350), (7, None)):
        found = matmuls(measured([row], Kernel("gemm", 0, took, launch=5)))
        assert rows_of(found)[0]["% of bandwidth"] == pytest.approx(part)
        assert rows_of(found)[0]["GB/s"] == pytest.approx(24_576 / took)
        assert ("hit the cache" in found.note) is (part is None)


def test_devices_of_one_peak_and_two_memories_share_no_bandwidth() -> None:
    spans = measured([product(0, 9)], Kernel("gemm", 0, 9_000, launch=5))
    heads = {rank: header(rank, 2, device=name) for rank, name in ((0, H100), (1, "NVIDIA H200"))}
    row = rows_of(matmuls(replace(spans, headers=heads)))[0]
    assert row["% of peak"] is not None
    assert row["% of bandwidth"] is None


@pytest.mark.parametrize("device", ["Ascend910B", "unknown", ""])
def test_an_unknown_device_has_no_peak(device: str) -> None:
    found = matmuls(measured([product(0, 9)], Kernel("gemm", 0, 9_000, launch=5), device=device))
    assert rows_of(found)[0]["% of peak"] is None
    assert rows_of(found)[0]["TFLOP/s"] is not None
    named = device if device.startswith("Ascend") else "the device"
    assert found.note == f"The peak of {named} is unknown."


def test_an_unconfirmed_peak_is_noted() -> None:
    one = Kernel("gemm", 0, 9_000, launch=5)
    found = matmuls(measured([product(0, 9)], one, device="Ascend910B3"))
    assert rows_of(found)[0]["% of peak"] is not None
    assert found.note == "Unconfirmed: Ascend910B3 ~294.9 TFLOP/s, Ascend910B3 ~1600 GB/s."


@pytest.mark.parametrize(
    ("kind", "peak"), [("c10::Float8_e4m3fn", 1979), ("signed char", 1979), ("c10::Half", 989.4)]
)
def test_a_peak_is_that_of_the_type(kind: str, peak: float) -> None:
    row = product(0, 9, types=f'["{kind}","{kind}"]')
    (own, _) = rows_of(matmuls(measured([row], Kernel("gemm", 0, 9_000, launch=5))))
    assert own["% of peak"] == pytest.approx(float(own["TFLOP/s"] or 0) / peak)


def test_fp32_has_no_peak_as_it_may_run_as_tf32() -> None:
    row = product(0, 9, types='["float","float"]')
    found = matmuls(measured([row], Kernel("gemm", 0, 9_000, launch=5)))
    assert (rows_of(found)[0]["type"], rows_of(found)[0]["% of peak"]) == ("float", None)


def test_a_call_whose_work_is_not_known_keeps_its_time() -> None:
    shapes = [product(0, 9, dims="[[1]]"), product(10, 19, dims=MM)]
    own = Kernel("a", 0, 90, launch=5), Kernel("b", 0, 50_000, launch=15)
    rows = rows_of(matmuls(measured(shapes, *own)))
    assert [row["shapes"] for row in rows] == ["1000x500 @ 500x2000", "[[1]]", None]
    assert (rows[1]["time"], rows[1]["TFLOP/s"], rows[1]["type"]) == (90, None, None)
    assert rows[2]["TFLOP/s"] == pytest.approx(rows[0]["TFLOP/s"])


def test_a_call_without_kernels_of_its_own_counts_in_no_rate() -> None:
    shapes = [product(0, 9), product(10, 19), product(20, 29, rank=1)]
    own = Kernel("gemm", 0, 8_000, launch=5)
    alone, both = (matmuls(measured(each, own)) for each in (shapes[:1], shapes))
    first, row = rows_of(alone)[0], rows_of(both)[0]
    assert (first["calls"], row["calls"], row["time"]) == (1, 3, first["time"])
    for rate in ("TFLOP/s", "% of peak", "GB/s", "% of bandwidth"):
        assert row[rate] == pytest.approx(first[rate])
    assert alone.note == ""
    assert both.note == "2 calls have no known kernel and count in no rate."
    other = matmuls(measured(shapes, own), ranks=[1])
    assert (rows_of(other)[0]["time"], rows_of(other)[0]["calls"]) == (9, 1)
    assert other.note == "No kernels were recorded: times are host times."


@pytest.mark.parametrize("copies", [None, [Copy("HtoD", 0, 1_000, launch=5)]])
def test_without_kernels_times_are_the_hosts(copies: list[Copy] | None) -> None:
    found = matmuls(measured([product(0, 4_000)], copies=copies))
    assert (rows_of(found)[0]["time"], rows_of(found)[0]["share"]) == (4_000, None)
    assert found.note == "No kernels were recorded: times are host times."


def test_copies_count_in_the_whole() -> None:
    spans = measured([product(0, 9)], Kernel("a", 0, 30, launch=5), copies=[Copy("HtoD", 0, 70)])
    assert rows_of(matmuls(spans))[0]["share"] == 0.3


def test_a_kernel_has_the_rate_of_the_calls_that_it_did_most_of() -> None:
    flops = 2 * 1000 * 500 * 2000
    own = [
        *(
            Kernel("ampere_sgemm_128x64_nn", 0, 5_000, launch=150),
            Kernel("x", 0, 1_000, launch=160),
        ),
        *(Kernel("ampere_sgemm_64x64_nn", 0, 9_000, launch=350), Kernel("x", 0, 8_000)),
    ]
    found = kernel_peaks(measured([product(100, 200), product(300, 400)], *own))
    assert found == {
        "gemm f32 128x64 nn (cublas ampere)": pytest.approx(flops / 6e-6 / 989.4e12),
        "gemm f32 64x64 nn (cublas ampere)": pytest.approx(flops / 9e-6 / 989.4e12),
    }


def test_a_kernel_of_several_types_is_beside_the_peak_of_each() -> None:
    flops, fp8 = 2 * 1000 * 500 * 2000, '["c10::Float8_e4m3fn","c10::Float8_e4m3fn"]'
    own = [Kernel("gemm", 0, 5_000, launch=150), Kernel("gemm", 0, 3_000, launch=350)]
    found = kernel_peaks(measured([product(100, 200), product(300, 400, types=fp8)], *own))
    at_peak = flops / 989.4e12 + flops / 1978.9e12
    assert found == {"gemm (triton)": pytest.approx(at_peak / 8e-6, rel=1e-3)}


@pytest.mark.parametrize("changes", [{"dims": "[[],[]]"}, {"types": '["float","float"]'}])
def test_a_kernel_of_calls_without_flops_or_peak_has_no_rate(changes: dict[str, str]) -> None:
    shapes = [product(100, 200, **changes)]
    assert kernel_peaks(measured(shapes, Kernel("gemm", 0, 5_000, launch=150))) == {}


def test_a_kernel_above_the_peak_or_on_an_unknown_device_has_no_rate() -> None:
    shapes = [product(100, 200)]
    assert kernel_peaks(measured(shapes, Kernel("gemm", 0, 2, launch=150))) == {}
    slow = Kernel("gemm", 0, 5_000, launch=150)
    assert kernel_peaks(measured(shapes, slow, device="NVIDIA H9")) == {}
    assert kernel_peaks(measured(shapes, copies=[Copy("HtoD", 0, 9)])) == {}


def test_shapes_of_kernels_are_theirs_by_rank_and_start() -> None:
    shapes = [product(1_000, 6_000, thread=None), product(9_000, 9_500, thread=None)]
    own = [Kernel("gemm", 1_000, 6_000), Kernel("other", 9_000, 9_500, rank=1)]
    assert [*kernel_peaks(measured(shapes, *own))] == ["gemm (triton)"]


def test_it_abstains_without_shapes() -> None:
    for spans, ranks, of in (
        (run(None, []), None, "This run has"),
        (measured([]), [3], "Ranks [3] have"),
    ):
        found = matmuls(spans, ranks=ranks)
        assert found.abstained is not None
        assert found.abstained.startswith(f"{of} no shapes of matmuls. Capture a step")


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_products_of_a_real_h100_run_below_its_peak() -> None:
    spans = load(KINETO / "h100_qwen1.5-0.5b.json.gz")
    rows = rows_of(matmuls(spans))
    for row in rows[:5]:
        assert 0.05 < float(row["% of peak"]) < 0.75  # type: ignore[arg-type]
    wide = rows[0]
    assert (wide["shapes"], wide["calls"]) == ("8944x1024 @ 1024x2816", 48)
    # 48 products of 2 * 8944 * 1024 * 2816 FLOPs in 4,015,501 ns
    assert wide["TFLOP/s"] == pytest.approx(48 * 2 * 8944 * 1024 * 2816 / 4_015_501 / 1_000)
    whole = sum(map(int, kernels(spans).column("total")))  # type: ignore[arg-type]
    assert rows[-1]["share"] == pytest.approx(int(rows[-1]["time"]) / whole)  # type: ignore[call-overload]
    # TraceLens reports 6,668.682 and 2,329.076 us for mm and addmm, copies and memsets included.
    for name, theirs in (("aten::mm", 6_668.682), ("aten::addmm", 2_329.076)):
        time = sum(int(row["time"]) for row in rows if row["operator"] == name)  # type: ignore[call-overload]
        assert 0.97 < time / 1_000 / theirs <= 1


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_kernels_of_a_real_h100_have_rates_that_its_products_have() -> None:
    spans = load(KINETO / "h100_qwen1.5-0.5b.json.gz")
    found = kernel_peaks(spans)
    assert {name.partition(" ")[0] for name in found} == {"gemm", "flash_fwd"}
    rates = {row["operator"]: row["% of peak"] for row in rows_of(matmuls(spans))[::-1]}
    assert found["flash_fwd bf16 d64 128x128 causal (flash 2)"] == pytest.approx(
        rates["aten::_flash_attention_forward"], rel=0.01
    )


def test_a_real_trace_of_torch_has_the_shapes_that_were_multiplied(tmp_path: Path) -> None:
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
