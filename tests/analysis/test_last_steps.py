"""Of a run that is too large the last steps, whole, and it is said which."""

from lightning_rlprof.analysis.dag import dag
from lightning_rlprof.analysis.last_steps import last_steps
from tests.analysis.scripted import Script, play

RUN = play(Script(listed=True), 1).spans  # 8 ranks x 24 steps x 5 spans


def test_a_small_run_comes_back_as_it_is() -> None:
    assert last_steps(RUN) == (RUN, "")
    assert last_steps(RUN, most=len(RUN)) == (RUN, "")


def test_the_last_steps_stay_with_all_that_is_in_them() -> None:
    some, note = last_steps(RUN, most=len(RUN) - 1, kept=8 * 5 * 3 + 39)
    assert note == "Looked at are the last 3 of 24 steps."
    assert len(some) == 8 * 5 * 3
    tail = [row for row in range(len(RUN)) if RUN.step[row] > 21]
    assert [some.span(row) for row in range(len(some))] == [RUN.span(row) for row in tail]


def test_the_last_step_stays_however_large_it_is() -> None:
    some, note = last_steps(RUN, most=1, kept=1)
    assert (len(some), note) == (40, "Looked at are the last 1 of 24 steps.")


def test_the_graph_is_made_of_them_and_so_are_its_joins() -> None:
    whole, part = dag(RUN), dag(last_steps(RUN, most=1, kept=8 * 5 * 6)[0])
    assert not isinstance(whole, str)
    assert not isinstance(part, str)
    assert part.steps.tolist() == whole.steps.tolist()[-5:]
    assert part.wall_ns.tolist() == whole.wall_ns.tolist()[-5:]
