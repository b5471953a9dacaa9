"""`rlprof findings`: trust first, then what to act on, with a command that can be typed."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from tests.cli.test_stragglers import recorded
from tests.test_run import recorded as short

Run = Callable[..., tuple[int, str, str]]


def test_trust_comes_first_and_each_finding_with_price_and_next_step(
    rlprof: Run, tmp_path: Path
) -> None:
    status, out, err = rlprof("findings", recorded(tmp_path / "a run", steps=20, slow={2: 0.15}))

    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path}/a run: Data quality"
    assert lines[1] == "ok          ranks: all 4 are present"
    at = lines.index("What to fix first")
    assert lines[at + 1].startswith("1. ")
    assert any(line.endswith("Rank 2 is a straggler (slow host)") for line in lines[at:])
    assert f"   rlprof stragglers '{tmp_path}/a run' --json" in lines
    assert any(line.startswith("   look at rank 2, step ") for line in lines)
    assert lines[-1].startswith("Next: rlprof report ")


def test_as_json_both_tables_are_there(rlprof: Run, tmp_path: Path) -> None:
    data = json.loads(rlprof("findings", recorded(tmp_path, steps=20, slow={}), "--json")[1])
    assert [table["name"] for table in data["tables"]] == ["data_quality", "findings"]
    assert data["ranks"] == [0, 1, 2, 3]


def test_a_run_of_which_nothing_can_be_said_says_so(rlprof: Run, tmp_path: Path) -> None:
    _, out, _ = rlprof("findings", short(tmp_path).path)
    assert "warn        ranks: 1 of 2 are missing: 1" in out
    assert "untraced (needs 5 steps, has 1)." in out
    assert "No problems found." in out


def test_every_command_that_it_prints_can_be_typed(rlprof: Run, tmp_path: Path) -> None:
    _, out, _ = rlprof("findings", recorded(tmp_path / "a run", steps=20, slow={2: 0.15}))
    commands = [line for line in out.splitlines() if line.startswith("   rlprof ")]
    assert len(commands) >= 2
    for command in commands:
        status, answer, err = rlprof(*shlex.split(command)[1:])
        assert (status, err) == (0, ""), command
        if " sql " in command:
            assert "actor" in answer
