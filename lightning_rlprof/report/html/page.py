"""One HTML file that shows a run: what to fix first, charts over its steps, tables, data quality.

The file is complete in itself. It loads nothing, not even from the network it may be opened in (its
Content-Security-Policy forbids it), and what a trace says reaches the page as text only.
"""

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.stages import UNTRACED_PART
from lightning_rlprof.records.run_directory import mode_made_of
from lightning_rlprof.report.finding_cards import cards
from lightning_rlprof.report.html import run_facts
from lightning_rlprof.report.html.colors import stage_paints
from lightning_rlprof.report.html.step_charts import (
    LATE,
    StepCharts,
    rank_rows,
    stage_rows,
    times_largest,
)
from lightning_rlprof.report.html.tables import GridView, grid
from lightning_rlprof.report.html.timeline import timeline
from lightning_rlprof.report.summary import (
    STAGE_TABLES,
    Summary,
    SummaryPart,
    device_lines,
    is_device_trace,
    lead_tables,
    nothing_found,
    run_line,
    summary,
    without,
)
from lightning_rlprof.report.terminal import duration, percent
from lightning_rlprof.system.files import draft_of
from lightning_rlprof.system.plain_text import plain
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table, figure, rows_of

_SCRIPTS = (
    "core.js",
    "export.js",
    "steps.js",
    "timeline.js",
    "stages.js",
    "ranks.js",
    "memory.js",
    "samples.js",
    "whatif.js",
    "tables.js",
    "boot.js",
)


class _Section(NamedTuple):
    """Tables under one heading; the first ones are open, those of ``folded`` are not."""

    anchor: str
    title: str
    lead: str
    names: tuple[str, ...]
    folded: tuple[str, ...] = ()


# What is not drawn by a section of its own below.
_SECTIONS = (
    _Section(
        "device",
        "Device",
        "Compute, exposed communication, exposed memcpy, idle and unknown add up to the wall time.",
        ("breakdown", "idle", "kernels"),
        ("communication",),
    ),
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
_TITLES = {
    "breakdown": "Device time by category",
    "idle": "Idle time by cause",
    "kernels": "Kernels and copies",
    "communication": "Collectives across ranks",
    "stragglers": "Stragglers",
    "gaps": "Untraced time, by the stages around it",
    "regions": "Regions, and stages on other threads and outside steps",
    "changes": "Changes and outliers",
    "rank_status": "What each rank recorded",
    "roles": "Roles",
    "samples": "Samples by fate",
    "long_tail": "Long tail of rollouts",
    "tail_causes": "Why the last responses are late",
    "staleness": "Staleness by update",
    "length_balance": "Tokens by rank",
    "sample_path": "One sample, from prompt to update",
    "weight_sync": "Parts of weight syncs",
    "memory": "Peak memory by stage and rank, from captures",
}
_SMALL = 0.01  # of the step: such parts are drawn, and listed together
_FOLDED = ("gaps", "regions", "changes")
_OWN = {
    "data_quality",
    "findings",
    "stages",
    "steps",
    "whatif",
    "roles",
    "rank_status",
    "lengths",
}


def report_tables(
    spans: Spans, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Table]:
    """Return the tables of the report by the name of their analysis; this is most of its time.

    Args:
        spans: The run.
        progress: Called after each analysis with (analyses done, analyses in all).
    """
    tables = {table.name: table for table in lead_tables(spans)}
    left_out = STAGE_TABLES if is_device_trace(spans) else tables.keys()
    analyses = [each.run for each in CATALOG if each.report and each.name not in left_out]
    for done, analysis in enumerate(analyses, start=1):
        table = analysis(spans)
        tables[table.name] = table
        progress(done, len(analyses))
    return tables


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
    # Names of files may hold bytes that are no text; a report with a question mark is still one.
    data = render_report(spans, tables).encode("utf-8", "replace")
    with draft_of(path, mode_made_of(spans.path)) as part:
        part.write_bytes(data)


def _page(spans: Spans, tables: Mapping[str, Table]) -> dict[str, Any]:
    series, lanes = StepCharts(spans), timeline(spans)
    steps = series.data(_rows(tables, "changes"))
    heat, memory, sizes = series.heat(), series.memory(), series.lengths()
    colors = stage_paints(spans, series)
    word, path = spans.device_word, shlex.quote(str(spans.path))
    shown = {step["number"] for step in lanes["steps"]}
    diagnosis = diagnose(spans)
    found = cards(diagnosis.found, path, shown, word)
    grids = _grids(tables, colors)
    script = '(() => {\n"use strict";\n' + "".join(map(_asset, _SCRIPTS)) + "})();"
    data = {
        "paints": colors,
        "untraced": UNTRACED_PART,
        "steps": steps,
        "timeline": lanes,
        "heat": heat,
        "memory": memory,
        "lengths": sizes,
        "whatif": _whatif(tables.get("whatif")),
    }
    of_devices = "stages" not in tables and "breakdown" in tables
    config, missing = run_facts.configuration(spans), run_facts.missing(spans)
    page = {
        "run": spans.path.resolve().name,
        "facts": run_facts.facts(spans),
        "missing": missing,
        "remarks": run_facts.remarks(spans),
        "checks": run_facts.checks(tables.get("data_quality"), missing),
        "changed": run_facts.changed_settings(config),
        "config": config,
        "environment": run_facts.environment(spans),
        "versions": run_facts.versions(spans),
        **_first_screen(summary(spans, captures=True), is_device_trace=of_devices),
        "cards": found,
        "undecided": diagnosis.undecided,
        "nothing": diagnosis.nothing,
        "whatif_note": _note(tables.get("whatif")),
        "has_whatif": bool(data["whatif"]),
        "absent": _absent(tables),
        "stages": [] if of_devices else stage_rows(series),
        "ranks": rank_rows(series, _rows(tables, "stragglers"), _rows(tables, "rank_status")),
        "ranks_lead": _ranks_lead(series),
        "stragglers_note": _note(tables.get("stragglers")),
        "series": series,
        "steps": steps,
        "heat": heat,
        "memory": memory,
        "lengths": sizes,
        "length_rows": _rows(tables, "lengths"),
        "length_note": _note(tables.get("lengths")),
        "paints": colors,
        "memory_tables": [grids.pop(name) for name in ("memory",) if name in grids],
        "sections": _sections(grids),
        "folded": [grids.pop(name) for name in _FOLDED if name in grids],
        "others": list(grids.values()),
        "timeline": lanes,
        "timeline_lead": _timeline_lead(lanes),
        "device_word": word,
        "linked": sorted({card.step for card in found if card.step is not None}),
        "policy": _policy(script),
        "style": Markup(_asset("style.css")),
        "script": Markup(script),
        "data": _json(data),
    }
    return page


class BarPart(NamedTuple):
    """A part of the bar of the mean step, and its mean as text."""

    part: SummaryPart
    time: str


class FirstView(NamedTuple):
    """What comes first, second or third, in words; ``anchor`` is its card."""

    title: str
    act: str
    is_idea: bool
    word: str
    share: str
    time: str
    anchor: str


def _first_screen(found: Summary, *, is_device_trace: bool) -> dict[str, Any]:
    """Return the first screen as the template writes it: the facts in units."""
    median, spread = None, f"{run_line(found)}."
    if found.median_ns is not None and found.quartiles_ns is not None:
        number, _, unit = duration(found.median_ns).rpartition(" ")
        low, high = map(duration, found.quartiles_ns)
        median, spread = (number, unit), f"Half of the steps take {low} to {high}"
    parts = [] if is_device_trace else found.parts  # all of it would be untraced
    shown = [part for part in parts if part.share >= _SMALL]
    small = [part for part in parts if 0 < part.share < _SMALL]
    if len(small) == 1:
        shown, small = [*shown, *small], []
    rate = "Step time, mean of ranks"
    if found.token_stage is not None:
        rate = f"Tokens/s, all ranks ({found.token_stage})"
        if found.tokens_per_s is not None:
            rate += f": {figure(found.tokens_per_s)}"
    first = []
    for at, each in enumerate(found.first, start=1):
        word = share = time = ""
        if (price := each.price) is not None:
            word, share, time = price.kind, percent(price.share), duration(price.ns)
        is_idea = each.kind == "idea"
        first.append(FirstView(each.heading, each.act, is_idea, word, share, time, f"finding-{at}"))
    return {
        "median": median,
        "spread": spread,
        "mean": "" if found.mean_ns is None else duration(found.mean_ns),
        "without": without(found),
        "rate": rate,
        "parts": [BarPart(part, duration(part.mean_ns)) for part in shown],
        "small": small,
        "small_time": duration(sum(part.mean_ns for part in small)),
        "device_lines": device_lines(found),
        "no_problem": nothing_found(found),
        "first": first,
    }


def _rows(tables: Mapping[str, Table], name: str) -> list[dict[str, Any]]:
    table = tables.get(name)
    return [] if table is None else rows_of(table)


def _note(table: Table | None) -> str:
    """Return the note of a table, or why it has no data."""
    if table is None:
        return ""
    return f"No data: {table.abstained}" if table.abstained else table.note


def _grids(tables: Mapping[str, Table], colors: Mapping[str, Any]) -> dict[str, GridView]:
    """Return the tables that no section draws in its own way, without those that have no data."""
    found = {}
    for name, table in tables.items():
        if name in _OWN or table.abstained or not table.rows:
            continue
        title = _TITLES.get(name, name.replace("_", " ").capitalize())
        found[name] = grid(table, f"table-{name}", title, "", colors)
    return found


def _absent(tables: Mapping[str, Table]) -> list[run_facts.Fact]:
    """Return the tables without data and why; those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for name, table in tables.items():
        if table.abstained:
            title = _TITLES.get(name, name.replace("_", " ").capitalize())
            reasons.setdefault(table.abstained.rstrip("."), []).append(title)
    return [
        run_facts.Fact(", ".join(titles), f"No data: {reason}.")
        for reason, titles in reasons.items()
    ]


class SectionView(NamedTuple):
    """A section of tables, for the template."""

    anchor: str
    title: str
    lead: str
    open: Sequence[GridView]
    folded: Sequence[GridView]


def _sections(grids: dict[str, GridView]) -> list[SectionView]:
    """Take the tables of each section out of ``grids``; sections without any are left out."""
    found = []
    for section in _SECTIONS:
        opened = [grids.pop(name) for name in section.names if name in grids]
        folded = [grids.pop(name) for name in section.folded if name in grids]
        if opened or folded:
            found.append(SectionView(section.anchor, section.title, section.lead, opened, folded))
    return found


def _whatif(table: Table | None) -> list[dict[str, Any]]:
    """Return baseline, prediction and its interval of each change, in µs."""
    if table is None or table.abstained:
        return []
    return [
        {
            "name": str(row["change"]),
            **{
                key: None if row[column] is None else round(int(row[column]) / 1e3)
                for key, column in (
                    ("now", "baseline"),
                    ("then", "predicted"),
                    ("low", "CI low"),
                    ("high", "CI high"),
                )
            },
        }
        for row in rows_of(table)[:8]
    ]


def _ranks_lead(series: StepCharts) -> str:
    """Say which rank arrives last most often, if any does so in most steps."""
    late, some = series.by_rank.get(LATE), series.included
    if late is None or not some.any():
        return "" if len(series.ranks) < 2 else "Work of each rank in each step."
    times, steps = times_largest(late[:, some]), int(some.sum())
    rank = int(np.argmax(times))
    if 2 * times[rank] <= steps:
        return f"No rank arrives last in most of the {steps} steps."
    return (
        f"Rank {series.ranks[rank]} arrives last in {times[rank]} of {steps} steps. "
        "The others wait for it there."
    )


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
    return f"Hatched time is in no stage. {left_out}{clocks[lanes['aligned']]}"


def _environment() -> Environment:
    made = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["plain"] = plain  # no name turns the rest of a sentence around
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
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII: no U+2028 is left
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)
