"""Step intervals, and handoffs: samples and weights that one rank makes and another waits for.

Spans and marks with the counter ``sample`` follow one sample through the job: each starts after the
previous one has ended, on any rank. Spans with the counter ``version`` start after that version
was published, by a weight sync or a mark with the same number. A weight sync on a rank that
receives ends when the weights are there; see `weight_updates`.
"""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.steps.partition import Partition
from lightning_rlprof.analysis.steps.sync_points import SyncPoints, has_handoffs
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.analysis.steps.weight_updates import WeightUpdates, weight_updates
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, differs
from lightning_rlprof.tables.intervals import Enclosing, last_begun
from lightning_rlprof.tables.spans import Spans

_WORK = (KINDS.index("stage"), KINDS.index("region"))
_MARK = KINDS.index("mark")

# If a smaller share of the steps has a global sync point, clocks give the boundaries.
_MOSTLY = 0.5
_JOINED = "last global synchronization (no clock comparison needed)"
_CLOCKS = "step start and end by the clocks (no sync point includes all ranks)"
_LAST = "step ends of the last rank, by the clocks (no sync point includes all ranks)"


class Handoffs(NamedTuple):
    """Waits of chains (one per training thread), and the handoffs that end them.

    The first four columns have one entry per wait, by chain and start; waits never overlap. The
    others have one entry per handoff. Times are of the clock of the chain's rank.

    Attributes:
        chain: Chain that waits.
        start_ns: End of its previous activity.
        end_ns: Start of the span that needed the handoff.
        consumer_row: Row of that span.
        wait: Which wait the handoff ends.
        producer: Chain that produces the sample or version.
        produced_ns: When it was ready.
        producer_row: Row of the span or mark that produced it.
        is_mark: Whether that is a mark.
        note: What is unknown about weights, empty if nothing is.
    """

    chain: Int64s
    start_ns: Int64s
    end_ns: Int64s
    consumer_row: Int64s
    wait: Int64s
    producer: Int64s
    produced_ns: Int64s
    producer_row: Int64s
    is_mark: Mask
    note: str = ""


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


def find_handoffs(
    spans: Spans, threads: Int64s, sync_points: SyncPoints, intervals: StepIntervals
) -> Handoffs:
    """Find the waits of training threads that handoffs from other threads end.

    A wait is the time before a span in which no stage and no region was open, except those named as
    data wait and those in which weights arrive; it starts after the last sync point. If weights
    arrive in a span, the wait lasts until its end. What background threads produce counts as
    produced by the first chain of their rank. The order of events counts from the start of the step
    interval if that is a sync point, else it is that of the clocks.

    Args:
        spans: The run.
        threads: Training threads, one per chain.
        sync_points: Where the chains wait for each other.
        intervals: Their step intervals.
    """
    updates = weight_updates(spans)
    if not has_handoffs(spans):
        nothing = Handoffs(*np.zeros((9, 0), dtype=np.int64))
        return nothing._replace(note=updates.note)
    chain = _chains(spans, threads)
    times = _aligned_times(spans, chain, intervals)
    arrives = np.isin(np.arange(len(spans)), updates.received)
    need = np.where(arrives, times[1], times[0])
    rows, sample = _numbered(spans, "sample")
    samples = _latest_before(times[1], rows, sample, times[0], rows, sample)
    weights = _weight_pairs(spans, times, need, arrives, updates)
    producer, consumer = np.hstack([samples, weights])
    # The sender of weights may return from the transfer later than the receiver.
    more = np.zeros(len(spans), dtype=np.int64)
    more[updates.sent] = updates.sending_ns
    ready = spans.end_ns[producer] + np.minimum(need[consumer] - times[1, producer], more[producer])
    where = chain[consumer]
    until = np.where(arrives, spans.end_ns, spans.start_ns)[consumer]
    at = last_begun(sync_points.chain, sync_points.start_ns, where, until - 1)
    met = np.append(sync_points.end_ns, np.iinfo(np.int64).min)[at]
    begin = np.maximum(_last_activity(spans, threads, updates, where, until), met)
    waits = (chain[producer] >= 0) & (where >= 0) & (where != chain[producer]) & (met <= until)
    waits &= spans.thread[consumer] == threads[where]
    columns = np.stack([where, begin, until, consumer, producer, ready])[:, waits]
    where, begin, until, consumer, producer, ready = columns[:, np.lexsort(columns[2::-1])]
    new = differs(where, begin)
    wait, last = np.cumsum(new) - 1, np.append(new[1:], True)[: len(new)]
    order = np.lexsort((-ready, chain[producer], wait))
    # Of each thread's handoffs, only the last one to be ready counts.
    order = order[differs(wait[order], chain[producer[order]])]
    producer = producer[order]
    is_mark = spans.kind[producer] == _MARK
    handoffs = (wait[order], chain[producer], ready[order], producer, is_mark, updates.note)
    return Handoffs(where[new], begin[new], until[last], consumer[last], *handoffs)


def _numbered(spans: Spans, name: str) -> tuple[Int64s, Int64s]:
    """Return the rows with a whole number in a counter, each by its rank among the numbers."""
    if name not in spans.counters:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    rows, values = spans.counters[name]
    keep = np.isin(spans.kind[rows], (*_WORK, _MARK))
    rows, values = rows[keep], values[keep]
    if values.dtype != np.int64:
        whole = [isinstance(each, int) or each.is_integer() for each in values.tolist()]
        rows, values = rows[whole], values[whole]
    return rows, np.unique(values, return_inverse=True)[1]


def _aligned_times(spans: Spans, chain: Int64s, intervals: StepIntervals) -> Int64s:
    """Return starts and ends as if all chains had started each interval with the first chain."""
    times: Int64s = np.stack([spans.start_ns, spans.end_ns])
    if not intervals.synchronized or not len(intervals.steps):
        return times
    chains, count = intervals.begin_ns.shape
    lane, begin = np.repeat(np.arange(chains), count), intervals.begin_ns.ravel()
    late, own = (intervals.begin_ns - intervals.begin_ns[0]).ravel(), np.maximum(chain, 0)
    # What comes before the first interval of a chain is moved like that interval.
    places = [np.maximum(last_begun(lane, begin, own, each), own * count) for each in times]
    times -= late[np.stack(places)]
    return times


def _weight_pairs(
    spans: Spans, times: Int64s, need: Int64s, arrives: Mask, updates: WeightUpdates
) -> Int64s:
    """Return pairs of rows: the one that sent weights, and each thread's first user of them.

    By versions if these are counted on both sides, else by order.
    """
    rows, version = _numbered(spans, "version")
    is_sync = (categories_of(spans.names) == Category.WEIGHT_SYNC)[spans.name]
    is_sync |= spans.kind == _MARK
    sends = np.isin(rows, updates.sent) & is_sync[rows]
    sent, there = rows[sends], np.unique(version[sends])
    consumes = rows[~sends]
    # A thread that skips versions needs the latest that was published.
    known = there if len(there) else np.unique(version)
    place = np.searchsorted(known, version[~sends], "right") - 1
    order = np.lexsort((spans.start_ns[consumes], spans.thread[consumes]))
    consumes, place = consumes[order], place[order]
    lane = spans.thread[consumes].astype(np.int64)
    highest = np.maximum.accumulate(lane * (len(known) + 2) + place + 1)
    first = differs(highest) & (place >= 0)
    consumes, wanted = consumes[first], np.append(known, 0)[place[first]]
    pairs = []
    if len(there):
        for own, ready in ((arrives[consumes], times[0]), (~arrives[consumes], times[1])):
            of = ready, sent, version[sends], need, consumes[own], wanted[own]
            pairs.append(_latest_before(*of))
        consumes = consumes[:0]
    unknown = np.setdiff1d(updates.received, rows)
    consumes = np.append(consumes[np.isin(spans.rank[consumes], updates.ranks)], unknown)
    syncs = updates.sent[is_sync[updates.sent]]
    middle, sent = times[0] + (times[1] - times[0]) // 2, updates.sent
    # A transfer that is half done when weights have arrived is theirs; training has to be over.
    by_order = []
    for own, ready in (
        (arrives[consumes], middle if len(syncs) else times[1]),
        (~arrives[consumes], times[1]),
    ):
        zeros = np.zeros_like(sent), np.zeros(np.count_nonzero(own), np.int64)
        of = ready, sent, zeros[0], need, consumes[own], zeros[1]
        by_order.append(_latest_before(*of))
    producer, consumer = np.hstack(by_order)
    order = np.lexsort((need[consumer], spans.thread[consumer]))
    producer, consumer = producer[order], consumer[order]
    new = differs(spans.thread[consumer], producer)
    return np.hstack([*pairs, np.stack([producer[new], consumer[new]])])


def _latest_before(
    ready: Int64s, rows: Int64s, number: Int64s, need: Int64s, consumers: Int64s, wanted: Int64s
) -> Int64s:
    """Return pairs of rows: the last one of a consumer's number that was ready when needed.

    ``ready`` and ``need`` are times per row of the run.
    """
    low = min(int(ready.min()), int(need.min()))
    width = max(int(ready.max()), int(need.max())) - low + 1
    keys = number * width + (ready[rows] - low)
    order = np.lexsort((rows, keys))
    query = wanted * width + (need[consumers] - low)
    place = np.searchsorted(keys[order], query, "right") - 1
    rows, number = np.append(rows[order], -1), np.append(number[order], -1)
    # A mark ends when it begins, so it would match itself.
    place = np.where(rows[place] == consumers, place - 1, place)
    return np.array([rows[place], consumers])[:, number[place] == wanted]


def _chains(spans: Spans, threads: Int64s) -> Int64s:
    """Return the chain of each row: its own thread's, else the first one of its rank, or -1."""
    chain = np.full(len(spans.threads), -1, dtype=np.int64)
    first: dict[int, int] = {}
    for at, thread in enumerate(threads.tolist()):
        first.setdefault(spans.threads[thread].rank, at)
    chain[:] = [first.get(thread.rank, -1) for thread in spans.threads]
    chain[threads] = np.arange(len(threads))
    return chain[spans.thread]


def _last_activity(
    spans: Spans, threads: Int64s, updates: WeightUpdates, chain: Int64s, before_ns: Int64s
) -> Int64s:
    """Return when each chain last started (before a time) or ended (until then) some work.

    To send weights is work, too. What is inside the arrival of weights is not.
    """
    feeds = categories_of(spans.names) == Category.DATA_WAIT
    work = np.isin(spans.kind, _WORK) & ~feeds[spans.name] & np.isin(spans.thread, threads)
    if len(rows := updates.received):
        arrivals = Enclosing(spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows])
        work &= arrivals.at(spans.thread, spans.start_ns) < 0
    rows, on = np.flatnonzero(work), np.isin(spans.thread[updates.sent], threads)
    sent, until = updates.sent[on], spans.end_ns[updates.sent[on]] + updates.sending_ns[on]
    lane = np.searchsorted(threads, spans.thread[np.concatenate([rows, sent, rows])])
    ends = 2 * np.append(spans.end_ns[rows], until)  # At equal times, an end comes before a start.
    times = np.append(ends, 2 * spans.start_ns[rows] + 1)
    order = np.lexsort((times, lane))
    lane, times = lane[order], times[order]
    first = 2 * int(spans.start_ns.min(initial=0))
    return np.append(times, first)[last_begun(lane, times, chain, 2 * before_ns)] // 2


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
    # The last sync point of a step comes first, so that `np.unique` chooses it.
    full = own[sync_points.size[own] == chains][::-1]
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
