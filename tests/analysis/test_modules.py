"""Modules: a tree by place, forward by what was open at the launch, backward by its link."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from lightning_rlprof.analysis.call_tree import UNATTRIBUTED
from lightning_rlprof.analysis.modules import modules
from lightning_rlprof.loaders.load import load
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Table
from tests.analysis.calls import Call, Kernel, recorded, run, traces

ASCEND = Path(__file__).parents[3] / "shared" / "data" / "ascend" / "text_level1_rank0"
US = 1_000


def module(name: str, start: int, end: int, **changes: int) -> Call:
    return Call(f"nn.Module: {name}", start * US, end * US, kind="module", **changes)


def operator(name: str, start: int, end: int, **changes: int | None) -> Call:
    return Call(name, start * US, end * US, **changes)  # type: ignore[arg-type]


def told(table: Table) -> dict[object, tuple[object, ...]]:
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
    found = told(modules(run(calls, kernels)))
    assert found["Model_0.Linear_0"] == (4, 6, 6, 0, 0, 40_000, 40_000)
    one = told(modules(run(calls, kernels), ranks=[1]))
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
    assert told(modules(run(calls, kernels)))["Linear_0"] == (2, 12, 12, 7, 7, 30_000, 30_000)


def test_a_backward_operator_whose_forward_lay_in_no_module_counts_to_none() -> None:
    calls = [
        operator("aten::mean", 0, 5, id=1),
        module("Linear_0", 10, 20),
        operator("MeanBackward", 30, 40, thread=9, forward=1),
    ]
    found = told(modules(run(calls, [Kernel("k", 0, 9, launch=35 * US, thread=9)])))
    assert (found["Linear_0"][1], found[UNATTRIBUTED][2]) == (0, 9)


def test_without_kernels_the_host_alone_is_told() -> None:
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
    assert "of ranks [9]" in str(modules(run(calls), ranks=[9]).abstained)
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
@settings(max_examples=150, deadline=None)
def test_every_kernel_is_where_brute_force_puts_it_and_all_add_up(trace) -> None:
    calls, kernels = trace
    if not any(call.kind == "module" for call in calls):
        return
    expected = {}
    for kernel in kernels:
        key = place_of(calls, kernel)
        expected[key] = expected.get(key, 0) + kernel.end - kernel.start
    table = modules(run(calls, kernels or [Kernel("k", 0, 0)]))
    found = told(table)
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
def test_without_calls_a_capture_of_ascend_shows_the_sums_of_its_own_tools() -> None:
    run = load(ASCEND)
    device = (33_380, 33_380, 12_800, 12_800)
    path = "DistributedDataParallel_0.AlexNet_0.Sequential_1.Dropout_0"
    assert told(modules(run))[path] == (1, *device, 1_683_630, 1_683_630)
    table = modules(replace(run, tables={k: v for k, v in run.tables.items() if k != "calls"}))
    unknown = (None,) * 4
    assert told(table)["Dropout_0"] == (1, *unknown, 1_683_630, 1_683_630)
    host = np.array(table.column("host total"))
    assert (np.diff(host) <= 0).all()
    assert "Ascend" in table.note


def test_modules_that_lie_deeper_in_one_another_than_any_program_are_not_told() -> None:
    calls = [module(f"Block_{at}", at, 9_000 - at) for at in range(1_001)]
    assert len(modules(run(calls[:-1])).rows) == 1_000
    assert modules(run(calls)).abstained == "calls lie in one another 1,001 deep, beyond 1,000"
