"""Published jobs, as docs/guides/device-tables.md lists them, are feasible; half of each is judged.

Each row is parsed from the page and sized by the command, so the page cannot differ from it.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_rlprof.cli.app import app
from tests.analysis.models.published import CONFIGS
from tests.places import ROOT

PAGE = (ROOT / "docs" / "guides" / "device-tables.md").read_text()
SIZED_AS = {
    "Qwen2-70B": "Qwen2.5-72B",
    "Qwen3-235B": "Qwen3-235B-A22B",
    "DeepSeek-671B": "DeepSeek-V3",
    "DeepSeek-R1": "DeepSeek-V3",
    **{f"Qwen2-{size}": f"Qwen2.5-{size}" for size in ("7B", "14B", "32B")},
}
PUBLISHED = """
Qwen2.5-0.5B 1xH100, Qwen2.5-1.5B 1xH100, Qwen2.5-3B 1xH100, Qwen2-7B 2xH800, Qwen2.5-7B 1xH100,
Qwen2-14B 4xH800, Qwen2.5-14B 2xH100, Qwen2-32B 8xH20, Qwen2.5-32B 4xH100, Qwen2-70B 32xH20,
Qwen2-70B 32xH800, Qwen2.5-72B 8xH100,
DeepSeek-671B 96xH20, DeepSeek-671B 128xH20, DeepSeek-671B 256xH20, DeepSeek-671B 512xH20,
Qwen3-235B 32xH20, Qwen3-235B 64xH20, Qwen3-235B 128xH20, Qwen3-235B 256xH20,
Qwen3-30B-A3B 8xH20, Qwen3-30B-A3B 16xH20, Qwen3-30B-A3B 32xH20,
Qwen2.5-32B 16x910C, DeepSeek-R1 256x910C
"""
"""verl's device tuning, its page on very large models, and MindSpeed-RL's jobs on Atlas A3."""

ROWS = [
    [cell.strip().strip("`") for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| [^|]+ (?:\| [^|]+ )*\| `\d+x", line)
]


def sized(folder: Path, model: str, job: str) -> dict[str, Any]:
    """Return what `rlprof size --json` prints for the devices and options of a cell."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[SIZED_AS.get(model, model)]))
    devices, *options = shlex.split(job)
    given = ["size", "--model", str(path), "--devices", devices, *options, "--json"]
    lengths = ["--prompt-length", "1024", "--response-length", "1024"]
    result = CliRunner().invoke(app, [*given, *lengths])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:-2]))
def test_a_published_job_is_feasible_and_half_of_it_is_judged_as_the_page_says(
    row: list[str], tmp_path: Path
) -> None:
    model, job, verdict, spare, half, then = row[0], *row[-5:]
    found = sized(tmp_path, model, job)
    assert found["verdict"] in ("fits", "close")
    low, high = (each / 1e9 for each in found["spare_bytes"])
    assert (verdict, spare) == (found["verdict"], f"{low:.0f} to {high:.0f}")
    number = int(job.split("x")[0])
    if number == 1:
        assert (half, then) == ("-", "-")
    else:
        assert int(half.split("x")[0]) == number // 2
        assert half.split()[0].split("x")[1] == job.split()[0].split("x")[1]
        assert then == sized(tmp_path, model, half)["verdict"]


def test_the_page_lists_every_published_row() -> None:
    listed = [f"{row[0]} {row[-5].split()[0].rpartition('-')[0]}" for row in ROWS]
    assert listed == re.split(r",\s+", PUBLISHED.strip())
