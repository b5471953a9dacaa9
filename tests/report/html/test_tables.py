"""Cells and colors of the HTML report."""

from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.records.records import STAGES
from lightning_rlprof.report.html import tables as page_tables
from lightning_rlprof.report.html.colors import paints
from lightning_rlprof.report.html.tables import grid
from lightning_rlprof.tables.table import Cell, Column, Table
from tests.builders.runs import grpo_run


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


def test_sizes_are_for_people() -> None:
    table = Table("memory", (Column("peak", "count", "bytes"),), [(3 << 30,), (None,)])
    cells = [row[0] for row in grid(table, "a", "Memory", "", {}).rows]
    assert [(cell.text, cell.unit) for cell in cells] == [("3.00", "GiB"), (None, "")]
