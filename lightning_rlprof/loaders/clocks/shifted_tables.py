"""Move the times of some ranks onto the common timeline: spans, notes, kernels and tables."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lightning_rlprof.loaders.clocks.clock_fit import Clock
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, Kernels
from lightning_rlprof.tables.spans import RankNote, Spans
from lightning_rlprof.tables.table import Column, ColumnRows, Table

_Clocks = Mapping[int, Clock]


def moved(spans: Spans, clocks: Mapping[int, Clock]) -> Spans:
    """Return a run with all times of some ranks by another clock; durations in tables stay.

    The axis begins earlier where a time would be negative. Tables are moved when they are read, by
    their column ``rank``; the table ``clocks`` is left to who knows what was compared.

    Args:
        spans: The run.
        clocks: By rank, how its times on the axis become those of the reference.
    """
    if not clocks:
        return spans
    by = max(0, *(-int(clock.offset([0])[0]) for clock in clocks.values()))
    return replace(
        spans,
        start_ns=_times(spans.start_ns, spans.rank, clocks, by),
        end_ns=_times(spans.end_ns, spans.rank, clocks, by),
        notes=tuple(
            sorted((_note(each, clocks, by) for each in spans.notes), key=lambda note: note.time_ns)
        ),
        unix_ns=spans.unix_ns - by,
        tables={
            name: read if name == "clocks" else partial(_table, read, clocks, by)
            for name, read in spans.tables.items()
        },
        wall_off={
            **spans.wall_off,
            **{rank: partial(_ahead, spans, rank, clock) for rank, clock in clocks.items()},
        },
    )


def _ahead(spans: Spans, rank: int, clock: Clock, unix_ns: int) -> int:
    """Return how far a rank's wall clock is ahead when it says this."""
    time = spans.later(rank, unix_ns)
    return unix_ns - spans.unix_ns - time - int(clock.offset([time])[0])


def _note(note: RankNote, clocks: _Clocks, by_ns: int) -> RankNote:
    clock = None if note.rank is None else clocks.get(note.rank)
    time = note.time_ns if clock is None else int(clock.moved([note.time_ns])[0])
    return note._replace(time_ns=time + by_ns)


def _table(read: Callable[[], Table], clocks: _Clocks, by_ns: int) -> Table:
    table = read()
    if table.abstained is not None:
        return table
    cells = table.arrays()
    named = {column.name: each for column, each in zip(table.columns, cells, strict=True)}
    rank = np.ma.getdata(named["rank"]) if "rank" in named else np.full(len(table.rows), -1)
    rows = [
        _cells(each, rank, clocks, by_ns) if is_moment(column, each) else each
        for column, each in zip(table.columns, cells, strict=True)
    ]
    return replace(table, rows=ColumnRows(rows))


def _cells(cells: Any, rank: Int64s, clocks: _Clocks, by_ns: int) -> Any:
    found = _times(np.ma.getdata(cells), rank, clocks, by_ns)
    mask = np.ma.getmaskarray(cells)
    return np.ma.masked_array(found, mask) if mask.any() else found


def _times(times: Int64s, rank: Int64s, clocks: _Clocks, by_ns: int) -> Int64s:
    own = changed(times, rank, {each: clock.moved for each, clock in clocks.items()})
    return np.asarray(own + by_ns, np.int64)


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
    cells = table.arrays()
    ranks = np.ma.getdata(cells[names.index("rank")])
    changes = {each: partial(cells_on_run, spans, each, spans.unix_ns) for each in spans.wall_off}
    rows = [
        changed(each, ranks, changes) if is_moment(column, each) else each
        for column, each in zip(table.columns, cells, strict=True)
    ]
    return replace(table, rows=ColumnRows(rows))


def is_moment(column: Column, cells: Any) -> bool:
    """Tell whether a column contains times on the timeline; without any known cell it does not."""
    return column.kind == "time" and is_integer(cells)


def changed(cells: Any, rank: Int64s, changes: Mapping[int, Callable[[Any], Any]]) -> Any:
    """Return a column of which the cells of some ranks are changed.

    Args:
        cells: An array, perhaps masked.
        rank: Of each cell.
        changes: By rank, what makes new cells of its own.
    """
    found, order = cells.copy(), np.argsort(rank, kind="stable")
    ranks, heads = np.unique(rank[order], return_index=True)
    parts = np.split(order, heads[1:])  # of nothing it makes one part
    for each, mine in zip(ranks.tolist(), parts, strict=False):
        if each in changes:
            found[mine] = changes[each](cells[mine])
    return found


def is_integer(cells: Any) -> bool:
    """Tell whether a column is an array of integers."""
    return not isinstance(cells, tuple) and cells.dtype.kind == "i"
