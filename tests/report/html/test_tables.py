"""Cells, bars, colours and facts of the HTML report."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.stages.overviews import steps as steps_table
from lightning_rlprof.analysis.stages.stage_times import stages
from lightning_rlprof.analysis.whatif.whatif import whatif
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.records import STAGES
from lightning_rlprof.report.html import tables as page_shares
from lightning_rlprof.report.html import tables as page_tables
from lightning_rlprof.report.html.colors import paints
from lightning_rlprof.report.html.page import render_report
from lightning_rlprof.report.html.run_facts import configuration, facts, missing, remarks, versions
from lightning_rlprof.report.html.tables import grid, ranks_grid, shares
from lightning_rlprof.tables.spans import RankNote, RunWarning
from lightning_rlprof.tables.table import Cell, Column, Table
from tests.builders.runs import grpo_rows, grpo_run, header, write_rank


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_a_stage_has_its_colour_whatever_else_is_there() -> None:
    alone = {name: paints([name])[name] for name in (*STAGES, "mine")}
    together = paints([*STAGES, "mine"])
    assert alone == together == paints(["mine", *reversed(STAGES)])
    assert len({paint.fill for paint in together.values()}) == len(together)


def test_own_stages_share_colours_only_when_there_are_too_many() -> None:
    few = paints([f"stage {n}" for n in range(8)])
    assert len({paint.fill for paint in few.values()}) == 8
    assert len(paints([f"stage {n}" for n in range(50)])) == 50


def test_names_can_be_read_on_their_colour() -> None:
    for fill, ink in paints([*STAGES, *(f"stage {n}" for n in range(8))]).values():
        light, dark = sorted([luminance(fill), luminance(ink)], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (fill, ink)


@pytest.mark.parametrize(
    ("cell", "column", "text", "unit", "part"),
    [
        (None, Column("x", "duration", "ns"), None, "", None),
        (65_000_000_000, Column("x", "duration", "ns"), "1 min 05", "s", None),
        (1_234_567, Column("x", "duration", "ns"), "1.23", "ms", None),
        (0.4321, Column("x", "share"), "43.2", "%", 0.4321),
        (1.7, Column("x", "share"), "170.0", "%", 1.0),
        (1.256, Column("x", "ratio"), "1.26x", "", None),
        (12345, Column("x", "count"), "12,345", "", None),
        (1234.5678, Column("x", "number", "MB/s"), "1,235", "MB/s", None),
        ("a", Column("x", "text"), "a", "", None),
    ],
)
def test_a_cell_says_what_it_holds(
    cell: Cell, column: Column, text: str | None, unit: str, part: float | None
) -> None:
    known: Cell = cell if cell is not None else 1
    table = Table("t", (Column("a", "text"), column), [("a", cell), ("b", known)])
    view = grid(table, "a", "A", "", {}).rows[0][1]
    assert (view.text, view.unit, view.part) == (text, unit, part)


def test_a_column_of_which_nothing_is_known_is_not_drawn(tmp_path: Path) -> None:
    table = stages(grpo_run(tmp_path / "run", steps=3))
    assert "slowest rank" in [column.name for column in table.columns]
    assert "slowest rank" not in [head.text for head in grid(table, "a", "A", "", {}).heads]


def test_a_long_table_says_how_many_rows_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "_MOST_ROWS", 2)
    table = Table("t", (Column("a", "text"),), [("a",)] * 5, note="Mind.")
    view = grid(table, "a", "A", "", {})
    assert len(view.rows) == 2
    assert view.note == "Mind. 3 more rows are not in this file."


def test_the_slow_rank_stands_out_and_equal_ranks_do_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for rank in range(4):
        slow = {"compute_reward": 1.3} if rank == 2 else None
        write_rank(run, header(rank, 4), grpo_rows(5, rank, slow=slow))
    steps = steps_table(load(run))
    view = ranks_grid(steps, "a", "A", "")
    at = [head.text for head in view.heads].index("compute_reward")
    parts = [row[at].part or 0.0 for row in view.rows]
    assert 0.45 < parts[2] < 0.75  # 30 % more than the median, full at 50 %, noise 5 %
    assert max(parts[:2] + parts[3:]) < 0.2
    assert ["most" in row[at].style for row in view.rows] == [False, False, True, False]
    other = [head.text for head in view.heads].index("actor_update")
    assert not any("most" in row[other].style for row in view.rows)


def test_a_rank_with_more_steps_is_not_slower(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_rank(run, header(0, 2), grpo_rows(8))
    write_rank(run, header(1, 2), grpo_rows(4))
    view = ranks_grid(steps_table(load(run)), "a", "A", "")
    assert all((cell.part or 0.0) < 0.2 for row in view.rows for cell in row[1:])


def test_bars_add_up_to_the_mean_step(tmp_path: Path) -> None:
    steps = steps_table(grpo_run(tmp_path / "run", steps=6, ranks=3))
    bars = shares(steps)
    assert bars["bars"] == [[n, n] for n in range(1, 7)]
    for bar, number in enumerate(range(1, 7)):
        walls = [int(row[3] or 0) for row in steps.rows if row[1] == number]
        total = sum(stage[bar] for stage in bars["values"])
        assert abs(total - sum(walls) / 3) <= len(bars["stages"])  # each is rounded down


def test_many_steps_share_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_shares, "_MOST_BARS", 3)
    steps = steps_table(grpo_run(tmp_path / "run", steps=7))
    rows = [(*row[:2], "capture" if row[1] == 5 else row[2], *row[3:]) for row in steps.rows]
    bars = shares(dataclasses.replace(steps, rows=rows))
    assert bars["bars"] == [[1, 3], [4, 6], [7, 7]]
    assert bars["states"] == ["", "capture", ""]
    walls = [int(row[3] or 0) for row in steps.rows]
    assert abs(sum(v[0] for v in bars["values"]) - sum(walls[:3]) / 3) <= len(bars["stages"])
    assert abs(sum(v[2] for v in bars["values"]) - walls[6]) <= len(bars["stages"])


def test_ranks_with_one_trouble_are_named_together(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run", steps=3)
    problems = [RunWarning(rank, "it stopped") for rank in (3, 0, 1, 2, 9)]
    spans = dataclasses.replace(
        spans,
        warnings=(*problems, RunWarning(None, "no clock"), RunWarning(4, "late")),
        notes=(RankNote(7, 0, "warning", "disk"), RankNote(None, 0, "info", "newest")),
    )
    assert missing(spans) == [
        ("ranks 0-3, 9", "it stopped"),
        ("", "no clock"),
        ("rank 4", "late"),
        ("rank 7", "disk"),
    ]
    assert remarks(spans) == [("", "newest")]


def test_values_that_differ_between_ranks_name_the_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for rank in range(3):
        config = {"a": {"b": rank // 2, "c": []}, "d": "x"}
        own = {"torch": "2.13.0"} | ({"cann": "8"} if rank == 1 else {})
        write_rank(run, header(rank, 3, config=config, versions=own), [])
    spans = load(run)
    assert configuration(spans) == [
        ("a.b", "0 (ranks 0-1); 1 (rank 2)"),
        ("a.c", "[]"),
        ("d", "x"),
    ]
    assert versions(spans) == [("torch", "2.13.0"), ("cann", "8 (rank 1)")]


def test_facts_count_what_is_there_and_what_should_be(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for rank in range(5):
        head = header(rank, 8, host=f"node-{rank}")
        write_rank(run, head, grpo_rows(3), status="finished" if rank else None)
    found = {fact.name: fact.value for fact in facts(load(run))}
    assert found["ranks"] == "5 of 8"
    assert found["steps"] == "3 (1-3)"
    assert found["ended"] == "4 of 5 finished"
    assert found["5 hosts"] == "node-0, node-1, node-2, … and 2 more"
    assert found["recorded"] == "2023-11-14 22:13 UTC"


def test_sizes_are_for_people() -> None:
    table = Table("memory", (Column("peak", "count", "bytes"),), [(3 << 30,), (None,)])
    cells = [row[0] for row in grid(table, "a", "Memory", "", {}).rows]
    assert [(cell.text, cell.unit) for cell in cells] == [("3.00", "GiB"), (None, "")]


def test_the_bounds_of_a_change_are_called_what_they_bound(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run", steps=9)
    table = whatif(spans)
    rows = [*zip(*map(table.column, ("CI low", "predicted", "CI high")), strict=True)]
    assert rows
    assert all(int(low or 0) <= int(middle or 0) <= int(high or 0) for low, middle, high in rows)
    page = render_report(spans, {"whatif": table}, "x")
    assert "low to high is the 95 % interval." in page
