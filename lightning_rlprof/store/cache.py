"""The disposable Parquet files beside a run: found by what they were made of, else made anew."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_rlprof.errors import TraceError
from lightning_rlprof.store.parquet import is_whole, write_table
from lightning_rlprof.table import Table

__all__ = ["FOLDER", "SCHEMA", "Cache", "find", "make", "sources"]

SCHEMA = 1
"""Version of the tables and their columns; another one is never read."""

FOLDER = ".rlprof-cache"
"""Where the caches lie: in the run's directory, or beside a single file."""

Makers = Mapping[str, Callable[[], Table]]
Sources = tuple[tuple[str, int, int, int], ...]

_INDEX = "index.json"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KEY = re.compile(r"[0-9a-f]{32}")
_DAY_S = 86_400
# What our own commands write into a run's directory is no part of the run.
_WRITTEN = {"report.html", "trace.json.gz"}


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
        """Return where a table lies, or would lie."""
        return self.folder / f"{name}.parquet"

    def has(self, name: str) -> bool:
        """Tell whether a table's file is there and whole."""
        return is_whole(self.file(name))

    def add(self, table: Table, name: str) -> None:
        """Write a table; whoever reads sees all of it or nothing.

        Raises:
            OSError: The disk does not take it.
        """
        part = self.folder / f".{name}-{uuid.uuid4().hex}.part"
        try:
            write_table(table, name, part)
            part.replace(self.file(name))
        finally:
            part.unlink(missing_ok=True)


def sources(path: Path) -> Sources:
    """Return name, size, time of change and inode of every file that a path stands for.

    A directory stands for all files below it, a rank's file for its run; another file for itself
    and those that share its name up to the first dot. Empty where nothing can be read.
    """
    path = whole = path.absolute()
    if path.suffix == ".jsonl":
        whole = path.parent
    elif path.parent.name == "ASCEND_PROFILER_OUTPUT":
        whole = path.parent.parent
    if whole.is_dir():
        found = list(_below(whole))
    else:
        stem = path.name.split(".")[0]
        found = [each for each in path.parent.glob(f"{stem}*") if each.is_file()]
    facts = []
    for file in found:
        with contextlib.suppress(OSError):  # gone meanwhile
            stat = file.stat()
            name = os.path.relpath(file, whole.parent)
            facts.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(sorted(facts))


def find(path: Path, made_of: Sources) -> Cache | None:
    """Return the cache that was made of exactly these files by this version, if it is whole."""
    folder = _home(path, made_of)
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        schema, tables = index["schema"], index["tables"]
        known = all(isinstance(name, str) and _NAME.fullmatch(name) for name in tables)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if folder.is_symlink() or folder.parent.is_symlink() or schema != SCHEMA or not known:
        return None
    cache = Cache(folder, tuple(tables))
    return cache if all(cache.has(name) for name in index.get("core", [""])) else None


def make(path: Path, made_of: Sources, core: Makers, lazy: Makers, *, shared: bool) -> Cache:
    """Write a new cache: beside the run, or in a temporary folder where that cannot be written.

    Two processes may do so at once; the first one's stays.

    Args:
        path: What was read.
        made_of: Its files before it was read.
        core: Tables to write now.
        lazy: Tables to write when they are asked for.
        shared: False where the files changed meanwhile: then others must not find it.

    Raises:
        TraceError: Not even the temporary folder can be written.
    """
    home = _home(path, made_of)
    if shared and not home.parent.is_symlink():
        with contextlib.suppress(OSError):
            home.parent.mkdir(exist_ok=True)
            new = home.parent / f".new-{uuid.uuid4().hex}"
            new.mkdir()
            try:
                cache = _move(_fill(new, core, lazy), home)
            finally:
                shutil.rmtree(new, ignore_errors=True)
            _sweep(home)
            return cache
    return _temporary(path, core, lazy)


def _temporary(path: Path, core: Makers, lazy: Makers) -> Cache:
    """Write a cache that goes with the object, at the latest with the process."""
    folder = tempfile.mkdtemp(prefix="rlprof-")
    try:
        cache = _fill(Path(folder), core, lazy)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        text = f"{tempfile.gettempdir()}: has no room for the tables of {path} ({error})"
        raise TraceError(f"{text}; TMPDIR names another folder") from error
    weakref.finalize(cache, shutil.rmtree, folder, ignore_errors=True)
    return cache


def _below(folder: Path) -> list[Path]:
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != FOLDER]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found += [Path(place, name) for name in (*files, *links)]
    return [each for each in found if each.parent != folder or each.name not in _WRITTEN]


def _home(path: Path, made_of: Sources) -> Path:
    """Return where the cache of these files lies."""
    try:
        package = version("lightning-rlprof")
    except PackageNotFoundError:  # run from a source tree that was never installed
        package = ""
    about = json.dumps([SCHEMA, package, path.name if path.is_file() else "", made_of])
    key = hashlib.blake2b(about.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    path = path.absolute()
    if path.is_dir():
        return path / FOLDER / f"run-{key}"
    return path.parent / FOLDER / f"{path.name}-{key}"


def _fill(folder: Path, core: Makers, lazy: Makers) -> Cache:
    names = [name for name in (*core, *lazy) if _NAME.fullmatch(name)]
    cache = Cache(folder, tuple(names))
    for name, table in core.items():
        cache.add(table(), name)
    index = {"schema": SCHEMA, "tables": names, "core": list(core)}
    (folder / _INDEX).write_text(json.dumps(index))
    return cache


def _move(cache: Cache, home: Path) -> Cache:
    """Give a new cache its name, in place of a broken one, unless another process was first."""
    try:
        cache.folder.rename(home)
    except OSError:
        if home.is_symlink() or not home.is_dir():
            raise
        theirs = Cache(home, cache.tables)
        if (home / _INDEX).is_file() and all(
            theirs.has(name) for name in cache.tables if cache.file(name).exists()
        ):
            return theirs
        broken = cache.folder.with_name(f"{cache.folder.name}-broken")
        home.rename(broken)
        try:
            cache.folder.rename(home)
        finally:
            shutil.rmtree(broken, ignore_errors=True)
    return Cache(home, cache.tables)


def _sweep(home: Path) -> None:
    """Remove what earlier states of the same files left, and what a killed process did."""
    prefix = home.name.rpartition("-")[0]
    for other in home.parent.iterdir():
        own, _, key = other.name.rpartition("-")
        stale = own == prefix and _KEY.fullmatch(key) and other.name != home.name
        with contextlib.suppress(OSError):
            left = other.name.startswith(".new-") and time.time() - other.stat().st_mtime > _DAY_S
            if (stale or left) and not other.is_symlink():
                shutil.rmtree(other, ignore_errors=True)
