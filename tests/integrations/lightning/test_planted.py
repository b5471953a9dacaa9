"""Real trainings with one planted problem: the summary and the findings name it first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from tests.places import ROOT

pytestmark = pytest.mark.deep

STEPS, SECONDS = 60, 300

PLANTED = {
    "slow_loader": "data-wait",
    "slow_worker": "data-wait",
    "late_rank": "straggler",
    "leak": "memory-growth",
    "generation": "rollout",
    "recipe": "rollout",
}
# What else runs on the machine may be named, as it makes all other times untrue.
MACHINE = ("cpu-contention", "cpu-quota", "slower-since", "slower-over-time", "outlier-step")


def run(*command: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, env=variables, capture_output=True, text=True, timeout=SECONDS, check=True,
    ).stdout  # fmt: skip


def trained(problem: str, folder: Path) -> Spans:
    run("tests.integrations.lightning.planted", problem, str(folder), str(STEPS))
    return load(folder)


@pytest.mark.parametrize("problem", PLANTED)
def test_the_planted_problem_is_named_first_with_its_price(problem: str, tmp_path: Path) -> None:
    spans = trained(problem, tmp_path)
    found = diagnose(spans).found
    first = next(each for each in found if each.id not in MACHINE)
    assert first.id == PLANTED[problem]
    assert first.kind == ("idea" if problem in ("generation", "recipe") else "problem")
    assert (first.price is None) == (problem == "leak" or first.kind == "idea")
    text = run("lightning_rlprof", "findings", str(tmp_path))
    assert f"[{first.id}]" in text
    summary = run("lightning_rlprof", "summary", str(tmp_path))
    ledger = run("lightning_rlprof", "show", str(tmp_path), "ledger")
    line = next(line for line in summary.splitlines() if line.startswith(("Fix", "Improve")))
    label = "Improve" if found[0].kind == "idea" else "Fix"
    assert line.startswith(f"{label} first: {found[0].title}")
    assert not re.search(r"\bGPUs?\b|\bRUN\b", text + summary + ledger)
    assert not re.search(r"\de-\d", ledger)


@pytest.mark.parametrize("problem", ["healthy", "healthy_ranks"])
def test_a_healthy_run_is_accused_of_nothing(problem: str, tmp_path: Path) -> None:
    found = {each.id for each in diagnose(trained(problem, tmp_path)).found}
    assert found <= {"untraced", *MACHINE}


def test_the_recipe_gives_generation_what_it_calls(tmp_path: Path) -> None:
    table = stages(trained("recipe", tmp_path))
    share = dict(zip(table.column("stage"), table.column("share"), strict=True))
    assert share["actor_generate"] > 0.5
    assert share["actor_compute_log_prob"] < 0.2
    assert share["actor_update"] > 0.1
    assert share["untraced"] < 0.1
