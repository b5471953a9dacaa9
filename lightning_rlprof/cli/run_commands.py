"""The verbs that show or export a whole run: summary, report, export."""

import webbrowser
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.open_run import FEW, Force, Output, Run, about, open_run, print_warnings
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table


class _Part(str, Enum):
    """What ``summary --by`` takes."""

    RANK = "rank"


def summary(
    run: Run,
    by: Annotated[
        list[_Part] | None, typer.Option(metavar="PART", help="Add one row per rank: rank")
    ] = None,
) -> None:
    """Show where the time of a step went."""
    from lightning_rlprof.analysis.catalog import CATALOG
    from lightning_rlprof.analysis.stages.stage_times import headline, stages

    spans = open_run(run)
    ranks = [stages(spans, per_rank=True)] if by else []
    if console.is_json():
        tables = [each.run(spans) for each in CATALOG if each.summary] + ranks
        facts = about(spans) | {"headline": headline(spans)}
        console.put_json(facts | {"tables": [table.to_dict() for table in tables]})
        return
    if console.is_table():
        describe(spans)
    else:
        console.print_tables([stages(spans)])
    for table in ranks + _details(spans):
        console.print_tables([table], limit=None if "rank" in table.name else FEW)
    console.status("")
    print_warnings(spans)
    console.next_command("rlprof", "findings", run)


def report(
    run: Run,
    output: Output = None,
    force: Force = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser")] = False,
) -> None:
    """Write one HTML file with the run's tables, timeline and configuration."""
    spans = open_run(run)
    path = console.destination(output, spans.path, "report.html", force=force)
    from lightning_rlprof.analysis.catalog import CATALOG
    from lightning_rlprof.analysis.stages.stage_times import headline
    from lightning_rlprof.report.html.page import write_report

    analyses = [each.run for each in CATALOG if each.report]
    tables = {}
    with console.bar("Analyzing") as step:
        for done, analysis in enumerate(analyses, start=1):
            table = analysis(spans)
            tables[table.name] = table
            step(done, len(analyses))
    with console.writing(path):
        write_report(spans, tables, headline(spans), path)
    print_warnings(spans)
    console.wrote(path)
    if open_it:
        webbrowser.open(path.resolve().as_uri())
    console.next_command("rlprof", "findings", run)


def export(
    run: Run,
    target: Annotated[
        Literal["perfetto", "parquet", "csv"],
        typer.Option("--format", metavar="FORMAT", help="perfetto, parquet or csv"),
    ] = "perfetto",
    output: Output = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Include device kernels from captures, by stream")
    ] = False,
    force: Force = False,
    allow_unsynced: Annotated[
        bool,
        typer.Option("--allow-unsynced", help="Merge ranks of hosts with unsynchronized clocks"),
    ] = False,
) -> None:
    """Export the run as a Perfetto trace (.json or .json.gz), or its tables as files.

    Example: rlprof export RUN --kernels
    """
    if target != "perfetto":
        if kernels or allow_unsynced:
            raise RlprofError("--kernels and --allow-unsynced apply to --format perfetto only")
        _export_tables(run, target, output, force=force)
        return
    spans = open_run(run)
    path = console.destination(output, spans.path, "trace.json.gz", force=force)
    from lightning_rlprof.analysis.clock_uncertainty import unsynchronized_clocks
    from lightning_rlprof.report.chrome_trace.device_tracks import DeviceTracks
    from lightning_rlprof.report.chrome_trace.writer import write_trace

    unsynced = unsynchronized_clocks(spans)
    if unsynced and not allow_unsynced:
        raise RlprofError(
            f"{spans.path}: {unsynced}, so the order of events across ranks would be wrong",
            hint="Export one rank's file, or pass --allow-unsynced.",
            code="unsynchronized_clocks",
        )
    with console.bar("Writing") as step, console.writing(path):
        devices = DeviceTracks(spans) if kernels else None
        write_trace(spans, path, devices=devices, watermark=unsynced, progress=step)
    print_warnings(spans)
    for remark in devices.remarks if devices else ():
        console.warn(remark)
    if unsynced:
        console.warn(f"{unsynced}: don't compare times of different ranks in this trace.")
    console.wrote(path)
    console.status("Open it in https://ui.perfetto.dev (it stays in your browser).")


def _export_tables(run: Path, suffix: str, output: Path | None, *, force: bool) -> None:
    """Write every table of a run into one directory, a file each."""
    from lightning_rlprof.cli.store_commands import open_tables

    source = run if run.name else run.absolute()
    folder = output or Path(f"{source.stem if run.is_file() else source.name}-tables")
    if folder.exists() and not folder.is_dir():
        raise RlprofError(f"{folder} is not a directory", hint="Choose another one with -o.")
    with open_tables(run) as store:
        files = {name: folder / f"{name}.{suffix}" for name in store.tables}
        taken = [path for path in files.values() if path.exists()]
        if taken and not force:
            hint = "Replace it with --force, or choose another directory with -o."
            raise RlprofError(f"{taken[0]} exists already", hint=hint)
        with console.bar("Writing") as step, console.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for done, (name, path) in enumerate(files.items(), start=1):
                store.write(f'from "{name}"', path)
                step(done, len(files))
    console.wrote(folder)


def describe(spans: "Spans") -> None:
    """Print the run in a line, its stages, and the headline."""
    from lightning_rlprof.analysis.stages.stage_times import headline, stages

    steps = len(set(spans.step[spans.rows(kind="step")].tolist()))
    devices = ", ".join(sorted({header.hardware for header in spans.headers.values()}))
    ranks = console.count(len(spans.ranks), "rank")
    console.say(f"{spans.path}: {ranks} on {devices}, {console.count(steps, 'step')}", "bold")
    console.print_tables([stages(spans)])
    console.say("")
    console.say(headline(spans), "bold")


def _details(spans: "Spans") -> "list[Table]":
    """Return the tables of a summary below its stages; those without rows are left out."""
    from lightning_rlprof.analysis.stages.overviews import (
        background_stages,
        host_vs_device,
        regions,
        slowest_ranks,
    )
    from lightning_rlprof.analysis.stages.untraced_gaps import gaps

    analyses = [host_vs_device] if "device_ns" in spans.counters else []
    analyses += [background_stages, regions, gaps]
    analyses += [slowest_ranks] if len(spans.ranks) > 1 else []
    tables = [analysis(spans) for analysis in analyses]
    return [table for table in tables if len(table.rows) or table.abstained is not None]
