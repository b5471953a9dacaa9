"""Real TRL under ``rlprof run``, its trainers and programs unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.run import Run, load
from tests.integrations.doors.test_contract import UNTRACED, shares
from tests.places import ROOT

PROGRAM = ROOT / "examples" / "trl" / "train_grpo.py"
STAGES = {
    "actor_generate", "actor_update", "compute_advantage", "compute_reward",
    "reference_compute_log_prob", "data_fetch", "untraced",
}  # fmt: skip


def trained(folder: Path, *words: str, python: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run the program with the command of the README; returns its status and what it wrote."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlprof", "run", "--", sys.executable, *python,
         str(PROGRAM), *words],
        env=environ, capture_output=True, text=True, timeout=600, check=False, cwd=folder,
    )  # fmt: skip
    return done.returncode, done.stderr


def only(folder: Path) -> Run:
    [run] = [each for each in (folder / "profiler_data").iterdir() if each.name[0] != "."]
    return load(run)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_trainer_is_recorded_without_a_change(kind: str, tmp_path: Path) -> None:
    status, said = trained(tmp_path, kind)
    assert status == 0, said
    run = only(tmp_path)
    assert run.steps().column("step") == [1, 2, 3, 4]
    found = shares(run)
    assert found.keys() == STAGES - ({"reference_compute_log_prob"} - found.keys())
    assert found["actor_generate"] > 0.3
    assert found["untraced"] < UNTRACED
    tokens = run.amounts("tokens")[1]
    assert len(tokens) == 4
    assert all(0 < each <= 4 * 24 for each in tokens)
    assert run.headers[0].versions.keys() >= {"trl", "transformers", "accelerate"}
    assert run.statuses == {0: "finished"}
    assert "rlprof: 4 steps on 1 rank" in said


@pytest.mark.deep
def test_two_ranks_of_torchrun_write_one_run_and_a_second_training_another(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    status, said = trained(tmp_path, "GRPO", "again", python=launcher)
    assert status == 0, said
    runs = sorted(each for each in (tmp_path / "profiler_data").iterdir() if each.name[0] != ".")
    assert [load(run).ranks for run in runs] == [(0, 1), (0, 1)]


@pytest.mark.deep
def test_an_exception_of_the_training_passes_and_the_run_says_so(tmp_path: Path) -> None:
    status, said = trained(tmp_path, "GRPO", "raise")
    assert status == 1
    assert "RuntimeError: the judge is gone" in said
    run = only(tmp_path)
    assert run.statuses == {0: "interrupted by RuntimeError"}
    assert len(run.rows(kind="step")) >= 2
