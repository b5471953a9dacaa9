"""`examples/servers`: a training, a tool server and a judge are one run, and name what was slow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.run import load
from tests.places import ROOT


@pytest.mark.deep
def test_the_slow_tool_is_named_on_the_side_where_it_ran(tmp_path: Path) -> None:
    program = ROOT / "examples" / "servers" / "train.py"
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlprof", "run", "--", sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "profiler_data").glob("2*")
    run = load(path)
    assert {row[0]: row[1] for row in run.roles().rows} == {"actor": 1, "tools": 1, "judge": 1}
    cause = run.tail_causes().rows[0]
    assert (cause[0], cause[4]) == ("tools", "env_step (tools)")
    slow = {(row[0], row[2]) for row in run.sample_path().rows}
    assert {("env_step", "tools"), ("compute_reward", "judge")} <= slow
    assert not run.warnings
