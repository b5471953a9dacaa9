from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.partition import UNTRACED, home, paint, partition, select
from lightning_rlprof.errors import TraceError
from tests.analysis.oracle import labels, runs
from tests.runs import Row, grpo_run, loaded


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30))
def test_paint_is_the_greatest_covering_index(intervals: list[tuple[int, int]]) -> None:
    first = np.array([a for a, _ in intervals], dtype=np.int64)
    last = np.array([b for _, b in intervals], dtype=np.int64)

    def slow(cell: int) -> int:
        return max((i for i, (a, b) in enumerate(intervals) if a <= cell < b), default=-1)

    assert paint(first, last, 40).tolist() == [slow(cell) for cell in range(40)]


@settings(max_examples=150, deadline=None)
@given(runs(overlapping_steps=True))
def test_segments_are_what_a_rasteriser_sees(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    cut = partition(spans)

    painted = {}
    for start, end, step, name in zip(
        cut.start_ns.tolist(),
        cut.end_ns.tolist(),
        cut.steps[cut.step].tolist(),
        cut.names(spans).tolist(),
        strict=True,
    ):
        label = "untraced" if name == UNTRACED else spans.names[name]
        for now in range(start, end):
            assert (spans.rank[step], now) not in painted
            painted[spans.rank[step], now] = (spans.span(step), label)
    assert painted == {(step.rank, now): (step, name) for step, now, name in labels(spans)}


@settings(max_examples=60, deadline=None)
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
    names = [spans.names[name] if name >= 0 else "-" for name in cut.names(spans).tolist()]
    assert names == ["-", "out", "out", "-"]


def test_large_times_stay_exact() -> None:
    start = 2**59
    rows = [Row("step", "step", 1, 0, start + 3), Row("a", "stage", 1, 1, start + 1)]
    spans = loaded(rows)
    assert sorted(partition(spans).cells(spans).ns.tolist()) == [3, start]


def test_ranks_are_chosen_or_refused(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path, ranks=3, steps=2)

    assert set(spans.rank[partition(spans, [0, 2]).steps].tolist()) == {0, 2}
    assert len(select(spans, "stage", [1])) == 8
    with pytest.raises(TraceError, match="rank 7 is not in this run, which has 0, 1, 2"):
        partition(spans, [1, 7])


@settings(max_examples=80, deadline=None)
@given(runs())
def test_home_is_the_step_that_contains_the_start(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    steps, stages = spans.rows(kind="step"), spans.rows(kind="stage")
    for group in (spans.thread, spans.rank):
        found = home(spans, steps, stages, group)
        for row, at in zip(stages.tolist(), found.tolist(), strict=True):
            inside = [
                step
                for step in steps.tolist()
                if group[step] == group[row]
                and spans.start_ns[step] <= spans.start_ns[row] < spans.end_ns[step]
            ]
            assert inside == ([] if at < 0 else [steps[at]])


def test_a_step_without_length_hides_no_other() -> None:
    rows = [
        Row("step", "step", 1, 0, 9, id=1),
        Row("step", "step", 2, 0, 0, id=2),
        Row("a", "stage", 1, 0, 4, id=3),
    ]
    spans = loaded(rows)
    steps = spans.rows(kind="step")
    assert home(spans, steps, spans.rows(kind="stage"), spans.thread).tolist() == [0]
