"""Fit the offset between two clocks, with its uncertainty, from bounds at several times.

A message that leaves here before it arrives there bounds the offset from above. One that leaves
there before it arrives here bounds it from below. Both hold for any delay. So a clock sync exchange
and a collective give the same: a time, two bounds, and a likely value between them. The offset runs
straight from one to the next, and how far it may stray in between is measured: by how much the rate
changes from gap to gap. See ``docs/internals/clock-synchronization.md``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask

DRIFT = 1e-4
"""How fast two clocks may part: two quartzes at the end of their tolerance, 50 ppm each."""

WANDER = 1e-7
"""By how much that rate changes between two knots at least, whatever was measured."""

_WANDERS = 3.0  # The offset may stray by this multiple of the measured change of the rate.
_NOISE = 0.25  # Uneven delays move the middle by this share of the distance of the bounds.
_SHORT = 0.25  # Rates in gaps shorter than this share of the median gap are not used.

Times = Int64s | Sequence[int]


class Knot(NamedTuple):
    """What is known of the offset at one time: it is added to this clock to get the other one.

    Attributes:
        time_ns: On this clock.
        low_ns: The offset is not smaller,
        high_ns: nor larger.
        likely_ns: The best guess, between the two.
    """

    time_ns: int
    low_ns: int
    high_ns: int
    likely_ns: int

    @property
    def half_ns(self) -> int:
        """Return how far the truth may be from the best guess."""
        return max(self.high_ns - self.likely_ns, self.likely_ns - self.low_ns, 1)


class Jump(NamedTuple):
    """A clock was set, or stood still, somewhere between two knots: the offset grew by so much."""

    after_ns: int
    before_ns: int
    size_ns: int


@dataclass(frozen=True, eq=False)
class Clock:
    """The offset to another clock at every time, with its uncertainty.

    Attributes:
        time_ns: Knots on this clock, ascending.
        offset_ns: What to add there.
        uncertainty_ns: How far the truth may be from that.
        wander: How far the rate may have changed between each knot and the next.
        between_ns: By how much more it may be between each knot and the next, where it jumped.
        drift: Nanoseconds that the offset gains in a nanosecond, before and after all knots.
        drift_uncertainty: How far the true drift may be from that.
        jumps: Where the clock was set.
    """

    time_ns: Int64s
    offset_ns: Int64s
    uncertainty_ns: Int64s
    wander: Float64s
    between_ns: Int64s
    drift: float
    drift_uncertainty: float
    jumps: tuple[Jump, ...] = ()

    def offset(self, times: Times) -> Int64s:
        """Return what to add to times of this clock; whole nanoseconds, shape as given."""
        at, share, outside = self._placed(times)
        rise = share * np.diff(self.offset_ns, append=self.offset_ns[-1:])[at]
        rise += self.drift * outside
        return np.asarray(self.offset_ns[at] + np.rint(rise).astype(np.int64), np.int64)

    def uncertainty(self, times: Times) -> Int64s:
        """Return how far the truth may be from `offset`; whole nanoseconds, rounded up."""
        at, share, outside = self._placed(times)
        known, gap = self.uncertainty_ns, np.diff(self.time_ns, append=self.time_ns[-1:])
        found = known[at] + share * np.diff(known, append=known[-1:])[at]
        wander = np.append(self.wander, self.wander[-1:])[at] if len(self.wander) else WANDER
        found += (self.drift_uncertainty + wander) * abs(outside)
        found += wander * gap[at] * np.minimum(share, 1 - share)
        found += (share > 0) * np.append(self.between_ns, 0)[at] * np.maximum(share, 1 - share)
        return np.asarray(np.ceil(found).astype(np.int64), np.int64)

    @property
    def largest_ns(self) -> int:
        """Return the largest uncertainty from the first knot to the last one."""
        first, last = self.time_ns[:-1], self.time_ns[1:]
        times = [self.time_ns, first + 1, first + (last - first) // 2, last - 1]
        return int(self.uncertainty(np.concatenate(times)).max())

    def moved(self, times: Times) -> Int64s:
        """Return times of this clock as times of the other one; their order stays."""
        own = np.asarray(times, np.int64)
        return np.asarray(own + self.offset(own), np.int64)

    def _placed(self, times: Times) -> tuple[Int64s, Float64s, Float64s]:
        """Return the knot before each time, the share of the way to the next one, and the rest.

        The rest is how far a time lies after the last knot, negative before the first one, else 0.
        """
        own, last = np.asarray(times, np.int64), len(self.time_ns) - 1
        at = np.clip(np.searchsorted(self.time_ns, own, side="right") - 1, 0, last)
        way = (own - self.time_ns[at]).astype(float)
        outside = np.where((at == last) | (way < 0), way, 0.0)
        gap = np.maximum(np.diff(self.time_ns, append=self.time_ns[-1:])[at], 1)
        return np.asarray(at, np.int64), np.asarray((way - outside) / gap, float), outside


def from_exchange(readings: Sequence[Sequence[int]]) -> Knot:
    """Return what one exchange tells: some ping-pongs right after one another.

    All of them bound one offset, so the tightest bounds of any count. These are as far apart as the
    fastest round trip took, or closer.

    Args:
        readings: Of each ping-pong: sent (this clock), arrived there, answered there (the other
            clock), received (this clock).

    Example::

        >>> from_exchange([(0, 1_040, 1_050, 90), (200, 1_400, 1_410, 500)])
        Knot(time_ns=45, low_ns=960, high_ns=1040, likely_ns=1000)
    """
    times = np.asarray(readings, np.int64).reshape(-1, 4)
    sent, arrived, answered, received = times.T
    fastest = int(np.argmin(received - sent - (answered - arrived)))
    low, high = _bounds(answered - received, arrived - sent)
    middle = (int(sent[fastest]) + int(received[fastest])) // 2
    return Knot(middle, low, high, (low + high) // 2)


def from_collectives(
    start_ns: Times, end_ns: Times, start_there_ns: Times, end_there_ns: Times
) -> Knot:
    """Return the bounds that some matched collectives give, which followed one another closely.

    No rank ends before all have started: those bounds are certain. The ends are nearly equal: their
    median difference is the best guess. It makes no bound, for a rank that always ends a little
    later than others looks like one with another clock. A bound counts for less by what the clocks
    may have drifted since.

    Args:
        start_ns: When each began on this clock; shape (n,), as all others.
        end_ns: When it ended.
        start_there_ns: When it began for the other rank, on its clock.
        end_there_ns: When it ended there.
    """
    begun, ended, begun_there, ended_there = (
        np.asarray(times, np.int64) for times in (start_ns, end_ns, start_there_ns, end_there_ns)
    )
    middle = int(np.sort(ended)[len(ended) // 2])
    away = np.maximum(abs(ended - middle), abs(begun - middle))
    drifted = np.ceil(DRIFT * away).astype(np.int64)
    lows, highs = begun_there - ended - drifted, ended_there - begun + drifted
    low, high = _bounds(lows, highs)
    likely = int(np.sort(ended_there - ended)[len(ended) // 2])
    return Knot(middle, low, high, min(max(likely, low), high))


def _bounds(lows: Int64s, highs: Int64s) -> tuple[int, int]:
    """Return the tightest bounds, or the widest where the clock was set meanwhile."""
    low, high = int(lows.max()), int(highs.min())
    return (low, high) if low <= high else (int(lows.min()), int(highs.max()))


def solve(knots: Sequence[Knot]) -> Clock | None:
    """Return the clock that all knots allow, or None without any.

    A knot that is coarser than what finer ones tell of its time is not used, unless it contradicts
    them: then the clock was set. Takes O(n²) time, for the some hundred knots of a run.

    Example::

        >>> clock = solve([Knot(0, 90, 110, 100), Knot(1_000_000_000, 1_090, 1_110, 1_100)])
        >>> clock.offset([500_000_000]).tolist(), clock.uncertainty([500_000_000]).tolist()
        ([600], [60])
    """
    chosen: list[Knot] = []
    clock: Clock | None = None
    for knot in sorted(knots, key=lambda each: (each.half_ns, each.time_ns)):
        if clock is not None and not _adds(knot, clock):
            continue
        chosen = [each for each in chosen if each.time_ns != knot.time_ns]
        clock = _fit(sorted([*chosen, knot]))
        chosen.append(knot)
    return clock


def _adds(knot: Knot, clock: Clock) -> bool:
    """Tell whether a knot narrows or contradicts what is known."""
    here = [knot.time_ns]
    offset, unsure = int(clock.offset(here)[0]), int(clock.uncertainty(here)[0])
    apart = offset - unsure > knot.high_ns or offset + unsure < knot.low_ns
    return apart or (knot.half_ns < unsure and knot.time_ns not in clock.time_ns)


def _fit(knots: Sequence[Knot]) -> Clock:
    """Go straight from knot to knot, with a step at each jump, and measure the wander between."""
    table = np.array(knots, np.int64)
    low, high, likely = table[:, 1:].T
    x, y = ((column - column[0]).astype(float) for column in (table[:, 0], likely))
    half = np.maximum(np.maximum(high - likely, likely - low), 1).astype(float)
    gaps, rises = (np.diff(column).astype(float) for column in (table[:, 0], likely))
    slack = half[1:] + half[:-1]
    rough, excess = _jumps(gaps, rises, slack)
    drift, unsure, line = _line(x, y, half, np.cumsum(np.append(0, excess > 0)), rough)
    rest = rises - drift * gaps
    jumps = tuple(
        Jump(knots[at].time_ns, knots[at + 1].time_ns, round(rest[at]))
        for at in np.flatnonzero(excess).tolist()
    )
    # If all bounds allow one drift, that is a better guess than the middles.
    steady = not (np.abs(line - y) > half).any()
    found = np.clip(likely + np.rint(line - y).astype(np.int64), low, high) if steady else likely
    return Clock(
        table[:, 0],
        found,
        np.maximum(high - found, found - low),
        _wander(gaps, rises, slack, excess > 0),
        np.ceil(excess).astype(np.int64),
        drift,
        unsure,
        jumps,
    )


def _wander(gaps: Float64s, rises: Float64s, slack: Float64s, jumped: Mask) -> Float64s:
    """Return how far the rate may have changed inside each gap, by its change between gaps.

    What the bounds of the knots explain is none. Gaps with a jump and short ones are left out.
    """
    found = np.full(len(gaps), WANDER)
    known = np.flatnonzero(~jumped & (gaps >= _SHORT * np.median(gaps if len(gaps) else [0.0])))
    if len(known) < 2:
        return found
    rates, noise = (rises / gaps)[known], (slack / gaps)[known]
    change = np.abs(np.diff(rates)) - _NOISE * np.hypot(noise[1:], noise[:-1])
    change = np.maximum(change, 0.0)
    usual = float(np.sqrt(np.mean(change**2)))
    near = np.maximum(np.append(change, 0.0), np.append(0.0, change))
    found[:] = _WANDERS * usual
    found[known] = _WANDERS * np.maximum(near, usual)
    bounded: Float64s = np.clip(found, WANDER, DRIFT)
    return bounded


def _jumps(gaps: Float64s, rises: Float64s, slack: Float64s) -> tuple[float, Float64s]:
    """Return the drift that most of the time agrees with, and by how much each gap departs from it.

    The departure is 0 where the bounds (``slack``) and some wandering explain it. Two gaps that
    disagree leave open which one jumped: both may have.
    """
    if not len(gaps):
        return 0.0, gaps
    slopes = rises / gaps
    order = np.lexsort((abs(slopes), slopes))
    weight = np.cumsum((gaps / slack)[order])
    drift = float(slopes[order][np.searchsorted(weight, weight[-1] / 2)])
    if abs(drift) > DRIFT:
        drift = 0.0
    excess = abs(slopes - drift) * gaps
    excess[excess <= slack + WANDER * gaps] = 0
    if len(gaps) == 2 and excess.any() and abs(slopes).max() <= DRIFT:
        excess = float(np.ptp(slopes)) * gaps
        drift = float(min(slopes, key=abs))
    return drift, excess


def _line(
    x: Float64s, y: Float64s, half: Float64s, piece: Int64s, rough: float
) -> tuple[float, float, Float64s]:
    """Return drift, how far it may be off, and the line's height at each knot.

    Weights are 1 / half². Of the drift, errors of up to ``half`` at each knot make an error of up
    to their sum by what each weighs in it: delays that are always uneven do not average out.
    """
    weight = 1 / half**2
    total = np.bincount(piece, weight)[piece]
    middle, height = (np.bincount(piece, weight * each)[piece] / total for each in (x, y))
    lever = weight * (x - middle)
    power = float(lever @ (x - middle))
    if len(x) == len(np.unique(piece)) or power <= 0:
        return rough, DRIFT, y
    unsure = float(abs(lever) @ half) / power
    # Knots this close together bound the drift less than `DRIFT` does for any two clocks.
    if unsure >= DRIFT:
        return 0.0, DRIFT, height
    drift = min(max(float(lever @ (y - height)) / power, -DRIFT), DRIFT)
    return drift, unsure, height + drift * (x - middle)
