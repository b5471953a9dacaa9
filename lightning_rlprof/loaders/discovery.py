"""Find the runs and traces below a path, and read a folder with one trace per rank.

Names are looked at before contents, so that a broken trace is reported and not missed.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import is_ascend, is_capture
from lightning_rlprof.loaders.ascend.trace_view import TRACE_NAMES
from lightning_rlprof.loaders.chrome_events import read_head
from lightning_rlprof.loaders.clocks import aligned
from lightning_rlprof.loaders.framework_logs import kind_of_log
from lightning_rlprof.loaders.join_ranks import as_one, is_cycle, join
from lightning_rlprof.loaders.kineto.reader import (
    MOST_RANKS,
    Distributed,
    is_chrome_trace,
    is_export,
)
from lightning_rlprof.loaders.kineto.trace import told
from lightning_rlprof.loaders.nsys import REPORTS, Export, read_ranges
from lightning_rlprof.loaders.rank_names import labels_of_verl, rank_in_name
from lightning_rlprof.loaders.sqlite_tables import is_sqlite
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import CACHE_FOLDER, rank_files
from lightning_rlprof.tables.spans import RunWarning, Spans

Format = Literal["rlprof", "ascend", "nsys", "kineto"]
NSYS_SUFFIXES = (".sqlite", *REPORTS)
"""Of Nsight Systems; an export is preferred to the report it was made from."""

KINETO_SUFFIXES = (".json", ".json.gz", ".json.zst")
"""Of torch.profiler and other writers of Chrome traces; plain files are preferred."""
_SURE = (".trace.json", ".trace.json.gz", ".trace.json.zst", *NSYS_SUFFIXES)


def told_ranks(path: Path) -> set[int]:
    """Return which ranks a trace is of, as far as it is told; nothing is guessed.

    Of a Chrome trace as torch wrote it before the events, which are not read; of an export of
    Nsight Systems as our own marks say it; else as the file's name does.
    """
    named = rank_in_name(path.name)
    try:
        if not is_sqlite(path):
            rank = told(read_head(path).top, "distributedInfo", Distributed, Distributed()).rank
            if 0 <= rank < MOST_RANKS:
                return {rank}
        elif named is None:  # A name saves reading all the ranges.
            return set(read_ranges(Export(path)).ranks.values())
    except TraceError:
        pass
    return set() if named is None else {named}


def read_ranks(
    files: Sequence[Path],
    read: Callable[[Path], Spans],
    progress: Callable[[int, int], None] | None = None,
) -> Spans | None:
    """Read traces that are of different ranks as one run; None where they are not known to be.

    Cycles of one process are one rank, see `is_cycle`. One that cannot be read is a problem of its
    rank. Raises the first reason where all are such. Clocks are compared as `aligned` does it. Each
    role of verl numbers its ranks from 0: ranks of a role are numbered behind those of the roles
    before it.

    Args:
        files: The traces; of two tools, they are not joined.
        read: Reads one.
        progress: Called after each with how many are read, and how many there are.
    """
    roles: dict[str, list[Path]] = {}
    for file in files:
        roles.setdefault(labels_of_verl(file.name)[0], []).append(file)
    if len(roles) > 1 and "" not in roles:
        runs = [
            read(own[0]) if len(own) == 1 else read_ranks(own, read, progress)
            for own in roles.values()
        ]
        known = [run for run in runs if run is not None]
        return as_one(known) if len(known) == len(runs) else None
    ranks = {file: told_ranks(file) for file in files}
    one_tool = len({file.suffix in NSYS_SUFFIXES for file in files}) == 1
    several = len(set().union(*ranks.values())) > 1
    if len(files) < 2 or not one_tool or (any(ranks.values()) and not all(ranks.values())):
        return None
    parts, broken = list[Spans](), dict[Path, TraceError]()
    for count, file in enumerate(files, start=1):
        try:
            part = read(file)
        except TraceError as error:
            broken[file] = error
        else:
            if not several and not all(is_cycle(part, each) for each in parts):
                return None
            parts.append(part)
        if progress is not None:
            progress(count, len(files))
    if not parts:
        raise broken[files[0]]
    if not several and len(parts) < 2:
        return None
    code = Code.RANK_UNREADABLE.value
    lost = [
        RunWarning(rank, str(why), code)
        for at, why in broken.items()
        for rank in (*ranks[at],) or (None,)
    ]
    return aligned(join(parts, lost))


class _Item(NamedTuple):
    """A run or trace, and whether it is a folder of nothing but captures of torch_npu."""

    path: Path
    captures: bool = False


def items(path: Path) -> list[Path]:
    """Return the runs and traces that a path stands for, sorted: itself, or what lies below it.

    A directory with rank files is one run, one that holds nothing but torch_npu's captures one
    trace; below any other, every such directory and every file that is a trace by its name or
    content. Beside traces also files that are none, to read which tells why: of their name but for
    digits, or of another rank by their name. So is what must not be
    looked at. Links to directories are not followed.

    Raises:
        TraceError: The path doesn't exist, or nothing below it can be read.
    """
    try:
        there, is_folder = path.exists(), path.is_dir()
    except PermissionError:
        return [path]
    if not there:
        raise TraceError(f"{path}: no such file or directory")
    if not is_folder:
        return [path]
    found = [item.path for item in _below(path)]
    if not found:
        raise TraceError(f"{path}: no run or trace found below it")
    return found


def traces(folder: Path) -> list[Path]:
    """Return the traces that are files of one folder, by name and each in one form; see `items`."""
    return _traces(Path(entry.path) for entry in os.scandir(folder) if _is_file(entry))


def is_run(path: Path) -> bool:
    """Tell whether a path is a run that we recorded, or a part of one."""
    if os.path.isdir(path):
        return bool(rank_files(path))
    return path.suffix == ".jsonl" and kind_of_log(path) is None


def _below(folder: Path) -> list[_Item]:
    """Return what lies at and below a folder; the folder itself where there are only captures."""
    try:
        if rank_files(folder):
            return [_Item(folder)]
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        if is_capture(folder):
            return [_Item(folder, captures=True)]
        files = (Path(entry.path) for entry in entries if _is_file(entry))
        found = [_Item(path) for path in _traces(files)]
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and entry.name != CACHE_FOLDER:
                found += _below(Path(entry.path))
        traces_here = {folder / name for name in TRACE_NAMES}
        if {item.path for item in found} <= traces_here and is_ascend(folder):
            return [_Item(folder)]  # These are the files of one capture.
        only_captures = found and all(item.captures for item in found)
        return [_Item(folder, captures=True)] if only_captures else found
    except OSError:
        return [_Item(folder)]


def _is_file(entry: "os.DirEntry[str]") -> bool:
    """Tell whether an entry is a file, or a link to one, which may be gone."""
    if not entry.is_symlink():
        return entry.is_file()
    return os.path.isfile(entry.path) or not os.path.exists(entry.path)


def _traces(files: Iterable[Path]) -> list[Path]:
    """Return the traces among the files of one folder, each in one form, and broken ones."""
    there, found = [*files], list[Path]()
    for endings in (KINETO_SUFFIXES, NSYS_SUFFIXES):
        forms: dict[str, tuple[int, Path]] = {}
        for path in there:
            for order, ending in enumerate(endings):
                if path.name.endswith(ending):
                    stem = path.name.removesuffix(ending)
                    forms[stem] = min(forms.get(stem, (order, path)), (order, path))
        stems = {path: stem for stem, (_, path) in forms.items()}
        found += _of_one_tool(stems)
    return sorted(found)


def _of_one_tool(stems: dict[Path, str]) -> list[Path]:
    """Return the traces; where there are some, also files that are called as another rank's."""
    sure = {path for path in stems if path.name.endswith(_SURE) or _is_trace(path)}
    alike = {_pattern(stems[path]) for path in sure}
    ranks = {rank_in_name(path.name) for path in sure} - {None}

    def is_broken(path: Path) -> bool:
        rank = rank_in_name(path.name)
        is_other_rank = bool(ranks) and rank is not None and rank not in ranks
        return _pattern(stems[path]) in alike or is_other_rank

    return [path for path in stems if path in sure or (sure and is_broken(path))]


def _is_trace(path: Path) -> bool:
    with suppress(PermissionError):
        return is_chrome_trace(path) and not is_export(path)
    return False


def _pattern(stem: str) -> str:
    return re.sub(r"\d+", "0", stem)


def identify(path: Path) -> Format | None:
    """Return the format by name and content; None if nothing recognizes the path.

    A file with a suffix of Kineto has that format even if it is damaged: reading it says why.

    Raises:
        TraceError: The file cannot be read.
    """
    if path.suffix == ".jsonl":
        return "rlprof"
    if is_ascend(path):
        return "ascend"
    if path.suffix in NSYS_SUFFIXES or is_sqlite(path):
        return "nsys"
    if path.name.endswith(KINETO_SUFFIXES) or is_chrome_trace(path):
        return "kineto"
    return None
