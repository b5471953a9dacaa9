"""What the page draws of devices: complete if it is small, bounded and exact in sum if not."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.catalog import ANALYSES
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html import device_timeline as page_lanes
from lightning_rlprof.report.html.device_timeline import WORK_CLASSES, draw_devices, extremes
from lightning_rlprof.tables.kernels import COLUMNS
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, ColumnRows, Table, rows_of
from tests.builders.calls import CALLS, Call, Copy, Kernel, run
from tests.builders.runs import Row, loaded
from tests.places import SHARED_DATA

KINETO = SHARED_DATA / "kineto"
SHARED = (
    "kineto/two_ranks",
    "kineto/vllm_prefill_decode_graph.json.gz",
    "nsys/h100_2gpu_1s.sqlite",
)


def marks_of(data: dict[str, Any], lane: dict[str, Any]) -> list[tuple[int, int, str]]:
    """Return start, duration and name of each single kernel of a lane."""
    starts, names = np.cumsum(lane["s"]).tolist(), [data["kernels"][at][0] for at in lane["k"]]
    return [*zip(starts, lane["d"], names, strict=True)]


def small() -> Spans:
    calls = [
        Call("nn.Module: Net_0", 0, 100_000, "module"),
        Call("aten::mm", 10, 40_000),
        Call("cudaLaunchKernel", 100, 110, "runtime"),
    ]
    kernels = [
        Kernel("ampere_sgemm_128x64_nn", 1_000, 5_000, 100, 10),
        Kernel("void add_kernel(int)", 5_000, 5_500, None, stream=9),
        Kernel("ampere_sgemm_128x64_nn", 9_000, 9_100, 200, 10),
    ]
    return run(calls, kernels, [Copy("HtoD", 6_000, 6_500, 50, 5)])


def large(kernels: int, ranks: int = 1) -> Spans:
    """Return a trace of kernels that follow one another on two streams per rank."""
    at = np.tile(np.arange(kernels), ranks)
    rank = np.repeat(np.arange(ranks), kernels)
    names = [f"void kernel_{number}_{'x' * 300}(float)" for number in range(400)]
    took = 500 + at * 37 % 900
    start = 1_000 * (at + 1)
    nothing = np.ma.masked_all(len(at), np.int64)
    columns = {
        **{"rank": rank, "device": rank, "stream": at % 2, "kernel": (at % 400, names)},
        **{"start": start, "duration": took, "launch": start - 900 - at % 50},
        **{"launch duration": np.full(len(at), 300), "thread": rank + 7},
        **{name: (np.full(len(at), -1), []) for name in ("stage", "range")},
    }
    table = Table(
        "kernels", COLUMNS, ColumnRows([columns.get(each.name, nothing) for each in COLUMNS])
    )
    calls = {
        **{"rank": rank, "thread": rank + 7, "name": (at % 400, [f"op {n}" for n in range(400)])},
        **{"kind": (np.zeros(len(at), np.int64), ["operator"]), "duration": np.full(len(at), 700)},
        **{"start": start - 950, "stage": (np.full(len(at), -1), [])},
    }
    own = Table("calls", CALLS, ColumnRows([calls.get(each.name, nothing) for each in CALLS]))
    return replace(run(), tables={"kernels": lambda: table, "calls": lambda: own})


def test_a_small_trace_is_there_with_every_kernel_and_what_is_known_of_it() -> None:
    data = draw_devices(small()).data
    assert (data["length"], data["count"], data["windows"]) == (9_050, 4, [])
    zero = 50  # The first launch.
    every = sorted(mark for lane in data["lanes"] for mark in marks_of(data, lane))
    assert [(start + zero, took) for start, took, _ in every] == [
        (1_000, 4_000),
        (5_000, 500),
        (6_000, 500),
        (9_000, 100),
    ]
    first = data["lanes"][0]
    assert [(each["stream"], each["n"]) for each in data["lanes"]] == [(0, 3), (9, 1)]
    assert first["l"] == [900, 5_950, 8_800]
    assert (data["operators"], data["modules"]) == (["aten::mm"], ["Net_0"])
    assert (first["o"], first["m"]) == ([0, -1, 0], [0, -1, 0]), "a copy names no thread"
    classes = [WORK_CLASSES[data["kernels"][at][1]] for at in first["k"]]
    assert classes == ["matmul", "copy", "matmul"]
    assert "x" not in first, "no kernel is in a graph replay"
    assert "l" not in data["lanes"][1]


def test_the_full_name_is_in_the_file_once() -> None:
    data = draw_devices(small()).data
    full = "void add_kernel(int)"
    assert json.dumps(data).count(full) == 1
    assert [full in each for each in data["kernels"]].count(True) == 1


def test_the_host_shows_its_launches_and_how_many_wait() -> None:
    (host,) = draw_devices(small()).data["hosts"]
    assert (host["n"], host["max"], host["d"]) == (3, 3, [5, 10, 10])
    times = np.cumsum(host["qt"])
    assert (np.diff(times).tolist(), host["q"]) == (
        [50, 100, 800, 5_000, 3_000],
        [1, 2, 3, 2, 1, 0],
    )


def test_without_launches_there_is_no_host_lane() -> None:
    data = draw_devices(run(None, [Kernel("k", 0, 10), Kernel("k", 20, 30)])).data
    assert data["hosts"] == []
    assert data["icicle"][0][3] == 20


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data")
@pytest.mark.parametrize("name", SHARED)
def test_the_sums_are_those_of_the_tables(name: str) -> None:
    spans = load(SHARED_DATA / name)
    drawing = draw_devices(spans)
    idle = {row.cause: row.total_ns for row in drawing.idle}
    found = dict.fromkeys(idle, 0)
    for row in rows_of(ANALYSES["idle"].run(spans)):
        found[row["kind"]] += row["total"]
    total = rows_of(ANALYSES["breakdown"].run(spans))[-1]
    assert sum(found.values()) == drawing.idle_ns == total["idle"]
    unknown = {"inside graph replays", "not recorded"}
    assert {k: v for k, v in found.items() if k not in unknown} == {
        k: v for k, v in idle.items() if k not in unknown
    }
    assert sum(idle.get(name, 0) for name in unknown) == total["unknown"]
    assert len(drawing.gaps) == (3 if drawing.devices == 1 else 6)


def test_bins_hold_the_time_of_each_class_to_the_nanosecond() -> None:
    spans = large(30_000)
    data = draw_devices(spans).data
    kernels = spans.table("kernels")
    sums, started = [0] * len(WORK_CLASSES), 0
    for lane in data["lanes"]:
        for _, count, _, _, *parts in lane["bins"]:
            started += count
            for kind, ns in zip(parts[::2], parts[1::2], strict=True):
                sums[kind] += ns
    assert sum(sums) == kernels.numbers("duration").sum()
    assert started == 30_000
    low, high = page_lanes._BINS_OF_STREAM
    assert all(low <= len(lane["bins"]) <= high for lane in data["lanes"])
    single = [mark for lane in data["lanes"] for mark in marks_of(data, lane)]
    assert len(data["windows"]) == 2
    for first, last in data["windows"]:
        inside = [mark for mark in single if first <= mark[0] < last]
        assert 0 < len(inside) <= page_lanes._MAX_WINDOW


def test_the_windows_are_the_median_and_the_slowest_step() -> None:
    edges = [0, 9_000_000, 20_000_000, 33_000_000]
    rows = [Row("step", "step", at + 1, edges[at], edges[at + 1]) for at in range(3)]
    spans = replace(loaded(rows), tables=large(30_000).tables)
    data = draw_devices(spans).data
    zero = 100  # The first launch.
    assert [first + zero for first, _ in data["windows"]] == [9_000_000, 20_000_000]


def test_a_file_that_would_be_too_large_has_fewer_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = large(30_000)
    whole = draw_devices(spans).data
    monkeypatch.setattr(page_lanes, "_MAX_BYTES", len(json.dumps(whole)) - 100_000)
    fewer = draw_devices(spans).data
    assert len(json.dumps(fewer, separators=(",", ":"))) <= page_lanes._MAX_BYTES
    assert 0 < len(fewer["lanes"][0]["bins"]) < len(whole["lanes"][0]["bins"])


def test_of_many_devices_eight_are_drawn_and_all_are_summed() -> None:
    kernels = [
        Kernel("k", 1_000 * at, 1_000 * at + 10 + rank, rank=rank)
        for rank in range(20)
        for at in range(3)
    ]
    drawing = draw_devices(run(None, kernels))
    names = [each["name"] for each in drawing.data["devices"]]
    assert (drawing.devices, len(names)) == (20, 8)
    assert {"rank 0", "rank 19", "rank 10"} <= {*names}, "the least busy, busiest, and median one"
    assert drawing.idle_ns == 20 * 2_000 - 2 * sum(10 + rank for rank in range(20))


def test_more_than_six_streams_are_counted() -> None:
    kernels = [Kernel("k", 100 * at, 100 * at + 10 + at, stream=at) for at in range(9)]
    data = draw_devices(run(None, kernels)).data
    assert [lane["stream"] for lane in data["lanes"]] == [8, 7, 6, 5, 4, 3]
    assert data["devices"][0]["more"] == 3


def test_memory_keeps_the_highest_and_lowest_of_each_bin() -> None:
    count = 50_000
    columns = (
        Column("rank", "count"),
        Column("device", "count"),
        Column("component", "text"),
        Column("time", "time", "ns"),
        Column("allocated", "count", "bytes"),
    )
    sizes = np.arange(count) % 1_000
    sizes[31_234], sizes[7] = 10**9, -5
    zeros = np.zeros(count, np.int64)
    rows = ColumnRows([zeros, zeros, (zeros, ["CUDA"]), np.arange(count), sizes])
    spans = run(None, [Kernel("k", 0, count)])
    table = Table("memory", columns, rows)
    (series,) = draw_devices(replace(spans, tables={**spans.tables, "memory": lambda: table})).data[
        "memory"
    ]
    assert len(series["b"]) <= 2_400
    assert (max(series["b"]), min(series["b"]), series["name"]) == (10**9, -5, "CUDA")
    assert np.cumsum(series["t"])[series["b"].index(10**9)] == 31_234


def test_the_extremes_of_a_short_curve_are_all_of_it() -> None:
    assert extremes(np.arange(3), np.array([5, 5, 5]), 3).tolist() == [0, 1, 2]


def test_without_device_work_only_the_icicle_is_there() -> None:
    drawing = draw_devices(run([Call("aten::mm", 0, 900)]))
    assert (drawing.devices, drawing.data["lanes"], drawing.idle) == (0, [], [])
    assert [row[2] for row in drawing.data["icicle"]] == ["all operators", "aten::mm"]


@pytest.mark.deep
@pytest.mark.parametrize(("kernels", "ranks"), [(500_000, 1), (20_000, 64)])
def test_the_data_of_large_traces_is_bounded(kernels: int, ranks: int) -> None:
    spans = large(kernels, ranks)
    data = draw_devices(spans).data
    assert len(json.dumps(data, separators=(",", ":"))) < page_lanes._MAX_BYTES
    assert len(data["lanes"]) == 2 * min(ranks, 8)
    assert len(data["icicle"]) <= 1_500
