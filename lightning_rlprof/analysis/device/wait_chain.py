"""The way back from the end of a step through what it waited for, device work and the host."""

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_rlprof.tables.arrays import Int64s

LATENCY_NS = 30_000
"""Up to here it is launch latency that work has been launched and not begun.

HTA's 30, whose documentation calls them nanoseconds while its data are microseconds.
"""

HOST, LAUNCH, GAP = -1, -2, -3
"""What lies on the way beside device work: the host, from a launch to the start, between two."""

_NEVER = -(2**62)


class Way(NamedTuple):
    """Stretches of the ways as columns of one length.

    Attributes:
        start: Where each begins, in nanoseconds.
        end: Where it ends; later.
        what: Number of the device work, or one of those above.
        of: Of device work that, of a delay the number of the work that it delayed, else `HOST`.
    """

    start: Int64s
    end: Int64s
    what: Int64s
    of: Int64s


class Walk:
    """What each piece of a rank's device work waited for, and the ways that follow from it.

    A piece begins when it has been launched and what is before it on its stream has ended; of
    both it waited for the later one. What each of them takes until work begins is the median where
    the other one was early, of those up to `LATENCY_NS`. A piece that begins later than both allow
    waited for what ended last on another stream, as `cudaStreamWaitEvent` makes it.

    Args:
        start: Where each piece begins, in nanoseconds.
        end: Where it ends; later.
        stream: Number of its stream.
        handed: When the host had handed it over; `unknown` where that was not recorded.
        waits: Where calls begin and end in which the host waits for the device.
        unknown: Stands for a launch that was not recorded.
    """

    def __init__(
        self,
        start: Int64s,
        end: Int64s,
        stream: Int64s,
        handed: Int64s,
        waits: tuple[Int64s, Int64s],
        unknown: int,
    ) -> None:
        self._start, self._end, self._stream = start, end, stream
        self._handed = np.where(handed == unknown, _NEVER, np.minimum(handed, start))
        self._order = np.argsort(end, kind="stable")
        ends = end[self._order]
        first, last = (np.searchsorted(ends, each, "right") for each in waits)
        last = np.maximum(first, last)
        begun, over = (np.bincount(each, minlength=len(end) + 1) for each in (first, last))
        waited = np.cumsum(begun - over)[:-1] > 0  # what ended while anybody waited
        self._ended, self._ends = self._order[waited].data, ends[waited].data
        self._told_ends = end.data

    def ways(self, stretches: Iterable[tuple[int, int, int]]) -> Way:
        """Return the ways back through some stretches of time, each without a gap, in any order.

        Args:
            stretches: Where each begins and ends, and the piece that ends there, or `HOST`.
        """
        chain: list[int] = []
        lows: list[int] = []
        hosts: list[tuple[int, int]] = []
        for low, high, last in stretches:
            now, at = high, last
            while now > low:
                if at == HOST:
                    at, since = self._waited_for(now)
                    hosts.append((max(since, low), now))
                    now = since
                else:
                    now, at = self._follow(at, low, chain), HOST
                    lows += [low] * (len(chain) - len(lows))
        return self._way(np.array(chain, np.int64), np.array(lows, np.int64), hosts)

    def _follow(self, piece: int, low: int, chain: list[int]) -> int:
        """Add a piece and what it waited for on the device; return until when the host had it."""
        starts, before, handed = self._views
        while True:
            chain.append(piece)
            earlier: int = before[piece]
            if earlier < 0:
                until: int = handed[piece]
                return starts[piece] if until == _NEVER else until
            if self._told_ends[earlier] <= low:
                return low
            piece = earlier

    def _way(self, chain: Int64s, lows: Int64s, hosts: list[tuple[int, int]]) -> Way:
        start, before = self._start[chain], self._before[chain]
        handed = np.where(self._handed[chain] == _NEVER, start, self._handed[chain])
        since = np.where(before >= 0, self._end[before], handed)
        delay = np.where(before >= 0, GAP, LAUNCH)
        host = np.array(hosts, np.int64).reshape(-1, 2).T
        nobody = np.full(host.shape[1], HOST)
        columns = (
            (np.maximum(start, lows), np.maximum(since, lows), host[0]),
            (self._end[chain], start, host[1]),
            (chain, delay, nobody),
            (chain, chain, nobody),
        )
        way = Way(*map(np.concatenate, columns))
        return Way(*(column[way.end > way.start] for column in way))

    def _waited_for(self, now: int) -> tuple[int, int]:
        """Return for what the host last waited before a moment, and when that ended."""
        place = bisect_right(self._ends, now) - 1
        return (self._ended[place], self._ends[place]) if place >= 0 else (HOST, _NEVER)

    @cached_property
    def _before(self) -> Int64s:
        """The piece that each one waited for, -1 where that was the host."""
        own, other = self._neighbours()
        after = np.append(self._end, _NEVER)[own]
        launched = self._handed > _NEVER
        delay, queued = self._start - self._handed, self._start - after
        # Of 0 are copies that begin in their call.
        latency = _median(delay[launched & (after <= self._handed) & (delay > 0)])
        turn = _median(queued[(own >= 0) & (self._handed + latency < after)])
        by_host = np.where(launched, self._handed + latency, _NEVER)
        by_stream = np.where(own >= 0, after + turn, _NEVER)
        before = np.where(by_stream >= by_host, own, -1)
        ready = np.maximum(by_stream, by_host)
        elsewhere = np.append(self._end, _NEVER)[other]
        late = self._start - ready > max(latency, turn)
        return np.where(late & (elsewhere + turn > ready), other, before)

    @cached_property
    def _views(self) -> tuple[memoryview, ...]:
        """Start, piece before, and ``handed``, item by item: few become Python's numbers."""
        return self._start.data, self._before.data, self._handed.data

    def _neighbours(self) -> tuple[Int64s, Int64s]:
        """Return what ended last before each piece began: on its own stream, and on any; or -1."""
        own = np.full(len(self._start), -1)
        for stream in np.unique(self._stream).tolist():
            rows = np.flatnonzero(self._stream == stream)
            order = rows[np.argsort(self._end[rows], kind="stable")]
            at = np.searchsorted(self._end[order], self._start[rows], "right") - 1
            own[rows] = np.where(at >= 0, order[at], -1)
        at = np.searchsorted(self._end[self._order], self._start, "right") - 1
        return own, np.where(at >= 0, self._order[at], -1)


def _median(delays: Int64s) -> int:
    delays = delays[delays <= LATENCY_NS]  # beyond, they waited for something else
    return int(np.median(delays)) if len(delays) else 0
