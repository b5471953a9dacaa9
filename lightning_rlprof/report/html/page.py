"""One HTML file that shows a run: what to fix first, charts over its steps, tables, data quality.

The file is complete in itself. It loads nothing, not even from the network it may be opened in (its
Content-Security-Policy forbids it), and what a trace says reaches the page as text only.
"""

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from lightning_rlprof.analysis.catalog import ANALYSES, CATALOG
from lightning_rlprof.analysis.comparison.settings import by_key, flat
from lightning_rlprof.analysis.device.timeline import TABLES
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose, no_problem
from lightning_rlprof.analysis.ledger.ledger import accounts_of
from lightning_rlprof.analysis.stages import UNTRACED_PART
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.loaders.rank_names import Remark, by_cause, named_ranks
from lightning_rlprof.records.records import stated_world_size
from lightning_rlprof.records.run_directory import mode_made_of
from lightning_rlprof.report.html.device_charts import DeviceCharts, trust
from lightning_rlprof.report.html.device_timeline import draw_devices
from lightning_rlprof.report.html.step_charts import Paint, marks, run_charts, with_verdicts
from lightning_rlprof.report.html.timeline import timeline
from lightning_rlprof.report.summary import (
    STAGE_TABLES,
    UNITS,
    Summary,
    device_lines,
    finding_commands,
    finding_cost,
    finding_place,
    is_trace,
    lead_tables,
    nothing_found,
    run_line,
    speed_lines,
    summary,
    without,
)
from lightning_rlprof.report.terminal import cell_text, duration, percent, size
from lightning_rlprof.system.files import draft_of
from lightning_rlprof.system.location import plain
from lightning_rlprof.system.process import give_back
from lightning_rlprof.tables.spans import Spans, answer
from lightning_rlprof.tables.table import Cell, Column, Table, figure, rows_of

_SCRIPTS = (
    *("core.js", "axis.js", "export.js", "steps.js", "timeline.js", "stages.js", "ranks.js"),
    *("memory.js", "samples.js", "whatif.js", "device_timeline.js", "icicle.js", "tables.js"),
    "boot.js",
)


class _Section(NamedTuple):
    """Tables under one heading; the first ones are open, those of ``folded`` are not."""

    anchor: str
    title: str
    lead: str
    names: tuple[str, ...]
    folded: tuple[str, ...] = ()


# Every table is shown in one of these sections, except those in `_OWN`.
_SECTIONS = (
    _Section(
        "ledger",
        "Time ledger",
        "Every instant of every rank is counted once, so the rows add up to wall time × ranks.",
        ("ledger",),
    ),
    _Section(
        "path",
        "Critical path",
        "The work that determines step time, and the slack of the rest.",
        ("critical_path",),
    ),
    _Section(
        "fates",
        "Sample fates",
        "Every sample is counted once, so the fates add up to what was generated.",
        ("samples", "long_tail", "staleness"),
        ("tail_causes", "length_balance", "sample_path"),
    ),
)
_MOST_ROWS = 300  # Rows of a table.
_STAGE_COLUMNS = ("stage", "after", "before")
_SMALL = 0.01  # Share of the step; smaller parts are drawn, but listed together.
_FOLDED = ("breakdown", "idle", "communication", "gaps", "regions", "changes")
_NO_STEPS: dict[str, Any] = {
    **{"steps": [], "total": 0, "ranks": 0, "aligned": ""},
    **{"names": [], "kinds": [], "counters": [], "work": []},
}
_DRAWN = {"steps"}  # As a table of every rank, it is too large for the page.
_OWN = {
    "kernels",
    "data_quality",
    "findings",
    "stages",
    "steps",
    "whatif",
    "roles",
    "rank_status",
    "lengths",
}


class CellView(NamedTuple):
    """One cell: its text (None: not known), unit, CSS classes, and what is drawn with it.

    ``part`` (0 to 1) is the length of a bar or the strength of a shade; ``chip`` a colour.
    """

    text: str | None
    unit: str = ""
    style: str = ""
    part: float | None = None
    chip: str | None = None


class GridView(NamedTuple):
    """A table with its title, ready for the template; a head is a text and its CSS classes."""

    anchor: str
    title: str
    heads: list[tuple[str, str]]
    rows: list[list[CellView]]
    note: str


class Fact(NamedTuple):
    """A name and its value."""

    name: str
    value: str


def report_tables(
    spans: Spans, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Table]:
    """Return the tables of the report by the name of their analysis; this is most of its time.

    Args:
        spans: The run.
        progress: Called after each analysis with (analyses done, analyses in all).
    """
    lead = lead_tables(spans)
    left_out = {table.name for table in lead} | _DRAWN
    left_out |= STAGE_TABLES if is_trace(spans) else set()
    analyses = [each.run for each in CATALOG if each.report and each.name not in left_out]

    def make(run: Spans) -> list[Table]:
        found = []
        for done, analysis in enumerate(analyses, start=1):
            found.append(analysis(run))
            give_back()
            progress(done, len(analyses))
        return found

    return {table.name: table for table in (*lead, *answer(spans, "report", list[Table], make))}


def keep_report(spans: Spans) -> None:
    """Let the cache of a run keep what takes most of the time of its report."""
    report_tables(spans)
    run_charts(spans)
    _timeline(spans)
    _extent(spans)
    diagnose(spans)


def render_report(spans: Spans, tables: Mapping[str, Table]) -> str:
    """Return the report as the text of one HTML file.

    Args:
        spans: The run; the charts, the configuration and what is missing come from it.
        tables: Answers by the name of their analysis; tables without a place on the page follow
            under their own name.

    Example::

        spans = load(path)
        write_report(spans, report_tables(spans), Path("run.html"))
    """
    template = _environment().get_template("template.html.j2")
    return template.render(_page(spans, tables))


def write_report(spans: Spans, tables: Mapping[str, Table], path: Path) -> None:
    """Write `render_report` to a file, which is there whole or not at all; it replaces an old one.

    Raises:
        OSError: The file cannot be written.
    """
    # File names may contain bytes that are not text; a question mark then replaces them.
    data = render_report(spans, tables).encode("utf-8", "replace")
    with draft_of(path, mode_made_of(spans.path)) as part:
        part.write_bytes(data)


def _page(spans: Spans, tables: Mapping[str, Table]) -> dict[str, Any]:
    of_trace = is_trace(spans)
    charts, lanes = run_charts(spans), _NO_STEPS if of_trace else _timeline(spans)
    has_devices = of_trace or not spans.tables.keys().isdisjoint(TABLES)
    devices = DeviceCharts(spans) if has_devices else None
    device_drawing = draw_devices(spans)
    colors = charts.paints
    word, path = spans.device_word, shlex.quote(str(spans.path))
    diagnosis = diagnose(spans)
    drawn = {step["number"] for step in lanes["steps"]}
    linked = drawn & {each.place.step for each in diagnosis.found if each.place is not None}
    grids = _grids(map(_without_stages, tables.values()) if of_trace else tables.values(), colors)
    script = '(() => {\n"use strict";\n' + "".join(map(_asset, _SCRIPTS)) + "})();"
    data = {
        "paints": colors,
        "untraced": UNTRACED_PART,
        "steps": charts.steps | marks(_rows(tables, "changes")),
        "timeline": lanes,
        "heat": charts.heat,
        "memory": charts.memory,
        "lengths": charts.lengths,
        "whatif": _whatif(tables.get("whatif")),
        "device_lanes": device_drawing.data,
    }
    config = configuration(spans)
    return data | {
        "run": spans.path.resolve().name,
        "facts": facts(spans),
        "missing": missing(spans),
        "remarks": remarks(spans),
        "checks": diagnosis.quality.checks,
        "changed": changed_settings(config),
        "config": config,
        "environment": environment(spans),
        "versions": versions(spans),
        **first_screen(found := summary(spans, captures=True), of_trace=of_trace),
        "is_trace": of_trace,
        "device": devices if devices is not None and (of_trace or devices.time.places) else None,
        "trust": trust(diagnosis.quality.checks, found.steps),
        "collectives": devices.collectives(_rows(tables, "communication")) if devices else [],
        "communication_note": _note(tables.get("communication")),
        "findings": diagnosis.found,
        "cost": lambda found: finding_cost(found, word),
        "place": finding_place,
        "commands": lambda found: finding_commands(found, path),
        "undecided": diagnosis.undecided,
        "nothing": diagnosis.nothing,
        "whatif_note": _note(tables.get("whatif")),
        "absent": _absent(tables),
        "not_recorded": devices.not_recorded if devices and of_trace else [],
        "stages": [] if of_trace else charts.stages,
        "ranks": []
        if of_trace
        else with_verdicts(charts.ranks, _rows(tables, "stragglers"), _rows(tables, "rank_status")),
        "ranks_lead": charts.ranks_lead,
        "stragglers_note": _note(tables.get("stragglers")),
        "charts": charts,
        "length_rows": _rows(tables, "lengths"),
        "length_note": _note(tables.get("lengths")),
        "memory_tables": _taken(grids, ("memory",)),
        "sections": [] if of_trace else _sections(grids),
        "folded": _taken(grids, _FOLDED),
        "others": list(grids.values()),
        "timeline_lead": _timeline_lead(lanes),
        "device_word": word,
        "device_drawing": device_drawing,
        "linked": sorted(linked),
        "policy": _policy(script),
        "style": Markup(_asset("style.css")),
        "script": Markup(script),
        "data": _json(data),
    }


def first_screen(found: Summary, *, of_trace: bool) -> dict[str, Any]:
    """Return the first screen as a template writes it: the facts in units."""
    median, spread = None, f"{run_line(found)}."
    if found.median_ns is not None and found.quartiles_ns is not None:
        number, _, unit = duration(found.median_ns).rpartition(" ")
        low, high = map(duration, found.quartiles_ns)
        median = number, unit
        spread = f"Half of the steps{UNITS.get(found.step_unit, '')} take {low} to {high}"
    shown = [part for part in found.parts if part.share >= _SMALL]
    small = [part for part in found.parts if 0 < part.share < _SMALL]
    if len(small) == 1:
        shown, small = [*shown, *small], []
    rate = "Step time, mean of ranks"
    if found.token_stage is not None:
        rate = f"Tokens/s, all ranks ({found.token_stage})"
        if found.tokens_per_s is not None:
            rate += f": {figure(found.tokens_per_s)}"
    return {
        "median": median,
        "spread": spread,
        "mean": "" if found.mean_ns is None else duration(found.mean_ns),
        "without": without(found),
        "rate": rate,
        "parts": shown,
        "small": small,
        "device_lines": device_lines(found),
        # What is lost of a trace is said below it.
        "no_problem": no_problem(found.undecided, ()) if of_trace else nothing_found(found),
        "speed_lines": speed_lines(found.speed),
        "first": found.first,
    }


def _rows(tables: Mapping[str, Table], name: str) -> list[dict[str, Any]]:
    table = tables.get(name)
    return [] if table is None else rows_of(table)


def _note(table: Table | None) -> str:
    """Return the note of a table, or why it has no data."""
    if table is None:
        return ""
    return f"No data: {table.abstained}" if table.abstained else table.note


def _without_stages(table: Table) -> Table:
    """Return a table of a run that has no stages: all of its time would be untraced."""
    names = [column.name for column in table.columns]
    if table.abstained or "stage" not in names:
        return table
    at = names.index("stage")
    rows = [
        (*row[:at], None if row[at] == UNTRACED_PART else row[at], *row[at + 1 :])
        for row in table.rows
    ]
    return replace(table, rows=rows)


def _grids(tables: Iterable[Table], colors: Mapping[str, Paint]) -> dict[str, GridView]:
    """Return the tables that no section draws in its own way, without those that have no data."""
    found = {}
    for table in tables:
        name = table.name
        if name in _OWN or table.abstained or not table.rows:
            continue
        title = ANALYSES[name].answers if name in ANALYSES else name
        found[name] = grid(table, f"table-{name}", title, colors)
    return found


def _absent(tables: Mapping[str, Table]) -> list[Fact]:
    """Return the tables without data and why; those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for name, table in tables.items():
        if table.abstained:
            reasons.setdefault(table.abstained.rstrip("."), []).append(name)
    return [Fact(", ".join(names), f"No data: {reason}.") for reason, names in reasons.items()]


def _taken(grids: dict[str, GridView], names: Iterable[str]) -> list[GridView]:
    return [grids.pop(name) for name in names if name in grids]


def _sections(grids: dict[str, GridView]) -> list[dict[str, Any]]:
    """Take the tables of each section out of ``grids``; sections without any are left out."""
    found = []
    for section in _SECTIONS:
        opened, folded = _taken(grids, section.names), _taken(grids, section.folded)
        if opened or folded:
            found.append(section._asdict() | {"open": opened, "folded": folded})
    return found


def _whatif(table: Table | None) -> list[dict[str, Any]]:
    """Return baseline, prediction and its interval of each change, in µs."""
    if table is None or table.abstained:
        return []
    columns = {"now": "baseline", "then": "predicted", "low": "CI low", "high": "CI high"}
    return [
        {key: None if row[own] is None else round(row[own] / 1e3) for key, own in columns.items()}
        | {"name": row["change"]}
        for row in rows_of(table)[:8]
    ]


def _timeline(spans: Spans) -> dict[str, Any]:
    """Return the steps of the timeline, out of the cache where that keeps them."""
    return answer(spans, "timeline", dict[str, Any], timeline)


def _timeline_lead(lanes: Mapping[str, Any]) -> str:
    """Say which steps can be looked at, and which not; empty when there are none."""
    if not lanes["steps"]:
        return ""
    shown, total = sum(step["number"] > 0 for step in lanes["steps"]), lanes["total"]
    left_out = (
        "Every step is here."
        if shown == total
        else f"{shown:,} of {total:,} steps are here: the slowest, median, first, last and "
        "fastest, and some spread over the run. The exported trace has all of them."
    )
    clocks = {
        "": "",
        "hosts": " Ranks are drawn from their step's start, as hosts' clocks are not calibrated.",
        "drift": " Ranks are drawn from their step's start, as they do not step together.",
    }
    devices = ""
    if any(step["devices"] for step in lanes["steps"]):
        devices = " Below a rank is what its device did while it was captured: full height is busy."
    return f"Hatched time is in no stage. {left_out}{clocks[lanes['aligned']]}{devices}"


def _environment() -> Environment:
    made = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["plain"] = plain  # A name could reverse the direction of the text after it.
    made.filters |= {"duration": duration, "percent": percent, "size": size}
    return made


def _asset(name: str) -> str:
    folder = resources.files("lightning_rlprof.report.html").joinpath("assets")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Allow this one script, by its hash, and no other: none injected, and no connection."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _json(data: Mapping[str, Any]) -> Markup:
    """Return JSON that cannot end the script element it stands in, whatever the names are."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII has no U+2028.
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


# ---- tables as cells: units, chips of color, bars behind shares


def grid(table: Table, anchor: str, title: str, paints: Mapping[str, Paint]) -> GridView:
    """Return a table without columns of which nothing is known, and at most `_MOST_ROWS` rows."""
    known = [
        at for at in range(len(table.columns)) if any(row[at] is not None for row in table.rows)
    ]
    barred = next((at for at in known if table.columns[at].kind == "share"), None)
    styles = {at: _style(table.columns[at], at, barred) for at in known}
    heads = [(table.columns[at].name, styles[at]) for at in known]
    rows = [
        [_cell(row[at], table.columns[at], styles[at], paints) for at in known]
        for row in table.rows[:_MOST_ROWS]
    ]
    left_out = len(table.rows) - len(rows)
    more = f" {left_out:,} more rows are not in this file." if left_out else ""
    return GridView(anchor, title, heads, rows, f"{table.note}{more}".strip())


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
    text = cell_text(cell, column)
    if column.kind == "share":
        part = round(max(0.0, min(1.0, float(cell))), 4) if style == "share" else None
        return CellView(text.removesuffix("%"), "%", style, part)
    if column.kind in ("duration", "time") or column.unit in ("bytes", "h"):
        number, _, unit = text.rpartition(" ")  # Units line up, even in "1 min 05 s".
        return CellView(number, unit, style)
    return CellView(text, column.unit, style)


def _chip(name: str, column: Column, paints: Mapping[str, Paint]) -> str | None:
    if column.name not in _STAGE_COLUMNS:
        return None
    if name == UNTRACED_PART:
        return UNTRACED_PART
    return paints[name].fill if name in paints else None


# ---- what a reader must know beside the figures: size, end, set-up, what is missing


class Extent(NamedTuple):
    """How much a run recorded: spans, its distinct steps, the first and last of them, and time."""

    spans: int
    steps: int
    first: int
    last: int
    length_ns: int


def _extent(spans: Spans) -> Extent:
    return answer(spans, "extent", Extent, _measured_extent)


def _measured_extent(spans: Spans) -> Extent:
    steps = np.unique(spans.step[spans.rows(kind="step")])
    first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (0, 0)
    length = int(spans.end_ns.max() - spans.start_ns.min()) if len(spans) else 0
    if not any(header.config for header in spans.headers.values()):
        length = accounts_of(spans).wall_ns  # A profiler's trace lasts as long as its devices work.
    return Extent(len(spans), len(steps), first, last, length)


def facts(spans: Spans) -> list[str]:
    """Return the run in a handful of words: ranks, device, steps, time, date."""
    headers = spans.headers.values()
    world = stated_world_size(headers)
    extent = _extent(spans)
    ranks = len(spans.ranks)
    of = f" of {world:,}" if world > ranks else ""
    devices = sorted({header.hardware for header in headers})
    found = [
        f"{ranks:,}{of} {'rank' if max(ranks, world) == 1 else 'ranks'}",
        ", ".join(
            "CPU" if device == "cpu" else device for device in devices if device != "unknown"
        ),
        f"{extent.steps:,} {'step' if extent.steps == 1 else 'steps'}" if extent.steps else "",
        duration(extent.length_ns) if extent.length_ns else "",
        _date(spans.unix_ns) if spans.unix_ns else "",
    ]
    return [fact for fact in found if fact]


def environment(spans: Spans) -> list[Fact]:
    """Return where the run was recorded, and how it ended."""
    headers = spans.headers.values()
    ended = [status == "finished" for status in spans.statuses.values()]
    hosts = sorted({header.host for header in headers})
    extent = _extent(spans)
    found = [
        Fact("Host" if len(hosts) == 1 else f"{len(hosts)} hosts", _few(hosts)),
        Fact("Steps", f"{extent.first}–{extent.last}" if extent.steps else ""),
        Fact("Ended", "finished" if all(ended) else f"{sum(ended)} of {len(ended)} finished"),
        Fact("Recorded", f"{extent.spans:,} spans"),
        Fact("Directory", str(spans.path)),
    ]
    return [fact for fact in found if fact.value]


def changed_settings(config: Iterable[Fact]) -> list[tuple[str, str, str]]:
    """Return the settings that differ from the defaults: key, default and value."""
    default = dict(flat(ProfilerConfig().dump()))
    return [
        (fact.name, default[fact.name], fact.value)
        for fact in config
        if fact.name in default and default[fact.name] != fact.value
    ]


def missing(spans: Spans) -> list[Remark]:
    """Return what is missing or doubtful, ranks with the same trouble together."""
    notes = ((note.rank, note.text) for note in spans.notes if note.level != "info")
    return by_cause([*((problem.rank, problem.text) for problem in spans.warnings), *notes])


def remarks(spans: Spans) -> list[Remark]:
    """Return what was noted for information only."""
    return by_cause((note.rank, note.text) for note in spans.notes if note.level == "info")


def configuration(spans: Spans) -> list[Fact]:
    """Return the configuration by dotted key; where ranks differ, each value and its ranks."""
    return _agreed({rank: header.config for rank, header in spans.headers.items()})


def versions(spans: Spans) -> list[Fact]:
    """Return the versions of what was running; where ranks differ, each value and its ranks."""
    return _agreed({rank: header.versions for rank, header in spans.headers.items()})


def _agreed(values: Mapping[int, Mapping[str, Any]]) -> list[Fact]:
    rows = []
    for key, found in by_key(values).items():
        agreed = len(found) == 1 and len(next(iter(found.values()))) == len(values)
        parts = [
            value if agreed else f"{value} ({named_ranks(who)})" for value, who in found.items()
        ]
        rows.append(Fact(key, "; ".join(parts)))
    return rows


def _date(unix_ns: int) -> str:
    # Unlike fromtimestamp, a sum is right on every platform for what a damaged header may say.
    moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=unix_ns // 10**9)
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", … and {len(names) - 3} more" if len(names) > 3 else "")
