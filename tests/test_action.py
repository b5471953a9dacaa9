"""The GitHub Action: its steps run as bash, as GitHub runs those of a composite action."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_stragglers import recorded
from tests.places import ROOT

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())


def act(folder: Path, **given: str) -> tuple[int, str, str]:
    """Return exit status, step summary and the output ``result`` of the action."""
    inputs = {name: each.get("default", "") for name, each in ACTION["inputs"].items()}
    inputs |= {name.replace("_", "-"): value for name, value in given.items()}
    files = {"GITHUB_STEP_SUMMARY": folder / "summary.md", "GITHUB_OUTPUT": folder / "output"}
    for file in files.values():
        file.touch()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for step in ACTION["runs"]["steps"]:
        env = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], value)
            for name, value in step.get("env", {}).items()
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env=os.environ | env | files | {"PATH": path, "GITHUB_ACTION_PATH": str(ROOT)},
            cwd=folder,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            break
    summary, output = (file.read_text() for file in files.values())
    return done.returncode, summary, output


@pytest.mark.deep
def test_the_action_gates_and_writes_the_comparison(tmp_path: Path) -> None:
    for name, slow in (("a run", {}), ("b", {}), ("slow", {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5})):
        recorded(tmp_path / name, steps=60, slow=slow)
    code, summary, output = act(tmp_path, baseline="a run\n", candidate="b", run_noise="0%")
    assert (code, output) == (0, "result=PASS\n")
    assert summary.startswith("PASS")
    assert "| stage |" in summary


@pytest.mark.deep
@pytest.mark.parametrize(
    ("given", "code", "result"),
    [
        ({"candidate": "slow", "run_noise": "1%"}, 1, "FAIL"),
        ({"candidate": "short"}, 3, "INCONCLUSIVE"),
        ({"candidate": "short", "allow_inconclusive": "true"}, 0, "INCONCLUSIVE"),
        ({"candidate": "b; touch injected"}, 2, ""),
        ({"candidate": '$(touch injected)"'}, 2, ""),
    ],
)
def test_the_job_ends_as_the_gate_says(
    tmp_path: Path, given: dict[str, str], code: int, result: str
) -> None:
    recorded(tmp_path / "a", steps=60, slow={})
    recorded(tmp_path / "slow", steps=60, slow={0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5})
    recorded(tmp_path / "short", steps=4, slow={})
    found = act(tmp_path, baseline="a", **given)
    assert (found[0], found[2]) == (code, f"result={result}\n" if result else "")
    assert not (tmp_path / "injected").exists()


def test_no_input_is_part_of_a_script() -> None:
    assert all("${{" not in step["run"] for step in ACTION["runs"]["steps"])
    assert set(ACTION["inputs"]) >= {"baseline", "candidate", "fail-if-slower"}
