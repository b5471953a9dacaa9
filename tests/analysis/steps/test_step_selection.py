"""Of a run that is too large the last steps, whole, and it is said which.

What captures cost is told from steps of the same run, and not from too few of them.
"""

import numpy as np
import pytest

from lightning_rlprof.analysis.critical_path.step_graph import step_graph
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.steps.step_selection import (
    STATES,
    capture_slowdown,
    counted,
    last_steps,
    recent,
    states,
)
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, loaded
from tests.builders.scripted import Script, play


def _steps(*flags: str) -> list[Row]:
    return [
        Row("step", "step", n, n * 10, n * 10 + 10, counters={flag: 1} if flag else None)
        for n, flag in enumerate(flags, start=1)
    ]


def test_whole_steps_without_a_capture_count() -> None:
    spans = loaded(_steps("", "", "capture", "", "interrupted"))
    choice = counted(spans, spans.rows(kind="step"))

    assert choice.mask.tolist() == [True, True, False, True, False]
    assert choice.steps == 3
    assert choice.note == "Excluded steps: 1 captured, 1 interrupted."


def test_a_capture_on_one_rank_takes_the_step_from_all() -> None:
    spans = loaded(_steps("", "capture"), _steps("", ""))
    rows = spans.rows(kind="step")

    assert [STATES[code] for code in states(spans, rows)] == ["complete", "capture"] * 2
    assert counted(spans, rows).steps == 1


def _lasting(*lengths: int) -> list[Row]:
    ends = np.cumsum(lengths).tolist()
    return [
        Row("step", "step", number, end - length, end)
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True), start=1)
    ]


@pytest.mark.parametrize(
    ("lengths", "warm"),
    [
        ([50, *[10] * 9], 1),
        ([50, 30, *[10] * 18], 2),
        ([14, *[10] * 9], 0),
        ([50, 30, *[10] * 8], 1),  # one step in ten at most
        ([50, 10, 10, 10], 1),
        ([50, 10, 10], 0),  # three steps are left
        ([10, 50, *[10] * 18], 0),  # only from the start on
        ([50, 10, 10, 10, 50, 10, 10, 10, 50, 10], 0),  # the usual long step
    ],
)
def test_long_first_steps_are_warm_up(lengths: list[int], warm: int) -> None:
    spans = loaded(_lasting(*lengths))
    found = [STATES[code] for code in states(spans, spans.rows(kind="step"))]
    assert found == ["warm-up"] * warm + ["complete"] * (len(lengths) - warm)
    note = counted(spans, spans.rows(kind="step")).note
    assert note == (f"Excluded steps: {warm} warm-up." if warm else "")
    # The job has a row for it, and every nanosecond is there once.
    table = ledger(spans)
    totals = dict(zip(table.column("category"), table.column("total"), strict=True))
    assert totals.get("warm-up", 0) == sum(lengths[:warm])
    assert sum(totals.values()) == sum(lengths)


def test_warm_up_is_the_same_on_all_ranks_and_for_a_choice_of_ranks() -> None:
    spans = loaded(_lasting(40, *[10] * 9), _lasting(10, *[10] * 9))
    for rows in (spans.rows(kind="step"), spans.rows(kind="step", rank=1)):
        found = [STATES[code] for code in states(spans, rows)]
        assert found.count("warm-up") == len(rows) // 10


def test_an_interrupted_capture_is_interrupted() -> None:
    rows = [Row("step", "step", 1, 0, 1, counters={"capture": 1, "interrupted": 1})]
    spans = loaded(rows)
    assert [STATES[code] for code in states(spans, spans.rows(kind="step"))] == ["interrupted"]


def test_where_no_step_is_complete_all_count_and_it_is_said() -> None:
    spans = loaded(_steps("capture", "interrupted"))
    choice = counted(spans, spans.rows(kind="step"))

    assert choice.mask.all()
    assert choice.note == ("No complete steps, so 1 captured and 1 interrupted steps are included.")


def test_a_flag_on_another_span_is_not_about_the_step() -> None:
    rows = [*_steps("", ""), Row("a", "stage", 1, 12, 13, counters={"capture": 1})]
    spans = loaded(rows)
    assert counted(spans, spans.rows(kind="step")).note == ""


RUN = play(Script(listed=True), 1).spans  # 8 ranks x 24 steps x 5 spans


def test_a_small_run_comes_back_as_it_is() -> None:
    assert last_steps(RUN) == (RUN, "")
    assert last_steps(RUN, most=len(RUN)) == (RUN, "")


def test_the_last_steps_stay_with_all_that_is_in_them() -> None:
    some, note = last_steps(RUN, most=len(RUN) - 1, kept=8 * 5 * 3 + 39)
    assert note == "Only the last 3 of 24 steps are analyzed, because the run is large."
    assert len(some) == 8 * 5 * 3
    tail = [row for row in range(len(RUN)) if RUN.step[row] > 21]
    assert [some.span(row) for row in range(len(some))] == [RUN.span(row) for row in tail]


def test_the_last_step_stays_however_large_it_is() -> None:
    some, note = last_steps(RUN, most=1, kept=1)
    assert (len(some), note) == (
        40,
        "Only the last 1 of 24 steps are analyzed, because the run is large.",
    )


def test_the_graph_is_made_of_them_and_so_are_its_joins() -> None:
    whole, part = step_graph(RUN), step_graph(last_steps(RUN, most=1, kept=8 * 5 * 6)[0])
    assert not isinstance(whole, str)
    assert not isinstance(part, str)
    assert part.steps.tolist() == whole.steps.tolist()[-5:]
    assert part.wall_ns.tolist() == whole.wall_ns.tolist()[-5:]


def test_recent_a_small_run_comes_back_as_it_is() -> None:
    spans = play(Script(steps=3), 0).spans
    assert recent(spans) == (0, "")


def test_of_a_large_run_the_last_whole_steps_are_left_on_all_ranks() -> None:
    spans = play(Script(ranks=3, steps=10), 0).spans
    first, note = recent(spans, most=3 * 5 * 4 + 7)
    assert note == "Only the last 4 steps are compared, because the run is large."
    assert first == 7
    chosen = counted(spans, spans.rows(kind="step"), first)
    assert chosen.steps == 4
    assert np.unique(spans.step[spans.rows(kind="step")[chosen.mask]]).tolist() == [7, 8, 9, 10]


def test_one_step_is_left_however_large_it_is() -> None:
    spans = play(Script(ranks=3, steps=4), 0).spans
    first, note = recent(spans, most=2)
    assert first == 4
    assert "last 1 steps" in note


def steps(*lengths: int, captured: tuple[int, ...] = ()) -> Spans:
    rows, now = [], 0
    for number, length in enumerate(lengths, start=1):
        counters = {"capture": 1} if number in captured else None
        rows.append(Row("step", "step", number, now, now + length, counters=counters))
        now += length
    return loaded(rows)


def test_it_is_the_ratio_of_medians_without_the_first_step() -> None:
    spans = steps(900, 100, 110, 90, 120, 130, 125, captured=(5, 6, 7))
    assert capture_slowdown(spans) == pytest.approx(0.25)
    assert capture_slowdown(steps(900, 100, 100, 100, 50, 50, 50, captured=(5, 6, 7))) == -0.5


def test_it_is_not_known_without_three_steps_of_each() -> None:
    assert capture_slowdown(steps(*[100] * 9)) is None
    assert capture_slowdown(steps(*[100] * 9, captured=(2, 3))) is None
    assert capture_slowdown(steps(*[100] * 5, captured=(2, 3, 4))) is None
    assert capture_slowdown(loaded([Row("a", "stage", 1, 0, 9)])) is None
