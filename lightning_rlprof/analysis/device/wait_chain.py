"""What each kernel or copy waited for, and the chain of waits back from the end of a step."""

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import NOT_RECORDED
from lightning_rlprof.tables.arrays import Int64s

LATENCY_NS = 30_000
"""Up to this long after its launch, work that has not started is in launch latency.

HTA has the same 30 µs. Its documentation calls them nanoseconds, while its data are microseconds.
"""

HOST, LAUNCH, GAP = -1, -2, -3
"""What is on the path except device work: the host, from a launch to the start, a kernel gap."""

_NEVER = -(2**62)


class PathSegments(NamedTuple):
    """Segments of critical paths as columns of one length.

    Attributes:
        start: Where each begins, in nanoseconds.
        end: Where it ends; later.
        what: Number of the device work, or `HOST`, `LAUNCH` or `GAP`.
        work: The device work itself, of a delay the work that it delayed, else `HOST`.
    """

    start: Int64s
    end: Int64s
    what: Int64s
    work: Int64s


class WaitChain:
    """What each kernel or copy of a rank waited for, and the critical paths that follow from it.

    Work starts when it has been queued and the work before it on its stream has ended; it waited
    for the later one. How long each of the two takes until the start is a median: over work for
    which the other one was early, and up to `LATENCY_NS`. Work that starts later than both allow
    waited for the work that ended last on another stream, as after `cudaStreamWaitEvent`.

    Args:
        start: Where each kernel or copy starts, in nanoseconds.
        end: Where it ends; later.
        stream: Number of its stream.
        queued: When the host had launched it, or `NOT_RECORDED`.
        waits: Starts and ends of calls in which the host waits for the device.
    """

    def __init__(
        self,
        start: Int64s,
        end: Int64s,
        stream: Int64s,
        queued: Int64s,
        waits: tuple[Int64s, Int64s],
    ) -> None:
        self._start, self._end, self._stream = start, end, stream
        self._queued = np.where(queued == NOT_RECORDED, _NEVER, np.minimum(queued, start))
        self._order = np.argsort(end, kind="stable")
        ends = end[self._order]
        first, last = (np.searchsorted(ends, each, "right") for each in waits)
        last = np.maximum(first, last)
        opened, closed = (np.bincount(each, minlength=len(end) + 1) for each in (first, last))
        waited = np.cumsum(opened - closed)[:-1] > 0  # what ended while the host waited
        self._awaited, self._awaited_ends = self._order[waited].data, ends[waited].data

    def paths(self, intervals: Iterable[tuple[int, int, int]]) -> PathSegments:
        """Return the critical paths back through some intervals, each gapless, in any order.

        Args:
            intervals: Where each begins and ends, and the work that ends there, or `HOST`.
        """
        chain: list[int] = []
        lows: list[int] = []
        hosts: list[tuple[int, int]] = []
        for low, high, last in intervals:
            now, at = high, last
            while now > low:
                if at == HOST:
                    place = bisect_right(self._awaited_ends, now) - 1
                    until = _NEVER
                    if place >= 0:
                        at, until = self._awaited[place], self._awaited_ends[place]
                    hosts.append((max(until, low), now))
                    now = until
                else:
                    now, at = self._follow(at, low, chain), HOST
                    lows += [low] * (len(chain) - len(lows))
        return self._segments(np.array(chain, np.int64), np.array(lows, np.int64), hosts)

    def _follow(self, work: int, low: int, chain: list[int]) -> int:
        """Add work and what it waited for on the device; return until when the host had control."""
        starts, ends, before, queued = self._views
        while True:
            chain.append(work)
            earlier: int = before[work]
            if earlier < 0:
                until: int = queued[work]
                return starts[work] if until == _NEVER else until
            if ends[earlier] <= low:
                return low
            work = earlier

    def _segments(self, chain: Int64s, lows: Int64s, hosts: list[tuple[int, int]]) -> PathSegments:
        start, before = self._start[chain], self._before[chain]
        queued = np.where(self._queued[chain] == _NEVER, start, self._queued[chain])
        ready = np.where(before >= 0, self._end[before], queued)
        delay = np.where(before >= 0, GAP, LAUNCH)
        host = np.array(hosts, np.int64).reshape(-1, 2).T
        no_work = np.full(host.shape[1], HOST)
        columns = (
            (np.maximum(start, lows), np.maximum(ready, lows), host[0]),
            (self._end[chain], start, host[1]),
            (chain, delay, no_work),
            (chain, chain, no_work),
        )
        found = PathSegments(*map(np.concatenate, columns))
        return PathSegments(*(column[found.end > found.start] for column in found))

    @cached_property
    def _before(self) -> Int64s:
        """The work that each kernel or copy waited for, -1 if that was the host."""
        same, other = self._predecessors()
        after = np.append(self._end, _NEVER)[same]
        launched = self._queued > _NEVER
        delay, gap = self._start - self._queued, self._start - after
        # Copies that start within their call have a delay of 0.
        latency = _median(delay[launched & (after <= self._queued) & (delay > 0)])
        turn = _median(gap[(same >= 0) & (self._queued + latency < after)])
        by_host = np.where(launched, self._queued + latency, _NEVER)
        by_stream = np.where(same >= 0, after + turn, _NEVER)
        before = np.where(by_stream >= by_host, same, -1)
        ready = np.maximum(by_stream, by_host)
        elsewhere = np.append(self._end, _NEVER)[other]
        late = self._start - ready > max(latency, turn)
        return np.where(late & (elsewhere + turn > ready), other, before)

    @cached_property
    def _views(self) -> tuple[memoryview, ...]:
        """Start, end, work before and queued: read item by item, few become Python's numbers."""
        return self._start.data, self._end.data, self._before.data, self._queued.data

    def _predecessors(self) -> tuple[Int64s, Int64s]:
        """Return what ended last before each start, on the same stream and on any; -1 if none."""
        same = np.full(len(self._start), -1)
        for stream in np.unique(self._stream).tolist():
            rows = np.flatnonzero(self._stream == stream)
            order = rows[np.argsort(self._end[rows], kind="stable")]
            at = np.searchsorted(self._end[order], self._start[rows], "right") - 1
            same[rows] = np.where(at >= 0, order[at], -1)
        at = np.searchsorted(self._end[self._order], self._start, "right") - 1
        return same, np.where(at >= 0, self._order[at], -1)


def _median(delays: Int64s) -> int:
    delays = delays[delays <= LATENCY_NS]  # longer ones waited for something else
    return int(np.median(delays)) if len(delays) else 0
