"""Operators: sums that are exact, kernels that belong to the innermost, backward to its forward."""

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.call_tree import UNATTRIBUTED
from lightning_rlprof.analysis.operators import operators
from lightning_rlprof.loaders.load import load
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Table
from tests.analysis.calls import Call, Copy, Kernel, recorded, run, traces

DATA = Path(__file__).parents[3] / "shared" / "data"
ASCEND, KINETO = DATA / "ascend" / "text_level1_rank0", DATA / "kineto"
TRACES = sorted(path.relative_to(KINETO).as_posix() for path in KINETO.rglob("*.json.gz"))
# Microseconds of the H100 trace in TraceLens' own reference report, with copies and memsets.
TRACELENS = {
    "aten::mul": 6752.900,
    "aten::mm": 6668.682,
    "aten::copy_": 5101.935,
    "aten::_flash_attention_forward": 2722.704,
    "aten::add": 2607.515,
    "aten::addmm": 2329.076,
    "aten::cat": 2017.783,
    "aten::pow": 1300.795,
    "aten::silu": 925.115,
    "aten::mean": 743.327,
    "aten::neg": 587.327,
    "aten::rsqrt": 79.076,
    "aten::index_select": 51.776,
    "aten::all": 4.128,
    "aten::bmm": 3.520,
    "aten::_local_scalar_dense": 2.368,
    "aten::cos": 2.080,
    "aten::sin": 2.016,
    "aten::eq": 1.856,
    "aten::arange": 1.504,
}
US = 1_000


def told(table: Table) -> dict[object, tuple[object, ...]]:
    return {row[0]: row[1:] for row in table.rows}


def linear() -> Spans:
    """A linear layer of 10 µs forward on one thread, and its backward on another."""
    return run(
        [
            Call("aten::linear", 0, 50 * US),
            Call("aten::t", 1 * US, 5 * US),
            Call("aten::addmm", 10 * US, 40 * US, id=2),
            Call("evaluate_function: AddmmBackward0", 60 * US, 90 * US, thread=9),
            Call("AddmmBackward0", 61 * US, 88 * US, thread=9, forward=2),
            Call("aten::mm", 65 * US, 80 * US, thread=9),
        ],
        [
            Kernel("gemm", 100, 107, launch=20 * US),
            Kernel("gemm", 110, 130, launch=70 * US, thread=9),
            Kernel("elementwise", 130, 131, launch=84 * US, thread=9),
            Kernel("optimizer", 140, 145, launch=95 * US),
            Kernel("unknown", 150, 151),
        ],
    )


def test_each_kernel_counts_to_the_innermost_operator_and_to_those_around_it() -> None:
    table = operators(linear())
    assert [column.name for column in table.columns] == [
        "operator",
        "calls",
        "device total",
        "device self",
        "host total",
        "host self",
        "kernels",
        "backward of",
    ]
    assert list(table.rows) == [
        ("evaluate_function: AddmmBackward0", 1, 21, 0, 30_000, 3_000, 0, None),
        ("AddmmBackward0", 1, 21, 1, 27_000, 12_000, 1, "aten::addmm"),
        ("aten::mm", 1, 20, 20, 15_000, 15_000, 1, None),
        ("aten::linear", 1, 7, 0, 50_000, 16_000, 0, None),
        ("aten::addmm", 1, 7, 7, 30_000, 30_000, 1, None),
        ("aten::t", 1, 0, 0, 4_000, 4_000, 0, None),
        (UNATTRIBUTED, None, 6, 6, None, None, 2, None),
    ]


def test_a_copy_counts_to_the_operator_that_launched_it() -> None:
    calls = [Call("aten::copy_", 0, 90 * US, thread=3)]
    calls.append(Call("cudaMemcpyAsync", 10 * US, 50 * US, kind="runtime", thread=3))
    copies = [Copy("HtoD", 60, 80, launch=10 * US, call=40 * US)]
    for kernels in (None, [Kernel("k", 0, 5)]):
        found = told(operators(run(calls, kernels, copies)))
        assert found["aten::copy_"][1:3] == (20, 20)


def test_an_operator_in_itself_counts_once_in_totals_and_twice_in_calls() -> None:
    calls = [Call("aten::to", 0, 90 * US), Call("aten::to", 10 * US, 50 * US)]
    found = told(operators(run(calls, [Kernel("copy", 0, 8, launch=20 * US)])))
    assert found["aten::to"] == (2, 8, 8, 90_000, 90_000, 1, None)


def test_the_forward_operator_is_that_of_most_calls() -> None:
    calls = [Call("aten::mul", 0, 1), Call("aten::add", 2, 3)]
    calls += [Call("Backward", 10 + i, 11 + i, forward=f) for i, f in enumerate((0, 1, 0))]
    assert told(operators(run(calls)))["Backward"][-1] == "aten::mul"


def test_without_kernels_the_device_is_not_told_and_the_host_sorts() -> None:
    calls = [Call("short", 0, 10), Call("long", 10, 40)]
    for spans in (run(calls), run(calls, [])):
        table = operators(spans)
        assert list(table.rows) == [
            ("long", 1, None, None, 30, 30, None, None),
            ("short", 1, None, None, 10, 10, None, None),
        ]
        assert "No kernels were recorded" in table.note


def test_one_rank_alone() -> None:
    calls = [Call("a", 0, 10), Call("b", 0, 10, rank=1)]
    kernels = [Kernel("k", 0, 3, launch=5, rank=rank) for rank in (0, 1)]
    assert [row[:4] for row in operators(run(calls, kernels), ranks=[1]).rows] == [
        ("b", 1, 3, 3),
        (UNATTRIBUTED, None, 0, 0),
    ]


@pytest.mark.parametrize("calls", [None, [], [Call("python", 0, 1, kind="python")]])
def test_it_abstains_without_operators_and_says_what_records_them(calls) -> None:
    table = operators(run(calls, [Kernel("k", 0, 1)]))
    assert table.abstained is not None
    assert "of ranks [9]" in str(operators(run(calls), ranks=[9]).abstained)
    assert "profile_with_cpu: true" in table.abstained


@given(traces())
@settings(max_examples=150, deadline=None)
def test_rows_are_those_of_brute_force_and_add_up(trace) -> None:
    calls, kernels = trace
    if not calls:
        return
    table = operators(run(calls, kernels or [Kernel("k", 0, 0)]))
    host_self: Counter[str] = Counter()
    host, device, alone = Counter[str](), Counter[str](), Counter[str]()
    for name, ns in moments(calls).items():
        host_self[name] += ns
    for call in calls:
        stack = around(calls, call)
        if call.name not in [each.name for each in stack]:
            host[call.name] += call.end - call.start
    lost = 0
    for kernel in kernels:
        stack = [each for each in calls if holds(each, kernel)]
        innermost = max(
            stack, key=lambda each: (each.start, -each.end, calls.index(each)), default=None
        )
        lost += 0 if innermost else kernel.end - kernel.start
        for name in {each.name for each in stack}:
            device[name] += kernel.end - kernel.start
        if innermost:
            alone[innermost.name] += kernel.end - kernel.start
    found = told(table)
    assert found.pop(UNATTRIBUTED)[2] == lost
    for name, (_, total, own, host_total, own_host, _, _) in found.items():
        assert (total, own) == (device[name], alone[name])
        assert (host_total, own_host) == (host[name], host_self[name])
    assert sum(table.column("device self")) == sum(each.end - each.start for each in kernels)


def holds(call: Call, kernel: Kernel) -> bool:
    if kernel.launch is None or (call.rank, call.thread) != (kernel.rank, kernel.thread):
        return False
    return call.start <= kernel.launch < call.end


def around(calls: list[Call], own: Call) -> list[Call]:
    """Return the calls that hold one; of equal ones the earlier in the table holds the later."""
    at = next(place for place, each in enumerate(calls) if each is own)
    return [
        each
        for place, each in enumerate(calls)
        if (each.rank, each.thread) == (own.rank, own.thread)
        and each.start <= own.start < each.end
        and own.end <= each.end
        and ((each.start, -each.end, place) < (own.start, -own.end, at))
    ]


def moments(calls: list[Call]) -> Counter[str]:
    """Return how long each name was innermost, looking at every 10 µs of every thread."""
    lanes = defaultdict(list)
    for place, call in enumerate(calls):
        lanes[call.rank, call.thread].append((call.start, -call.end, place, call))
    own: Counter[str] = Counter()
    for lane in lanes.values():
        for at in range(0, 400_000, 10_000):
            over = [each for each in sorted(lane) if each[0] <= at < -each[1]]
            if over:
                own[over[-1][3].name] += 10_000
    return own


def test_a_real_training_on_cpu_has_the_times_of_torchs_own_averages(tmp_path: Path) -> None:
    """To the nanosecond; torch leaves out calls that are alone in one of the same name."""
    profiler = recorded(tmp_path / "trace.json")
    found = told(operators(load(tmp_path / "trace.json")))
    averages = {each.key: each for each in profiler.key_averages()}
    assert set(found) == set(averages)
    for name, (calls, _, _, total, own, _, _) in found.items():
        assert calls >= averages[name].count
        assert round(1_000 * averages[name].cpu_time_total) == total
        assert round(1_000 * averages[name].self_cpu_time_total) == own
    assert found["AddmmBackward0"][0] == 6
    assert found["AddmmBackward0"][-1] == "aten::addmm"


@pytest.mark.parametrize("name", TRACES)
def test_all_device_time_of_a_real_trace_is_somewhere(name: str) -> None:
    spans = load(KINETO / name)
    found = operators(spans)
    there = [spans.table(each) for each in ("kernels", "memcpy") if each in spans.tables]
    whole = sum(sum(table.column("duration")) for table in there)
    assert sum(ns or 0 for ns in found.column("device self")) == whole


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_the_h100_trace_has_the_times_that_tracelens_publishes() -> None:
    found = told(operators(load(KINETO / "h100_qwen1.5-0.5b.json.gz")))
    launching = {name: row[2] for name, row in found.items() if row[2]}
    del launching[UNATTRIBUTED]
    assert set(launching) == set(TRACELENS)
    for name, us in TRACELENS.items():
        assert launching[name] == pytest.approx(1_000 * us, abs=5)


@pytest.mark.skipif(not ASCEND.is_dir(), reason="no real captures in ../shared/data/ascend")
def test_without_calls_a_capture_of_ascend_shows_the_sums_of_its_own_tools() -> None:
    run = load(ASCEND)
    assert told(operators(run))["aten::copy_"] == (32, 1_422_967, 0, 7_598_890, 7_153_380, 0, None)
    run = replace(run, tables={k: v for k, v in run.tables.items() if k != "calls"})
    table = operators(run)
    assert told(table)["aten::copy_"] == (32, None, None, 7_598_890, 7_153_380, None, None)
    assert "Ascend" in table.note
    assert list(operators(run, ranks=[]).rows) == []


def test_calls_that_lie_deeper_in_one_another_than_any_program_are_not_told() -> None:
    calls = [Call("aten::mm", at, 9_000 - at) for at in range(1_001)]
    assert operators(run(calls[:-1])).column("calls") == [1_000]
    assert operators(run(calls)).abstained == ("calls lie in one another 1,001 deep, beyond 1,000")
