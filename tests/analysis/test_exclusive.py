"""Runs that are complete tables, against the same runs when nothing is made of that."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis import NAMED
from lightning_rlprof.analysis.exclusive import UNTRACED, Cells
from lightning_rlprof.analysis.partition import Flat, partition
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Table
from tests.runs import Row, loaded

TABLES: dict[str, Callable[[Spans], Table]] = {
    **{name: NAMED[name] for name in ("stages", "steps", "ranks", "gaps", "coverage")},
    "stages per rank": partial(stages, per_rank=True),
}


@st.composite
def complete_runs(draw: st.DrawFn) -> list[list[Row]]:
    """Draw ranks whose steps have the same stages in the same order; some under capture."""
    names = draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(1, 3))]
    capture = draw(st.sets(st.integers(1, 5), max_size=3))
    least = draw(st.integers(0, 1))  # zero: a step may be covered whole
    ranks = []
    for _ in range(draw(st.integers(1, 3))):
        rows, now = [Row("z", "region", 0, 0, 1)], 5
        for step in range(1, draw(st.integers(1, 5)) + 1):
            begin = now
            for name in names:
                start = now + draw(st.integers(least, 2))
                now = start + draw(st.integers(1, 3))
                rows.append(Row(name, "stage", step, start, now))
            counters = {"capture": 1} if step in capture else None
            now += draw(st.integers(0, 2))
            rows.append(Row("step", "step", step, begin, now, counters=counters))
        ranks.append(draw(st.permutations(rows)))
    return ranks


@settings(max_examples=200, deadline=None)
@given(complete_runs())
def test_a_complete_table_has_the_answers_of_any_other_run(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    own = partition(spans).divided
    assert isinstance(own, Flat)
    assert own.each > 0
    found = {name: table(spans) for name, table in TABLES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_rlprof.analysis.partition.flat", lambda spans, steps: None)
        painted = replace(spans)
        for name, table in TABLES.items():
            other = table(painted)
            assert list(found[name].rows) == list(other.rows)
            assert found[name].note == other.note


def test_steps_with_other_stages_or_one_twice_are_no_complete_table() -> None:
    steps = [Row("step", "step", n, n * 10, n * 10 + 10) for n in range(2)]
    for names in ("abac", "abba", "aaaa"):
        stages = [
            Row(name, "stage", at // 2, at // 2 * 10 + at % 2 * 5, at // 2 * 10 + at % 2 * 5 + 4)
            for at, name in enumerate(names)
        ]
        own = partition(loaded([*steps, *stages])).divided
        assert isinstance(own, Flat)
        assert own.each == 0


def test_cells_of_a_table_are_columns_too() -> None:
    cells = Cells(np.array([1, 2, 3, 4]), names=np.array([UNTRACED, 7]))
    assert cells.step.tolist() == [0, 0, 1, 1]
    assert cells.name.tolist() == [UNTRACED, 7, UNTRACED, 7]
    for place in ([0, 1], [1, 0], [0, -1], [0, 0], [-1, -1]):
        columns = Cells(cells.ns, (cells.step, cells.name))
        own, other = (each.sums(np.array(place), 2, 9) for each in (cells, columns))
        assert own.tolist() == other.tolist()
