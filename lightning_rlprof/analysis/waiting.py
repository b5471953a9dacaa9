"""Waiting of training threads for other ranks, inside the stages in which ranks meet.

All ranks leave a collective together, and a stage that includes waiting, too. The last rank to
arrive has the shortest stay, and each other rank waited for as long as its own stay exceeds that.
Only durations are compared, never the clocks of two ranks.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from lightning_rlprof.analysis.critical_path.sync_points import find_sync_points
from lightning_rlprof.analysis.partition import UNTRACED, Partition
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.interval_nesting import last_begun
from lightning_rlprof.tables.spans import Spans


class Waits(NamedTuple):
    """Waits of training threads, by thread and time.

    Attributes:
        row: Row of the span in which the rank waited.
        start_ns: When the wait began.
        end_ns: When it ended.
        whole_stage: Whether the span is a stage, or a phase of the loop, with work of its own;
            that it includes waiting is then seen from many steps.
    """

    row: Int64s
    start_ns: Int64s
    end_ns: Int64s
    whole_stage: Mask


_LAST: "WeakKeyDictionary[Spans, Waits]" = WeakKeyDictionary()


def find_waits(spans: Spans) -> Waits:
    """Find when training threads waited for other ranks; kept as long as the run is.

    A rank waits at the beginning of a collective, and at the end of a stage with work of its own.
    """
    found = _LAST.get(spans)
    if found is None:
        threads = np.unique(spans.thread[spans.rows(kind="step")])
        points = find_sync_points(spans, threads, tables=False)
        start, end, whole = points.start_ns, points.end_ns, points.whole_stage[points.group]
        ns = end - start - points.transfer_ns[points.group]
        start, end = np.where(whole, end - ns, start), np.where(whole, end, start + ns)
        some = ns > 0
        found = _LAST[spans] = Waits(points.row[some], start[some], end[some], whole[some])
    return found


class StageWork(NamedTuple):
    """Exclusive time by rank and stage, divided into work and waiting; both have no negative time.

    Attributes:
        ranks: Ranks with one of the steps, ascending.
        steps: How many of them each rank has.
        work_ns: Time without waiting per rank and name, untraced last; shape (ranks, names + 1).
        waits_ns: Time waited in each; outside any stage under the name of the collective.
    """

    ranks: Int64s
    steps: Int64s
    work_ns: Int64s
    waits_ns: Int64s


def stage_work(spans: Spans, cut: Partition, mask: Mask) -> StageWork:
    """Sum the work and the waiting of each stage in some steps by rank."""
    times, (segment, row, ns) = cut.by_rank(spans, mask), _waits_in_segments(spans, cut)
    step = cut.divided.step[segment]
    some = mask[step]
    row, ns, stage = row[some], ns[some], cut.divided.stage[segment[some]]
    rank = np.searchsorted(times.ranks, spans.rank[cut.steps[step[some]]])
    named = np.append(spans.name, UNTRACED)[stage]
    work, waits = times.ns.copy(), np.zeros_like(times.ns)
    np.subtract.at(work, (rank, named), ns)
    np.add.at(waits, (rank, np.where(named == UNTRACED, spans.name[row], named)), ns)
    return StageWork(times.ranks, times.steps, work, waits)


def _waits_in_segments(spans: Spans, cut: Partition) -> tuple[Int64s, Int64s, Int64s]:
    """Cut waits at the segments of steps: index of the segment, row of the span, and time."""
    waits, part = find_waits(spans), cut.divided
    thread, own = spans.thread[cut.steps][part.step], spans.thread[waits.row]
    first = np.maximum(last_begun(thread, part.start_ns, own, waits.start_ns), 0)
    last = last_begun(thread, part.start_ns, own, waits.end_ns - 1)
    count = np.maximum(last - first + 1, 0)
    at = np.repeat(np.arange(len(own)), count)
    segment = np.arange(len(at)) + np.repeat(first - np.cumsum(count) + count, count)
    begin = np.maximum(waits.start_ns[at], part.start_ns[segment])
    ns = np.minimum(waits.end_ns[at], part.end_ns[segment]) - begin
    some = (ns > 0) & (thread[segment] == own[at])
    return segment[some], waits.row[at[some]], ns[some]
