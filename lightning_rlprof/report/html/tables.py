"""Tables as the cells of an HTML page: units, chips of color, bars behind shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_rlprof.analysis.stages import UNTRACED_PART
from lightning_rlprof.report.html.colors import Paint
from lightning_rlprof.report.terminal import duration, hours, size
from lightning_rlprof.tables.table import Cell, Column, Table, figure

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
    barred = next((at for at in known if table.columns[at].kind == "share"), None)
    styles = {at: _style(table.columns[at], at, barred) for at in known}
    heads = [Head(table.columns[at].name, styles[at]) for at in known]
    rows = [
        [_cell(row[at], table.columns[at], styles[at], paints) for at in known]
        for row in table.rows[:_MOST_ROWS]
    ]
    note = f"{table.note} {_more(len(table.rows))}".strip()
    return GridView(anchor, title, lead, heads, rows, note, table.abstained)


def _style(column: Column, at: int, barred: int | None) -> str:
    """Return the classes of a column; of several shares the first has bars."""
    if at == barred:
        return "share"
    if column.kind != "text":
        return "num" if at else ""
    return "name" if at == 0 or column.name in _STAGE_COLUMNS else ""


def _cell(cell: Cell, column: Column, style: str, paints: Mapping[str, Paint]) -> CellView:
    if cell is None:
        return CellView(None, style=style)
    if isinstance(cell, str):
        return CellView(cell, style=style, chip=_chip(cell, column, paints))
    match column.kind:
        case "duration" | "time":
            return _duration(int(cell), style)
        case "share":
            part = round(max(0.0, min(1.0, float(cell))), 4) if style == "share" else None
            return CellView(f"{100 * cell:.1f}", "%", style, part)
        case "ratio":
            return CellView(f"{cell:.2f}x", style=style)
    if column.unit == "bytes":
        number, _, unit = size(int(cell)).partition(" ")
        return CellView(number, unit, style)
    if column.unit == "h":
        number, _, unit = hours(cell).partition(" ")
        return CellView(number, unit, style)
    text = figure(cell) if isinstance(cell, float) else f"{cell:,}"
    return CellView(text, column.unit, style)


def _duration(ns: int, style: str, part: float | None = None) -> CellView:
    number, _, unit = duration(ns).rpartition(" ")  # units line up, in "1 min 05 s" too
    return CellView(number, unit, style, part)


def _chip(name: str, column: Column, paints: Mapping[str, Paint]) -> str | None:
    if column.name not in _STAGE_COLUMNS:
        return None
    if name == UNTRACED_PART:
        return UNTRACED_PART
    return paints[name].fill if name in paints else None


def _more(rows: int) -> str:
    return f"{rows - _MOST_ROWS:,} more rows are not in this file." if rows > _MOST_ROWS else ""
