"""Move the times of some ranks onto the common timeline: spans, notes, kernels and tables."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lightning_rlprof.loaders.clocks.clock_fit import Clock
from lightning_rlprof.tables.arrays import Int64s, group_starts
from lightning_rlprof.tables.kernels import UNKNOWN, Kernels
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, ColumnRows, Table

_PLACES = 65  # of a capture at which clocks are asked; between two of them they drift evenly

Shift = Callable[[int, Int64s], Int64s]
"""Takes times of one rank, -1 if unknown, and returns them as they are on another timeline."""


def shift_times(read: Callable[[], Table], shift: Shift) -> Table:
    """Read a table and move its times, by the rank of their row; unknown ones and durations stay.

    Example::

        >>> table = Table("t", (Column("rank", "count"), Column("start", "time", "ns")), [(1, 5)])
        >>> list(shift_times(lambda: table, lambda rank, times: times + 100 * rank).rows)
        [(1, 105)]
    """
    table = read()
    if table.abstained is not None:
        return table
    names, cells = [column.name for column in table.columns], table.arrays()
    rank = np.ma.getdata(cells[names.index("rank")]) if "rank" in names else None
    rows = [
        shift_cells(each, rank, shift) if is_moment(column, each) else each
        for column, each in zip(table.columns, cells, strict=True)
    ]
    return replace(table, rows=ColumnRows(rows))


def shift_cells(cells: Any, rank: Int64s | None, shift: Shift) -> Any:
    """Return a column with its known times moved.

    Args:
        cells: An array, perhaps masked.
        rank: Of each cell; None where no rank is told.
        shift: What moves them.
    """
    found, known = cells.copy(), np.flatnonzero(~np.ma.getmaskarray(cells))
    ranks = np.full(len(cells), -1) if rank is None else rank
    order = known[np.argsort(ranks[known], kind="stable")]
    for rows in np.split(order, group_starts(ranks[order])[1:]) if len(order) else ():
        found[rows] = shift(int(ranks[rows[0]]), np.ma.getdata(cells)[rows])
    return found


def is_moment(column: Column, cells: Any) -> bool:
    """Tell whether a column contains times on the timeline; without any known cell it does not."""
    return column.kind == "time" and is_integer(cells)


def is_integer(cells: Any) -> bool:
    """Tell whether a column is an array of integers."""
    return not isinstance(cells, tuple) and cells.dtype.kind == "i"


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

    def shift(rank: int, times: Int64s) -> Int64s:
        return (clocks[rank].moved(times) if rank in clocks else times) + by

    notes = [
        note._replace(
            time_ns=int(shift(-1 if note.rank is None else note.rank, np.array([note.time_ns]))[0])
        )
        for note in spans.notes
    ]
    return replace(
        spans,
        start_ns=shift_cells(spans.start_ns, spans.rank, shift),
        end_ns=shift_cells(spans.end_ns, spans.rank, shift),
        notes=tuple(sorted(notes, key=lambda note: note.time_ns)),
        unix_ns=spans.unix_ns - by,
        tables={
            name: read if name == "clocks" else partial(shift_times, read, shift)
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


def on_run(spans: Spans, unix_ns: int, rank: int | None, times: Int64s) -> Int64s:
    """Return times that count from when a rank's wall clock said ``unix_ns`` on the run's axis.

    Their order stays. Where the clock drifts against the others, so do the times.
    """
    if rank not in spans.wall_off or not len(times):
        return times + (unix_ns - spans.unix_ns)
    places = np.unique(np.linspace(int(times.min()), int(times.max()), _PLACES).astype(np.int64))
    shift = [spans.later(rank, unix_ns + place) - place for place in places.tolist()]
    more = np.interp(times, places, [each - shift[0] for each in shift])
    return np.asarray(times + shift[0] + np.rint(more).astype(np.int64), np.int64)


def kernels_on_run(spans: Spans, unix_ns: int, rank: int | None, kernels: Kernels) -> Kernels:
    """Return kernels on the axis of the run; their durations stay."""
    start, launch = on_run(spans, unix_ns, rank, kernels.start_ns), kernels.launch_ns
    end = start + (kernels.end_ns - kernels.start_ns)
    if launch is not None:
        known = launch != UNKNOWN
        launch = launch.copy()
        launch[known] = on_run(spans, unix_ns, rank, launch[known])
    return replace(kernels, start_ns=start, end_ns=end, launch_ns=launch)
