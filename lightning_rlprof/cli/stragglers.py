"""The command about slow ranks: who makes the others wait, and how sure that is."""

from pathlib import Path
from typing import Annotated

import typer

from lightning_rlprof.cli.output import bar, next_command, put_json, say, show

__all__ = ["stragglers"]


def stragglers(
    run: Annotated[Path, typer.Argument(help="A run directory, or a save path with runs")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON")] = False,
) -> None:
    """Name the ranks that make the others wait, or say why nobody can be named."""
    from lightning_rlprof import analysis
    from lightning_rlprof.loaders.load import load
    from lightning_rlprof.report.text import render

    with bar("Reading") as step:
        spans = load(run, progress=step)
    table = analysis.stragglers(spans)
    if as_json:
        problems = [problem._asdict() for problem in spans.problems]
        facts = {"run": str(spans.path), "ranks": list(spans.ranks), "problems": problems}
        put_json(facts | {"tables": [table.to_dict()]})
        return
    say(f"{spans.path}: who makes the others wait", "bold")
    show("", render(table), "")
    if spans.problems:
        say(f"! {len(spans.problems)} doubts about this run: rlprof summary tells them", "yellow")
    next_command("rlprof", "report", run)
