from hypothesis import given, settings

from lightning_rlprof.analysis.steps import steps
from tests.analysis.oracle import labels, runs
from tests.runs import Row, loaded


@settings(max_examples=80, deadline=None)
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
    assert steps(loaded([])).abstained == "no step was recorded to its end"
