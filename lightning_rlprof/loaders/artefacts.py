"""What device tools left in a run's directory, put together as the run's table of kernels."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend import ascend_tables, read_ascend_kernels
from lightning_rlprof.loaders.attribution import NOWHERE, Launches, Stages, stages_at
from lightning_rlprof.loaders.captures import capture_tables
from lightning_rlprof.loaders.dated import kernels_on_run, table_on_run
from lightning_rlprof.loaders.kernels import (
    COLUMNS,
    UNKNOWN,
    Kernels,
    distinct,
    join,
    kernel_table,
)
from lightning_rlprof.loaders.nsys import read_kernels as read_nsys_kernels
from lightning_rlprof.loaders.ranks import rank_in_name
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Table
from lightning_rlprof.tracefile import rank_directory

__all__ = ["device_files", "with_kernels"]

# What each tool writes, in the order of preference where one thing lies there in several forms:
# plain before packed, exported before what only nsys itself reads.
_CHROME = (".trace.json", ".trace.json.gz")
_ASCEND = "*_ascend_pt"  # a directory per capture
_TOOLS = (_CHROME, (".sqlite", ".nsys-rep"))


def device_files(folder: Path, *, deep: bool = False) -> list[Path]:
    """Return the traces of device tools in a folder by name, each in one form only.

    Args:
        folder: Where to look.
        deep: Look into the folders inside, too; links are not followed.
    """
    found: dict[tuple[str, int], Path] = {}
    for tool, forms in enumerate(_TOOLS):
        for form in forms:
            for path in folder.rglob(f"*{form}") if deep else folder.glob(f"*{form}"):
                if path.is_file() and not path.is_symlink():
                    found.setdefault((str(path).removesuffix(form), tool), path)
    return sorted(found.values())


def with_kernels(spans: Spans, run: Path) -> Spans:
    """Return a run's spans with the tables of what device tools recorded of it.

    The kernels of all tools are one table; for the others see `capture_tables`. The files are read
    when a table is asked for. Kernels come onto the run's axis by wall clock;
    where a tool saw none of our ranges, stage and step are those of the run's own spans at the
    launch. A file that cannot be read is named in the table's note.

    Args:
        spans: The run.
        run: Its directory.
    """
    files = {path: rank_in_name(path.name) for path in device_files(run)}
    captures: dict[Path, int] = {}
    for rank in spans.ranks:
        folder = rank_directory(run, rank)
        files |= dict.fromkeys(device_files(folder, deep=True), rank)
        found = sorted(folder.rglob(_ASCEND), key=lambda path: (path.is_symlink(), path))
        once = {path.resolve(): path for path in reversed(found)}  # a link to one here is no other
        captures |= dict.fromkeys(sorted(once.values()), rank)
    if not files and not captures:
        return spans
    others = ascend_tables(captures, spans.unix_ns, partial(_fill_by_wall_clock, spans))
    if spans.wall_off:
        others = {name: partial(table_on_run, spans, read) for name, read in others.items()}
    others = capture_tables(files, spans, others, _is_chrome)
    every = {**files, **captures}
    tables = {**spans.tables, **others, "kernels": lambda: _kernels(spans, every)}
    return replace(spans, tables=tables)


def _is_chrome(path: Path) -> bool:
    return path.name.endswith(_CHROME)


def _kernels(spans: Spans, files: Mapping[Path, int | None]) -> Table:
    parts, remarks = [], []
    for path, rank in files.items():
        try:
            part, own = _read(path, rank, spans)
        except TraceError as error:
            remarks.append(str(error))
            continue
        parts.append(part)
        remarks += [f"{path.name}: {text}" for text in own]
    if not parts:
        return Table("kernels", COLUMNS, abstained="; ".join(remarks))
    return kernel_table(join(parts), note="; ".join(remarks))


def _read(path: Path, rank: int | None, spans: Spans) -> tuple[Kernels, list[str]]:
    """Read one file's kernels onto the run's axis."""
    if path.is_dir():
        kernels, unix_ns, remarks = read_ascend_kernels(path)
        told = np.full(len(kernels.rank), -1)
    elif _is_chrome(path):
        from lightning_rlprof.loaders.kineto import read_kernels

        kernels, unix_ns, remarks = read_kernels(path)
        told = np.full(len(kernels.rank), -1)  # the folder knows better than the trace
    else:
        kernels, unix_ns, remarks = read_nsys_kernels(path)
        told = kernels.rank
    if not len(kernels.rank):
        remarks = ["holds no kernels", *remarks]
    if not unix_ns:
        raise TraceError(f"{path}: is left out: when it was recorded is not known")
    if rank is None and (told < 0).any():
        raise TraceError(f"{path}: is left out: nothing says which rank it is of")
    kernels = replace(kernels, rank=np.where(told < 0, rank or 0, told))
    whose = int(kernels.rank[0]) if rank is None and len(kernels.rank) else rank
    kernels = kernels_on_run(spans, whose, unix_ns, kernels)
    filled, count = _fill(kernels, spans)
    return filled, [*remarks, *([f"{count} launches count to the run's spans"] if count else [])]


def _fill_by_wall_clock(spans: Spans, kernels: Kernels) -> Kernels:
    """Do the same for kernels of one capture that lie on the axis of the run by wall clock."""
    rank = int(kernels.rank[0]) if len(kernels.rank) else None
    filled, _ = _fill(kernels_on_run(spans, rank, spans.unix_ns, kernels), spans)
    return replace(kernels, stage=filled.stage, step=filled.step)


def _fill(kernels: Kernels, spans: Spans) -> tuple[Kernels, int]:
    """Take stage and step from the run's spans for ranks of which the tool knows neither."""
    codes, texts = kernels.stage
    told = kernels.rank[(codes >= 0) | (kernels.step > 0)]
    if kernels.launch_ns is None:
        return kernels, 0
    blank = (kernels.launch_ns != UNKNOWN) & ~np.isin(kernels.rank, told)
    rows = (spans.rank, spans.thread, spans.kind, spans.name, spans.step, spans.start_ns)
    anywhere = np.full(len(blank), NOWHERE)
    launches = Launches(np.where(blank, kernels.rank, NOWHERE), anywhere, kernels.launch_ns)
    found = stages_at(Stages(*rows, spans.end_ns), launches)
    own = np.where(found.stage < 0, -1, found.stage + len(texts))
    stage = distinct(np.where(blank, own, codes), [*texts, *spans.names])
    step = np.where(blank, found.step, kernels.step)
    return replace(kernels, stage=stage, step=step), int(np.count_nonzero(blank))
