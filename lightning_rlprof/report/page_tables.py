"""Tables as the cells of an HTML page: units, chips of colour, bars behind shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from lightning_rlprof.report.page_colors import UNTRACED, Paint
from lightning_rlprof.report.text import duration
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["CellView", "GridView", "Head", "grid", "ranks_grid"]

_MOST_ROWS = 300
_STAGE_COLUMNS = ("stage", "after", "before")


@dataclass(frozen=True)
class CellView:
    """One cell: its text (None: not known), unit, CSS classes, and what is drawn with it.

    ``part`` (0 to 1) is the length of a bar or the strength of a shade; ``chip`` a colour.
    """

    text: str | None
    unit: str = ""
    style: str = ""
    part: float | None = None
    chip: str | None = None


@dataclass(frozen=True)
class Head:
    """A column's heading and its CSS classes."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class GridView:
    """A table with title and lead, ready for the template."""

    anchor: str
    title: str
    lead: str
    heads: Sequence[Head]
    rows: Sequence[Sequence[CellView]]
    note: str = ""
    abstained: str | None = None


def grid(table: Table, anchor: str, title: str, lead: str, paints: Mapping[str, Paint]) -> GridView:
    """Return a table without columns of which nothing is known, and at most `_MOST_ROWS` rows."""
    known = [
        at for at in range(len(table.columns)) if any(row[at] is not None for row in table.rows)
    ]
    heads = [Head(table.columns[at].name, _style(table.columns[at], at)) for at in known]
    rows = [
        [_cell(row[at], table.columns[at], at, paints) for at in known]
        for row in table.rows[:_MOST_ROWS]
    ]
    notes = [table.note] if table.note else []
    if len(table.rows) > _MOST_ROWS:
        notes.append(f"{len(table.rows) - _MOST_ROWS:,} more rows are not in this file.")
    return GridView(anchor, title, lead, heads, rows, " ".join(notes), table.abstained)


def ranks_grid(
    table: Table, anchor: str, title: str, lead: str, paints: Mapping[str, Paint]
) -> GridView:
    """Return the table of stages per rank with a row per rank and a column per stage.

    What is above the column's median is shaded, fully from half as much again; the largest is bold
    where it is 5 % or more above, since some rank is always the slowest.
    """
    totals: dict[tuple[Cell, Cell], int] = {}
    for rank, stage, total in zip(
        *(table.column(name) for name in ("rank", "stage", "total")), strict=True
    ):
        totals[rank, stage] = int(total or 0)
    ranks = list(dict.fromkeys(rank for rank, _ in totals))
    weights: dict[Cell, int] = {}
    for (_, stage), total in totals.items():
        weights[stage] = weights.get(stage, 0) + total
    stages = sorted(weights, key=lambda stage: (stage == UNTRACED, -weights[stage]))
    columns = {stage: [totals.get((rank, stage)) for rank in ranks] for stage in stages}
    shades = {stage: _shades(values) for stage, values in columns.items()}
    rows = [
        [CellView(str(rank)), *(shades[stage][at] for stage in stages)]
        for at, rank in enumerate(ranks[:_MOST_ROWS])
    ]
    heads = [Head("rank"), *(Head(str(stage), "num") for stage in stages)]
    return GridView(anchor, title, lead, heads, rows, table.note, table.abstained)


def _style(column: Column, at: int) -> str:
    if column.kind == "share":
        return "share"
    if column.kind != "text":
        return "num" if at else ""
    return "name" if at == 0 or column.name in _STAGE_COLUMNS else ""


def _cell(cell: Cell, column: Column, at: int, paints: Mapping[str, Paint]) -> CellView:
    style = _style(column, at)
    if cell is None:
        return CellView(None, style=style)
    if isinstance(cell, str):
        return CellView(cell, style=style, chip=_chip(cell, column, paints))
    match column.kind:
        case "duration":
            return _duration(int(cell), style)
        case "share":
            part = max(0.0, min(1.0, float(cell)))
            return CellView(f"{100 * cell:.1f}", "%", style, round(part, 4))
        case "ratio":
            return CellView(f"{cell:.2f}x", style=style)
    text = f"{cell:,.4g}" if isinstance(cell, float) else f"{cell:,}"
    return CellView(text, column.unit, style)


def _duration(ns: int, style: str, part: float | None = None) -> CellView:
    number, _, unit = duration(ns).rpartition(" ")  # units line up, in "1 min 05 s" too
    return CellView(number, unit, style, part)


def _chip(name: str, column: Column, paints: Mapping[str, Paint]) -> str | None:
    if column.name not in _STAGE_COLUMNS:
        return None
    if name == UNTRACED:
        return UNTRACED
    return paints[name].fill if name in paints else None


def _shades(values: Sequence[int | None]) -> list[CellView]:
    known = [value for value in values if value is not None]
    middle, most = median_low(known), max(known)
    views = []
    for value in values:
        if value is None:
            views.append(CellView(None, style="num"))
            continue
        excess = max(0.0, value / middle - 1) if middle else 0.0
        style = "num heat most" if value == most and excess >= 0.05 else "num heat"
        views.append(_duration(value, style, round(min(1.0, 2 * excess), 3)))
    return views
