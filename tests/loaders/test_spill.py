"""Columns come back as they were put aside, or stay where that is not possible.

Rows come in order however they are cut into parts and blocks, with what belongs beside them.
"""

import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlprof.loaders import spill
from lightning_rlprof.loaders.spill import Grown, Scratch, beside, in_order

TYPES: dict[str, Any] = {"code": np.int32, "time": np.int64}


def grown(parts: int, aside: set[int]) -> tuple[Grown, dict[str, list[int]]]:
    """Add parts of one row, two rows and so on, and put aside after some of them."""
    columns, expected = Grown(TYPES, Scratch()), {name: [] for name in TYPES}  # type: ignore[var-annotated]
    for part in range(parts):
        rows = {name: np.arange(part + 1, dtype=kind) for name, kind in TYPES.items()}
        assert columns.add(rows) == (part + 1) * 12
        for name in TYPES:
            expected[name] += rows[name].tolist()
        if part in aside:
            columns.put_aside()
    return columns, expected


@pytest.mark.parametrize("aside", [set(), {0}, {2, 3}, {0, 1, 2, 3, 4, 5, 6}])
def test_columns_come_back_in_the_order_in_which_they_grew(aside: set[int]) -> None:
    columns, expected = grown(7, aside)

    for name, kind in TYPES.items():
        found = columns.rows()[name]
        assert (found.tolist(), found.dtype) == (expected[name], kind)
    assert len(columns) == 28


class FullDisk:
    """A file that takes some bytes and then no more."""

    def __init__(self, room: int, file: Any) -> None:
        self._room, self._file = room, file

    def write(self, data: Any) -> int:
        if not self._room:
            raise OSError(28, "No space left on device")
        count = min(len(data), self._room)
        self._room -= count
        return int(self._file.write(data[:count]))

    def close(self) -> None:
        self._file.close()

    def seek(self, at: int) -> int:
        return int(self._file.seek(at))

    def readinto(self, into: Any) -> int:
        return int(self._file.readinto(into))


@pytest.mark.parametrize("room", [0, 5, 12, 100, 150])
def test_a_full_disk_leaves_the_rest_in_memory(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed below
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: FullDisk(room, file))

    columns, expected = grown(7, {1, 3, 5})

    assert {name: columns.rows()[name].tolist() for name in TYPES} == expected
    file.close()


def test_no_directory_for_temporary_files_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(**_: Any) -> Any:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", nowhere)

    columns, expected = grown(7, {1, 3, 5})

    assert columns.rows()["time"].tolist() == expected["time"]


@pytest.mark.parametrize("aside", [set(), {0}, {2, 3}])
def test_some_rows_come_back_from_wherever_they_lie(aside: set[int]) -> None:
    columns, expected = grown(4, aside)

    for low in range(11):
        for high in range(low, 11):
            for name in TYPES:
                assert columns.part(name, low, high).tolist() == expected[name][low:high]
    parts = list(columns.parts(3))
    assert [len(part["time"]) for part in parts] == [3, 3, 3, 1]
    assert [each for part in parts for each in part["time"].tolist()] == expected["time"]


def test_columns_without_a_place_of_their_own_are_put_aside_when_they_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spill, "_OWN", 100)
    columns = Grown(TYPES)
    for _ in range(5):
        columns.add({name: np.arange(4, dtype=kind) for name, kind in TYPES.items()})

    assert sum(map(len, columns._parts["time"])) == 8  # 12 rows of 12 bytes are beyond it
    assert columns.rows()["time"].tolist() == [*range(4)] * 5


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
    monkeypatch.setattr(spill, "_STEP", 2)


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
