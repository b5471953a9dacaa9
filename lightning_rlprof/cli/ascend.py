"""The verb ``ascend parse``: parse raw torch_npu profiler output after the training."""

import os
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli import console
from lightning_rlprof.cli.console import argument, option
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.loaders.ascend.offline_analysis import Outcome

_STATES = ("cached", "up to date", "failed")


class _Format(str, Enum):
    """What ``--export`` takes."""

    TEXT = "text"
    DB = "db"


Paths = Annotated[
    list[Path],
    argument(
        "PATHS", "Runs, directories of captures, or *_ascend_pt directories", parser=local_path
    ),
]
Jobs = Annotated[
    int | None, option("N", "Parallel jobs (default: half of the cores)", "-j", "--jobs", min=1)
]
Timeout = Annotated[float, option("SECONDS", "Time limit per directory", min=1)]
Formats = Annotated[
    list[_Format] | None, option("FORMAT", "text, db (repeatable; default: as recorded)")
]


def parse(
    paths: Paths,
    jobs: Jobs = None,
    timeout: Timeout = 3600.0,
    export: Formats = None,
    reparse: Annotated[
        bool, typer.Option("--reparse", help="Parse again what is already parsed")
    ] = False,
) -> None:
    """Parse raw Ascend profiler output in parallel. Safe to re-run.

    Example: rlprof ascend parse profiler_data -j 4
    """
    from lightning_rlprof.loaders.ascend import offline_analysis as offline

    directories = offline.ascend_directories(paths)
    exports: list[offline.Export] = [each.value for each in export or []]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options = offline.Options(jobs or max(1, (cores or 1) // 2), timeout, exports, reparse)
    with console.bar("Parsing") as step:
        outcomes = offline.parse_captures(directories, options, step)
    if console.is_json():
        console.put_json(
            {"outcomes": [asdict(each) | {"path": str(each.path)} for each in outcomes]}
        )
    else:
        _print_outcomes(outcomes)
    if failed := [each for each in outcomes if each.state == "failed"]:
        text = f"cannot parse {len(failed)} of {len(outcomes)} directories"
        raise console.CheckFailedError(f"{text}; {failed[0].path}: {failed[0].message}")
    console.next_command("rlprof", "summary", paths[0])


def _print_outcomes(outcomes: list["Outcome"]) -> None:
    from lightning_rlprof.tables.table import Column, Table

    columns = (
        Column("directory", "text"),
        Column("rank", "count"),
        Column("state", "text"),
        Column("wrote", "text"),
        Column("took", "duration", "ns"),
    )
    names = _names([each.path for each in outcomes])
    rows = []
    for name, each in zip(names, outcomes, strict=True):
        row = (name, each.rank, each.state, _formats(each), int(each.seconds * 1e9) or None)
        rows.append(row)
    console.print_tables([Table("captures", columns, rows)])
    console.status("")
    for name, each in zip(names, outcomes, strict=True):
        if each.message:
            console.warn(f"{name}: {each.message}")
    states = [str(each.state) for each in outcomes]
    counts = [f"{states.count(state)} {state}" for state in _STATES if state in states]
    console.status(", ".join(counts), "bold")


def _formats(outcome: "Outcome") -> str | None:
    text = any(name.endswith("trace_view.json") for name in outcome.files)
    db = any(name.endswith(".db") and name != "analysis.db" for name in outcome.files)
    return " and ".join(["text"] * text + ["db"] * db) or None


def _names(paths: list[Path]) -> list[str]:
    """Name directories below their common parent, by capture if it has only one."""
    windows = [path.absolute().parent for path in paths]
    alone = {window for window in windows if windows.count(window) == 1}
    common = os.path.commonpath([window.parent for window in windows])
    return [
        os.path.relpath(window if window in alone else path.absolute(), common)
        for window, path in zip(windows, paths, strict=True)
    ]
