"""A run on one axis after its clocks were compared: spans, notes and tables of some ranks moved."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lightning_rlprof.clock import Clock
from lightning_rlprof.frames import columns_of
from lightning_rlprof.loaders.tables import changed, is_moment
from lightning_rlprof.spans import Int64s, RankNote, Spans
from lightning_rlprof.table import ColumnRows, Table

__all__ = ["moved"]

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
    cells = columns_of(table)
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
