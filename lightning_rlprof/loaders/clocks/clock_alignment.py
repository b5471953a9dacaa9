"""Put the clocks of all hosts on one timeline, by the clock sync exchanges of their ranks.

The times of some ranks are moved onto it: spans, notes, kernels and tables.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.loaders.clocks.clock_fit import Clock, Knot, from_exchange, solve
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import Header
from lightning_rlprof.tables.arrays import Int64s, group_starts
from lightning_rlprof.tables.kernels import UNKNOWN, Kernels
from lightning_rlprof.tables.spans import RunWarning, Spans
from lightning_rlprof.tables.table import Column, ColumnRows, Table

# Ranks of one host read one monotonic clock, so their anchors differ only by the time between the
# two readings and by what NTP slewed between their starts. More than this is another machine.
_ONE_CLOCK_NS = 1_000_000_000
Meetings = Sequence[tuple[int, Sequence[tuple[int, int, int, int]]]]
"""A rank's exchanges: with which rank, and the readings of its ping-pongs."""

CLOCK_COLUMNS = (
    Column("rank", "count"),
    Column("host", "text"),
    Column("clock", "count"),
    Column("reference", "count"),
    Column("method", "text"),
    Column("exchanges", "count"),
    Column("wall clock off", "duration", "ns"),
    Column("uncertainty", "duration", "ns"),
    Column("drift", "number", "ppm"),
    Column("drift uncertainty", "number", "ppm"),
    Column("jumps", "count"),
)
"""Of the table ``clocks``."""

_PLACES = 65  # of a capture at which clocks are asked; between two of them they drift evenly
Shift = Callable[[int, Int64s], Int64s]
"""Takes times of one rank, -1 if unknown, and returns them as they are on another timeline."""


class ClockRow(NamedTuple):
    """What is known of one rank's clock, in the order of the table's columns.

    Attributes:
        rank: Whose it is.
        host: Its host, "" where nothing tells it.
        clock: The lowest rank that reads the same clock.
        reference: The rank on whose clock it stands, None for one that stands alone.
        method: ``reference``, ``ping-pong``, ``collectives`` or ``wall clock``.
        exchanges: How many exchanges or collectives were used.
        off_ns: How far its host's wall clock was ahead when the rank started.
        uncertainty_ns: How far its times may be off, None where that is not known.
        drift: In ppm, as ``drift_uncertainty``.
        jumps: How often it was set.
    """

    rank: int
    host: str
    clock: int
    reference: int | None = None
    method: str = "wall clock"
    exchanges: int = 0
    off_ns: int | None = None
    uncertainty_ns: int | None = None
    drift: float | None = None
    drift_uncertainty: float | None = None
    jumps: int | None = None

    def is_reference(self, rank: int) -> "ClockRow":
        """Return the same clock as the one that others stand on."""
        return self._replace(
            reference=rank, method="reference", exchanges=0, off_ns=0, uncertainty_ns=0
        )


@dataclass(frozen=True, eq=False)
class OnAxis:
    """How a rank's clock becomes wall-clock time, the same for all ranks whose clocks are known.

    Attributes:
        anchor_ns: What its host adds to this clock to get its own wall clock.
        reference: The rank whose clock the host's was compared with, if any.
        shift_ns: What to add to ``clock``'s times, or to the rank's own if ``clock`` is None.
        clock: From the rank's clock to that of the reference, None for a host that stands alone.
    """

    anchor_ns: int
    reference: int | None
    shift_ns: int
    clock: Clock | None = None

    def unix(self, times: Int64s) -> Int64s:
        """Return times of the rank's clock in wall-clock time; their order stays."""
        own = times if self.clock is None else self.clock.moved(times)
        return own + self.shift_ns

    def off(self, unix_ns: int) -> int:
        """Return how far the host's wall clock is ahead when it says this."""
        time = unix_ns - self.anchor_ns
        return unix_ns - int(self.unix(np.array([time]))[0])


def on_axis(
    headers: Mapping[int, Header], meetings: Mapping[int, Meetings] | None = None
) -> tuple[dict[int, OnAxis], list[RunWarning]]:
    """Return how each rank's clock becomes wall-clock time, and what is doubtful.

    Ranks on one host share a clock, so they get the median of their anchors, ``unix_ns -
    clock_ns``: an own anchor per rank would move them against each other by the noise of reading
    two clocks. A host whose ranks met one of another host stands by that one's anchor.

    Example::

        >>> one = Header(1, "r", 0, 2, "", "a", 1, "cpu", unix_ns=1_000, clock_ns=0)
        >>> two = Header(1, "r", 1, 2, "", "a", 2, "cpu", unix_ns=1_700, clock_ns=600)
        >>> [each.shift_ns for each in on_axis({0: one, 1: two})[0].values()]
        [1000, 1000]
    """
    groups, problems = _groups(headers)
    anchors = {rank: anchor for anchor, ranks in groups for rank in ranks}
    found: dict[int, OnAxis] = {}
    for anchor, ranks in groups:
        there, clock = _solved(ranks, meetings or {})
        own = OnAxis(anchor, None, anchor)
        if clock is not None and there not in ranks and there in anchors:
            own = OnAxis(anchor, there, anchors[there], clock)
            problems += _doubts(headers[ranks[0]].host, clock)
        found |= dict.fromkeys(ranks, own)
    return dict(sorted(found.items())), problems


def clock_table(
    headers: Mapping[int, Header],
    ranks: Mapping[int, OnAxis],
    lives: Mapping[int, Sequence[int]] | None = None,
) -> Table | None:
    """Return what is known of each rank's clock: a row per rank, by rank; None for one clock.

    ``wall clock off`` is how far its host's wall clock was ahead of the reference's when the rank
    started. ``uncertainty`` is the largest one between the first exchange and the last, and at the
    times of ``lives`` on the rank's own clock. These and later columns are unknown for a clock
    that was never synchronized.
    """
    lowest: dict[OnAxis, int] = {}
    references = {
        own.shift_ns: own.reference for own in ranks.values() if own.reference is not None
    }
    rows = []
    for rank, own in ranks.items():
        row = ClockRow(rank, headers[rank].host, lowest.setdefault(own, rank))
        if own.clock is None and own.anchor_ns in references:
            row = row.is_reference(references[own.anchor_ns])
        rows.append(_row(row, headers[rank], own, (lives or {}).get(rank, [])))
    return Table("clocks", CLOCK_COLUMNS, rows) if len(lowest) > 1 else None


def wall_clocks(headers: Mapping[int, Header]) -> list[ClockRow]:
    """Return the clocks of what device tools recorded: each host's wall clock, nothing compared.

    A rank whose host or recording time is unknown has its own.
    """
    lowest: dict[object, int] = {}
    return [
        ClockRow(
            rank,
            header.host,
            lowest.setdefault(header.host if header.host and header.unix_ns else rank, rank),
        )
        for rank, header in sorted(headers.items())
    ]


def _row(row: ClockRow, header: Header, own: OnAxis, times: Sequence[int]) -> ClockRow:
    clock = own.clock
    if clock is None:
        return row
    return row._replace(
        reference=own.reference,
        method="ping-pong",
        exchanges=len(clock.time_ns),
        off_ns=own.off(header.unix_ns),
        uncertainty_ns=max([clock.largest_ns, *clock.uncertainty(times).tolist()]),
        drift=clock.drift * 1e6,
        drift_uncertainty=clock.drift_uncertainty * 1e6,
        jumps=len(clock.jumps),
    )


def _solved(ranks: Sequence[int], meetings: Mapping[int, Meetings]) -> tuple[int, Clock | None]:
    """Return with which rank those of a host exchanged times, and what these tell."""
    knots: dict[int, list[Knot]] = {}
    for rank in ranks:
        for there, readings in meetings.get(rank, ()):
            if len(readings):
                knots.setdefault(there, []).append(from_exchange(readings))
    there = max(knots, key=lambda each: len(knots[each]), default=-1)
    clock = solve(knots.get(there, ()))
    if clock is not None and (np.diff(clock.time_ns + clock.offset_ns) < 0).any():
        clock = None  # another run's, or damaged: no clock runs backwards
    return there, clock


def _doubts(host: str, clock: Clock) -> list[RunWarning]:
    """Say where a clock was set: times between two exchanges are uncertain by as much."""
    return [
        RunWarning(
            None,
            f"host {host}: its clock was set by {jump.size_ns / 1e6:+.1f} ms, at an unknown time "
            f"within {(jump.before_ns - jump.after_ns) / 1e9:.0f} s",
            Code.CLOCKS_DOUBTFUL.value,
        )
        for jump in clock.jumps
    ]


def _groups(headers: Mapping[int, Header]) -> tuple[list[tuple[int, list[int]]], list[RunWarning]]:
    """Return each clock's anchor and ranks, and what is doubtful of hosts."""
    hosts: dict[str, list[tuple[int, int]]] = {}
    for rank, header in headers.items():
        hosts.setdefault(header.host, []).append((header.unix_ns - header.clock_ns, rank))
    groups, problems = [], []
    for host, pairs in hosts.items():
        clocks = _clocks(sorted(pairs))
        if len(clocks) > 1:
            text = (
                f"host {host}: its ranks' clocks differ by seconds: this may be {len(clocks)} hosts"
            )
            problems.append(RunWarning(None, text, Code.CLOCKS_DOUBTFUL.value))
        for clock in clocks:
            median = clock[(len(clock) - 1) // 2][0]
            groups.append((median, sorted(rank for _, rank in clock)))
    return groups, problems


def _clocks(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split one host's sorted (anchor, rank) pairs where neighbours cannot share a clock."""
    groups = [[pairs[0]]]
    for before, pair in itertools.pairwise(pairs):
        if pair[0] - before[0] > _ONE_CLOCK_NS:
            groups.append([])
        groups[-1].append(pair)
    return groups


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
