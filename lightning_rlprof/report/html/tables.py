"""Tables as the cells of an HTML page: units, chips of colour, bars behind shares.

How the stages' times change over the steps, as bars that fit on a page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np

from lightning_rlprof.report.finding_cards import CardView
from lightning_rlprof.report.html.colors import UNTRACED, Paint
from lightning_rlprof.report.terminal import duration, hours, size
from lightning_rlprof.tables.table import Cell, Column, Table, figure

FIRST_STAGE = 4
"""Columns of the table of all steps before its stages: rank, step, state, wall."""

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
    """A table with title and lead, ready for the template; with cards in the place of rows."""

    anchor: str
    title: str
    lead: str
    heads: Sequence[Head]
    rows: Sequence[Sequence[CellView]]
    note: str = ""
    abstained: str | None = None
    cards: Sequence[CardView] = ()


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


def ranks_grid(steps: Table, anchor: str, title: str, lead: str) -> GridView:
    """Return a row per rank and a column per stage: exclusive time per complete step, the mean.

    What is above the column's median is shaded, fully from half as much again; the largest is bold
    where it is 5 % or more above, since some rank is always the slowest.
    """
    stages = [column.name for column in steps.columns[FIRST_STAGE:]]
    times = np.array([row[FIRST_STAGE:] for row in steps.rows], dtype=np.int64)
    complete = np.array([state == "complete" for state in steps.column("state")])
    keep = complete if complete.any() else ~complete
    ranks, place, count = np.unique(
        np.array(steps.column("rank"))[keep], return_inverse=True, return_counts=True
    )
    sums = np.zeros((len(ranks), len(stages)), dtype=np.int64)
    np.add.at(sums, place, times[keep])
    columns = [_shades(column) for column in (sums // count[:, None]).T.tolist()]
    rows = [
        [CellView(f"{rank}"), *(column[at] for column in columns)]
        for at, rank in enumerate(ranks[:_MOST_ROWS].tolist())
    ]
    heads = [Head("rank"), *(Head(stage, "num") for stage in stages)]
    return GridView(anchor, title, lead, heads, rows, _more(len(ranks)))


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
        number, _, unit = hours(float(cell)).rpartition(" ")
        return CellView(number, unit, style)
    text = figure(cell) if isinstance(cell, float) else f"{cell:,}"
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


def _shades(values: Sequence[int]) -> list[CellView]:
    middle, most = median_low(values), max(values)
    views = []
    for value in values:
        excess = max(0.0, value / middle - 1) if middle else 0.0
        style = "num heat most" if value == most and excess >= 0.05 else "num heat"
        views.append(_duration(value, style, round(min(1.0, 2 * excess), 3)))
    return views


def _more(rows: int) -> str:
    return f"{rows - _MOST_ROWS:,} more rows are not in this file." if rows > _MOST_ROWS else ""


_MOST_BARS = 240  # on a page 1180 px wide a bar is then four pixels


def shares(steps: Table | None) -> dict[str, Any]:
    """Return stages and one bar per step, or per ``width`` steps, from the table of all steps.

    Bars hold integer nanoseconds of exclusive time, the mean over ranks and steps.

    Example::

        >>> shares(None)
        {'stages': [], 'bars': [], 'values': [], 'width': 1, 'states': []}
    """
    if steps is None or not steps.rows:
        return {"stages": [], "bars": [], "values": [], "width": 1, "states": []}
    times = np.array([row[FIRST_STAGE:] for row in steps.rows], dtype=np.int64)
    numbers, place, ranks = np.unique(
        np.array(steps.column("step")), return_inverse=True, return_counts=True
    )
    sums = np.zeros((len(numbers), times.shape[1]), dtype=np.int64)
    np.add.at(sums, place, times)
    width = -(-len(numbers) // _MOST_BARS)
    heads = np.arange(0, len(numbers), width)
    count = np.add.reduceat(ranks, heads)
    means = np.add.reduceat(sums, heads, axis=0) // count[:, None]
    last = np.append(heads[1:], len(numbers)) - 1
    return {
        "stages": [column.name for column in steps.columns[FIRST_STAGE:]],
        "bars": [[int(numbers[a]), int(numbers[b])] for a, b in zip(heads, last, strict=True)],
        "values": means.T.tolist(),
        "width": width,
        "states": _states(steps, place // width, len(heads)),
    }


def _states(steps: Table, bar: Any, bars: int) -> list[str]:
    """Return per bar what is not complete about it: ``capture``, ``interrupted`` or nothing."""
    found: list[set[str]] = [set() for _ in range(bars)]
    for at, state in zip(bar.tolist(), steps.column("state"), strict=True):
        if state != "complete":
            found[at].add(str(state))
    return [", ".join(sorted(states)) for states in found]
