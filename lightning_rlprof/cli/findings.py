"""The command that says what to act on, after how far the run can be trusted."""

import shlex
from typing import TYPE_CHECKING

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
    from lightning_rlprof.report.cards import cards

    if found.abstained is not None:
        say(f"not told: {found.abstained}")
    elif not found.rows:
        say("nothing: no rule has found anything")
    for at, card in enumerate(cards(found, shlex.quote(str(run))), start=1):
        say(f"{at}. {card.claim}", "bold")
        say(f"   {card.price}; {card.evidence}")
        say(f"   next: {card.experiment}")
        say(f"   refuted if {card.refuted}")
        if card.where:
            say(f"   look at {card.where}, in the report and in what rlprof trace writes")
        for command in card.commands:
            say(f"   {command}", "dim")
    if found.note:
        say(found.note, "dim")
