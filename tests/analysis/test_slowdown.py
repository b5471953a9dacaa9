"""What captures cost is told from steps of the same run, and not from too few of them."""

import pytest

from lightning_rlprof.analysis.slowdown import slowdown
from lightning_rlprof.spans import Spans
from tests.runs import Row, loaded


def steps(*lengths: int, captured: tuple[int, ...] = ()) -> Spans:
    rows, now = [], 0
    for number, length in enumerate(lengths, start=1):
        counters = {"capture": 1} if number in captured else None
        rows.append(Row("step", "step", number, now, now + length, counters=counters))
        now += length
    return loaded(rows)


def test_it_is_the_ratio_of_medians_without_the_first_step() -> None:
    spans = steps(900, 100, 110, 90, 120, 130, 125, captured=(5, 6, 7))
    assert slowdown(spans) == pytest.approx(0.25)
    assert slowdown(steps(900, 100, 100, 100, 50, 50, 50, captured=(5, 6, 7))) == -0.5


def test_it_is_not_known_without_three_steps_of_each() -> None:
    assert slowdown(steps(*[100] * 9)) is None
    assert slowdown(steps(*[100] * 9, captured=(2, 3))) is None
    assert slowdown(steps(*[100] * 5, captured=(2, 3, 4))) is None
    assert slowdown(loaded([Row("a", "stage", 1, 0, 9)])) is None
