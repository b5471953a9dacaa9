"""`rlprof findings`: data quality first, then findings with commands that run."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from tests.cli.test_stragglers import recorded
from tests.test_run import recorded as short

Run = Callable[..., tuple[int, str, str]]


def test_data_quality_comes_first_then_findings_with_cost_and_next_step(
    rlprof: Run, tmp_path: Path, hints: None
) -> None:
    status, out, err = rlprof("findings", recorded(tmp_path / "a run", steps=20, slow={2: 0.15}))

    assert status == 0
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path}/a run: data quality"
    assert lines[1].split() == ["ok", "ranks:", "4", "of", "4", "present"]
    at = lines.index("Findings")
    assert lines[at + 1].startswith("1. ")
    assert any(
        "Rank 2 is a straggler" in line and line.endswith("(slow rank)") for line in lines[at:]
    )
    assert f"   rlprof stragglers '{tmp_path}/a run' --json" in lines
    assert any(line.startswith("   see rank 2, step ") for line in lines)
    first = next(line for line in lines[at:] if line.startswith("   rlprof "))
    assert err == f"next: {first.strip()}\n"


def test_json_has_both_tables(rlprof: Run, tmp_path: Path) -> None:
    data = json.loads(rlprof("findings", recorded(tmp_path, steps=20, slow={}), "--json")[1])
    assert [table["name"] for table in data["tables"]] == ["data_quality", "findings"]
    assert data["ranks"] == [0, 1, 2, 3]


def test_commands_in_json_have_the_path_of_the_run(rlprof: Run, tmp_path: Path) -> None:
    run = recorded(tmp_path / "a run", steps=20, slow={2: 0.15})
    for words in (("findings", run), ("show", run, "findings")):
        text = rlprof(*words, "--json")[1]
        rows = json.loads(text)["tables"][-1]["rows"]
        assert any(f"rlprof stragglers '{tmp_path}/a run' --json" in row for row in rows)
        assert "RUN" not in text


def test_a_run_without_findings(rlprof: Run, tmp_path: Path) -> None:
    _, out, _ = rlprof("findings", short(tmp_path).path)
    assert "ranks: 1 of 2 are missing: 1" in out
    assert "No problems found." in out
    assert " not decided. See why: rlprof show " in out
    _, out, _ = rlprof("show", short(tmp_path / "same").path, "findings")
    assert "untraced (needs 5 steps, has 1)." in " ".join(out.split())


def test_every_printed_command_runs(rlprof: Run, tmp_path: Path) -> None:
    _, out, _ = rlprof("findings", recorded(tmp_path / "a run", steps=20, slow={2: 0.15}))
    commands = [line for line in out.splitlines() if line.startswith("   rlprof ")]
    assert len(commands) >= 2
    for command in commands:
        status, answer, err = rlprof(*shlex.split(command)[1:])
        assert (status, err) == (0, ""), command
        if " sql " in command:
            assert "actor" in answer
