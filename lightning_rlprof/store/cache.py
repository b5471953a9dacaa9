"""The disposable Parquet cache next to a run, and the same run read back from it.

It is found by the files that it was made from. It contains the tables, and JSON facts: names,
threads, headers, notes, warnings.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import KINDS, Header
from lightning_rlprof.records.run_directory import CACHE_FOLDER, mode_made_of
from lightning_rlprof.store.answers import Answers
from lightning_rlprof.store.duckdb_tables import occurring
from lightning_rlprof.store.parquet import (
    STAMP_NS,
    is_whole,
    kept_table,
    row_count,
    write_table,
)
from lightning_rlprof.system.files import new_folder
from lightning_rlprof.system.version import VERSION
from lightning_rlprof.tables.spans import (
    CORE,
    NO_PARENT,
    Counter,
    RankNote,
    RunWarning,
    Spans,
    Thread,
    core_tables,
    counter_columns,
    kept_spans,
)
from lightning_rlprof.tables.table import Table

SCHEMA = 4
"""Version of the tables and their columns; another one is never read."""

Sources = tuple[tuple[str, int, int, int], ...]
_INDEX = "index.json"
_FACTS = "run.json"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KEY = re.compile(r"[0-9a-f]{32}")
_DAY_S = 86_400

# Commands of rlprof write these files into a run's directory, but the run does not include them.
_WRITTEN = {"report.html", "trace.json.gz", "otlp.jsonl"}
_WRONG = (TraceError, KeyError, TypeError, ValueError, IndexError, AttributeError)


@dataclass(frozen=True)
class Cache:
    """A folder of Parquet files, one per table.

    Attributes:
        folder: Where they lie.
        tables: All tables that the run has, whether their file is made yet or not.
    """

    folder: Path
    tables: tuple[str, ...]

    def file(self, name: str) -> Path:
        """Return where a table lies, or would lie: a file, or a folder of files."""
        return self.folder / f"{name}.parquet"

    def has(self, name: str) -> bool:
        """Tell whether a table is there and whole."""
        return is_whole(self.file(name))

    def facts(self) -> dict[str, Any] | None:
        """Return what `facts_of` wrote, None if it is damaged."""
        try:
            facts = json.loads(self.read_json(_FACTS) or b"null")
        except (OSError, ValueError):
            return None
        return facts if isinstance(facts, dict) else None

    def read_json(self, name: str) -> bytes | None:
        """Return what `write_json` wrote, None if it was changed; raises OSError without a file."""
        path = self.folder / name
        is_whole = path.stat().st_mtime_ns == STAMP_NS and not path.is_symlink()
        return path.read_bytes() if is_whole else None

    def write_json(self, name: str, data: bytes) -> None:
        """Write a file beside the tables; readers see all of it or nothing. Raises OSError."""
        part = self.folder / f".{name}-{uuid.uuid4().hex}.part"
        try:
            with part.open("wb") as file:
                file.write(data)
                os.fsync(file.fileno())
            os.utime(part, ns=(STAMP_NS, STAMP_NS))
            part.replace(self.folder / name)
        finally:
            part.unlink(missing_ok=True)

    def add(self, table: Table, name: str) -> None:
        """Write a table; readers see all of it or nothing.

        Raises:
            OSError: The disk does not take it.
        """
        # A process that was killed leaves such a folder.
        for left in self.folder.glob(f".{name}-*.part"):
            if _is_old(left):
                _remove(left)
        part = self.folder / f".{name}-{uuid.uuid4().hex}.part"
        try:
            write_table(table, name, part)
            _put(part, self.file(name))
        finally:
            _remove(part)


def _put(new: Path, place: Path) -> None:
    """Give a new table its name, in place of a broken one, unless another process was first."""
    try:
        new.replace(place)
    except OSError:  # A folder cannot replace another folder.
        if not is_whole(place):
            _remove(place)
            new.replace(place)


def _remove(table: Path) -> None:
    if table.is_dir() and not table.is_symlink():
        shutil.rmtree(table, ignore_errors=True)
    else:
        table.unlink(missing_ok=True)


def sources(path: Path) -> Sources:
    """Return name, size, time of change and inode of every file that a path stands for.

    A directory stands for all files below it, a rank's file for its run, an analysed file of a
    capture for that; any other file for itself: nothing beside it is read with it. Empty where
    nothing can be read.
    """
    path = whole = path.absolute()
    if path.suffix == ".jsonl":
        whole = path.parent
    elif path.parent.name == "ASCEND_PROFILER_OUTPUT":
        whole = path.parent.parent
    found = _below(whole) if os.path.isdir(whole) else filter(os.path.isfile, [path])
    facts = []
    for file in found:
        with contextlib.suppress(OSError):  # The file may be gone meanwhile.
            stat = file.stat()
            name = os.path.relpath(file, whole.parent)
            facts.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(sorted(facts))


def find(path: Path, made_of: Sources) -> Cache | None:
    """Return the cache that was made of exactly these files by this version, if it is whole."""
    return _opened(_home(path, made_of))


def _opened(folder: Path) -> Cache | None:
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        schema, tables, core = index["schema"], index["tables"], set(index["core"])
        known = all(isinstance(name, str) and _NAME.fullmatch(name) for name in tables)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if folder.is_symlink() or folder.parent.is_symlink() or schema != SCHEMA or not known:
        return None
    cache = Cache(folder, tuple(tables))
    return cache if core and core.issubset(tables) and all(map(cache.has, core)) else None


def place(path: Path, made_of: Sources, spans: Spans) -> Cache:
    """Write a new cache beside what was read, in which all see it.

    Two processes may do so at once; the first one's stays.

    Args:
        path: What was read.
        made_of: Its files before it was read; they are the same now.
        spans: What was read: its core tables are written, the others may be added.

    Raises:
        OSError: That place cannot be written, or is a link.
    """
    home = _home(path, made_of)
    if home.parent.is_symlink():
        raise OSError(None, "is a link", str(home.parent))
    mode = mode_made_of(path)
    new_folder(home.parent, mode)
    new = home.parent / f".new-{uuid.uuid4().hex}"
    try:  # A signal may come as soon as the folder is made.
        new_folder(new, mode)
        cache = _move(_fill(new, path, spans), home)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    _sweep(home)
    return cache


def make(path: Path, made_of: Sources, spans: Spans, *, shared: bool) -> Cache:
    """Write a new cache: as `place`, or in a temporary folder where that cannot be written.

    Args:
        path: What was read.
        made_of: Its files before it was read.
        spans: What was read: its core tables are written, the others may be added.
        shared: False where the files changed meanwhile: then others must not find it.

    Raises:
        TraceError: Not even the temporary folder can be written.
    """
    if shared:
        with contextlib.suppress(OSError):
            return place(path, made_of, spans)
    folder = tempfile.mkdtemp(prefix="rlprof-")
    try:
        cache = _fill(Path(folder), path, spans)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        text = f"{tempfile.gettempdir()}: no room for the tables of {path} ({error})"
        raise TraceError(f"{text}; set TMPDIR to another folder") from error
    weakref.finalize(cache, shutil.rmtree, folder, ignore_errors=True)
    return cache


def _below(folder: Path) -> list[Path]:
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != CACHE_FOLDER]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found += [Path(place, name) for name in (*files, *links)]
    return [each for each in found if each.parent != folder or each.name not in _WRITTEN]


def _home(path: Path, made_of: Sources) -> Path:
    """Return where the cache of these files lies."""
    about = json.dumps([SCHEMA, VERSION, path.name if os.path.isfile(path) else "", made_of])
    key = hashlib.blake2b(about.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    path = path.absolute()
    if os.path.isdir(path):
        return path / CACHE_FOLDER / f"run-{key}"
    # DuckDB opens only paths that are text.
    name = os.fsencode(path.name).decode(errors="backslashreplace")
    return path.parent / CACHE_FOLDER / f"{name}-{key}"


def _fill(folder: Path, path: Path, spans: Spans) -> Cache:
    core, facts = core_tables(spans), facts_of(spans, path)
    names = [name for name in (*core, *spans.tables) if _NAME.fullmatch(name)]
    cache = Cache(folder, tuple(names))
    for name, table in core.items():
        cache.add(table(), name)
    index = {"schema": SCHEMA, "tables": names, "core": list(core)}
    cache.write_json(_FACTS, facts)
    cache.write_json(_INDEX, json.dumps(index).encode())
    return cache


def _move(cache: Cache, home: Path) -> Cache:
    """Give a new cache its name, in place of a broken one, unless another process was first."""
    try:
        cache.folder.rename(home)
    except OSError:
        if home.is_symlink() or not home.is_dir():
            raise
        theirs = _opened(home)
        if theirs and all(map(theirs.has, filter(cache.has, cache.tables))):
            return theirs
        broken = cache.folder.with_name(f"{cache.folder.name}-broken")
        home.rename(broken)
        try:
            cache.folder.rename(home)
        finally:
            shutil.rmtree(broken, ignore_errors=True)
    return Cache(home, cache.tables)


def _is_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _DAY_S
    return False


def _sweep(home: Path) -> None:
    """Remove what earlier states of the same files left, and what a killed process did."""
    prefix = home.name.rpartition("-")[0]
    for other in home.parent.iterdir():
        own, _, key = other.name.rpartition("-")
        stale = own == prefix and _KEY.fullmatch(key) and other.name != home.name
        with contextlib.suppress(OSError):
            left = other.name.startswith(".new-") and _is_old(other)
            if (stale or left) and not other.is_symlink():
                shutil.rmtree(other, ignore_errors=True)


def facts_of(spans: Spans, path: Path) -> bytes:
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
        "headers": [[rank, vars(header)] for rank, header in spans.headers.items()],
        "statuses": list(spans.statuses.items()),
        "notes": spans.notes,
        "warnings": spans.warnings,
        "counters": _counters(spans),
    }
    return json.dumps(facts, default=_plain).encode()


def _counters(spans: Spans) -> list[list[Any]]:
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
    with contextlib.suppress(TraceError):
        if cache.facts() is not None:
            row_count(file for file in map(cache.file, cache.tables) if file.exists())
            return cache
    shutil.rmtree(cache.folder)
    return None


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
    source = functools.cache(lambda: read(path))
    try:
        return _spans(cache, facts, path, source)
    except _WRONG:
        return None


def _tables(cache: Cache, source: Callable[[], Spans]) -> dict[str, Callable[[], Table]]:
    def table(name: str) -> Table:
        if cache.has(name):
            return kept_table(cache.file(name), name)
        return source().table(name)

    return {name: functools.partial(table, name) for name in cache.tables if name not in CORE}


def _spans(cache: Cache, facts: dict[str, Any], path: Path, source: Callable[[], Spans]) -> Spans:
    table = kept_table(cache.file("spans"), "spans")
    places = {column.name: at for at, column in enumerate(table.columns)}
    columns = table.rows.columns  # type: ignore[attr-defined]

    def cells(name: str) -> Any:
        return columns[places[name]]

    def found(name: str) -> Any:
        match name:
            case "name":
                return _whole(facts["used_names"])[cells(name)[0]]
            case "kind":
                kinds, texts = cells(name)
                return _whole([KINDS.index(text) for text in texts])[kinds]
            case "thread":
                return _whole(facts["used_threads"])[cells("thread_name")[0]]
            case "parent":
                return np.ma.filled(cells(name), NO_PARENT)
            case "counters":
                return {each: _counter(cells, *about) for each, *about in facts["counters"]}
        return cells(name)

    def read(name: str) -> Any:
        try:
            return found(name)
        except _WRONG:  # The cache is damaged, and the run is not.
            return getattr(source(), name)

    return kept_spans(
        read,
        Answers(cache),
        path=path / facts["path"] if facts["path"] != "." else path,
        names=tuple(facts["names"]),
        threads=tuple(Thread(*thread) for thread in facts["threads"]),
        headers={rank: Header(**header) for rank, header in facts["headers"]},
        statuses=dict(facts["statuses"]),
        notes=tuple(RankNote(*note) for note in facts["notes"]),
        warnings=tuple(RunWarning(*problem) for problem in facts["warnings"]),
        unix_ns=facts["unix_ns"],
        tables=_tables(cache, source),
    )


def _counter(
    cells: Callable[[str], Any],
    column: str | None,
    kind: str,
    rows: list[int] | None = None,
    values: list[Any] | None = None,
) -> Counter:
    if column is None:
        return Counter(_whole(rows or []), np.array(values, dtype=kind))
    full = cells(column)
    at = np.flatnonzero(~np.ma.getmaskarray(full))
    return Counter(at, np.ma.getdata(full)[at].astype(kind, copy=False))


def _whole(numbers: list[int]) -> Any:
    return np.array(numbers, dtype=np.int64)
