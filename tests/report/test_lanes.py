from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.report.lanes import lanes
from lightning_rlprof.spans import Spans
from tests.runs import Row, loaded


def _lanes(spans: Spans) -> list[list[str]]:
    return [[spans.span(row).name for row in lane] for lane in lanes(spans, spans.rows())]


def test_nested_stages_share_a_lane() -> None:
    rows = [
        Row("a", "stage", 1, 0, 9),
        Row("b", "stage", 1, 0, 9, parent=1),
        Row("c", "stage", 1, 2, 9, parent=2),
        Row("d", "stage", 1, 9, 12),
    ]
    assert _lanes(loaded(rows)) == [["a", "b", "c", "d"]]


def test_overlapping_tasks_get_lanes_with_their_own_children() -> None:
    rows = [
        Row("rollout", "stage", 1, 0, 100),
        Row("task 1", "stage", 1, 5, 60, parent=1),
        Row("task 2", "stage", 1, 10, 90, parent=1),
        Row("reward 1", "stage", 1, 20, 30, parent=2),
        Row("reward 2", "stage", 1, 21, 29, parent=3),
        Row("after", "stage", 1, 92, 95, parent=1),
    ]
    assert _lanes(loaded(rows)) == [
        ["rollout", "task 1", "reward 1", "after"],
        ["task 2", "reward 2"],
    ]


def test_a_task_within_its_sibling_is_not_drawn_as_its_child() -> None:
    rows = [Row("long", "stage", 1, 0, 100), Row("short", "stage", 1, 20, 30)]
    assert _lanes(loaded(rows)) == [["long"], ["short"]]


def test_regions_with_known_ends_nest_by_time() -> None:
    rows = [
        Row("update", "stage", 1, 10, 90),
        Row("minibatch", "stage", 1, 21, 39, parent=1),
        Row("training_step", "region", 1, 5, 95),
        Row("backward", "region", 1, 20, 40),
    ]
    assert _lanes(loaded(rows)) == [["training_step", "update", "backward", "minibatch"]]


def test_a_region_that_is_the_parent_holds_its_stages() -> None:
    rows = [
        Row("training_step", "region", 1, 0, 100),
        Row("optimizer_step", "region", 1, 10, 60),
        Row("update", "stage", 1, 20, 50, parent=1),
        Row("elsewhere", "stage", 1, 61, 90, parent=99),
    ]
    expected = ["training_step", "optimizer_step", "update", "elsewhere"]
    assert _lanes(loaded(rows)) == [expected]


def test_marks_go_to_the_first_lane_and_cover_nothing() -> None:
    rows = [
        Row("now", "mark", 1, 5, 5),
        Row("a", "stage", 1, 0, 9),
        Row("b", "stage", 1, 5, 9, parent=2),
    ]
    assert _lanes(loaded(rows)) == [["a", "b", "now"]]


def test_no_spans_no_lanes() -> None:
    assert lanes(loaded([]), loaded([]).rows()) == []


SPANS = st.tuples(
    st.sampled_from(["stage", "stage", "region", "step", "mark"]),
    st.integers(0, 30),
    st.integers(0, 30),
    st.none() | st.integers(1, 12),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(SPANS, max_size=12))
def test_every_span_is_drawn_once_and_lanes_always_nest(given_spans: list[tuple]) -> None:  # type: ignore[type-arg]
    rows = [
        Row(str(at), kind, 1, start, start if kind == "mark" else start + length, parent=parent)
        for at, (kind, start, length, parent) in enumerate(given_spans, start=1)
    ]
    spans = loaded(rows)
    found = lanes(spans, spans.rows())

    assert sorted(row for lane in found for row in lane) == list(range(len(spans)))
    for lane in found:
        drawn = [span for span in map(spans.span, lane) if span.kind != "mark"]
        assert [span.start_ns for span in drawn] == sorted(span.start_ns for span in drawn)
        open_ends: list[tuple[int, str, int, int | None]] = []
        for span in drawn:
            while open_ends and open_ends[-1][0] <= span.start_ns:
                open_ends.pop()
            if open_ends:
                assert span.end_ns <= open_ends[-1][0]
                if span.kind == "stage" and open_ends[-1][1] == "stage":
                    assert span.parent == open_ends[-1][2]
            open_ends.append((span.end_ns, span.kind, span.id, span.parent))
