"""torch.profiler in a session: windows, rows, failures; each file is read back."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.annotations import annotate, mark, stage
from lightning_rlprof.recording.recorders.base import build_recorders, recorder_names
from lightning_rlprof.recording.recorders.torch_profiler import TorchProfilerRecorder
from lightning_rlprof.recording.session import Session
from lightning_rlprof.records.run_directory import read_trace
from lightning_rlprof.testing import FakeClock, make_header
from tests.builders.recorder_traces import batches, events_of, options, rows, trainer


def record(tmp_path: Path, **choice: Any) -> tuple[Session, TorchProfilerRecorder]:
    recorder = TorchProfilerRecorder(*options())
    config = ProfilerConfig.build(**choice)
    return Session(config, tmp_path, make_header(), [recorder], FakeClock()), recorder


def written(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "rank-00000").rglob("*") if path.is_file())


def notes(tmp_path: Path, level: str) -> list[str]:
    trace = read_trace(tmp_path / "rank-00000.jsonl")
    return [note.text for note in trace.notes if note.level == level]


def test_a_window_of_a_step_is_one_trace_with_a_row_per_span(tmp_path: Path) -> None:
    config = ProfilerConfig.build(profile=True)
    recorder = TorchProfilerRecorder(*options(rank=3, world_size=8, role="value_model"))
    with Session(config, tmp_path, make_header(3, 8), [recorder], FakeClock()) as session:
        session.begin_step(1)
        with stage("actor_update"), annotate("optimizer"):
            mark("updated")
            torch.ones(2) + 1
        session.end_step()
    folder = tmp_path / "rank-00003" / "step-000001"
    name = f"step-000001_value-model_rank3-of-8_pid{os.getpid()}.pt.trace.json.gz"
    assert [path.name for path in folder.iterdir()] == [name]
    assert rows(folder / name) == ["ProfilerStep#1", "actor_update", "optimizer", "updated"]
    found = {e["name"]: e for e in events_of(folder / name)}
    outer, inner = found["actor_update"], found["optimizer"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert "aten::add" in found


def test_colocated_roles_share_one_collection_per_process(tmp_path: Path) -> None:
    session, _ = record(tmp_path, profile=True)
    with session:
        session.begin_step(1)
        for name in ("reference_compute_log_prob", "actor_compute_log_prob", "actor_update"):
            with stage(name), stage("micro_batch"):
                torch.ones(2) + 1
        session.end_step()
    (path,) = written(tmp_path)
    assert [name for name in rows(path) if "_" in name and name != "micro_batch"] == [
        "reference_compute_log_prob",
        "actor_compute_log_prob",
        "actor_update",
    ]


def test_each_wanted_stage_has_its_own_trace_and_nothing_else_is_left(tmp_path: Path) -> None:
    session, _ = record(tmp_path, stage=["actor_update", "compute_reward"], profile_step_end=3)
    with session:
        for step in (1, 2, 3):
            session.begin_step(step)
            for name in ("actor_update", "weight_sync", "compute_reward"):
                with stage(name):
                    torch.ones(2) + 1
            session.end_step()
    files = written(tmp_path)
    assert [path.parent.name for path in files] == [
        "step-000001-actor_update",
        "step-000001-compute_reward",
        "step-000002-actor_update",
        "step-000002-compute_reward",
    ]
    for path in files:
        window = path.parent.name
        assert path.name.startswith(f"{window.replace('_', '-')}_actor_rank0-of-1_pid")
        assert rows(path) == [window.split("-")[-1]]


def test_discrete_opens_no_profiler_for_a_step_without_a_wanted_stage(tmp_path: Path) -> None:
    session, _ = record(tmp_path, profile=True, discrete=True)
    with session:
        session.begin_step(1)
        assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        with stage("actor_update"):
            assert torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        session.end_step()


@pytest.mark.parametrize("discrete", [False, True])
def test_an_exception_in_a_capture_passes_and_the_trace_is_written(
    discrete: bool, tmp_path: Path
) -> None:
    session, _ = record(tmp_path, profile=True, discrete=discrete)
    calls = []

    @stage("actor_update")
    def update() -> None:
        calls.append(torch.ones(2) + 1)
        raise KeyError("reward")

    with pytest.raises(KeyError, match="reward"), session:
        session.begin_step(1)
        update()
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    (path,) = written(tmp_path)
    assert "actor_update" in rows(path)
    assert "aten::add" in {e["name"] for e in events_of(path)}
    assert len(calls) == 1


def test_where_the_profiler_cannot_start_the_stage_runs_once_and_the_run_says_why(
    tmp_path: Path,
) -> None:
    session, _ = record(tmp_path, profile=True, discrete=True)
    calls = []
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]), session:
        session.begin_step(1)
        with stage("actor_update"):
            calls.append(1)
        session.end_step()
    (error,) = notes(tmp_path, "error")
    assert "TorchProfilerRecorder was disabled after an error (RecorderError: another" in error
    assert "actor_update" in {
        span.name for span in read_trace(session.run / "rank-00000.jsonl").spans
    }
    assert calls == [1]


def test_a_scheduled_session_writes_the_mini_batches_of_the_update(tmp_path: Path) -> None:
    schedule = {"wait": 1, "active": 1}
    config = ProfilerConfig.build(
        {
            "integrated": {"profile": True},
            "discrete": True,
            "torch_profiler": {"schedule": schedule},
        }
    )
    recorders = build_recorders(config, make_header())
    mini_batch = trainer()
    with Session(config, tmp_path, make_header(), recorders, FakeClock()) as session:
        session.begin_step(1)
        with stage("actor_compute_log_prob"):
            torch.ones(2) + 1
        with stage("actor_update"):
            for _ in range(4):
                mini_batch()
        session.end_step()
    whole, update = sorted((tmp_path / "rank-00000").iterdir())
    assert batches(whole) == [f"pid{os.getpid()}"]
    assert batches(update) == ["mb1", "mb3"]
    assert notes(tmp_path, "warning") == []


@pytest.mark.parametrize("role", ["ref", "critic"])
def test_each_role_builds_its_recorder_from_verls_configuration(role: str) -> None:
    block = {
        "tool": "torch",
        "enable": True,
        "ranks": [0],
        "tool_config": {"torch": {"contents": ["cpu", "cuda"], "discrete": False}},
    }
    where = {"critic": {"profiler": block}}
    if role == "ref":
        where = {"actor_rollout_ref": {"ref": {"profiler": block}}}
    source = {"global_profiler": {"tool": "torch", "steps": [1]}, **where}
    config = ProfilerConfig.build(source, role="reference" if role == "ref" else role)
    assert recorder_names(config, "cpu") == ("torch_profiler",)
    (recorder,) = build_recorders(config, make_header())
    assert isinstance(recorder, TorchProfilerRecorder)
    assert not config.wants_rank(1)


def test_without_a_profiler_block_nothing_is_built() -> None:
    assert build_recorders(ProfilerConfig.build(None), make_header()) == []
    assert build_recorders(ProfilerConfig.build(profile=False), make_header()) == []


@pytest.mark.deep
def test_a_profiler_of_the_training_inside_of_a_capture_costs_its_trace_not_the_process(
    tmp_path: Path,
) -> None:
    code = """
import sys
import torch
from lightning_rlprof import ProfilerConfig, load, stage, start_session

config = ProfilerConfig.build(profile_save_path=sys.argv[1], steps=[1], tools=["torch_profiler"])
with start_session(config, name="run", rank=0, world_size=1) as session:
    session.begin_step(1)
    with stage("actor_update"), torch.profiler.profile() as own:
        torch.ones(4).sum()
    own.export_chrome_trace(sys.argv[1] + "/own.json")
    session.end_step()
print([note.text for note in load(sys.argv[1] + "/run").notes])
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "was not written: another torch profiler ran during the capture" in done.stdout
    assert "aten::ones" in (tmp_path / "own.json").read_text()
