"""The command about the whole job: where its GPU-seconds went, and what they cost."""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli.opened import Json, Run, count_doubts, opened
from lightning_rlprof.cli.output import next_command, put_json, say, show
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    from lightning_rlprof.analysis.book import Book
    from lightning_rlprof.spans import Spans
    from lightning_rlprof.table import Table

__all__ = ["ledger"]


PerRank = Annotated[bool, typer.Option("--per-rank", help="Also every rank by itself")]
PerStep = Annotated[bool, typer.Option("--per-step", help="Also every step by itself")]
Price = Annotated[
    float | None,
    typer.Option(metavar="EUR_PER_GPU_HOUR", help="What a GPU-hour costs, in euros"),
]


def ledger(
    run: Run,
    as_json: Json = False,
    per_rank: PerRank = False,
    per_step: PerStep = False,
    price: Price = None,
) -> None:
    """Show where the GPU-seconds of the whole job went, and what they cost."""
    if price is not None and not 0 <= price < math.inf:
        raise RlprofError(f"--price {price}: a GPU-hour costs 0 euros or more, for instance 2.5")
    from lightning_rlprof.analysis.book import balance
    from lightning_rlprof.analysis.ledger import breakdown, totals

    spans = opened(run)
    book = balance(spans, per_step=per_step, per_rank=per_rank)
    tables = [totals(book, price=price)]
    tables += [breakdown(book)] if per_rank or per_step else []
    if as_json:
        put_json(_facts(spans, book) | {"tables": [table.to_dict() for table in tables]})
        return
    _show(spans, tables)
    next_command("rlprof", "report", run)


def _show(spans: "Spans", tables: "list[Table]") -> None:
    from lightning_rlprof.report.text import render

    say(f"{spans.path}: where the GPU-seconds of the job went", "bold")
    for table in tables:
        show("", render(table))
    show("")
    count_doubts(spans)


def _facts(spans: "Spans", book: "Book") -> dict[str, object]:
    """Return what the totals add up to, ``wall_ns`` times all ranks, and what is doubtful."""
    return {
        "run": str(spans.path),
        "wall_ns": book.wall_ns,
        "ranks": list(book.ranks),
        "silent_ranks": list(book.silent),
        "problems": [problem._asdict() for problem in spans.problems],
    }
