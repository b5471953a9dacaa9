"""One run or trace turned into a cache with all of its tables, and what came of it as a row."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_rlprof.errors import TraceError, described
from lightning_rlprof.loaders.discovery import identify
from lightning_rlprof.loaders.kineto.reader import read_kineto
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.rank_names import as_ranges, rank_in_name
from lightning_rlprof.store.cache import Cache, Sources, find, place, sources
from lightning_rlprof.store.cached_run import find_cache
from lightning_rlprof.store.duckdb_tables import close
from lightning_rlprof.store.parquet import row_count
from lightning_rlprof.store.run_store import parts_of
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

_FEW = 8
_LARGE = 1 << 26  # bytes from which on memory counts more than the time to start DuckDB again
_State = Literal["cached", "up to date", "failed"]


class Outcome(NamedTuple):
    """What came of one run or trace.

    Attributes:
        path: It, as it was given.
        ranks: Which ranks it is of, as text: ``0-7, 9``.
        state: ``cached``, ``up to date`` or ``failed``.
        why: What went wrong, or what is missing or doubtful in what was read.
        rows: In all its tables together; None where it failed.
        bytes_read: Size of its files, packed as they are; None where they were not read.
        bytes_written: Size of its cache; None where it failed.
        seconds: What it took; None where its process died.
    """

    path: str
    ranks: str | None
    state: _State
    why: str | None
    rows: int | None
    bytes_read: int | None
    bytes_written: int | None
    seconds: float | None


class Kept(NamedTuple):
    """A cache, whether it is new, and which tables could not be read and why."""

    cache: Cache
    new: bool
    untold: list[str]


def keep(path: Path, progress: Callable[[int, int], None] | None = None) -> Kept:
    """Make the cache of one run or trace with all its tables, unless there is one.

    A cache that lacks some tables gets them. One table at a time is in memory beside the run.

    Raises:
        TraceError: It cannot be read, or changed meanwhile.
        OSError: The place beside it cannot be written.
    """
    made_of = sources(path)
    cache = find_cache(path, made_of)
    if cache is not None and all(map(cache.has, cache.tables)):
        return Kept(cache, False, [])
    spans = _read(path, progress)
    if sources(path) != made_of:
        raise TraceError(f"{path}: changed while it was read; ingest it when it is complete")
    cache = find(path, made_of) or place(path, made_of, parts_of(spans, path))
    tables = dict(spans.tables)
    del spans  # a trace's tables do not need it, and they need the memory
    return Kept(cache, True, _add_tables(cache, tables, is_large=_size(path) > _LARGE))


def _read(path: Path, progress: Callable[[int, int], None] | None) -> Spans:
    """Read it with all that its tables need: a Chrome trace in one pass instead of two."""
    if os.path.isfile(path) and identify(path) == "kineto":
        return read_kineto(path, every=True)
    return load(path, progress=progress)


def kept_whole(path: Path, made_of: Sources) -> Cache | None:
    """Return the good cache of a run or trace if it holds every table."""
    cache = find(path, made_of)
    whole = cache is not None and cache.facts() is not None and all(map(cache.has, cache.tables))
    return cache if whole else None


def ingest_one(path: str) -> Outcome:
    """Return what came of `keep`; nothing is raised but what ends the process."""
    start = time.perf_counter()
    try:
        kept = keep(Path(path))
        rows = row_count(filter(Path.exists, map(kept.cache.file, kept.cache.tables)))
        written = kept.cache.size
        ranks, read = _ranks(kept.cache), _size(Path(path))
    except TraceError as error:
        return lost(path, str(error), time.perf_counter() - start)
    except OSError as error:
        why = f"{error.filename}: its cache cannot be written ({error.strerror})"
        why += "; without one, rlprof sql, show and summary read it"
        return lost(path, why, time.perf_counter() - start)
    except Exception as error:  # a bug costs this file only and is reported
        why = described(error)
        return lost(path, why, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    state: _State = "failed" if kept.untold else "cached" if kept.new else "up to date"
    doubts = _few([*kept.untold, *_problems(kept.cache)])
    return Outcome(path, ranks, state, doubts, rows, read, written, seconds)


def lost(path: str, why: str, seconds: float | None = None) -> Outcome:
    """Return the row of a run or trace that could not be read; its name may tell the rank."""
    rank = rank_in_name(Path(path).name)
    ranks = None if rank is None else str(rank)
    return Outcome(path, ranks, "failed", " ".join(why.split()), None, None, None, seconds)


def _add_tables(
    cache: Cache, tables: dict[str, Callable[[], Table]], *, is_large: bool
) -> list[str]:
    """Add the tables that lack, and let go of each: the last one is written without the trace."""
    untold = []
    for name in [*tables]:
        read = tables.pop(name)
        if is_large:
            close()
        if name in cache.tables and not cache.has(name):
            try:
                table = read()
                del read
                cache.add(table, name)
                del table
            except TraceError as error:
                untold.append(f"table {name}: {error}")
    return untold


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files of a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(size for _, size, _, _ in sources(path))


def _problems(cache: Cache) -> list[str]:
    problems = (cache.facts() or {}).get("warnings", [])
    return [text if rank is None else f"rank {rank}: {text}" for rank, text, *_ in problems]


def _few(texts: list[str]) -> str | None:
    more = [f"and {len(texts) - _FEW} more"] if len(texts) > _FEW else []
    return "; ".join([*texts[:_FEW], *more]) or None


def _ranks(cache: Cache) -> str:
    return as_ranges(rank for rank, _ in (cache.facts() or {}).get("headers", []))
