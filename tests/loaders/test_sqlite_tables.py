"""Tables of SQLite files: absent columns, numbers kept as texts, damage, nothing written."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.sqlite_tables import SqliteTables
from lightning_rlprof.tables.kernels import UNKNOWN


def make(path: Path, *statements: str) -> SqliteTables:
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)
    return SqliteTables(path)


def test_numbers_kept_as_texts_are_read_to_the_last_digit(tmp_path: Path) -> None:
    tables = make(
        tmp_path / "a.db",
        "CREATE TABLE calls (start TEXT, size)",
        "INSERT INTO calls VALUES ('1736410576395167660', 7), ('12x', 1.5), ('', NULL), "
        "('-5', x'00'), ('99999999999999999999', '8')",
    )

    assert {
        name: column.tolist()
        for name, column in tables.numbers("calls", "start", "size", "no").items()
    } == {
        "start": [1_736_410_576_395_167_660, *[UNKNOWN] * 4],
        "size": [7, UNKNOWN, UNKNOWN, UNKNOWN, 8],
        "no": [UNKNOWN] * 5,
    }


def test_a_table_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    tables = make(tmp_path / "a.db", "CREATE TABLE empty (a)")

    assert [tables.has(name) for name in ("empty", "nothing")] == [False, False]
    assert len(tables.numbers("nothing", "a")["a"]) == 0
    assert len(tables.reals("nothing", "a")["a"]) == 0
    assert tables.texts("nothing", "a")[1] == []
    assert tables.strings(np.array([1]), "nothing") == {}
    assert tables.setting("nothing", "a") is None


def test_conditions_choose_rows_and_texts_are_looked_up_by_number(tmp_path: Path) -> None:
    tables = make(
        tmp_path / "a.db",
        "CREATE TABLE ids (id INTEGER, value TEXT)",
        "CREATE TABLE rows (name INTEGER, cost REAL, label TEXT)",
        *(f"INSERT INTO ids VALUES ({at}, 'text {at}')" for at in range(1_200)),
        "INSERT INTO rows VALUES (3, 1.5, 'x'), (700, NULL, NULL), (9999, 2, 'x')",
    )

    names = tables.numbers("rows", "name", where="cost IS NOT NULL")["name"]
    assert tables.strings(names, "ids") == {3: "text 3"}
    assert len(tables.strings(np.arange(1_200), "ids")) == 1_200
    assert tables.has("rows", "name", "cost")
    assert not tables.has("rows", "price")
    codes, texts = tables.texts("rows", "label")
    assert (codes.tolist(), texts) == ([0, -1, 0], ["x"])
    assert np.isnan(tables.reals("rows", "cost")["cost"]).tolist() == [False, True, False]


def test_views_are_not_run(tmp_path: Path) -> None:
    tables = make(tmp_path / "a.db", "CREATE TABLE t (a)", "CREATE VIEW v AS SELECT 1 AS a")

    assert "v" not in tables.columns
    assert not tables.has("v")


def test_what_is_no_database_is_refused_in_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a b%20?.db"
    path.write_bytes(b"hello" * 999)

    with pytest.raises(TraceError, match="cannot be read as SQLite") as error:
        SqliteTables(path)
    assert "\n" not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_an_error_whose_own_text_is_damaged_is_one_line(tmp_path: Path) -> None:
    """SQLite quotes the schema in its message, and Python fails to decode that."""
    path = tmp_path / "a.db"
    make(path, 'CREATE TABLE "gemm" (start)')
    path.write_bytes(path.read_bytes().replace(b"gemm", b"g\xd4mm").replace(b"(start)", b"(start "))
    with pytest.raises(TraceError, match=r"^[^\n]*a\.db: cannot be read as SQLite \([^\n]*\)$"):
        SqliteTables(path)


def test_errors_name_what_the_user_named(tmp_path: Path) -> None:
    path = tmp_path / "inner.db"
    make(path, "CREATE TABLE t (a)")
    tables = SqliteTables(path, source=Path("what.was.named"))
    path.unlink()

    with pytest.raises(TraceError, match=r"^what\.was\.named: cannot be read"):
        tables.numbers("t", "a")


def test_a_journal_beside_the_file_is_not_applied_and_none_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    tables = make(path, "PRAGMA journal_mode = WAL", "CREATE TABLE t (a)")
    assert not tables.has("t")
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("INSERT INTO t VALUES (1)")
        writer.commit()
        before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}

        assert tables.numbers("t", "a")["a"].tolist() == []
        assert tables.problems == []  # the journal was empty
        text = "is incomplete: the rows in a.db-wal next to it are not read"
        assert SqliteTables(path).problems == [text]
        assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_a_file_that_is_cut_off_says_so_and_gives_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    make(path, "CREATE TABLE a (x)", "INSERT INTO a VALUES (7)", "CREATE TABLE b (x)")
    assert SqliteTables(path).problems == []
    path.write_bytes(path.read_bytes()[:12_000])

    tables = SqliteTables(path)

    assert tables.problems == ["is truncated after 12,000 of 12,288 bytes"]
    assert tables.numbers("a", "x")["x"].tolist() == [7]


def test_an_empty_file_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()

    with pytest.raises(TraceError, match=r"a.db: the file is empty"):
        SqliteTables(tmp_path / "a.db")


def test_a_file_that_is_cut_off_says_so_where_it_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript("".join(f"CREATE TABLE t{n} (a, b, c);" for n in range(200)))
    path.write_bytes(path.read_bytes()[:4096])

    with pytest.raises(TraceError, match=r"malformed; it is truncated after 4,096 of"):
        SqliteTables(path)
