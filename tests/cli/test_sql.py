import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.runs import grpo_rows, grpo_run, header, write_rank

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    grpo_run(tmp_path / "my run", steps=3)
    return tmp_path / "my run"


def test_sql_shows_the_answer(rlprof: Run, run: Path) -> None:
    query = (
        "select name, count(*) as n, max(5000000) as longest_ns from spans group by 1 order by 1"
    )
    for _ in range(2):  # without a cache, and with it
        status, out, err = rlprof("sql", run, query)
        assert (status, err) == (0, "")
        assert "actor_generate" in out
        assert "5.00 ms" in out


def test_sql_as_json_is_all_rows_exactly_and_nothing_else(rlprof: Run, run: Path) -> None:
    query = "select 9223372036854775807 - range as n, 'é' as text, null as nothing from range(60)"
    data = json.loads(rlprof("sql", run, query, "--json")[1])
    assert (data["run"], data["query"], data["warnings"]) == (str(run), query, [])
    (table,) = data["tables"]
    assert table["rows"][:2] == [[2**63 - 1, "é", None], [2**63 - 2, "é", None]]
    assert len(table["rows"]) == 60


def test_sql_shows_some_rows_and_counts_all(rlprof: Run, run: Path) -> None:
    out = rlprof("sql", run, "select * from range(1000000)")[1]
    assert len(out.splitlines()) < 60
    assert "the first 50 of 1,000,000 rows\n" in out
    assert "the first 3 of 9 rows\n" in rlprof("sql", run, "from range(9)", "--limit", "3")[1]
    data = json.loads(rlprof("sql", run, "from range(9)", "--limit", "3", "--json")[1])
    assert data["tables"][0]["note"] == "the first 3 of 9 rows"


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_sql_writes_all_rows_to_a_file_and_replaces_none(
    name: str, rlprof: Run, run: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    status, out, _ = rlprof("sql", run, "select * from range(1000)", "-o", path)
    assert (status, out) == (0, f"1,000 rows\nWrote {path}\n")
    before = path.read_bytes()
    status, _, err = rlprof("sql", run, "select 1", "-o", path)
    assert (status, path.read_bytes()) == (2, before)
    assert "exists already\n  hint: Replace it with --force." in err
    assert rlprof("sql", run, "select 1", "-o", path, "--force")[0] == 0
    assert path.read_bytes() != before


def test_sql_without_a_query_lists_tables_rows_and_columns(rlprof: Run, run: Path) -> None:
    lines = rlprof("sql", run)[1].splitlines()
    assert [line.split()[0] for line in lines] == ["spans", "headers", "notes", "warnings"]
    rows = rlprof("sql", run, "select count(*) from spans", "--format", "csv")[1].split()[1]
    columns = rlprof("sql", run, "from spans limit 0", "--format", "csv")[1].strip()
    assert lines[0] == f"spans ({rows} rows): {columns.replace(',', ', ')}"
    data = json.loads(rlprof("sql", run, "--json")[1])
    assert data["tables"] == ["spans", "headers", "notes", "warnings"]


def test_a_misspelled_table_has_a_hint(rlprof: Run, run: Path) -> None:
    assert rlprof("sql", run, "from span")[2].endswith("\n  hint: did you mean 'spans'?\n")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select '\udcff'", "the query is not valid UTF-8"),
        ("copy spans to 'x.csv'", "only a single read-only SELECT is supported; this is COPY"),
        ("from read_csv('/etc/passwd')", "SQL: Permission Error: Cannot access file"),
        ("select nme from spans", 'SQL: Binder Error: Referenced column "nme" not found'),
        ("from kernels", "does not exist! (there are: spans, headers, notes, warnings)"),
        ("select error('a\nb\x1b[2J')", "SQL: Invalid Input Error: a b\\x1b[2J"),
    ],
)
def test_a_wrong_query_is_an_error(query: str, said: str, rlprof: Run, run: Path) -> None:
    status, out, err = rlprof("sql", run, query)
    assert (status, out) == (2, "")
    assert said in err
    assert "\x1b" not in err


def test_a_file_that_cannot_be_written_is_an_error(rlprof: Run, run: Path) -> None:
    assert "no does not exist" in rlprof("sql", run, "select 1", "-o", run / "no" / "x.csv")[2]
    assert (
        "-o needs a name that ends in .csv or .parquet"
        in rlprof("sql", run, "select 1", "-o", run / "x.txt")[2]
    )
    assert "no such run or trace" in rlprof("sql", run / "no", "select 1")[2]


def test_names_in_a_trace_steer_no_terminal(rlprof: Run, run: Path) -> None:
    assert "\x1b" not in rlprof("sql", run, "select chr(27) || '[2J' as \"a\x1b[2J\"")[1]


def test_what_is_missing_in_the_run_is_said_with_the_answer(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path / "a", header(0, 3), grpo_rows(2), status=None)
    out = rlprof("sql", tmp_path, "select count(*) from spans")[1]
    assert "warning: of 3 ranks, these have no trace: 1-2\n" in out
    assert (
        "warning: rank 0: its file is truncated: the rank was killed or is still running\n" in out
    )
    data = json.loads(rlprof("sql", tmp_path, "select 1", "--json")[1])
    assert {"rank": None, "text": "of 3 ranks, these have no trace: 1-2"} in data["warnings"]


def test_sql_shows_a_column_that_is_nowhere_known(rlprof: Run, run: Path) -> None:
    out = rlprof("sql", run, "select null as nothing, 1 as one")[1]
    assert [line.split() for line in out.splitlines()][1::2] == [["nothing", "one"], ["-", "1"]]


def test_sql_writes_a_file_or_prints_json(rlprof: Run, run: Path, tmp_path: Path) -> None:
    status, out, err = rlprof("sql", run, "select 1", "--json", "-o", tmp_path / "x.csv")
    assert (status, out) == (2, "")
    assert "choose one" in err


def test_sql_has_a_memory_and_a_time_limit(rlprof: Run, run: Path) -> None:
    heavy = "select count(*) from range(10000000000) a, range(10000000000) b"
    status, out, err = rlprof("sql", run, heavy, "--memory", "0.05")
    assert (status, out) == (2, "")
    assert err.startswith("rlprof: error: SQL: out of memory: the query needs more than its limit")
    long = "select sum(hash(range)) from range(1000000000000)"
    status, out, err = rlprof("sql", run, long, "--timeout", "0.2")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "took longer than its limit of 0.2 s; allow more with --timeout" in err


@pytest.mark.deep
def test_a_function_that_cannot_be_interrupted_does_not_keep_the_command(run: Path) -> None:
    query = "select length(repeat('A', 1500000000) || repeat('B', 1500000000))"
    command = [sys.executable, "-m", "lightning_rlprof", "sql", run, query, "--timeout", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_describe_lists_unit_and_meaning_of_each_column(rlprof: Run, run: Path) -> None:
    status, out, err = rlprof("sql", run, "--describe")
    assert (status, err) == (0, "")
    assert "ns    end, since the first event of the run" in out
    (table,) = json.loads(rlprof("sql", run, "--describe", "--json")[1])["tables"]
    assert ["spans", "end_ns", "ns", "end, since the first event of the run"] in table["rows"]
