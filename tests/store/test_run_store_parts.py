"""A large table is a folder of files, one part in memory each, and the same table when read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import duckdb
import numpy as np
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store import duckdb_tables, parquet
from lightning_rlprof.store.cache import Cache
from lightning_rlprof.store.parquet import kept_table, write_table
from lightning_rlprof.tables.table import Column, ColumnRows, PartRows, Table

COLUMNS = (
    Column("thread", "count"),
    Column("name", "text"),
    Column("start", "time", "ns"),
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


def test_a_large_table_keeps_only_the_column_asked_for_last(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(table, "calls", tmp_path / "calls.parquet")
    found = kept_table(tmp_path / "calls.parquet", "calls")
    first, second = (column.name for column in COLUMNS[:2])
    every = [found.column(column.name) for column in COLUMNS]
    monkeypatch.setattr(parquet, "_MOST_CELLS", ROWS)

    again = [found.column(column.name) for column in COLUMNS]

    assert again == every
    reads: list[str] = []
    rows = cast("parquet.KeptRows", found.rows)
    ask = rows.columns._ask
    monkeypatch.setattr(rows.columns, "_ask", lambda query: reads.append(query) or ask(query))
    for name in (first, first, second, first):
        found.column(name)
    assert len(reads) == 3


def test_rows_written_in_parts_are_read_as_they_were(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "calls.parquet"
    write_table(table, "calls", path)

    found = kept_table(path, "calls")

    assert list(found.rows) == list(ColumnRows(columns(0, ROWS)))
    assert (found.columns, found.note) == (COLUMNS, "a note")
    assert [file.name for file in parquet.files_of(path)] == [
        f"{at:05d}-of-00016.parquet" for at in range(1, 17)
    ]
    assert "columns" not in vars(table.rows)  # they never were in memory together
    assert parquet.row_count([path]) == ROWS
    with duckdb.connect() as connection:  # as any tool that reads Parquet sees it
        rows = connection.execute(
            f"select name, start_ns from read_parquet('{path}/*.parquet')"
        ).fetchall()
    assert rows == [(name, start) for _, name, start, *_ in table.rows]


def test_parts_number_a_text_that_comes_late_after_those_before(
    tmp_path: Path, table: Table
) -> None:
    turned = PartRows(
        ROWS,
        lambda low, high: ColumnRows([(np.where(np.arange(low, high) < 500, 3, 0), NAMES)]),
    )

    write_table(Table("calls", COLUMNS[1:2], turned), "calls", tmp_path / "calls")

    found = kept_table(tmp_path / "calls", "calls")
    assert found.column("name") == ["aten::mm"] * 500 + ["gemm"] * 500


@pytest.mark.parametrize(
    "break_it",
    [
        lambda files: files[3].unlink(),
        lambda files: files[-1].unlink(),
        lambda files: files[3].write_bytes(files[3].read_bytes()[:-1]),
        lambda files: [file.unlink() for file in files],
        lambda files: (files[0].parent / "00017-of-00016.parquet").write_bytes(
            files[0].read_bytes()
        ),
    ],
    ids=["one lacks", "the last lacks", "one is cut", "all lack", "one too many"],
)
def test_a_table_with_a_broken_part_is_not_whole_and_makes_room(
    table: Table, tmp_path: Path, break_it: Callable[[list[Path]], object]
) -> None:
    cache = Cache(tmp_path, ("calls",))
    cache.add(table, "calls")
    assert cache.has("calls")

    break_it(parquet.files_of(cache.file("calls")))
    assert not cache.has("calls")

    cache.add(table, "calls")
    assert cache.has("calls")
    assert list(kept_table(cache.file("calls"), "calls").rows) == list(table.rows)
    assert [path.name for path in tmp_path.iterdir()] == ["calls.parquet"]


def test_of_two_who_write_the_same_table_the_first_stays(table: Table, tmp_path: Path) -> None:
    cache = Cache(tmp_path, ("calls",))
    cache.add(table, "calls")
    first = cache.file("calls").stat().st_ino

    cache.add(table, "calls")

    assert cache.file("calls").stat().st_ino == first
    assert [path.name for path in tmp_path.iterdir()] == ["calls.parquet"]


def test_a_folder_takes_the_place_of_a_broken_file_and_a_file_of_a_folder(
    table: Table, tmp_path: Path
) -> None:
    cache = Cache(tmp_path, ("calls",))
    cache.file("calls").write_bytes(b"PAR1")
    cache.add(table, "calls")
    assert cache.has("calls")

    parquet.files_of(cache.file("calls"))[0].unlink()
    cache.add(Table("calls", COLUMNS[:1], [(1,)]), "calls")
    assert cache.file("calls").is_file()
    assert cache.has("calls")


def test_parts_and_one_go_say_the_same(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(table, "calls", tmp_path / "parts")
    monkeypatch.setattr(parquet, "AT_ONCE", ROWS)
    write_table(table, "calls", tmp_path / "whole")

    parts, whole = parquet.read_abouts([tmp_path / "parts", tmp_path / "whole"]).values()

    assert parts == whole
    assert parts["columns"][1]["texts"] == ["gemm", "copy 'n' paste", "aten::mm"]


def test_parts_that_differ_in_type_are_refused(table: Table, tmp_path: Path) -> None:
    def halves(low: int, high: int) -> ColumnRows:
        at = np.arange(low, high)
        return ColumnRows([at if low < 500 else at / 2])

    write_table(Table("calls", COLUMNS[-1:], PartRows(ROWS, halves)), "calls", tmp_path / "numbers")
    assert kept_table(tmp_path / "numbers", "calls").column("value")[-1] == (ROWS - 1) / 2

    with pytest.raises(TraceError, match="table calls: its parts differ in type"):
        write_table(
            Table("calls", COLUMNS[:1], PartRows(ROWS, halves)), "calls", tmp_path / "counts"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["numbers"]


def test_a_large_table_leaves_no_database_open(table: Table, tmp_path: Path) -> None:
    duckdb_tables.writer().close()

    write_table(table, "calls", tmp_path / "calls")

    assert duckdb_tables._database.cache_info().currsize == 0


def test_what_cannot_be_written_leaves_no_parts(table: Table, tmp_path: Path) -> None:
    (tmp_path / "calls").mkdir()

    with pytest.raises(OSError, match="calls"):
        write_table(table, "calls", tmp_path / "calls")

    assert [path.name for path in tmp_path.iterdir()] == ["calls"]
