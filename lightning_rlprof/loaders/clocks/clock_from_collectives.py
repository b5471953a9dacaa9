"""Synchronize clocks that were never compared, by the collectives of their ranks.

In an all-reduce no rank ends before every rank has started. So each matched collective bounds the
offset between the clocks of two ranks.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from lightning_rlprof.loaders.clocks.clock_alignment import (
    CLOCK_COLUMNS,
    ClockRow,
    moved,
    shift_cells,
    wall_clocks,
)
from lightning_rlprof.loaders.clocks.clock_fit import Clock, from_collectives, solve
from lightning_rlprof.loaders.rank_names import as_ranges
from lightning_rlprof.records.notes import Code
from lightning_rlprof.tables.arrays import (
    Int64s,
    Mask,
    group_sizes,
    group_starts,
    match_occurrences,
)
from lightning_rlprof.tables.spans import RunWarning, Spans
from lightning_rlprof.tables.table import Table

# Those in which everybody needs something from everybody. Of a broadcast the root is done before
# others have begun, of a reduce the others; an uneven all_to_all may send nothing to some.
_KERNEL = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|barrier)", re.IGNORECASE)
_ALL = ("all_reduce", "all_gather", "reduce_scatter", "barrier")

# Without a known group, ranks that took part together leave together, however they came.
_FEWEST = 4
_CLOSER = 5


class Shared(NamedTuple):
    """Meetings of two sets of ranks, by time: when the last came, and the first left, of each."""

    start_ns: Int64s
    end_ns: Int64s
    start_there_ns: Int64s
    end_there_ns: Int64s

    def bounds(self) -> tuple[Int64s, Int64s]:
        """Return the least and the most that can be added to times of the first set."""
        return self.start_there_ns - self.end_ns, self.end_there_ns - self.start_ns

    def where(self, keep: Mask) -> "Shared":
        """Return some of them."""
        return Shared(*(column[keep] for column in self))


class Met(NamedTuple):
    """Calls on the axis of the run, and which of them were one collective.

    Attributes:
        rank: Whose each is.
        start_ns: When it came.
        end_ns: When it left.
        meeting: Which collective it was.
        sure: Whether its group is told.
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

        Without known groups, calls were matched by their order alone. Then they are believed
        where most bounds agree with one offset, and the ends of those differ far less than their
        starts do: so it is where ranks wait for one another, and not where they do alike.
        """
        _, own, at = np.intersect1d(
            self.meeting, there.meeting, assume_unique=True, return_indices=True
        )
        times = (self.start_ns[own], self.end_ns[own], there.start_ns[at], there.end_ns[at])
        every, sure = Shared(*times), self.sure[own]
        pairs = zip(every.where(sure), _waiting(every.where(~sure)), strict=True)
        found = Shared(*map(np.concatenate, pairs))
        order = np.argsort(found.end_ns, kind="stable")
        return Shared(*(column[order] for column in found))


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
    number, step = (
        table.numbers(each, -1) if each in heads else nothing for each in ("number", "step")
    )
    keep = np.flatnonzero((waits >= 0) & ((number >= 0) | (step > 0)))
    if not len(keep):
        return None
    place = np.where(number >= 0, number, step)
    key = [(group * len(_ALL) + waits)[keep], (number >= 0)[keep], place[keep]]
    order, starts = match_occurrences(key, rank[keep], start[keep])
    at = keep[order]
    meeting = np.repeat(np.arange(len(starts)), group_sizes(starts, len(order)))
    return Met(rank[at], start[at], start[at] + took[at], meeting, group[at] >= 0)


def _operation(name: str) -> int:
    """Return which of `_ALL` an operation or a kernel is, -1 for others."""
    found = _KERNEL.search(name)
    short = found[1].lower().replace("_", "") if found else ""
    return next((at for at, each in enumerate(_ALL) if each.replace("_", "") == short), -1)


def _waiting(found: Shared) -> Shared:
    """Return those of which it shows that ranks met in them; none where it does not."""
    nothing = np.zeros(len(found.end_ns), bool)
    if len(nothing) < _FEWEST:
        return found.where(nothing)
    low, high = found.bounds()
    ends, starts = found.end_there_ns - found.end_ns, found.start_there_ns - found.start_ns
    middle = np.sort(ends)[len(ends) // 2]
    agree = (low <= middle) & (middle <= high)
    count = int(np.count_nonzero(agree))
    closer = count >= _FEWEST and _spread(ends[agree]) * _CLOSER <= _spread(starts[agree])
    return found.where(agree if closer and 2 * count > len(agree) else nothing)


def _spread(values: Int64s) -> float:
    return float(np.median(abs(values - np.median(values))))


_WINDOW_NS = 10**9  # collectives within it bound one offset: clocks part by 0.1 ms in it, at most
_MOST = 64  # windows
_WRONG = 0.1  # of the bounds may contradict what all together tell


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
    if left and "collectives" in spans.tables:  # asked for now, and often once more
        kept = {"collectives": cache(spans.tables["collectives"])}
        spans = replace(spans, tables={**spans.tables, **kept})
    found = _solved(spans, rows) if left else {}
    clocks = {row.rank: found[row.clock].clock for row in rows if row.clock in found}
    spans = moved(spans, {rank: each for rank, each in clocks.items() if each.offset_ns.any()})
    rows = _told(spans, rows, found)
    warnings = (*spans.warnings, *_doubts(spans, rows))
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
    return [
        row.is_reference(reference)
        if row.clock == first
        else _compared_row(spans, row, reference, found[row.clock])
        if row.clock in found
        else row
        for row in rows
    ]


def _compared_row(spans: Spans, row: ClockRow, reference: int, solved: _Solved) -> ClockRow:
    unix = spans.headers[row.rank].unix_ns
    return row._replace(
        reference=reference,
        method="collectives",
        exchanges=solved.meetings,
        off_ns=unix - spans.unix_ns - spans.later(row.rank, unix) if unix else None,
        uncertainty_ns=solved.unsure_ns,
        drift=solved.clock.drift * 1e6,
        drift_uncertainty=solved.clock.drift_uncertainty * 1e6,
        jumps=len(solved.clock.jumps),
    )


def _doubts(spans: Spans, rows: Sequence[ClockRow]) -> list[RunWarning]:
    """Say whose times can be compared only roughly; of a trace without a date that is said."""
    rows = [row for row in rows if spans.headers[row.rank].unix_ns]
    left = [row for row in rows if row.uncertainty_ns is None]
    clocks = len({row.clock for row in left}) + (len(left) < len(rows))
    if clocks < 2:
        return []
    if not all(row.host for row in left):
        ranks = as_ranges(row.rank for row in left if not row.host)
        text = f"hosts of ranks {ranks} are unknown and clocks are unsynchronized: between ranks"
        text += ", times may be off by milliseconds"
        return [RunWarning(None, text, Code.CLOCKS_DOUBTFUL.value)]
    text = f"clocks of {clocks} hosts are unsynchronized: between hosts, times may be off by ms"
    return [RunWarning(None, text, Code.CLOCKS_DOUBTFUL.value)]


def _solved(spans: Spans, rows: Sequence[ClockRow]) -> dict[int, _Solved]:
    """Compare clock after clock with those that are known already.

    Where none is known, it is that of the lowest rank.
    """
    calls = met(spans)
    if calls is None:
        return {}
    unsure = {row.clock: row.uncertainty_ns for row in rows if row.uncertainty_ns is not None}
    unsure = unsure or {rows[0].clock: 0}
    left = {row.clock: row for row in rows if row.clock == row.rank and row.clock not in unsure}
    clock_of = np.zeros(max(row.rank for row in rows) + 1, np.int64)
    clock_of[[row.rank for row in rows]] = [row.clock for row in rows]
    found: dict[int, _Solved] = {}
    while left:
        whose = clock_of[calls.rank]
        there, worst = calls.side(np.flatnonzero(np.isin(whose, [*unsure]))), max(unsure.values())
        new: dict[int, _Solved] = {}
        for clock, row in left.items():
            shared = calls.side(np.flatnonzero(whose == clock)).shared(there)
            own = clock_of[spans.rank] == clock
            edges = [spans.start_ns[own].min(), spans.end_ns[own].max()] if own.any() else []
            may_be_one = bool(spans.headers[clock].unix_ns) and not row.host
            solved = _compared(shared, edges, worst, may_be_one=may_be_one)
            new |= {} if solved is None else {clock: solved}
        if not new:
            break
        calls, found = _on(calls, whose, new), found | new
        unsure |= {clock: solved.unsure_ns for clock, solved in new.items()}
        left = {clock: row for clock, row in left.items() if clock not in new}
    return found


def _on(calls: Met, whose: Int64s, clocks: Mapping[int, _Solved]) -> Met:
    """Return the calls with those of some clocks moved."""

    def shift(clock: int, times: Int64s) -> Int64s:
        return clocks[clock].clock.moved(times) if clock in clocks else times

    start, end = (shift_cells(each, whose, shift) for each in (calls.start_ns, calls.end_ns))
    return calls._replace(start_ns=start, end_ns=end)


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
    window = max(int(np.ptp(shared.end_ns)) // _MOST, _WINDOW_NS)
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
    return bool(np.count_nonzero(wrong) <= _WRONG * len(low))
