"""Open a run from its cache if there is one, else from its files."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import is_ascend
from lightning_rlprof.loaders.discovery import is_run, read_ranks, traces
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import rank_files
from lightning_rlprof.store.cache import cached_spans, find, sources
from lightning_rlprof.store.ingest import keep
from lightning_rlprof.store.run_store import Part, Store
from lightning_rlprof.system.location import RemotePath, place
from lightning_rlprof.tables.spans import Spans

LARGE = 2**23
"""Bytes from which on traces of another tool leave caches when they are read."""

_Progress = Callable[[int, int], None]


def open_run(path: str | Path, *, progress: _Progress | None = None, cache: bool = True) -> Spans:
    """Return what `lightning_rlprof.load` returns, out of the cache where a good one is there.

    A directory with one trace per rank is put together from the caches of its traces. Only traces
    of another tool with `LARGE` bytes or more, those of all ranks together, leave caches: with all
    tables, so that no later question reads them again. A run of our own is small, and perhaps still
    being written: reading it writes nothing.

    Args:
        path: What to read.
        progress: Called after each file with (files read, files in all).
        cache: Write caches of large external traces.

    Raises:
        TraceError: Nothing there can be read; the text says why.

    Example::

        >>> open_run("traces/rank-0.json.gz").table("kernels")  # doctest: +SKIP
    """
    return _open(place(path), progress, LARGE if cache else None)


def _open(path: Path, progress: _Progress | None, least: int | None) -> Spans:
    """Open what leaves a cache if it has this many bytes; None: it leaves none."""
    # Its copies are deleted, and a cache would be deleted with them.
    if isinstance(path, RemotePath):
        return load(path, progress=progress)
    existing = find(path, sources(path))
    if existing is not None:
        found = cached_spans(existing, path, partial(_read, least=None))
        if found is not None:  # Even a run without spans may have kernels.
            return found
    return _read(path, progress, least)


def open_store(path: str | Path, *, progress: _Progress | None = None) -> Store:
    """Return the tables of what `open_run` opens, to be asked in SQL.

    Those of a directory with one trace per rank, each with its cache, are read from there as a
    query goes: the memory does not grow with the number of ranks.

    Raises:
        TraceError: Nothing there can be read.
    """
    path = Path(path)
    return Store(path, partial(open_run, progress=progress), partial(_parts, path))


def _parts(path: Path, facts: Mapping[str, Any]) -> Sequence[Part]:
    """Return the traces of a directory that its run was joined of, if all have caches."""
    joined = any(Code.CYCLES_JOINED in note for note in facts.get("notes", ()))
    if joined or facts.get("moved") or not _is_folder_of_traces(path):
        return ()
    left = dict(facts.get("headers", []))
    zero, found = facts.get("unix_ns", 0), []
    for file in traces(path):
        cache = find(file, sources(file))
        own = cache.facts() if cache else None
        if cache is None or own is None or not all(map(cache.has, cache.tables)):
            return ()
        headers = dict(own["headers"])
        if all(left.get(rank) == header for rank, header in headers.items()):
            later = own["unix_ns"] - zero if own["unix_ns"] else 0
            found.append(Part(cache, next(iter(headers)) if len(headers) == 1 else None, later))
            left = {rank: header for rank, header in left.items() if rank not in headers}
    return found if len(found) > 1 else ()


def _is_folder_of_traces(path: Path) -> bool:
    """Tell whether `load` looks for traces there: not where runs are, nor inside of one."""
    if not os.path.isdir(path) or any(map(rank_files, (path, path.absolute().parent))):
        return False
    return not is_ascend(path) and not any(map(rank_files, path.iterdir()))


def _size(path: Path) -> int:
    return sum(size for _, size, _, _ in sources(path))


def _read(path: Path, progress: _Progress | None = None, least: int | None = None) -> Spans:
    """Read what has no cache itself; its parts may have one."""
    if _is_folder_of_traces(path):
        files = traces(path)
        if len(files) == 1:
            return _open(files[0], progress, least)
        if least is not None and sum(map(_size, files)) >= least:
            least = 0
        each = partial(_open, progress=None, least=least)
        run = read_ranks(files, each, progress) if files else None
        return load(path, progress=progress) if run is None else replace(run, path=path)
    if least is not None and not is_run(path) and _size(path) >= least:
        # If this fails, reading without a cache reports what is wrong.
        with suppress(OSError, TraceError):
            kept = cached_spans(keep(path, progress).cache, path, partial(load, progress=None))
            if kept is not None:
                return kept
    return load(path, progress=progress)
