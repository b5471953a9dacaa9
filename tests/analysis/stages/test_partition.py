"""Runs that are complete tables, against the same runs when nothing is made of that."""

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.catalog import ANALYSES
from lightning_rlprof.analysis.stages.partition import (
    UNTRACED,
    Cells,
    Flat,
    Partition,
    Segments,
    containing_step,
    divide_flat,
    divide_nested,
    paint,
    partition,
    rows_on_ranks,
)
from lightning_rlprof.analysis.stages.stage_times import stages
from lightning_rlprof.analysis.stages.untraced_gaps import find_gaps
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.oracle import labels, runs
from tests.builders.runs import Row, grpo_run, loaded
from tests.effort import examples

TABLES: dict[str, Callable[[Spans], Table]] = {
    **{
        name: ANALYSES[name].run
        for name in ("stages", "steps", "slowest_ranks", "gaps", "rank_status")
    },
    "stages per rank": partial(stages, per_rank=True),
}


@st.composite
def complete_runs(draw: st.DrawFn) -> list[list[Row]]:
    """Draw ranks whose steps have the same stages in the same order; some under capture."""
    names = draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 3))]
    capture = draw(st.sets(st.integers(1, 5), max_size=3))
    least = draw(st.integers(0, 1))  # zero: a step may be covered whole
    ranks = []
    for _ in range(draw(st.integers(1, 3))):
        rows, now = [Row("z", "region", 0, 0, 1)], 5
        for step in range(1, draw(st.integers(1, 5)) + 1):
            begin = now
            for name in names:
                start = now + draw(st.integers(least, 2))
                now = start + draw(st.integers(1, 3))
                rows.append(Row(name, "stage", step, start, now))
            counters = {"capture": 1} if step in capture else None
            now += draw(st.integers(0, 2))
            rows.append(Row("step", "step", step, begin, now, counters=counters))
        ranks.append(draw(st.permutations(rows)))
    return ranks


@settings(max_examples=examples(200), deadline=None)
@given(complete_runs())
def test_a_complete_table_has_the_answers_of_any_other_run(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    own = partition(spans).divided
    assert isinstance(own, Flat)
    assert own.each > 0
    found = {name: table(spans) for name, table in TABLES.items()}
    with pytest.MonkeyPatch.context() as patch:
        module = "lightning_rlprof.analysis.stages.partition"
        patch.setattr(f"{module}.divide_flat", lambda spans, steps: None)
        segmented = replace(spans)
        for name, table in TABLES.items():
            other = table(segmented)
            assert list(found[name].rows) == list(other.rows)
            assert found[name].note == other.note


def test_steps_with_other_stages_or_one_twice_are_no_complete_table() -> None:
    steps = [Row("step", "step", n, n * 10, n * 10 + 10) for n in range(2)]
    for names in ("abac", "abba", "aaaa"):
        stages = [
            Row(name, "stage", at // 2, at // 2 * 10 + at % 2 * 5, at // 2 * 10 + at % 2 * 5 + 4)
            for at, name in enumerate(names)
        ]
        own = partition(loaded([*steps, *stages])).divided
        assert isinstance(own, Flat)
        assert own.each == 0


def test_cells_of_a_table_are_columns_too() -> None:
    cells = Cells(np.array([1, 2, 3, 4]), names=np.array([UNTRACED, 7]))
    assert cells.step.tolist() == [0, 0, 1, 1]
    assert cells.name.tolist() == [UNTRACED, 7, UNTRACED, 7]
    for place in ([0, 1], [1, 0], [0, -1], [0, 0], [-1, -1]):
        columns = Cells(cells.ns, (cells.step, cells.name))
        own, other = (each.sums(np.array(place), 2, 9) for each in (cells, columns))
        assert own.tolist() == other.tolist()


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
    cut = divide_nested(spans, steps)

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


@st.composite
def flat_runs(draw: st.DrawFn) -> list[list[Row]]:
    """Draw ranks whose stages lie in a row; a third of the runs are complete tables."""
    whole = draw(st.sampled_from([None, None, draw(st.permutations(["a", "b", "c"]))]))
    ranks = []
    for _ in range(draw(st.integers(1, 3))):
        rows, now = [], draw(st.integers(0, 5))
        for step in range(1, draw(st.integers(1, 4)) + 1):
            begin = now
            drawn = draw(st.lists(st.sampled_from(["a", "b", "c"]), max_size=4))
            for name in drawn if whole is None else whole:
                start = now + draw(st.integers(0, 2))
                now = start + draw(st.integers(1, 3))
                rows.append(Row(name, "stage", step, start, now))
            now = max(now + draw(st.integers(0, 2)), begin + 1)
            rows.append(Row("step", "step", step, begin, now))
            outside = draw(st.integers(0, 3))
            if outside > 1:
                rows.append(Row("a", "stage", step, now + 1, now + outside))
            now += outside
        if draw(st.booleans()):
            rows.append(Row("b", "stage", 1, 1, now, thread=7))
        ranks.append(draw(st.permutations(rows)))
    return ranks


def alike(own: Partition, other: Partition, spans: Spans) -> None:
    """Compare everything that an analysis asks of a partition."""
    for left, right in (
        (own.cells(spans), other.cells(spans)),
        (own.stages(spans), other.stages(spans)),
        (find_gaps(own, spans), find_gaps(other, spans)),
    ):
        columns = (left.step, left.name, left.ns) if isinstance(left, Cells) else left
        others = (right.step, right.name, right.ns) if isinstance(right, Cells) else right
        assert [column.tolist() for column in columns] == [column.tolist() for column in others]


@settings(max_examples=examples(200), deadline=None)
@given(flat_runs())
def test_stages_in_a_row_need_no_paint_and_give_the_same(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    steps = spans.rows(kind="step")

    found = divide_flat(spans, steps)

    assert found is not None
    alike(Partition(steps, found), Partition(steps, divide_nested(spans, steps)), spans)


@settings(max_examples=examples(200), deadline=None)
@given(runs(overlapping_steps=True))
def test_whatever_is_called_flat_gives_the_same_as_paint(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    steps = spans.rows(kind="step")
    if (found := divide_flat(spans, steps)) is not None:
        alike(Partition(steps, found), Partition(steps, divide_nested(spans, steps)), spans)


@pytest.mark.parametrize(
    "stage",
    [
        Row("b", "stage", 1, 3, 4),  # in another
        Row("b", "stage", 1, 8, 12),  # over the edge of a step
        Row("b", "stage", 1, 0, 2),  # begins before the first step
        Row("b", "stage", 1, 18, 22),  # ends after the last one
        Row("b", "stage", 1, 7, 7),  # without length
    ],
)
def test_one_stage_that_is_not_in_the_row_is_painted(stage: Row) -> None:
    steps = [Row("step", "step", 1, 0, 10), Row("step", "step", 2, 10, 20)]
    rows = [Row(*row[:3], row.start_ns + 1, row.end_ns + 1) for row in steps]
    stages = [Row("a", "stage", 1, 2, 6), Row("a", "stage", 2, 12, 16)]
    assert isinstance(partition(loaded([*rows, *stages])).divided, Flat)
    assert isinstance(partition(loaded([*rows, *stages, stage])).divided, Segments)


def test_few_of_many_names_are_summed_without_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [Row("step", "step", n, n * 10, n * 10 + 10) for n in range(9)]
    spans = loaded([*steps, *(Row(f"s{n}", "stage", n, n * 10, n * 10 + 4) for n in range(9))])
    roomy = partition(spans).cells(spans)
    monkeypatch.setattr("lightning_rlprof.analysis.stages.partition._SPARSE", 0)
    narrow = partition(dataclasses.replace(spans)).cells(spans)
    for name in ("step", "name", "ns"):
        assert getattr(narrow, name).tolist() == getattr(roomy, name).tolist()


def test_the_last_partition_of_a_run_is_kept_and_goes_with_it() -> None:
    spans = loaded([Row("step", "step", 1, 0, 9)], [Row("step", "step", 1, 0, 9)])
    kept = partition(spans)
    assert partition(spans) is kept
    assert len(partition(spans, [1]).steps) == 1
    assert partition(spans, {1}) is partition(spans, [1, 1])
    assert len(partition(spans).steps) == 2
    assert partition(dataclasses.replace(spans)) is not kept
    gone = weakref.ref(spans)
    del spans
    assert gone() is None


@settings(max_examples=examples(60), deadline=None)
@given(runs())
def test_cells_add_up_to_every_steps_wall_exactly(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    cut = partition(spans)
    cells = cut.cells(spans)

    walls = np.zeros(len(cut.steps), dtype=np.int64)
    np.add.at(walls, cells.step, cells.ns)
    assert walls.tolist() == spans.duration_ns[cut.steps].tolist()
    assert (cells.ns > 0).all()


def test_of_two_stages_opened_at_once_the_greater_id_is_inside() -> None:
    rows = [Row("step", "step", 1, 0, 9), Row("in", "stage", 1, 2, 5), Row("out", "stage", 1, 2, 8)]
    spans = loaded(rows)
    cut = partition(spans)
    assert isinstance(cut.divided, Segments)
    assert names(spans, cut.divided.stage) == ["untraced", "out", "out", "untraced"]


def test_large_times_stay_exact() -> None:
    start = 2**59
    rows = [Row("step", "step", 1, 0, start + 3), Row("a", "stage", 1, 1, start + 1)]
    spans = loaded(rows)
    assert sorted(partition(spans).cells(spans).ns.tolist()) == [3, start]


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
