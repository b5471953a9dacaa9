"""`rlprof whatif`: what it prints, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_stragglers import recorded

Run = Callable[..., tuple[int, str, str]]


def slow_run(folder: Path) -> Path:
    return recorded(folder / "slow", steps=20, slow={2: 0.15})


def rows(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (table,) = data["tables"]
    names = [column["name"] for column in table["columns"]]
    return {row[0]: dict(zip(names, row, strict=True)) for row in table["rows"]}


def test_a_removed_stage_is_a_row_and_nothing_is_written(rlprof: Run, tmp_path: Path) -> None:
    run = slow_run(tmp_path)
    data = json.loads(rlprof("whatif", run, "--json", "--remove", "actor_update")[1])
    assert [path.name for path in run.iterdir() if "rank-" not in path.name] == []
    assert "actor_update removed" in rows(data)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--speedup", "fast"), "--speedup fast is not STAGE=N\n  hint: For example --speedup"),
        (("--remove", "actor_generat"), "\n  hint: did you mean 'actor_generate'?"),
        (("--remove", "nonsense"), "unknown stage 'nonsense'. Stages in this run: actor_gen"),
        (("--stop-rollout-at", "0.9"), "request"),
    ],
)
def test_errors_say_what_to_do(
    words: tuple[str, ...], text: str, rlprof: Run, tmp_path: Path
) -> None:
    status, out, err = rlprof("whatif", slow_run(tmp_path), *words)
    assert (status, out) == (2, "")
    assert text in err
