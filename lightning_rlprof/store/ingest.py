"""Cache many runs and traces at once, in processes here or on a Ray cluster; a row for each."""

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lightning_rlprof.errors import ConfigError, RlprofError, TraceError, described
from lightning_rlprof.loaders.discovery import identify, is_run, items
from lightning_rlprof.loaders.kineto.reader import read_kineto
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.rank_names import as_ranges, rank_in_name
from lightning_rlprof.store.cache import Cache, cached_spans, find, find_cache, place, sources
from lightning_rlprof.store.duckdb_tables import close
from lightning_rlprof.store.parquet import first_of, row_count
from lightning_rlprof.system.files import IS_POSIX
from lightning_rlprof.system.location import local_path
from lightning_rlprof.system.process import cores
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

log = logging.getLogger(__name__)

_LARGE = 1 << 26  # Bytes; above this, memory matters more than the time to restart DuckDB.
_State = Literal["cached", "up to date", "failed"]
_PATIENCE_S = 5
# Processes of multiprocessing would run the calling program once more. Ctrl-C is for the process
# that reads the other end of the pipe.
_START = """
import sys
pipe, *sys.path = sys.argv[1:]
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from lightning_rlprof.store.ingest import _work
_work(int(pipe))
"""
_GET = 'pip install "lightning-rlprof[ray]"'
_RETRIES = 3
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WAITING = 1_000  # Tasks submitted at once; Ray keeps all of them in memory.
Engine = Literal["local", "ray"]
"""Processes of this machine, or workers of a Ray cluster."""

_COLUMNS = (
    Column("path", "text"),
    Column("ranks", "text"),
    Column("state", "text"),
    Column("why", "text"),
    Column("rows", "count"),
    Column("bytes read", "count", "bytes"),
    Column("seconds", "number", "s"),
)


class Outcome(NamedTuple):
    """What came of one run or trace.

    Attributes:
        path: It, as it was given.
        ranks: Which ranks it is of, as text: ``0-7, 9``.
        state: ``cached``, ``up to date`` or ``failed``.
        why: What went wrong, or what is missing or doubtful in what was read.
        rows: In all its tables together; None where it failed.
        bytes_read: Size of its files, packed as they are; None where they were not read.
        seconds: What it took; None where its process died.
    """

    path: str
    ranks: str | None
    state: _State
    why: str | None
    rows: int | None
    bytes_read: int | None
    seconds: float | None


class Kept(NamedTuple):
    """A cache, whether it is new, and which tables could not be read and why."""

    cache: Cache
    new: bool
    unread: list[str]


def ingest(
    paths: Sequence[str | Path],
    *,
    jobs: int | None = None,
    engine: Engine = "local",
    progress: Callable[[int, int], None] | None = None,
) -> Table:
    """Make the caches of runs and traces with all their tables; return a row for each.

    A run with a complete cache is ``up to date`` and is not read again, so call it again to resume.
    A run that can't be read is ``failed``, the others continue. Rows are in the order of the paths.

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
    absolute = [os.path.abspath(path) for path in found]
    made = in_ray(absolute, jobs) if engine == "ray" else in_processes(absolute, jobs or cores())
    with contextlib.closing(made) as outcomes:
        for at, outcome in outcomes:
            rows[at] = _row(outcome, found[at])
            if progress is not None:
                progress(len(rows), len(found))
    return Table("ingest", _COLUMNS, [rows[at] for at in sorted(rows)])


def _found(paths: Sequence[str | Path], jobs: object, engine: object) -> list[str]:
    """Return all runs and traces once, by their first spelling, unless an argument is wrong."""
    if isinstance(paths, str | Path):
        raise ConfigError(f"paths: {local_path(paths)} is one path; ingest takes a list of paths")
    if jobs is not None and (not isinstance(jobs, int) or jobs < 1):
        raise ConfigError(f"jobs={jobs!r} must be a whole number from 1 on, or None")
    if engine not in get_args(Engine):
        raise ConfigError(f"unknown engine {engine!r} (allowed: {', '.join(get_args(Engine))})")
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


def _row(outcome: Outcome, path: str) -> tuple[Cell, ...]:
    """Return a row with the path as it was given."""
    return outcome._replace(path=path, why=outcome.why and outcome.why.replace(outcome.path, path))


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
    cache = find(path, made_of) or place(path, made_of, spans)
    tables = dict(spans.tables)
    del spans  # The tables need this memory, but not the spans.
    unread = _add_tables(cache, tables, is_large=_size(path) > _LARGE)
    if is_run(path) and _size(path) > _LARGE:
        _add_answers(cache, path)
    return Kept(cache, True, unread)


def _add_answers(cache: Cache, path: Path) -> None:
    """Let the cache keep the first screen and the report, which take seconds of a large run.

    Of a run with captures it keeps only the first screen: what they hold can take minutes.
    """
    # Only large runs need the analyses.
    from lightning_rlprof.report.html.page import keep_report
    from lightning_rlprof.report.summary import lead_tables, summary, without_captures

    spans = cached_spans(cache, path, load)
    try:
        if spans is not None:
            summary(spans)
            lead_tables(spans)
            if without_captures(spans) is spans:
                keep_report(spans)
    except Exception as error:  # The command that shows it reports it, too.
        log.warning("%s: its summary failed: %s", path, described(error))


def _read(path: Path, progress: Callable[[int, int], None] | None) -> Spans:
    """Read it with all that its tables need: a Chrome trace in one pass instead of two."""
    if os.path.isfile(path) and identify(path) == "kineto":
        return read_kineto(path, every=True)
    return load(path, progress=progress)


def ingest_one(path: str) -> Outcome:
    """Return what came of `keep`; nothing is raised but what ends the process."""
    start = time.perf_counter()
    try:
        kept = keep(Path(path))
        rows = row_count(filter(Path.exists, map(kept.cache.file, kept.cache.tables)))
        facts, read = kept.cache.facts() or {}, _size(Path(path))
    except TraceError as error:
        return lost(path, str(error), time.perf_counter() - start)
    except OSError as error:
        why = f"{error.filename}: its cache cannot be written ({error.strerror})"
        why += "; without one, rlprof sql, show and summary read it"
        return lost(path, why, time.perf_counter() - start)
    except Exception as error:  # A bug costs only this file, and is reported.
        why = described(error)
        return lost(path, why, time.perf_counter() - start)
    seconds = time.perf_counter() - start
    state: _State = "failed" if kept.unread else "cached" if kept.new else "up to date"
    have = {rank for rank, _ in facts.get("headers", [])}
    warnings = [  # Files of one rank each often have the same one.
        text if rank is None or have == {rank} else f"rank {rank}: {text}"
        for rank, text, *_ in facts.get("warnings", [])
    ]
    doubts = first_of([*kept.unread, *warnings]) or None
    ranks = as_ranges(have)
    return Outcome(path, ranks, state, doubts, rows, read, seconds)


def lost(path: str, why: str, seconds: float | None = None) -> Outcome:
    """Return the row of a run or trace that could not be read; its name may tell the rank."""
    rank = rank_in_name(Path(path).name)
    ranks = None if rank is None else str(rank)
    return Outcome(path, ranks, "failed", " ".join(why.split()), None, None, seconds)


def _add_tables(
    cache: Cache, tables: dict[str, Callable[[], Table]], *, is_large: bool
) -> list[str]:
    """Add the tables that lack, and let go of each: the last one is written without the trace."""
    unread = []
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
                unread.append(f"table {name}: {error}")
    return unread


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files of a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(size for _, size, _, _ in sources(path))


class _Worker(NamedTuple):
    """A process, the end of its pipe that is ours, and which path it is at."""

    process: "subprocess.Popen[bytes]"
    pipe: "Connection[Any, Any]"
    at: int


def in_processes(paths: Sequence[str], jobs: int) -> Generator[tuple[int, Outcome], None, None]:
    """Yield what came of each path, with its number, as soon as it is known.

    A process that dies costs the path that it was at; another one takes its place. To leave early
    ends the processes; what they were at is not made. On Windows, this process reads one by one.

    Args:
        paths: What `ingest_one` takes.
        jobs: Processes at once, each of one thread.
    """
    if not IS_POSIX:  # A process of Windows does not take over the end of a pipe.
        yield from enumerate(map(ingest_one, paths))
        return
    left = iter(enumerate(paths))
    workers: dict[Any, _Worker] = {}
    try:
        for at, path in left:
            workers |= _given(_started(), at, path)
            if len(workers) == jobs:
                break
        while workers:
            for pipe in wait(list(workers)):
                worker = workers.pop(pipe)
                outcome, alive = _answer(worker, paths[worker.at])
                following = next(left, None)
                if following is not None:
                    workers |= _given(worker if alive else _started(), *following)
                elif alive:
                    _dismiss(worker)
                yield worker.at, outcome
    finally:
        for worker in workers.values():
            _stop(worker)


def _started() -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    with theirs:  # Only the child keeps this end open, so the pipe ends with the child.
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return _Worker(process, ours, -1)


def _given(worker: _Worker, at: int, path: str) -> dict[Any, _Worker]:
    with contextlib.suppress(OSError):  # If the process is dead, `_answer` reports how it died.
        worker.pipe.send(path)
    return {worker.pipe: worker._replace(at=at)}


def _answer(worker: _Worker, path: str) -> tuple[Outcome, bool]:
    """Return what a process says of its path, or how it died of it."""
    try:
        return worker.pipe.recv(), True
    except (EOFError, OSError):
        worker.pipe.close()
        return lost(path, f"its process died: {_end(worker.process.wait())}"), False


def _end(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    memory = ", probably because memory ran out" if -code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{memory}"


def _dismiss(worker: _Worker) -> None:
    """Let an idle process end: it does at the end of its pipe."""
    worker.pipe.close()
    worker.process.wait()


def _stop(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.terminate()
    try:
        worker.process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()


def _work(handle: int) -> None:
    """Take paths until the pipe ends, also where the process at its other end was killed."""
    # Exiting this way deletes half-written files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pipe: Connection[Any, Any] = Connection(handle)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(ingest_one(pipe.recv()))


def in_ray(
    paths: Sequence[str], jobs: int | None = None
) -> Generator[tuple[int, Outcome], None, None]:
    """Yield what came of each path, with its number, as soon as it is known.

    Joins the cluster that ``RAY_ADDRESS`` or this machine knows, else starts Ray here and ends it
    again. A worker that dies is replaced, and its file tried three times more; one that dies each
    time is a row. Caches are written where the files lie, so all workers must see these.

    Args:
        paths: What `ingest_one` takes; absolute.
        jobs: Most tasks at once, of one CPU each; unset, as many as Ray has room for.

    Raises:
        RlprofError: Ray is not installed, cannot be reached, or has no CPU for a task.
    """
    ray = _ray()
    started = _join_cluster(ray)
    try:
        if ray.cluster_resources().get("CPU", 0) < 1:
            raise RlprofError("the Ray cluster has no CPU for tasks; add a node that has one")
        yield from _mapped(ray, paths, jobs or _WAITING)
    finally:
        if started:
            ray.shutdown()


def _mapped(
    ray: Any, paths: Sequence[str], most: int
) -> Generator[tuple[int, Outcome], None, None]:
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_seen)
    left = iter(enumerate(paths))
    running: dict[Any, int] = {}
    is_free = ray.available_resources().get("CPU", 0) >= 1
    try:
        while True:
            while len(running) < most and (following := next(left, None)) is not None:
                running[task.remote(following[1])] = following[0]
            if not running:
                return
            done, _ = ray.wait(list(running), timeout=None if is_free else _PATIENCE_S)
            if not done:
                log.warning("no CPU of the Ray cluster is free: ingest waits for one")
            is_free = True
            for each in done:
                at = running.pop(each)
                yield at, _outcome(ray, each, paths[at])
    finally:
        for each in running:
            ray.cancel(each, force=True)


def _outcome(ray: Any, done: Any, path: str) -> Outcome:
    try:
        outcome: Outcome = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        last = _COLOUR.sub("", str(error)).strip().rpartition("\n")[2]
        return lost(path, f"its Ray worker cannot run ingest: {last}; on every node: {_GET}")
    except ray.exceptions.RayError as error:
        first = str(error).strip().partition("\n")[0]
        return lost(path, f"its Ray worker ended: {type(error).__name__}: {first}")
    return outcome


def _seen(path: str) -> Outcome:
    """Ingest a path on the worker, where it may not be there."""
    if os.path.exists(path):
        return ingest_one(path)
    host = socket.gethostname()
    return lost(
        path, f"host {host} cannot see it: ingest needs files on storage that all hosts share"
    )


def _join_cluster(ray: Any) -> bool:
    """Connect to a cluster unless connected; tell whether that, or Ray itself, is ours to end."""
    if ray.is_initialized():
        return False
    quiet = {"log_to_driver": False, "configure_logging": False}
    named = os.environ.get("RAY_ADDRESS")
    try:
        try:
            ray.init(address=named or "auto", **quiet)
        except ConnectionError:
            if named:
                raise
            ray.init(include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises errors of many types.
        text = str(error).strip().partition("\n")[0]
        raise RlprofError(f"Ray cannot be reached or started: {text}") from error
    return True


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        text = f"--engine ray needs Ray: {_GET}, or leave out --engine ray"
        raise RlprofError(text) from error
    return ray
