"""Parsing of raw captures with a stand-in for torch_npu's parser."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import RecorderError, TraceError
from lightning_rlprof.loaders.ascend import offline_analysis as room
from lightning_rlprof.loaders.ascend.offline_analysis import (
    Options,
    Outcome,
    ascend_directories,
    parse_captures,
)
from tests.builders.ascend_captures import (
    HOST,
    OUTPUT,
    capture,
    install,
    put_msprof,
    tell,
    trace,
)
from tests.system.test_subprocess_python import gone


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch)


def run(*directories: Path, progress: Any = None, **options: Any) -> list[Outcome]:
    return parse_captures(directories, Options(**{"jobs": 2, "timeout_s": 60, **options}), progress)


def make(tmp_path: Path, name: str = "a", **options: Any) -> Path:
    return capture(tmp_path / f"{name}_ascend_pt", **options)


def called(directory: Path) -> dict[str, Any]:
    """What the stand-in was given."""
    found: dict[str, Any] = json.loads((directory / "called.json").read_text())
    return found


def test_directories_are_found_at_any_depth_once_and_not_behind_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = capture(tmp_path / "run" / "rank-00000" / "step-000003" / "x" / "y" / "w_ascend_pt")
    near = capture(tmp_path / "run" / "a_ascend_pt")
    elsewhere = capture(tmp_path / "elsewhere" / "b_ascend_pt")
    (tmp_path / "run" / "link").symlink_to(elsewhere.parent)
    (tmp_path / "run" / "link_ascend_pt").symlink_to(elsewhere)
    (tmp_path / "run" / "file_ascend_pt").touch()
    run_directory = tmp_path / "run"
    assert ascend_directories([run_directory, deep, run_directory]) == [near, deep]
    assert ascend_directories([tmp_path / "run" / "link_ascend_pt"])[0].resolve() == elsewhere
    monkeypatch.chdir(near)
    assert ascend_directories([Path()]) == [near]


def test_a_path_without_any_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, reason in (("nowhere", "no such directory"), ("file", "is a file")):
        with pytest.raises(TraceError, match=f"{name}: {reason}"):
            ascend_directories([make(tmp_path, name="ok_" + name), tmp_path / name])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"empty: contains no \*_ascend_pt directory"):
        ascend_directories([tmp_path / "empty"])


@pytest.mark.usefixtures("stand_in")
def test_raw_data_is_analysed_in_a_process_of_its_own_that_is_no_daemon(tmp_path: Path) -> None:
    directory = tell(make(tmp_path, rank=3, activities=["CPU"]), HOST)
    (outcome,) = run(directory)
    assert (outcome.state, outcome.rank, outcome.message) == ("cached", 3, "")
    assert outcome.files == ("analyse.done", "trace_view.json")
    assert outcome.seconds > 0
    made = called(directory)
    assert made["pid"] != os.getpid()
    assert (made["options"], made["daemon"]) == ([1, None], False)


def test_what_verifies_is_left_alone_and_needs_no_torch_npu(tmp_path: Path) -> None:
    directory = make(tmp_path)
    trace(directory / OUTPUT, HOST)
    (outcome,) = run(directory)
    assert (outcome.state, outcome.files) == ("up to date", ("trace_view.json",))
    assert outcome.message == "no device data (no PROF_* folder)"


@pytest.mark.usefixtures("stand_in")
def test_a_second_call_does_what_the_first_one_could_not(tmp_path: Path) -> None:
    directories = [tell(make(tmp_path, name), HOST) for name in "abc"]
    tell(directories[1], raises="out of memory")
    assert [each.state for each in run(*directories)] == ["cached", "failed", "cached"]
    tell(directories[1], HOST)
    assert [each.state for each in run(*directories)] == ["up to date", "cached", "up to date"]


@pytest.mark.usefixtures("stand_in")
def test_force_analyses_again_but_never_what_has_no_raw_data(tmp_path: Path) -> None:
    directory, trimmed = tell(make(tmp_path), HOST), make(tmp_path, "b", host=False)
    for each in (directory, trimmed):
        trace(each / OUTPUT, HOST)
    assert [each.state for each in run(directory, trimmed, reparse=True)] == [
        "cached",
        "up to date",
    ]
    assert (trimmed / OUTPUT / "trace_view.json").exists()


@pytest.mark.usefixtures("stand_in")
def test_analyse_done_without_content_is_a_failure_in_the_tools_own_words(tmp_path: Path) -> None:
    line = "[2026-11-21 15:29:20] [{}] [1131] profiler.py: {}"
    prints = [
        line.format("INFO", "Start parsing"),
        "|" + line.format("ERROR", "Failed to export. 'msprof' failed"),
        line.format("ERROR", "Task [TraceViewParser] run failed."),
        line.format("ERROR", "Task [KernelViewParser] run failed."),
        line.format("INFO", "All profiling data parsed"),
    ]
    (outcome,) = run(tell(make(tmp_path), prints=prints))
    assert outcome.files == ("analyse.done",)
    assert (outcome.state, outcome.message) == (
        "failed",
        "trace_view.json is missing; torch_npu: Failed to export. 'msprof' failed / "
        "Task [TraceViewParser] run failed.",
    )


@pytest.mark.usefixtures("stand_in")
def test_what_the_tool_complains_of_is_passed_on_where_all_is_there(tmp_path: Path) -> None:
    directory = make(tmp_path)
    text = f"[2026-11-21 15:29:20] [ERROR] [7] profiler.py: see {directory}/logs"
    (outcome,) = run(tell(directory, HOST, prints=[text]))
    assert outcome.state == "cached"
    assert outcome.message.endswith("; torch_npu: see logs")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"raises": "no memory"}, "status 1; torch_npu: RuntimeError: no memory"),
        ({"status": 3}, "status 3"),
    ],
)
def test_a_process_that_fails_says_how(tmp_path: Path, told: dict[str, Any], said: str) -> None:
    (outcome,) = run(tell(make(tmp_path), **told))
    assert outcome.state == "failed"
    assert outcome.message == f"trace_view.json is missing; its process ended with {said}"


def takes_too_long(directory: Path, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time of this directory's process alone pass, at once when it has written a file."""

    def seconds(parser: Any) -> float:
        file = directory / written
        late = parser._directory == directory and file.exists() and file.stat().st_size > 0
        return 5.0 if late else 0.0

    monkeypatch.setattr(room._Parser, "_seconds", seconds)


@pytest.mark.deep
@pytest.mark.usefixtures("stand_in")
def test_one_that_hangs_is_stopped_with_its_children_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, works = tell(make(tmp_path), HOST, hangs=True), tell(make(tmp_path, "b"), HOST)
    takes_too_long(hangs, "child", monkeypatch)
    outcomes = run(hangs, works, timeout_s=4)
    assert [each.state for each in outcomes] == ["failed", "cached"]
    said = "stopped after 4 s (--timeout)"
    assert (outcomes[0].message, outcomes[0].files) == (said, ())
    assert gone(int((hangs / "child").read_text()))
    assert not (hangs / OUTPUT).exists()


@pytest.mark.deep
@pytest.mark.usefixtures("stand_in")
def test_so_many_run_at_a_time_as_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(tmp_path), make(tmp_path, "b")
    # Each waits for the other to have begun.
    tell(first, HOST, meets=str(second / "called.json"))
    tell(second, HOST, meets=str(first / "called.json"))
    assert [each.state for each in run(first, second, jobs=2)] == ["cached", "cached"]
    for each in (first, second):
        (each / "called.json").unlink()
    takes_too_long(first, "called.json", monkeypatch)
    outcomes = run(first, second, jobs=1, timeout_s=4, reparse=True)
    assert [each.state for each in outcomes] == ["failed", "cached"]  # the first had begun


@pytest.mark.usefixtures("stand_in")
def test_an_interruption_stops_what_runs(tmp_path: Path) -> None:
    hangs, works = tell(make(tmp_path), HOST, hangs=True), make(tmp_path, "b")
    tell(works, HOST, meets=str(hangs / "child"))

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(hangs, works, progress=interrupt)
    assert gone(int((hangs / "child").read_text()))
    assert not (hangs / OUTPUT).exists()


@pytest.mark.usefixtures("stand_in")
def test_progress_counts_what_is_done_already(tmp_path: Path) -> None:
    done, todo = make(tmp_path), tell(make(tmp_path, "b"), HOST)
    trace(done / OUTPUT, HOST)
    seen: list[tuple[int, int]] = []
    run(done, todo, progress=lambda *pair: seen.append(pair))
    assert seen == [(1, 2), (2, 2)]


def test_without_raw_data_or_the_right_to_write_nothing_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.os, "access", lambda path, mode: path.name != "b_ascend_pt")
    outcomes = run(make(tmp_path, host=False, rank=5), make(tmp_path, "b"))
    assert [(each.state, each.rank) for each in outcomes] == [("failed", 5), ("failed", None)]
    assert outcomes[0].message == (
        "it is not parsed yet, and it has no raw data (FRAMEWORK, PROF_*) to parse"
    )
    assert outcomes[1].message.startswith("the directory is read-only: copy it")


def test_without_torch_npu_the_error_says_how_to_get_it_or_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(RecorderError) as raised:
        run(make(tmp_path))
    assert str(raised.value) == (
        "parsing needs torch_npu, which cannot be imported (No module named 'torch_npu'): pip "
        'install "lightning-rlprof[npu]" on a machine with CANN and source its set_env.sh, or '
        "move the raw data to a machine that has both"
    )


@pytest.mark.usefixtures("stand_in")
def test_data_of_the_device_needs_msprof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tell(make(tmp_path, device=True), HOST)
    with pytest.raises(RecorderError, match="needs msprof of CANN, which is not on PATH"):
        run(directory)
    assert not (directory / "called.json").exists()
    put_msprof(tmp_path / "bin", monkeypatch)
    assert run(directory)[0].state == "cached"


@pytest.mark.usefixtures("stand_in")
def test_formats_are_handed_on_and_looked_for(tmp_path: Path) -> None:
    directory = tell(make(tmp_path), HOST)
    (outcome,) = run(directory, exports=["text", "db"])
    assert called(directory)["options"] == [1, ["text", "db"]]
    assert outcome.state == "failed"
    assert "the database ascend_pytorch_profiler*.db is missing" in outcome.message
    tell(directory, HOST, tables=["PYTORCH_API"])
    assert run(directory, exports=["text", "db"])[0].state == "cached"
    assert run(directory, exports=["db"])[0].state == "up to date"
