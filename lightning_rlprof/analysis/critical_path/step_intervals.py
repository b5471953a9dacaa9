"""Step intervals: steps from one global sync point to the next, on the clock of each rank."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.steps.partition import Partition
from lightning_rlprof.analysis.steps.sync_points import SyncPoints, has_handoffs
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.spans import Spans

_MOSTLY = 0.5  # of the steps must have a global sync point, else the clocks give the boundaries
_JOINED = "last global synchronization (no clock comparison needed)"
_CLOCKS = "step start and end by the clocks (no sync point includes all ranks)"
_LAST = "step ends of the last rank, by the clocks (no sync point includes all ranks)"


class StepIntervals(NamedTuple):
    """Start and end of each interval on each chain's clock, shape (chains, intervals).

    Attributes:
        begin_ns: Start.
        end_ns: End.
        steps: RL step of each interval.
        synchronized: Whether the intervals start and end at sync points of all chains.
        boundaries: Where they start and end, for the reader.
    """

    begin_ns: Int64s
    end_ns: Int64s
    steps: Int64s
    synchronized: bool
    boundaries: str

    def only(self, kept: Int64s) -> "StepIntervals":
        """Return some of them, by index."""
        times = self.begin_ns[:, kept], self.end_ns[:, kept]
        return StepIntervals(*times, self.steps[kept], self.synchronized, self.boundaries)

    @property
    def offset_ns(self) -> Int64s:
        """How much later each run starts than its interval; 0 if all start at a sync point."""
        if self.synchronized:
            return np.zeros(self.begin_ns.size, dtype=np.int64)
        found: Int64s = (self.begin_ns - self.begin_ns.min(axis=0)).ravel()
        return found

    @property
    def wall_ns(self) -> Int64s:
        """Duration of each interval."""
        if not self.synchronized:
            found: Int64s = self.end_ns.max(axis=0) - self.begin_ns.min(axis=0)
            return found
        took: Int64s = np.sort(self.end_ns - self.begin_ns, axis=0)[len(self.end_ns) // 2]
        return took


def find_step_intervals(
    spans: Spans, cut: Partition, threads: Int64s, complete: Mask, sync_points: SyncPoints
) -> StepIntervals:
    """Cut the complete steps at the last sync point of all chains, or by the clocks without one.

    Excludes steps that a chain lacks, and those that are empty or start before an earlier one
    ended, on any chain. If chains exchange samples or weights, but have no global sync points, all
    have the intervals of the chain that ends its steps last.

    Args:
        spans: The run.
        cut: Its partition.
        threads: Training threads, one per chain.
        complete: Which step rows are complete.
        sync_points: Those of the threads.
    """
    numbers = np.unique(spans.step[cut.steps])
    fine = np.setdiff1d(numbers, spans.step[cut.steps[~complete]])
    chains = len(threads)
    own = sync_points.group[sync_points.chain == 0]
    full = own[sync_points.size[own] == chains][::-1]  # the last one first
    steps, first = np.unique(sync_points.step[full], return_index=True)
    if chains > 1 and len(steps) >= max(_MOSTLY * len(numbers), 2):
        edge = np.zeros((chains, len(sync_points.size)), dtype=np.int64)
        edge[sync_points.chain, sync_points.group] = sync_points.end_ns
        edge, keep = edge[:, full[first]], _follow(numbers, steps, fine)
        found = StepIntervals(edge[:, keep], edge[:, keep + 1], steps[keep + 1], True, _JOINED)
    elif chains > 1 and has_handoffs(spans):
        found = _by_last(spans, cut, threads, fine)
    else:
        found = _by_clock(spans, cut, threads, fine)
    latest = np.maximum.accumulate(found.end_ns, axis=1)[:, :-1]
    before = np.insert(latest, 0, np.iinfo(np.int64).min, axis=1)[:, : len(found.steps)]
    sound = ((found.end_ns > found.begin_ns) & (found.begin_ns >= before)).all(axis=0)
    return found.only(np.flatnonzero(sound))


def _follow(numbers: Int64s, steps: Int64s, fine: Int64s) -> Int64s:
    """Return the indices of steps whose successor is next in number, if both are complete."""
    place, known = np.searchsorted(numbers, steps), np.isin(steps, fine)
    return np.flatnonzero((np.diff(place) == 1) & known[1:] & known[:-1])


def _by_clock(spans: Spans, cut: Partition, threads: Int64s, fine: Int64s) -> StepIntervals:
    """Return the steps that all threads have, from their own start to their own end."""
    rows = cut.steps[np.isin(spans.step[cut.steps], fine)]
    times = np.full((2, len(threads), len(fine)), -1, dtype=np.int64)
    at = np.searchsorted(threads, spans.thread[rows]), np.searchsorted(fine, spans.step[rows])
    times[(0, *at)], times[(1, *at)] = spans.start_ns[rows], spans.end_ns[rows]
    keep = (times >= 0).all(axis=(0, 1))
    return StepIntervals(times[0][:, keep], times[1][:, keep], fine[keep], False, _CLOCKS)


def _by_last(spans: Spans, cut: Partition, threads: Int64s, fine: Int64s) -> StepIntervals:
    """Cut at the step ends of the thread that finishes last, for all threads.

    Every thread must have started before the interval, and not have ended within it.
    """
    own = _by_clock(spans, cut, threads, fine)
    if not len(own.steps):
        return own
    leader = int(np.argmax(np.median(own.end_ns - own.end_ns.max(axis=0), axis=1)))
    edge, where = own.end_ns[leader], spans.thread[cut.steps]
    first, last = np.full(len(threads), edge.max()), np.zeros(len(threads), dtype=np.int64)
    np.minimum.at(first, np.searchsorted(threads, where), spans.start_ns[cut.steps])
    np.maximum.at(last, np.searchsorted(threads, where), spans.end_ns[cut.steps])
    keep = _follow(np.unique(spans.step[cut.steps]), own.steps, fine)
    keep = keep[(edge[keep] >= first.max()) & (edge[keep + 1] <= last.min())]
    begin, end = (np.tile(each, (len(threads), 1)) for each in (edge[keep], edge[keep + 1]))
    return StepIntervals(begin, end, own.steps[keep + 1], False, _LAST)
