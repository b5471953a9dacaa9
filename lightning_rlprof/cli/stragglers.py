"""The command about slow ranks: who makes the others wait, and how sure that is."""

from lightning_rlprof.cli.opened import Json, Run, count_doubts, opened
from lightning_rlprof.cli.output import next_command, put_json, say, show

__all__ = ["stragglers"]


def stragglers(run: Run, as_json: Json = False) -> None:
    """Name the ranks that make the others wait, or say why nobody can be named."""
    from lightning_rlprof import analysis
    from lightning_rlprof.report.text import render

    spans = opened(run)
    table = analysis.stragglers(spans)
    if as_json:
        problems = [problem._asdict() for problem in spans.problems]
        facts = {"run": str(spans.path), "ranks": list(spans.ranks), "problems": problems}
        put_json(facts | {"tables": [table.to_dict()]})
        return
    say(f"{spans.path}: who makes the others wait", "bold")
    show("", render(table), "")
    count_doubts(spans)
    next_command("rlprof", "report", run)
