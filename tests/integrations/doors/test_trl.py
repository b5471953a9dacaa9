"""Real TRL under ``rlprof run``, its trainers and programs unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.run import Run, load
from tests.doubles.trl.vllm_server import VLLMServer
from tests.integrations.doors.test_contract import UNTRACED, shares, typical_shares
from tests.places import ROOT

EXAMPLES = ROOT / "examples" / "trl"
PROGRAM = EXAMPLES / "train_grpo.py"


def test_the_example_says_how_it_is_called() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("usage: rlprof run -- python train_grpo.py GRPO")


ASYNC = ROOT / "tests" / "doubles" / "trl" / "train_async_grpo.py"
STAGES = {
    "actor_generate", "actor_update", "compute_advantage", "compute_reward", "tokenize",
    "reference_compute_log_prob", "data_fetch", "untraced",
}  # fmt: skip


def trained(
    folder: Path, *words: str, python: tuple[str, ...] = (), program: Path = PROGRAM
) -> tuple[int, str]:
    """Run the program with the command of the README; returns its status and what it wrote."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlprof", "run", "--", sys.executable, *python,
         str(program), *words],
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
    typical = typical_shares(run)
    assert typical["actor_generate"] > 0.3
    assert typical["untraced"] < UNTRACED
    regions = [run.names[code] for code in run.name[run.rows(kind="region")]]
    assert regions.count("reward") == 4  # the name of the program's function
    assert regions.count("logging") == 2  # at the end of the training: TRL's own, which calls HF's
    rows, tokens = run.amounts("tokens")
    generated = tokens[np.isin(rows, run.rows(kind="stage"))]
    assert len(generated) == 4
    assert all(0 < each <= 4 * 24 for each in generated)
    fates = {row[0]: row for row in run.samples().rows}
    assert fates["generated"][1] == 4 * 4 == sum(row[1] for row in run.samples().rows[1:])
    assert fates["generated"][3] == generated.sum()
    assert {*fates} <= {"generated", "trained", "zero_advantage"}
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


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["DPO", "online DPO"])
def test_preferences_are_recorded_with_their_reference_apart(kind: str, tmp_path: Path) -> None:
    status, said = trained(tmp_path, kind, program=EXAMPLES / "train_dpo.py")
    assert status == 0, said
    run = only(tmp_path)
    assert run.steps().column("step") == [1, 2, 3, 4]
    found = shares(run)
    own = {"actor_update", "reference_compute_log_prob", "data_fetch", "untraced"}
    online = {"actor_generate", "compute_reward"} if kind == "online DPO" else set()
    assert found.keys() == own | online
    typical = typical_shares(run)
    assert 0.01 < typical["reference_compute_log_prob"] < typical["actor_update"]
    assert typical["untraced"] < UNTRACED
    passes = np.flatnonzero(run.name == run.names.index("reference_compute_log_prob"))
    assert np.bincount(run.step[passes]).tolist() == [0, 2, 2, 2, 2]  # two micro-batches
    if online:
        assert typical["actor_generate"] > 0.3
        assert all(0 < each <= 2 * 2 * 4 * 24 for each in run.amounts("tokens")[1])
    assert run.statuses == {0: "finished"}


@pytest.mark.deep
def test_the_trainer_of_async_grpo_is_recorded_on_doubles_of_vllm_nccl_and_attention(
    tmp_path: Path,
) -> None:
    with VLLMServer() as server:
        status, said = trained(tmp_path, server.url, "6", program=ASYNC)
    assert status == 0, said
    assert server.refused == []
    run = only(tmp_path)
    assert run.statuses == {0: "finished"}
    assert run.step[run.rows(kind="step")].tolist() == [1, 2, 3, 4, 5, 6]
    stages = {run.names[code] for code in run.name[run.rows(kind="stage")]}
    assert stages == {"data_fetch", "weight_sync", "actor_update"}  # the program marks the second
    typical = typical_shares(run)
    assert typical["actor_update"] > 0.05
    assert typical["untraced"] < UNTRACED


@pytest.mark.deep
def test_two_ranks_of_async_grpo_are_two_ranks(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    with VLLMServer() as server:
        status, said = trained(tmp_path, server.url, "3", python=launcher, program=ASYNC)
    assert status == 0, said
    assert {rank: header.role for rank, header in only(tmp_path).headers.items()} == {
        0: "actor",
        1: "actor",
    }


@pytest.mark.deep
def test_an_exception_in_async_grpo_passes_and_the_run_says_so(tmp_path: Path) -> None:
    with VLLMServer() as server:
        status, said = trained(tmp_path, server.url, "6", "raise", program=ASYNC)
    assert status == 1
    assert "RuntimeError: the disk is full" in said
    assert only(tmp_path).statuses == {0: "interrupted by RuntimeError"}
