"""Real TRL under ``rlprof run``, its trainers and programs unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.samples.fates import samples
from lightning_rlprof.analysis.samples.staleness import staleness
from lightning_rlprof.analysis.stages.overviews import roles
from lightning_rlprof.run import Run, load
from lightning_rlprof.tables.table import rows_of
from tests.doubles.trl.vllm_server import VLLMServer
from tests.integrations.doors.test_contract import UNTRACED, shares, typical_shares
from tests.places import ROOT

EXAMPLES = ROOT / "examples" / "trl"
PROGRAM = EXAMPLES / "train_grpo.py"
ASYNC = ROOT / "tests" / "doubles" / "trl" / "train_async_grpo.py"
STAGES = {
    "actor_generate", "actor_update", "compute_advantage", "compute_reward",
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


def numbered(run: Run, counter: str, rank: int, name: str) -> list[int]:
    """Return a counter of the spans or marks of a name on a rank, in order."""
    rows, values = run.amounts(counter)
    own = (run.rank[rows] == rank) & (run.name[rows] == run.names.index(name))
    return [int(each) for each in values[own]]


@pytest.mark.deep
def test_async_grpo_is_recorded_in_both_processes_on_doubles_of_vllm_nccl_and_attention(
    tmp_path: Path,
) -> None:
    with VLLMServer() as server:
        status, said = trained(tmp_path, server.url, "6", program=ASYNC)
    assert status == 0, said
    assert server.refused == []
    run = only(tmp_path)
    assert {rank: header.role for rank, header in run.headers.items()} == {0: "actor", 1: "rollout"}
    assert run.statuses == {0: "finished", 1: "finished"}
    on = [{run.names[code] for code in run.name[run.rows(kind="stage", rank=r)]} for r in (0, 1)]
    assert on[0] == {
        "wait_for_rollout", "weight_sync", "data_fetch", "wait_for_samples", "actor_update"
    }  # fmt: skip
    assert on[1] - {"backpressure"} == {"actor_generate", "compute_reward"}

    trainer, rollout = rows_of(roles(run))
    assert (trainer["role"], rollout["role"]) == ("actor", "rollout")
    assert trainer["waiting"] > 0.05  # for the start of the rollout process, in its first step
    typical = [typical_shares(run, rank) for rank in (0, 1)]
    assert typical[0]["actor_update"] > 0.05
    assert typical[1]["actor_generate"] + typical[1]["compute_reward"] > 0.5
    assert max(each["untraced"] for each in typical) < UNTRACED

    assert run.step[run.rows(kind="step", rank=0)].tolist() == [1, 2, 3, 4, 5, 6]
    assert numbered(run, "version", 0, "weight_sync") == [1, 2, 3, 4, 5, 6, 7]
    steps = run.step[run.rows(kind="step", rank=1)]
    assert steps[0] == 1
    assert steps[-1] >= 4  # the last ones may not have ended, or not have been seen
    versions = numbered(run, "version", 1, "actor_generate")
    assert {*versions} <= {*range(1, 8)}
    fates = [name for name in run.names if name in ("sample trained", "sample zero_advantage")]
    taken = [each for name in fates for each in numbered(run, "sample", 0, name)]
    assert len(taken) == len({*taken}) > 6 * 4
    assert {*taken} <= {*numbered(run, "sample", 1, "compute_reward")}
    generated = numbered(run, "sample", 1, "actor_generate")
    assert {*taken} <= {*generated}
    table = samples(run)
    counts = dict(zip(table.column("fate"), table.column("samples"), strict=True))
    assert counts["generated"] == len(generated) == sum(counts.values()) - counts["generated"]
    assert counts["trained"] + counts.get("zero_advantage", 0) == len(taken)
    # TRL drops older samples; which are taken depends on who is faster.
    assert max(staleness(run).column("staleness max")) in (1, 2, 3, 4)
    assert all(0 < each <= 24 for each in numbered(run, "tokens", 1, "actor_generate"))


@pytest.mark.deep
def test_async_grpo_on_two_ranks_adds_one_rollout_process(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    with VLLMServer() as server:
        status, said = trained(tmp_path, server.url, "3", python=launcher, program=ASYNC)
    assert status == 0, said
    found = {rank: header.role for rank, header in only(tmp_path).headers.items()}
    assert found == {0: "actor", 1: "actor", 2: "rollout"}


@pytest.mark.deep
def test_an_exception_in_async_grpo_passes_and_the_rollout_process_ends(tmp_path: Path) -> None:
    with VLLMServer() as server:
        status, said = trained(tmp_path, server.url, "6", "raise", program=ASYNC)
    assert status == 1
    assert "RuntimeError: the disk is full" in said
    run = only(tmp_path)
    assert run.statuses == {0: "interrupted by RuntimeError", 1: "finished"}
