"""Read a run from its cache: the same `Spans` as from its files.

The cache contains the tables, and JSON facts: names, threads, headers, notes, warnings.
"""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import KINDS, Header
from lightning_rlprof.store.cache import Cache, Sources, find
from lightning_rlprof.store.duckdb_tables import occurring
from lightning_rlprof.store.parquet import kept_table, row_count
from lightning_rlprof.tables.spans import (
    CORE,
    NO_PARENT,
    Counter,
    RankNote,
    RunWarning,
    Spans,
    Thread,
    counter_columns,
)
from lightning_rlprof.tables.table import Table

if TYPE_CHECKING:
    from lightning_rlprof.tables.spans import Spans


def facts_of(spans: "Spans", path: Path) -> bytes:
    """Return JSON of names, threads, headers, notes, warnings, and how to find the counters.

    ``names`` and ``threads`` are all that the run has, in its order; the codes in the file of the
    spans count those that occur, which ``used_names`` and ``used_threads`` tell. Of each counter
    there is ``[name, column, type]``, and where no column of 64 bits holds it exactly,
    ``[name, null, type, rows, values]``.

    Args:
        spans: The run.
        path: What was asked for; ``path`` leads from there to what was read.
    """
    facts = {
        "path": os.path.relpath(spans.path, path),
        "names": spans.names,
        "threads": spans.threads,
        "used_names": np.flatnonzero(occurring(spans.name, spans.names)).tolist(),
        "used_threads": np.flatnonzero(occurring(spans.thread, spans.threads)).tolist(),
        "unix_ns": spans.unix_ns,
        "moved": sorted(spans.wall_off),
        "headers": [
            [rank, {each.name: getattr(header, each.name) for each in dataclasses.fields(header)}]
            for rank, header in spans.headers.items()
        ],
        "statuses": list(spans.statuses.items()),
        "notes": spans.notes,
        "warnings": spans.warnings,
        "counters": _counters(spans),
    }
    return json.dumps(facts, default=_plain).encode()


def _counters(spans: "Spans") -> list[list[Any]]:
    columns = counter_columns(spans)
    found: list[list[Any]] = []
    for name, (rows, values) in spans.counters.items():
        if name in columns and _fits(values):
            found.append([name, columns[name], values.dtype.str])
        else:
            found.append([name, None, values.dtype.str, rows.tolist(), values.tolist()])
    return found


def _fits(values: Any) -> bool:
    """Tell whether a column of SQL holds every number as it is; NaN it takes for not known."""
    small = values.dtype.kind in "if" and values.dtype.itemsize <= 8
    return small and not (values.dtype.kind == "f" and np.isnan(values).any())


def _plain(value: Any) -> Any:
    """Return a number of NumPy's as Python's, a mapping as a dictionary, else its text."""
    if hasattr(value, "items") and not hasattr(value, "item"):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)


def find_cache(path: Path, made_of: Sources) -> Cache | None:
    """Return the cache of a run, None without one.

    A cache of which a file cannot be opened is deleted: the caller reads the run and rebuilds it.

    Raises:
        OSError: Such a cache cannot be deleted.
    """
    cache = find(path, made_of)
    if cache is None:
        return None
    try:
        if cache.facts() is not None:
            row_count(file for file in map(cache.file, cache.tables) if file.exists())
            return cache
    except TraceError:
        pass
    shutil.rmtree(cache.folder)
    return None


_WRONG = (TraceError, KeyError, TypeError, ValueError, IndexError, AttributeError)


def cached_spans(cache: Cache, path: Path, read: Callable[[Path], Spans]) -> Spans | None:
    """Return a run as it was when its cache was made, None where the cache turns out damaged.

    A table of a device tool is read from its file when it is asked for, and of that only the
    columns that are looked at; one that has no file yet is read from the run itself.

    Args:
        cache: Of the run, as `lightning_rlprof.store.cache.find` returns it.
        path: The run, as it was asked for.
        read: Reads the run itself, that is `lightning_rlprof.load`.
    """
    facts = cache.facts()
    if facts is None:
        return None
    try:
        columns = kept_table(cache.file("spans"), "spans")
        return _spans(facts, columns, path, _tables(cache, path, read))
    except _WRONG:
        return None


def _tables(
    cache: Cache, path: Path, read: Callable[[Path], Spans]
) -> dict[str, Callable[[], Table]]:
    source = functools.cache(lambda: read(path))

    def table(name: str) -> Table:
        if cache.has(name):
            return kept_table(cache.file(name), name)
        return source().table(name)

    return {name: functools.partial(table, name) for name in cache.tables if name not in CORE}


def _spans(
    facts: dict[str, Any], table: Table, path: Path, tables: dict[str, Callable[[], Table]]
) -> Spans:
    names = [column.name for column in table.columns]
    cells = dict(zip(names, table.rows.columns, strict=True))  # type: ignore[attr-defined]
    kinds, texts = cells["kind"]
    return Spans(
        path / facts["path"] if facts["path"] != "." else path,
        tuple(facts["names"]),
        tuple(Thread(*thread) for thread in facts["threads"]),
        name=_whole(facts["used_names"])[cells["name"][0]],
        kind=_whole([KINDS.index(text) for text in texts])[kinds],
        **{each: cells[each] for each in ("rank", "step", "start_ns", "end_ns", "id")},
        thread=_whole(facts["used_threads"])[cells["thread_name"][0]],
        parent=np.ma.filled(cells["parent"], NO_PARENT),
        counters={name: _counter(cells, *about) for name, *about in facts["counters"]},
        headers={rank: Header(**header) for rank, header in facts["headers"]},
        statuses=dict(facts["statuses"]),
        notes=tuple(RankNote(*note) for note in facts["notes"]),
        warnings=tuple(RunWarning(*problem) for problem in facts["warnings"]),
        unix_ns=facts["unix_ns"],
        tables=tables,
    )


def _counter(
    cells: dict[str, Any],
    column: str | None,
    kind: str,
    rows: list[int] | None = None,
    values: list[Any] | None = None,
) -> Counter:
    if column is None:
        return Counter(_whole(rows or []), np.array(values, dtype=kind))
    full = cells[column]
    at = np.flatnonzero(~np.ma.getmaskarray(full))
    return Counter(at, np.ma.getdata(full)[at].astype(kind, copy=False))


def _whole(numbers: list[int]) -> Any:
    return np.array(numbers, dtype=np.int64)
