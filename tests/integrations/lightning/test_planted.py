"""Real trainings with one planted problem: the summary and the findings name it first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import findings
from lightning_rlprof.analysis.stages.stage_times import stages
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of
from tests.places import ROOT

pytestmark = pytest.mark.deep

STEPS, SECONDS = 60, 300

PLANTED = {
    "slow_loader": "Trainer waits for data",
    "slow_worker": "Trainer waits for data",
    "late_rank": "Rank 1 is a straggler (slow, work not counted)",
    "leak": "Memory grows every step: host on rank 0",
    "generation": "Rollout takes most of the time",
    "recipe": "Rollout takes most of the time",
}
# What else runs on the machine may be named, but only below what is planted.
MACHINE = "Training threads wait for a CPU"
UNTRACED = "A large share of the time is untraced"
# A machine that becomes slower makes steps that take longer, of which this is all that can be said.
SLOWER = re.compile(r"Steps take [\d.]+x as long since|Steps get slower|Step \d+ took [\d.]+x")


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


def named(spans: Spans) -> list[str]:
    return [str(text) for text in findings(spans).column("finding")]


@pytest.mark.parametrize("problem", PLANTED)
def test_the_planted_problem_is_named_first_with_its_price(problem: str, tmp_path: Path) -> None:
    spans = trained(problem, tmp_path)
    found = rows_of(findings(spans))
    first = next(each for each in found if not SLOWER.match(each["finding"]))
    # Whether the stage is known, too, depends on what else runs on the machine.
    assert first["finding"].replace(" in training_step", "") == PLANTED[problem]
    assert (first["cost"] is None) == (problem == "leak")
    assert first["kind"] == ("idea" if problem in ("generation", "recipe") else "problem")
    text = run("lightning_rlprof", "findings", str(tmp_path))
    assert first["finding"] in text
    summary = run("lightning_rlprof", "summary", str(tmp_path))
    ledger = run("lightning_rlprof", "show", str(tmp_path), "ledger")
    line = next(line for line in summary.splitlines() if line.startswith(("Fix", "Improve")))
    label = {"idea": "Improve", "problem": "Fix"}[found[0]["kind"]]
    assert line.startswith(f"{label} first: {found[0]['finding']}")
    assert not re.search(r"\bGPUs?\b|\bRUN\b", text + summary + ledger)
    assert not re.search(r"\de-\d", ledger)


@pytest.mark.parametrize("problem", ["healthy", "healthy_ranks"])
def test_a_healthy_run_is_accused_of_nothing(problem: str, tmp_path: Path) -> None:
    found = [title for title in named(trained(problem, tmp_path)) if not SLOWER.match(title)]
    # With the share of other programs, if they are many.
    assert {title.partition(":")[0] for title in found} <= {UNTRACED, MACHINE}


def test_the_recipe_gives_generation_what_it_calls(tmp_path: Path) -> None:
    table = stages(trained("recipe", tmp_path))
    share = dict(zip(table.column("stage"), table.column("share"), strict=True))
    assert share["actor_generate"] > 0.5
    assert share["actor_compute_log_prob"] < 0.2
    assert share["actor_update"] > 0.1
    assert share["untraced"] < 0.1
