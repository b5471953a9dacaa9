"""One HTML file that tells a run's story: tables, charts, set-up, and what is missing.

The file is complete in itself. It loads nothing, not even from the network it may be opened in (its
Content-Security-Policy forbids it), and what a trace says reaches the page as text only.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from lightning_rlprof.report.finding_cards import cards
from lightning_rlprof.report.html import run_facts
from lightning_rlprof.report.html.colors import UNTRACED, Paint, paints
from lightning_rlprof.report.html.tables import GridView, grid, ranks_grid, shares
from lightning_rlprof.report.html.timeline import timeline
from lightning_rlprof.report.terminal import duration, plain
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

_SCRIPTS = ("script.js", "shares.js", "timeline.js", "boot.js")

# Not missed where the run has nothing for them.
_OPTIONAL = {
    "breakdown",
    "communication",
    "host_vs_device",
    "idle",
    "memory",
    "overlap",
    "critical_path",
    "whatif",
}
# These stand before the charts.
_LEADS = ("data_quality", "findings", "ledger", "stragglers", "critical_path", "whatif", "stages")
# In the order of the page. All steps are too many rows: they are drawn as the chart, and by rank.
_SECTIONS = {
    "data_quality": (
        "How far this can be trusted",
        "Missing, truncated or misaligned data, and profiler overhead.",
    ),
    "findings": (
        "What to act on",
        "Sorted by cost, with 95 % confidence intervals. Inconclusive checks are at the end.",
    ),
    "ledger": (
        "Where the time of the job went",
        "Every instant of every rank is counted once: the totals add up to wall time × ranks. "
        "Time without data is in the row unknown.",
    ),
    "stragglers": (
        "Stragglers",
        "Ranks of one role compared at equal work, step by step; “peer time lost” is what all of "
        "them waited for that rank.",
    ),
    "critical_path": (
        "Critical path",
        "The work that determines step time, and the slack of the rest.",
    ),
    "whatif": (
        "Predicted gains",
        "Step time after one change, predicted by replaying the steps; low to high is the 95 % "
        "interval.",
    ),
    "stages": (
        "Where the steps' time went",
        "“share” and “total” are exclusive and add up to the steps, summed over ranks; "
        "“mean” to “max” are whole spans, with what is nested in them.",
    ),
    "host_vs_device": (
        "Host and device",
        "How long the host and the device took for the same stages, whole spans.",
    ),
    "breakdown": (
        "Device time",
        "Compute, exposed communication, exposed memcpy, idle and unknown add up to the wall time. "
        "Overlapped communication and memcpy are part of it already.",
    ),
    "idle": ("Device idle time", "By what the device waited for."),
    "overlap": (
        "Communication behind compute",
        "How much of the communication overlapped with compute.",
    ),
    "communication": (
        "Collectives across ranks",
        "Transfer is the shortest duration of a collective over its ranks; wait is the rest.",
    ),
    "changes": (
        "Changes during the run",
        "Steps at which the time changed at equal work, trends, and outlier steps.",
    ),
    "slowest_ranks": ("Slowest rank per stage", "Exclusive time, the mean of the counted steps."),
    "steps": (
        "Stages by rank",
        "Exclusive time per step, the mean of the complete ones. Shaded: above the median rank; "
        "bold: the slowest, where that is 5 % or more.",
    ),
    "gaps": (
        "Untraced time",
        "Time inside steps when no stage was open, by the stages before and after it.",
    ),
    "regions": (
        "Regions",
        "Regions inside a step. Regions nest, so shares don't add up to 100 %.",
    ),
    "background_stages": (
        "Stages beside the steps",
        "Stages on other threads, or outside steps. They are not part of step time.",
    ),
    "memory": (
        "Memory",
        "Peak memory of every stage on every rank, during captures. rlprof show RUN memory lists "
        "the snapshot files.",
    ),
    "rank_status": ("Ranks", "What every rank recorded, in and outside steps."),
}


def render_report(spans: Spans, tables: Mapping[str, Table], headline: str) -> str:
    """Return the report as the text of one HTML file.

    Args:
        spans: The run; the timeline, the set-up and what is missing come from it.
        tables: Answers by the name of their analysis. ``stages``, ``steps``, ``gaps``,
            ``slowest_ranks``, ``regions``, ``background_stages`` and ``rank_status`` have their
            place on the page; others follow them under their own name.
        headline: The one sentence to remember.

    Example::

        spans = load(path)
        tables = {
            "stages": stages(spans),
            "steps": steps(spans),
            "slowest_ranks": slowest_ranks(spans),
            "gaps": gaps(spans),
            "regions": regions(spans),
            "background_stages": background_stages(spans),
            "rank_status": rank_status(spans),
        }
        write_report(spans, tables, headline, Path("run.html"))
    """
    template = _environment().get_template("template.html.j2")
    return template.render(_page(spans, tables, headline))


def write_report(spans: Spans, tables: Mapping[str, Table], headline: str, path: Path) -> None:
    """Write `render_report` to a file, which is there whole or not at all; it replaces an old one.

    Raises:
        OSError: The file cannot be written.
    """
    # Names of files may hold bytes that are no text; a report with a question mark is still one.
    data = render_report(spans, tables, headline).encode("utf-8", "replace")
    part = path.with_name(f".rlprof-{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _page(spans: Spans, tables: Mapping[str, Table], headline: str) -> dict[str, Any]:
    bars, lanes = shares(tables.get("steps")), timeline(spans)
    stages = {spans.names[code] for code in spans.name[spans.rows(kind="stage")].tolist()}
    colors = paints((stages | set(bars["stages"])) - {UNTRACED})
    grids = _grids(tables, colors, alone=len(spans.ranks) < 2)
    linked = _with_cards(grids, tables, {step["number"] for step in lanes["steps"]})
    script = '(() => {\n"use strict";\n' + "".join(map(_asset, _SCRIPTS)) + "})();"
    data = {"paints": colors, "untraced": UNTRACED, "shares": bars, "timeline": lanes}
    return {
        "run": spans.path.resolve().name,
        "headline": headline,
        "facts": run_facts.facts(spans),
        "missing": run_facts.missing(spans),
        "whole": run_facts.is_whole(spans),
        "remarks": run_facts.remarks(spans),
        "config": run_facts.configuration(spans),
        "versions": run_facts.versions(spans),
        "leads": [grids.pop(name) for name in _LEADS if name in grids],
        "tables": list(grids.values()),
        "shares_lead": _shares_lead(bars, tables.get("rank_status")),
        "timeline_lead": _timeline_lead(lanes),
        "linked": linked,
        "policy": _policy(script),
        "style": Markup(_asset("style.css")),
        "script": Markup(script),
        "data": _json(data),
    }


def _grids(
    tables: Mapping[str, Table], colors: Mapping[str, Paint], alone: bool
) -> dict[str, GridView]:
    """Return the tables in the order of the page, without those that have nothing to say."""
    hidden = {"steps", "slowest_ranks", "stragglers"} if alone else set()
    hidden |= {name for name in _OPTIONAL if name in tables and tables[name].abstained}
    if "changes" in tables and not tables["changes"].rows:
        hidden.add("changes")
    reasons: set[str] = set()
    found: dict[str, GridView] = {}
    for name in dict.fromkeys([*_SECTIONS, *tables]):
        table = tables.get(name)
        # One reason for all, an empty run for instance, is told once.
        if table is None or name in hidden or table.abstained in reasons:
            continue
        if table.abstained:
            reasons.add(table.abstained)
        table = _SHORTER[name](table) if name in _SHORTER else table
        title, lead = _SECTIONS.get(name, (name.capitalize(), ""))
        anchor = f"table-{len(found)}"
        if name == "steps" and not table.abstained:
            found[name] = ranks_grid(table, anchor, title, lead)
        elif table.rows or table.abstained:
            found[name] = grid(table, anchor, title, lead, colors)
    return found


def _with_cards(
    grids: dict[str, GridView], tables: Mapping[str, Table], shown: set[int]
) -> list[int]:
    """Give findings cards in the place of rows; return the steps that these point at."""
    if "findings" not in grids or not tables["findings"].rows:
        return []
    found = cards(tables["findings"], shown=shown)
    grids["findings"] = replace(grids["findings"], cards=found)
    return sorted({card.step for card in found if card.step is not None})


def _warnings_only(table: Table) -> Table:
    """List the checks that passed in one line."""
    fine = [str(check) for check, state, _ in table.rows if state == "ok"]
    rows = [row for row in table.rows if row[1] != "ok"]
    return replace(table, rows=rows, note=f"Passed: {', '.join(fine)}." if fine else "")


_SHORTER = {"data_quality": _warnings_only}


def _shares_lead(bars: Mapping[str, Any], coverage: Table | None) -> str:
    """Say what a bar is, and what is in none; empty when there are no bars."""
    if not bars["bars"]:
        return ""
    what = f"{bars['width']} steps" if bars["width"] > 1 else "one step"
    lead = f"Exclusive time of every stage: one bar is {what}, the mean over ranks."
    if coverage is None or not coverage.rows:
        return lead
    outside = [int(ns or 0) for ns in coverage.column("outside steps")]
    mean = duration(sum(outside) // len(outside))
    return f"{lead} Outside steps, in no bar: {mean} per rank."


def _timeline_lead(lanes: Mapping[str, Any]) -> str:
    """Say which steps can be looked at, and which not; empty when there are none."""
    if not lanes["steps"]:
        return ""
    shown, total = sum(step["number"] > 0 for step in lanes["steps"]), lanes["total"]
    left_out = (
        "Every step is here."
        if shown == total
        else f"{shown:,} of {total:,} steps are here: the slowest, median, first, last and "
        "fastest, and some spread over the run; the others were left out to keep this file small."
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
