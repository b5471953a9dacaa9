import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.store.ingest import ingest
from lightning_rlprof.tables.table import Table
from tests.builders.ingest_traces import cached_files, write_traces

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_traces(tmp_path / "traces", 2)
    return tmp_path / "traces"


@pytest.mark.deep
def test_ingest_shows_a_row_per_rank_and_leaves_the_caches(
    rlprof: Run, folder: Path, hints: None
) -> None:
    status, out, err = rlprof("ingest", folder, "-j", "1")
    assert status == 0
    assert "2 cached\n" in out
    assert err.startswith(f"next: rlprof show {folder}/")
    assert cached_files(folder)
    assert "2 up to date\n" in rlprof("ingest", folder)[1]


def test_a_failed_rank_is_a_warning_and_exit_code_1(rlprof: Run, folder: Path) -> None:
    bad = folder / "rank1.pt.trace.json"
    bad.write_text("\x1b[2J")
    status, out, _ = rlprof("ingest", folder, "-j", "1")
    assert status == 1
    assert f"\nwarning: {bad}" in out
    assert "1 cached, 1 failed\n" in out
    assert "\x1b" not in out


def test_files_of_one_rank_each_share_a_warning(rlprof: Run, folder: Path) -> None:
    first, second = sorted(folder.iterdir())
    text = first.read_text()[:-300]
    first.write_text(text)
    second.write_text(text.replace('"rank": 0', '"rank": 1'))
    _, out, _ = rlprof("ingest", folder, "-j", "1")
    [warning] = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert warning.startswith(f"warning: {first} (and 1 more): it is truncated")


def test_ingest_as_json_is_all_rows_and_nothing_else(rlprof: Run, folder: Path) -> None:
    (folder / "rank1.pt.trace.json").write_text("no trace")
    status, out, _ = rlprof("ingest", folder, "--json")
    data = json.loads(out)
    assert (status, data["failed"]) == (1, 1)
    (table,) = data["tables"]
    assert [row[2] for row in table["rows"]] == ["cached", "failed"]
    assert [each["name"] for each in table["columns"]][:4] == ["path", "ranks", "state", "why"]


def test_usage_errors(rlprof: Run, folder: Path) -> None:
    assert rlprof("ingest", folder / "no")[2].startswith("rlprof: error: ")
    status, _, err = rlprof("ingest", folder, "--engine", "spark")
    assert status == 2
    assert "invalid value for '--engine': 'spark' is not one of 'local', 'ray'" in err


def test_what_an_engine_prints_does_not_spoil_the_json(
    rlprof: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prints(*_: object, **__: object) -> Table:
        print("(raylet) A worker died")
        return ingest([folder], jobs=1)

    monkeypatch.setattr("lightning_rlprof.store.ingest.ingest", prints)
    status, out, err = rlprof("ingest", folder, "--json", "--engine", "ray")
    assert (status, json.loads(out)["failed"], err) == (0, 0, "(raylet) A worker died\n")
