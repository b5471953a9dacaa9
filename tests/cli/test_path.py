"""`rlprof path`: what it prints."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.test_stragglers import recorded

Run = Callable[..., tuple[int, str, str]]


def slow_run(folder: Path) -> Path:
    return recorded(folder / "slow", steps=20, slow={2: 0.15})


def test_the_path_names_stage_and_rank_and_what_to_ask_next(rlprof: Run, tmp_path: Path) -> None:
    run = slow_run(tmp_path)
    status, out, err = rlprof("path", run)

    assert (status, err) == (0, "")
    assert out.startswith(f"{run}: what a step's length hangs on\n")
    (line,) = [line.split() for line in out.splitlines() if line.startswith("actor_generate")]
    assert line[4] == "2"
    assert f"Next: rlprof whatif {run}" in out


def test_the_path_as_json_and_per_rank(rlprof: Run, tmp_path: Path) -> None:
    data = json.loads(rlprof("path", slow_run(tmp_path), "--json", "--per-rank")[1])

    (table,) = data["tables"]
    assert data["ranks"] == [0, 1, 2, 3]
    own = [row for row in table["rows"] if row[:2] == ["actor_generate", "own time"]]
    assert [row[3] for row in own if row[7]] == [2]
    assert len(own) == 4
