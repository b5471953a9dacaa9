"""The command that asks a run's tables in SQL, and can change nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.address import here
from lightning_rlprof.cli.opened import Force, Run
from lightning_rlprof.cli.output import (
    bar,
    destination,
    next_command,
    put_json,
    say,
    show,
    writing,
    wrote,
)
from lightning_rlprof.remote import local

if TYPE_CHECKING:
    from lightning_rlprof.store.store import Store

__all__ = ["Output", "sql"]

_FEW = 8
_SHOWN = 50

Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        parser=here,
        metavar="PATH",
        help="Write all rows to a .csv or .parquet",
    ),
]
"""Where the rows go; None prints them."""


def sql(
    run: Run,
    query: Annotated[
        str | None, typer.Argument(help="One SELECT; left out, the tables are listed")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON")] = False,
    rows: Annotated[
        int | None,
        typer.Option(min=1, max=2**40, help=f"Print so many rows; unset, {_SHOWN}, as JSON all"),
    ] = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Ask the tables of a run in SQL, read-only; the first time makes a cache beside the run.

    Example: rlprof sql RUN "select name, sum(duration_ns) from spans group by name"
    """
    if as_json and output is not None:
        raise typer.BadParameter("--json prints the rows and -o writes them: choose one")
    path = None if output is None else destination(output, run, "", force=force)
    with local(run) as here:
        store = _store(here)
        if query is None:
            _list(store, run, as_json=as_json)
        elif path is not None:
            _write(store, query, path)
            next_command("rlprof", "sql", run)
        else:
            _print(store, run, query, rows, as_json=as_json)


def _write(store: "Store", query: str, path: Path) -> None:
    with writing(path):
        count = store.write(query, path)
    say(f"{count:,} {'row' if count == 1 else 'rows'}")
    wrote(path)


def _store(run: Path) -> "Store":
    from lightning_rlprof.ingest.opening import open_store

    with bar("Reading") as step:
        return open_store(run, progress=step)


def _list(store: "Store", run: Path, *, as_json: bool) -> None:
    if as_json:
        put_json({"run": str(run), "tables": list(store.tables)})
        return
    say(f"{run} has the tables: {', '.join(store.tables)}")
    next_command("rlprof", "sql", run, f"describe {store.tables[-1]}")


def _print(store: "Store", run: Path, query: str, rows: int | None, *, as_json: bool) -> None:
    from lightning_rlprof.report.text import render

    table = store.sql(query, rows if as_json else rows or _SHOWN)
    problems = store.sql("select rank, text from problems").rows
    if as_json:
        doubts = [{"rank": rank, "text": text} for rank, text in problems]
        put_json(
            {
                "run": str(run),
                "query": query,
                "problems": doubts,
                "tables": [table.to_dict()],
            }
        )
        return
    show(render(table, every=True), "")
    for rank, text in problems[:_FEW]:
        say(f"! {text}" if rank is None else f"! rank {rank}: {text}", "yellow")
    if len(problems) > _FEW:
        say(f"! and {len(problems) - _FEW} more: the table problems has them all", "yellow")
