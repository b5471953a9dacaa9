"""Waiting of training threads for other ranks, inside the stages in which ranks meet.

All ranks leave a collective together, and a stage that includes waiting, too. The last rank to
arrive has the shortest stay, and each other rank waited for as long as its own stay exceeds that.
Only durations are compared, never the clocks of two ranks.
"""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.steps.partition import UNTRACED, partition
from lightning_rlprof.analysis.steps.sync_points import find_sync_points
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.intervals import last_begun
from lightning_rlprof.tables.spans import Spans

WAITING = "waiting in {}"
"""Name of the time that ranks waited for others inside a stage, in every table."""


class Waits(NamedTuple):
    """Waits of training threads, by thread and time.

    Attributes:
        row: Row of the span in which the rank waited.
        start_ns: When the wait began.
        end_ns: When it ended.
        whole_stage: Whether the span is a stage, or a phase of the loop, with work of its own;
            that it includes waiting is then seen from many steps.
        last: Row of the span of the rank that arrived last, for which this one waited.
    """

    row: Int64s
    start_ns: Int64s
    end_ns: Int64s
    whole_stage: Mask
    last: Int64s


def find_waits(spans: Spans) -> Waits:
    """Find when training threads waited for other ranks; once per run.

    A rank waits at the beginning of a collective, and at the end of a stage with work of its own.
    """
    return spans.once("waits", _find_waits, ("clocks",))


def _find_waits(spans: Spans) -> Waits:
    threads = np.unique(spans.thread[spans.rows(kind="step")])
    points = find_sync_points(spans, threads, tables=False)
    start, end, whole = points.start_ns, points.end_ns, points.whole_stage[points.group]
    ns = end - start - points.transfer_ns[points.group]
    start, end = np.where(whole, end - ns, start), np.where(whole, end, start + ns)
    some, last = ns > 0, np.zeros(len(points.size), np.int64)
    shortest = np.lexsort((points.start_ns - points.end_ns, points.group))  # the last of each
    last[points.group[shortest]] = points.row[shortest]
    last = last[points.group[some]]
    return Waits(points.row[some], start[some], end[some], whole[some], last)


class WaitingTimes(NamedTuple):
    """Waiting of ranks in the steps of a `Partition`; what is in one stage may be in several rows.

    Attributes:
        step: Index into ``Partition.steps``.
        stage_row: Row of the innermost stage, or `UNTRACED`.
        stage: Name of it as an index into ``Spans.names``, or `UNTRACED`.
        name: That name; outside any stage that of the collective.
        ns: Time waited, never zero.
    """

    step: Int64s
    stage_row: Int64s
    stage: Int64s
    name: Int64s
    ns: Int64s


def waiting_times(spans: Spans) -> WaitingTimes:
    """Return how long ranks waited in which stages of which steps of `partition`; once per run."""
    return spans.once("waiting times", _waiting_times, ("clocks",))


def _waiting_times(spans: Spans) -> WaitingTimes:
    waits, cut = find_waits(spans), partition(spans)
    part = cut.divided
    thread, own = spans.thread[cut.steps][part.step], spans.thread[waits.row]
    first = np.maximum(last_begun(thread, part.start_ns, own, waits.start_ns), 0)
    last = last_begun(thread, part.start_ns, own, waits.end_ns - 1)
    count = np.maximum(last - first + 1, 0)
    at = np.repeat(np.arange(len(own)), count)
    segment = np.arange(len(at)) + np.repeat(first - np.cumsum(count) + count, count)
    begin = np.maximum(waits.start_ns[at], part.start_ns[segment])
    ns = np.minimum(waits.end_ns[at], part.end_ns[segment]) - begin
    some = (ns > 0) & (thread[segment] == own[at])
    at, segment = at[some], segment[some]
    stage_row = part.stage[segment]
    stage = np.append(spans.name, UNTRACED)[stage_row]
    name = np.where(stage == UNTRACED, spans.name[waits.row[at]], stage)
    return WaitingTimes(part.step[segment], stage_row, stage, name, ns[some])
