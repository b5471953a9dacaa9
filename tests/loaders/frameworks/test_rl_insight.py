"""Rows of rl-insight, in the form that its parsers return them."""

import json
from pathlib import Path

import pytest

from lightning_rlprof.run import load

MS = 1_000_000


@pytest.mark.parametrize("first_ms", [0.0, 1_795_467_642_250.0])
def test_rows_are_stages_of_ranks_with_roles(first_ms: float, tmp_path: Path) -> None:
    rows = [
        {
            "name": name, "role": role, "domain": "default", "rank_id": rank, "tid": 7,
            "start_time_ms": first_ms + start, "end_time_ms": first_ms + end,
            "duration_ms": end - start,
        }
        for rank, role, name, start, end in (
            (0, "rollout", "generate_sequences", 0, 40),
            (1, "worker", "update_actor", 40, 60.5),
            (0, "rollout", "my_state", 40, 45),
        )
    ]  # fmt: skip
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load(path)
    assert {rank: run.headers[rank].role for rank in run.ranks} == {0: "rollout", 1: "worker"}
    assert [
        (span.rank, span.name, span.start_ns, span.end_ns) for span in run if span.kind == "stage"
    ] == [
        (0, "actor_generate", 0, 40 * MS),
        (0, "my_state", 40 * MS, 45 * MS),
        (1, "actor_update", 40 * MS, 60_500_000),
    ]
    assert run.unix_ns == int(first_ms) * MS


@pytest.mark.parametrize(("usual", "other"), [(1.7e12, 5.0), (5.0, 1.7e12)])
def test_a_row_on_another_clock_costs_no_other(usual: float, other: float, tmp_path: Path) -> None:
    rows = [
        {"name": "a", "role": "r", "rank_id": 0, "start_time_ms": at, "end_time_ms": at + 1}
        for at in (usual, usual + 1, other, usual + 2)
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load(path)
    assert len(run.rows(kind="stage")) == 3
    assert [each.text for each in run.warnings] == ["1 of its lines can't be read"]
