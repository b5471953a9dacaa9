"""`rlprof show RUN critical_path`: what it prints."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.test_stragglers import recorded

Run = Callable[..., tuple[int, str, str]]


def slow_run(folder: Path) -> Path:
    return recorded(folder / "slow", steps=20, slow={2: 0.15})


def test_the_path_names_stage_and_rank(rlprof: Run, tmp_path: Path, hints: None) -> None:
    run = slow_run(tmp_path)
    status, out, err = rlprof("show", run, "critical_path")

    assert (status, err) == (0, f"next: rlprof whatif {run}\n")
    assert out.startswith(f"{run}\n")
    assert rlprof("show", run, "critical-path")[:2] == (status, out)
    (line,) = [line.split() for line in out.splitlines() if line.startswith("actor_generate")]
    assert line[3] == "2"


def test_json_by_rank(rlprof: Run, tmp_path: Path) -> None:
    data = json.loads(
        rlprof("show", slow_run(tmp_path), "critical_path", "--json", "--by", "rank")[1]
    )

    (table,) = data["tables"]
    assert data["ranks"] == [0, 1, 2, 3]
    own = [row for row in table["rows"] if row[:2] == ["actor_generate", "work"]]
    assert [row[3] for row in own if row[7]] == [2]
    assert len(own) == 4
