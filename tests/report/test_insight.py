"""Captures in the folders of MindStudio Insight, by its rules."""

import os
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.report.insight import insight_folders
from tests.builders.runs import grpo_rows, header, write_rank


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for rank in range(2):
        write_rank(tmp_path / "run", header(rank, 2, host=f"node{rank}.lan"), grpo_rows(3))
    return tmp_path / "run"


def capture(run: Path, rank: int, window: str, *, parsed: bool = True) -> Path:
    """Write a capture as torch_npu does, with raw data and, if it is parsed, both formats."""
    folder = run / f"rank-{rank:05d}" / window / f"node{rank}_{rank}_20261121153342445_ascend_pt"
    raw = folder / "PROF_000001_1"
    raw.mkdir(parents=True)
    (raw / "msprof_1.db").write_text("raw")
    (folder / "FRAMEWORK").mkdir()
    (folder / f"profiler_info_{rank}.json").write_text("{}")
    (folder / "profiler_metadata.json").write_text("{}")
    if parsed:
        output = folder / "ASCEND_PROFILER_OUTPUT"
        output.mkdir()
        (output / "trace_view.json").write_text("[]")
        (output / f"ascend_pytorch_profiler_{rank}.db").write_text("db")
    return folder


def below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_files_are_copies_where_there_are_no_links(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = capture(run, 0, "step-000002") / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    insight_folders(run, tmp_path / "copied")
    (copied,) = (tmp_path / "copied").rglob("trace_view.json")
    assert not copied.samefile(view)
    assert copied.read_bytes() == view.read_bytes()


def test_insight_gets_a_folder_per_capture_with_all_ranks(run: Path, tmp_path: Path) -> None:
    for window in ("step-000002-actor_update", "step-000003-actor_update"):
        for rank in (0, 1):
            capture(run, rank, window)
    folders, raw = insight_folders(run, tmp_path / "out")
    assert raw == []
    assert [folder.name for folder in folders] == [
        "step-000002-actor_update",
        "step-000003-actor_update",
    ]
    for folder in folders:
        ranks = sorted(path.name for path in folder.iterdir())
        assert len(ranks) == 2
        assert all(name.endswith("_ascend_pt") for name in ranks)
    deepest = max(len(Path(name).parts) for name in below(tmp_path / "out"))
    assert deepest <= 5  # Insight's limit


def test_insight_gets_no_raw_data_and_cannot_change_the_run(run: Path, tmp_path: Path) -> None:
    source = capture(run, 0, "step-000002")
    ((folder,), _) = insight_folders(run, tmp_path / "out")
    (own,) = folder.iterdir()
    assert below(own) == [
        "ASCEND_PROFILER_OUTPUT/ascend_pytorch_profiler_0.db",
        "ASCEND_PROFILER_OUTPUT/trace_view.json",
        "profiler_info_0.json",
        "profiler_metadata.json",
    ]
    database = "ASCEND_PROFILER_OUTPUT/ascend_pytorch_profiler_0.db"
    assert not (own / database).samefile(source / database)
    view = "ASCEND_PROFILER_OUTPUT/trace_view.json"
    assert (own / view).samefile(source / view)


def test_captures_that_are_not_parsed_are_named(run: Path, tmp_path: Path) -> None:
    capture(run, 0, "step-000002")
    unparsed = capture(run, 1, "step-000002", parsed=False)
    folders, raw = insight_folders(run, tmp_path / "out")
    assert ([folder.name for folder in folders], raw) == (["step-000002"], [unparsed])


def test_a_run_without_captures_is_an_error_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(TraceError, match=r"contains no captures of torch_npu\.profiler"):
        insight_folders(run, out)
    with pytest.raises(TraceError, match="is not a run directory"):
        insight_folders(tmp_path / "nowhere", out)
    assert not out.exists()
