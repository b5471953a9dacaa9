"""Cells that hold nothing, or what cannot be: they cost themselves, and no sum."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.loaders.ascend.reader import read_ascend
from tests.builders.ascend_output import EPOCH, capture_folder, us
from tests.builders.ascend_recorded import (
    ABSENT,
    DATA,
    DATABASE,
    MAIN_DATABASE,
    OUTPUT,
    TEXT,
    column,
    copied,
)


def edited(folder: Path, sql: Iterable[str]) -> Path:
    with closing(sqlite3.connect(folder / OUTPUT / MAIN_DATABASE.name)) as database, database:
        for one in sql:
            database.execute(one)
    return folder


@pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)
@pytest.mark.parametrize("cells", ["ddr = NULL", "ddr = NULL, hbm = NULL"])
def test_memory_of_a_process_that_is_not_told_is_not_known(tmp_path: Path, cells: str) -> None:
    folder = edited(copied(DATABASE, tmp_path / "a_ascend_pt"), [f"UPDATE NPU_MEM SET {cells}"])

    run = read_ascend(folder)

    sizes = zip(column(run, "memory", "component"), column(run, "memory", "reserved"), strict=True)
    assert {size for component, size in sizes if component == "APP"} == {None}


@pytest.mark.parametrize("wrong", ["1.000", us(EPOCH + 10**18)])
def test_a_kernel_at_an_impossible_time_is_left_out(tmp_path: Path, wrong: str) -> None:
    times: list[Any] = [us(EPOCH + at * 1_000) for at in range(5)]
    lines = [f"Mul,{at},1.5" for at in [*times, wrong]]
    text = "\n".join(["Name,Start Time(us),Duration(us)", *lines, ""])
    (capture_folder(tmp_path) / "kernel_details.csv").write_text(text)

    run = read_ascend(tmp_path)

    assert run.unix_ns == EPOCH
    assert run.table("kernels").column("start") == [0, 1_000, 2_000, 3_000, 4_000]
    assert "skipped 1 rows with impossible times" in run.table("kernels").note


@pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)
@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("memory_record.csv", "memory"),
        ("step_trace_time.csv", "step_trace"),
    ],
)
def test_a_column_that_a_file_lacks_is_named(tmp_path: Path, name: str, table: str) -> None:
    assert not read_ascend(TEXT[0]).table(table).note
    folder = copied(TEXT[0], tmp_path / "a_ascend_pt")
    path = folder / OUTPUT / name
    heads, _, rest = path.read_text().partition("\n")
    path.write_text(heads.replace(heads.split(",")[0], "Other", 1) + "\n" + rest)

    assert f"{name}: has no column " in read_ascend(folder).table(table).note
