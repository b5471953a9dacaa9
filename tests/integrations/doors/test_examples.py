"""The examples of doors run as their pages say, each with the real package of its framework."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_rlprof.run import Run, load
from tests.integrations.doors.test_contract import UNTRACED, typical_shares
from tests.places import ROOT

SHEEPRL = (
    "-m", "sheeprl", "exp=ppo", "env=gym", "env.id=CartPole-v1", "env.num_envs=1",
    "env.sync_env=True", "env.capture_video=False", "fabric.accelerator=cpu",
    "algo.total_steps=1280", "algo.rollout_steps=128", "algo.per_rank_batch_size=64",
    "algo.mlp_keys.encoder=[state]", "algo.run_test=False", "checkpoint.every=0",
    "checkpoint.save_last=False",
)  # fmt: skip


class Example(NamedTuple):
    """A program and what it records in its ten steps.

    Attributes:
        package: Module without which it cannot run.
        stages: Of its steps, with the least share of each.
        roles: Of its ranks, in order.
        words: Of Python's command line, where there is no `train.py`.
    """

    package: str
    stages: dict[str, float]
    roles: tuple[str, ...] = ("actor",)
    words: tuple[str, ...] = ()


LOG_PROBS = {"actor_compute_log_prob": 0.03, "reference_compute_log_prob": 0.03}
EXAMPLES = {
    "codetiming": Example(
        "codetiming",
        {
            "actor_generate": 0.1, "actor_compute_log_prob": 0.05, "compute_advantage": 0,
            "actor_update": 0.3,
        },
    ),
    "fabric": Example("lightning", {"forward_no_grad": 0.1, "actor_update": 0.2}),
    "sheeprl": Example("sheeprl", {"actor_generate": 0.2, "actor_update": 0.15}, words=SHEEPRL),
    "skyrl": Example(
        "skyrl",
        {
            "wait_for_generation_buffer": 0, "fwd_logprobs_values_reward": 0.1,
            "compute_advantage": 0, "actor_update": 0.4, "weight_sync": 0,
        },
    ),
    "areal": Example(
        "areal",
        {
            "wait_for_samples": 0, "compute_advantage": 0, "actor_update": 0.2, "weight_sync": 0,
            "clear_batches": 0, **LOG_PROBS,
        },
    ),
    "verl": Example(
        "verl",
        {"actor_generate": 0.05, "actor_update": 0.2, "idle": 0, **LOG_PROBS},
        ("controller", "worker", "worker"),
    ),
}  # fmt: skip


def recorded(name: str, example: Example, folder: Path) -> Run:
    """Run an example with the command of its page; returns its only run."""
    words = example.words or (str(ROOT / "examples" / name / "train.py"),)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lightning_rlprof", "run", "--", sys.executable, *words]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "rlprof's door" not in done.stderr
    [run] = [each for each in (folder / "profiler_data").iterdir() if each.name[0] != "."]
    return load(run)


@pytest.mark.deep
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_recorded_with_the_real_framework(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    if importlib.util.find_spec(example.package) is None:
        pytest.skip(f"needs the package {example.package}")
    run = recorded(name, example, tmp_path)
    assert tuple(run.headers[rank].role for rank in run.ranks) == example.roles
    assert {*run.steps().column("step")} == {*range(1, 11)}
    found = typical_shares(run)
    untraced = found.pop("untraced", 0.0)
    found.pop("garbage_collection", None)  # Python decides when, and a busy machine how long.
    assert found.keys() == example.stages.keys()
    assert all(found[stage] >= least for stage, least in example.stages.items()), found
    assert untraced < UNTRACED


def test_every_program_of_a_framework_has_an_example() -> None:
    programs = {each.parent.name for each in (ROOT / "examples").glob("*/train.py")}
    assert programs - {"loop", "ray", "servers", "smollm2"} == EXAMPLES.keys() - {
        "sheeprl"
    }  # a command alone


def test_examples_contain_nothing_of_the_profiler() -> None:
    for name in {*EXAMPLES} - {"sheeprl"}:
        assert "rlprof" not in (ROOT / "examples" / name / "train.py").read_text()
