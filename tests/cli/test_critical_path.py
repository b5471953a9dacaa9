"""`rlprof critical-path`: what it prints."""

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
    status, out, err = rlprof("critical-path", run)

    assert (status, err) == (0, f"next: rlprof whatif {run}\n")
    assert out.startswith(f"{run}: critical path of a step\n")
    (line,) = [line.split() for line in out.splitlines() if line.startswith("actor_generate")]
    assert line[3] == "2"


def test_json_by_rank(rlprof: Run, tmp_path: Path) -> None:
    data = json.loads(rlprof("critical-path", slow_run(tmp_path), "--json", "--by", "rank")[1])

    (table,) = data["tables"]
    assert data["ranks"] == [0, 1, 2, 3]
    own = [row for row in table["rows"] if row[:2] == ["actor_generate", "work"]]
    assert [row[3] for row in own if row[7]] == [2]
    assert len(own) == 4


def test_an_asynchronous_run_also_has_a_cycle(rlprof: Run, tmp_path: Path) -> None:
    write(Fed(lag=1), tmp_path / "run")
    status, out, _ = rlprof("critical-path", tmp_path / "run")
    assert status == 0
    assert "The cycle takes 70 ms and 1 step: 70 ms per step." in " ".join(out.split())

    tables = json.loads(rlprof("critical-path", tmp_path / "run", "--json", "--by", "sample")[1])[
        "tables"
    ]
    assert [table["name"] for table in tables] == ["critical_path", "bottleneck_cycle"]
    assert [row[:4] for row in tables[1]["rows"]] == [["actor_generate", "work", "rollout", 1]]
    assert tables[0]["columns"][-1]["name"] == "sample"
    on = [row for row in tables[0]["rows"] if row[7]]
    assert {row[10] % 100 for row in on} == {1}  # the samples of the slower rollout rank


def test_a_synchronous_run_has_no_cycle(rlprof: Run, tmp_path: Path) -> None:
    write(Fed(), tmp_path / "run")
    assert "The cycle takes" not in rlprof("critical-path", tmp_path / "run")[1]


def test_level_device_shows_the_path_of_each_device(rlprof: Run, tmp_path: Path) -> None:
    write(Fed(), tmp_path / "run")
    data = json.loads(rlprof("critical-path", tmp_path / "run", "--level", "device", "--json")[1])
    assert [table["name"] for table in data["tables"]] == ["device_critical_path"]
    words = ("critical-path", tmp_path / "run", "--level", "device", "--by", "rank")
    assert rlprof(*words)[::2] == (2, "rlprof: error: --by applies to --level rank only\n")
