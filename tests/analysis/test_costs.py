"""Operators: sums that are exact, kernels that belong to the innermost, backward to its forward.

Modules: a tree by place, forward by what was open at the launch, backward by its link.
"""

from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from lightning_rlprof.analysis.operators import UNATTRIBUTED, modules, operators
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.calls import Call, Copy, Kernel, recorded, run, traces
from tests.effort import examples
from tests.places import SHARED_DATA

ASCEND = SHARED_DATA / "ascend" / "text_level1_rank0"
US = 1_000


def module(name: str, start: int, end: int, **changes: int) -> Call:
    return Call(f"nn.Module: {name}", start * US, end * US, kind="module", **changes)


def operator(name: str, start: int, end: int, **changes: int | None) -> Call:
    return Call(name, start * US, end * US, **changes)  # type: ignore[arg-type]


def by_path(table: Table) -> dict[object, tuple[object, ...]]:
    return {row[-1] or row[0]: row[1:-1] for row in table.rows}


def model() -> Spans:
    """Two blocks with a linear layer each, their backward on autograd's thread."""
    calls = [
        module("Model_0", 0, 100),
        module("Block_0", 5, 40),
        module("Linear_0", 10, 30),
        operator("aten::addmm", 15, 25, id=100),
        module("Block_1", 40, 90),
        module("Linear_0", 50, 80),
        operator("aten::addmm", 55, 75, id=101),
        operator("evaluate", 200, 230, thread=9, forward=101),
        operator("aten::mm", 205, 220, thread=9),
        operator("aten::add_", 240, 250, thread=9),
    ]
    kernels = [
        Kernel("gemm", 0, 7, launch=20 * US),
        Kernel("gemm", 10, 15, launch=60 * US),
        Kernel("norm", 15, 16, launch=85 * US),
        Kernel("gemm", 20, 31, launch=210 * US, thread=9),
        Kernel("accumulate", 31, 33, launch=245 * US, thread=9),
    ]
    return run(calls, kernels)


def test_forward_and_backward_of_each_place_in_the_model() -> None:
    table = modules(model())
    assert [column.name for column in table.columns] == [
        "module",
        "calls",
        "device total",
        "device self",
        "backward total",
        "backward self",
        "host total",
        "host self",
        "path",
    ]
    assert list(table.rows) == [
        ("Model_0", 1, 24, 0, 11, 0, 100_000, 15_000, "Model_0"),
        (" Block_1", 1, 17, 1, 11, 0, 50_000, 20_000, "Model_0.Block_1"),
        ("  Linear_0", 1, 16, 16, 11, 11, 30_000, 30_000, "Model_0.Block_1.Linear_0"),
        (" Block_0", 1, 7, 0, 0, 0, 35_000, 15_000, "Model_0.Block_0"),
        ("  Linear_0", 1, 7, 7, 0, 0, 20_000, 20_000, "Model_0.Block_0.Linear_0"),
        (UNATTRIBUTED, None, 2, 2, None, None, None, None, None),
    ]


def test_calls_of_one_place_are_one_row_over_steps_and_ranks() -> None:
    calls = [
        module(name, 100 * turn + start, 100 * turn + end, rank=rank)
        for rank in (0, 1)
        for turn in (0, 1)
        for name, start, end in (("Model_0", 0, 50), ("Linear_0", 10, 20))
    ]
    kernels = [Kernel("k", 0, 3, launch=15 * US, rank=rank) for rank in (0, 1)]
    found = by_path(modules(run(calls, kernels)))
    assert found["Model_0.Linear_0"] == (4, 6, 6, 0, 0, 40_000, 40_000)
    one = by_path(modules(run(calls, kernels), ranks=[1]))
    assert one["Model_0.Linear_0"] == (2, 3, 3, 0, 0, 20_000, 20_000)


def test_what_a_checkpointed_module_runs_again_is_its_own_not_its_backward() -> None:
    calls = [
        module("Linear_0", 0, 10),
        operator("aten::addmm", 2, 8, id=50),
        operator("CheckpointBackward", 100, 190, thread=9, forward=50),
        module("Linear_0", 110, 130, thread=9),
    ]
    kernels = [
        Kernel("again", 0, 5, launch=120 * US, thread=9),
        Kernel("gradient", 5, 12, launch=150 * US, thread=9),
    ]
    assert by_path(modules(run(calls, kernels)))["Linear_0"] == (
        2,
        12,
        12,
        7,
        7,
        30_000,
        30_000,
    )


def test_a_backward_operator_whose_forward_lay_in_no_module_counts_to_none() -> None:
    calls = [
        operator("aten::mean", 0, 5, id=1),
        module("Linear_0", 10, 20),
        operator("MeanBackward", 30, 40, thread=9, forward=1),
    ]
    found = by_path(modules(run(calls, [Kernel("k", 0, 9, launch=35 * US, thread=9)])))
    assert (found["Linear_0"][1], found[UNATTRIBUTED][2]) == (0, 9)


def test_modules_without_kernels_have_host_times_only() -> None:
    for kernels in (None, []):
        table = modules(run([module("Linear_0", 0, 1)], kernels))
        assert list(table.rows) == [
            ("Linear_0", 1, None, None, None, None, 1_000, 1_000, "Linear_0")
        ]
        assert "No kernels were recorded" in table.note


@pytest.mark.parametrize("calls", [None, [], [operator("aten::mm", 0, 1)]])
def test_it_abstains_without_modules_and_names_the_switch(calls) -> None:
    table = modules(run(calls, [Kernel("k", 0, 1)]))
    assert table.abstained is not None
    assert "Ranks [9] have" in str(modules(run(calls), ranks=[9]).abstained)
    assert "profile_with_module: true" in table.abstained
    assert "with_stack: true" in table.abstained


@st.composite
def trainings(draw: st.DrawFn):
    """Draw modules and operators on the same threads, some operators with a forward link."""
    calls, kernels = draw(traces("module"))
    more, _ = draw(traces())
    for at, call in enumerate(more):
        forward = draw(st.none() | st.integers(0, at - 1)) if at else None
        start, end = call.start + 2_000, max(call.end - 2_000, call.start + 2_000)
        calls.append(call._replace(start=start, end=end, id=at, forward=forward))
    return calls, kernels


@given(trainings())
@settings(max_examples=examples(150), deadline=None)
def test_every_kernel_is_where_brute_force_puts_it_and_all_add_up(trace) -> None:
    calls, kernels = trace
    if not any(call.kind == "module" for call in calls):
        return
    expected = {}
    for kernel in kernels:
        key = place_of(calls, kernel)
        expected[key] = expected.get(key, 0) + kernel.end - kernel.start
    table = modules(run(calls, kernels or [Kernel("k", 0, 0)]))
    found = by_path(table)
    lost = found.pop(UNATTRIBUTED)[2]
    assert lost == expected.get(None, 0)
    for path, (_, total, alone, back_total, back, _, _) in found.items():
        sums = [0, 0, 0, 0]
        for key, ns in expected.items():
            if key is not None and f"{key[0]}.".startswith(f"{path}."):
                here = key[0] == path
                for at, counts in enumerate((True, here, key[1], key[1] and here)):
                    sums[at] += ns if counts else 0
        assert [total, alone, back_total, back] == sums
    assert sum(table.column("device self")) == sum(each.end - each.start for each in kernels)


def place_of(calls: list[Call], kernel: Kernel) -> tuple[str, bool] | None:
    """Return the path of a kernel's module and whether it is its backward, None without."""
    if kernel.launch is None:
        return None
    stack = open_at(calls, kernel.rank, kernel.thread, kernel.launch)
    if path := path_of(stack):
        return path, False
    for each in reversed(stack):
        if each.forward is not None:
            forward = next(
                (
                    o
                    for o in calls
                    if (o.rank, o.kind, o.id) == (each.rank, "operator", each.forward)
                ),
                None,
            )
            if forward is not None:
                path = path_of(open_at(calls, forward.rank, forward.thread, forward.start))
                return (path, True) if path else None
    return None


def open_at(calls: list[Call], rank: int, thread: int | None, when: int) -> list[Call]:
    found = [
        (each.start, -each.end, at, each)
        for at, each in enumerate(calls)
        if (each.rank, each.thread) == (rank, thread) and each.start <= when < each.end
    ]
    return [each[-1] for each in sorted(found)]


def path_of(stack: list[Call]) -> str:
    return ".".join(each.name for each in stack if each.kind == "module")


def test_a_real_training_on_cpu_shows_its_modules_as_a_tree(tmp_path: Path) -> None:
    profiler = recorded(tmp_path / "trace.json", with_stack=True)
    table = modules(load(tmp_path / "trace.json"))
    places = ("", ".Linear_0", ".ReLU_0", ".Sequential_1", ".Sequential_1.Linear_1")
    assert sorted(table.column("path")) == [f"Sequential_0{place}" for place in places]
    assert table.column("calls") == [3] * 5
    averages = {each.key: each.cpu_time_total for each in profiler.key_averages()}
    if not Version("2.7") <= Version(version("torch")) < Version("2.15"):
        return  # its averages have no modules
    for row in table.rows:
        assert row[6] == round(1_000 * averages[f"nn.Module: {row[0].strip()}"])


@pytest.mark.skipif(not ASCEND.is_dir(), reason="no real captures in ../shared/data/ascend")
def test_modules_of_ascend_have_device_time() -> None:
    run = load(ASCEND)
    device = (33_380, 33_380, 12_800, 12_800)
    path = "DistributedDataParallel_0.AlexNet_0.Sequential_1.Dropout_0"
    assert by_path(modules(run))[path] == (1, *device, 1_683_630, 1_683_630)


def test_modules_nested_deeper_than_any_program_have_no_table() -> None:
    calls = [module(f"Block_{at}", at, 9_000 - at) for at in range(1_001)]
    assert len(modules(run(calls[:-1])).rows) == 1_000
    assert modules(run(calls)).abstained == "Calls are nested 1,001 deep, more than 1,000."


KINETO = SHARED_DATA / "kineto"
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


def by_name(table: Table) -> dict[object, tuple[object, ...]]:
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
    ]
    assert list(table.rows) == [
        ("evaluate_function: AddmmBackward0", 1, 21, 0, 30_000, 3_000, 0),
        ("AddmmBackward0", 1, 21, 1, 27_000, 12_000, 1),
        ("aten::mm", 1, 20, 20, 15_000, 15_000, 1),
        ("aten::linear", 1, 7, 0, 50_000, 16_000, 0),
        ("aten::addmm", 1, 7, 7, 30_000, 30_000, 1),
        ("aten::t", 1, 0, 0, 4_000, 4_000, 0),
        (UNATTRIBUTED, None, 6, 6, None, None, 2),
    ]


def test_a_copy_counts_to_the_operator_that_launched_it() -> None:
    calls = [Call("aten::copy_", 0, 90 * US, thread=3)]
    calls.append(Call("cudaMemcpyAsync", 10 * US, 50 * US, kind="runtime", thread=3))
    copies = [Copy("HtoD", 60, 80, launch=10 * US, call=40 * US)]
    for kernels in (None, [Kernel("k", 0, 5)]):
        found = by_name(operators(run(calls, kernels, copies)))
        assert found["aten::copy_"][1:3] == (20, 20)


def test_an_operator_in_itself_counts_once_in_totals_and_twice_in_calls() -> None:
    calls = [Call("aten::to", 0, 90 * US), Call("aten::to", 10 * US, 50 * US)]
    found = by_name(operators(run(calls, [Kernel("copy", 0, 8, launch=20 * US)])))
    assert found["aten::to"] == (2, 8, 8, 90_000, 90_000, 1)


def test_operators_without_kernels_are_sorted_by_host_time() -> None:
    calls = [Call("short", 0, 10), Call("long", 10, 40)]
    for spans in (run(calls), run(calls, [])):
        table = operators(spans)
        assert list(table.rows) == [
            ("long", 1, None, None, 30, 30, None),
            ("short", 1, None, None, 10, 10, None),
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
def test_it_abstains_without_operators_and_names_the_switch(calls) -> None:
    table = operators(run(calls, [Kernel("k", 0, 1)]))
    assert table.abstained is not None
    assert "Ranks [9] have" in str(operators(run(calls), ranks=[9]).abstained)
    assert "profile_with_cpu: true" in table.abstained


@given(traces())
@settings(max_examples=examples(150), deadline=None)
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
    found = by_name(table)
    assert found.pop(UNATTRIBUTED)[2] == lost
    for name, (_, total, own, host_total, own_host, _) in found.items():
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
    found = by_name(operators(load(tmp_path / "trace.json")))
    averages = {each.key: each for each in profiler.key_averages()}
    assert set(found) == set(averages)
    for name, (calls, _, _, total, own, _) in found.items():
        assert calls >= averages[name].count
        assert round(1_000 * averages[name].cpu_time_total) == total
        assert round(1_000 * averages[name].self_cpu_time_total) == own
    assert found["AddmmBackward0"][0] == 6


@pytest.mark.parametrize("name", TRACES)
def test_all_device_time_of_a_real_trace_is_somewhere(name: str) -> None:
    spans = load(KINETO / name)
    found = operators(spans)
    there = [spans.table(each) for each in ("kernels", "memcpy") if each in spans.tables]
    whole = sum(sum(table.column("duration")) for table in there)
    assert sum(ns or 0 for ns in found.column("device self")) == whole


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_the_h100_trace_has_the_times_that_tracelens_publishes() -> None:
    found = by_name(operators(load(KINETO / "h100_qwen1.5-0.5b.json.gz")))
    launching = {name: row[2] for name, row in found.items() if row[2]}
    del launching[UNATTRIBUTED]
    assert set(launching) == set(TRACELENS)
    for name, us in TRACELENS.items():
        assert launching[name] == pytest.approx(1_000 * us, abs=5)


@pytest.mark.skipif(not ASCEND.is_dir(), reason="no real captures in ../shared/data/ascend")
def test_operators_of_ascend_have_device_time() -> None:
    run = load(ASCEND)
    assert by_name(operators(run))["aten::copy_"] == (
        32,
        1_422_967,
        0,
        7_598_890,
        7_153_380,
        0,
    )


def test_operators_nested_deeper_than_any_program_have_no_table() -> None:
    calls = [Call("aten::mm", at, 9_000 - at) for at in range(1_001)]
    assert operators(run(calls[:-1])).column("calls") == [1_000]
    assert operators(run(calls)).abstained == ("Calls are nested 1,001 deep, more than 1,000.")
