"""The command that prints one analysis of a run, whichever there is."""

from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli.opened import Json, Run, count_doubts, facts, opened
from lightning_rlprof.cli.output import next_command, put_json, say, show
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_rlprof.spans import Spans
    from lightning_rlprof.table import Table

__all__ = ["analysis"]

_SHOWN = 50


Name = Annotated[str | None, typer.Argument(help="Which analysis; left out, all are listed")]
Rank = Annotated[int | None, typer.Option(help="Only the rows of this rank")]
Rows = Annotated[
    int | None, typer.Option(min=1, help=f"Print so many rows; unset, {_SHOWN}, as JSON all")
]


def analysis(
    run: Run, name: Name = None, as_json: Json = False, rank: Rank = None, rows: Rows = None
) -> None:
    """Show one analysis of a run; without a name, which there are and what each answers.

    Example: rlprof show RUN breakdown
    """
    from lightning_rlprof.analysis import NAMED

    if name is None:
        _list(run, as_json=as_json)
        return
    if name not in NAMED:
        raise RlprofError(f"{name}: is no analysis (there are: {', '.join(NAMED)})")
    spans = opened(run)
    table = _told(NAMED[name], spans, rank)
    if as_json:
        shown = replace(table, rows=list(table.rows[:rows]))
        put_json(facts(spans) | {"tables": [shown.to_dict()]})
        return
    _print(spans, table, rows or _SHOWN)
    next_command("rlprof", "show", run)


def _print(spans: "Spans", table: "Table", rows: int) -> None:
    from lightning_rlprof.report.text import render

    say(str(spans.path), "bold")
    show("", render(table, rows=rows), "")
    count_doubts(spans)


def _list(run: Run, *, as_json: bool) -> None:
    from lightning_rlprof.analysis import NAMED

    answers = {name: _answer(each.__doc__ or "") for name, each in NAMED.items()}
    if as_json:
        put_json(answers)
        return
    for name, text in answers.items():
        say(f"{name:16} {text}")
    next_command("rlprof", "show", run, "stages")


def _answer(doc: str) -> str:
    """Return the line of a docstring that says what comes out, as plain text."""
    return doc.partition("\n")[0].replace("`", "").rstrip(".")


def _told(function: "Callable[..., Table]", spans: "Spans", rank: int | None) -> "Table":
    """Return the answer of an analysis, of one rank where that was asked for."""
    if rank is None:
        return function(spans)
    from lightning_rlprof.loaders.ranks import as_ranges

    if rank not in spans.ranks:
        raise RlprofError(f"--rank {rank}: is not in this run, which has {as_ranges(spans.ranks)}")
    if "ranks" in signature(function).parameters:
        return function(spans, ranks=[rank])
    table = function(spans)
    names = [column.name for column in table.columns]
    if "rank" not in names:
        raise RlprofError(f"--rank {rank}: {table.name} has no rows of single ranks")
    at = names.index("rank")
    return replace(table, rows=[row for row in table.rows if row[at] == rank])
