import numpy as np

from lightning_rlprof.analysis.recent import recent
from tests.analysis.scripted import Script, play


def test_a_small_run_comes_back_as_it_is() -> None:
    spans = play(Script(steps=3), 0).spans
    assert recent(spans) == (spans, "")


def test_of_a_large_run_the_last_whole_steps_are_left_on_all_ranks() -> None:
    spans = play(Script(ranks=3, steps=10), 0).spans
    found, note = recent(spans, most=3 * 5 * 4 + 7)
    assert note == "Compared are the last 4 steps: with all, they were too many."
    assert np.unique(found.step).tolist() == [7, 8, 9, 10]
    assert len(found) == 3 * 5 * 4
    kept = np.flatnonzero(spans.step >= 7)
    assert list(found) == [spans.span(row) for row in kept.tolist()]


def test_one_step_is_left_however_large_it_is() -> None:
    spans = play(Script(ranks=3, steps=4), 0).spans
    found, note = recent(spans, most=2)
    assert np.unique(found.step).tolist() == [4]
    assert "last 1 steps" in note
