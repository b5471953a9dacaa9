"""Put the clocks of all hosts on one timeline, by the exchanges or the collectives of their ranks.

A clock sync exchange compares two clocks. Where none was recorded, collectives do: in an all-reduce
no rank ends before every rank has started. So each matched one bounds the offset of two clocks.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.loaders.clock_fit import Clock, Knot, from_collectives, from_exchange, solve
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import Header, stated_world_size
from lightning_rlprof.tables.arrays import (
    Int64s,
    Mask,
    ended_together,
    group_sizes,
    group_starts,
    match_occurrences,
)
from lightning_rlprof.tables.spans import ByRank, RunWarning, Spans
from lightning_rlprof.tables.table import Column, PackedRows, Table, packed

# Ranks of one host read one monotonic clock, so their anchors differ only by the time between the
# two readings and by what NTP slewed between their starts. A larger difference is two machines.
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

_PLACES = 65  # Clocks drift evenly between two of the places where a capture is sampled.
Shift = Callable[[int, Int64s], Int64s]
"""Takes times of one rank, -1 if unknown, and returns them as they are on another timeline."""

# In these collectives, all ranks need data from all ranks. The root of a broadcast is done before
# other ranks have begun; in a reduce, the other ranks are done first. An uneven all_to_all may send
# nothing to some ranks.
_KERNEL = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|barrier)", re.IGNORECASE)
_ALL = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
_WINDOW_NS = 10**9  # Clocks drift by 0.1 ms in it at most, so its collectives bound one offset.
_MAX_WINDOWS = 64
_MAX_WRONG_SHARE = 0.1  # Share of the bounds that may contradict the result of all bounds.


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

    def compared(self, reference: int | None, clock: Clock, **known: Any) -> "ClockRow":
        """Return the same clock as one that was compared with another."""
        return self._replace(
            reference=reference,
            drift=clock.drift * 1e6,
            drift_uncertainty=clock.drift_uncertainty * 1e6,
            jumps=len(clock.jumps),
            **known,
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
        if (clock := own.clock) is not None:
            at_ends = clock.uncertainty((lives or {}).get(rank, [])).tolist()
            row = row.compared(
                own.reference,
                clock,
                method="ping-pong",
                exchanges=len(clock.time_ns),
                off_ns=own.off(headers[rank].unix_ns),
                uncertainty_ns=max([clock.largest_ns, *at_ends]),
            )
        elif own.anchor_ns in references:
            row = row.is_reference(references[own.anchor_ns])
        rows.append(row)
    return Table("clocks", CLOCK_COLUMNS, rows) if len(lowest) > 1 else None


def wall_clocks(headers: Mapping[int, Header]) -> list[ClockRow]:
    """Return the clocks of what device tools recorded: each host's wall clock, nothing compared.

    A rank whose host or recording time is unknown has its own.
    """
    lowest: dict[object, int] = {}
    return [
        ClockRow(
            rank, of.host, lowest.setdefault(of.host if of.host and of.unix_ns else rank, rank)
        )
        for rank, of in sorted(headers.items())
    ]


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
        clock = None  # No clock runs backwards: the readings are another run's, or damaged.
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
    return replace(table, rows=PackedRows([*map(packed, rows)]))


def read_moved(read: Callable[[], Table], shift: Shift) -> Callable[[], Table]:
    """Return what reads a table and moves its times; the ranks' own stay apart."""
    if not isinstance(read, ByRank):
        return partial(shift_times, read, shift)

    def moved_rows(rank: int | None = None) -> Table:
        return shift_times(read if rank is None else partial(read.of, rank), shift)

    return ByRank(moved_rows)


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
            name: read if name == "clocks" else read_moved(read, shift)
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


class Shared(NamedTuple):
    """Meetings of two sets of ranks, by time: when the last came, and the first left, of each."""

    start_ns: Int64s
    end_ns: Int64s
    start_there_ns: Int64s
    end_there_ns: Int64s

    def bounds(self) -> tuple[Int64s, Int64s]:
        """Return the least and the most that can be added to times of the first set."""
        return self.start_there_ns - self.end_ns, self.end_there_ns - self.start_ns

    def where(self, keep: Mask | Int64s) -> "Shared":
        """Return some of them."""
        return Shared(*(column[keep] for column in self))


class Met(NamedTuple):
    """Calls on the axis of the run, and which of them were one collective.

    Attributes:
        rank: Whose each is.
        start_ns: When it came.
        end_ns: When it left.
        meeting: Which collective it was.
        sure: Whether its group is told: by name, or as all ranks of the job.
    """

    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    meeting: Int64s
    sure: Mask

    def side(self, own: Int64s) -> "Side":
        """Return when the last of some calls began in each meeting, and when the first ended."""
        own = own[np.argsort(self.meeting[own], kind="stable")]
        if not len(own):
            return Side(own, own, own, np.zeros(0, bool))
        heads = group_starts(self.meeting[own])
        start = np.maximum.reduceat(self.start_ns[own], heads)
        end = np.minimum.reduceat(self.end_ns[own], heads)
        return Side(self.meeting[own[heads]], start, end, self.sure[own[heads]])


class Side(NamedTuple):
    """Some ranks in their meetings; by meeting, which is ascending."""

    meeting: Int64s
    start_ns: Int64s
    end_ns: Int64s
    sure: Mask

    def shared(self, there: "Side") -> Shared:
        """Return the meetings in which both sides are, without those that are doubtful.

        Without known groups, calls were matched by their order alone. Then their ends decide, see
        `ended_together`.
        """
        _, own, at = np.intersect1d(
            self.meeting, there.meeting, assume_unique=True, return_indices=True
        )
        times = (self.start_ns[own], self.end_ns[own], there.start_ns[at], there.end_ns[at])
        every, keep = Shared(*times), self.sure[own]
        starts, ends = times[2] - times[0], times[3] - times[1]
        keep[~keep] = ended_together(starts[~keep], ends[~keep])
        rows = np.flatnonzero(keep)
        return every.where(rows[np.argsort(every.end_ns[rows], kind="stable")])


def met(spans: Spans) -> Met | None:
    """Match the collectives of a run: by number, else by their order in a step.

    They are those of the table ``collectives``; Nsight Systems, which has none, tells them by names
    of kernels. None where there are none, or where they cannot be read.
    """
    by_names = any("nsys" in header.versions for header in spans.headers.values())
    name = "kernels" if by_names and "collectives" not in spans.tables else "collectives"
    table = spans.try_table(name, [])
    if table is None or not len(table.rows):
        return None
    heads = [column.name for column in table.columns]
    codes, texts = table.texts("operation" if "operation" in heads else "kernel")
    waits = np.array([*map(_operation, texts), -1], np.int64)[codes]
    rank, start, took = (table.numbers(each) for each in ("rank", "start", "duration"))
    nothing = np.full(len(rank), -1)
    group = table.texts("group")[0] if "group" in heads else nothing
    number, step, size = (
        table.numbers(each, -1) if each in heads else nothing
        for each in ("number", "step", "group size")
    )
    sure = (group >= 0) | (size == stated_world_size(spans.headers.values()))
    keep = np.flatnonzero((waits >= 0) & ((number >= 0) | (step > 0)))
    if not len(keep):
        return None
    place = np.where(number >= 0, number, step)
    key = [(group * len(_ALL) + waits)[keep], (number >= 0)[keep], place[keep]]
    order, starts = match_occurrences(key, rank[keep], start[keep])
    at = keep[order]
    meeting = np.repeat(np.arange(len(starts)), group_sizes(starts, len(order)))
    return Met(rank[at], start[at], start[at] + took[at], meeting, sure[at])


def _operation(name: str) -> int:
    """Return which of `_ALL` an operation or a kernel is, -1 for others."""
    found = _KERNEL.search(name)
    short = found[1].lower().replace("_", "") if found else ""
    return next((at for at, each in enumerate(_ALL) if each.replace("_", "") == short), -1)


class _Solved(NamedTuple):
    """What collectives tell of one clock: how to move it, the ±u, and how many there were."""

    clock: Clock
    unsure_ns: int
    meetings: int


def aligned(spans: Spans) -> Spans:
    """Return a run with all its clocks on one axis, as far as that is known, and say what is not.

    A clock that was compared stays. The others are compared by collectives, where that certifies an
    offset: spans, notes and tables of their ranks are moved by it. What is told of each clock is
    the table ``clocks``. A run of one clock is returned as it is.
    """
    rows = _known(spans)
    if len({row.clock for row in rows}) < 2:
        return spans
    left = {row.clock for row in rows if row.uncertainty_ns is None}
    if left and "collectives" in spans.tables:  # The table is read now, and often once more.
        kept = {"collectives": cache(spans.tables["collectives"])}
        spans = replace(spans, tables={**spans.tables, **kept})
    found = _compared_clocks(spans, rows) if left else {}
    clocks = {row.rank: found[row.clock].clock for row in rows if row.clock in found}
    spans = moved(spans, {rank: each for rank, each in clocks.items() if each.offset_ns.any()})
    rows = _told(spans, rows, found)
    warnings = (*spans.warnings, *_unsynchronized(spans, rows))
    table = Table("clocks", CLOCK_COLUMNS, rows)
    return replace(spans, warnings=warnings, tables={**spans.tables, "clocks": lambda: table})


def _known(spans: Spans) -> list[ClockRow]:
    rows = list(spans.table("clocks").rows) if "clocks" in spans.tables else []
    if len(rows) == len(spans.headers):
        return [ClockRow(*row) for row in rows]  # type: ignore[arg-type]
    return wall_clocks(spans.headers) if len(spans.headers) > 1 else []


def _told(spans: Spans, rows: Sequence[ClockRow], found: Mapping[int, _Solved]) -> list[ClockRow]:
    told = next((row.reference for row in rows if row.reference is not None), None)
    first = rows[0].clock if told is None and found else None
    reference = rows[0].rank if told is None else told

    def told_row(row: ClockRow) -> ClockRow:
        if row.clock == first:
            return row.is_reference(reference)
        if (solved := found.get(row.clock)) is None:
            return row
        unix = spans.headers[row.rank].unix_ns
        return row.compared(
            reference,
            solved.clock,
            method="collectives",
            exchanges=solved.meetings,
            off_ns=unix - spans.unix_ns - spans.later(row.rank, unix) if unix else None,
            uncertainty_ns=solved.unsure_ns,
        )

    return [told_row(row) for row in rows]


def _unsynchronized(spans: Spans, rows: Sequence[ClockRow]) -> list[RunWarning]:
    """Say where times can be compared only roughly; of a trace without a date that is said."""
    rows = [row for row in rows if spans.headers[row.rank].unix_ns]
    left = [row for row in rows if row.uncertainty_ns is None]
    clocks = len({row.clock for row in left}) + (len(left) < len(rows))
    if clocks < 2:
        return []
    text = f"clocks of {clocks} hosts are unsynchronized: between hosts, times may be off by ms"
    return [RunWarning(None, text, Code.CLOCKS_DOUBTFUL.value)]


def _compared_clocks(spans: Spans, rows: Sequence[ClockRow]) -> dict[int, _Solved]:
    """Compare clocks with those that are known; where none is, it is that of the lowest rank."""
    calls = met(spans)
    if calls is None:
        return {}
    known = {row.clock: row.uncertainty_ns for row in rows if row.uncertainty_ns is not None}
    known = known or {rows[0].clock: 0}
    clock_of = np.zeros(max(row.rank for row in rows) + 1, np.int64)
    clock_of[[row.rank for row in rows]] = [row.clock for row in rows]
    whose = clock_of[calls.rank]
    there, worst = calls.side(np.flatnonzero(np.isin(whose, [*known]))), max(known.values())
    found: dict[int, _Solved] = {}
    for row in rows:
        if row.clock != row.rank or row.clock in known:
            continue
        shared = calls.side(np.flatnonzero(whose == row.clock)).shared(there)
        own = clock_of[spans.rank] == row.clock
        edges = [spans.start_ns[own].min(), spans.end_ns[own].max()] if own.any() else []
        may_be_one = bool(spans.headers[row.clock].unix_ns) and not row.host
        if (solved := _compared(shared, edges, worst, may_be_one=may_be_one)) is not None:
            found[row.clock] = solved
    return found


def _compared(
    shared: Shared, edges: Sequence[int], worst_ns: int, *, may_be_one: bool
) -> _Solved | None:
    """Return what meetings tell, None if it is not sound.

    Args:
        shared: Meetings with ranks whose clocks are known.
        edges: Times between which the ±u is asked for.
        worst_ns: The ±u of those clocks.
        may_be_one: The clock stays where it is, unless meetings say that it cannot.
    """
    if not len(shared.end_ns):
        return None
    window = max(int(np.ptp(shared.end_ns)) // _MAX_WINDOWS, _WINDOW_NS)
    places = (shared.end_ns - shared.end_ns[0]) // window
    clock = solve([from_collectives(*shared.where(places == at)) for at in np.unique(places)])
    if clock is None or (np.diff(clock.time_ns + clock.offset_ns) < 0).any():
        return None
    clock = _still(clock) if may_be_one and _fits(_still(clock), shared, worst_ns) else clock
    if not _fits(clock, shared, worst_ns):
        return None
    times = [*edges, int(shared.start_ns.min()), int(shared.end_ns[-1])]
    unsure = max(clock.largest_ns, int(clock.uncertainty(times).max())) + worst_ns
    return _Solved(clock, unsure, len(shared.end_ns))


def _still(clock: Clock) -> Clock:
    """Return a clock that adds nothing, and is as unsure as that may be wrong."""
    return replace(
        clock,
        offset_ns=np.zeros_like(clock.offset_ns),
        uncertainty_ns=clock.uncertainty_ns + abs(clock.offset_ns),
        drift=0.0,
        drift_uncertainty=clock.drift_uncertainty + abs(clock.drift),
        jumps=(),
    )


def _fits(clock: Clock, shared: Shared, worst_ns: int) -> bool:
    """Tell whether nearly all bounds allow the offset itself, up to how unsure the others are."""
    low, high = shared.bounds()
    wrong = low > clock.offset(shared.end_ns) + worst_ns
    wrong |= high < clock.offset(shared.start_ns) - worst_ns
    return bool(np.count_nonzero(wrong) <= _MAX_WRONG_SHARE * len(low))
