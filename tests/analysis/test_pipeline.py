"""Five predictions about four real processes over gloo, beside what happened after each change."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.critical_path.step_graph import step_graph
from lightning_rlprof.analysis.whatif.whatif import whatif
from lightning_rlprof.loaders.load import load
from tests.builders.pipeline import CONDITIONS, ROLES, ROUNDS
from tests.places import ROOT

SECONDS = 300


def play(folder: Path) -> None:
    """Run the four processes."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.builders.pipeline", str(folder), str(rank)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rank in range(len(ROLES))
    ]
    try:
        assert [process.wait(SECONDS) for process in processes] == [0] * len(ROLES)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def took(folder: Path, number: int) -> float:
    """Return the median step of a condition."""
    walls = []
    for turn in range(ROUNDS):
        graph = step_graph(load(folder / "runs" / f"{number}-{turn}"))
        assert not isinstance(graph, str)
        walls.append(graph.wall_ns)
    return float(np.median(np.concatenate(walls)))


@pytest.mark.deep
def test_five_changes_to_a_real_pipeline_take_what_was_predicted(tmp_path: Path) -> None:
    play(tmp_path)

    asked = {"actor_generate": 2.0, "compute_reward": 2.0}
    tables = [
        whatif(load(tmp_path / "runs" / f"0-{turn}"), speedup=asked, remove=["weight_sync"])
        for turn in range(ROUNDS)
    ]
    tables = [table for table in tables if table.abstained is None]
    if not tables:
        pytest.skip("this machine is too busy now: no step could be played again within 1 %")
    errors = {}
    for number, change in enumerate(CONDITIONS):
        guesses = [int(row[2] or 0) for table in tables for row in table.rows if row[0] == change]
        if guesses:
            errors[change] = abs(float(np.mean(guesses)) / took(tmp_path, number) - 1)
    assert len(errors) == 5
    assert float(np.median([*errors.values()])) <= 0.10, errors
