import numpy as np
from hypothesis import given, settings

from lightning_rlprof.analysis.stages import find_gaps, gaps, stages
from lightning_rlprof.analysis.steps.partition import partition
from lightning_rlprof.analysis.steps.step_selection import counted
from tests.builders.oracle import runs
from tests.builders.runs import Row, loaded
from tests.effort import examples


@settings(max_examples=examples(80), deadline=None)
@given(runs())
def test_gaps_add_up_to_untraced_exactly(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    table = stages(spans)
    untraced = dict(zip(table.column("stage"), table.column("total"), strict=True))
    found = gaps(spans)
    assert sum(found.column("total")) == untraced.get("untraced", 0)  # type: ignore[arg-type]
    assert found.column("total") == sorted(found.column("total"), reverse=True)  # type: ignore[type-var]


@settings(max_examples=examples(80), deadline=None)
@given(runs())
def test_the_worst_is_the_last_of_the_longest(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    cut = partition(spans)
    mask = counted(spans, cut.steps).mask
    names = (*spans.names, "step boundary")
    slow: dict[tuple[str, str], tuple[int, int, int]] = {}
    for step, ns, after, before in zip(*map(np.ndarray.tolist, find_gaps(cut, spans)), strict=True):
        key, row = (names[after], names[before]), cut.steps[step]
        if mask[step] and ns >= slow.get(key, (0,))[0]:
            slow[key] = (ns, int(spans.rank[row]), int(spans.step[row]))

    table = gaps(spans)

    keys = zip(table.column("after"), table.column("before"), strict=True)
    worst = (table.column(name) for name in ("max", "worst rank", "worst step"))
    assert dict(zip(keys, zip(*worst, strict=True), strict=True)) == slow


def test_gaps_lie_between_stages_or_at_the_edge_of_a_step() -> None:
    rows = []
    for step, more in ((1, 0), (2, 5)):
        at = step * 100
        rows.append(Row("step", "step", step, at, at + 100))
        rows.append(Row("a", "stage", step, at + 10, at + 30))
        rows.append(Row("fetch", "region", step, at + 35, at + 40))
        rows.append(Row("b", "stage", step, at + 60 + more, at + 100))

    table = gaps(loaded(rows))

    assert table.rows == [
        ("a", "b", 65 / 200, 65, 33, 35, 2, 0, 2),
        ("step boundary", "a", 20 / 200, 20, 10, 10, 2, 0, 2),
    ]


def test_a_step_without_stages_is_one_gap() -> None:
    table = gaps(loaded([Row("step", "step", 1, 0, 10), Row("step", "step", 2, 10, 30)]))
    assert table.rows == [("step boundary", "step boundary", 1.0, 30, 15, 20, 2, 0, 2)]


def test_steps_under_capture_are_left_out() -> None:
    rows = [
        Row("step", "step", 1, 0, 10),
        Row("step", "step", 2, 10, 99, counters={"capture": 1}),
    ]
    table = gaps(loaded(rows))
    assert table.column("total") == [10]
    assert table.note == "Excluded steps: 1 captured."


def test_it_abstains_without_steps() -> None:
    assert gaps(loaded([])).abstained == "no complete step was recorded"
