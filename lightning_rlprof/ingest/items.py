"""Which runs and traces lie below a path, by their names first: a broken one must not be missed."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend import is_ascend
from lightning_rlprof.loaders.kineto import is_chrome_trace, is_export
from lightning_rlprof.store.cache import FOLDER
from lightning_rlprof.tracefile import rank_files

__all__ = ["is_run", "items", "traces"]

# What one trace may lie there as, the form that is read where there are several first.
_FORMS = ((".json", ".json.gz", ".json.zst"), (".sqlite", ".nsys-rep"))
_SURE = (".trace.json", ".trace.json.gz", ".trace.json.zst", ".sqlite", ".nsys-rep")


def items(path: Path) -> list[Path]:
    """Return the runs and traces that a path stands for, sorted: itself, or what lies below it.

    A directory with rank files is one run, one of torch_npu's captures one trace; below any other,
    every such directory and every file that is a trace by its name or content. Also files that are
    none by content, where traces beside them have the same name but for digits. Links to
    directories are not followed.

    Raises:
        TraceError: There is no such path, or nothing to read below it.
    """
    if not path.exists():
        raise TraceError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [path]
    found = _below(path)
    if not found:
        raise TraceError(f"{path}: holds no run and no trace")
    return found


def traces(folder: Path) -> list[Path]:
    """Return the traces that are files of one folder, by name and each in one form; see `items`."""
    return _traces(path for path in folder.iterdir() if path.is_file())


def is_run(path: Path) -> bool:
    """Tell whether a path is a run that we recorded, or a part of one."""
    return path.suffix == ".jsonl" or (path.is_dir() and bool(rank_files(path)))


def _below(folder: Path) -> list[Path]:
    if rank_files(folder) or is_ascend(folder):
        return [folder]
    found = []
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and entry.name != FOLDER:
            found += _below(Path(entry.path))
    files = (path for path in (Path(entry.path) for entry in entries) if path.is_file())
    return [*_traces(files), *found]


def _traces(files: Iterable[Path]) -> list[Path]:
    """Return the traces among the files of one folder, each in one form."""
    forms: dict[tuple[str, int], tuple[int, Path]] = {}
    for path in files:
        for tool, endings in enumerate(_FORMS):
            for order, ending in enumerate(endings):
                if path.name.endswith(ending):
                    key = (path.name.removesuffix(ending), tool)
                    forms[key] = min(forms.get(key, (order, path)), (order, path))
    paths = sorted(path for _, path in forms.values())
    sure = {path for path in paths if path.name.endswith(_SURE) or _is_trace(path)}
    alike = {_pattern(path) for path in sure}
    return [path for path in paths if path in sure or _pattern(path) in alike]


def _is_trace(path: Path) -> bool:
    return is_chrome_trace(path) and not is_export(path)


def _pattern(path: Path) -> str:
    return re.sub(r"\d+", "0", path.name)
