"""Arguments, options and steps that commands share: open a run, print its tables and warnings."""

import inspect
import shlex
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.cli.console import (
    Format,
    bar,
    count,
    is_json,
    next_command,
    note,
    print_tables,
    put_json,
    status,
    use_output,
    warn,
)
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import RemotePath, local_path, place

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table


FEW = 8
"""Warnings, notes and rows of short tables that are printed."""

Run = Annotated[
    Path,
    typer.Argument(
        parser=place,
        metavar="RUN",
        help="Run directory, a directory of runs (newest is used), a trace file, or a URL. "
        "See rlprof help inputs.",
    ),
]
"""What a command reads."""

Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", parser=local_path, metavar="PATH", help="Write to this file"),
]
"""Where the file goes; None derives its name."""

Force = Annotated[bool, typer.Option("-f", "--force", help="Overwrite the file if it exists")]
"""Whether a file may be replaced."""

Limit = Annotated[
    int | None,
    typer.Option(
        "-n", "--limit", min=1, metavar="N", help="Maximum rows to print (default 50; JSON all)"
    ),
]
"""How many rows are printed."""

_PANEL = "Output"
_FORMATS = {
    "output_format": Annotated[
        Format,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="table, json, csv or markdown",
            rich_help_panel=_PANEL,
        ),
    ],
    "as_json": Annotated[bool, typer.Option("--json", help="Print JSON", rich_help_panel=_PANEL)],
}
_OUTPUT = {
    "as_json": _FORMATS["as_json"],
    "quiet": Annotated[
        bool,
        typer.Option(
            "-q", "--quiet", help="No warnings, progress or hints", rich_help_panel=_PANEL
        ),
    ],
    "no_hints": Annotated[
        bool,
        typer.Option("--no-hints", help="Don't suggest the next command", rich_help_panel=_PANEL),
    ],
}
_DEFAULTS = {"output_format": Format.TABLE, "as_json": False, "quiet": False, "no_hints": False}


def with_output_options(
    command: Callable[..., None], *, formats: bool = False, json: bool = True
) -> Callable[..., None]:
    """Add ``--quiet``, ``--no-hints`` and ``--json``, and with `formats` ``--format``.

    The command does not receive them: `console` does, before the command runs.
    """
    options = (_FORMATS if formats else {}) | _OUTPUT
    if not json:
        del options["as_json"]

    @wraps(command)
    def run(**given: Any) -> None:
        chosen = _DEFAULTS | {name: given.pop(name) for name in options}
        form = Format.JSON if chosen["as_json"] else Format(chosen["output_format"])
        use_output(form, quiet=bool(chosen["quiet"]), hints=not chosen["no_hints"])
        command(**given)

    own = inspect.signature(command)
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=hint
        )
        for name, hint in options.items()
    ]
    run.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*own.parameters.values(), *added]
    )
    run.__annotations__ = {**command.__annotations__, **options}
    return run


def open_run(path: Path) -> "Spans":
    """Read a run, with a progress bar on a terminal."""
    from lightning_rlprof.run import load
    from lightning_rlprof.system.memory_trim import keep_freed

    check_exists(path)
    keep_freed()
    with bar("Reading") as step:
        return load(path, progress=step, cache=True)


def check_exists(path: Path) -> None:
    """Raise an error that lists the newest runs of the directory, if a path does not exist."""
    if isinstance(path, RemotePath) or path.exists() or path.is_symlink():
        return
    try:
        files = list(path.parent.glob("*/rank-*.jsonl"))
        runs = sorted({file.parent for file in files}, key=lambda run: -run.stat().st_mtime)
    except OSError:
        runs = []
    names = ", ".join(str(run) for run in runs[:3])
    hint = f"Newest runs there: {names}" if names else "See rlprof help inputs."
    raise RlprofError(f"no such run or trace: '{path}'", hint=hint, code="not_found")


def about(spans: "Spans") -> dict[str, Any]:
    """Return what JSON contains about a run before its tables."""
    return {
        "run": str(spans.path),
        "ranks": list(spans.ranks),
        "warnings": [warning._asdict() for warning in spans.warnings],
        "notes": [each._asdict() for each in spans.notes],
    }


def answer(
    spans: "Spans",
    tables: "Sequence[Table]",
    title: str,
    *,
    facts: dict[str, Any] | None = None,
    limit: int | None = None,
    then: Sequence[str | Path] = (),
) -> None:
    """Print the tables of a command and how many warnings the run has.

    Args:
        spans: The run.
        tables: What to print, in this order.
        title: The first line, after the path.
        facts: Added to the JSON document, before the tables.
        limit: Rows of each table; None for all.
        then: The command that takes the next step, without ``rlprof``.
    """
    if is_json():
        cut = [table.to_dict() for table in limited(tables, limit)]
        put_json(about(spans) | (facts or {}) | {"tables": cut})
        return
    status(f"{spans.path}: {title}" if title else str(spans.path), "bold")
    print_tables(tables, limit=limit)
    status("")
    count_warnings(spans)
    if then:
        next_command("rlprof", *then)


def limited(tables: "Sequence[Table]", limit: int | None) -> "list[Table]":
    """Return tables with at most `limit` rows each."""
    from dataclasses import replace

    return [
        table if limit is None else replace(table, rows=list(table.rows[:limit]))
        for table in tables
    ]


def print_warnings(spans: "Spans") -> None:
    """Print the warnings of a run, and what its ranks noted."""
    for warning in spans.warnings[:FEW]:
        rank = "" if warning.rank is None else f"rank {warning.rank}: "
        warn(f"{rank}{warning.text}")
    everything = f"rlprof summary {shlex.quote(str(spans.path))} --json"
    if (more := len(spans.warnings) - FEW) > 0:
        warn(f"{count(more, 'more warning')}. See: {everything}")
    notes = sorted(spans.notes, key=lambda each: each.level == "info")  # what went wrong first
    texts = list(dict.fromkeys(each.text for each in notes))
    for text in texts[:FEW]:
        note(text)
    if (more := len(texts) - FEW) > 0:
        note(f"{count(more, 'more note')}. See: {everything}")


def count_warnings(spans: "Spans") -> None:
    """Print how many warnings a run has, and the command that lists them."""
    if spans.warnings:
        issues = count(len(spans.warnings), "data-quality issue")
        warn(f"{issues}. See: rlprof summary {shlex.quote(str(spans.path))}")
