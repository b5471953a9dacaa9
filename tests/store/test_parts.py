"""A large table is written some rows at a time, and is the same table when it is read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.store import duck, parquet
from lightning_rlprof.store.kept import kept_table
from lightning_rlprof.store.parquet import write_table
from lightning_rlprof.table import Column, ColumnRows, PartRows, Table

COLUMNS = (
    Column("thread", "count"),
    Column("name", "text"),
    Column("start", "duration", "ns"),
    Column("parent", "count"),
    Column("value", "number"),
)
NAMES = ["gemm", "never", "copy 'n' paste", "aten::mm"]
ROWS = 1_000


def columns(low: int, high: int) -> list[Any]:
    at = np.arange(low, high)
    parent = np.ma.masked_array(at // 2, (at >= 200) & (at < 300))
    code = np.where(at % 5 == 0, -1, np.where(at < 500, 0, np.where(at % 2, 2, 3)))
    return [
        np.broadcast_to(np.int64(7), high - low),
        (code, NAMES),
        at * 10**15,
        parent if parent.mask.any() else np.arange(low, high) // 2,
        at / 3,
    ]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(parquet, "AT_ONCE", 64)
    rows = PartRows(ROWS, lambda low, high: ColumnRows(columns(low, high)))
    return Table("calls", COLUMNS, rows, "a note")


def test_rows_written_in_parts_are_read_as_they_were(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "calls.parquet"
    write_table(table, "calls", path)

    found = kept_table(path, "calls")

    assert list(found.rows) == list(ColumnRows(columns(0, ROWS)))
    assert (found.columns, found.note) == (COLUMNS, "a note")
    assert [*tmp_path.iterdir()] == [path]
    assert "columns" not in vars(table.rows)  # they never were in memory together


def test_parts_and_one_go_say_the_same(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(table, "calls", tmp_path / "parts")
    monkeypatch.setattr(parquet, "AT_ONCE", ROWS)
    write_table(table, "calls", tmp_path / "whole")

    parts, whole = (parquet.read_about(tmp_path / name) for name in ("parts", "whole"))

    assert parts == whole
    assert parts is not None
    assert parts["columns"][1]["texts"] == ["gemm", "copy 'n' paste", "aten::mm"]


def read_halves(low: int, high: int) -> ColumnRows:
    at = np.arange(low, high)
    return ColumnRows([at if low < 500 else at / 2])


def test_a_column_may_be_whole_in_one_part_and_broken_in_another(
    table: Table, tmp_path: Path
) -> None:
    halves = Table("calls", COLUMNS[-1:], PartRows(ROWS, read_halves))

    write_table(halves, "calls", tmp_path / "calls")

    found = kept_table(tmp_path / "calls", "calls").column("value")
    assert list(found) == [at if at < 512 else at / 2 for at in range(ROWS)]


def test_a_large_table_leaves_no_database_open(table: Table, tmp_path: Path) -> None:
    duck.writer().close()

    write_table(table, "calls", tmp_path / "calls")

    assert duck._database.cache_info().currsize == 0


def test_what_cannot_be_written_leaves_no_parts(table: Table, tmp_path: Path) -> None:
    (tmp_path / "calls").mkdir()

    with pytest.raises(OSError, match="calls"):
        write_table(table, "calls", tmp_path / "calls")

    assert [path.name for path in tmp_path.iterdir()] == ["calls"]
