"""The verb ``ascend parse``: parse raw torch_npu profiler output after the training."""

import os
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_rlprof.cli.console import (
    CheckFailedError,
    bar,
    is_json,
    next_command,
    print_tables,
    put_json,
    status,
    warn,
)
from lightning_rlprof.system.location import local_path

if TYPE_CHECKING:
    from lightning_rlprof.loaders.ascend.offline_analysis import Outcome
    from lightning_rlprof.tables.table import Table


_WIDEST = 40
_STATES = ("cached", "up to date", "failed")


class _Format(str, Enum):
    """What ``--export`` takes."""

    TEXT = "text"
    DB = "db"


Paths = Annotated[
    list[Path],
    typer.Argument(
        parser=local_path,
        metavar="PATHS",
        help="Runs, directories of captures, or *_ascend_pt directories",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "-j", "--jobs", min=1, metavar="N", help="Parallel jobs (default: half of the cores)"
    ),
]
Timeout = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit per directory")]
Formats = Annotated[
    list[_Format] | None,
    typer.Option(metavar="FORMAT", help="text, db (repeatable; default: as recorded)"),
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
    options = offline.Options(jobs or max(1, _cores() // 2), timeout, exports, reparse)
    with bar("Parsing") as step:
        outcomes = offline.parse_captures(directories, options, step)
    if is_json():
        put_json({"outcomes": [asdict(each) | {"path": str(each.path)} for each in outcomes]})
    else:
        _print_outcomes(outcomes)
    if failed := [each for each in outcomes if each.state == "failed"]:
        text = f"cannot parse {len(failed)} of {len(outcomes)} directories"
        raise CheckFailedError(f"{text}; {failed[0].path}: {failed[0].message}")
    next_command("rlprof", "summary", paths[0])


def _cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _print_outcomes(outcomes: list["Outcome"]) -> None:
    names = _names([each.path for each in outcomes])
    print_tables([_table(outcomes, names)])
    status("")
    for name, each in zip(names, outcomes, strict=True):
        if each.message:
            warn(f"{name}: {each.message}")
    counts = {state: sum(each.state == state for each in outcomes) for state in _STATES}
    status(", ".join(f"{count} {state}" for state, count in counts.items() if count), "bold")


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
    """Name directories below their common parent, by capture if it has only one."""
    windows = [path.absolute().parent for path in paths]
    alone = {window for window in windows if windows.count(window) == 1}
    common = os.path.commonpath([window.parent for window in windows])
    return [
        os.path.relpath(window if window in alone else path.absolute(), common)
        for window, path in zip(windows, paths, strict=True)
    ]


def _end(name: str) -> str:
    return name if len(name) <= _WIDEST else f"...{name[3 - _WIDEST :]}"
