"""Captures in the folders of TensorBoard's plugin and of MindStudio Insight, by their rules."""

import gzip
import os
import re
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.report.exports import insight_folders, tensorboard_folders
from tests.builders.runs import grpo_rows, header, write_rank

# The rule of torch-tb-profiler 0.4.3: worker, a span that is sorted as text, the ending.
WORKER = re.compile(r"(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?")
NODE = re.compile(r"(.*)_(\d+)")  # how it finds host and process in a worker


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for rank in range(2):
        write_rank(tmp_path / "run", header(rank, 2, host=f"node{rank}.lan"), grpo_rows(3))
    return tmp_path / "run"


def trace(run: Path, rank: int, window: str, name: str = "x.pt.trace.json.gz") -> Path:
    folder = run / f"rank-{rank:05d}" / window
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress(f"{rank} {window} {name}".encode()))
    return folder / name


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


def test_all_ranks_of_a_stage_are_workers_of_one_folder(run: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        for step in (2, 10):
            trace(run, rank, f"step-{step:06d}-actor_update")
    (folder,) = tensorboard_folders(run, tmp_path / "out")
    assert folder == tmp_path / "out" / "actor_update"
    names = below(folder)
    assert names == [
        "actor_node0-lan_0.000002.pt.trace.json.gz",
        "actor_node0-lan_0.000010.pt.trace.json.gz",
        "actor_node1-lan_1.000002.pt.trace.json.gz",
        "actor_node1-lan_1.000010.pt.trace.json.gz",
    ]
    found = [match.groups() for name in names if (match := WORKER.fullmatch(name))]
    assert [worker for worker, _ in found] == [name.partition(".")[0] for name in names]
    hosts = [match.groups() for worker, _ in found if (match := NODE.match(worker))]
    assert hosts[1:3] == [("actor_node0-lan", "0"), ("actor_node1-lan", "1")]


def test_several_traces_of_a_step_are_spans_in_their_order(run: Path, tmp_path: Path) -> None:
    names = ["x_mb3-4.pt.trace.json.gz", "x_mb5-6.pt.trace.json.gz"]
    paths = [trace(run, 0, "step-000002", name) for name in names]
    paths += [trace(run, 0, "step-000002-2"), trace(run, 0, "step-000003")]
    (folder,) = tensorboard_folders(run, tmp_path / "out")
    assert folder.name == "steps"
    spans = [str(match[2]) for name in below(folder) if (match := WORKER.fullmatch(name))]
    ordered = sorted(spans)  # the plugin sorts text
    assert ordered == [".000002", ".00000202", ".00000203", ".000003"]
    worker = "actor_node0-lan_0"
    read = [(folder / f"{worker}{span}.pt.trace.json.gz").read_bytes() for span in ordered]
    assert read == [path.read_bytes() for path in paths]


def test_traces_with_the_older_ending_are_taken_and_others_not(run: Path, tmp_path: Path) -> None:
    trace(run, 0, "step-000002", "x.trace.json.gz")
    trace(run, 1, "step-000002", "x.nsys-rep")
    (run / "rank-00001" / "oom-step-000003").mkdir()
    (folder,) = tensorboard_folders(run, tmp_path / "out")
    assert below(folder) == ["actor_node0-lan_0.000002.pt.trace.json.gz"]


def test_files_are_links_or_copies_where_there_are_none(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = trace(run, 0, "step-000002")
    (folder,) = tensorboard_folders(run, tmp_path / "linked")
    (linked,) = folder.iterdir()
    assert linked.samefile(source)

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    (folder,) = tensorboard_folders(run, tmp_path / "copied")
    (copied,) = folder.iterdir()
    assert not copied.samefile(source)
    assert copied.read_bytes() == source.read_bytes()


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
    with pytest.raises(TraceError, match=r"contains no captures of torch\.profiler"):
        tensorboard_folders(run, out)
    with pytest.raises(TraceError, match=r"contains no captures of torch_npu\.profiler"):
        insight_folders(run, out)
    with pytest.raises(TraceError, match="is not a run directory"):
        tensorboard_folders(tmp_path / "nowhere", out)
    assert not out.exists()
