"""The verbs around whole runs: ls, summary, report, open, export, sql, ingest, ascend parse."""

import os
import re
import shlex
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import argument, option
from lightning_rlprof.cli.open_run import (
    RUN_HELP,
    SAVE_PATH,
    AsOne,
    Force,
    Others,
    Output,
    Run,
    about,
    as_json,
    check_exists,
    complete_run,
    open_run,
    open_runs,
    print_warnings,
    run_at,
    run_directory,
    warn_of_ranks,
)
from lightning_rlprof.errors import RlprofError, TraceError
from lightning_rlprof.records.run_directory import rank_files
from lightning_rlprof.system.location import RemotePath, local_path, place
from lightning_rlprof.system.remote_files import local

if TYPE_CHECKING:
    from lightning_rlprof.loaders.ascend.offline_analysis import Outcome
    from lightning_rlprof.store.run_store import Store
    from lightning_rlprof.store.sql import Limits
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Cell, Table

_LIMIT, _SHOWN_RUNS = 50, 20
_CHROME = (".json", ".json.gz")  # Perfetto reads these traces.
_STATES = ("cached", "up to date", "failed")
_WHY = 3  # Index of the column of reasons.


def list_runs(
    path: Annotated[
        Path, argument("PATH", "Directory of runs, or a run", parser=local_path)
    ] = SAVE_PATH,
) -> None:
    """List the runs of a directory, newest first."""
    from lightning_rlprof.loaders.load import run_list

    check_exists(path)
    if not path.is_dir():
        raise RlprofError(f"{path} is not a directory", hint="See its run: rlprof summary RUN")
    table = run_list(path)
    if console.is_json():
        console.put_json({"path": str(path), "tables": as_json([table])})
        return
    console.print_tables([table], rows=_SHOWN_RUNS)
    newest = path if rank_files(path) else path / str(table.rows[0][0])
    console.next_command("rlprof", "summary", newest)


def summary(
    run: Run = SAVE_PATH,
    others: Others = None,
    as_one: AsOne = False,
    by: Annotated[Literal["rank"] | None, option("PART", "Add one row per rank: rank")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Add each table of a run that reads no large trace")
    ] = False,
) -> None:
    """Show where the time of a step went."""
    from lightning_rlprof.analysis.catalog import CATALOG
    from lightning_rlprof.analysis.stages import stages
    from lightning_rlprof.report.summary import lead_tables
    from lightning_rlprof.report.summary import summary as sum_up

    spans = open_runs(run, others, as_one)
    more = [stages(spans, per_rank=True)] if by else []
    if every:
        shown = {table.name for table in lead_tables(spans)}
        own = [each.run(spans) for each in CATALOG if each.summary and each.name not in shown]
        more += [table for table in own if table.rows]  # For an empty table, `show` says why.
    if console.is_json():
        tables = [table for table in (*lead_tables(spans), *more) if table.rows]
        facts = sum_up(spans, captures=True).to_dict()
        console.put_json(about(spans) | {"summary": facts, "tables": as_json(tables)})
        return
    if console.is_csv():
        console.print_tables(lead_tables(spans))
    else:
        describe(spans)
    console.print_tables(more)
    console.status("")
    print_warnings(spans)
    console.next_command("rlprof", "findings", run)


def report(
    run: Run = SAVE_PATH,
    others: Others = None,
    as_one: AsOne = False,
    output: Output = None,
    force: Force = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser")] = False,
) -> None:
    """Write one HTML file with tables, timeline and configuration."""
    spans = open_runs(run, others, as_one)
    path = write_page(spans, output, force=force)
    print_warnings(spans)
    console.wrote(path)
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        console.warn(f"no browser could be opened here. The page: {path.resolve().as_uri()}")
    console.next_command("rlprof", "findings", run)


def write_page(spans: "Spans", output: Path | None = None, *, force: bool = False) -> Path:
    """Write the HTML report of a run, beside it unless the user wants it elsewhere."""
    mark = b"rlprof report</title>"
    path = console.destination(output, spans.path, "report.html", force=force, mark=mark)
    from lightning_rlprof.report.html.page import report_tables, write_report

    with console.bar("Analyzing") as step:
        tables = report_tables(spans, step)
    with console.writing(path):
        write_report(spans, tables, path)
    return path


Kernels = Annotated[
    bool, typer.Option("--kernels", help="Include device kernels from captures, by stream")
]
AllowUnsynced = Annotated[
    bool, typer.Option("--allow-unsynced", help="Merge ranks of hosts with unsynchronized clocks")
]


def open_in_perfetto(
    run: Run = SAVE_PATH,
    kernels: Kernels = False,
    allow_unsynced: AllowUnsynced = False,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address and open nothing")
    ] = False,
) -> None:
    """Show a run in Perfetto, offline, until you press Ctrl-C. Leaves no file.

    A trace that is one .json or .json.gz file is shown as it is. The address has a secret, and
    answers on this machine only.
    """
    from lightning_rlprof.report.perfetto import TraceServer, perfetto_ui

    ui = perfetto_ui()
    if ui is None:
        raise RlprofError(
            "Perfetto's UI is not installed", hint='pip install "lightning-rlprof[viewer]"'
        )
    check_exists(run)
    if not isinstance(run, RemotePath) and run.is_file() and run.name.endswith(_CHROME):
        trace, name = run.read_bytes(), run.name
    else:
        spans = open_run(run)
        with TemporaryDirectory() as folder:
            path = Path(folder, "trace.json.gz")
            remarks = _write_perfetto(spans, path, kernels=kernels, allow_unsynced=allow_unsynced)
            trace, name = path.read_bytes(), spans.path.name or "run"
        _print_remarks(spans, remarks)
    with TraceServer(ui, trace, name) as server:
        console.say(f"Perfetto: {server.address}")
        console.status("It ends with Ctrl-C.")
        if not no_browser:
            webbrowser.open(server.address_for_once())
        server.serve_forever()
        console.status("Ended.")


def export(
    run: Run = SAVE_PATH,
    target: Annotated[
        Literal["perfetto", "parquet", "csv", "otlp", "insight"] | None,
        option(
            "FORMAT",
            "perfetto (default), parquet, csv, otlp or insight",
            "--format",
        ),
    ] = None,
    output: Output = None,
    kernels: Kernels = False,
    force: Force = False,
    allow_unsynced: AllowUnsynced = False,
    to: Annotated[
        str | None,
        option("URL", "Upload the run itself below this URL, such as s3://bucket/runs", "--to"),
    ] = None,
    rank: Annotated[int | None, option("N", "--to: only this rank", "--rank", min=0)] = None,
    include_unfinished: Annotated[
        bool,
        typer.Option("--include-unfinished", help="--to: also ranks that didn't shut down cleanly"),
    ] = False,
) -> None:
    """Export a run as a Perfetto trace or as files, or upload it.

    perfetto is one file, .json or .json.gz. otlp is one file of OpenTelemetry's spans (OTLP), a
    JSON object per line. parquet and csv are a file per table. insight is a folder per capture for
    MindStudio Insight.

    --to uploads a finished run to S3, GCS, HDFS or any fsspec store. It resumes if interrupted.

    Example: rlprof export RUN --kernels

    Example: rlprof export RUN --to s3://bucket/runs
    """
    if to is not None:
        if target or output or kernels or force or allow_unsynced:
            raise RlprofError("--to uploads the run as it is", hint="Leave out other options.")
        _upload(run, to, rank, include_unfinished=include_unfinished)
        return
    if rank is not None or include_unfinished:
        raise RlprofError("--rank and --include-unfinished apply to --to only")
    if target not in (None, "perfetto") and (kernels or allow_unsynced):
        raise RlprofError("--kernels and --allow-unsynced apply to --format perfetto only")
    match target:
        case "otlp":
            _export_otlp(run, output, force=force)
        case "insight":
            _export_captures(run, output, force=force)
        case "parquet" | "csv":
            _export_tables(run, target, output, force=force)
        case _:
            _export_perfetto(
                run, output, kernels=kernels, force=force, allow_unsynced=allow_unsynced
            )


def _export_perfetto(
    run: Path, output: Path | None, *, kernels: bool, force: bool, allow_unsynced: bool
) -> None:
    """Write the Perfetto trace of a run beside it, or where the user wants it."""
    spans = open_run(run)
    path = console.destination(output, spans.path, "trace.json.gz", force=force)
    remarks = _write_perfetto(spans, path, kernels=kernels, allow_unsynced=allow_unsynced)
    _print_remarks(spans, remarks)
    console.wrote(path)
    console.status("Open it in https://ui.perfetto.dev (it stays in your browser).")


def _upload(run: Path, url: str, rank: int | None, *, include_unfinished: bool) -> None:
    """Upload a run, or one rank of it."""
    from lightning_rlprof.records.upload import upload
    from lightning_rlprof.system.remote_files import size_text

    folder = run_directory(run)
    done = upload(folder, url, rank, crashed=include_unfinished)
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


def _write_perfetto(
    spans: "Spans", path: Path, *, kernels: bool, allow_unsynced: bool
) -> list[str]:
    """Write the Perfetto trace of a run; returns what its reader has to know."""
    from lightning_rlprof.analysis.steps.sync_points import unsynchronized_clocks
    from lightning_rlprof.report.chrome_trace import write_trace
    from lightning_rlprof.report.device_tracks import DeviceTracks

    unsynced = unsynchronized_clocks(spans)
    if unsynced and not allow_unsynced:
        raise RlprofError(
            f"{spans.path}: {unsynced}, so the order of events across ranks would be wrong",
            hint="Pass one rank's file, or --allow-unsynced.",
            code="unsynchronized_clocks",
        )
    with console.bar("Writing") as step, console.writing(path):
        devices = DeviceTracks(spans) if kernels else None
        write_trace(spans, path, devices=devices, watermark=unsynced, progress=step)
    remarks = list(devices.remarks) if devices else []
    if unsynced:
        remarks.append(f"{unsynced}: don't compare times of different ranks in this trace.")
    return remarks


def _print_remarks(spans: "Spans", remarks: Sequence[str]) -> None:
    print_warnings(spans)
    for remark in remarks:
        console.warn(remark)


def _export_otlp(run: Path, output: Path | None, *, force: bool) -> None:
    """Write the spans of a run as lines of OTLP."""
    spans = open_run(run)
    path = console.destination(output, spans.path, "otlp.jsonl", force=force)
    from lightning_rlprof.analysis.steps.sync_points import unsynchronized_clocks
    from lightning_rlprof.report.otlp import write_otlp

    with console.writing(path):
        number = write_otlp(spans, path)
    print_warnings(spans)
    if unsynced := unsynchronized_clocks(spans):
        console.warn(f"{unsynced}: don't compare times of different ranks in this file.")
    console.wrote(path)
    console.status(console.count(number, "span"))


def _export_captures(run: Path, output: Path | None, *, force: bool) -> None:
    """Put the captures of a run into folders for MindStudio Insight."""
    from lightning_rlprof.loaders.load import newest_run
    from lightning_rlprof.report.insight import insight_folders

    check_exists(run)
    with local(run) as copy:
        source = newest_run(copy)
        name = source.name or source.absolute().name
        out = _folder(output or Path(f"{name}-insight"), force=force)
        with console.writing(out):
            folders, raw = insight_folders(source, out)
    parse = shlex.join(["rlprof", "ascend", "parse", str(run)])
    if raw and not folders:
        raise RlprofError(f"the captures of {run} are not parsed", hint=f"Parse them: {parse}")
    if raw:
        console.warn(f"{console.count(len(raw), 'capture')} left out, not parsed: {parse}")
    for folder in folders:
        console.wrote(folder)
    console.status("Import one of them into MindStudio Insight.")


def _export_tables(run: Path, suffix: str, output: Path | None, *, force: bool) -> None:
    """Write every table of a run into one directory, a file each."""
    from lightning_rlprof.records.run_directory import mode_made_of
    from lightning_rlprof.system.files import new_folder

    source = run if run.name else run.absolute()
    folder = output or Path(f"{source.stem if run.is_file() else source.name}-tables")
    _folder(folder, force=force)
    with open_tables(run) as store, console.bar("Writing") as step, console.writing(folder):
        new_folder(folder, mode_made_of(run))
        for done, name in enumerate(store.tables, start=1):
            store.write(f'from "{name}"', folder / f"{name}.{suffix}")
            step(done, len(store.tables))
    console.wrote(folder)


def _folder(path: Path, *, force: bool) -> Path:
    """Return a directory to write files into, which is new or empty unless the user insists."""
    if path.exists() and not path.is_dir():
        raise RlprofError(f"{path} is not a directory", hint="Choose another one with -o.")
    if path.exists() and any(path.iterdir()) and not force:
        hint = "Replace files with --force, or choose another directory with -o."
        raise RlprofError(f"{path} exists already", hint=hint)
    return path


def describe(spans: "Spans") -> None:
    """Print the run in two lines, what to see of it first, what comes first, and doubts."""
    from lightning_rlprof.report.summary import (
        device_lines,
        first_lines,
        is_device_trace,
        lead_tables,
        quality_lines,
        run_line,
    )
    from lightning_rlprof.report.summary import summary as sum_up

    # A profiler's trace is useless without its tables; those of other runs can take minutes.
    found = sum_up(spans, captures=is_device_trace(spans))
    devices = ", ".join(filter(None, found.devices))
    console.line(f"{spans.path} on {devices}" if devices else str(spans.path), "bold")
    console.line(run_line(found))
    if not console.is_table():
        console.line("")  # Markdown's tables begin after one; those for people bring their own.
    console.print_tables(lead_tables(spans))
    console.line("")
    for line in device_lines(found):
        console.line(line, "bold")
    if found.median_ns is not None:
        first, *more = first_lines(found)
        console.line(first, "bold")
        for line in more:
            console.line(line)
    for line in quality_lines(found):
        console.line(line)


def _run_or_query(text: str | Path) -> Path | str:
    """Return a run, or the text of a query, which is then of the newest run."""
    return text if str(text).split()[1:] and not Path(text).exists() else run_at(text)


def sql(
    run: Annotated[
        Any, argument("RUN", RUN_HELP, parser=_run_or_query, autocompletion=complete_run)
    ] = SAVE_PATH,
    query: Annotated[
        str | None, argument("[QUERY]", "One SELECT; omit it to list the tables")
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "PATH", "Write all rows to a .csv or .parquet file", "-o", "--output", parser=local_path
        ),
    ] = None,
    force: Force = False,
    memory: Annotated[
        float | None,
        option(
            "GB", "Memory limit (default 2, or half of the machine's if that is less)", min=0.01
        ),
    ] = None,
    timeout: Annotated[float, option("SECONDS", "Time limit", min=0.1)] = 60,
    describe: Annotated[
        bool, typer.Option("--describe", help="List every column: its unit and its meaning")
    ] = False,
) -> None:
    """Query a run's tables with SQL (read-only). The first query caches the run.

    Example: rlprof sql RUN "select name, sum(duration_ns) from spans group by name"
    """
    if output is not None and console.is_json():
        raise RlprofError("--json prints the rows and -o writes them: choose one")
    if isinstance(run, str):
        if query is not None:
            check_exists(Path(run))
        run, query = SAVE_PATH, run
    path = None if output is None else console.destination(output, run, "", force=force)
    from lightning_rlprof.store.sql import Limits

    limits = Limits(memory, timeout)
    with open_tables(run) as store:
        if describe:
            _describe_tables(store, run)
            return
        if query is None:
            _list_tables(store, run)
            return
        try:
            if path is None:
                _print_rows(store, run, query, limits)
            else:
                with console.writing(path):
                    rows = store.write(query, path, limits)
                console.status(console.count(rows, "row"))
                console.wrote(path)
        except TraceError as error:
            # For an unknown column, DuckDB's message has candidates already.
            unknown = re.search(r"Table with name (\w+) does not exist", str(error))
            hint = console.did_you_mean(unknown[1], store.tables) if unknown else ""
            raise RlprofError(str(error), hint=hint, code="sql") from error


@contextmanager
def open_tables(run: Path) -> "Iterator[Store]":
    """Open a run for SQL, copied here first if it is remote."""
    from lightning_rlprof.store.open_run import open_store

    check_exists(run)
    with local(run) as copy:
        with console.bar("Reading") as step:
            store = open_store(copy, progress=step)
        yield store


def _describe_tables(store: "Store", run: Path) -> None:
    table = store.describe()
    if console.is_json():
        console.put_json({"run": str(run), "tables": as_json([table])})
    else:
        console.print_tables([table], rows=len(table.rows))


def _list_tables(store: "Store", run: Path) -> None:
    if console.is_json():
        console.put_json({"run": str(run), "tables": list(store.tables)})
        return
    for name in store.tables:  # A table would cut the names of its columns.
        names = ", ".join(str(row[0]) for row in store.sql(f'describe "{name}"').rows)
        ((total,),) = store.sql(f'select count(*) from "{name}"').rows
        console.say(f"{name} ({total:,} rows): {names}")
    console.next_command("rlprof", "sql", run, f"describe {store.tables[0]}")


def _print_rows(store: "Store", run: Path, query: str, limits: "Limits") -> None:
    table = store.sql(query, console.limit(_LIMIT), limits)
    rows = store.sql("select rank, text from warnings").rows
    warnings = [(rank if isinstance(rank, int) else None, str(text)) for rank, text in rows]
    if console.is_json():
        found = [{"rank": rank, "text": text} for rank, text in warnings]
        facts = {"run": str(run), "query": query, "warnings": found}
        console.put_json(facts | {"tables": [table.to_dict()]})
        return
    console.print_tables([replace(table, name="")], every_column=True)
    console.status("")
    warn_of_ranks(warnings, shlex.join(["rlprof", "sql", str(run), "from warnings"]))


Runs = Annotated[
    list[Path], argument("PATHS", "Runs, traces, and directories of them", parser=local_path)
]
Jobs = Annotated[int | None, option("N", "Parallel jobs (default: cores)", "-j", "--jobs", min=1)]
Engine = Annotated[
    Literal["local", "ray"], option("NAME", "local: processes of this machine; ray: a cluster")
]


def ingest(runs: Runs, jobs: Jobs = None, engine: Engine = "local") -> None:
    """Cache runs and traces as Parquet.

    Skips what is up to date. Failures are reported per path, and the exit code is 1.

    Example: rlprof ingest traces/ -j 8
    """
    from lightning_rlprof.store.ingest import ingest as cache_all

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


def _print_outcomes(table: "Table") -> None:
    """Print what was cached, then failures and warnings, then how many there are of each state."""
    columns = (*table.columns[:_WHY], *table.columns[_WHY + 1 :])
    good = [(*row[:_WHY], *row[_WHY + 1 :]) for row in table.rows if row[2] != "failed"]
    if good:
        console.print_tables([replace(table, columns=columns, rows=good)], rows=_LIMIT)
        console.status("")
    paths_by_reason: dict[str, list[str]] = {}
    for path, _, _, why, *_ in sorted(table.rows, key=lambda row: row[2] != "failed"):
        if why:
            paths_by_reason.setdefault(str(why), []).append(str(path))
    for why, paths in [*paths_by_reason.items()][:_LIMIT]:
        others = f" (and {len(paths) - 1:,} more)" if len(paths) > 1 else ""
        console.warn(why if paths[0] in why else f"{paths[0]}{others}: {why}")
    _print_states(table.column("state"))
    if good:
        console.next_command("rlprof", "show", str(good[0][0]))


def _print_states(states: "Sequence[Cell]") -> None:
    """Print how many there are of each state."""
    counts = [f"{states.count(state):,} {state}" for state in _STATES if state in states]
    console.status(", ".join(counts), "bold")


def ascend_parse(
    paths: Annotated[
        list[Path],
        argument(
            "PATHS", "Runs, directories of captures, or *_ascend_pt directories", parser=local_path
        ),
    ],
    jobs: Annotated[
        int | None, option("N", "Parallel jobs (default: half of the cores)", "-j", "--jobs", min=1)
    ] = None,
    timeout: Annotated[float, option("SECONDS", "Time limit per directory", min=1)] = 3600.0,
    export: Annotated[
        Literal["text", "db", "both"] | None,
        option("FORMAT", "text, db, both (default: as recorded)"),
    ] = None,
    reparse: Annotated[
        bool, typer.Option("--reparse", help="Parse again what is already parsed")
    ] = False,
) -> None:
    """Parse raw Ascend profiler output in parallel. Safe to re-run.

    Example: rlprof ascend parse profiler_data -j 4
    """
    from lightning_rlprof.loaders.ascend import offline_analysis as offline
    from lightning_rlprof.system.process import cores

    directories = offline.ascend_directories(paths)
    exports: list[offline.Export] = (
        ["text", "db"] if export == "both" else [export] if export else []
    )
    options = offline.Options(jobs or max(1, cores() // 2), timeout, exports, reparse)
    with console.bar("Parsing") as step:
        outcomes = offline.parse_captures(directories, options, step)
    if console.is_json():
        console.put_json(
            {"outcomes": [asdict(each) | {"path": str(each.path)} for each in outcomes]}
        )
    else:
        _print_parsed(outcomes)
    if failed := [each for each in outcomes if each.state == "failed"]:
        text = f"cannot parse {len(failed)} of {len(outcomes)} directories"
        raise console.CheckFailedError(f"{text}; {failed[0].path}: {failed[0].message}")
    console.next_command("rlprof", "summary", paths[0])


def _print_parsed(outcomes: list["Outcome"]) -> None:
    from lightning_rlprof.tables.table import Column, Table

    columns = (
        *(Column("directory", "text"), Column("rank", "count"), Column("state", "text")),
        *(Column("wrote", "text"), Column("took", "duration", "ns")),
    )
    names = _names([each.path for each in outcomes])
    rows = [
        (name, each.rank, each.state, _formats(each), int(each.seconds * 1e9) or None)
        for name, each in zip(names, outcomes, strict=True)
    ]
    console.print_tables([Table("captures", columns, rows)])
    console.status("")
    for name, each in zip(names, outcomes, strict=True):
        if each.message:
            console.warn(f"{name}: {each.message}")
    _print_states([each.state for each in outcomes])


def _formats(outcome: "Outcome") -> str | None:
    text = any(name.endswith("trace_view.json") for name in outcome.files)
    db = any(name.endswith(".db") and name != "analysis.db" for name in outcome.files)
    return " and ".join(["text"] * text + ["db"] * db) or None


def _names(paths: list[Path]) -> list[str]:
    """Name directories below their common parent, by capture if it has only one."""
    windows = [path.absolute().parent for path in paths]
    common = os.path.commonpath([window.parent for window in windows])
    return [
        os.path.relpath(window if windows.count(window) == 1 else path.absolute(), common)
        for window, path in zip(windows, paths, strict=True)
    ]
