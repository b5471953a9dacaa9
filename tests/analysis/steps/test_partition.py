"""How steps are divided among stages, against a rasteriser."""

import dataclasses
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.steps import partition as partition_module
from lightning_rlprof.analysis.steps.partition import (
    Segments,
    containing_step,
    divide,
    exclusive_ns,
    paint,
    partition,
    partition_parts,
    rows_on_ranks,
)
from lightning_rlprof.analysis.steps.step_matrix import step_matrix
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Spans
from tests.builders.oracle import labels, runs
from tests.builders.runs import Row, grpo_run, loaded
from tests.effort import examples


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30),
    st.sampled_from([40, 300]),
)
def test_paint_is_the_greatest_covering_index(intervals: list[tuple[int, int]], cells: int) -> None:
    first = np.array([a for a, _ in intervals], dtype=np.int64)
    last = np.array([b for _, b in intervals], dtype=np.int64)

    def slow(cell: int) -> int:
        return max((i for i, (a, b) in enumerate(intervals) if a <= cell < b), default=-1)

    assert paint(first, last, cells).tolist() == [slow(cell) for cell in range(cells)]


def names(spans: Spans, label: np.ndarray) -> list[str]:
    return [spans.names[spans.name[row]] if row >= 0 else "untraced" for row in label.tolist()]


@settings(max_examples=examples(150), deadline=None)
@given(runs(overlapping_steps=True))
def test_segments_are_what_a_rasteriser_sees(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    steps = spans.rows(kind="step")
    cut = partition(spans).divided

    seen = {}
    for start, end, step, name in zip(
        cut.start_ns.tolist(),
        cut.end_ns.tolist(),
        steps[cut.step].tolist(),
        names(spans, cut.stage),
        strict=True,
    ):
        for now in range(start, end):
            assert (spans.rank[step], now) not in seen
            seen[spans.rank[step], now] = (spans.span(step), name)
    assert seen == {(step.rank, now): (step, name) for step, now, name in labels(spans)}


def test_a_run_is_divided_once_and_what_is_kept_goes_with_it() -> None:
    spans = loaded([Row("step", "step", 1, 0, 9)], [Row("step", "step", 1, 0, 9)])
    kept = partition(spans)
    assert partition(spans) is kept
    assert len(partition(spans, [1]).steps) == 1
    assert partition(spans) is kept
    assert partition(dataclasses.replace(spans, tables={})) is kept
    moved = dataclasses.replace(spans, end_ns=spans.end_ns + 1)
    assert partition(moved) is not kept
    gone = weakref.ref(spans)
    del spans, moved
    assert gone() is None


@settings(max_examples=examples(60), deadline=None)
@given(runs(), st.data())
def test_the_partition_of_some_ranks_is_that_of_a_run_of_these(
    rows: list[list[Row]], data: st.DataObject
) -> None:
    spans = loaded(*rows)
    some = data.draw(st.sets(st.sampled_from(spans.ranks)))
    own, both = partition(spans, some), (spans.rows(kind="step"), spans.rows(kind="stage"))
    steps, stages = (each[np.isin(spans.rank[each], list(some))] for each in both)
    whole = divide(spans, steps, stages)
    for found, expected in zip((own.divided, own.outside), whole, strict=True):
        for column, same in zip(found, expected, strict=True):
            assert column.tolist() == same.tolist()
    assert own.steps.tolist() == steps.tolist()


@settings(max_examples=examples(60), deadline=None)
@given(runs(), st.integers(0, 3), st.integers(1, 9))
def test_parts_of_a_few_threads_say_what_the_whole_does(
    rows: list[list[Row]], since: int, at_once: int
) -> None:
    spans = loaded(*rows)
    cut = partition(spans)
    later = spans.step[cut.steps[cut.divided.step]] >= since
    expected = exclusive_ns(spans, Segments(*(column[later] for column in cut.divided)))
    found = np.zeros_like(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_module, "_ROWS_AT_ONCE", at_once)
        matrix = step_matrix(dataclasses.replace(spans, results={}))
        for part in partition_parts(spans, since=since):
            found += exclusive_ns(spans, part.divided)
    assert found.tolist() == expected.tolist()
    for name, column in vars(step_matrix(spans)).items():
        assert getattr(matrix, name).tolist() == column.tolist()


def test_of_two_stages_opened_at_once_the_greater_id_is_inside() -> None:
    rows = [Row("step", "step", 1, 0, 9), Row("in", "stage", 1, 2, 5), Row("out", "stage", 1, 2, 8)]
    spans = loaded(rows)
    cut = partition(spans)
    assert names(spans, cut.divided.stage) == ["untraced", "out", "out", "untraced"]


def test_large_times_stay_exact() -> None:
    start = 2**59
    rows = [Row("step", "step", 1, 0, start + 3), Row("a", "stage", 1, 1, start + 1)]
    spans = loaded(rows)
    assert sorted(step_matrix(spans).work_ns.tolist()) == [3, start]


def test_ranks_are_chosen_or_refused(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path, ranks=3, steps=2)

    assert set(spans.rank[partition(spans, [0, 2]).steps].tolist()) == {0, 2}
    assert len(rows_on_ranks(spans, "stage", [1])) == 8
    with pytest.raises(TraceError, match="rank 7 is not in this run, which has 0, 1, 2"):
        partition(spans, [1, 7])


@settings(max_examples=examples(80), deadline=None)
@given(runs())
def test_home_is_the_step_that_contains_the_start(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    steps, stages = spans.rows(kind="step"), spans.rows(kind="stage")
    for group in (spans.thread, spans.rank):
        found = containing_step(spans, steps, stages, group)
        for row, at in zip(stages.tolist(), found.tolist(), strict=True):
            inside = [
                step
                for step in steps.tolist()
                if group[step] == group[row]
                and spans.start_ns[step] <= spans.start_ns[row] < spans.end_ns[step]
            ]
            assert inside == ([] if at < 0 else [steps[at]])


@settings(max_examples=examples(80), deadline=None)
@given(runs(overlapping_steps=True))
def test_where_steps_overlap_home_is_the_last_that_began_or_none(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    steps, stages = spans.rows(kind="step"), spans.rows(kind="stage")
    found = containing_step(spans, steps, stages, spans.rank)
    for row, at in zip(stages.tolist(), found.tolist(), strict=True):
        began = [
            step
            for step in steps.tolist()
            if spans.rank[step] == spans.rank[row]
            and spans.duration_ns[step] > 0
            and spans.start_ns[step] <= spans.start_ns[row]
        ]
        inside = began and spans.start_ns[row] < spans.end_ns[began[-1]]
        assert (int(steps[at]) if at >= 0 else None) == (began[-1] if inside else None)


def test_a_step_without_length_hides_no_other() -> None:
    rows = [
        Row("step", "step", 1, 0, 9, id=1),
        Row("step", "step", 2, 0, 0, id=2),
        Row("a", "stage", 1, 0, 4, id=3),
    ]
    spans = loaded(rows)
    steps = spans.rows(kind="step")
    assert containing_step(spans, steps, spans.rows(kind="stage"), spans.thread).tolist() == [0]
