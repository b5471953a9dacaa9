"""Steps as all ranks live through them, from one place where all are together to the next."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.sync_points import Joins
from lightning_rlprof.analysis.stages.partition import Partition
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.spans import Spans

_MOSTLY = 0.5  # of the steps must have a join of all, else steps are cut by the clock
_JOINED = "last global synchronization (no clock comparison needed)"
_CLOCKS = "step start and end by the clocks (no sync point includes all ranks)"
_LAST = "step ends of the last rank, by the clocks (no sync point includes all ranks)"


class Laps(NamedTuple):
    """Begin and end of laps on each chain's clock, shape (chains, laps), and their steps.

    ``joined``: they begin and end at joins of all chains. ``told`` says where they do.
    """

    begin_ns: Int64s
    end_ns: Int64s
    steps: Int64s
    joined: bool
    told: str

    def only(self, kept: Int64s) -> "Laps":
        """Return some of them, by index."""
        times = self.begin_ns[:, kept], self.end_ns[:, kept]
        return Laps(*times, self.steps[kept], self.joined, self.told)

    @property
    def offset_ns(self) -> Int64s:
        """How much later than its lap each run begins; 0 where laps begin at joins."""
        if self.joined:
            return np.zeros(self.begin_ns.size, dtype=np.int64)
        found: Int64s = (self.begin_ns - self.begin_ns.min(axis=0)).ravel()
        return found

    @property
    def wall_ns(self) -> Int64s:
        """How long each took."""
        if not self.joined:
            found: Int64s = self.end_ns.max(axis=0) - self.begin_ns.min(axis=0)
            return found
        took: Int64s = np.sort(self.end_ns - self.begin_ns, axis=0)[len(self.end_ns) // 2]
        return took


def laps(
    spans: Spans, cut: Partition, threads: Int64s, complete: Mask, met: Joins, *, fed: bool
) -> Laps:
    """Cut the complete steps at the last join of all chains, or by the clocks where there is none.

    Left out are steps that a chain lacks, and those that are empty or begin before an earlier one
    ended, on any chain. ``fed``: chains hand one another samples or weights; then steps are those
    of the chain that ends them last, for all, and what others do lies in the step in which they do
    it.
    """
    numbers = np.unique(spans.step[cut.steps])
    fine = np.setdiff1d(numbers, spans.step[cut.steps[~complete]])
    chains = len(threads)
    full = met.size == chains
    mine = full[met.group] & (met.chain == 0)
    steps, group = met.step[met.group[mine]], met.group[mine]  # by time
    steps, first = np.unique(steps[::-1], return_index=True)
    last = group[::-1][first]
    if chains == 1 or len(steps) < _MOSTLY * len(numbers) or len(steps) < 2:
        by = _by_last if fed and chains > 1 else _by_clock
        return _in_order(by(spans, cut, threads, fine))
    edge = np.zeros((chains, len(met.size)), dtype=np.int64)
    edge[met.chain, met.group] = met.end_ns
    edge = edge[:, last]
    keep = _follow(numbers, steps, fine)
    return _in_order(Laps(edge[:, keep], edge[:, keep + 1], steps[keep + 1], True, _JOINED))


def _follow(numbers: Int64s, steps: Int64s, fine: Int64s) -> Int64s:
    """Return where one step follows the other and both are fine, as the index of the former."""
    place, known = np.searchsorted(numbers, steps), np.isin(steps, fine)
    return np.flatnonzero((np.diff(place) == 1) & known[1:] & known[:-1])


def _by_clock(spans: Spans, cut: Partition, threads: Int64s, fine: Int64s) -> Laps:
    """Return the steps that all threads have, from their own start to their own end."""
    rows = cut.steps[np.isin(spans.step[cut.steps], fine)]
    times = np.full((2, len(threads), len(fine)), -1, dtype=np.int64)
    at = np.searchsorted(threads, spans.thread[rows]), np.searchsorted(fine, spans.step[rows])
    times[(0, *at)], times[(1, *at)] = spans.start_ns[rows], spans.end_ns[rows]
    keep = (times >= 0).all(axis=(0, 1))
    return Laps(times[0][:, keep], times[1][:, keep], fine[keep], False, _CLOCKS)


def _by_last(spans: Spans, cut: Partition, threads: Int64s, fine: Int64s) -> Laps:
    """Return the time between two step ends of the thread whose steps end last, for all threads.

    A thread must have begun before, and not have ended.
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
    return Laps(begin, end, own.steps[keep + 1], False, _LAST)


def _in_order(found: Laps) -> Laps:
    latest = np.maximum.accumulate(found.end_ns, axis=1)[:, :-1]
    before = np.insert(latest, 0, np.iinfo(np.int64).min, axis=1)[:, : len(found.steps)]
    fine = ((found.end_ns > found.begin_ns) & (found.begin_ns >= before)).all(axis=0)
    return found.only(np.flatnonzero(fine))
