"""Columns come back as they were put aside, or stay where that is not possible."""

import tempfile
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.loaders import chrome_scratch
from lightning_rlprof.loaders.chrome_scratch import Grown, Scratch

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
        found = columns.column(name)
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

    def fileno(self) -> int:
        return int(self._file.fileno())


@pytest.mark.parametrize("room", [0, 5, 12, 100, 150])
def test_a_full_disk_leaves_the_rest_in_memory(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed below
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: FullDisk(room, file))

    columns, expected = grown(7, {1, 3, 5})

    assert {name: columns.column(name).tolist() for name in TYPES} == expected
    file.close()


def test_no_directory_for_temporary_files_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(**_: Any) -> Any:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", nowhere)

    columns, expected = grown(7, {1, 3, 5})

    assert columns.column("time").tolist() == expected["time"]


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
    monkeypatch.setattr(chrome_scratch, "_OWN", 100)
    columns = Grown(TYPES)
    for _ in range(5):
        columns.add({name: np.arange(4, dtype=kind) for name, kind in TYPES.items()})

    assert sum(map(len, columns._parts["time"])) == 8  # 12 rows of 12 bytes are beyond it
    assert columns.column("time").tolist() == [*range(4)] * 5


def test_nothing_put_aside_is_nothing_to_read() -> None:
    with pytest.raises(ValueError, match="nothing was put aside"):
        Scratch().read(np.int64, 1, 0)
