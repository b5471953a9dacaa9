"""Two traces by operator and kernel: exact parts, the same sums as `kernels` and `operators`."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.analysis.comparison.trace_diff import TOTAL, trace_diff
from lightning_rlprof.analysis.device.work import OTHERS, device_work
from lightning_rlprof.analysis.kernels import kernels
from lightning_rlprof.analysis.operators import UNATTRIBUTED, operators
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.calls import Call, Copy, Kernel, recorded, run, traces
from tests.places import SHARED_DATA

KINETO = SHARED_DATA / "kineto"
EXACT = ("A", "B", "delta", "due to count", "due to duration")


def told(table: Table) -> dict[object, tuple[object, ...]]:
    """Return rows by operator, or by the full name of the kernel, which comes last."""
    if table.columns[-1].name == "kernel":
        return {row[-1] or row[0]: row[1:-1] for row in table.rows}
    return {row[0]: row[1:] for row in table.rows}


def lasting(name: str, *durations: int, step: int | None = 1, **changes: object) -> list[Kernel]:
    return [Kernel(name, 0, each, step=step, **changes) for each in durations]  # type: ignore[arg-type]


def test_a_change_is_told_as_more_calls_and_longer_ones() -> None:
    before = run(None, [*lasting("gemm", 10, 10), *lasting("gone", 7)])
    after = run(None, [*lasting("gemm", 12, 12, 12), *lasting("new", 5)])
    table = trace_diff(before, after, by="kernels")
    names = ["short name", *EXACT, "B/A", "A count", "B count", "kernel"]
    assert [column.name for column in table.columns] == names
    assert list(table.rows) == [
        ("gemm (triton)", 20, 36, 16, 10, 6, 1.8, 2.0, 3.0, "gemm"),
        ("gone (triton)", 7, 0, -7, -7, 0, 0.0, 1.0, 0.0, "gone"),
        ("new (triton)", 0, 5, 5, 5, 0, None, 0.0, 1.0, "new"),
        (TOTAL, 27, 41, 14, 8, 6, 41 / 27, 3.0, 4.0, None),
    ]
    assert table.note.startswith("Time per step and rank: 1 of A and 1 of B.")


def test_times_are_per_step_and_rank_and_what_lies_outside_of_steps_is_left_out() -> None:
    before = [*lasting("a", 10, step=1), *lasting("a", 20, step=2), *lasting("a", 99, step=None)]
    after = [*lasting("a", 30, 30, step=7), *lasting("a", 30, step=7, rank=1)]
    table = trace_diff(run(None, before), run(None, after), by="kernels")
    assert told(table)["a"] == (15, 45, 30, 8, 22, 3.0, 1.0, 1.5)
    assert "Excluded, outside of steps: 77% of A's time, 0% of B's." in table.note


def test_without_steps_in_one_of_them_times_are_per_rank() -> None:
    before = run(None, [*lasting("a", 10, step=1), *lasting("a", 20, step=2)])
    table = trace_diff(before, run(None, lasting("a", 40, step=None)), by="kernels")
    assert told(table)["a"][:2] == (30, 40)
    assert "per rank (one of the traces has no steps): 1 of A and 1 of B." in table.note


def test_a_stage_is_found_by_whatever_name_its_framework_has() -> None:
    before = run(None, [*lasting("a", 10, stage="update_actor"), *lasting("b", 3, stage="gen")])
    after = run(None, [*lasting("a", 11, stage="actor_update"), *lasting("c", 3)])
    for name in ("actor_update", "update_actor"):
        table = trace_diff(before, after, by="kernels", stage=name)
        assert list(told(table)) == ["a", TOTAL]
        assert f"Time in {name} per step" in table.note
    with pytest.raises(
        RlprofError, match=r"^no launches in stage 'critic'. Stages .*: actor_update, gen, "
    ):
        trace_diff(before, after, by="kernels", stage="critic")
    with pytest.raises(RlprofError, match=r"Stages in these traces: none$"):
        trace_diff(run(None, lasting("a", 1)), run(None, lasting("a", 1)), by="kernels", stage="x")


def launching(length: int, *, twice: bool = False) -> Spans:
    calls = [Call("aten::linear", 0, 9_000, step=1), Call("aten::mm", 1_000, 8_000, step=1)]
    calls += [Call("aten::mm", 20_000, 29_000, step=1)] if twice else []
    found = [Kernel("gemm", 0, length, launch=2_000, step=1), Kernel("alone", 0, 4, step=1)]
    found += [Kernel("gemm", 0, length, launch=21_000, step=1)] if twice else []
    return run(calls, found, [Copy("HtoD", 0, 2)])


def test_operators_are_compared_by_what_they_launched_and_counted_by_their_calls() -> None:
    table = trace_diff(launching(10), launching(15, twice=True))
    assert next(column.name for column in table.columns) == "operator"
    assert told(table)["aten::mm"] == (10, 30, 20, 10, 10, 3.0, 1.0, 2.0)
    assert told(table)["aten::linear"][:5] == (0, 0, 0, 0, 0)
    assert told(table)[UNATTRIBUTED] == (4, 4, 0, 0, 0, 1.0, 1.0, 1.0)


def test_operators_of_a_host_alone_are_compared_by_their_own_time() -> None:
    one = run([Call("a", 0, 9_000), Call("b", 1_000, 3_000)])
    two = run([Call("a", 0, 9_000), Call("b", 1_000, 5_000)], lasting("k", 5))
    for table in (trace_diff(one, one), trace_diff(one, two)):
        assert "Times are of the host, because one of the runs has no kernels." in table.note
    assert told(trace_diff(one, two))["b"] == (2_000, 4_000, 2_000, 0, 2_000, 2.0, 1.0, 1.0)
    assert told(trace_diff(one, two))["a"][:3] == (7_000, 5_000, -2_000)


def test_rows_beyond_the_top_are_one_and_the_total_is_the_same() -> None:
    before = run(None, [each for at in range(6) for each in lasting(f"k{at}", 10)])
    after = run(None, [each for at in range(6) for each in lasting(f"k{at}", 10 + at)])
    every = trace_diff(before, after, by="kernels")
    some = trace_diff(before, after, by="kernels", top=2)
    assert list(told(some)) == ["k5", "k4", OTHERS, TOTAL]
    assert told(some)[OTHERS] == (40, 46, 6, 0, 6, 46 / 40, 4.0, 4.0)
    assert some.rows[-1] == every.rows[-1]
    assert list(told(trace_diff(before, after, by="kernels", top=6)))[-2:] == ["k0", TOTAL]


def test_it_abstains_or_refuses_in_one_line() -> None:
    full, nothing = launching(1), run([], [])
    for pair, by, text in (
        (
            (nothing, full),
            "kernels",
            "Run A has no device kernels. Capture a step with a profiler.",
        ),
        (
            (full, nothing),
            "kernels",
            "Run B has no device kernels. Capture a step with a profiler.",
        ),
        (
            (full, nothing),
            "operators",
            "Run B has no operators. Capture a step with torch.profiler.",
        ),
    ):
        assert trace_diff(*pair, by=by).abstained == text  # type: ignore[arg-type]


some_kernels = st.lists(
    st.builds(
        lambda name, length, step, rank: Kernel(name, 0, length, step=step, rank=rank),
        st.sampled_from("abc") | st.none(),
        st.integers(0, 50),
        st.integers(1, 3),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=20,
)


@given(some_kernels, some_kernels)
def test_kernels_agree_with_sums_one_by_one(before: list[Kernel], after: list[Kernel]) -> None:
    found = told(trace_diff(run(None, before), run(None, after), by="kernels"))
    sides = []
    for own in (before, after):
        over = len({(each.rank, each.step) for each in own})
        time, count = Counter[object](), Counter(each.name for each in own)
        for each in own:
            time[each.name] += each.end
        sides.append({name: (Fraction(time[name], over), Fraction(count[name], over)) for name in
                      {each.name for each in (*before, *after)}})  # fmt: skip
    for name, (a, n) in sides[0].items():
        b, m = sides[1][name]
        row = found.pop(name)
        assert row[:3] == (round(a), round(b), round(b) - round(a))
        assert row[3] + row[4] == row[2]  # type: ignore[operator]
        if n and m:
            assert row[3] == round((m - n) * a / n)
        assert row[6:] == (float(n), float(m))
    assert list(found) == [TOTAL]


@pytest.mark.deep
@given(traces(), traces())
def test_operators_sum_as_their_own_table_does(one, two) -> None:
    a, b = run(*one), run(*two)
    for spans, column in ((a, 0), (b, 1)):
        table, alone = trace_diff(a, b), operators(spans)
        if table.abstained is not None:
            return
        names = (table.column(each) for each in ("operator", EXACT[column]))
        mine = {name: time for name, time in zip(*names, strict=True) if time}
        if "Times are of the host" in table.note:
            continue
        ranks = len({each.rank for each in (one, two)[column][1]})
        if ranks == 1:
            columns = (alone.column(each) for each in ("operator", "device self"))
            assert mine.pop(TOTAL, 0) == sum(map(int, alone.column("device self")))  # type: ignore[arg-type]
            assert mine == {name: time for name, time in zip(*columns, strict=True) if time}


@pytest.mark.deep
@given(traces(), traces())
def test_swapping_the_traces_turns_every_difference_round(one, two) -> None:
    for by in ("operators", "kernels"):
        forth, back = (
            trace_diff(*pair, by=by)  # type: ignore[arg-type]
            for pair in ((run(*one), run(*two)), (run(*two), run(*one)))
        )
        assert {name: row[2] for name, row in told(forth).items()} == {
            name: -row[2]  # type: ignore[operator]
            for name, row in told(back).items()
        }


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
@pytest.mark.parametrize("name", ["h100_qwen1.5-0.5b", "alexnet", "sglang_qwen3-8b_decode"])
@pytest.mark.parametrize("by", ["operators", "kernels"])
def test_a_real_trace_is_the_same_as_itself(name: str, by: str) -> None:
    spans = load(KINETO / f"{name}.json.gz")
    table = trace_diff(spans, spans, by=by)  # type: ignore[arg-type]
    assert all(row[3:6] == (0, 0, 0) and row[6] in (1.0, None) for row in table.rows)
    work = device_work(spans)
    step = work.numbers("step", 0)
    inside = work.duration[step > 0] if (step > 0).any() else work.duration
    assert table.rows[-1][1] == int(inside.sum()) > 0
    left = {"h100_qwen1.5-0.5b": "outside of steps: 30% of A's time, 30% of B's."}.get(name)
    assert left in table.note if left else "outside of steps" not in table.note


@pytest.mark.skipif(not KINETO.is_dir(), reason="no real traces in ../shared/data/kineto")
def test_real_ranks_differ_by_what_each_of_them_ran() -> None:
    a, b = (load(KINETO / "two_ranks" / f"rank-{rank}.json.gz") for rank in (0, 1))
    table = trace_diff(a, b, by="kernels")
    whole = [sum(map(int, kernels(spans).column("total"))) for spans in (a, b)]  # type: ignore[arg-type]
    assert table.rows[-1][1] == pytest.approx(whole[0] / 2, abs=len(table.rows))
    assert table.rows[-1][2] == pytest.approx(whole[1] / 2, abs=len(table.rows))
    (hot,) = (row for row in table.rows if str(row[0]).startswith("Memcpy HtoD"))
    assert (hot[7], hot[8]) == (12.0, 12.0)
    assert hot[4] == 0
    assert hot[3] == hot[5] > 5_000_000  # type: ignore[operator]


def test_a_training_under_the_real_profiler_is_compared_on_the_host(tmp_path: Path) -> None:
    for name in ("a", "b"):
        recorded(tmp_path / f"{name}.json")
    a, b = (load(tmp_path / f"{name}.json") for name in "ab")
    table = trace_diff(a, b)
    rows = told(table)
    assert rows["aten::addmm"][6:] == (6.0, 6.0)
    assert rows[TOTAL][0] == sum(int(each or 0) for each in operators(a).column("host self"))
