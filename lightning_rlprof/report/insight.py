"""Captures of a run in the folders that MindStudio Insight takes.

Insight takes a folder for a cluster, with one ``*_ascend_pt`` folder per rank; several captures of
one rank in it are mixed up. Files are hard links where the file system has them, so that they take
no disk.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import OUTPUT
from lightning_rlprof.records.run_directory import (
    capture_in_name,
    is_inside,
    mode_made_of,
    rank_directory,
    rank_files,
)
from lightning_rlprof.system.files import new_folder


def insight_folders(run: Path, out: Path) -> tuple[list[Path], list[Path]]:
    """Write the parsed captures of torch_npu for MindStudio Insight, a folder per capture.

    Each contains the ``*_ascend_pt`` folders of all ranks, with what Insight reads: parsed files
    and the description of the capture. Raw data is left out: a database in it would hide the text
    format. Databases are copied, since Insight adds tables to them.

    Returns:
        The folders, and the captures that are left out because they are not parsed.

    Raises:
        TraceError: The run is not a run directory, or has no such captures.
        OSError: The folder cannot be written.
    """
    folders: set[Path] = set()
    mode = mode_made_of(run)
    raw: list[Path] = []
    for window in _windows(run):
        for capture in sorted(window.glob("*_ascend_pt")):
            if not is_inside(run, capture):
                continue
            if not any((capture / OUTPUT).glob("*")):
                raw.append(capture)
                continue
            folder = out / window.name
            new_folder(out, mode)
            new_folder(folder, mode)
            folders.add(folder)
            for path in (*capture.glob("profiler_*.json"), *(capture / OUTPUT).rglob("*")):
                if path.is_file():
                    _put(path, folder / capture.name / path.relative_to(capture))
    if not folders and not raw:
        raise TraceError(f"{run} contains no captures of torch_npu.profiler")
    return sorted(folders), raw


def _windows(run: Path) -> Iterator[Path]:
    """Yield the folders of captures, by rank and step."""
    files = rank_files(run) if run.is_dir() else []
    if not files:
        raise TraceError(f"{run} is not a run directory of rlprof")
    for file in files:
        for path in sorted(rank_directory(run, int(file.stem[5:])).glob("step-*")):
            if capture_in_name(path.name) and path.is_dir() and is_inside(run, path):
                yield path


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if source.suffix != ".db":
        try:
            os.link(source, target)
            return
        except OSError:  # The target is on another file system, or links are not supported.
            pass
    shutil.copy2(source, target)
