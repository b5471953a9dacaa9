"""The command that asks a run's tables in SQL, and can change nothing.

The command that makes the caches of many runs and traces, so that all others answer at once.

The command that copies a finished run to where runs are kept.
"""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli.console import (
    bar,
    destination,
    next_command,
    put_json,
    say,
    show,
    writing,
    wrote,
)
from lightning_rlprof.cli.open_run import Force, Run
from lightning_rlprof.system.location import local_path, place
from lightning_rlprof.system.remote_files import local

if TYPE_CHECKING:
    from lightning_rlprof.store.run_store import Store
    from lightning_rlprof.tables.table import Table

_FEW = 8
_SHOWN = 50

Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        parser=local_path,
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
    from lightning_rlprof.store.open_run import open_store

    with bar("Reading") as step:
        return open_store(run, progress=step)


def _list(store: "Store", run: Path, *, as_json: bool) -> None:
    if as_json:
        put_json({"run": str(run), "tables": list(store.tables)})
        return
    say(f"{run} has the tables: {', '.join(store.tables)}")
    next_command("rlprof", "sql", run, f"describe {store.tables[-1]}")


def _print(store: "Store", run: Path, query: str, rows: int | None, *, as_json: bool) -> None:
    from lightning_rlprof.report.terminal import render

    table = store.sql(query, rows if as_json else rows or _SHOWN)
    problems = store.sql("select rank, text from warnings").rows
    if as_json:
        doubts = [{"rank": rank, "text": text} for rank, text in problems]
        put_json(
            {
                "run": str(run),
                "query": query,
                "warnings": doubts,
                "tables": [table.to_dict()],
            }
        )
        return
    show(render(table, every=True), "")
    for rank, text in problems[:_FEW]:
        say(f"! {text}" if rank is None else f"! rank {rank}: {text}", "yellow")
    if len(problems) > _FEW:
        say(f"! and {len(problems) - _FEW} more: the table warnings has them all", "yellow")


Runs = Annotated[
    list[Path],
    typer.Argument(
        parser=local_path, metavar="RUNS", help="Runs and traces, and directories with them below"
    ),
]
"""What is ingested."""

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
    """Cache runs and traces as Parquet. Skips what is up to date; failures are reported per path.

    The exit status is 1 if any failed.

    Example: rlprof ingest traces/ -j 8
    """
    from lightning_rlprof.store.ingest.ingest import ingest as made_of

    with bar("Ingesting") as step, redirect_stdout(sys.stderr):  # on which Ray tells of its errors
        table = made_of(runs, jobs=jobs, engine=engine, progress=step)  # type: ignore[arg-type]
    failed = table.column("state").count("failed")
    if as_json:
        put_json({"failed": failed, "tables": [table.to_dict()]})
    else:
        _ingest_print(table)
        _next(table)
    if failed:
        raise typer.Exit(1)


def _next(table: "Table") -> None:
    good = [str(row[0]) for row in table.rows if row[2] != "failed"]
    if good:
        next_command("rlprof", "show", good[0])


def _ingest_print(table: "Table") -> None:
    """Show the rows that went well, then what failed or is doubtful, and count them."""
    from dataclasses import replace

    from lightning_rlprof.report.terminal import render

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
    counts = [f"{states.count(state):,} {state}" for state in ("cached", "up to date", "failed")]
    say(", ".join(counts), "bold")


FinishedRun = Annotated[
    Path,
    typer.Argument(
        envvar="RLPROF_RUN",
        parser=local_path,
        metavar="RUN",
        help="A run directory; on_finish tells it",
    ),
]
"""What is shipped."""

To = Annotated[
    str, typer.Option("--to", metavar="URL", help="Where runs are kept, as s3://bucket/runs")
]
"""Where to."""

Rank = Annotated[
    int | None,
    typer.Option(min=0, envvar="RLPROF_RANK", help="Only this rank's files; on_finish tells it"),
]
"""Whose files; None for all."""

Crashed = Annotated[
    bool, typer.Option("--crashed", help="Also ranks that never said that they had ended")
]
"""Whether files without an end are shipped, too."""


def ship(run: FinishedRun, to: To, rank: Rank = None, crashed: Crashed = False) -> None:
    """Copy a finished run to S3, GCS, HDFS or whatever fsspec knows; go on where it was cut off.

    Example: rlprof ship profiler_data/my-run --to s3://bucket/runs
    """
    from lightning_rlprof.records.upload import ship as ship_run
    from lightning_rlprof.system.remote_files import size_text

    shipped = ship_run(run, to, rank, crashed=crashed)
    target = f"{str(place(to)).rstrip('/')}/{run.resolve().name}"
    there = f" ({shipped.there:,} were there)" if shipped.there else ""
    say(f"{target}: {shipped.files:,} files copied, {size_text(shipped.size)}{there}")
    if shipped.left:
        say(
            f"! left here, for they may still grow: {', '.join(shipped.left)}; after a crash "
            "--crashed copies them, too",
            "yellow",
        )
    next_command("rlprof", "summary", target)
