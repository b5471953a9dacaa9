"""One time axis for many clocks: where each rank's clock stands in wall-clock time."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.clock import Clock, Knot, from_exchange, solve
from lightning_rlprof.model import Header
from lightning_rlprof.spans import Int64s, Problem
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["Meetings", "OnAxis", "clock_table", "on_axis", "uncalibrated"]

# Ranks of one host read one monotonic clock, so their anchors differ only by the time between the
# two readings and by what NTP slewed between their starts. More than this is another machine.
_ONE_CLOCK_NS = 1_000_000_000

Meetings = Sequence[tuple[int, Sequence[tuple[int, int, int, int]]]]
"""A rank's exchanges: with which rank, and the readings of its ping-pongs."""

_COLUMNS = (
    Column("rank", "count"),
    Column("host", "text"),
    Column("reference", "count"),
    Column("method", "text"),
    Column("exchanges", "count"),
    Column("wall clock off", "duration", "ns"),
    Column("uncertainty", "duration", "ns"),
    Column("drift", "number", "ppm"),
    Column("drift uncertainty", "number", "ppm"),
    Column("jumps", "count"),
)


@dataclass(frozen=True, eq=False)
class OnAxis:
    """How a rank's clock becomes wall-clock time, the same for all ranks whose clocks are known.

    Attributes:
        anchor_ns: What its host adds to this clock to get its own wall clock.
        reference: The rank whose clock the host's was compared with, if any.
        shift_ns: What to add to ``clock``'s times, or to the rank's own where there is no clock.
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

    def is_base(self, other: "OnAxis") -> bool:
        """Tell whether the other one stands on this clock."""
        return other.shift_ns == self.anchor_ns

    def off(self, unix_ns: int) -> int:
        """Return how far the host's wall clock is ahead when it says this."""
        time = unix_ns - self.anchor_ns
        return unix_ns - int(self.unix(np.array([time]))[0])


def on_axis(
    headers: Mapping[int, Header], meetings: Mapping[int, Meetings] | None = None
) -> tuple[dict[int, OnAxis], list[Problem]]:
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
    alone = 0
    for anchor, ranks in groups:
        there, clock = _solved(ranks, meetings or {})
        own = OnAxis(anchor, None, anchor)
        if clock is None or there in ranks or there not in anchors:
            alone += 1
        else:
            own = OnAxis(anchor, there, anchors[there], clock)
            problems += _doubts(headers[ranks[0]].host, clock)
        found |= dict.fromkeys(ranks, own)
    return dict(sorted(found.items())), [*problems, *uncalibrated(alone)]


def uncalibrated(clocks: int) -> list[Problem]:
    """Say that times of several clocks can be compared only roughly; nothing of one clock."""
    text = f"clocks of {clocks} hosts are not calibrated: between hosts, times may be off by ms"
    return [Problem(None, text)] if clocks > 1 else []


def clock_table(headers: Mapping[int, Header], ranks: Mapping[int, OnAxis]) -> Table:
    """Return what is known of each rank's clock: a row per rank, by rank.

    ``wall clock off`` is how far its host's wall clock was ahead of the reference's when the rank
    started, ``uncertainty`` the largest one from the first exchange to the last. Both, and what
    follows, are not known without a comparison; ranks of one clock need none.
    """
    rows = [_row(rank, headers[rank], ranks) for rank in ranks]
    return Table("clocks", _COLUMNS, rows)


def _row(rank: int, header: Header, ranks: Mapping[int, OnAxis]) -> tuple[Cell, ...]:
    own, clock = ranks[rank], ranks[rank].clock
    if clock is None:
        told = [each.reference for each in ranks.values() if each.clock and own.is_base(each)]
        same = (told[0], "reference", 0, 0, 0) if told else (None, "wall clock", 0, None, None)
        return (rank, header.host, *same, None, None, None)
    return (
        rank,
        header.host,
        own.reference,
        "ping-pong",
        len(clock.time_ns),
        own.off(header.unix_ns),
        clock.largest_ns,
        clock.drift * 1e6,
        clock.drift_uncertainty * 1e6,
        len(clock.jumps),
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


def _doubts(host: str, clock: Clock) -> list[Problem]:
    """Say where a clock was set: times between two exchanges are uncertain by as much."""
    texts = [
        f"host {host}: its clock was set by {jump.size_ns / 1e6:+.1f} ms against the others, some "
        f"time within {(jump.before_ns - jump.after_ns) / 1e9:.0f} s"
        for jump in clock.jumps
    ]
    return [Problem(None, text) for text in texts]


def _groups(headers: Mapping[int, Header]) -> tuple[list[tuple[int, list[int]]], list[Problem]]:
    """Return each clock's anchor and ranks, and what is doubtful of hosts."""
    groups, problems = [], []
    for host, pairs in _hosts(headers).items():
        clocks = _clocks(sorted(pairs))
        if len(clocks) > 1:
            text = f"host {host}: its ranks' clocks disagree by seconds, as on {len(clocks)} hosts"
            problems.append(Problem(None, text))
        for clock in clocks:
            median = clock[(len(clock) - 1) // 2][0]
            groups.append((median, sorted(rank for _, rank in clock)))
    return groups, problems


def _hosts(headers: Mapping[int, Header]) -> dict[str, list[tuple[int, int]]]:
    """Return each host's (anchor, rank) pairs."""
    hosts: dict[str, list[tuple[int, int]]] = {}
    for rank, header in headers.items():
        hosts.setdefault(header.host, []).append((header.unix_ns - header.clock_ns, rank))
    return hosts


def _clocks(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split one host's sorted (anchor, rank) pairs where neighbours cannot share a clock."""
    groups = [[pairs[0]]]
    for before, pair in itertools.pairwise(pairs):
        if pair[0] - before[0] > _ONE_CLOCK_NS:
            groups.append([])
        groups[-1].append(pair)
    return groups
