"""The command that analyses raw data of torch_npu.profiler, for which training has no time."""

import os
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli.console import bar, next_command, put_json, say, show
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.loaders.ascend.offline_analysis import Outcome
    from lightning_rlprof.tables.table import Table


_WIDEST = 40
_STATES = ("cached", "up to date", "failed")


class _Format(str, Enum):
    """What --export takes."""

    TEXT = "text"
    DB = "db"


Paths = Annotated[
    list[Path],
    typer.Argument(
        parser=local_path,
        metavar="PATHS",
        help="Runs, folders of captures, or *_ascend_pt directories themselves",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("-j", "--jobs", min=1, help="How many at a time; unset, half of the cores"),
]
Timeout = Annotated[float, typer.Option(min=1, help="Longest time of one directory, in seconds")]
Formats = Annotated[
    list[_Format] | None,
    typer.Option(help="Format to write; may be repeated; unset, as it was recorded"),
]


def analyse(
    paths: Paths,
    jobs: Jobs = None,
    timeout: Timeout = 3600.0,
    export: Formats = None,
    force: Annotated[bool, typer.Option("--force", help="Analyse again what is analysed")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcomes as JSON")] = False,
) -> None:
    """Analyse raw data of Ascend NPUs, many ranks at a time; goes on where it was stopped.

    Example: rlprof analyse profiler_data -j 4
    """
    from lightning_rlprof.loaders.ascend import offline_analysis as room

    directories = room.ascend_directories(paths)
    exports: list[room.Export] = [each.value for each in export or []]
    options = room.Options(jobs or max(1, _cores() // 2), timeout, exports, force)
    with bar("Analysing") as step:
        outcomes = room.parse_captures(directories, options, step)
    if as_json:
        put_json({"outcomes": [asdict(each) | {"path": str(each.path)} for each in outcomes]})
    else:
        _tell(outcomes)
    if failed := [each for each in outcomes if each.state == "failed"]:
        text = f"{len(failed)} of {len(outcomes)} directories could not be analysed"
        raise RlprofError(f"{text}; {failed[0].path}: {failed[0].message}")
    if not as_json:
        next_command("rlprof", "summary", paths[0])


def _cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _tell(outcomes: list["Outcome"]) -> None:
    from lightning_rlprof.report.terminal import render

    names = _names([each.path for each in outcomes])
    show(render(_table(outcomes, names)), "")
    for name, each in zip(names, outcomes, strict=True):
        if each.message:
            say(f"! {name}: {each.message}", "yellow")
    counts = {state: sum(each.state == state for each in outcomes) for state in _STATES}
    said = [f"{count} {state}" for state, count in counts.items() if count]
    say(", ".join(said), "bold")


def _table(outcomes: list["Outcome"], names: list[str]) -> "Table":
    from lightning_rlprof.tables.table import Column, Table

    columns = (
        Column("directory", "text"),
        Column("rank", "count"),
        Column("state", "text"),
        Column("wrote", "text"),
        Column("took", "duration", "ns"),
    )
    rows = [
        (_end(name), each.rank, each.state, _formats(each), int(each.seconds * 1e9) or None)
        for name, each in zip(names, outcomes, strict=True)
    ]
    return Table("captures", columns, rows)


def _formats(outcome: "Outcome") -> str | None:
    suffixes = {"text": "trace_view.json", "db": ".db"}
    kinds = [
        kind
        for kind, suffix in suffixes.items()
        if any(name.endswith(suffix) and name != "analysis.db" for name in outcome.files)
    ]
    return " and ".join(kinds) or None


def _names(paths: list[Path]) -> list[str]:
    """Name directories below what they have in common, by their window where it has one alone."""
    windows = [path.absolute().parent for path in paths]
    alone = {window for window in windows if windows.count(window) == 1}
    common = os.path.commonpath([window.parent for window in windows])
    return [
        os.path.relpath(window if window in alone else path.absolute(), common)
        for window, path in zip(windows, paths, strict=True)
    ]


def _end(name: str) -> str:
    return name if len(name) <= _WIDEST else f"...{name[3 - _WIDEST :]}"
