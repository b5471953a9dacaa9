"""Read a run or an external trace: `load(path)` finds the files and returns `Spans`.

`run_list` lists the runs of a directory, from the first and last lines of one file each.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.archives import is_archive, unpack
from lightning_rlprof.loaders.ascend.capture import is_ascend
from lightning_rlprof.loaders.ascend.reader import read_ascend
from lightning_rlprof.loaders.clocks import aligned
from lightning_rlprof.loaders.discovery import identify, items, read_ranks, traces
from lightning_rlprof.loaders.foreign_files import foreign, refuse_foreign
from lightning_rlprof.loaders.framework_logs import (
    SUFFIXES,
    Log,
    kind_of_log,
    read_sessions,
    read_slime,
    read_verl,
)
from lightning_rlprof.loaders.kineto.reader import read_kineto
from lightning_rlprof.loaders.native import from_traces, read_run
from lightning_rlprof.loaders.nsys import read_nsys
from lightning_rlprof.loaders.otlp import read_otlp
from lightning_rlprof.loaders.run_captures import with_kernels
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import Header
from lightning_rlprof.records.run_directory import RankReader, RankTrace, rank_files, read_header
from lightning_rlprof.system.location import RemotePath, place, redact
from lightning_rlprof.tables.spans import Spans, note_of, warning_of
from lightning_rlprof.tables.table import Cell, Column, Table

if TYPE_CHECKING:
    from lightning_rlprof.system.remote_files import Fetched

_FEW = 8
_COLUMNS = (
    Column("run", "text"),
    Column("state", "text"),
    Column("steps", "count"),
    Column("step", "duration", "ns"),
    Column("ranks", "count"),
    Column("started", "text"),
    Column("device", "text"),
    Column("size", "count", "bytes"),
)
_LOG_READERS: Mapping[Log, Callable[[Sequence[Path]], list[RankTrace]]] = {
    "areal": read_sessions,
    "slime": read_slime,
    "verl": read_verl,
    "OpenTelemetry": read_otlp,
}
_UNKNOWN = "not a run or trace, by its name and its first bytes. See rlprof help inputs"
_MAX_FILES_LOOKED_AT = 64  # The first of them tell what a directory without traces holds.
_MAX_TAIL_BYTES = 65_536
_MAX_RANKS_LOOKED_AT = 64  # These ranks suffice to show the roles of a run.
_RUNNING_S = 60  # A file that changed this recently belongs to a training that runs.


def load(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> Spans:
    """Read a run: its directory, one rank's file, or an output directory (then the newest run).

    Or read an external trace: a report of Nsight Systems or its SQLite export, a torch.profiler
    trace, captures of torch_npu.profiler, or a directory with one trace, or with one per rank. Or
    read spans of OpenTelemetry, or the logs of a framework. Data that is missing or doubtful is
    listed in ``Spans.warnings``; it does not raise.

    Args:
        path: What to read; a URL such as s3://bucket/run is fetched first (docs/remote.md).
        progress: Called after each file with (files read, files in all).

    Raises:
        TraceError: Nothing there can be read; the text says why.
    """
    path = place(path)
    if isinstance(path, RemotePath):
        return read_remote(path, lambda here: load(here, progress=progress))
    if os.path.isfile(path):
        return _read_file(path, progress)
    names = _entries(path)
    if rank_files(path):
        return _read_run(path, progress)
    runs = [path / name for name in names if rank_files(path / name)]
    if not runs:
        return _read_traces(path, names, progress)
    newest = newest_run(path)
    spans = _read_run(newest, progress)
    if len(runs) == 1:
        return spans
    text = f"{path} contains {len(runs)} runs; this is the newest, {newest.name}"
    note = note_of(None, Code.NEWEST_OF_SEVERAL, text, runs=len(runs))
    return dataclasses.replace(spans, notes=(note, *spans.notes))


def read_remote(path: RemotePath, read: Callable[[Path], Spans]) -> Spans:
    """Fetch a run and read it; the copies are deleted with the last table of the run.

    Raises:
        TraceError: As `fetch` and ``read``; the text names the URL.
    """
    from lightning_rlprof.system.remote_files import fetch

    return _read_copies(path, fetch(path), read, "copied")


def _read_archive(path: Path, progress: Callable[[int, int], None] | None) -> Spans:
    """Read what is in an archive: one run or trace, or one trace per rank."""

    def read(folder: Path) -> Spans:
        try:
            found = items(folder)
        except TraceError as error:
            names = [str(each.relative_to(folder)) for each in sorted(folder.rglob("*"))]
            raise TraceError(_no_run(folder, [], names)) from error
        places = {each.parent for each in found}
        if len(found) == 1 or len(places) == 1:
            return load(found[0] if len(found) == 1 else places.pop(), progress=progress)
        run = read_ranks(found, _read_trace, progress) if all(map(os.path.isfile, found)) else None
        if run is None:
            raise TraceError(_no_run(folder, found, []))
        return run

    unpacked, remarks = unpack(path)
    spans = _read_copies(path, unpacked, read, "unpacked")
    lost = (warning_of(None, text, Code.TRACE_DOUBTFUL) for text in remarks)
    return dataclasses.replace(spans, warnings=(*spans.warnings, *lost))


def _read_copies(path: Path, copies: "Fetched", read: Callable[[Path], Spans], how: str) -> Spans:
    from lightning_rlprof.system.remote_files import files_text, size_text

    text = ""
    try:
        spans = read(copies.path)
    except TraceError as error:
        text = str(error).replace(str(copies.path), str(path))
    if text:  # In the handler, a chained error would name the copy.
        copies.close()
        raise TraceError(text)
    said = f"{path}: {files_text(copies.files)}, {size_text(copies.size)}, {how} to read it"
    return dataclasses.replace(
        spans,
        path=path,
        notes=(note_of(None, Code.RUN_COPIED, said), *spans.notes),
        tables={name: partial(_made, copies, make) for name, make in spans.tables.items()},
    )


def _made(fetched: "Fetched", make: Callable[[], Table]) -> Table:
    """Make a table while its files are sure to be there."""
    assert fetched.close.alive
    return make()


def _read_run(run: Path, progress: Callable[[int, int], None] | None) -> Spans:
    return aligned(with_kernels(read_run(run, rank_files(run), progress), run))


def _read_file(path: Path, progress: Callable[[int, int], None] | None) -> Spans:
    """Read one file by what is in it; the rank files of a run need no look."""
    if is_archive(path):
        return _read_archive(path, progress)
    if kind := kind_of_log(path):
        return _read_logs(path, {kind: [path]})
    format_ = identify(path)
    if format_ == "rlprof":
        return with_kernels(read_run(path, [path], progress), path.parent)
    if format_ != "ascend":
        refuse_foreign(path)
    if format_ is None:
        return _read_unnamed(path, progress)
    spans = aligned(read_ascend(path)) if format_ == "ascend" else _read_trace(path)
    if progress is not None:
        progress(1, 1)
    return spans


def _read_unnamed(path: Path, progress: Callable[[int, int], None] | None) -> Spans:
    """Read a rank file whose name does not show that it is one."""
    try:
        read_header(path)
    except TraceError as error:
        raise TraceError(f"{path}: {_UNKNOWN}") from error
    return read_run(path, [path], progress)


def _read_traces(
    path: Path, names: list[str], progress: Callable[[int, int], None] | None
) -> Spans:
    """Read what device tools wrote into a directory without a run: one trace, or one per rank."""
    if is_ascend(path):
        return _read_file(path, progress)
    if rank_files(path.parent):
        text = f"{path}: contains the captures of one rank; the run is {path.parent}"
        raise TraceError(text)
    files = traces(path)
    if not files and (logs := _logs(path, names)):
        return _read_logs(path, logs)
    if len(files) == 1:
        return _read_file(files[0], progress)
    run = read_ranks(files, _read_trace, progress) if files else None
    if run is None:
        raise TraceError(_no_run(path, files, names))
    return dataclasses.replace(run, path=path)


def _logs(path: Path, names: list[str]) -> dict[Log, list[Path]]:
    """Return the logs of frameworks in a directory by their kind."""
    found: dict[Log, list[Path]] = {}
    for name in sorted(names):
        file = path / name
        if name.endswith(SUFFIXES) and file.is_file() and (kind := kind_of_log(file)):
            found.setdefault(kind, []).append(file)
    return found


def _read_logs(path: Path, logs: dict[Log, list[Path]]) -> Spans:
    """Read logs of one kind together."""
    if len(logs) > 1:
        raise TraceError(f"{path}: contains logs of {' and '.join(logs)}; pass those of one")
    kind, files = next(iter(logs.items()))
    return aligned(from_traces(path, _LOG_READERS[kind](files)))


def _read_trace(path: Path) -> Spans:
    refuse_foreign(path)
    readers = {"ascend": read_ascend, "nsys": read_nsys}
    return readers.get(identify(path) or "", read_kineto)(path)


def _no_run(path: Path, files: list[Path], names: list[str]) -> str:
    if files:
        some = ", ".join(str(file.relative_to(path)) for file in files[:_FEW])
        some += f" and {len(files) - _FEW} more" if len(files) > _FEW else ""
        text = f"{path}: contains {len(files)} traces, pass one of them: {some}"
        return f"{text}. To read them as one run, pass all with --as-one"
    for file in filter(os.path.isfile, map(path.joinpath, names[:_MAX_FILES_LOOKED_AT])):
        if is_archive(file):
            return f"{path}: no run or trace in it, but an archive: pass {file}"
        if what := foreign(file):
            return f"{path}: no run or trace in it; {file.name}: {what}"
    if names:
        return f"no run or trace in {path} (expected rank-*.jsonl or a profiler trace)"
    return f"{path}: empty directory (expected rank-*.jsonl or a profiler trace)"


def _entries(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except FileNotFoundError as error:
        raise TraceError(f"{redact(str(path))}: no such file or directory") from error
    except NotADirectoryError as error:
        raise TraceError(f"{path}: not a regular file") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def run_directory(path: Path) -> Path:
    """Return the run that a path stands for: itself, that of a rank's file, or the newest below.

    Raises:
        TraceError: There is none.
    """
    run = path.parent if path.is_file() else newest_run(path)
    if not rank_files(run):
        raise TraceError(f"{path}: is not a run of rlprof: it has no rank-*.jsonl")
    return run


def newest_run(path: Path) -> Path:
    """Return the newest run of a directory of runs; the path itself if it is none."""
    runs = [] if rank_files(path) or not path.is_dir() else filter(rank_files, path.iterdir())
    return max(runs, key=lambda run: (_started_ns(run), run.name), default=path)


def run_before(run: Path, may_read: Callable[[Path], bool]) -> Path | None:
    """Return the run in the same directory that started last before this one, if there is one.

    Args:
        run: Its directory.
        may_read: Whether another run may be looked at.
    """
    started = _started_ns(run)
    beside = filter(may_read, run.absolute().parent.iterdir() if started > 0 else ())
    starts = ((_started_ns(each), each) for each in beside)
    return max((pair for pair in starts if 0 <= pair[0] < started), default=(0, None))[1]


def _started_ns(run: Path) -> int:
    """Return when the first readable rank of a run started, -1 when none can be read."""
    for file in rank_files(run):
        try:
            return read_header(file).unix_ns
        except TraceError:
            continue
    return -1


def run_list(folder: Path) -> Table:
    """List the runs of a directory, newest first, or the one run that it is.

    ``steps``, ``step``, the mean time of a step, and ``state`` are those of the lowest rank of the
    role with the most steps. ``state`` is ``finished``, ``running``, ``truncated``, or how the
    training was interrupted.

    Raises:
        TraceError: The directory contains no run.
    """
    folder = folder.absolute()
    found = [folder] if rank_files(folder) else sorted(folder.iterdir())
    runs = [entry for entry in found if rank_files(entry)]
    if not runs:
        raise TraceError(f"{folder} contains no run")
    rows = sorted(map(_row, runs), key=lambda row: (row[5] or "", row[0]), reverse=True)
    return Table("runs", _COLUMNS, rows)


def _row(run: Path) -> tuple[Cell, ...]:
    files = rank_files(run)
    total = sum(file.stat().st_size for file in files)
    try:
        trace = _leading(files)
    except (TraceError, OSError) as error:
        return (run.name, f"not readable: {error}", *(None,) * 2, len(files), *(None,) * 2, total)
    steps, took, header = None, None, trace.header
    ended = [line for line in trace.spans if line.kind == "step"]
    if ended:
        first, last = (pick(ended, key=lambda line: line.step) for pick in (min, max))
        steps = last.step - first.step + 1
        took = (last.end_ns - first.start_ns) // steps
    ranks = len(files)
    state = trace.status or _state(trace.path)
    if ranks < header.world_size and state == "finished":
        state = f"{header.world_size - ranks} of {header.world_size} ranks are missing"
    return (run.name, state, steps, took, ranks, _started(header), header.hardware, total)


def _leading(files: Sequence[Path]) -> RankTrace:
    """Return the ends of the lowest rank whose role has the most steps: rollouts may have fewer."""
    by_role: dict[str, Path] = {}
    for file in files[:_MAX_RANKS_LOOKED_AT]:
        with suppress(TraceError, OSError):
            by_role.setdefault(read_header(file).role, file)
    found = [_ends(file) for file in [*by_role.values()] or files[:1]]
    steps = [
        max((each.step for each in one.spans if each.kind == "step"), default=0) for one in found
    ]
    return found[steps.index(max(steps))]


def _ends(file: Path) -> RankTrace:
    reader = RankReader(file)
    reader.read(_MAX_TAIL_BYTES)  # It reads the end, and the beginning, too.
    return reader.whole()


def _state(file: Path) -> str:
    age = time.time() - file.stat().st_mtime
    return "running" if age < _RUNNING_S else "truncated"


def _started(header: Header) -> str:
    moment = datetime.fromtimestamp(header.unix_ns / 1e9, timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M}"
