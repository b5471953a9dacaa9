"""Cache many runs and traces at once; the result has a row for each."""

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Literal, get_args

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.loaders.discovery import items
from lightning_rlprof.store.ingest.make_cache import Outcome
from lightning_rlprof.system.location import local_path
from lightning_rlprof.tables.table import Cell, Column, Table

Engine = Literal["local", "ray"]
"""Processes of this machine, or workers of a Ray cluster."""

_COLUMNS = (
    Column("path", "text"),
    Column("ranks", "text"),
    Column("state", "text"),
    Column("why", "text"),
    Column("rows", "count"),
    Column("bytes read", "count", "bytes"),
    Column("bytes written", "count", "bytes"),
    Column("seconds", "number", "s"),
    Column("MB/s", "number"),
)


def ingest(
    paths: Sequence[str | Path],
    *,
    jobs: int | None = None,
    engine: Engine = "local",
    progress: Callable[[int, int], None] | None = None,
) -> Table:
    """Make the caches of runs and traces with all their tables; return a row for each.

    A run with a complete cache is ``up to date`` and is not read again, so call it again to resume.
    A run that can't be read is ``failed``, the others continue. Rows are in the order of the paths;
    MB are 10⁶ bytes.

    Args:
        paths: Runs, traces, and directories of them: see `loaders.discovery.items`.
        jobs: Parallel jobs; unset, one per core that this process may use, or what Ray has.
        engine: ``local`` is processes here, ``ray`` tasks of a cluster; both make the same files.
        progress: Called after each with (done, all).

    Raises:
        RlprofError: There is nothing to read below a path, an argument is of a wrong kind, or Ray
            is missing or cannot be reached; then nothing is made.
    """
    found = _found(paths, jobs, engine)
    rows: dict[int, tuple[Cell, ...]] = {}
    with contextlib.closing(_engine(found, jobs, engine)) as outcomes:
        for at, outcome in outcomes:
            rows[at] = _row(outcome, found[at])
            if progress is not None:
                progress(len(rows), len(found))
    return Table("ingest", _COLUMNS, [rows[at] for at in sorted(rows)])


def _refuse_wrong(paths: object, jobs: object, engine: object) -> None:
    if isinstance(paths, str | Path):
        raise ConfigError(f"paths: {local_path(paths)} is one path; ingest takes a list of paths")
    if jobs is not None and (not isinstance(jobs, int) or jobs < 1):
        raise ConfigError(f"jobs={jobs!r} must be a whole number from 1 on, or None")
    if engine not in get_args(Engine):
        raise ConfigError(f"unknown engine {engine!r} (allowed: {', '.join(get_args(Engine))})")


def _found(paths: Sequence[str | Path], jobs: object, engine: object) -> list[str]:
    """Return all runs and traces once, by their first spelling, unless an argument is wrong."""
    _refuse_wrong(paths, jobs, engine)
    found: dict[str, str] = {}
    for path in paths:
        for each in items(local_path(path)):
            found.setdefault(_place(each), str(each))
    return [*found.values()]


def _place(path: Path) -> str:
    """Return where a path really lies; a link to a file has a cache of its own, beside itself."""
    if os.path.isdir(path):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(path.parent), path.name)


def _engine(
    paths: Sequence[str], jobs: int | None, engine: Engine
) -> Generator[tuple[int, Outcome], None, None]:
    absolute = [os.path.abspath(path) for path in paths]
    if engine == "ray":
        from lightning_rlprof.store.ingest.ray_engine import in_ray

        return in_ray(absolute, jobs)
    from lightning_rlprof.store.ingest.process_engine import in_processes

    return in_processes(absolute, jobs or _cores())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _row(outcome: Outcome, path: str) -> tuple[Cell, ...]:
    """Return a row with the path as it was given."""
    speed = None
    if outcome.state == "cached" and outcome.seconds and outcome.bytes_read is not None:
        speed = outcome.bytes_read / outcome.seconds / 1e6
    why = outcome.why and outcome.why.replace(outcome.path, path)
    return (*outcome._replace(path=path, why=why), speed)
