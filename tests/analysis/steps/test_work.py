"""Amounts of work by rank, step and slot: a stage's own, else those of its rank's step."""

import numpy as np

from lightning_rlprof.analysis.steps.rank_matrix import counted_amounts
from lightning_rlprof.tables.arrays import Float64s

NONE = np.nan


def amounts(**counters: Float64s) -> list[list[list[list[float]]]]:
    """Return the amounts of two slots of one rank in two steps, in both of which they ran."""
    there = np.ones((1, 2, 2), bool)
    return [each.tolist() for each in counted_amounts(counters.get, there, there, np.arange(2))]


def test_a_stage_without_counts_has_what_its_rank_counted_in_the_step() -> None:
    tokens = np.array([[[3.0, NONE], [5.0, NONE]]])
    assert amounts(tokens=tokens) == [[[[3.0, 3.0], [5.0, 5.0]]]]


def test_all_amounts_that_were_counted_are_used_and_none_without_tokens() -> None:
    every = np.array([[[3.0, 4.0], [5.0, 6.0]]])
    assert amounts(tokens=every, tokens_sq=every**2, tokens_max=every) == [
        each.tolist() for each in (every, every**2, every)
    ]
    assert amounts(tokens_sq=every) == []


def test_where_a_stage_did_not_run_it_had_nothing_to_do_and_a_lost_count_is_unknown() -> None:
    tokens = np.array([[[3.0, NONE], [NONE, NONE]], [[4.0, NONE], [6.0, NONE]]])
    known = np.array([[[True, True], [False, True]], [[True, True], [True, True]]])
    lost = counted_amounts({"tokens": tokens}.get, np.ones_like(known), known, np.arange(2))
    assert np.isnan(lost[0][0, 1]).tolist() == [True, True]
    absent = counted_amounts({"tokens": tokens}.get, known, known, np.arange(2))
    assert absent[0][0, 1].tolist() == [0.0, 0.0]
