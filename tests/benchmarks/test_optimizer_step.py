"""The benchmark of a short step measures in a process that records, and only there."""

import subprocess
import sys

import pytest

from tests.places import ROOT

SCRIPT = ROOT / "benchmarks" / "optimizer_step.py"


@pytest.mark.deep
def test_it_measures_the_door_beside_its_control() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--markdown"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| the door " in done.stdout
    assert "2 rounds of 10 steps" in done.stdout


@pytest.mark.deep
def test_without_the_door_it_measures_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env={"RLPROF_BENCHMARK_ROUNDS": "1", "PATH": ""},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode
    assert "the door to PyTorch is not in place" in done.stderr
