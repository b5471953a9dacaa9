"""The way back from the end of a step through what it waited for, device work and the host."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_rlprof.spans import Int64s

__all__ = ["GAP", "HOST", "LATENCY_NS", "LAUNCH", "Piece", "Walk"]

LATENCY_NS = 30_000
"""Up to here it is launch latency that work has been launched and not begun.

HTA's 30, whose documentation calls them nanoseconds while its data are microseconds.
"""

HOST, LAUNCH, GAP = -1, -2, -3
"""What lies on the way beside device work: the host, from a launch to the start, between two."""

_NEVER = -(2**62)


class Piece(NamedTuple):
    """A stretch of the way: from, to, and the number of the device work or one of those above."""

    start_ns: int
    end_ns: int
    what: int


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
        some = np.flatnonzero(last > first)  # in the others nothing ended
        some = some[np.argsort(waits[0][some], kind="stable")]
        self._waits = [each[some].tolist() for each in waits]
        self._ended, self._ends = self._order.tolist(), ends.tolist()

    def back(self, low: int, high: int, last: int = HOST) -> Iterator[Piece]:
        """Yield the way from one moment back to another, without a gap, the last piece first.

        Args:
            low: Where it begins.
            high: Where it ends.
            last: The piece of device work that ends there, or `HOST`.
        """
        now, at = high, last
        while now > low:
            if at == HOST:
                at, since = self._waited_for(now)
                steps = [(since, HOST)]
            else:
                steps, at = self._before(at)
            for since, what in steps:
                if since < now > low:
                    yield Piece(max(since, low), now, what)
                    now = since

    def _before(self, piece: int) -> tuple[list[tuple[int, int]], int]:
        """Return what lies before the end of a piece, the last first, and what ends there."""
        start, before, handed = (column[piece] for column in self._links)
        if before >= 0:
            return [(start, piece), (self._told_ends[before], GAP)], before
        return [(start, piece), (handed if handed > _NEVER else start, LAUNCH)], HOST

    def _waited_for(self, now: int) -> tuple[int, int]:
        """Return for what the host last waited before a moment, and when that ended."""
        starts, ends = self._waits
        for at in range(bisect_left(starts, now) - 1, -1, -1):
            place = bisect_right(self._ends, min(ends[at], now)) - 1
            if place >= 0 and self._ends[place] > starts[at]:
                return self._ended[place], self._ends[place]
        return HOST, _NEVER

    @cached_property
    def _told_ends(self) -> list[int]:
        ends: list[int] = self._end.tolist()
        return ends

    @cached_property
    def _links(self) -> tuple[list[int], list[int], list[int]]:
        """Return of each piece its start, the piece that it waited for or -1, and ``handed``."""
        own, other = self._neighbours()
        after = np.append(self._end, _NEVER)[own]
        launched = self._handed > _NEVER
        delay, queued = self._start - self._handed, self._start - after
        latency = _median(delay[launched & (after <= self._handed)])
        turn = _median(queued[(own >= 0) & (self._handed + latency < after)])
        by_host = np.where(launched, self._handed + latency, _NEVER)
        by_stream = np.where(own >= 0, after + turn, _NEVER)
        before = np.where(by_stream >= by_host, own, -1)
        ready = np.maximum(by_stream, by_host)
        elsewhere = np.append(self._end, _NEVER)[other]
        late = self._start - ready > max(latency, turn)
        before = np.where(late & (elsewhere + turn > ready), other, before)
        return self._start.tolist(), before.tolist(), self._handed.tolist()

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
