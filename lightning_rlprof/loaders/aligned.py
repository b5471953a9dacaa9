"""Clocks that nobody compared, compared by the collectives in which their ranks met."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from lightning_rlprof.clock import Clock, from_collectives, solve
from lightning_rlprof.loaders.axis import ClockRow, table_of, wall_clocks
from lightning_rlprof.loaders.met import Met, Shared, met
from lightning_rlprof.loaders.moved import moved
from lightning_rlprof.loaders.ranks import as_ranges
from lightning_rlprof.spans import Int64s, Problem, Spans

__all__ = ["aligned"]

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
    problems = (*spans.problems, *_doubts(spans, rows))
    table = table_of(rows)
    return replace(spans, problems=problems, tables={**spans.tables, "clocks": lambda: table})


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
    return row._replace(
        reference=reference,
        method="collectives",
        exchanges=solved.meetings,
        off_ns=_off(spans, row.rank),
        uncertainty_ns=solved.unsure_ns,
        drift=solved.clock.drift * 1e6,
        drift_uncertainty=solved.clock.drift_uncertainty * 1e6,
        jumps=len(solved.clock.jumps),
    )


def _off(spans: Spans, rank: int) -> int | None:
    unix = spans.headers[rank].unix_ns
    return unix - spans.unix_ns - spans.later(rank, unix) if unix else None


def _doubts(spans: Spans, rows: Sequence[ClockRow]) -> list[Problem]:
    """Say whose times can be compared only roughly; of a trace without a date that is said."""
    rows = [row for row in rows if spans.headers[row.rank].unix_ns]
    left = [row for row in rows if row.uncertainty_ns is None]
    clocks = len({row.clock for row in left}) + (len(left) < len(rows))
    if clocks < 2:
        return []
    if not all(row.host for row in left):
        ranks = as_ranges(row.rank for row in left if not row.host)
        text = f"hosts of ranks {ranks} are not told, and clocks not calibrated: between ranks"
        return [Problem(None, f"{text}, times may be off by ms")]
    text = f"clocks of {clocks} hosts are not calibrated: between hosts, times may be off by ms"
    return [Problem(None, text)]


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
        for clock, mine in _each(whose):
            if clock in left:
                dated, host = spans.headers[clock].unix_ns, left[clock].host
                shared, edges = calls.side(mine).shared(there), _edges(spans, clock_of, clock)
                solved = _compared(shared, edges, worst, may_be_one=bool(dated) and not host)
                new |= {} if solved is None else {clock: solved}
        if not new:
            break
        calls, found = _on(calls, whose, new), found | new
        unsure |= {clock: solved.unsure_ns for clock, solved in new.items()}
        left = {clock: row for clock, row in left.items() if clock not in new}
    return found


def _each(whose: Int64s) -> Iterator[tuple[int, Int64s]]:
    """Yield each clock and its calls."""
    order = np.argsort(whose, kind="stable")
    clocks, heads = np.unique(whose[order], return_index=True)
    parts = np.split(order, heads[1:])  # of nothing it makes one part
    yield from zip(clocks.tolist(), parts, strict=False)


def _on(calls: Met, whose: Int64s, clocks: Mapping[int, _Solved]) -> Met:
    """Return the calls with those of some clocks moved."""
    start, end = calls.start_ns.copy(), calls.end_ns.copy()
    for clock, mine in _each(whose):
        if clock in clocks:
            start[mine], end[mine] = (clocks[clock].clock.moved(e[mine]) for e in (start, end))
    return calls._replace(start_ns=start, end_ns=end)


def _edges(spans: Spans, clock_of: Int64s, clock: int) -> list[int]:
    """Return when the ranks of a clock began and ended, nothing where they have no spans."""
    ranks = np.flatnonzero(clock_of == clock)
    parts = [slice(*np.searchsorted(spans.rank, [rank, rank + 1])) for rank in ranks.tolist()]
    parts = [part for part in parts if part.stop > part.start]
    first = [int(spans.start_ns[part.start]) for part in parts]
    return [*first, *(int(spans.end_ns[part].max()) for part in parts)]


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
