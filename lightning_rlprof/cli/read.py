"""The commands that read a run: summary, report, compare, trace."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

if TYPE_CHECKING:
    from lightning_rlprof.spans import Spans

__all__ = ["compare", "describe", "report", "summary", "trace"]

_FEW = 8

Run = Annotated[
    Path,
    typer.Argument(
        help="A run directory, a save path with runs (the newest), a rank file, or a trace of "
        "Nsight Systems, torch.profiler or torch_npu.profiler"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the tables as JSON")]
Out = Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists")]


def summary(
    run: Run,
    as_json: Json = False,
    per_rank: Annotated[bool, typer.Option("--per-rank", help="Also every rank by itself")] = False,
) -> None:
    """Show where the time of a step went."""
    spans = _load(run)
    from lightning_rlprof import analysis

    if as_json:
        tables = [each(spans) for each in analysis.ALL]
        tables += [analysis.stages(spans, per_rank=True)] if per_rank else []
        put_json(_facts(spans) | {"tables": [table.to_dict() for table in tables]})
        return
    describe(spans)
    _details(spans, per_rank=per_rank)
    _doubts(spans)
    next_command("rlprof", "report", run)


def report(run: Run, output: Out = None, force: Force = False) -> None:
    """Write one HTML file with the run's tables, timeline and set-up."""
    spans = _load(run)
    path = destination(output, spans.path, "report.html", force=force)
    from lightning_rlprof import analysis
    from lightning_rlprof.report.html import write_report

    with bar("Analysing") as step:
        tables = {}
        for done, each in enumerate(analysis.ALL, start=1):
            table = each(spans)
            tables[table.name] = table
            step(done, len(analysis.ALL))
    with writing(path):
        write_report(spans, tables, analysis.headline(spans), path)
    _doubts(spans)
    wrote(path)
    next_command("rlprof", "trace", run)


def compare(
    a: Annotated[Path, typer.Argument(help="The run to compare with")],
    b: Annotated[Path, typer.Argument(help="The run that changed")],
    as_json: Json = False,
) -> None:
    """Show what changed from run A to run B, told from the noise between steps."""
    before, after = _load(a), _load(b)
    from lightning_rlprof import analysis
    from lightning_rlprof.report.text import render

    table = analysis.compare(before, after)
    if as_json:
        put_json({"a": _facts(before), "b": _facts(after), "tables": [table.to_dict()]})
        return
    say(f"A: {before.path}")
    say(f"B: {after.path}")
    show(render(table), "")
    for spans in (before, after):
        _doubts(spans)
    next_command("rlprof", "report", b)


def trace(run: Run, output: Out = None, force: Force = False) -> None:
    """Write a trace for ui.perfetto.dev, one track per rank and thread (-o x.json: not packed)."""
    spans = _load(run)
    path = destination(output, spans.path, "trace.json.gz", force=force)
    from lightning_rlprof.report.perfetto import write_trace

    with bar("Writing") as step, writing(path):
        write_trace(spans, path, progress=step)
    _doubts(spans)
    wrote(path)
    say("Open it in https://ui.perfetto.dev (it stays in your browser)")
    next_command("rlprof", "summary", run)


def describe(spans: "Spans") -> None:
    """Show the run in a line, its stages, and the headline."""
    from lightning_rlprof import analysis
    from lightning_rlprof.report.text import render

    steps = len(set(spans.step[spans.rows(kind="step")].tolist()))
    devices = sorted({header.device for header in spans.headers.values()})
    ranks, device = _count(len(spans.ranks), "rank"), ", ".join(devices)
    say(f"{spans.path}: {ranks} on {device}, {_count(steps, 'step')}", "bold")
    show("", render(analysis.stages(spans)), "")
    say(analysis.headline(spans), "bold")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _details(spans: "Spans", *, per_rank: bool) -> None:
    from lightning_rlprof import analysis
    from lightning_rlprof.report.text import render

    tables = [analysis.stages(spans, per_rank=True)] if per_rank else []
    if "device_ns" in spans.counters:
        tables.append(analysis.device(spans))
    tables += [each(spans) for each in (analysis.background, analysis.regions, analysis.gaps)]
    tables += [analysis.ranks(spans)] if len(spans.ranks) > 1 else []
    for table in tables:
        if table.rows or table.abstained:
            show("", render(table, rows=None if "rank" in table.name else _FEW))
    show("")


def _load(path: Path) -> "Spans":
    from lightning_rlprof.loaders.load import load

    with bar("Reading") as step:
        return load(path, progress=step)


def _facts(spans: "Spans") -> dict[str, Any]:
    from lightning_rlprof import analysis

    return {
        "run": str(spans.path),
        "headline": analysis.headline(spans),
        "ranks": list(spans.ranks),
        "problems": [problem._asdict() for problem in spans.problems],
        "notes": [note._asdict() for note in spans.notes],
    }


def _doubts(spans: "Spans") -> None:
    """Say what is missing or doubtful, and what the run itself noted."""
    for problem in spans.problems[:_FEW]:
        who = "" if problem.rank is None else f"rank {problem.rank}: "
        say(f"! {who}{problem.text}", "yellow")
    if len(spans.problems) > _FEW:
        say(f"! and {len(spans.problems) - _FEW} more: --json shows them all", "yellow")
    notes = sorted(spans.notes, key=lambda note: note.level == "info")  # what went wrong first
    for text in list(dict.fromkeys(note.text for note in notes))[:_FEW]:
        say(f"note: {text}", "dim")
