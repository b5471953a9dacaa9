"""The command about the critical path: what a step's length hangs on, and what it does not."""

from typing import Annotated

import typer

from lightning_rlprof.cli.opened import Json, Run, count_doubts, opened
from lightning_rlprof.cli.output import next_command, put_json, say, show

__all__ = ["path"]

PerRank = Annotated[bool, typer.Option("--per-rank", help="A row per rank")]


def path(run: Run, as_json: Json = False, per_rank: PerRank = False) -> None:
    """Show the critical path of a step by stage, role and rank, and what has slack."""
    from lightning_rlprof.analysis.path import path as analysis
    from lightning_rlprof.report.text import render

    spans = opened(run)
    table = analysis(spans, per_rank=per_rank)
    if as_json:
        problems = [problem._asdict() for problem in spans.problems]
        facts = {"run": str(spans.path), "ranks": list(spans.ranks), "problems": problems}
        put_json(facts | {"tables": [table.to_dict()]})
        return
    say(f"{spans.path}: what a step's length hangs on", "bold")
    show("", render(table), "")
    count_doubts(spans)
    next_command("rlprof", "whatif", run)
