"""`rlprof show RUN critical_path`: what it prints."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.builders.fed import Fed, write
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


def test_an_asynchronous_run_also_has_a_cycle(rlprof: Run, tmp_path: Path) -> None:
    write(Fed(lag=1), tmp_path / "run")
    status, out, _ = rlprof("show", tmp_path / "run", "critical_path")
    assert status == 0
    assert "The cycle takes 70 ms and 1 step: 70 ms per step." in " ".join(out.split())

    tables = json.loads(
        rlprof("show", tmp_path / "run", "critical_path", "--json", "--by", "sample")[1]
    )["tables"]
    assert [table["name"] for table in tables] == ["critical_path", "bottleneck_cycle"]
    assert [row[:4] for row in tables[1]["rows"]] == [["actor_generate", "work", "rollout", 1]]
    assert tables[0]["columns"][-1]["name"] == "sample"
    on = [row for row in tables[0]["rows"] if row[7]]
    assert {row[10] % 100 for row in on} == {1}  # the samples of the slower rollout rank


def test_a_synchronous_run_has_no_cycle(rlprof: Run, tmp_path: Path) -> None:
    write(Fed(), tmp_path / "run")
    assert "The cycle takes" not in rlprof("show", tmp_path / "run", "critical_path")[1]
