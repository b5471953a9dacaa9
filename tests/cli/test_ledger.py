import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.runs import Row, grpo_rows, grpo_run, header, write_rank

Run = Callable[..., tuple[int, str, str]]


def test_it_shows_where_the_seconds_went_and_what_is_not_told(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=3, ranks=2)

    status, out, err = rlprof("ledger", tmp_path / "run")

    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    names = ("rollout", "compute", "untraced")
    first = [line[0] for line in lines if line[:1] and line[0] in names and line[1].endswith("%")]
    assert first == list(names)
    assert not [line for line in lines if line[:1] == ["backpressure"]]
    text = " ".join(out.split())
    assert "2 ranks × 0.28" in text
    assert "host-bound idle (needs device kernels)" in text
    assert "ledger by" not in out
    assert "doubts" not in out
    assert out.endswith(f"\nNext: rlprof report {tmp_path}/run\n")


def test_every_rank_and_every_step_by_itself(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, steps=2, ranks=2)
    assert "ledger by rank\n" in rlprof("ledger", tmp_path, "--per-rank")[1]
    assert "ledger by step\n" in rlprof("ledger", tmp_path, "--per-step")[1]
    out = rlprof("ledger", tmp_path, "--per-rank", "--per-step")[1]
    assert "ledger by rank and step\n" in out
    rows = [line.split()[:2] for line in out.split("ledger by")[1].splitlines()]
    assert [row for row in rows if row and row[0] in "01"] == [
        ["0", "1"],
        ["0", "2"],
        ["1", "1"],
        ["1", "2"],
        ["1", "-"],
    ]


def test_as_json_the_totals_are_the_wall_clock_times_the_ranks(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 3), grpo_rows(3, 0))
    write_rank(tmp_path, header(2, 3), grpo_rows(2, 1), status=None)

    data = json.loads(rlprof("ledger", tmp_path, "--json", "--per-rank", "--price", "2")[1])

    assert (data["run"], data["ranks"], data["silent_ranks"]) == (str(tmp_path), [0, 2], [1])
    assert [problem["rank"] for problem in data["warnings"]] == [None, 2]
    table, by_rank = data["tables"]
    assert (table["name"], by_rank["name"]) == ("ledger", "ledger by rank")
    names = [column["name"] for column in table["columns"]]
    assert names[:5] == ["category", "share", "rank-hours", "cost", "total"]
    rows = [dict(zip(names, row, strict=True)) for row in table["rows"]]
    assert sum(row["total"] for row in rows) == 3 * data["wall_ns"]
    assert all(row["cost"] == 2 * row["rank-hours"] for row in rows)
    assert [row[:2] for row in by_rank["rows"]] == [[rank, data["wall_ns"]] for rank in range(3)]


@pytest.mark.parametrize("price", ["-1", "nan", "inf"])
def test_a_price_that_is_none_is_refused(rlprof: Run, tmp_path: Path, price: str) -> None:
    grpo_run(tmp_path)
    status, out, err = rlprof("ledger", tmp_path, "--price", price)
    assert (status, out) == (1, "")
    assert err.startswith("rlprof: --price ")
    assert err.endswith(": a GPU-hour costs 0 euros or more, for instance 2.5\n")


def test_doubts_about_the_run_are_not_passed_over(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 2), [Row("actor_update", "stage", 1, 0, 9)], status=None)
    assert "! 2 doubts about this run: rlprof summary tells them\n" in rlprof("ledger", tmp_path)[1]


def test_a_run_without_spans_is_told_in_a_line(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path, header(), [])
    out = rlprof("ledger", tmp_path, "--per-rank")[1]
    assert "ledger: not told, no spans were recorded\n" in out
    assert "ledger by rank: not told, no spans were recorded\n" in out
