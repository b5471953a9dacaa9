from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.ingest.items import items
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report import perfetto
from tests.ingest.traces import write_trace, write_traces
from tests.runs import grpo_run


def names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in items(folder)]


def test_a_file_and_a_run_stand_for_themselves(tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=1)
    trace = write_trace(tmp_path / "any.json")
    assert items(tmp_path / "run") == [tmp_path / "run"]
    assert items(trace) == [trace]


def test_below_a_folder_are_its_runs_and_traces_each_in_one_form(tmp_path: Path) -> None:
    grpo_run(tmp_path / "b" / "run", steps=1)
    write_traces(tmp_path / "a", 2)
    (tmp_path / "a" / "rank0.pt.trace.json.gz").write_bytes(b"")
    (tmp_path / "a" / "report.nsys-rep").write_bytes(b"")
    (tmp_path / "a" / "report.sqlite").write_bytes(b"")
    write_trace(tmp_path / "vllm.json")
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert names(tmp_path) == [
        "vllm.json",
        "a/rank0.pt.trace.json",
        "a/rank1.pt.trace.json",
        "a/report.sqlite",
        "b/run",
    ]


def test_a_broken_trace_counts_by_its_name_or_by_those_beside_it(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json")
    (tmp_path / "rank17.json").write_text("")
    (tmp_path / "other.json").write_text("")
    (tmp_path / "x.pt.trace.json.gz").write_text("")
    assert names(tmp_path) == ["rank0.json", "rank17.json", "x.pt.trace.json.gz"]


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no run and no trace"):
        items(tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        items(tmp_path / "no")


def test_caches_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / ".rlprof-cache").mkdir()
    write_trace(tmp_path / ".rlprof-cache" / "x.pt.trace.json")
    write_trace(tmp_path / "x.pt.trace.json")
    assert names(tmp_path) == ["x.pt.trace.json"]


def test_links_in_a_circle_and_what_we_exported_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    trace = write_trace(tmp_path / "rank0.json")
    perfetto.write_trace(load(trace), tmp_path / "rank0-trace.json.gz")
    assert names(tmp_path) == ["rank0.json"]
    assert load(tmp_path).path == trace
