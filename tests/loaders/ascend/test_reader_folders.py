"""Where captures of torch_npu lie: how far they are looked for, and what is passed over aloud."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend import capture as ascend_folder
from lightning_rlprof.loaders.ascend.capture import find_captures, is_ascend
from lightning_rlprof.loaders.ascend.reader import read_ascend
from tests.builders.ascend_output import DatabaseRows, TraceEvents, capture_folder


def capture(parent: Path, rank: int = 0) -> Path:
    trace = TraceEvents()
    trace.mark("actor_update", 100, 500)
    return trace.write(capture_folder(parent, rank=rank) / "trace_view.json").parent.parent


def test_of_several_databases_in_a_folder_the_first_is_read_and_that_is_said(
    tmp_path: Path,
) -> None:
    output = capture(tmp_path, rank=1) / "ASCEND_PROFILER_OUTPUT"
    for rank in (0, 1):
        rows = DatabaseRows()
        rows.mark("actor_generate", 0, 9 + rank)
        rows.write(output / f"ascend_pytorch_profiler_{rank}.db")

    run = read_ascend(tmp_path)

    assert [span.end_ns - span.start_ns for span in run] == [9]
    (problem,) = run.warnings
    assert problem.text == "ascend_pytorch_profiler_1.db is left out: several databases"


def test_a_folder_that_cannot_be_read_is_passed_over_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(tmp_path / "3")
    (shut := tmp_path / "shut").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path) == shut:
            raise PermissionError(13, "Permission denied", str(shut))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)

    (problem,) = read_ascend(tmp_path).warnings
    assert problem.text == f"skipped {shut}: it cannot be read (Permission denied)"
    with pytest.raises(TraceError, match="Permission denied"):
        find_captures(shut)


def test_a_tree_of_something_else_is_given_up_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(tmp_path / "3")
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    monkeypatch.setattr(ascend_folder, "_MAX_EMPTY_FOLDERS", 2)

    (problem,) = read_ascend(tmp_path).warnings

    assert problem.text.endswith("/a/b/c: the last 2 folders contain no capture")


def test_captures_in_a_run_below_are_that_runs(tmp_path: Path) -> None:
    capture(tmp_path / "run" / "rank-00000" / "step-000002")
    assert is_ascend(tmp_path)

    (tmp_path / "run" / "rank-00000.jsonl").touch()

    assert not is_ascend(tmp_path)


@pytest.mark.parametrize("name", [".", "latest"])
def test_a_capture_is_known_by_what_its_path_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "host_ascend_pt"
    (folder / "FRAMEWORK").mkdir(parents=True)
    (folder / "latest").symlink_to(folder)
    monkeypatch.chdir(folder)

    with pytest.raises(TraceError, match=rf"not parsed yet\. Run: rlprof ascend parse {folder}"):
        read_ascend(Path(name))


@pytest.mark.parametrize("name", ["host_ascend_pt", "host_1_20250109074803340_ascend_pt.bak"])
def test_a_copy_of_a_capture_is_left_out_and_not_added_up(tmp_path: Path, name: str) -> None:
    folder = capture(tmp_path)
    shutil.copytree(folder, tmp_path / "older" / name)

    run = read_ascend(tmp_path)

    assert len(run) == 1
    (problem,) = run.warnings
    assert problem.text.endswith(f": a copy of {folder}")


def test_a_journal_beside_a_database_is_said(tmp_path: Path) -> None:
    rows = DatabaseRows()
    rows.mark("actor_generate", 0, 9)
    path = rows.write(capture_folder(tmp_path) / "ascend_pytorch_profiler_0.db")
    path.with_name(f"{path.name}-wal").write_bytes(b"rows")

    (problem,) = read_ascend(tmp_path).warnings

    assert problem.text.endswith(f"the rows in {path.name}-wal next to it are not read")
