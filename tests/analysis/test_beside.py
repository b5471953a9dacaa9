from hypothesis import given, settings

from lightning_rlprof.analysis.beside import background, regions
from lightning_rlprof.analysis.stages import stages
from tests.analysis.oracle import runs
from tests.runs import Row, loaded

STEPS = [Row("step", "step", 1, 0, 100), Row("step", "step", 2, 100, 200, counters={"capture": 1})]


def test_stages_of_other_threads_and_outside_steps_are_beside() -> None:
    rows = [
        *STEPS,
        Row("compute_reward", "stage", 1, 10, 60),
        Row("compute_reward", "stage", 1, 10, 80, thread=7),
        Row("compute_reward", "stage", 1, 99, 109, thread=7),
        Row("compute_reward", "stage", 2, 150, 199, thread=7),
        Row("actor_generate", "stage", 2, 200, 230),
        Row("weight_sync", "stage", 2, 230, 235, thread=7),
    ]
    table = background(loaded(rows))

    assert table.rows == [
        ("compute_reward", "in background", 80, 40, 10, 70, 70, 2),
        ("actor_generate", "outside steps", 30, 30, 30, 30, 30, 1),
        ("weight_sync", "outside steps", 5, 5, 5, 5, 5, 1),
    ]
    assert table.note == "Steps left out: 1 under capture."


def test_regions_are_whole_spans_with_their_share_of_the_counted_steps() -> None:
    rows = [
        *STEPS,
        Row("data_fetch", "region", 1, 0, 25),
        Row("data_fetch", "region", 2, 100, 190),
        Row("training_step", "region", 1, 25, 95),
        Row("backward", "region", 1, 50, 75),
        Row("validation", "region", 2, 300, 360),
    ]
    table = regions(loaded(rows))

    assert table.rows == [
        ("training_step", "in steps", 0.7, 70, 70, 70, 70, 70, 1),
        ("validation", "outside steps", None, 60, 60, 60, 60, 60, 1),
        ("data_fetch", "in steps", 0.25, 25, 25, 25, 25, 25, 1),
        ("backward", "in steps", 0.25, 25, 25, 25, 25, 25, 1),
    ]


@settings(max_examples=60, deadline=None)
@given(runs())
def test_no_stage_span_is_lost_or_counted_twice(rows: list[list[Row]]) -> None:
    quiet = [[row._replace(counters=None) for row in rank] for rank in rows]
    spans = loaded(*quiet)
    inside = sum(count for count in stages(spans).column("count") if isinstance(count, int))
    beside = sum(count for count in background(spans).column("count") if isinstance(count, int))
    assert inside + beside == len(spans.rows(kind="stage"))


def test_without_spans_the_tables_are_empty() -> None:
    spans = loaded([])
    assert (background(spans).rows, regions(spans).rows) == ([], [])


def test_ranks_are_chosen() -> None:
    rows = [Row("step", "step", 1, 0, 9), Row("fetch", "region", 1, 1, 2)]
    spans = loaded(rows, rows)
    assert regions(spans, ranks=[1]).column("count") == [1]
    assert regions(spans).column("count") == [2]
