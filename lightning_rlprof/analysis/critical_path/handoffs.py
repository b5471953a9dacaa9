"""Handoffs: samples and weight versions that one rank produces and another waits for.

Spans and marks with the counter ``sample`` follow one sample through the job: each starts after the
previous one has ended, on any rank. Spans with the counter ``version`` start after that version
was published, by a weight sync or a mark with the same number.
"""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.step_intervals import StepIntervals
from lightning_rlprof.analysis.critical_path.sync_points import SyncPoints, has_handoffs
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, differs
from lightning_rlprof.tables.interval_nesting import last_begun
from lightning_rlprof.tables.spans import Spans

_WORK = (KINDS.index("stage"), KINDS.index("region"))
_MARK = KINDS.index("mark")


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


def find_handoffs(
    spans: Spans, threads: Int64s, sync_points: SyncPoints, intervals: StepIntervals
) -> Handoffs:
    """Find the waits of training threads that handoffs from other threads end.

    A wait is the time before a span in which no stage and no region was open, except those named as
    data wait; it starts after the last sync point. What background threads produce counts as
    produced by the first chain of their rank. The order of events counts from the start of the step
    interval if that is a sync point, else it is that of the clocks.

    Args:
        spans: The run.
        threads: Training threads, one per chain.
        sync_points: Where the chains wait for each other.
        intervals: Their step intervals.
    """
    if not has_handoffs(spans):
        return Handoffs(*np.zeros((9, 0), dtype=np.int64))
    chain = _chains(spans, threads)
    times = _aligned_times(spans, chain, intervals)
    rows, sample = _numbered(spans, "sample")
    samples = _latest_before(times, rows, sample, rows, sample)
    producer, consumer = np.hstack([samples, _version_pairs(spans, times)])
    where, until = chain[consumer], spans.start_ns[consumer]
    at = last_begun(sync_points.chain, sync_points.start_ns, where, until - 1)
    met = np.append(sync_points.end_ns, np.iinfo(np.int64).min)[at]
    begin = np.maximum(_last_activity(spans, threads, where, until), met)
    waits = (chain[producer] >= 0) & (where >= 0) & (where != chain[producer]) & (met <= until)
    waits &= spans.thread[consumer] == threads[where]
    columns = np.stack([where, begin, until, consumer, producer])[:, waits]
    where, begin, until, consumer, producer = columns[:, np.lexsort(columns[2::-1])]
    new = differs(where, begin)
    wait, last = np.cumsum(new) - 1, np.append(new[1:], True)[: len(new)]
    order = np.lexsort((-spans.end_ns[producer], chain[producer], wait))
    order = order[differs(wait[order], chain[producer[order]])]  # of one thread the last
    producer = producer[order]
    is_mark = spans.kind[producer] == _MARK
    handoffs = (wait[order], chain[producer], spans.end_ns[producer], producer, is_mark)
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


def _version_pairs(spans: Spans, times: Int64s) -> Int64s:
    """Return pairs of rows: the one that published a version, and each thread's first user of it.

    A thread that skips versions needs the latest that was published.
    """
    rows, version = _numbered(spans, "version")
    produces = categories_of(spans.names)[spans.name[rows]] == Category.WEIGHT_SYNC
    produces |= spans.kind[rows] == _MARK
    there = np.unique(version[produces])
    consumes = rows[~produces]
    place = np.searchsorted(there, version[~produces], "right") - 1
    order = np.lexsort((spans.start_ns[consumes], spans.thread[consumes]))
    consumes, place = consumes[order], place[order]
    thread = spans.thread[consumes]
    highest = np.maximum.accumulate(thread * (len(there) + 2) + place + 1)
    first = differs(highest) & (place >= 0)
    consumes, wanted = consumes[first], np.append(there, 0)[place[first]]
    return _latest_before(times, rows[produces], version[produces], consumes, wanted)


def _latest_before(
    times: Int64s, rows: Int64s, number: Int64s, consumers: Int64s, wanted: Int64s
) -> Int64s:
    """Return pairs of rows: the one of a consumer's number that ended last before its start."""
    low, width = int(times.min()), int(np.ptp(times)) + 1
    keys = number * width + (times[1, rows] - low)
    order = np.lexsort((rows, keys))
    query = wanted * width + (times[0, consumers] - low)
    place = np.searchsorted(keys[order], query, "right") - 1
    rows, number = np.append(rows[order], -1), np.append(number[order], -1)
    place = np.where(rows[place] == consumers, place - 1, place)  # a mark ends when it begins
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


def _last_activity(spans: Spans, threads: Int64s, chain: Int64s, before_ns: Int64s) -> Int64s:
    """Return when each chain last started (before a time) or ended (until then) some work."""
    feeds = categories_of(spans.names) == Category.DATA_WAIT
    work = np.isin(spans.kind, _WORK) & ~feeds[spans.name] & np.isin(spans.thread, threads)
    lane = np.tile(np.searchsorted(threads, spans.thread[work]), 2)
    times = np.append(2 * spans.end_ns[work], 2 * spans.start_ns[work] + 1)  # ends come first
    order = np.lexsort((times, lane))
    lane, times = lane[order], times[order]
    first = 2 * int(spans.start_ns.min(initial=0))
    return np.append(times, first)[last_begun(lane, times, chain, 2 * before_ns)] // 2
