"""The commands that read a run: summary, report, trace."""

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
from lightning_rlprof.cli.open_run import FEW, Force, Json, Output, Run, doubts, facts, opened
from lightning_rlprof.errors import RlprofError

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans


_NEVER_COMPARED = (
    "{}: {}, so ranks on one timeline may seem to wait for one another that did not; --force "
    "writes it, marked, and one rank's own file needs no --force"
)
Merge = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Replace the file if it exists; merge ranks of hosts whose clocks were never compared",
    ),
]

Devices = Annotated[
    bool, typer.Option("--kernels", help="Also what devices ran, out of captures, by stream")
]


def summary(
    run: Run,
    as_json: Json = False,
    per_rank: Annotated[bool, typer.Option("--per-rank", help="Also every rank by itself")] = False,
) -> None:
    """Show where the time of a step went."""
    spans = opened(run)
    from lightning_rlprof.analysis.catalog import CATALOG
    from lightning_rlprof.analysis.stages.stage_times import stages

    if as_json:
        tables = [each(spans) for each in [each.run for each in CATALOG if each.summary]]
        tables += [stages(spans, per_rank=True)] if per_rank else []
        put_json(facts(spans) | {"tables": [table.to_dict() for table in tables]})
        return
    describe(spans)
    _details(spans, per_rank=per_rank)
    doubts(spans)
    next_command("rlprof", "report", run)


def report(run: Run, output: Output = None, force: Force = False) -> None:
    """Write one HTML file with the run's tables, timeline and set-up."""
    spans = opened(run)
    path = destination(output, spans.path, "report.html", force=force)
    from lightning_rlprof.analysis.catalog import CATALOG
    from lightning_rlprof.analysis.stages.stage_times import headline
    from lightning_rlprof.report.html.page import write_report

    with bar("Analysing") as step:
        tables = {}
        for done, each in enumerate([each.run for each in CATALOG if each.report], start=1):
            table = each(spans)
            tables[table.name] = table
            step(done, len([each.run for each in CATALOG if each.report]))
    with writing(path):
        write_report(spans, tables, headline(spans), path)
    doubts(spans)
    wrote(path)
    next_command("rlprof", "trace", run)


def trace(run: Run, output: Output = None, kernels: Devices = False, force: Merge = False) -> None:
    """Write a trace for ui.perfetto.dev, one track per rank and thread (-o x.json: not packed)."""
    spans = opened(run)
    path = destination(output, spans.path, "trace.json.gz", force=force)
    from lightning_rlprof.analysis.clock_uncertainty import unsynchronized_clocks
    from lightning_rlprof.report.chrome_trace.device_tracks import DeviceTracks
    from lightning_rlprof.report.chrome_trace.writer import write_trace

    watermark = unsynchronized_clocks(spans)
    if watermark and not force:
        raise RlprofError(_NEVER_COMPARED.format(spans.path, watermark))
    with bar("Writing") as step, writing(path):
        devices = DeviceTracks(spans) if kernels else None
        write_trace(spans, path, devices=devices, watermark=watermark, progress=step)
    doubts(spans)
    for remark in devices.remarks if devices else ():
        say(f"! {remark}", "yellow")
    if watermark:
        say(f"! UNCALIBRATED: {watermark}; do not compare times of ranks in it", "yellow")
    wrote(path)
    say("Open it in https://ui.perfetto.dev (it stays in your browser)")
    next_command("rlprof", "summary", run)


def describe(spans: "Spans") -> None:
    """Show the run in a line, its stages, and the headline."""
    from lightning_rlprof.analysis.stages.stage_times import headline, stages
    from lightning_rlprof.report.terminal import render

    steps = len(set(spans.step[spans.rows(kind="step")].tolist()))
    devices = sorted({header.hardware for header in spans.headers.values()})
    ranks, device = _count(len(spans.ranks), "rank"), ", ".join(devices)
    say(f"{spans.path}: {ranks} on {device}, {_count(steps, 'step')}", "bold")
    show("", render(stages(spans)), "")
    say(headline(spans), "bold")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _details(spans: "Spans", *, per_rank: bool) -> None:
    from lightning_rlprof.analysis.stages.overviews import (
        background_stages,
        host_vs_device,
        regions,
        slowest_ranks,
    )
    from lightning_rlprof.analysis.stages.stage_times import stages
    from lightning_rlprof.analysis.stages.untraced_gaps import gaps
    from lightning_rlprof.report.terminal import render

    tables = [stages(spans, per_rank=True)] if per_rank else []
    if "device_ns" in spans.counters:
        tables.append(host_vs_device(spans))
    tables += [each(spans) for each in (background_stages, regions, gaps)]
    tables += [slowest_ranks(spans)] if len(spans.ranks) > 1 else []
    for table in tables:
        if table.rows or table.abstained:
            show("", render(table, rows=None if "rank" in table.name else FEW))
    show("")
