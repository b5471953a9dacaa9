"""SQL asked by somebody who means harm: it changes nothing, reads nothing else, and ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.store import cache
from lightning_rlprof.store.run_store import Store
from tests.builders.runs import grpo_run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    grpo_run(tmp_path / "run", steps=2)
    (tmp_path / "secret.csv").write_text("word\nhunter2\n")
    return Store(tmp_path / "run", load)


def kept(store: Store, name: str = "headers") -> Path:
    """Return the file of a table, which DuckDB may open."""
    (path,) = (store.path / cache.CACHE_FOLDER).rglob(f"{name}.parquet")
    return path


def everything(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(store: Store, query: str) -> str:
    """Return why a query is refused, by `sql` and by `write`, and that no file has changed."""
    folder = store.path.parent
    before, texts = everything(folder), []
    for ask in (store.sql, lambda each: store.write(each, folder / "out.csv")):
        with pytest.raises(TraceError) as caught:
            ask(query)
        texts.append(str(caught.value))
        assert "\n" not in texts[-1]
        assert "hunter2" not in texts[-1]
    assert everything(folder) == before
    return texts[0]


@pytest.mark.parametrize(
    "query",
    [
        "with t as (copy (select 1 as x) to '{kept}' (format csv, use_tmp_file false)) select 1",
        "with t as (copy (select 1 as x) to '{kept}' (use_tmp_file false)) select * from t",
        "with t as (copy (select 1 as x) to '{kept}') select * from t",
        "with t as (copy (select 1 as x) to '{new}') select * from t",
        "with a as (select 1), t as (copy (from a) to '{kept}' (use_tmp_file false)) from t",
        "select (with t as (copy (select 1) to '{kept}' (use_tmp_file false)) select 1)",
        "from query('with t as (copy (select 1) to ''{kept}'' (use_tmp_file false)) select 1')",
        "with t as (insert into spans select * from spans returning *) select * from t",
        "with t as (delete from spans returning *) select * from t",
        "with t as (update spans set rank = 7 returning *) select * from t",
        "with t as (attach '{new}') select 1",
        "/* select */ copy spans to '{new}'",
        "select 1 /* ; */ ; copy spans to '{new}'",
        "select 1; -- ;\n copy spans to '{new}'",
        "select 1\u037e copy spans to '{new}'",
        "ﾃopy spans to '{new}'",
        "export database '{new}' (format parquet)",
        "import database '{new}'",
        "create or replace secret s (type s3, key_id 'k')",
        "prepare p as copy spans to '{new}'",
        "execute p",
        "load '{new}'",
        "force install httpfs from 'http://127.0.0.1:1'",
        "pragma enable_external_access",
        "set global enable_external_access = true",
        "checkpoint",
        "vacuum",
        "use memory",
        "detach memory",
        "comment on view spans is 'x'",
        "alter view spans rename to x",
        "create temp macro f() as table from read_text('{secret}')",
    ],
)
def test_nothing_is_written_however_it_is_dressed_up(query: str, store: Store) -> None:
    new = store.path.parent / "new"
    secret = store.path.parent / "secret.csv"
    refused(store, query.format(kept=kept(store), new=new, secret=secret))
    assert not new.exists()


@pytest.mark.parametrize(
    "source",
    [
        "sniff_csv('{secret}')",
        "read_csv(['{kept}', '{secret}'])",
        "read_text('{kept}/../../../../secret.csv')",
        "read_text('{folder}/run/../secret.csv')",
        "read_text('file://{secret}')",
        "read_parquet('{folder}/*.csv')",
        "parquet_metadata('{secret}')",
        "read_duckdb('{secret}')",
        "read_json_objects('{secret}')",
        "glob('{folder}/**')",
        '"{secret}"',
        "read_text('/proc/self/environ')",
        "read_blob('/dev/stdin')",
        "read_text('s3://bucket/x')",
        "read_csv('http://127.0.0.1:1/x.csv')",
        "query_table('{secret}')",
        "query('from read_text(''{secret}'')')",
        "(values (getenv('HOME')))",
        "enable_logging()",
        "enable_logging(storage_path='{folder}')",
        '"Enable_Logging" ()',
        "disable_logging()",
        "enable_profiling()",
        "sqlite_scan('{secret}', 'x')",
        "load_aws_credentials()",
        "duckdb_extensions()",
    ],
)
def test_nothing_else_is_read(source: str, store: Store) -> None:
    folder = store.path.parent
    places = {"secret": folder / "secret.csv", "folder": folder, "kept": kept(store)}
    refused(store, f"select * from {source.format(**places)}")


def test_no_setting_tells_a_secret_of_the_machine(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    for source in ("duckdb_settings()", "duckdb_secrets()", "duckdb_functions()"):
        assert "hunter2" not in str([*store.sql(f"select * from {source}").rows])


def test_names_of_tables_are_words_and_never_paths(store: Store) -> None:
    for name in ("../spans", "spans.parquet", "run/spans", "spans; drop view spans", "spans\0"):
        assert "Error" in refused(store, f'select * from "{name}"')
    assert store.sql('select count(*) from main."SPANS"').rows[0][0] > 0


_BOMB = """
import resource, sys
from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.sql import answer
answer("select 1", lambda connection: None)
with open("/proc/self/statm") as file:  # each CPU has a thread with a stack and an arena
    most = int(file.read().split()[0]) * resource.getpagesize() + (3 << 29)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    answer(sys.argv[1], lambda connection: None)
except TraceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "query",
    [
        "select list(range) from range(1000000000000)",
        "with recursive t as (select repeat('x', 1000000) as x union all from t) from t",
        "select repeat('x', 4000000000) from range(1000000)",
    ],
)
def test_what_needs_all_memory_is_an_error_and_no_crash(query: str) -> None:
    told = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _BOMB, query],
        env=told,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("SQL: out of memory: ")
    assert len(done.stdout.splitlines()) == 1


_ENDLESS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored behind nohup
from lightning_rlprof.store.sql import answer
query = "with recursive t as (select 1 as x union all select 1 - x from t) select sum(x) from t"
print("asked", flush=True)
answer(query, lambda connection: None)
"""


def test_a_query_without_an_end_ends_when_the_user_says_so() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    asked = subprocess.Popen([sys.executable, "-c", _ENDLESS], **pipes)  # type: ignore[call-overload]
    try:
        assert asked.stdout.readline() == "asked\n"
        asked.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in asked.communicate(timeout=60)[1]
        assert asked.returncode != 0
    finally:
        asked.kill()
