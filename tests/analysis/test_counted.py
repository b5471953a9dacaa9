from lightning_rlprof.analysis.counted import STATES, counted, states
from tests.runs import Row, loaded


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
    assert choice.note == "Steps left out: 1 under capture, 1 interrupted."


def test_a_capture_on_one_rank_takes_the_step_from_all() -> None:
    spans = loaded(_steps("", "capture"), _steps("", ""))
    rows = spans.rows(kind="step")

    assert [STATES[code] for code in states(spans, rows)] == ["complete", "capture"] * 2
    assert counted(spans, rows).steps == 1


def test_an_interrupted_capture_is_interrupted() -> None:
    rows = [Row("step", "step", 1, 0, 1, counters={"capture": 1, "interrupted": 1})]
    spans = loaded(rows)
    assert [STATES[code] for code in states(spans, spans.rows(kind="step"))] == ["interrupted"]


def test_where_no_step_is_complete_all_count_and_it_is_said() -> None:
    spans = loaded(_steps("capture", "interrupted"))
    choice = counted(spans, spans.rows(kind="step"))

    assert choice.mask.all()
    assert choice.note == (
        "No step is complete: 1 under capture and 1 interrupted are counted all the same."
    )


def test_a_flag_on_another_span_is_not_about_the_step() -> None:
    rows = [*_steps("", ""), Row("a", "stage", 1, 12, 13, counters={"capture": 1})]
    spans = loaded(rows)
    assert counted(spans, spans.rows(kind="step")).note == ""
