"""The command that makes the caches of many runs and traces, so that all others answer at once."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.address import here
from lightning_rlprof.cli.output import bar, next_command, put_json, say, show

if TYPE_CHECKING:
    from lightning_rlprof.table import Table

__all__ = ["Runs", "ingest"]

Runs = Annotated[
    list[Path],
    typer.Argument(
        parser=here, metavar="RUNS", help="Runs and traces, and directories with them below"
    ),
]
"""What is ingested."""

_SHOWN = 50
_ENGINES = ("local", "ray")


def _known(engine: str) -> str:
    if engine not in _ENGINES:
        raise typer.BadParameter(f"{engine!r} is none (allowed: {', '.join(_ENGINES)})")
    return engine


def ingest(
    runs: Runs,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, help="At once; unset, one per core")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local: processes here; ray: a cluster", callback=_known)
    ] = "local",
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON")] = False,
) -> None:
    """Make the cache of every run and trace; what is made already is left, what fails is a row.

    The exit status is 1 if any failed.

    Example: rlprof ingest traces/ -j 8
    """
    from lightning_rlprof.ingest.ingest import ingest as made_of

    with bar("Ingesting") as step, redirect_stdout(sys.stderr):  # on which Ray tells of its errors
        table = made_of(runs, jobs=jobs, engine=engine, progress=step)  # type: ignore[arg-type]
    failed = table.column("state").count("failed")
    if as_json:
        put_json({"failed": failed, "tables": [table.to_dict()]})
    else:
        _print(table)
        _next(table)
    if failed:
        raise typer.Exit(1)


def _next(table: "Table") -> None:
    good = [str(row[0]) for row in table.rows if row[2] != "failed"]
    if good:
        next_command("rlprof", "show", good[0])


def _print(table: "Table") -> None:
    """Show the rows that went well, then what failed or is doubtful, and count them."""
    from dataclasses import replace

    from lightning_rlprof.report.text import render

    told = [column for column in table.columns if column.name != "why"]
    at = [table.columns.index(column) for column in told]
    good = [tuple(row[each] for each in at) for row in table.rows if row[2] != "failed"]
    if good:
        show(render(replace(table, columns=tuple(told), rows=good), rows=_SHOWN), "")
    doubts: dict[str, list[str]] = {}
    for path, _, _, why, *_ in sorted(table.rows, key=lambda row: row[2] != "failed"):
        doubts.setdefault(str(why or ""), []).append(str(path))
    doubts.pop("", None)
    for why, paths in [*doubts.items()][:_SHOWN]:
        others = f" (and {len(paths) - 1:,} more)" if len(paths) > 1 else ""
        say(f"! {why}" if paths[0] in why else f"! {paths[0]}{others}: {why}", "yellow")
    states = table.column("state")
    counts = [f"{states.count(state):,} {state}" for state in ("made", "ready", "failed")]
    say(", ".join(counts), "bold")
