"""Bounds hold what they bound, places know their step, and queries name just the spans meant."""

import numpy as np
import pytest

from lightning_rlprof.analysis.diagnosis.evidence import (
    place_at,
    place_of,
    quoted,
    share_interval,
    spans_query,
)
from lightning_rlprof.run import Run
from tests.builders.runs import Row, loaded


def test_bounds_of_equal_pieces_are_their_share_and_of_others_hold_it() -> None:
    assert share_interval(np.full(9, 2.0), np.full(9, 8.0)) == pytest.approx((0.25, 0.25))
    own = np.random.default_rng(3).uniform(0, 1, 50)
    low, high = share_interval(own, np.ones(50))
    assert low < own.mean() < high
    assert share_interval(own, np.ones(50), own + 0.5) == pytest.approx((low, high + 0.5))
    assert share_interval(np.zeros(3), np.zeros(3)) == (0.0, 0.0)


def test_bounds_miss_the_truth_as_seldom_as_they_say() -> None:
    missed = 0
    for seed in range(300):
        own = np.random.default_rng(seed).gamma(4.0, 0.05, 40)
        low, high = share_interval(own, np.ones(40))
        missed += not low <= 0.2 <= high
    assert missed <= 300 * 0.09


def test_very_many_pieces_are_drawn_with_their_neighbours_and_none_is_left_out() -> None:
    random = np.random.default_rng(5)
    own, whole = random.gamma(2.0, 1.0, 100_003), np.full(100_003, 8.0)
    low, high = share_interval(own, whole)
    wide = 2 * 1.96 * own.std() / 8 / np.sqrt(len(own))
    assert low < own.sum() / whole.sum() < high
    assert high - low == pytest.approx(wide, rel=0.15)


def test_a_place_knows_the_step_of_its_own_rank() -> None:
    first = [Row("step", "step", 1, 0, 10), Row("step", "step", 2, 10, 20)]
    spans = loaded(first, [Row("step", "step", 7, 5, 15)])
    assert place_at(spans, 0, 10, 12) == (0, 2, 10, 12)
    assert place_at(spans, 1, 10, 12) == (1, 7, 10, 12)
    assert place_at(spans, 1, 15, 16) == (1, None, 15, 16)
    assert place_at(spans, 1, 0, 1) == (1, None, 0, 1)
    assert place_of(spans, np.array([1, 0])) == (0, 2, 10, 20)
    assert place_of(spans, np.array([], dtype=np.int64)) is None


def test_a_query_returns_the_spans_that_were_named_and_texts_are_quoted() -> None:
    spans = loaded([Row("it's", "stage", 1, 0, 4), Row("b", "stage", 1, 4, 9)])
    table = Run.of(spans).sql(spans_query(spans, [1, 0]))
    assert table.column("id") == [int(spans.id[1]), int(spans.id[0])]
    found = Run.of(spans).sql(f"select name from spans where name = {quoted(spans.names[0])}")
    assert found.rows == [(spans.names[0],)]
