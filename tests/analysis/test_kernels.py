"""Kernels by name: exact sums with any number of names, against statistics one by one."""

import math
import statistics
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof import load
from lightning_rlprof.analysis.device.work import OTHERS, no_work
from lightning_rlprof.analysis.kernels import kernels
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.table import Table
from tests.builders.calls import Call, Copy, Kernel, run
from tests.effort import examples
from tests.places import SHARED_DATA


def named(table: Table, name: str | None) -> dict[str, object]:
    columns = [column.name for column in table.columns]
    rows = (dict(zip(columns, row, strict=True)) for row in table.rows)
    (row,) = (row for row in rows if row["kernel"] == name)
    return row


def lasting(name: str | None, *durations: int, **changes: object) -> list[Kernel]:
    return [Kernel(name, 100, 100 + each, **changes) for each in durations]  # type: ignore[arg-type]


def test_statistics_of_each_name_those_first_that_take_longest() -> None:
    found = kernels(run(None, [*lasting("gemm", 10, 30, 20), *lasting("ncclDevKernel_X", 100)]))
    assert found.column("kernel") == ["ncclDevKernel_X", "gemm"]
    assert found.column("kind") == ["communication", "compute"]
    own = named(found, "gemm")
    assert own == {
        "short name": "gemm (triton)",
        "class": "matmul",
        "share": 60 / 160,
        "total": 60,
        "count": 3,
        "mean": 20,
        "p50": 20,
        "p95": 30,
        "max": 30,
        "std": 8,
        "stage": None,
        "share in stage": None,
        "ranks": 1,
        "operator": None,
        "module": None,
        "kind": "compute",
        "kernel": "gemm",
    }


def test_more_than_ten_names_keep_their_mean_and_the_rest_is_one_exact_row() -> None:
    """HTA sums mean, max and min over the rest and loses the deviation beyond ten names."""
    names = {f"kernel {at:02}": (20 + at, 40 + at) for at in range(15)}
    spans = run(None, [each for name, both in names.items() for each in lasting(name, *both)])
    every, some = kernels(spans), kernels(spans, top=10)
    assert list(some.rows[:10]) == list(every.rows[:10])
    assert len(every.rows) == 15
    for name, both in names.items():
        assert [named(every, name)[key] for key in ("mean", "max", "std")] == [
            sum(both) // 2,
            max(both),
            10,
        ]
    rest = [each for at in range(5) for each in names[f"kernel {at:02}"]]
    own = named(some, OTHERS)
    assert (own["count"], own["total"], own["max"]) == (10, sum(rest), max(rest))
    assert (own["mean"], own["p50"], own["kind"]) == (sum(rest) // 10, sorted(rest)[4], None)
    assert own["std"] == round(statistics.pstdev(rest))
    assert sum(some.column("total")) == sum(every.column("total"))
    assert some.note == "others sums up the names beyond the first 10."


def test_as_many_names_as_asked_for_leave_no_rest() -> None:
    spans = run(None, [*lasting("a", 1), *lasting("b", 1)])
    assert kernels(spans, top=2).column("kernel") == ["a", "b"]
    assert kernels(spans, top=1).column("kernel") == ["a", OTHERS]
    with pytest.raises(RlprofError, match=r"top=0: must be 1 or more"):
        kernels(spans, top=0)


def test_copies_are_rows_of_their_own() -> None:
    copies = [Copy("HtoD", 0, 30), Copy("memset", 0, 4)]
    found = kernels(run(None, lasting("gemm", 10), copies))
    kinds = list(zip(found.column("kernel"), found.column("kind"), strict=True))
    assert kinds == [("Memcpy HtoD", "copy"), ("gemm", "compute"), ("Memset", "copy")]


def test_the_stage_is_the_one_with_most_of_the_time_and_what_is_not_known_counts_to_none() -> None:
    spans = run(
        None,
        [
            *lasting("gemm", 10, 10, 10, stage="actor_generate"),
            *lasting("gemm", 50, stage="actor_update", rank=1),
            *lasting("gemm", 20),
            *lasting("nowhere", 1),
        ],
    )
    own = named(kernels(spans), "gemm")
    assert (own["stage"], own["share in stage"], own["ranks"]) == ("actor_update", 0.5, 2)
    assert named(kernels(spans), "nowhere")["stage"] is None
    one = named(kernels(spans, ranks=[0]), "gemm")
    assert (one["stage"], one["share in stage"], one["ranks"]) == ("actor_generate", 0.6, 1)


def test_operator_and_module_are_those_that_launched_most_of_the_time() -> None:
    calls = [
        Call("Linear_0", 0, 100, "module"),
        Call("aten::mm", 10, 20),
        Call("aten::bmm", 30, 40),
    ]
    launched = [
        Kernel("gemm", 200, 210, launch=12),
        Kernel("gemm", 300, 390, launch=35),
        Kernel("late", 400, 401, launch=150),
    ]
    found = kernels(run(calls, launched))
    columns = ("kernel", "operator", "module")
    assert list(zip(*(found.column(each) for each in columns), strict=True)) == [
        ("gemm", "aten::bmm", "Linear_0"),
        ("late", None, None),
    ]


def test_operators_are_left_out_beyond_a_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rlprof.analysis.kernels._MAX_CALLS_SEARCHED", 0)
    found = kernels(run([Call("aten::mm", 0, 9)], [Kernel("gemm", 20, 30, launch=2)]))
    assert found.column("operator") == [None]
    assert found.note.startswith("operator and module are left out")


def test_instances_of_one_kernel_are_one_row_under_the_name_with_most_time() -> None:
    found = kernels(run(None, [*lasting("Conv2D1", 3), *lasting("Conv2D4", 5)]))
    assert found.column("short name") == ["Conv2D"]
    assert (found.column("kernel"), found.column("total")) == (["Conv2D4"], [8])


def test_kernels_without_a_name_or_a_length_are_counted() -> None:
    found = kernels(run(None, lasting(None, 0, 0)))
    assert named(found, None)["count"] == 2
    assert found.column("share") == [None]


def test_long_names_stay_whole() -> None:
    name = "void at::native::elementwise_kernel<" + "x, " * 400 + ">"
    assert kernels(run(None, lasting(name, 5))).column("kernel") == [name]


@pytest.mark.parametrize("given_kernels", [None, []])
def test_it_abstains_without_kernels(given_kernels: list[Kernel] | None) -> None:
    assert kernels(run(None, given_kernels)).abstained == no_work(None)
    one = kernels(run(None, lasting("a", 1)), ranks=[9])
    assert one.abstained == no_work([9])


runs = st.builds(
    Kernel,
    st.none() | st.sampled_from("abcdefghijklm"),
    st.just(0),
    st.integers(0, 10**12),
    rank=st.integers(0, 3),
    stage=st.none() | st.sampled_from(["actor_update", "compute_reward"]),
    step=st.none(),
)


@given(st.lists(runs, min_size=1, max_size=40), st.none() | st.integers(1, 14))
@settings(max_examples=examples(200), deadline=None)
def test_every_number_is_that_of_brute_force(drawn: list[Kernel], top: int | None) -> None:
    found = kernels(run(None, drawn), top=top)
    groups = defaultdict(list)
    for each in drawn:
        groups[each.name].append(each)
    shown = found.column("kernel")
    whole = sum(each.end for each in drawn)
    if len(groups) > (top or len(groups)):
        assert shown.pop() == OTHERS
        groups[OTHERS] = [each for each in drawn if each.name not in shown]
    else:
        assert set(shown) == set(groups)
    for row in found.rows:
        own = dict(zip([column.name for column in found.columns], row, strict=True))
        check(own, groups[own["kernel"]], whole)
    totals = found.column("total")
    kept = totals[: len(shown)]
    assert kept == sorted(kept, reverse=True)
    assert sum(totals) == whole


def check(own: dict[str, object], values: list[Kernel], whole: int) -> None:
    """Compare a row with the kernels that it stands for."""
    lengths = sorted(each.end for each in values)
    count, total = len(lengths), sum(lengths)
    assert (own["count"], own["total"], own["max"]) == (count, total, lengths[-1])
    assert own["p50"] == lengths[math.ceil(count * 0.5) - 1]
    assert own["p95"] == lengths[-(-count * 95 // 100) - 1]
    assert own["mean"] == math.floor(total / count + 0.5) or total > 2**52
    assert own["std"] == pytest.approx(statistics.pstdev(lengths), rel=1e-9, abs=1)
    assert own["ranks"] == len({each.rank for each in values})
    assert own["share"] == (total / whole if whole else None)
    stages = defaultdict(int)
    for each in values:
        stages[each.stage] += each.end
    most = max((ns for stage, ns in stages.items() if stage), default=None)
    assert own["share in stage"] == (most / total if most is not None and total else None)
    assert (own["stage"] is None) == (most is None)
    assert own["stage"] is None or stages[own["stage"]] == most


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no real traces in ../shared/data")
def test_an_old_kernel_of_nccl_is_a_row_per_collective_that_the_profiler_recorded() -> None:
    found = kernels(load(SHARED_DATA / "kineto" / "two_ranks"), top=4)
    rows = dict(zip(found.column("short name"), found.column("count"), strict=True))
    names = ("all_to_all", "all_gather", "all_reduce")
    assert [rows[f"{name} (send_recv RING_SIMPLE)"] for name in names] == [8, 4, 8]
