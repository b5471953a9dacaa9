"""Times by a host's wall clock on the axis of a run whose hosts compared their clocks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lightning_rlprof.frames import columns_of
from lightning_rlprof.loaders.kernels import UNKNOWN, Kernels
from lightning_rlprof.loaders.tables import changed, is_moment
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import ColumnRows, Table

__all__ = ["cells_on_run", "kernels_on_run", "on_run", "table_on_run"]

_PLACES = 65  # of a capture at which clocks are asked; between two of them they drift evenly


def on_run(spans: Spans, rank: int | None, unix_ns: int, times: Int64s) -> Int64s:
    """Return times that count from when a rank's wall clock said ``unix_ns`` on the run's axis.

    Their order stays. Where the clock drifts against the others, so do the times.
    """
    if rank not in spans.wall_off or not len(times):
        return times + (unix_ns - spans.unix_ns)
    places = np.unique(np.linspace(int(times.min()), int(times.max()), _PLACES).astype(np.int64))
    shift = [spans.later(rank, unix_ns + place) - place for place in places.tolist()]
    more = np.interp(times, places, [each - shift[0] for each in shift])
    return np.asarray(times + shift[0] + np.rint(more).astype(np.int64), np.int64)


def cells_on_run(spans: Spans, rank: int | None, unix_ns: int, cells: Any) -> Any:
    """Return the same of a column of which some cells may not be known."""
    times, unknown = np.ma.getdata(cells), np.ma.getmaskarray(cells)
    found = np.where(unknown, 0, times)
    found[~unknown] = on_run(spans, rank, unix_ns, times[~unknown])
    return np.ma.masked_array(found, unknown) if unknown.any() else found


def kernels_on_run(spans: Spans, rank: int | None, unix_ns: int, kernels: Kernels) -> Kernels:
    """Return kernels on the axis of the run; their durations stay."""
    start, launch = on_run(spans, rank, unix_ns, kernels.start_ns), kernels.launch_ns
    end = start + (kernels.end_ns - kernels.start_ns)
    if launch is not None:
        known = launch != UNKNOWN
        launch = launch.copy()
        launch[known] = on_run(spans, rank, unix_ns, launch[known])
    return replace(kernels, start_ns=start, end_ns=end, launch_ns=launch)


def table_on_run(spans: Spans, read: Callable[[], Table]) -> Table:
    """Read a table that lies on the axis of the run by wall clocks, and put its ranks right."""
    table = read()
    names = [column.name for column in table.columns]
    if table.abstained is not None or "rank" not in names:
        return table
    cells = columns_of(table)
    ranks = np.ma.getdata(cells[names.index("rank")])
    changes = {each: partial(cells_on_run, spans, each, spans.unix_ns) for each in spans.wall_off}
    rows = [
        changed(each, ranks, changes) if is_moment(column, each) else each
        for column, each in zip(table.columns, cells, strict=True)
    ]
    return replace(table, rows=ColumnRows(rows))
