"""The benchmark of background metrics: it runs, and prints what the page shows."""

import subprocess
import sys

from tests.places import ROOT


def test_it_prints_a_row_for_each_thread_and_callback() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/background.py"), "--quick", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 1 + 3 + 4
    assert "a sampler, share of a core" in done.stdout
    assert "--quick is too short to judge" in done.stderr
