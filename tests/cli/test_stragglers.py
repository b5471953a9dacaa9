"""`rlprof stragglers`: the slow rank, or why no rank is named."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.builders.runs import Row, header, write_rank

Run = Callable[..., tuple[int, str, str]]
MS = 1_000_000


def recorded(
    run: Path,
    *,
    steps: int,
    slow: dict[int, float],
    facts: Mapping[str, float] | None = None,
    **head: Any,
) -> Path:
    """Write four ranks that generate, then wait for one another in the update."""
    chance = random.Random(3)
    rows: dict[int, list[Row]] = {rank: [] for rank in range(4)}
    now = 0
    for step in range(1, steps + 1):
        own = {
            rank: round((1 + slow.get(rank, 0.0)) * chance.uniform(98, 102) * MS) for rank in rows
        }
        end = now + max(own.values()) + 20 * MS
        for rank, took in own.items():
            generate = Row("actor_generate", "stage", step, now, now + took)
            update = Row("actor_update", "stage", step, now + took, end)
            counted = {"tokens": 4096, **(facts or {})}
            rows[rank] += [
                Row("step", "step", step, now, end),
                *(each._replace(counters=counted) for each in (generate, update)),
            ]
        now = end
    for rank, own_rows in rows.items():
        write_rank(run, header(rank, 4, **head), own_rows)
    return run


def test_it_names_the_slow_rank(rlprof: Run, tmp_path: Path, hints: None) -> None:
    status, out, err = rlprof("stragglers", recorded(tmp_path, steps=20, slow={2: 0.15}))

    assert (status, err) == (0, f"next: rlprof whatif {tmp_path}\n")
    assert out.startswith(f"{tmp_path}: stragglers\n")
    (row,) = [line.split() for line in out.splitlines() if line.lstrip().startswith("2 ")]
    assert row[1:3] == ["slow", "rank"]
    assert "actor_generate" in row


def test_json_has_the_verdict_with_its_evidence(rlprof: Run, tmp_path: Path) -> None:
    data = json.loads(
        rlprof("stragglers", recorded(tmp_path, steps=20, slow={2: 0.15}), "--json")[1]
    )

    (table,) = data["tables"]
    names = [column["name"] for column in table["columns"]]
    (row,) = (dict(zip(names, each, strict=True)) for each in table["rows"])
    assert (data["ranks"], data["warnings"]) == ([0, 1, 2, 3], [])
    assert (row["rank"], row["verdict"], row["steps"]) == (2, "slow rank", "1-20")
    assert row["CI low"] < 0.15 < row["CI high"]
    assert row["peer time lost"] == pytest.approx(20 * 3 * 0.13 * 100 * MS, rel=0.2)


@pytest.mark.parametrize(
    ("steps", "text"), [(20, "no straggler"), (6, "comparing 4 ranks needs 11, role actor has 6")]
)
def test_without_a_verdict_it_says_why(steps: int, text: str, rlprof: Run, tmp_path: Path) -> None:
    status, out, _ = rlprof("stragglers", recorded(tmp_path, steps=steps, slow={}))
    assert status == 0
    assert text in " ".join(out.split())
