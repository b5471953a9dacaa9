"""The command about the whole job: where its GPU-seconds went, and what they cost."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli.output import bar, next_command, put_json, say, show
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    from lightning_rlprof.analysis.book import Book

__all__ = ["ledger"]


def ledger(
    run: Annotated[Path, typer.Argument(help="A run directory, or a save path with runs")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON")] = False,
    per_rank: Annotated[bool, typer.Option("--per-rank", help="Also every rank by itself")] = False,
    per_step: Annotated[bool, typer.Option("--per-step", help="Also every step by itself")] = False,
    price: Annotated[
        float | None,
        typer.Option(metavar="EUR_PER_GPU_HOUR", help="What a GPU-hour costs, in euros"),
    ] = None,
) -> None:
    """Show where the GPU-seconds of the whole job went, and what they cost."""
    if price is not None and not 0 <= price < math.inf:
        raise RlprofError(f"--price {price}: a GPU-hour costs 0 euros or more, for instance 2.5")
    from lightning_rlprof.analysis.book import balance
    from lightning_rlprof.analysis.ledger import breakdown, totals
    from lightning_rlprof.loaders.load import load
    from lightning_rlprof.report.text import render

    with bar("Reading") as step:
        spans = load(run, progress=step)
    book = balance(spans)
    tables = [totals(book, price=price)]
    if per_rank or per_step:
        tables.append(breakdown(book, per_rank=per_rank, per_step=per_step))
    if as_json:
        problems = [problem._asdict() for problem in spans.problems]
        facts = {"run": str(spans.path), **_facts(book), "problems": problems}
        put_json(facts | {"tables": [table.to_dict() for table in tables]})
        return
    say(f"{spans.path}: where the GPU-seconds of the job went", "bold")
    for table in tables:
        show("", render(table))
    show("")
    if spans.problems:
        say(f"! {len(spans.problems)} doubts about this run: rlprof summary tells them", "yellow")
    next_command("rlprof", "report", run)


def _facts(book: "Book") -> dict[str, object]:
    """Return what the totals add up to: ``wall_ns`` times all ranks."""
    return {"wall_ns": book.wall_ns, "ranks": list(book.ranks), "silent_ranks": list(book.silent)}
