"""The verbs around stored runs: ``sql`` queries tables, ``ingest`` caches, ``upload`` copies."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.open_run import Force, Limit, Run, check_exists, warn_of_ranks
from lightning_rlprof.errors import RlprofError, TraceError
from lightning_rlprof.system.location import local_path, place
from lightning_rlprof.system.remote_files import local

if TYPE_CHECKING:
    from lightning_rlprof.store.run_store import Store
    from lightning_rlprof.tables.table import Table

_LIMIT = 50

Query = Annotated[
    str | None, typer.Argument(metavar="[QUERY]", help="One SELECT; omit it to list the tables")
]
Rows = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        parser=local_path,
        metavar="PATH",
        help="Write all rows to a .csv or .parquet file",
    ),
]


def sql(
    run: Run, query: Query = None, limit: Limit = None, output: Rows = None, force: Force = False
) -> None:
    """Query a run's tables with SQL (read-only). The first query caches the run.

    Example: rlprof sql RUN "select name, sum(duration_ns) from spans group by name"
    """
    if output is not None and console.is_json():
        raise RlprofError("--json prints the rows and -o writes them: choose one")
    path = None if output is None else console.destination(output, run, "", force=force)
    with open_tables(run) as store:
        if query is None:
            _list_tables(store, run)
            return
        try:
            if path is None:
                _print_rows(store, run, query, limit)
            else:
                with console.writing(path):
                    rows = store.write(query, path)
                console.status(console.count(rows, "row"))
                console.wrote(path)
        except TraceError as error:
            raise RlprofError(str(error), hint=_near(store, str(error)), code="sql") from error


@contextmanager
def open_tables(run: Path) -> "Iterator[Store]":
    """Open a run for SQL, copied here first if it is remote."""
    from lightning_rlprof.store.open_run import open_store

    check_exists(run)
    with local(run) as copy:
        with console.bar("Reading") as step:
            store = open_store(copy, progress=step)
        yield store


def _near(store: "Store", error: str) -> str:
    """Return which table a query may mean; for columns DuckDB's message has candidates."""
    unknown = re.search(r"Table with name (\w+) does not exist", error)
    return console.did_you_mean(unknown[1], store.tables) if unknown else ""


def _list_tables(store: "Store", run: Path) -> None:
    if console.is_json():
        console.put_json({"run": str(run), "tables": list(store.tables)})
        return
    from lightning_rlprof.tables.table import Column, Table

    rows = []
    for name in store.tables:
        names = ", ".join(str(row[0]) for row in store.sql(f'describe "{name}"').rows)
        (total,) = store.sql(f'select count(*) from "{name}"').rows
        rows.append((name, total[0], names))
    columns = (Column("table", "text"), Column("rows", "count"), Column("columns", "text"))
    console.print_tables([Table("tables", columns, rows)])
    console.next_command("rlprof", "sql", run, f"describe {store.tables[0]}")


def _print_rows(store: "Store", run: Path, query: str, limit: int | None) -> None:
    table = store.sql(query, limit if console.is_json() or console.is_csv() else limit or _LIMIT)
    warnings = [(rank, text) for rank, text in store.sql("select rank, text from warnings").rows]
    if console.is_json():
        found = [{"rank": rank, "text": text} for rank, text in warnings]
        facts = {"run": str(run), "query": query, "warnings": found}
        console.put_json(facts | {"tables": [table.to_dict()]})
        return
    console.print_tables([replace(table, name="")], every_column=True)
    console.status("")
    warn_of_ranks(warnings, shlex.join(["rlprof", "sql", str(run), "from warnings"]))


Runs = Annotated[
    list[Path],
    typer.Argument(
        parser=local_path, metavar="PATHS", help="Runs, traces, and directories of them"
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("-j", "--jobs", min=1, metavar="N", help="Parallel jobs (default: cores)"),
]
Engine = Annotated[
    Literal["local", "ray"],
    typer.Option(metavar="NAME", help="local: processes of this machine; ray: a cluster"),
]


def ingest(runs: Runs, jobs: Jobs = None, engine: Engine = "local") -> None:
    """Cache runs and traces as Parquet.

    Skips what is up to date. Failures are reported per path, and the exit code is 1.

    Example: rlprof ingest traces/ -j 8
    """
    from lightning_rlprof.store.ingest.ingest import ingest as cache_all

    # Ray prints its errors on standard output.
    with console.bar("Ingesting") as step, redirect_stdout(sys.stderr):
        table = cache_all(runs, jobs=jobs, engine=engine, progress=step)
    failed = table.column("state").count("failed")
    if console.is_json():
        console.put_json({"failed": failed, "tables": [table.to_dict()]})
    else:
        _print_outcomes(table)
    if failed:
        raise typer.Exit(1)


_STATES = ("cached", "up to date", "failed")
_WHY = 3  # the column of reasons


def _print_outcomes(table: "Table") -> None:
    """Print what was cached, then failures and warnings, then how many there are of each state."""
    columns = (*table.columns[:_WHY], *table.columns[_WHY + 1 :])
    good = [(*row[:_WHY], *row[_WHY + 1 :]) for row in table.rows if row[2] != "failed"]
    if good:
        console.print_tables([replace(table, columns=columns, rows=good)], limit=_LIMIT)
        console.status("")
    paths_by_reason: dict[str, list[str]] = {}
    for path, _, _, why, *_ in sorted(table.rows, key=lambda row: row[2] != "failed"):
        if why:
            paths_by_reason.setdefault(str(why), []).append(str(path))
    for why, paths in [*paths_by_reason.items()][:_LIMIT]:
        others = f" (and {len(paths) - 1:,} more)" if len(paths) > 1 else ""
        console.warn(why if paths[0] in why else f"{paths[0]}{others}: {why}")
    states = table.column("state")
    console.status(", ".join(f"{states.count(state):,} {state}" for state in _STATES), "bold")
    if good:
        console.next_command("rlprof", "show", str(good[0][0]))


UploadRun = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run directory; on_finish commands leave it out"),
]
UploadUrl = Annotated[
    str | None,
    typer.Argument(metavar="URL", help="Parent of the uploaded run, such as s3://bucket/runs"),
]
UploadRank = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="N", envvar="RLPROF_RANK", show_envvar=False, help="Upload only this rank"
    ),
]
IncludeUnfinished = Annotated[
    bool,
    typer.Option("--include-unfinished", help="Also upload ranks that didn't shut down cleanly"),
]


def upload(
    run: UploadRun,
    url: UploadUrl = None,
    rank: UploadRank = None,
    include_unfinished: IncludeUnfinished = False,
) -> None:
    """Upload a finished run to S3, GCS, HDFS or any fsspec store. Resumes if interrupted.

    Example: rlprof upload profiler_data/my-run s3://bucket/runs

    An on_finish command sets RLPROF_RUN and RLPROF_RANK: rlprof upload URL
    """
    from lightning_rlprof.records.upload import upload as upload_run
    from lightning_rlprof.system.remote_files import size_text

    if url is None:
        run, url = os.environ.get("RLPROF_RUN", ""), run
        if not run:
            raise RlprofError("missing argument URL", hint="Usage: rlprof upload RUN URL")
    folder = local_path(run)
    done = upload_run(folder, url, rank, crashed=include_unfinished)
    target = f"{str(place(url)).rstrip('/')}/{folder.resolve().name}"
    already = f" ({done.there:,} already there)" if done.there else ""
    console.status(
        f"Uploaded {console.count(done.files, 'file')} to {target}, {size_text(done.size)}{already}"
    )
    if done.left:
        console.warn(
            f"not uploaded, as they may still grow: {', '.join(done.left)}. "
            "After a crash, add --include-unfinished."
        )
    console.next_command("rlprof", "summary", target)
