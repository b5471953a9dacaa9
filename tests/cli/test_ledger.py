import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.runs import Row, grpo_rows, grpo_run, header, write_rank

Run = Callable[..., tuple[int, str, str]]


def test_it_shows_the_categories_and_what_has_no_data(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=3, ranks=2)

    status, out, err = rlprof("show", tmp_path / "run", "ledger")

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
    assert "warning" not in out


def test_a_table_by_rank_and_step(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, steps=2, ranks=2)
    assert "ledger by rank\n" in rlprof("show", tmp_path, "ledger", "--by", "rank")[1]
    assert "ledger by step\n" in rlprof("show", tmp_path, "ledger", "--by", "step")[1]
    out = rlprof("show", tmp_path, "ledger", "--by", "rank", "--by", "step")[1]
    assert "ledger by rank and step\n" in out
    rows = [line.split()[:2] for line in out.split("ledger by")[1].splitlines()]
    assert [row for row in rows if row and row[0] in "01"] == [
        ["0", "1"],
        ["0", "2"],
        ["1", "1"],
        ["1", "2"],
        ["1", "-"],
    ]


def test_the_totals_are_wall_time_times_ranks(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 3), grpo_rows(3, 0))
    write_rank(tmp_path, header(2, 3), grpo_rows(2, 1), status=None)

    data = json.loads(
        rlprof("show", tmp_path, "ledger", "--json", "--by", "rank", "--price", "2")[1]
    )

    assert (data["run"], data["ranks"], data["missing_ranks"]) == (str(tmp_path), [0, 2], [1])
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
def test_a_wrong_price_is_refused(rlprof: Run, tmp_path: Path, price: str) -> None:
    grpo_run(tmp_path)
    status, out, err = rlprof("show", tmp_path, "ledger", "--price", price)
    assert (status, out) == (2, "")
    assert err.startswith("rlprof: error: --price ")
    assert err.endswith("hint: For example --price 2.50\n")


def test_warnings_of_the_run_are_counted(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 2), [Row("actor_update", "stage", 1, 0, 9)], status=None)
    out = rlprof("show", tmp_path, "ledger")[1]
    assert f"warning: 2 data-quality issues. See: rlprof summary {tmp_path}\n" in out


def test_a_run_without_spans_has_no_data(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path, header(), [])
    out = rlprof("show", tmp_path, "ledger", "--by", "rank")[1]
    assert "ledger: no data. No spans were recorded\n" in out
    assert "ledger by rank: no data. No spans were recorded\n" in out
