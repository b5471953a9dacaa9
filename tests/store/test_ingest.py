import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import ConfigError, TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.run import Run
from lightning_rlprof.store import ingest as room
from lightning_rlprof.store import open_run as opening
from lightning_rlprof.store.ingest import ingest
from lightning_rlprof.store.open_run import open_run
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.alike import assert_same_run, assert_same_table
from tests.builders.ingest_traces import cached_files, write_trace, write_traces
from tests.builders.runs import grpo_run
from tests.places import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_traces(tmp_path / "traces", 3)
    return tmp_path / "traces"


def states(table: Table) -> list[object]:
    return table.column("state")


def test_every_trace_gets_a_cache_with_all_tables(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    table = ingest([folder], jobs=2, progress=lambda *at: seen.append(at))
    assert [(Path(str(row[0])).name, *row[1:4]) for row in table.rows] == [
        (f"rank{rank}.pt.trace.json", str(rank), "cached", None) for rank in range(3)
    ]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    spans = load(folder / "rank2.pt.trace.json")
    tables = {"spans", "headers", "notes", "warnings", *spans.tables}
    made = {name.partition("/")[2] for name in cached_files(folder) if name.startswith("rank2")}
    assert made == {f"{name}.parquet" for name in tables}
    rows = sum(len(spans.table(name).rows) for name in tables)
    assert table.rows[2][4:6] == (rows, (folder / "rank2.pt.trace.json").stat().st_size)


def test_a_file_by_two_spellings_is_one_row_by_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder.parent / "link").symlink_to(folder)
    (folder / "other.pt.trace.json").symlink_to("rank0.pt.trace.json")
    names = ["rank0.pt.trace.json", "../traces/rank0.pt.trace.json", "other.pt.trace.json"]
    table = ingest([*names, "../link/rank0.pt.trace.json"], jobs=1)
    assert table.column("path") == [names[0], names[2]]  # which have a cache each
    assert states(table) == ["cached", "cached"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"paths": "two"}, "two is one path; ingest takes a list"),
        ({"paths": Path("two")}, "two is one path; ingest takes a list"),
        ({"jobs": -1}, "jobs=-1 must be a whole number from 1 on"),
        ({"jobs": "2"}, "jobs='2' must be a whole number from 1 on"),
        ({"engine": "rayy"}, r"unknown engine 'rayy' \(allowed: local, ray\)"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ingest(**{"paths": [], **wrong})


@pytest.mark.deep
def test_what_has_a_cache_is_ready_and_a_new_one_is_made(folder: Path) -> None:
    ingest([folder / "rank1.pt.trace.json"], jobs=1)
    before = cached_files(folder)
    assert states(ingest([folder], jobs=1)) == ["cached", "up to date", "cached"]
    assert before.items() <= cached_files(folder).items()


def test_a_trace_of_another_process_with_the_same_host_in_its_name_is_another_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (folder / f"node1.lan_{pid}.17.pt.trace.json" for pid in (41, 42))
    write_trace(first)

    def slow(path: Path, progress: object) -> Spans:
        write_trace(second)
        return load(path)

    monkeypatch.setattr(room, "_read", slow)
    assert room.ingest_one(str(first)).state == "cached"
    assert room.ingest_one(str(first)).state == "up to date"


@pytest.mark.deep
def test_a_cache_that_lacks_a_table_or_is_cut_or_changed_is_made_whole(folder: Path) -> None:
    ingest([folder], jobs=1)
    whole = cached_files(folder)
    for path in folder.rglob("rank0*/kernels.parquet"):
        path.unlink()
    for path in folder.rglob("rank1*/spans.parquet"):
        path.write_bytes(b"PAR1")
    for path in folder.rglob("rank2*/run.json"):
        path.write_text("{}")
    assert states(ingest([folder], jobs=1)) == ["cached", "cached", "cached"]
    assert states(ingest([folder], jobs=1)) == ["up to date", "up to date", "up to date"]
    assert cached_files(folder) == whole


def test_a_broken_trace_is_a_row_and_the_others_are_made(folder: Path) -> None:
    (folder / "rank1.pt.trace.json").write_text("no trace")
    table = ingest([folder], jobs=2)
    assert states(table) == ["cached", "failed", "cached"]
    path, rank, _, why, *numbers = table.rows[1]
    assert (rank, numbers[:2]) == ("1", [None] * 2)
    assert "rank1.pt.trace.json" in str(why)
    assert path == str(folder / "rank1.pt.trace.json")


@pytest.mark.deep
def test_a_trace_that_is_cut_off_is_made_and_says_so(folder: Path) -> None:
    path = folder / "rank1.pt.trace.json"
    path.write_bytes(path.read_bytes()[:-300])
    why = ingest([folder], jobs=1).column("why")
    assert why[0] is why[2] is None
    assert str(why[1]).startswith("it is truncated")
    assert ingest([folder], jobs=1).column("why") == why


def test_a_table_that_cannot_be_read_is_a_failure_and_the_others_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Table:
        raise TraceError("the device's part is cut")

    def read(path: Path, progress: object) -> Spans:
        spans = load(path)
        return replace(spans, tables={"memory": broken, **spans.tables})

    monkeypatch.setattr(room, "_read", read)
    outcome = room.ingest_one(str(folder / "rank0.pt.trace.json"))
    assert (outcome.state, outcome.why) == ("failed", "table memory: the device's part is cut")
    assert any(name.endswith("kernels.parquet") for name in cached_files(folder))


def test_a_trace_that_changes_while_it_is_read_leaves_no_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: Path, progress: object) -> Spans:
        spans = load(path)
        write_trace(path, 2, 3)
        return spans

    monkeypatch.setattr(room, "_read", slow)
    outcome = room.ingest_one(str(folder / "rank0.pt.trace.json"))
    assert outcome.state == "failed"
    assert "changed while it was read; ingest it when it is complete" in str(outcome.why)
    assert cached_files(folder) == {}


def test_a_large_trace_in_a_place_that_cannot_be_written_is_read_without_a_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "LARGE", 10)
    (folder / ".rlprof-cache").write_text("a file is in the way, for root as well")
    path = folder / "rank0.pt.trace.json"
    assert_same_run(open_run(path), load(path))


def test_a_mistake_of_ours_costs_its_file_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_read", lambda path, progress: {}["a key"])
    outcome = room.ingest_one(str(folder / "rank0.pt.trace.json"))
    assert (outcome.state, outcome.why) == ("failed", "KeyError: 'a key'")


def test_a_place_that_cannot_be_written_is_a_row(folder: Path) -> None:
    (folder / ".rlprof-cache").write_text("a file is in the way, for root as well")
    assert states(ingest([folder], jobs=1)) == ["failed"] * 3


@pytest.mark.deep
def test_a_process_that_is_killed_costs_its_file_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    table = ingest([folder], jobs=1)
    assert states(table) == ["cached", "failed", "cached"]
    assert table.rows[1][3] == (
        "its process died: killed by SIGKILL, probably because memory ran out"
    )


DEADLY = """
import lightning_rlprof.loaders.chrome_events as source, os, signal
class Deadly(source.Source):
    def __init__(self, path, *rest):
        if "rank1" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(path, *rest)
import lightning_rlprof.loaders.chrome_events as head
source.Source = head.Source = Deadly
"""


@pytest.mark.deep
def test_ctrl_c_leaves_what_is_made_and_nothing_half_made(folder: Path) -> None:
    code = (
        "import signal, sys\nfrom lightning_rlprof.store.ingest import ingest\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"ingest([{str(folder)!r}], jobs=1, progress=lambda done, _: (\n"
        "    print(done, flush=True), sys.stdin.readline()))"
    )
    script = folder.parent / "script.py"
    script.write_text(code)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, **pipes, text=True, env=environment) as running:  # type: ignore[call-overload]
        try:
            assert running.stdout.readline() == "1\n"
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=60) != 0
        finally:
            running.kill()
    assert states(ingest([folder], jobs=1))[0] == "up to date"
    assert [each.name for each in (folder / ".rlprof-cache").glob(".*")] == []


def test_runs_of_our_own_are_ingested_too(tmp_path: Path) -> None:
    grpo_run(tmp_path / "runs" / "a", steps=2, ranks=2)
    grpo_run(tmp_path / "runs" / "b", steps=1, ranks=1)
    table = ingest([tmp_path / "runs"], jobs=1)
    assert [row[1:3] for row in table.rows] == [("0-1", "cached"), ("0", "cached")]
    assert_same_run(open_run(tmp_path / "runs" / "a"), load(tmp_path / "runs" / "a"))


def test_a_folder_of_ranks_is_opened_from_the_caches_and_is_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = load(folder)
    tables = {name: wanted.table(name) for name in wanted.tables}
    ingest([folder], jobs=1)
    monkeypatch.setattr(opening, "load", lambda path, progress=None: {}["nothing is read"])
    found = open_run(folder)
    assert_same_run(found, wanted)
    assert found.ranks == (0, 1, 2)
    for name, table in tables.items():
        assert_same_table(found.table(name), table)


def test_reading_leaves_a_cache_of_a_large_trace_of_another_tool_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo_run(tmp_path / "run", steps=1)
    (tmp_path / "t").mkdir()
    trace = write_trace(tmp_path / "t" / "a.json")
    open_run(trace)
    assert cached_files(tmp_path) == {}
    monkeypatch.setattr(opening, "LARGE", 10)
    open_run(tmp_path / "run")
    open_run(tmp_path / "run" / "rank-00000.jsonl")
    assert cached_files(tmp_path) == {}
    first = open_run(tmp_path / "t")
    assert any(name.endswith("kernels.parquet") for name in cached_files(tmp_path))
    monkeypatch.setattr(opening, "load", lambda path, progress=None: {}["nothing is read"])
    again = open_run(tmp_path / "t")
    assert_same_run(again, first)
    assert_same_table(again.table("kernels"), load(trace).table("kernels"))


def test_ranks_that_are_large_together_leave_a_cache_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_traces(tmp_path, 2)
    sizes = [each.stat().st_size for each in tmp_path.glob("*.json")]
    monkeypatch.setattr(opening, "LARGE", sum(sizes) + 1)
    first = open_run(tmp_path)
    assert cached_files(tmp_path) == {}
    monkeypatch.setattr(opening, "LARGE", max(sizes) + 1)
    open_run(tmp_path, cache=False)
    assert cached_files(tmp_path) == {}
    assert_same_run(open_run(tmp_path), first)
    assert sum(name.endswith("kernels.parquet") for name in cached_files(tmp_path)) == len(sizes)
    run = Run.of(open_run(tmp_path))
    for spans in (run, run, first):  # A run that was read from no cache is read as a whole.
        own = spans.table("kernels", 1).column("rank")
        assert set(own) == ({1} if spans is run else {0, 1})
        assert own.count(1) == first.table("kernels").column("rank").count(1) > 0
    assert {*run.table("kernels").column("rank")} == {0, 1}


def test_a_folder_of_runs_is_its_newest_run_whatever_traces_lie_there(tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=1)
    write_traces(tmp_path, 2)
    (tmp_path / "run" / "device").mkdir()
    write_trace(tmp_path / "run" / "device" / "x.json")
    assert_same_run(open_run(tmp_path), load(tmp_path))
    with pytest.raises(TraceError, match="contains the captures of one rank; the run is"):
        open_run(tmp_path / "run" / "device")


def test_a_signal_right_after_the_folder_is_made_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    mkdir = Path.mkdir

    def interrupted(path: Path, *rest: Any, **options: Any) -> None:
        mkdir(path, *rest, **options)
        if path.name.startswith(".new-"):
            made.append(path.name)
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        room.keep(folder / "rank0.pt.trace.json")
    assert len(made) == 1
    assert [*(folder / ".rlprof-cache").iterdir()] == []
