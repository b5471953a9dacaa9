"""The command that says what to act on, after how far the run can be trusted."""

import shlex
from typing import TYPE_CHECKING, Any

from lightning_rlprof.cli.opened import Json, Run, facts, opened
from lightning_rlprof.cli.output import next_command, put_json, say

if TYPE_CHECKING:
    from lightning_rlprof.table import Table

__all__ = ["findings"]

_STYLES = {"ok": "green", "doubt": "yellow", "unknown": "dim"}


def findings(run: Run, as_json: Json = False) -> None:
    """Say what is worth acting on, with its price, its evidence, and what would refute it."""
    from lightning_rlprof import analysis

    spans = opened(run)
    sheet, found = analysis.integrity(spans), analysis.findings(spans)
    if as_json:
        put_json(facts(spans) | {"tables": [sheet.to_dict(), found.to_dict()]})
        return
    say(f"{spans.path}: how far this can be trusted", "bold")
    for check, state, what in sheet.rows:
        say(f"{state:8}{check}: {what}", _STYLES[str(state)])
    say("")
    say("What is worth acting on", "bold")
    _print(found, run)
    next_command("rlprof", "report", run)


def _print(found: "Table", run: Run) -> None:
    if found.abstained is not None:
        say(f"not told: {found.abstained}")
    elif not found.rows:
        say("nothing: no rule has found anything")
    names = [column.name for column in found.columns]
    for at, row in enumerate(found.rows, start=1):
        one = dict(zip(names, row, strict=True))
        say(f"{at}. {one['finding']}", "bold")
        say(f"   {_price(one)}, {one['confidence']} confidence; {one['evidence']}")
        say(f"   next: {one['next experiment']}")
        say(f"   refuted if {one['refuted if']}")
        command = str(one["reproduce"]).replace("RUN", shlex.quote(str(run)))
        say(f"   {command}", "dim")
    if found.note:
        say(found.note, "dim")


def _price(one: dict[str, Any]) -> str:
    from lightning_rlprof.report.text import duration

    if one["effect"] is None:
        return "its price is not known"
    bounds = ""
    if one["low"] is not None and one["high"] is not None:
        bounds = f" ({duration(one['low'])} to {duration(one['high'])})"
    return f"{duration(one['effect'])} of GPU time{bounds}, {one['share']:.1%} of the job"
