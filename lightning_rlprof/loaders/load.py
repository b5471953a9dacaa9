"""The one door to a recorded run: `load(path)` finds the files and returns `Spans`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.native import read_run
from lightning_rlprof.spans import RankNote, Spans
from lightning_rlprof.tracefile import rank_files, read_header

__all__ = ["load"]


def load(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> Spans:
    """Read a run: its directory, one rank's file, or a save path with runs (then the newest).

    What is missing or doubtful is in ``Spans.problems``, it is no error.

    Args:
        path: What to read.
        progress: Called after each rank's file with (files read, files in all).

    Raises:
        TraceError: Nothing there can be read; the text says why.
    """
    path = Path(path)
    if path.is_file():
        return read_run(path, [path], progress)
    names = _entries(path)
    files = rank_files(path)
    if files:
        return read_run(path, files, progress)
    runs = [path / name for name in names if rank_files(path / name)]
    if not runs:
        raise TraceError(_no_run(path, names))
    newest = max(runs, key=lambda run: (_started_ns(run), run.name))
    spans = read_run(newest, rank_files(newest), progress)
    if len(runs) == 1:
        return spans
    text = f"{path} holds {len(runs)} runs; this is the newest, {newest.name}"
    return dataclasses.replace(spans, notes=(RankNote(None, 0, "info", text), *spans.notes))


def _entries(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file or directory") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error


def _no_run(path: Path, names: list[str]) -> str:
    if not names:
        return f"{path}: is an empty directory, where a run has rank-*.jsonl files"
    if rank_files(path.parent):
        return f"{path}: holds one rank's device files; the run is {path.parent}"
    return f"{path}: holds no run, that is no rank-*.jsonl files, nor a directory with them"


def _started_ns(run: Path) -> int:
    """Return when the first readable rank of a run started, -1 when none can be read."""
    for file in rank_files(run):
        try:
            return read_header(file).unix_ns
        except TraceError:
            continue
    return -1
