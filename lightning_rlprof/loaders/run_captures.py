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
from lightning_rlprof.loaders.ascend.reader import ascend_tables
from lightning_rlprof.loaders.clocks import on_run, shift_times
from lightning_rlprof.loaders.discovery import NSYS_SUFFIXES
from lightning_rlprof.loaders.host_calls import NOWHERE, Launches, Stages, stages_at
from lightning_rlprof.loaders.join_ranks import Piece, join_tables
from lightning_rlprof.loaders.kineto.reader import read_kineto
from lightning_rlprof.loaders.nsys import read_nsys
from lightning_rlprof.loaders.rank_names import rank_in_name
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.records.run_directory import is_inside, rank_directory
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Coded, distinct, known
from lightning_rlprof.tables.spans import RunWarning, Spans
from lightning_rlprof.tables.table import ColumnRows, Table

_KINETO_TABLES = ("kernels", "memcpy", "collectives", "calls", "memory", "counters", "shapes")
_NSYS_TABLES = ("kernels", "memcpy", "sync", "gpu_metrics")
_LOSSES = (Code.ROWS_LEFT_OUT, Code.FILE_CUT, Code.EVENTS_DAMAGED, Code.TIMES_IMPOSSIBLE)
_OF_FILES = (Code.TRACE_DOUBTFUL, *_LOSSES)
_MARKING = (KINDS.index("stage"), KINDS.index("step"))

# Suffixes of a tool are in order of preference, if one recording has several forms. Plain files
# come before packed ones, and exports before reports that only nsys reads.
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
    # If a name has no rank, only the processes in the file may show it.
    files: dict[Path, int | None] = {path: rank_in_name(path.name) for path in device_files(run)}
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
        # A link to a capture of this run is the same capture.
        once = {path.resolve(): path for path in reversed(found) if is_inside(run, path)}
        captures |= dict.fromkeys(sorted(once.values()), rank)
    spans = replace(spans, warnings=(*spans.warnings, *outside)) if outside else spans
    if not files and not captures:
        return spans
    tables = ascend_tables(captures, spans.unix_ns, partial(_since_1970, spans))
    if spans.wall_off:
        shift = partial(on_run, spans, spans.unix_ns)
        tables = {name: partial(shift_times, read, shift) for name, read in tables.items()}
    read_once = cache(lambda path: _read_capture(path, files[path]))
    tables_of = (_KINETO_TABLES if _is_chrome(path) else _NSYS_TABLES for path in files)
    for name in sorted(set().union(*tables_of)):
        own = [Piece((), 0, tables[name])] if name in tables else []
        tables[name] = partial(_join_captures, name, files, own, read_once, spans)
    return replace(spans, tables={**spans.tables, **tables})


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
    marking = part.rank[np.isin(part.kind, _MARKING)]
    if rank is not None and "rank" in cells and len(part.ranks) == 1:
        cells["rank"], marking = np.full(len(table.rows), rank, np.int64), marking * 0 + rank
    if "stage" in cells:
        cells |= _fill_stages(cells, marking, spans)
    if name == "kernels":  # Losses of the file count as losses of its kernels.
        known_of_file = [each for each in part.warnings if each.code in _OF_FILES]
        lost = [each.text for each in known_of_file if each.code in _LOSSES]
        note = "; ".join(filter(None, [*(each.text for each in known_of_file), table.note]))
        table = replace(table, note=note, losses=(*lost, *table.losses))
    return replace(table, rows=ColumnRows([cells[head] for head in heads]))


def _fill_stages(cells: Mapping[str, Any], marking: Int64s, spans: Spans) -> dict[str, Any]:
    """Take stage and step at each launch from the run's spans, for ranks that mark neither."""
    times, rank = cells.get("launch", cells["start"]), np.ma.getdata(cells["rank"])
    if isinstance(times, tuple):  # A tuple means that no launch is known.
        times = np.ma.masked_array(rank, np.ones(len(rank), bool))
    blank = ~np.isin(rank, marking)
    if not blank.any():
        return {}
    known_rank = np.where(np.ma.getmaskarray(times) | ~blank, NOWHERE, rank)
    (codes, names), step = _stages_of_run(spans, known_rank, np.ma.getdata(times))
    own, texts = cells["stage"]
    stage = distinct(
        np.where(blank, np.where(codes < 0, -1, codes + len(texts)), own), [*texts, *names]
    )
    before = np.ma.filled(cells["step"], 0)
    return {"stage": stage, "step": known(np.where(blank, step, before), nothing=0)}


def _stages_of_run(spans: Spans, rank: Int64s, times: Int64s) -> tuple[Coded, Int64s]:
    """Return stage and step of the run's own spans at some launches of ranks."""
    rows = (spans.rank, spans.thread, spans.kind, spans.name, spans.step, spans.start_ns)
    launches = Launches(rank, np.full(len(rank), NOWHERE), times)
    found = stages_at(Stages(*rows, spans.end_ns), launches)
    return (found.stage, spans.names), np.maximum(found.step, 0)


def _since_1970(spans: Spans, rank: int, times: Int64s) -> tuple[Coded, Int64s]:
    """Return stage and step of the run's own spans at times of a rank since 1970."""
    on_axis, there = times.copy(), times != UNKNOWN
    on_axis[there] = on_run(spans, spans.unix_ns, rank, times[there] - spans.unix_ns)
    return _stages_of_run(spans, np.where(there, rank, NOWHERE), on_axis)
