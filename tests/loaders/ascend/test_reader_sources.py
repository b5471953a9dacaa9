"""Which files of a capture are read: its database, or without one its text files."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lightning_rlprof.loaders.ascend.reader import read_ascend
from tests.builders.ascend_recorded import (
    ABSENT,
    DATA,
    DATABASE,
    MAIN_DATABASE,
    OUTPUT,
    TEXT,
    copied,
)

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)


def with_broken(folder: Path, table: str) -> Path:
    """Put a database beside the text, one page of one of its tables zeroed."""
    path = folder / OUTPUT / MAIN_DATABASE.name
    path.write_bytes(MAIN_DATABASE.read_bytes())
    with closing(sqlite3.connect(path)) as database:
        (size,) = database.execute("PRAGMA page_size").fetchone()
        sql = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (root,) = database.execute(sql, (table,)).fetchone()
    data = bytearray(path.read_bytes())
    page = data[(root - 1) * size : root * size]
    if page[0] == 5:  # inner: its last child is the last leaf
        root = int.from_bytes(page[8:12], "big")
    data[(root - 1) * size : root * size] = bytes(size)
    path.write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("broken", "table"),
    [("TASK", "kernels"), ("PYTORCH_API", "calls")],
)
def test_a_damaged_table_of_a_database_has_no_rows_and_the_others_have(
    tmp_path: Path, broken: str, table: str
) -> None:
    folder = with_broken(copied(TEXT[0], tmp_path / "a_ascend_pt"), broken)

    run = read_ascend(folder)

    assert "cannot be read as SQLite" in (run.table(table).abstained or "")
    assert len(run.table("memory").rows) == len(read_ascend(DATABASE).table("memory").rows)


def test_with_both_formats_every_table_is_that_of_the_database(tmp_path: Path) -> None:
    folder = copied(TEXT[0], tmp_path / "a_ascend_pt")
    for path in (DATABASE / OUTPUT).iterdir():
        shutil.copy(path, folder / OUTPUT)

    both, database = read_ascend(folder), read_ascend(DATABASE)

    assert both.tables.keys() == database.tables.keys()
    for name in database.tables:
        assert list(both.table(name).rows) == list(database.table(name).rows), name


def test_without_rows_in_kernel_details_the_trace_has_the_kernels(tmp_path: Path) -> None:
    folder = copied(TEXT[0], tmp_path / "a_ascend_pt")
    (folder / OUTPUT / "kernel_details.csv").write_text("")
    table = read_ascend(folder).table("kernels")
    (folder / OUTPUT / "kernel_details.csv").unlink()

    assert len(table.rows) == len(read_ascend(folder).table("kernels").rows) > 0
    assert "kernel_details.csv: is empty" in table.note
