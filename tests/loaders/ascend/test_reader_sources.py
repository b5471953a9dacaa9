"""Where one source of a capture is damaged, the sound ones beside it are read, and that is said."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lightning_rlprof.loaders.ascend.reader import read_ascend
from tests.builders.ascend_recorded import ABSENT, DATA, MAIN_DATABASE, OUTPUT, TEXT, copied

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
    [
        ("TASK", "kernels"),
        ("TASK", "operator_types"),
        ("PYTORCH_API", "operators"),
        ("OP_MEMORY", "operator_memory"),
    ],
)
def test_a_damaged_database_hides_no_text_beside_it(
    tmp_path: Path, broken: str, table: str
) -> None:
    folder = with_broken(copied(TEXT[0], tmp_path / "a_ascend_pt"), broken)

    run = read_ascend(folder)
    found, text = run.table(table), read_ascend(TEXT[0]).table(table)

    assert len(found.rows) == len(text.rows) > 0
    assert "cannot be read as SQLite" in found.note
    damage = f"{MAIN_DATABASE.name} is damaged in its table {broken}"
    assert damage in [problem.text for problem in run.warnings]


@pytest.mark.parametrize(
    ("name", "table", "content"),
    [
        ("communication.json", "communication", ""),
        ("communication.json", "communication", '{"step50": {"p2p"'),
        ("kernel_details.csv", "kernels", ""),
    ],
)
def test_an_empty_or_damaged_file_is_as_one_that_is_not_there_but_said(
    tmp_path: Path, name: str, table: str, content: str
) -> None:
    folder = copied(TEXT[0], tmp_path / "a_ascend_pt")
    (folder / OUTPUT / name).write_text(content)
    found = read_ascend(folder).table(table)
    (folder / OUTPUT / name).unlink()

    assert len(found.rows) == len(read_ascend(folder).table(table).rows) > 0
    assert name in found.note
