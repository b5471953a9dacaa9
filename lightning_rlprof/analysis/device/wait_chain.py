"""What each kernel or copy waited for, and the chain of waits back from the end of a step."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.timeline import LATENCY_NS
from lightning_rlprof.analysis.device.work import NOT_RECORDED
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.intervals import open_count

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


def critical_paths(
    start: Int64s,
    end: Int64s,
    stream: Int64s,
    queued: Int64s,
    waits: tuple[Int64s, Int64s],
    intervals: Iterable[tuple[int, int, int]],
) -> PathSegments:
    """Return the critical paths of a rank back through some intervals, each gapless, in any order.

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
        intervals: Where each begins and ends, and the work that ends there, or `HOST`.
    """
    queued = np.where(queued == NOT_RECORDED, _NEVER, np.minimum(queued, start))
    before = _waited_for(start, end, stream, queued)
    queued = np.where(queued == _NEVER, start, queued)
    by_end = np.argsort(end, kind="stable")
    awaited = by_end[_while_waiting(end[by_end], *waits)]
    # A memoryview makes a Python number only of what is read: of few.
    ends, earlier, launched = end.data, before.data, queued.data
    awaited_ends = end[awaited].data
    chain: list[int] = []
    lows: list[int] = []
    hosts: list[tuple[int, int]] = []
    for low, high, last in intervals:
        now, at = high, last
        while now > low:
            if at == HOST:
                until, place = _NEVER, bisect_right(awaited_ends, now) - 1
                if place >= 0:
                    at, until = int(awaited[place]), awaited_ends[place]
                hosts.append((max(until, low), now))
                now = until
            else:
                chain.append(at)
                lows.append(low)
                now, at = (
                    (launched[at], HOST) if earlier[at] < 0 else (ends[earlier[at]], earlier[at])
                )
    work, low_ns = np.array(chain, np.int64), np.array(lows, np.int64)
    ready = np.where(before[work] >= 0, end[before[work]], queued[work])
    delay = np.where(before[work] >= 0, GAP, LAUNCH)
    host = np.array(hosts, np.int64).reshape(-1, 2).T
    no_work = np.full(len(hosts), HOST)
    columns = (
        (np.maximum(start[work], low_ns), np.maximum(ready, low_ns), host[0]),
        (end[work], start[work], host[1]),
        (work, delay, no_work),
        (work, work, no_work),
    )
    found = PathSegments(*map(np.concatenate, columns))
    return PathSegments(*(column[found.end > found.start] for column in found))


def _while_waiting(ends: Int64s, start: Int64s, end: Int64s) -> Mask:
    """Mark the ascending times at which one of the host's waits was open."""
    first, last = (np.searchsorted(ends, each, "right") for each in (start, end))
    return open_count(first, np.maximum(first, last), len(ends)) > 0


def _waited_for(start: Int64s, end: Int64s, stream: Int64s, queued: Int64s) -> Int64s:
    """Return the work that each kernel or copy waited for, -1 if that was the host."""
    same, other = np.full(len(start), -1), _last_ended(start, end)
    for each in np.unique(stream).tolist():
        rows = np.flatnonzero(stream == each)
        same[rows] = np.append(rows, -1)[_last_ended(start[rows], end[rows])]
    after = np.append(end, _NEVER)[same]
    launched = queued > _NEVER
    delay, gap = start - queued, start - after
    # Copies that start within their call have a delay of 0.
    latency = _median(delay[launched & (after <= queued) & (delay > 0)])
    turn = _median(gap[(same >= 0) & (queued + latency < after)])
    by_host = np.where(launched, queued + latency, _NEVER)
    by_stream = np.where(same >= 0, after + turn, _NEVER)
    ready = np.maximum(by_stream, by_host)
    late = start - ready > max(latency, turn)
    elsewhere = np.append(end, _NEVER)[other]
    on_stream = np.where(by_stream >= by_host, same, -1)
    return np.where(late & (elsewhere + turn > ready), other, on_stream)


def _last_ended(start: Int64s, end: Int64s) -> Int64s:
    """Return what ended last before each start, -1 if nothing did."""
    order = np.argsort(end, kind="stable")
    found: Int64s = np.append(order, -1)[np.searchsorted(end[order], start, "right") - 1]
    return found


def _median(delays: Int64s) -> int:
    delays = delays[delays <= LATENCY_NS]  # longer ones waited for something else
    return int(np.median(delays)) if len(delays) else 0
