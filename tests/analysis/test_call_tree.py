"""Calls as a tree, against looking at every pair of calls and every moment."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.device.work import NOT_RECORDED, device_work, launch_calls
from lightning_rlprof.analysis.operators import (
    NONE,
    CallTree,
    call_tree,
    thread_lanes,
)
from lightning_rlprof.tables.interval_nesting import enclosing
from tests.builders.calls import Call, Copy, Kernel, run, traces
from tests.effort import examples


def tree_of(calls: list[Call], kind: str = "operator", ranks: tuple[int, ...] | None = None):
    return call_tree(run(calls).table("calls"), kind, ranks)


def stack_of(tree: CallTree, at: int) -> str:
    """Return the names of the calls around one and its own."""
    names = []
    while at != NONE:
        names.append(tree.names[tree.name[at]])
        at = int(tree.around[at])
    return "".join(reversed(names))


def ints(*values: int):
    return np.array(values, dtype=np.int64)


def test_calls_come_by_thread_and_start_outer_ones_first() -> None:
    tree = tree_of(
        [
            Call("inner", 20_000, 30_000),
            Call("other thread", 0, 90_000, thread=9),
            Call("outer", 20_000, 50_000),
            Call("module", 0, 60_000, kind="module"),
            Call("later", 40_000, 50_000),
        ]
    )
    assert [tree.names[code] for code in tree.name] == ["outer", "inner", "later", "other thread"]
    assert tree.around.tolist() == [-1, 0, 0, -1]
    assert tree.self_ns().tolist() == [10_000, 10_000, 10_000, 90_000]


def test_a_call_that_ends_a_microsecond_late_is_nested_in_the_one_around_it() -> None:
    """Kineto before torch 2.3 cut start and duration to microseconds separately."""
    rounded = tree_of([Call("outer", 0, 10_000), Call("inner", 4_000, 11_000)])
    overlapping = tree_of([Call("outer", 0, 10_000), Call("inner", 4_000, 11_001)])
    after = tree_of([Call("outer", 0, 10_000), Call("next", 10_000, 10_500)])
    assert rounded.around.tolist() == [-1, 0]
    assert overlapping.around.tolist() == after.around.tolist() == [-1, -1]
    assert rounded.self_ns().tolist() == [4_000, 7_000]  # no nanosecond twice


def test_a_thread_that_is_not_known_is_one_of_its_own() -> None:
    tree = tree_of([Call("a", 0, 10_000, thread=None), Call("b", 0, 10_000)])  # type: ignore[arg-type]
    assert tree.around.tolist() == [-1, -1]
    lanes = thread_lanes(tree.threads, ints(0, 0), ints(7, NOT_RECORDED))
    found = tree.at(lanes, ints(5, 5)).tolist()
    assert [tree.names[tree.name[at]] for at in found if at != NONE] == ["b"]
    assert found[1] == NONE


def test_one_rank_alone() -> None:
    calls = [Call("a", 0, 10_000), Call("b", 0, 10_000, rank=3)]
    assert tree_of(calls, ranks=(3,)).rank.tolist() == [3]


def test_an_empty_tree_answers() -> None:
    tree = tree_of([])
    assert tree.self_ns().tolist() == tree.forwards().tolist() == tree.paths().of.tolist() == []
    assert tree.at(ints(0, -1), ints(5, 5)).tolist() == [NONE, NONE]
    assert tree.outermost().tolist() == []
    spans = run([], [Kernel("k", 1, 2, 0)])
    assert tree.launching(device_work(spans), spans.table("calls")).tolist() == [NONE]


def test_forward_operators_are_found_by_their_number_in_the_same_rank() -> None:
    tree = tree_of(
        [
            Call("mm", 0, 1, id=4),
            Call("MmBackward", 5, 6, thread=9, id=5, forward=4),
            Call("lost", 7, 8, id=6, forward=9),
            Call("mm", 0, 1, rank=1, id=0),
            Call("MmBackward", 5, 6, rank=1, id=1, forward=0),
        ]
    )
    found = tree.forwards()
    pairs = {(int(tree.rank[at]), int(tree.id[at])): int(found[at]) for at in range(len(found))}
    assert [at for at in pairs.values() if at != NONE] == [0, 3]
    assert pairs[0, 6] == NONE


def test_a_stack_of_names_is_one_path_however_often_it_occurs() -> None:
    loop = [
        Call(name, start + 100_000 * turn, end + 100_000 * turn)
        for turn in range(3)
        for name, start, end in (("a", 0, 90_000), ("b", 0, 50_000), ("a", 10_000, 40_000))
    ]
    tree = tree_of(loop)
    paths = tree.paths()
    assert paths.parent.tolist() == [-1, 0, 1]
    assert np.bincount(paths.of).tolist() == [3, 3, 3]
    assert tree.with_inner(ints(1, 10, 100, 2, 20, 200, 0, 0, 3)).tolist() == [
        *(111, 110, 100),
        *(222, 220, 200),
        *(3, 3, 3),
    ]
    assert tree.outermost().tolist() == [0, 1, 3, 4, 6, 7]


@given(traces())
@settings(max_examples=examples(150), deadline=None)
def test_every_moment_belongs_to_the_call_that_began_last(trace) -> None:
    calls, _ = trace
    tree = tree_of(calls)
    own = np.zeros(len(tree.name), np.int64)
    for lane in np.unique(tree.lane):
        rows = np.flatnonzero(tree.lane == lane)
        for begin, end in pairwise(sorted({*tree.start_ns[rows], *tree.end_ns[rows]})):
            over = [at for at in rows if tree.start_ns[at] <= begin < tree.end_ns[at]]
            if over:
                own[max(over)] += end - begin
            middle = ints(begin), ints(end - 1)
            expected = [max(over, default=NONE)] * 2
            assert [int(tree.at(ints(lane), at)[0]) for at in middle] == expected
    assert tree.self_ns().tolist() == own.tolist()


@given(traces())
@settings(max_examples=examples(150), deadline=None)
def test_each_is_nested_in_the_last_before_it_that_contains_it(trace) -> None:
    calls, _ = trace
    tree = tree_of(calls)
    for at in range(len(tree.name)):
        holds = [
            other
            for other in range(at)
            if tree.lane[other] == tree.lane[at]
            and tree.start_ns[at] < tree.end_ns[other]
            and tree.end_ns[at] <= tree.end_ns[other]
        ]
        assert tree.around[at] == max(holds, default=NONE)


@given(traces())
@settings(max_examples=examples(100), deadline=None)
def test_paths_are_the_distinct_stacks(trace) -> None:
    calls, _ = trace
    tree = tree_of(calls)
    paths = tree.paths()
    stacks = [stack_of(tree, at) for at in range(len(tree.name))]
    assert len(paths.name) == len(set(stacks))
    assert len({*zip(paths.of.tolist(), stacks, strict=True)}) == len(paths.name)
    titles: list[str] = []
    for above, name in zip(paths.parent.tolist(), paths.name.tolist(), strict=True):
        titles.append((titles[above] if above >= 0 else "") + tree.names[name])
    assert [titles[of] for of in paths.of] == stacks
    once = {at for at, stack in enumerate(stacks) if stack[-1] not in stack[:-1]}
    assert set(tree.outermost().tolist()) == once


@given(traces())
@settings(max_examples=examples(100), deadline=None)
def test_a_call_includes_all_calls_inside_it(trace) -> None:
    calls, _ = trace
    tree = tree_of(calls)
    expected = np.arange(len(tree.name))
    for at in reversed(range(len(tree.name))):  # those inside come after it
        if tree.around[at] != NONE:
            expected[tree.around[at]] += expected[at]
    assert tree.with_inner(np.arange(len(tree.name))).tolist() == expected.tolist()


def test_a_launch_is_the_drivers_call_of_the_same_rank_start_and_length() -> None:
    def driver(name: str, start: int, end: int, **changes: int) -> Call:
        return Call(name, start, end, kind="runtime", **changes)

    table = run(
        [
            Call("aten::mm", 5, 9),
            driver("longer", 5, 10),
            driver("launch", 5, 9),
            driver("other rank", 6, 9, rank=1),
        ]
    ).table("calls")
    rank, launch, took = (
        ints(0, 0, 0, 1, 0),
        ints(5, 5, 6, 6, NOT_RECORDED),
        ints(4, 5, 3, 3, NOT_RECORDED),
    )
    assert launch_calls(table, rank, launch, took).tolist() == [2, 1, NONE, 3, NONE]
    assert launch_calls(run([]).table("calls"), rank, launch, took).tolist() == [NONE] * 5


def test_a_copy_has_the_thread_of_the_call_that_launched_it() -> None:
    calls = [Call("cudaMemcpyAsync", 5, 9, kind="runtime", thread=33)]
    copies = [Copy("HtoD", 20, 27, launch=5, call=4), Copy("HtoD", 30, 31)]
    spans = run(calls, [Kernel("k", 0, 1)], copies)
    work = device_work(spans)
    assert work.launching_threads(spans.table("calls")).tolist() == [7, 33, NOT_RECORDED]
    assert work.duration.tolist() == [1, 7, 1]


def test_of_drivers_calls_that_began_at_once_each_launch_has_its_own() -> None:
    """As on several ranks, or in a trace whose clock stood still; of twins it is the last."""
    shapes = [(0, 4), (1, 4), (0, 4), (1, 6), (0, 4)]
    calls = [
        Call("launch", 5, 5 + took, kind="runtime", rank=rank, thread=at)
        for at, (rank, took) in enumerate(shapes)
    ]
    table = run([*calls, Call("launch", 7, 9, kind="runtime")]).table("calls")
    found = launch_calls(
        table, ints(0, 1, 1, 1, 0), ints(5, 5, 5, 5, 7), ints(4, 4, 6, 5, 2)
    ).tolist()
    own = [*zip(*(table.column(each) for each in ("rank", "start", "duration")), strict=True)]
    assert [at if at == NONE else own[at] for at in found] == [
        (0, 5, 4),
        (1, 5, 4),
        (1, 5, 6),
        NONE,
        (0, 7, 2),
    ]
    assert found[0] == max(at for at, each in enumerate(own) if each == (0, 5, 4))


@pytest.mark.deep
def test_a_million_calls_take_seconds() -> None:
    """The number that the page states comes from here; the bound leaves room for slow machines."""
    count = 1_000_000
    start = np.arange(count, dtype=np.int64) * 1_000
    end = start + np.where(np.arange(count) % 10 == 0, 10_000, 800)
    lane = np.zeros(count, np.int64)
    began = time.process_time()
    tree = CallTree(
        tuple("abcdefghij"), lane, lane[:1], lane, lane, np.arange(count) % 10, start, end, lane,
        lane - 1, enclosing(lane, start, end),
    )  # fmt: skip
    assert int(tree.self_ns().sum()) == int((end - start)[::10].sum())
    assert len(tree.paths().name) == 10
    assert time.process_time() - began < 20
