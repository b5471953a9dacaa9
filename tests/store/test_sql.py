import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_rlprof import load
from lightning_rlprof.errors import TraceError
from lightning_rlprof.run import Run
from lightning_rlprof.store import sql
from lightning_rlprof.store.duckdb_tables import attach
from lightning_rlprof.store.sql import Limits, answer, closed, named, write_answer
from lightning_rlprof.tables.table import Column, Table
from tests.builders.runs import grpo_run

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

COLUMNS = (Column("stage", "text"), Column("wait", "duration", "ns"), Column("share", "share"))
ROWS = [("a", 2**62, 0.5), ("b", None, None), (None, -3, 1.0), ("a", 4, 0.0)]


def view(connection: object) -> None:
    attach(connection, Table("waits", COLUMNS, ROWS))  # type: ignore[arg-type]


def asked(query: str, rows: int | None = None) -> list[tuple[object, ...]]:
    return list(answer(query, view, rows=rows).rows)


def refused(query: str) -> str:
    with pytest.raises(TraceError) as caught:
        answer(query, view)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_table_is_asked_with_what_is_not_known_as_null() -> None:
    assert sorted(asked("from waits"), key=str) == sorted(ROWS, key=str)
    assert asked("select sum(wait_ns) from waits where stage = 'a'") == [(2**62 + 4,)]
    assert asked("select count(*) from waits where wait_ns is null") == [(1,)]


@pytest.mark.parametrize(
    "query",
    [
        "select '; 世界'; -- 世界",
        "select '; 世界' /* ; */ ; ; /* a */",
        "-- ;\nselect '; 世界' -- ;",
    ],
)
def test_semicolons_and_comments_may_end_a_query(query: str) -> None:
    assert asked(query) == [("; 世界",)]


def test_columns_of_an_answer_are_told_by_type_and_name() -> None:
    query = "select 1 as n, 2 as n, 3 as wait_ns, 4 as peak_bytes, true, 1.5, 'x', [1], null"
    table = answer(query, view)
    kinds = [(column.kind, column.unit) for column in table.columns]
    assert [column.name for column in table.columns][:2] == ["n", "n_"]
    assert kinds[2:4] == [("duration", "ns"), ("count", "bytes")]
    assert list(table.rows) == [(1, 2, 3, 4, 1, 1.5, "x", "[1]", None)]


def test_a_long_answer_is_cut_and_counted() -> None:
    table = answer("select * from range(1000)", view, rows=3)
    assert list(table.rows) == [(0,), (1,), (2,)]
    assert table.note == "the first 3 of 1,000 rows"
    assert answer("select * from range(3) -- all", view, rows=3).note == ""


def test_a_number_beyond_64_bits_is_an_error_and_never_rounded() -> None:
    assert "out of range" in refused("select sum(wait_ns) * 4 from waits")
    assert asked("select 'nan'::double, 'inf'::double, 1 / 0") == [(None, None, None)]


WRITES = {
    "copy waits to '{out}'": "COPY",
    "copy (select 1) to '{out}' (format parquet)": "COPY",
    "export database '{out}'": "EXPORT",
    "attach '{out}'": "ATTACH",
    "install httpfs": "LOAD",
    "load json": "LOAD",
    "set threads = 1": "SET",
    "reset threads": "SET",
    "create table t (a int)": "CREATE",
    "create table t as select 1": "CREATE",
    "insert into waits values ('a', 1, 1)": "INSERT",
    "drop view waits": "DROP",
    "pragma enable_profiling": "PRAGMA",
    "call pragma_version()": "CALL",
    "explain analyze select 1": "EXPLAIN",
    "select 1; select 2": "SELECT and SELECT",
    "select 1; copy waits to '{out}'": "SELECT and COPY",
    "  ": "nothing",
}


@pytest.mark.parametrize("query", WRITES)
def test_whatever_is_not_one_select_is_refused(query: str, tmp_path: Path) -> None:
    text = refused(query.format(out=tmp_path / "out"))
    assert text == f"only a single read-only SELECT is supported; this is {WRITES[query]}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "query",
    [
        "copy waits to '{out}'",
        "export database '{out}'",
        "attach '{out}'",
        "install httpfs",
        "set threads = 1",
        "set enable_external_access = true",
        "set allowed_paths = ['{out}']",
    ],
)
def test_duckdb_itself_refuses_too_where_a_statement_got_through(
    query: str, tmp_path: Path
) -> None:
    import duckdb

    with closed(view) as connection, pytest.raises(duckdb.Error, match=r"disabled|locked"):
        connection.execute(query.format(out=tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "source",
    [
        "read_csv('{file}')",
        "read_csv('/etc/passwd')",
        "read_csv_auto(['{file}'])",
        "read_text('{file}')",
        "read_blob('{file}')",
        "read_json('{file}')",
        "read_parquet('{file}')",
        "'{file}'",
        "glob('{folder}/*')",
        "query('from read_text(''{file}'')')",
        "'https://example.org/a.csv'",
    ],
)
def test_no_other_file_is_read(source: str, tmp_path: Path) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("word\nhunter2\n")
    text = refused(f"select * from {source.format(file=file, folder=tmp_path)}")
    assert "file system operations are disabled" in text or "does not exist" in text
    assert "hunter2" not in text


def test_no_variable_of_python_is_read() -> None:
    import duckdb
    import numpy as np

    secret = {"word": np.array([42])}
    assert duckdb.sql("select word from secret").fetchall() == [(42,)]  # it could be
    with closed(view) as connection, pytest.raises(duckdb.Error, match="secret does not exist"):
        connection.execute("select * from secret")
    assert secret["word"][0] == 42


def test_errors_are_one_line_without_a_picture_of_the_query() -> None:
    text = refused("select stag from waits")
    assert text.startswith('SQL: Binder Error: Referenced column "stag" not found')
    assert refused("select * from").startswith("SQL: Parser Error: syntax error")
    assert refused("select error('two\nlines')") == "SQL: Invalid Input Error: two lines"


def test_texts_come_as_they_are(tmp_path: Path) -> None:
    odd = ["'", '"', "a\nb", "\x1b[2J", "<b>", "名", ""]
    table = Table("odd", (Column("text", "text"),), [(each,) for each in odd])
    found = answer("from odd", lambda connection: attach(connection, table))
    assert sorted(found.column("text")) == sorted(odd)  # type: ignore[type-var]
    broken = Table("broken", (Column("text", "text"),), [("\ud800",)])
    assert list(answer("from broken", lambda c: attach(c, broken)).rows) == [("?",)]


def test_an_empty_table_has_its_columns() -> None:
    table = Table("none", COLUMNS, [])
    found = answer("from none", lambda connection: attach(connection, table))
    assert [column.name for column in found.columns] == ["stage", "wait_ns", "share"]
    assert list(found.rows) == []


@pytest.mark.parametrize("name", ["out.csv", "it's [1]*.parquet"])
def test_all_rows_are_written_to_a_file(name: str, tmp_path: Path) -> None:
    import duckdb

    path = tmp_path / name
    query = "select stage, sum(wait_ns) as total_ns from waits group by stage -- end"
    assert write_answer(query, view, [], path) == 3
    assert [each.name for each in tmp_path.iterdir()] == [name]
    read: Callable[[str], object] = duckdb.read_csv if name == "out.csv" else duckdb.read_parquet
    (tmp_path / name).rename(tmp_path / "plain")
    found = read(str(tmp_path / "plain")).fetchall()  # type: ignore[attr-defined]
    assert sorted(found, key=str) == sorted([("a", 2**62 + 4), ("b", None), (None, -3)], key=str)


def test_what_does_not_fit_into_memory_is_an_error_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB would spill into the folder in which somebody asks, and then answer."""

    def little(connection: "DuckDBPyConnection") -> None:
        connection.execute("SET memory_limit = '30MB'")
        connection.execute("SET threads = 1")

    monkeypatch.chdir(tmp_path)
    query = "from (select range, hash(range) as h from range(5000000) order by h) offset 4999999"
    with pytest.raises(TraceError, match="out of memory"):
        answer(query, little)
    assert list(tmp_path.iterdir()) == []


HUGE = {
    "in DuckDB": "select count(*) from range(10000000000) a, range(10000000000) b",
    "in the answer": "select * from range(1000000000)",
}


@pytest.mark.parametrize("query", HUGE.values(), ids=HUGE)
def test_a_query_ends_at_its_memory_limit_and_says_what_to_do(query: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        answer(query, view, limits=Limits(memory_gb=0.3))
    assert str(caught.value) == (
        "SQL: out of memory: the query needs more than its limit of 0.3 GB, or than there is; "
        "select less, or allow more with --memory (in Python memory_gb)"
    )
    assert answer("select 1", view, limits=Limits(memory_gb=0.3)).rows[0] == (1,)


def test_a_query_ends_at_its_time_limit_and_leaves_no_file(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    endless = "with recursive t as (select 1 x union all select 1 - x from t) select sum(x) from t"
    for ask in (
        lambda limits: answer(endless, view, limits=limits),
        lambda limits: write_answer(endless, view, [], tmp_path / "out.csv", limits),
    ):
        with pytest.raises(TraceError, match=r"took longer than its limit of 0\.2 s"):
            ask(Limits(timeout_s=0.2))
    assert list(tmp_path.iterdir()) == []
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
    assert {*threading.enumerate()} <= before, "the queries have ended"


def test_by_default_a_query_may_use_2_gb_or_half_of_a_small_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for machine, most in ((64 * 10**9, 2 * 10**9), (3 * 10**9, 15 * 10**8), (None, 2 * 10**9)):
        monkeypatch.setattr(sql, "machine_bytes", lambda machine=machine: machine)
        assert Limits().memory_bytes == most


def test_a_run_takes_both_limits(tmp_path: Path) -> None:
    run = Run.of(grpo_run(tmp_path / "run", steps=1))
    with pytest.raises(TraceError, match="out of memory"):
        run.sql(HUGE["in DuckDB"], memory_gb=0.05)
    with pytest.raises(TraceError, match="longer than its limit"):
        run.sql(f"select sum(hash(range)) from range({10**12})", timeout_s=0.1)


def test_a_file_is_whole_or_not_written(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("old")
    for query in ("select error('no')", "select nothing", "copy waits to 'x'"):
        with pytest.raises(TraceError):
            write_answer(query, view, [], tmp_path / "old.csv")
    with pytest.raises(TraceError, match=r"out.txt: -o needs a name that ends in .csv or .parquet"):
        write_answer("select 1", view, [], tmp_path / "out.txt")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_tables_are_named_by_whole_words_in_any_case() -> None:
    assert named('from "Kernels" join sync using (x)', ["kernels", "sync", "kernel"]) == [
        "kernels",
        "sync",
    ]


@pytest.mark.parametrize(
    "ending",
    [
        "threading.Thread(target=ask, args=(1,)).start()",
        "atexit.register(ask, 0)",
        "threading._register_atexit(ask, 0)",  # as pools of threads end, where `on_finish` runs
    ],
)
def test_sql_is_answered_while_the_interpreter_ends(tmp_path: Path, ending: str) -> None:
    code = f"""if True:
        import atexit, sys, threading, time
        from lightning_rlprof import load

        def ask(seconds):
            time.sleep(seconds)
            print(load(sys.argv[1]).sql("select count(*) from headers").rows[0][0])

        {ending}
    """
    grpo_run(tmp_path, steps=3)
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


def test_what_a_signal_raises_ends_a_query(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise TimeoutError("enough")

    grpo_run(tmp_path, steps=3)
    run = load(tmp_path)
    before = signal.signal(signal.SIGALRM, stop)
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match="enough"):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            run.sql("select count(*) from range(10000000) a, range(100000) b")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 60  # the query takes many minutes
