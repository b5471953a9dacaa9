"""The live page of a run: the first screen of its report as HTML and SVG, which need no script.

What the page says of steps is what `report.summary` and `StepCharts` say, as in the report. Its
drawing is bounded: the last 200 steps, 14 parts of each, 256 ranks.
"""

import base64
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlprof.report.html.page import first_screen
from lightning_rlprof.report.html.step_charts import Paint, StepCharts, stage_paints
from lightning_rlprof.report.live_view import LiveView
from lightning_rlprof.report.summary import SummaryPart
from lightning_rlprof.report.terminal import cell_text, duration, percent
from lightning_rlprof.system.location import plain
from lightning_rlprof.tables.arrays import Float64s
from lightning_rlprof.tables.table import Cell, Column, Table, figure

if TYPE_CHECKING:
    from jinja2 import Template

_MAX_STEPS_DRAWN = 200
_HIGH = 100  # Units of the charts over the steps, which are as wide as there are steps.
_HEAT = (54, 125, 196)  # The color of a heat map, which is drawn on light and dark ground.
_FAINTEST = 10  # Of 255: a cell with nothing to show is still seen.
_WHOLE_SHARE = 0.97  # The part of the cells below the value that has full color.


def page(run: Path, view: LiveView) -> str:
    """Return the page with the figures of this moment, so that it shows them before any event."""
    return _template().render(_values(run, view), whole=True)


def view_as_json(run: Path, view: LiveView) -> str:
    """Return the figures for a page that is open: the part of it that changes."""
    values = _values(run, view)
    figures = _template().render(values, whole=False).strip()
    return json.dumps({"figures": figures, "state": values["state"], "ended": view.has_ended})


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("lightning_rlprof.cli.serve", "assets")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.filters |= {"plain": plain, "duration": duration, "percent": percent}
    return made.get_template("live.html")


def _values(run: Path, view: LiveView) -> dict[str, Any]:
    found, values = view.found, dict[str, Any](steps=None, heat=None, parts=[], median=None)
    if found is not None and view.spans is not None and found.steps:
        charts = StepCharts(view.spans)
        values |= first_screen(found, of_trace=False)
        paints = stage_paints(view.spans, charts)
        values["parts"] = list(_bar(values["parts"], values["small"], paints))
        values["steps"] = _steps(charts, paints)
        values["heat"] = _heat(charts)
        values["device_word"] = view.spans.device_word
    return values | {
        "run": run.resolve().name,
        "title": view.title,
        "busy": view.busy,
        "slowest": view.slowest,
        "found_ranks": 0 if found is None else found.ranks,
        "is_last": view.spans is not None and not view.spans.from_start,
        "state": "all ranks have ended" if view.has_ended else "live",
        "alarms": view.alarms,
        "tables": [_table(table) for table in (view.stages, view.ranks) if table.rows],
    }


def _fill(kind: str, stage: str, paints: dict[str, Paint]) -> dict[str, str]:
    """Return how a part is filled: waiting is as pale as in the report."""
    if stage not in paints:
        fill = "url(#hatch)" if kind == "untraced" else "var(--region)"
        return {"fill": fill, "ink": "", "opacity": "1"}
    ink = paints[stage].ink if kind == "stage" else ""
    return {
        "fill": paints[stage].fill,
        "ink": ink,
        "opacity": "0.42" if kind == "waiting" else "1",
    }


def _bar(
    parts: Sequence[SummaryPart], small: Sequence[SummaryPart], paints: dict[str, Paint]
) -> Iterator[dict[str, Any]]:
    """Yield the parts of the mean step from left to right, as percent of it; small ones as one."""
    left, rest = 0.0, []
    if small:
        share, ns = sum(part.share for part in small), sum(part.mean_ns for part in small)
        rest = [SummaryPart(f"{len(small)} others", "", "stage", share, ns)]
    for part in [*parts, *rest]:
        short = "waiting" if part.kind == "waiting" else part.name
        facts = {"name": part.name, "short": short, "share": part.share, "mean_ns": part.mean_ns}
        place = {"left": f"{100 * left:.3f}", "width": f"{100 * part.share:.3f}"}
        yield facts | place | _fill(part.kind, part.stage, paints)
        left += part.share


def _steps(charts: StepCharts, paints: dict[str, Paint]) -> dict[str, Any]:
    """Return a stacked bar for each of the last steps, one path per part, and throughput."""
    last = slice(-_MAX_STEPS_DRAWN, None)
    wall, some = charts.wall_ns[last], charts.included[last]
    # An outlier would flatten all other bars, so that it may be cut, as in the report.
    top = max(1.0, min(float(wall.max()) * 1.03, float(np.quantile(wall, 0.98)) * 2.2))
    below, paths = np.zeros(len(wall)), []
    for part in charts.drawn:
        above = below + part.ns[last]
        for is_counted in (True, False):
            at = np.flatnonzero((some == is_counted) & (above > below))
            shape = _boxes(at, _height(below[at], top), _height(above[at], top))
            css = "part" if is_counted else "pale"
            paths += [{"shape": shape, "css": css, **_fill(part.kind, part.stage, paints)}]
        below = above
    numbers, line = charts.numbers[last].tolist(), wall
    if charts.tokens is not None:
        line = charts.tokens[1][last] / np.maximum(charts.training_ns[last], 1) * 1e9
    high = max(1e-9, min(float(line.max()), float(np.quantile(line, 0.98)) * 2))
    unit = figure if charts.tokens is not None else (lambda ns: duration(round(ns)))
    return {
        "numbers": numbers,
        "texts": [f"step {n}: {duration(round(ns))}" for n, ns in zip(numbers, wall, strict=True)],
        "paths": [each for each in paths if each["shape"]],
        "top": duration(round(top)),
        "line": " ".join(f"{at},{y:.1f}" for at, y in enumerate(_height(line, high))),
        "range": f"{unit(float(line.min()))} to {unit(float(line.max()))}",
        "pale": int(np.count_nonzero(~some)),
    }


def _height(values: Float64s, top: float) -> list[float]:
    return (_HIGH * (1 - np.minimum(values / top, 1))).tolist()  # type: ignore[no-any-return]


def _boxes(at: Any, low: list[float], high: list[float]) -> str:
    """Return an SVG path of boxes, each of which begins at a whole number and has a gap behind."""
    places = zip(at.tolist(), low, high, strict=True)
    return "".join(f"M{x} {y:.1f}V{to:.1f}h.86V{y:.1f}z" for x, y, to in places)


def _heat(charts: StepCharts) -> dict[str, Any] | None:
    """Return ranks by the last steps as a picture: the first value that the report shows."""
    if not charts.by_rank:
        return None
    name, ns = next(iter(charts.by_rank.items()))
    ranks = charts.thinned.ranks
    ns = ns[np.searchsorted(charts.ranks, ranks), -_MAX_STEPS_DRAWN:]
    most = max(1.0, float(np.quantile(ns, _WHOLE_SHARE)))
    shades = np.clip(ns / most, 0, 1) * (255 - _FAINTEST) + _FAINTEST
    return {
        "name": name,
        "picture": base64.b64encode(_png(shades.astype(np.uint8))).decode(),
        "ranks": ranks.tolist(),
        "total": len(charts.ranks),
        "most": duration(round(most)),
        "height": max(3, min(18, 420 // len(ranks))) * len(ranks),
    }


def _png(shades: Any) -> bytes:
    """Return a picture with a pixel per cell in one color; the shade is its opacity."""
    high, wide = shades.shape
    rows = b"".join(b"\0" + row.tobytes() for row in shades)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(_HEAT) * 256),
        (b"tRNS", bytes(range(256))),
        (b"IDAT", zlib.compress(rows, 1)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _table(table: Table) -> dict[str, Any]:
    known = [
        at for at in range(len(table.columns)) if any(row[at] is not None for row in table.rows)
    ]
    columns = [table.columns[at] for at in known]
    return {
        "name": table.name,
        "columns": columns,
        "rows": [[_cell(row[at], table.columns[at]) for at in known] for row in table.rows],
        "note": table.note,
    }


def _cell(value: Cell, column: Column) -> dict[str, Any]:
    """Return the text of a cell, and how long the bar of a share is."""
    is_share = column.kind == "share" and isinstance(value, float)
    width = round(min(max(100 * float(value or 0), 0), 100), 1) if is_share else None
    return {"text": cell_text(value, column), "percent": width}
