"""Rows come in order however they are cut into parts and blocks, with what belongs beside them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.loaders import chrome_sort
from lightning_rlprof.loaders.chrome_scratch import Grown
from lightning_rlprof.loaders.chrome_sort import beside, heads, in_order

ROW = st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(0, 2))
PARTS = st.lists(st.lists(ROW, max_size=9), max_size=6)


def columns(rows: list[tuple[int, ...]], first: int) -> dict[str, Any]:
    array = np.array(rows, np.int64).reshape(-1, 3)
    return {
        **{name: array[:, at] for at, name in enumerate("abc")},
        "place": np.arange(first, first + len(rows)),
    }


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_sort, "_STEP", 2)


@given(PARTS, st.integers(1, 2), st.integers(1, 7))
def test_all_rows_come_in_order_and_alike_ones_as_they_came(
    parts: list[list[tuple[int, ...]]], whole: int, size: int
) -> None:
    rows = [row for part in parts for row in part]
    firsts = np.cumsum([0, *map(len, parts)]).tolist()
    cut = [columns(part, first) for part, first in zip(parts, firsts, strict=False)]

    blocks = list(in_order(cut, "a", "b", "c", whole=whole, rows=size))

    found = [place for block in blocks for place in block["place"].tolist()]
    assert found == sorted(range(len(rows)), key=lambda place: (rows[place], place))
    groups = [{rows[place][:whole] for place in block["place"].tolist()} for block in blocks]
    assert sum(map(len, groups)) == len(set().union(*groups))


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 9), st.integers(1, 9))
def test_what_belongs_beside_a_row_stands_there(told: list[bool], size: int, cut: int) -> None:
    own = Grown({"number": np.int64})
    own.add({"number": np.arange(len(told))})
    rows = np.flatnonzero(told)
    others = (
        {"row": rows[low : low + cut], "twice": 2 * rows[low : low + cut]}
        for low in range(0, len(rows), cut)
    )

    parts = list(beside(own, others, {"twice": -1}, size))

    found = [pair for part in parts for pair in zip(part["number"], part["twice"], strict=True)]
    assert found == [(row, 2 * row if told[row] else -1) for row in range(len(told))]


def test_parts_that_follow_in_time_are_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, size, looks = 64, 8, []
    part = Grown.part

    def counted(self: Grown, *of: Any) -> Any:
        looks.append(of)
        return part(self, *of)

    monkeypatch.setattr(Grown, "part", counted)
    rows = [{"a": np.arange(at * size, (at + 1) * size)} for at in range(parts)]

    blocks = [block["a"] for block in in_order(rows, "a", rows=size)]

    assert np.concatenate(blocks).tolist() == list(range(parts * size))
    assert len(looks) < 12 * parts  # not 64 times 64


def test_heads_are_the_first_of_those_that_are_alike() -> None:
    assert heads(np.array([1, 1, 2, 2]), np.array([0, 0, 0, 5])).tolist() == [0, 2, 3]
