"""Commands that read a run by its URL."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.runs import grpo_run

pytest.importorskip("fsspec", reason="fsspec is not installed")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    grpo_run(tmp_path / "run", steps=3, ranks=2)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return f"file://{tmp_path}/run"


def test_a_summary_reads_a_url_and_says_what_it_copied(rlprof: Run, url: str) -> None:
    status, out, err = rlprof("summary", url)
    assert (status, err) == (0, "")
    assert out.startswith(f"{url} on cpu\n3 steps on 2 ranks, ")
    assert f"note: {url}: 2 files, " in out
    assert json.loads(rlprof("summary", url, "--json")[1])["run"] == url


def test_what_is_written_of_a_remote_run_lies_here(rlprof: Run, url: str) -> None:
    assert rlprof("report", url)[0] == 0
    assert rlprof("export", url)[0] == 0
    assert sorted(path.name for path in Path().iterdir()) == [
        "run-report.html",
        "run-trace.json.gz",
    ]


def test_sql_asks_a_remote_run_and_leaves_no_cache(rlprof: Run, url: str) -> None:
    status, out, err = rlprof("sql", url, "select count(*) as n from spans", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["tables"][0]["rows"][0][0] > 0
    assert list(Path("../run").glob(".rlprof*")) == []


def test_other_commands_take_urls_too(rlprof: Run, url: str) -> None:
    for words in (("show", url, "ledger"), ("show", url, "memory"), ("compare", url, url)):
        assert rlprof(*words)[::2] == (0, ""), words


def test_an_error_is_one_line_without_credentials(rlprof: Run) -> None:
    status, out, err = rlprof("summary", "http://127.0.0.1:1/x.json?sig=hunter2")
    assert (status, out) == (2, "")
    assert err.startswith("rlprof: error: http://127.0.0.1:1/x.json?***: cannot be read (")
    assert err.count("\n") == 1
    assert "hunter2" not in err
