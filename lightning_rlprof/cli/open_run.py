"""What every command that reads a run does: open it, tell about it in JSON, say its doubts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli.console import bar, next_command, put_json, say, show
from lightning_rlprof.system.location import local_path, place

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table


FEW = 8
"""Of doubts, notes and short tables, so many are shown."""

Run = Annotated[
    Path,
    typer.Argument(
        parser=place,
        metavar="RUN",
        help="A run directory, a save path with runs (the newest), a rank file, or a trace of "
        "Nsight Systems, torch.profiler or torch_npu.profiler; or the URL of one",
    ),
]
"""What a command reads."""

Json = Annotated[bool, typer.Option("--json", help="Print the tables as JSON")]
"""Whether a program reads the answer."""

Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", parser=local_path, metavar="PATH", help="Write to this file"),
]
"""Where the file goes; None derives its name."""

Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists")]
"""Whether a file may be replaced."""


def opened(path: Path) -> "Spans":
    """Read a run, with a bar on the terminal meanwhile."""
    from lightning_rlprof.run import load
    from lightning_rlprof.system.memory_trim import keep_freed

    keep_freed()
    with bar("Reading") as step:
        return load(path, progress=step, cache=True)


def facts(spans: "Spans") -> dict[str, Any]:
    """Return what JSON says of a run before its tables."""
    from lightning_rlprof.analysis.stages.stage_times import headline

    return {
        "run": str(spans.path),
        "headline": headline(spans),
        "ranks": list(spans.ranks),
        "warnings": [problem._asdict() for problem in spans.warnings],
        "notes": [note._asdict() for note in spans.notes],
    }


def tell(
    spans: "Spans", table: "Table", title: str, *, as_json: bool, follow: tuple[str, Path]
) -> None:
    """Print the one table of a command, or its JSON; `follow` is the command to type next."""
    if as_json:
        problems = [problem._asdict() for problem in spans.warnings]
        run = {"run": str(spans.path), "ranks": list(spans.ranks), "warnings": problems}
        put_json(run | {"tables": [table.to_dict()]})
        return
    from lightning_rlprof.report.terminal import render

    say(f"{spans.path}: {title}", "bold")
    show("", render(table), "")
    count_doubts(spans)
    next_command("rlprof", *follow)


def doubts(spans: "Spans") -> None:
    """Say what is missing or doubtful, and what the run itself noted."""
    for problem in spans.warnings[:FEW]:
        who = "" if problem.rank is None else f"rank {problem.rank}: "
        say(f"! {who}{problem.text}", "yellow")
    if len(spans.warnings) > FEW:
        say(
            f"! and {len(spans.warnings) - FEW} more: rlprof summary --json shows them all",
            "yellow",
        )
    notes = sorted(spans.notes, key=lambda note: note.level == "info")  # what went wrong first
    texts = list(dict.fromkeys(note.text for note in notes))
    for text in texts[:FEW]:
        say(f"note: {text}", "dim")
    if (more := len(texts) - FEW) > 0:
        say(f"note: and {more} more: rlprof summary --json shows them all", "dim")


def count_doubts(spans: "Spans") -> None:
    """Say that there are doubts, where a command's own answer is the matter."""
    if spans.warnings:
        count = "1 doubt" if len(spans.warnings) == 1 else f"{len(spans.warnings)} doubts"
        say(f"! {count} about this run: rlprof summary tells them", "yellow")
