from pathlib import Path

from hypothesis import assume, given, settings

from lightning_rlprof.analysis.stages import rank_status, regions, stages, steps
from lightning_rlprof.analysis.steps.step_selection import warm_up
from lightning_rlprof.loaders.load import load
from tests.builders.oracle import labels, runs
from tests.builders.runs import Row, header, loaded, write_rank
from tests.effort import examples

STEPS = [Row("step", "step", 1, 0, 100), Row("step", "step", 2, 100, 200, counters={"capture": 1})]


def test_stages_of_other_threads_and_outside_steps_are_listed() -> None:
    rows = [
        *STEPS,
        Row("compute_reward", "stage", 1, 10, 60),
        Row("compute_reward", "stage", 1, 10, 80, thread=7),
        Row("compute_reward", "stage", 1, 99, 109, thread=7),
        Row("compute_reward", "stage", 2, 150, 199, thread=7),
        Row("actor_generate", "stage", 2, 200, 230),
        Row("weight_sync", "stage", 2, 230, 235, thread=7),
    ]
    table = regions(loaded(rows))

    assert table.rows == [
        ("compute_reward", "stage", "other thread", None, 80, 40, None, 10, 70, 70, 2),
        ("actor_generate", "stage", "outside steps", None, 30, 30, None, 30, 30, 30, 1),
        ("weight_sync", "stage", "outside steps", None, 5, 5, None, 5, 5, 5, 1),
    ]
    assert table.note.startswith("Excluded steps: 1 captured.")


def test_these_stages_are_exclusive_too() -> None:
    rows = [
        Row("step", "step", 1, 0, 100),
        Row("compute_reward", "stage", 1, 10, 60, thread=7),
        Row("judge", "stage", 1, 20, 50, thread=7),
    ]
    alone = ("stage", "other thread", None)
    assert regions(loaded(rows)).rows == [
        ("judge", *alone, 30, 30, None, 30, 30, 30, 1),
        ("compute_reward", *alone, 20, 20, 50, 20, 20, 20, 1),
    ]


def test_regions_are_whole_spans_with_their_share_of_the_counted_steps() -> None:
    rows = [
        *STEPS,
        Row("data_fetch", "region", 1, 0, 25),
        Row("data_fetch", "region", 2, 100, 190),
        Row("training_step", "region", 1, 25, 95),
        Row("actor_update", "stage", 1, 30, 90),
        Row("backward", "region", 1, 50, 75),
        Row("cleanup", "region", 2, 300, 360),
    ]
    table = regions(loaded(rows))

    within = ("region", "in steps")
    assert table.rows == [
        ("training_step", *within, 0.7, 70, 70, None, 70, 70, 70, 1),
        ("cleanup", "region", "outside steps", None, 60, 60, None, 60, 60, 60, 1),
        ("data_fetch", *within, 0.25, 25, 25, None, 25, 25, 25, 1),
        ("backward", *within, 0.25, 25, 25, None, 25, 25, 25, 1),
    ]


@settings(max_examples=examples(60), deadline=None)
@given(runs())
def test_no_stage_span_is_lost_or_counted_twice(rows: list[list[Row]]) -> None:
    quiet = [[row._replace(counters=None) for row in rank] for rank in rows]
    spans = loaded(*quiet)
    assume(not len(warm_up(spans)))
    if stages(spans).abstained is None:
        spans_in = [each or 0 for each in stages(spans).column("calls")]
        beside = regions(spans)
        kinds = zip(beside.column("kind"), beside.column("calls"), strict=True)
        spans_beside = [calls for kind, calls in kinds if kind == "stage"]
        assert sum(spans_in) + sum(spans_beside) == len(spans.rows(kind="stage"))  # type: ignore[arg-type]


def test_without_spans_the_tables_are_empty() -> None:
    spans = loaded([])
    assert regions(spans).rows == []


def test_ranks_are_chosen() -> None:
    rows = [Row("step", "step", 1, 0, 9), Row("fetch", "region", 1, 1, 2)]
    spans = loaded(rows, rows)
    assert regions(spans, ranks=[1]).column("calls") == [1]
    assert regions(spans).column("calls") == [2]


def test_every_rank_has_a_row_and_its_times_add_up(tmp_path: Path) -> None:
    rows = [
        Row("sanity", "region", 0, 10, 20),
        Row("step", "step", 1, 30, 50),
        Row("step", "step", 2, 50, 80),
        Row("validation", "region", 2, 80, 100),
    ]
    write_rank(tmp_path, header(0, 3), rows)
    write_rank(tmp_path, header(2, 3, host="node-b", device="npu"), [], status=None)

    assert rank_status(load(tmp_path)).rows == [
        (0, "node-a", "cpu", 4, 2, 50, 40, "finished"),
        (2, "node-b", "npu", 0, 0, 0, 0, "truncated"),
    ]


@settings(max_examples=examples(80), deadline=None)
@given(runs())
def test_every_step_is_divided_as_the_rasteriser_does(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    slow: dict[tuple[int, int, str], int] = {}
    for step, _, name in labels(spans):
        slow[step.rank, step.step, name] = slow.get((step.rank, step.step, name), 0) + 1

    table = steps(spans)
    names = [column.name for column in table.columns][4:]

    found = {}
    for rank, number, _, wall, *times in table.rows:
        assert sum(times) == wall  # type: ignore[arg-type]
        found |= {(rank, number, n): time for n, time in zip(names, times, strict=True) if time}
    assert found == slow
    walls = [span.duration_ns for span in spans if span.kind == "step"]
    assert table.column("wall") == walls


def test_the_state_of_each_step_is_shown_and_none_is_left_out() -> None:
    flags = [None, {"capture": 1}, {"interrupted": 1}]
    table = steps(
        loaded([Row("step", "step", n, n, n + 1, counters=f) for n, f in enumerate(flags)])
    )
    assert table.column("state") == ["complete", "capture", "interrupted"]


def test_stages_beyond_thirty_share_a_column_and_sums_stay_exact() -> None:
    rows = [Row("step", "step", 1, 0, 10_000)]
    rows += [Row(f"s{n}", "stage", 1, n * 100, n * 100 + n + 1) for n in range(33)]

    table = steps(loaded(rows))
    (row,) = table.rows

    names = [column.name for column in table.columns]
    assert names[4:6] == ["s32", "s31"]
    assert names[-2:] == ["other stages", "untraced"]
    assert row[-2] == 1 + 2 + 3
    assert row[3] == sum(row[4:]) == 10_000  # type: ignore[arg-type]


def test_it_abstains_without_steps() -> None:
    assert steps(loaded([])).abstained == "no complete step was recorded"
