"""Handoffs: samples and weight versions that one rank produces and another waits for.

Spans and marks with the counter ``sample`` follow one sample through the job: each starts after the
previous one has ended, on any rank. Spans with the counter ``version`` start after that version
was published, by a weight sync or a mark with the same number.
"""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.step_intervals import StepIntervals
from lightning_rlprof.analysis.critical_path.sync_points import SyncPoints
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, differs
from lightning_rlprof.tables.spans import Spans

Times = tuple[Int64s, Int64s]

_WORK = (KINDS.index("stage"), KINDS.index("region"))
_MARK = KINDS.index("mark")
_COUNTERS = ("sample", "version")


class Handoffs(NamedTuple):
    """Waits of chains (one per training thread), and the handoffs that end them.

    The first five columns have one entry per wait, by chain and start; waits never overlap. The
    others have one entry per handoff. Times are of the clock of the chain's rank.

    Attributes:
        chain: Chain that waits.
        start_ns: End of its previous activity.
        end_ns: Start of the span that needed the handoff.
        name: Name of that span, as an index into the run's names.
        step: Its RL step.
        wait: Which wait the handoff ends.
        producer: Chain that produces the sample or version.
        produced_ns: When it was ready.
        row: Row of the span or mark that produced it.
        producer_name: Name of that row.
        is_mark: Whether that row is a mark.
        produced_step: Its RL step.
    """

    chain: Int64s
    start_ns: Int64s
    end_ns: Int64s
    name: Int64s
    step: Int64s
    wait: Int64s
    producer: Int64s
    produced_ns: Int64s
    row: Int64s
    producer_name: Int64s
    is_mark: Mask
    produced_step: Int64s


def has_handoffs(spans: Spans) -> bool:
    """Return whether any span of the run counts a sample or a version of the weights."""
    return any(name in spans.counters for name in _COUNTERS)


def find_handoffs(
    spans: Spans, threads: Int64s, sync_points: SyncPoints, intervals: StepIntervals
) -> Handoffs:
    """Find the waits of training threads that handoffs from other threads end.

    A wait is the time before a span in which no stage and no region was open, except those named as
    data wait. What background threads produce counts as produced by the first chain of their rank.
    The order of events counts from the start of the step interval if that is a sync point, else it
    is that of the clocks.

    Args:
        spans: The run.
        threads: Training threads, one per chain.
        sync_points: Where the chains wait for each other.
        intervals: Their step intervals.
    """
    chain = _chains(spans, threads)
    times = _aligned_times(spans, chain, intervals)
    pairs = np.hstack([_sample_pairs(spans, times), _version_pairs(spans, times)])
    producer, consumer = pairs[:, (chain[pairs] >= 0).all(axis=0)]
    waits = spans.thread[consumer] == threads[chain[consumer]]
    waits &= chain[consumer] != chain[producer]
    producer, consumer = producer[waits], consumer[waits]
    where, until = chain[consumer], spans.start_ns[consumer]
    begin = _last_activity(spans, threads, where, until)
    begin, fine = _cut_at_sync_points(sync_points, where, begin, until)
    producer, consumer, where, begin = producer[fine], consumer[fine], where[fine], begin[fine]
    order = np.lexsort((spans.start_ns[consumer], begin, where))
    producer, consumer, where, begin = producer[order], consumer[order], where[order], begin[order]
    new = differs(where, begin)
    wait, last = np.cumsum(new) - 1, np.append(new[1:], True)[: len(new)]
    row = consumer[last]
    wait_columns = (where[new], begin[new], spans.start_ns[row], spans.name[row], spans.step[row])
    order = np.lexsort((-spans.end_ns[producer], chain[producer], wait))
    order = order[differs(wait[order], chain[producer[order]])]  # of one thread the last
    wait, producer = wait[order], producer[order]
    is_mark = spans.kind[producer] == _MARK
    produced = (
        chain[producer],
        spans.end_ns[producer],
        producer,
        spans.name[producer],
        is_mark,
        spans.step[producer],
    )
    return Handoffs(*wait_columns, wait, *produced)


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


def _aligned_times(spans: Spans, chain: Int64s, intervals: StepIntervals) -> Times:
    """Return starts and ends as if all chains had started each interval with the first chain."""
    if not intervals.synchronized or not len(intervals.steps):
        return spans.start_ns, spans.end_ns
    count, low = len(intervals.steps), int(min(spans.start_ns.min(), intervals.begin_ns.min()))
    width = int(max(spans.end_ns.max(), intervals.end_ns.max())) - low + 1
    keys = (
        np.arange(len(intervals.begin_ns))[:, None] * width + (intervals.begin_ns - low)
    ).ravel()
    late, own = (intervals.begin_ns - intervals.begin_ns[0]).ravel(), np.maximum(chain, 0)
    found = []
    for times in (spans.start_ns, spans.end_ns):
        place = np.searchsorted(keys, own * width + (times - low), "right") - 1
        found.append(times - late[np.clip(place, own * count, own * count + count - 1)])
    return found[0], found[1]


def _sample_pairs(spans: Spans, times: Times) -> Int64s:
    """Return pairs of rows of one sample: the last that ended, and the next one."""
    rows, sample = _numbered(spans, "sample")
    found = _latest_before(times, rows, sample, rows, sample)
    some = found >= 0
    return np.array([found[some], rows[some]], dtype=np.int64)


def _version_pairs(spans: Spans, times: Times) -> Int64s:
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
    found = _latest_before(times, rows[produces], version[produces], consumes, wanted)
    some = found >= 0
    return np.array([found[some], consumes[some]], dtype=np.int64)


def _latest_before(
    times: Times, rows: Int64s, number: Int64s, consumers: Int64s, wanted: Int64s
) -> Int64s:
    """Return for each consumer the row of its number that ended last before its start, or -1."""
    if not len(rows):
        return np.full(len(consumers), -1)
    numbers, code = np.unique(number, return_inverse=True)
    start, end = times[0][consumers], times[1][rows]
    low = min(int(start.min(initial=int(end.min()))), int(end.min()))
    width = max(int(start.max(initial=0)), int(end.max())) - low + 2
    keys = code * width + (end - low)
    order = np.lexsort((rows, keys))
    wanted_code = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    query = wanted_code * width + (start - low)
    place = np.searchsorted(keys[order], query, "right") - 1
    for _ in range(2):  # a mark ends when it begins
        same = (place >= 0) & (rows[order][place] == consumers)
        place = np.where(same, place - 1, place)
    found = np.where(place >= 0, rows[order][place], -1)
    known = (place >= 0) & (code[order][place] == wanted_code) & (numbers[wanted_code] == wanted)
    return np.where(known, found, -1)


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
    """Return when each chain last started or ended some work before a time."""
    feeds = categories_of(spans.names) == Category.DATA_WAIT
    work = np.isin(spans.kind, _WORK) & ~feeds[spans.name] & np.isin(spans.thread, threads)
    rows = np.flatnonzero(work)
    own, low = np.searchsorted(threads, spans.thread[rows]), int(spans.start_ns.min(initial=0))
    width = int(spans.end_ns.max(initial=0)) - low + 2
    begin = np.full(len(before_ns), low, dtype=np.int64)
    for times, before in ((spans.start_ns[rows], 1), (spans.end_ns[rows], 0)):
        keys = np.sort(own * width + (times - low))
        query = chain * width + (before_ns - low - before)
        place = np.searchsorted(keys, query, "right") - 1
        last = np.append(keys, -1)[place]
        there = (place >= 0) & (last // width == chain)
        begin = np.where(there, np.maximum(begin, last % width + low), begin)
    return begin


def _cut_at_sync_points(
    sync_points: SyncPoints, chain: Int64s, begin: Int64s, times: Int64s
) -> tuple[Int64s, Mask]:
    """Shorten waits to start after the last sync point, and mark those that don't end in one."""
    if not len(sync_points.chain) or not len(chain):
        return begin, np.ones(len(chain), dtype=bool)
    low = min(int(sync_points.start_ns.min()), int(begin.min()))
    width = max(int(sync_points.end_ns.max()), int(times.max())) - low + 2
    query = chain * width + (times - low)
    place = np.searchsorted(sync_points.chain * width + (sync_points.start_ns - low), query) - 1
    there = (place >= 0) & (sync_points.chain[place] == chain)
    end = sync_points.end_ns[place]
    return np.where(there, np.maximum(begin, end), begin), ~there | (end <= times)
