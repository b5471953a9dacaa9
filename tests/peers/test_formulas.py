"""The peers' formulas are what they publish: right where they can be, wrong where they must."""

import numpy as np
import pytest

from tests.builders.scripted import Script, Scripted, play
from tests.peers.formulas import FORMULAS
from tests.peers.harness import CASES, OURS, Score, scores


def run(**arrays: object) -> Scripted:
    spans = play(Script(ranks=2, steps=2), 0).spans
    values = {"came_ns": np.zeros((4, 3)), "waited_ns": np.ones((4, 3)), "sections_ns": None}
    return Scripted(spans, **{**values, **arrays})  # type: ignore[arg-type]


def test_each_formula_names_the_rank_of_its_definition() -> None:
    waits = np.array([[9.0, 9, 9], [1, 1, 1], [8, 8, 8], [7, 7, 7]])
    comes = np.array([[0.0, 0, 0], [5, 5, 5], [1, 1, 9], [2, 2, 2]])
    sections = np.array([[[10.0, 2]], [[10, 2]], [[20, 4]], [[11, 2]]])

    assert FORMULAS["longest collective"](run(waited_ns=waits)) == {0}
    assert FORMULAS["latest raw start"](run(came_ns=comes)) == {1}
    wide = np.array([[1.0, 1, 90], [1, 2, 1], [1, 1, 1], [1, 1, 50]])
    assert FORMULAS["widest collective"](run(came_ns=comes, waited_ns=wide)) == {2}
    assert FORMULAS["median ratio < 0.75"](run(sections_ns=sections)) == {2}
    assert FORMULAS["10 % less communication"](run(waited_ns=waits)) == {1, 2, 3}
    alone = np.array([[9.0], [1.0], [8.9], [8.8]])
    assert FORMULAS["outlier votes"](run(waited_ns=waits)) == set()
    assert FORMULAS["outlier votes"](run(waited_ns=alone)) == {1}


def test_outliers_take_four_different_durations() -> None:
    same = np.array([[9.0], [1.0], [9.0], [8.0]])
    assert FORMULAS["outlier votes"](run(waited_ns=same)) == set()


def test_many_ranks_are_asked_for_three_standard_deviations() -> None:
    waits = np.linspace(100, 101, 40)[:, None].repeat(2, axis=1)
    assert FORMULAS["outlier votes"](run(waited_ns=waits)) == set()
    waits[7] = 50
    assert FORMULAS["outlier votes"](run(waited_ns=waits)) == {7}


def test_a_score_counts_right_found_and_false() -> None:
    score = Score()
    for accused in ({1}, {1, 2}, set(), {3}):
        score.count(accused, {1})
    assert (score.windows, score.right, score.found, score.false) == (4, 1, 2, 2)


@pytest.mark.parametrize("case", ["healthy, uneven work", "one 10 % slow, clocks off by 5 ms"])
def test_all_are_asked_about_the_same_windows(case: str) -> None:
    found = scores(CASES[case], range(3_000, 3_005))
    assert list(found) == [OURS, *FORMULAS]
    assert {score.windows for score in found.values()} == {5}
    assert found[OURS].right > max(found[name].right for name in FORMULAS)
