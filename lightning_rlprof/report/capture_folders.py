"""Captures of a run in the folders that other viewers expect: all ranks of a capture in one.

TensorBoard's plugin for torch.profiler takes a folder for a run, and reads worker and time from the
name of each trace. MindStudio Insight takes a folder for a cluster, with one ``*_ascend_pt`` folder
per rank; several captures of one rank in it are mixed up.

Files are hard links where the file system has them, so that they take no disk.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import OUTPUT
from lightning_rlprof.loaders.run_captures import device_files
from lightning_rlprof.records.records import Header
from lightning_rlprof.records.run_directory import (
    capture_in_name,
    is_inside,
    mode_made_of,
    rank_directory,
    rank_files,
    read_header,
)
from lightning_rlprof.system.files import new_folder

_TRACE = re.compile(r"(?:\.pt)?\.trace\.json(\.gz)?$")
_WHOLE_STEPS = "steps"
_NO_CAPTURES = "contains no captures of {}"


class _Window(NamedTuple):
    """A capture of one rank: its folder, and what the folder's name says."""

    header: Header
    folder: Path
    step: int
    stage: str


def tensorboard_folders(run: Path, out: Path) -> list[Path]:
    """Write the traces of torch.profiler for TensorBoard, a folder per stage; return them.

    Names are ``<role>_<host>_<rank>.<step>.pt.trace.json.gz``: the plugin shows a folder as a run,
    what precedes the first dot as a worker, and the number as a span. Of several traces of a rank
    in one step, the later ones have more digits.

    Raises:
        TraceError: The run is not a run directory, or has no such captures.
        OSError: The folder cannot be written.
    """
    written: dict[Path, int] = {}
    mode = mode_made_of(run)
    for window in _windows(run):
        folder = out / (window.stage or _WHOLE_STEPS)
        _make(folder, mode)
        header = window.header
        words = (header.role, header.host, str(header.rank))
        worker = "_".join(re.sub(r"[^0-9A-Za-z-]+", "-", word) for word in words)
        for path in device_files(window.folder):
            if not (found := _TRACE.search(path.name)):
                continue
            first = folder / f"{worker}.{window.step:06d}"
            number = written[first] = written.get(first, 0) + 1
            more = f"{number:02d}" if number > 1 else ""
            _put(path, folder / f"{first.name}{more}.pt.trace.json{found[1] or ''}")
    if not written:
        raise TraceError(f"{run} {_NO_CAPTURES.format('torch.profiler')}")
    return sorted({first.parent for first in written})


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
        for capture in sorted(window.folder.glob("*_ascend_pt")):
            if not is_inside(run, capture):
                continue
            if not any((capture / OUTPUT).glob("*")):
                raw.append(capture)
                continue
            folder = out / window.folder.name
            _make(folder, mode)
            folders.add(folder)
            for path in (*capture.glob("profiler_*.json"), *(capture / OUTPUT).rglob("*")):
                if path.is_file():
                    _put(path, folder / capture.name / path.relative_to(capture))
    if not folders and not raw:
        raise TraceError(f"{run} {_NO_CAPTURES.format('torch_npu.profiler')}")
    return sorted(folders), raw


def _windows(run: Path) -> Iterator[_Window]:
    """Yield the captures of each rank, by rank and step."""
    files = rank_files(run) if run.is_dir() else []
    if not files:
        raise TraceError(f"{run} is not a run directory of rlprof")
    for file in files:
        folder = rank_directory(run, int(file.stem[5:]))
        header = read_header(file)
        for path in sorted(folder.glob("step-*")):
            capture = capture_in_name(path.name)
            if capture and path.is_dir() and is_inside(run, path):
                yield _Window(header, path, *capture)


def _make(folder: Path, mode: int | None) -> None:
    """Make the folder of an export, and the one that it is in, which the run's readers may open."""
    new_folder(folder.parent, mode)
    new_folder(folder, mode)


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if source.suffix != ".db":
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copy2(source, target)
