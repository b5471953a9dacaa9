"""What captures in a run's folders hold beside kernels, on the axis of the run."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.frames import columns_of
from lightning_rlprof.loaders.attribution import NOWHERE, Launches, Stages, stages_at
from lightning_rlprof.loaders.dated import cells_on_run
from lightning_rlprof.loaders.kernels import distinct, known
from lightning_rlprof.loaders.nsys import GUESSED, read_nsys
from lightning_rlprof.loaders.tables import Piece, is_moment, join_tables
from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import ColumnRows, Table

__all__ = ["capture_tables"]

_CHROME = ("memcpy", "collectives", "calls", "memory", "counters", "shapes")
_NSYS = ("memcpy", "sync", "gpu_metrics")
_TELLING = (KINDS.index("stage"), KINDS.index("step"))

Tables = Mapping[str, Callable[[], Table]]


def capture_tables(
    files: Mapping[Path, int | None],
    spans: Spans,
    others: Tables,
    is_chrome: Callable[[Path], bool],
) -> dict[str, Callable[[], Table]]:
    """Return the tables of Chrome traces and Nsight Systems' reports in a run, all but the kernels.

    A file is read when the first of its tables is asked for, and is kept. So a table may turn out
    to be in none of them; it abstains then. Where a capture marks neither stages nor steps, they
    are those of the run's own spans at the launch, or at the start in a table without launches. A
    file that cannot be read, or whose time or rank is not known, is a remark.

    Args:
        files: The rank of each file, None where only its processes may tell it.
        spans: The run.
        others: Tables of other tools on the axis of the run; those of one name are joined.
        is_chrome: Tells the two kinds of files apart.
    """
    read = cache(lambda path: _read(path, files[path], chrome=is_chrome(path)))

    def table(name: str) -> Table:
        pieces = [_piece(name, path, rank, read, spans) for path, rank in files.items()]
        if name in others:
            pieces.append(Piece((), 0, others[name]))
        return join_tables(name, pieces)

    names = sorted({name for path in files for name in (_CHROME if is_chrome(path) else _NSYS)})
    return {**others, **{name: partial(table, name) for name in names}}


def _read(path: Path, rank: int | None, *, chrome: bool) -> Spans:
    from lightning_rlprof.loaders.kineto import read_kineto

    part = read_kineto(path) if chrome else read_nsys(path, rank)
    if not part.unix_ns:
        raise TraceError(f"{path}: is left out: when it was recorded is not known")
    if rank is None and (chrome or any(each.text.startswith(GUESSED) for each in part.problems)):
        raise TraceError(f"{path}: is left out: nothing says which rank it is of")
    return part


def _piece(
    name: str, path: Path, rank: int | None, read: Callable[[Path], Spans], spans: Spans
) -> Piece:
    """Return one file's part of a table; what is wrong with the file is said when it is read."""
    ranks = () if rank is None else (rank,)
    try:
        part = read(path)
    except TraceError as error:
        return Piece(ranks, 0, partial(_fail, error))
    if name not in part.tables:
        return Piece(ranks, 0, None)
    return Piece(ranks or part.ranks, 0, partial(_own, part, name, rank, spans))


def _fail(error: TraceError) -> Table:
    raise error


def _own(part: Spans, name: str, rank: int | None, spans: Spans) -> Table:
    """Read a table on the run's axis, with the rank of its folder, and stages where it has none.

    A file of several ranks is of one host, so any of them tells its clock.
    """
    table = part.table(name)
    if table.abstained is not None:
        return table
    heads = [column.name for column in table.columns]
    whose = min(part.ranks, default=None) if rank is None else rank
    cells = {
        column.name: cells_on_run(spans, whose, part.unix_ns, each)
        if is_moment(column, each)
        else each
        for column, each in zip(table.columns, columns_of(table), strict=True)
    }
    if rank is not None and "rank" in cells and len(part.ranks) == 1:
        cells["rank"] = np.full(len(table.rows), rank, np.int64)
    if "stage" in cells and not np.isin(part.kind, _TELLING).any():
        cells |= _filled(cells, spans)
    return Table(name, table.columns, ColumnRows([cells[head] for head in heads]), note=table.note)


def _filled(cells: Mapping[str, Any], spans: Spans) -> dict[str, Any]:
    """Return stage and step of the run's own spans at each launch, of which none is told."""
    times, rank = cells.get("launch", cells["start"]), np.ma.getdata(cells["rank"])
    if isinstance(times, tuple):  # no launch is known
        times = np.ma.masked_array(rank, np.ones(len(rank), bool))
    told, when = ~np.ma.getmaskarray(times), np.ma.getdata(times)
    rows = (spans.rank, spans.thread, spans.kind, spans.name, spans.step, spans.start_ns)
    anywhere = np.full(len(rank), NOWHERE)
    launches = Launches(np.where(told, rank, NOWHERE), anywhere, when)
    found = stages_at(Stages(*rows, spans.end_ns), launches)
    step = known(np.maximum(found.step, 0), nothing=0)
    return {"stage": distinct(found.stage, spans.names), "step": step}
