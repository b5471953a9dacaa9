"""The command about the critical path: what a step's length hangs on, and what it does not."""

from typing import Annotated

import typer

from lightning_rlprof.cli.opened import Json, Run, count_doubts, opened
from lightning_rlprof.cli.output import next_command, put_json, say, show

__all__ = ["path"]

PerRank = Annotated[bool, typer.Option("--per-rank", help="A row per rank")]
PerSample = Annotated[bool, typer.Option("--per-sample", help="A row per sample on the path")]


def path(
    run: Run, as_json: Json = False, per_rank: PerRank = False, per_sample: PerSample = False
) -> None:
    """Show the critical path of a step by stage, role and rank, and what has slack.

    Where steps overlap, also the cycle that their rate hangs on.
    """
    from lightning_rlprof.analysis.cycle import cycle
    from lightning_rlprof.analysis.path import path as analysis
    from lightning_rlprof.report.text import render

    spans = opened(run)
    tables = [analysis(spans, per_rank=per_rank, per_sample=per_sample), cycle(spans)]
    if tables[1].abstained is not None:
        del tables[1]
    if as_json:
        problems = [problem._asdict() for problem in spans.problems]
        about = {"run": str(spans.path), "ranks": list(spans.ranks), "problems": problems}
        put_json(about | {"tables": [table.to_dict() for table in tables]})
        return
    say(f"{spans.path}: what a step's length hangs on", "bold")
    for table in tables:
        show("", render(table), "")
    count_doubts(spans)
    next_command("rlprof", "whatif", run)
