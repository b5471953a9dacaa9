"""The rehearsal on the CPU of what is run where there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT

pytest.importorskip("transformers")


def test_the_rehearsal_runs_every_part_and_names_itself_one(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_proof.py", "--output", str(tmp_path)]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=hidden, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["machine"]["device"] == "none: a rehearsal on the CPU"
    assert all(proof["parts"][title] for title in ("Device time of stages", "Overhead", "Answers"))
    assert "rehearsal" in (tmp_path / "proof.md").read_text()
