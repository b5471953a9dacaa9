"""Add the tables of the captures in a run's directory: kernels, copies, collectives, and so on.

A capture is what a profiler wrote there. Its times are put on the run's timeline. Without marks of
its own, its kernels get stage and step from the spans of the run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.reader import ascend_tables, read_ascend_kernels
from lightning_rlprof.loaders.clocks import (
    kernels_on_run,
    on_run,
    shift_times,
)
from lightning_rlprof.loaders.discovery import NSYS_SUFFIXES
from lightning_rlprof.loaders.host_calls import NOWHERE, Found, Launches, Stages, stages_at
from lightning_rlprof.loaders.join_ranks import Piece, join_tables
from lightning_rlprof.loaders.kineto.reader import read_kernels as read_kineto_kernels
from lightning_rlprof.loaders.kineto.reader import read_kineto
from lightning_rlprof.loaders.nsys import read_kernels as read_nsys_kernels
from lightning_rlprof.loaders.nsys import read_nsys
from lightning_rlprof.loaders.rank_names import rank_in_name
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.records.run_directory import is_inside, rank_directory
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import (
    COLUMNS,
    UNKNOWN,
    Kernels,
    distinct,
    join,
    kernel_table,
    known,
)
from lightning_rlprof.tables.spans import RunWarning, Spans
from lightning_rlprof.tables.table import ColumnRows, Loss, Table, with_name

_KINETO_TABLES = ("memcpy", "collectives", "calls", "memory", "counters", "shapes")
_NSYS_TABLES = ("memcpy", "sync", "gpu_metrics")
_MARKING = (KINDS.index("stage"), KINDS.index("step"))

# What each tool writes, in the order of preference where one thing lies there in several forms:
# plain before packed, exported before what only nsys itself reads.
_CHROME = (".trace.json", ".trace.json.gz")
_TOOLS = (_CHROME, NSYS_SUFFIXES)


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


def _is_chrome(path: Path) -> bool:
    return path.name.endswith(_CHROME)


def with_kernels(spans: Spans, run: Path) -> Spans:
    """Return a run's spans with the tables of what device tools recorded of it.

    Files are read when the first of their tables is asked for, and come onto the run's axis by wall
    clock. So a table may turn out to be in none of them; it abstains then. Where a capture marks
    neither stages nor steps, they are those of the run's own spans at the launch, or at the start
    in a table without launches. A file that cannot be read, or whose time or rank is unknown, is
    named in the table's note.

    Args:
        spans: The run.
        run: Its directory.
    """
    files: dict[Path, int | None] = {
        path: rank_in_name(path.name) for path in device_files(run)
    }  # without a rank in the name only its processes may tell it
    captures: dict[Path, int] = {}
    outside: list[RunWarning] = []
    for rank in spans.ranks:
        folder = rank_directory(run, rank)
        if not folder.is_dir():
            continue
        if not is_inside(run, folder):
            outside.append(_left_out(rank, folder))
            continue
        files |= dict.fromkeys(device_files(folder, deep=True), rank)
        found = sorted(folder.rglob("*_ascend_pt"), key=lambda path: (path.is_symlink(), path))
        outside += [_left_out(rank, path) for path in found if not is_inside(run, path)]
        # A link to one here is the same one.
        once = {path.resolve(): path for path in reversed(found) if is_inside(run, path)}
        captures |= dict.fromkeys(sorted(once.values()), rank)
    spans = replace(spans, warnings=(*spans.warnings, *outside)) if outside else spans
    if not files and not captures:
        return spans
    tables = ascend_tables(captures, spans.unix_ns, partial(_fill_shifted_kernels, spans))
    if spans.wall_off:
        shift = partial(on_run, spans, spans.unix_ns)
        tables = {name: partial(shift_times, read, shift) for name, read in tables.items()}
    read_once = cache(lambda path: _read_capture(path, files[path]))
    tables_of = (_KINETO_TABLES if _is_chrome(path) else _NSYS_TABLES for path in files)
    for name in sorted(set().union(*tables_of)):
        own = [Piece((), 0, tables[name])] if name in tables else []
        tables[name] = partial(_join_captures, name, files, own, read_once, spans)
    every = {**files, **captures}
    tables = {**spans.tables, **tables, "kernels": lambda: _kernels(spans, every)}
    return replace(spans, tables=tables)


def _left_out(rank: int, link: Path) -> RunWarning:
    text = f"{link.name} is a link to a directory outside of the run and was not read"
    text += f"; copy {link.resolve()} there to include it"
    return RunWarning(rank, text, Code.OUTSIDE_RUN.value)


def _join_captures(
    name: str,
    files: Mapping[Path, int | None],
    others: Sequence[Piece],
    read: Callable[[Path], Spans],
    spans: Spans,
) -> Table:
    pieces = [_part_of_table(name, path, rank, read, spans) for path, rank in files.items()]
    return join_tables(name, [*pieces, *others])


def _read_capture(path: Path, rank: int | None) -> Spans:
    chrome = _is_chrome(path)
    part = read_kineto(path) if chrome else read_nsys(path, rank)
    if not part.unix_ns:
        raise TraceError(f"{path}: left out: its recording time is unknown")
    if rank is None and (chrome or any(each.code == Code.RANKS_GUESSED for each in part.warnings)):
        raise TraceError(f"{path}: left out: its rank is unknown; put rank-N in its name")
    return part


def _part_of_table(
    name: str, path: Path, rank: int | None, read: Callable[[Path], Spans], spans: Spans
) -> Piece:
    """Return one file's part of a table; what is wrong with the file is said when it is read."""
    ranks = () if rank is None else (rank,)
    try:
        part = read(path)
    except TraceError as error:
        return Piece(ranks, 0, partial(_raise, error))
    if name not in part.tables:
        return Piece(ranks, 0, None)
    return Piece(ranks or part.ranks, 0, partial(_on_run_timeline, part, name, rank, spans))


def _raise(error: TraceError) -> Table:
    raise error


def _on_run_timeline(part: Spans, name: str, rank: int | None, spans: Spans) -> Table:
    """Read a table on the run's axis, with the rank of its folder, and stages where it has none.

    A file of several ranks is of one host, so any of them tells its clock.
    """
    whose = min(part.ranks, default=None) if rank is None else rank
    table = shift_times(
        lambda: part.table(name), lambda _, times: on_run(spans, part.unix_ns, whose, times)
    )
    if table.abstained is not None:
        return table
    heads = [column.name for column in table.columns]
    cells = dict(zip(heads, table.arrays(), strict=True))
    if rank is not None and "rank" in cells and len(part.ranks) == 1:
        cells["rank"] = np.full(len(table.rows), rank, np.int64)
    if "stage" in cells and not np.isin(part.kind, _MARKING).any():
        cells |= _fill_stages(cells, spans)
    return replace(table, rows=ColumnRows([cells[head] for head in heads]))


def _fill_stages(cells: Mapping[str, Any], spans: Spans) -> dict[str, Any]:
    """Return stage and step of the run's own spans at each launch, of which none is told."""
    times, rank = cells.get("launch", cells["start"]), np.ma.getdata(cells["rank"])
    if isinstance(times, tuple):  # no launch is known
        times = np.ma.masked_array(rank, np.ones(len(rank), bool))
    known_rank = np.where(np.ma.getmaskarray(times), NOWHERE, rank)
    found = _stages_of_run(spans, known_rank, np.ma.getdata(times))
    step = known(np.maximum(found.step, 0), nothing=0)
    return {"stage": distinct(found.stage, spans.names), "step": step}


def _stages_of_run(spans: Spans, rank: Int64s, times: Int64s) -> Found:
    """Return the stages and steps of the run's own spans at some launches of ranks."""
    rows = (spans.rank, spans.thread, spans.kind, spans.name, spans.step, spans.start_ns)
    launches = Launches(rank, np.full(len(rank), NOWHERE), times)
    return stages_at(Stages(*rows, spans.end_ns), launches)


def _kernels(spans: Spans, files: Mapping[Path, int | None]) -> Table:
    parts: list[Kernels] = []
    remarks: list[str] = []
    for path, rank in files.items():
        try:
            part, own = _read_kernels(path, rank, spans)
        except TraceError as error:
            remarks.append(Loss(error))
            continue
        parts.append(part)
        remarks += [with_name(path.name, text) for text in own]
    if not parts:
        return Table("kernels", COLUMNS, abstained="; ".join(remarks))
    return kernel_table(join(parts), remarks)


def _read_kernels(path: Path, rank: int | None, spans: Spans) -> tuple[Kernels, list[str]]:
    """Read one file's kernels onto the run's axis."""
    told_by_folder = path.is_dir() or _is_chrome(path)
    if path.is_dir():
        kernels, unix_ns, remarks = read_ascend_kernels(path)
    elif _is_chrome(path):
        kernels, unix_ns, remarks = read_kineto_kernels(path)
    else:
        kernels, unix_ns, remarks = read_nsys_kernels(path)
    told = np.full(len(kernels.rank), -1) if told_by_folder else kernels.rank
    if not len(kernels.rank):
        remarks = ["no kernels", *remarks]
    if not unix_ns:
        raise TraceError(f"{path}: left out: its recording time is unknown")
    if rank is None and (told < 0).any():
        raise TraceError(f"{path}: left out: its rank is unknown; put rank-N in its name")
    kernels = replace(kernels, rank=np.where(told < 0, rank or 0, told))
    whose = int(kernels.rank[0]) if rank is None and len(kernels.rank) else rank
    kernels = kernels_on_run(spans, unix_ns, whose, kernels)
    filled, count = _fill_kernel_stages(kernels, spans)
    return filled, [
        *remarks,
        *([f"{count} launches belong to the stages of the run's spans"] if count else []),
    ]


def _fill_shifted_kernels(spans: Spans, kernels: Kernels) -> Kernels:
    """Do the same for kernels of one capture that lie on the axis of the run by wall clock."""
    rank = int(kernels.rank[0]) if len(kernels.rank) else None
    filled, _ = _fill_kernel_stages(kernels_on_run(spans, spans.unix_ns, rank, kernels), spans)
    return replace(kernels, stage=filled.stage, step=filled.step)


def _fill_kernel_stages(kernels: Kernels, spans: Spans) -> tuple[Kernels, int]:
    """Take stage and step from the run's spans for ranks of which the tool knows neither."""
    codes, texts = kernels.stage
    told = kernels.rank[(codes >= 0) | (kernels.step > 0)]
    if kernels.launch_ns is None:
        return kernels, 0
    blank = (kernels.launch_ns != UNKNOWN) & ~np.isin(kernels.rank, told)
    found = _stages_of_run(spans, np.where(blank, kernels.rank, NOWHERE), kernels.launch_ns)
    own = np.where(found.stage < 0, -1, found.stage + len(texts))
    stage = distinct(np.where(blank, own, codes), [*texts, *spans.names])
    step = np.where(blank, found.step, kernels.step)
    return replace(kernels, stage=stage, step=step), int(np.count_nonzero(blank))
