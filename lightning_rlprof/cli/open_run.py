"""Arguments, options, completions and steps that verbs share: open a run, print its tables."""

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import argument, option
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import STAGES
from lightning_rlprof.records.run_directory import rank_files
from lightning_rlprof.system.location import RemotePath, local_path, place

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans
    from lightning_rlprof.tables.table import Table

FEW = 8
"""Warnings, notes and rows of short tables that are printed."""

RUN_HELP = (
    "Run directory, start of a run's name in profiler_data, a directory of runs (newest is used), "
    "a trace file, or a URL. See rlprof help inputs."
)
SAVE_PATH = Path("profiler_data")
"""Where trainings write unless they are told otherwise: the newest run there is the default RUN."""


def runs_here() -> list[str]:
    """Return the names of the runs in ``profiler_data``, newest first."""
    return sorted({file.parent.name for file in SAVE_PATH.glob("*/rank-*.jsonl")}, reverse=True)


def _completed_by(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return what completes a word to the names that begin like that."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _problems() -> list[str]:
    from lightning_rlprof.analysis.diagnosis.diagnosis import PROBLEMS, REMEDIES

    return [*PROBLEMS, *REMEDIES]


_ANALYSES = [each.name for each in CATALOG]
complete_run = _completed_by(runs_here)
complete_analysis = _completed_by(lambda: _ANALYSES)
complete_run_or_analysis = _completed_by(lambda: [*runs_here(), *_ANALYSES])
complete_problem = _completed_by(_problems)
complete_stage = _completed_by(lambda: STAGES)


def run_at(text: str | Path) -> Path:
    """Return what a user calls a run: a path, a URL, or the start of the name of one run here.

    Raises:
        RlprofError: Several runs of ``profiler_data`` begin like that.
    """
    path = place(text)
    if isinstance(path, RemotePath) or path.exists() or len(path.parts) != 1:
        return path
    runs = sorted(run for run in SAVE_PATH.glob(f"{escape(path.name)}*") if rank_files(run))
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs[:FEW])
        hint = f"{names}{' and more' if len(runs) > FEW else ''}"
        raise RlprofError(
            f"{len(runs)} runs in {SAVE_PATH} begin with '{path.name}'", hint=hint, code="usage"
        )
    return runs[0] if runs else path


Run = Annotated[Path, argument("RUN", RUN_HELP, parser=run_at, autocompletion=complete_run)]
Output = Annotated[
    Path | None, option("PATH", "Write to this file", "-o", "--output", parser=local_path)
]
Force = Annotated[bool, typer.Option("-f", "--force", help="Overwrite the file if it exists")]


def open_run(path: Path) -> "Spans":
    """Read a run, with a progress bar on a terminal."""
    from lightning_rlprof.run import load
    from lightning_rlprof.system.process import keep_freed

    check_exists(path)
    keep_freed()
    with console.bar("Reading") as step:
        return load(path, progress=step, cache=console.root() is None)


Others = Annotated[
    list[Path] | None,
    argument(
        "[RUN]...",
        "With --as-one: runs that were recorded apart, such as a rollout server's",
        parser=run_at,
        autocompletion=complete_run,
    ),
]
AsOne = Annotated[bool, typer.Option("--as-one", help="Read several runs as one")]


def open_runs(run: Path, others: Sequence[Path] | None, as_one: bool) -> "Spans":
    """Read a run, or several as one."""
    if others and not as_one:
        raise RlprofError(
            f"{1 + len(others)} runs were given",
            hint="--as-one reads them as one. To compare them: rlprof compare",
            code="usage",
        )
    if not others:
        return open_run(run)
    from lightning_rlprof.run import load

    for each in (run, *others):
        check_exists(each)
    return load([run, *others])


def inside(root: Path, path: str | Path) -> Path:
    """Return a path below the root; neither it nor what is below it may be a link.

    Args:
        root: An absolute path without links.
        path: From the root, or absolute.

    Raises:
        RlprofError: It is outside, or there is a link.
    """
    found = Path(os.path.normpath(root / path))
    if not found.is_relative_to(root):
        raise RlprofError(f"'{path}' is outside of '{root}'", hint="Only paths below it are read.")
    steps = [found, *found.parents][: len(found.parts) - len(root.parts)]
    below = (Path(at, name) for at, *names in os.walk(found) for name in (*names[0], *names[1]))
    for each in (*steps, *below):
        if each.is_symlink():
            raise RlprofError(f"'{each}' is a link", hint="Links are not followed: move it away.")
    return found


def is_inside(root: Path, path: Path) -> bool:
    """Return whether `inside` accepts a path."""
    with suppress(RlprofError):
        return bool(inside(root, path))
    return False


def is_absent(path: Path) -> bool:
    """Return whether a path of this machine does not exist."""
    return not isinstance(path, RemotePath) and not path.exists()


def check_exists(path: Path) -> None:
    """Raise an error that lists the newest runs of the directory, if a path does not exist."""
    if not is_absent(path):
        return
    runs = {file.parent for file in path.parent.glob("*/rank-*.jsonl")}
    newest = sorted(runs, key=lambda run: -run.stat().st_mtime)[:3]
    newest = newest or [SAVE_PATH / name for name in runs_here()[:3] if len(path.parts) == 1]
    hint = (
        f"Newest runs there: {', '.join(map(str, newest))}" if newest else "See rlprof help inputs."
    )
    if path == SAVE_PATH:
        hint = "Pass RUN. To record one: rlprof demo"
    raise RlprofError(f"no such run or trace: '{path}'", hint=hint, code="not_found")


def run_directory(run: Path) -> Path:
    """Return a run directory of this machine: the newest one of a directory of runs.

    Raises:
        RlprofError: It is a URL, or contains no run of rlprof.
    """
    from lightning_rlprof.loaders import load

    check_exists(run)
    if isinstance(run, RemotePath):
        raise RlprofError(
            f"'{run}' is not a directory of this machine",
            hint="Run it where the training writes its run, or where that directory is mounted",
            code="usage",
        )
    return load.run_directory(run)


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
    rows: int | None = None,
    then: Sequence[str | Path] = (),
) -> None:
    """Print the tables of a command below a title, and how many warnings the run has.

    JSON contains ``facts`` before the tables. People see ``rows`` of each table, unless they want
    others. ``then`` is the next command, without ``rlprof``.
    """
    if console.is_json():
        console.put_json(about(spans) | (facts or {}) | {"tables": as_json(tables)})
        return
    console.status(f"{spans.path}: {title}" if title else str(spans.path), "bold")
    console.print_tables(tables, rows=rows)
    console.status("")
    count_warnings(spans)
    if then:
        console.next_command("rlprof", *then)


def as_json(tables: "Sequence[Table]") -> list[dict[str, Any]]:
    """Return tables for JSON, with the rows that the user asked for."""
    return [replace(table, rows=table.rows[: console.limit()]).to_dict() for table in tables]


def print_warnings(spans: "Spans") -> None:
    """Print the warnings of a run, and what its ranks noted."""
    everything = f"rlprof summary {shlex.quote(str(spans.path))} --json"
    warn_of_ranks([(warning.rank, warning.text) for warning in spans.warnings], everything)
    notes = sorted(spans.notes, key=lambda each: each.level == "info")  # Warnings come first.
    texts = list(dict.fromkeys(each.text for each in notes))
    for text in texts[:FEW]:
        console.note(text)
    if (more := len(texts) - FEW) > 0:
        console.note(f"{console.count(more, 'more note')}. See: {everything}")


def warn_of_ranks(warnings: "Sequence[tuple[int | None, str]]", everything: str) -> None:
    """Print each warning once, with the ranks that have it, and the command that shows them all."""
    from lightning_rlprof.loaders.rank_names import by_cause

    causes = by_cause(warnings)
    for each in causes[:FEW]:
        console.warn(str(each))
    if (more := len(causes) - FEW) > 0:
        console.warn(f"{console.count(more, 'more warning')}. See: {everything}")


def count_warnings(spans: "Spans") -> None:
    """Print what is truncated, and how many other warnings a run has."""
    summary = f"rlprof summary {shlex.quote(str(spans.path))}"
    truncated = [each for each in spans.warnings if each.code == Code.FILE_CUT]
    warn_of_ranks([(each.rank, each.text) for each in truncated], summary)
    if count := len({each.text for each in spans.warnings} - {each.text for each in truncated}):
        issues = console.count(
            count, "more data-quality issue" if truncated else "data-quality issue"
        )
        console.warn(f"{issues}. See: {summary}")
