"""The intervals in which devices ran nothing, one by one: why, what ended them, what the host did.

`gaps_of` cuts time as `breakdown` and `idle` do, so its sums are theirs to the nanosecond.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.breakdown import REPLAY
from lightning_rlprof.analysis.device.timeline import (
    IDLE_CATEGORIES,
    DeviceTimeline,
    Lane,
    grid_of,
    idle_causes,
)
from lightning_rlprof.analysis.device.work import NOT_RECORDED
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans, apart
from lightning_rlprof.tables.table import Table

IN_REPLAY, UNKNOWN_TIME = range(len(IDLE_CATEGORIES), len(IDLE_CATEGORIES) + 2)
"""More causes: between the work of one graph replay, and while nothing is known of the device."""

CAUSES = (*(each.text for each in IDLE_CATEGORIES), REPLAY, "not recorded")
"""Text of each cause."""


class Gaps(NamedTuple):
    """The time of a device without work, ascending; a gap with two causes is two.

    Attributes:
        start_ns: Where each gap begins.
        end_ns: Where it ends, later than the start.
        cause: Index into `CAUSES`; up to `IN_REPLAY` the device is idle.
        next: The row of the lane's work that ends it, or the number of rows.
    """

    start_ns: Int64s
    end_ns: Int64s
    cause: Int64s
    next: Int64s


class LongGap(NamedTuple):
    """One of the longest gaps.

    Attributes:
        lane: Index into the lanes of the timeline.
        start_ns: On the run's time axis.
        end_ns: The same.
        cause: Index into `CAUSES`.
        row: Row of `DeviceTimeline.work` that ends it, None if none does.
        call: The innermost call of the host that covers more than half of it, None if unknown.
    """

    lane: int
    start_ns: int
    end_ns: int
    cause: int
    row: int | None
    call: str | None


def gaps_of(lane: Lane) -> Gaps:
    """Return all time of a device without work, from the start of its record to the end."""
    start, end, cause = idle_causes(lane)
    first, last, replayed = grid_of(lane).unknown()
    start, end = np.append(start, first), np.append(end, last)
    cause = np.append(cause, np.where(replayed, IN_REPLAY, UNKNOWN_TIME))
    order = np.argsort(start, kind="stable")
    start, end, cause = start[order], end[order], cause[order]
    return Gaps(start, end, cause, lane.work.starting_at(end)[0])


def longest_gaps(
    spans: Spans, timeline: DeviceTimeline, gaps: Sequence[Gaps], count: int
) -> list[LongGap]:
    """Return the longest idle gaps of all devices.

    Args:
        spans: The run.
        timeline: Of it.
        gaps: Of each lane of the timeline.
        count: How many.
    """
    found: list[LongGap] = []
    for number, (lane, own) in enumerate(zip(timeline.lanes, gaps, strict=True)):
        length = np.where(own.cause < IN_REPLAY, own.end_ns - own.start_ns, 0)
        for at in np.argsort(-length, kind="stable")[:count].tolist():
            row = int(own.next[at])
            ends = int(lane.work.row[row]) if row < len(lane.work.row) else None
            times = int(own.start_ns[at]), int(own.end_ns[at])
            if length[at]:
                found.append(LongGap(number, *times, int(own.cause[at]), ends, None))
    found = sorted(found, key=lambda gap: gap.start_ns - gap.end_ns)[:count]
    alone = apart(spans, "calls") != (None,)
    ranks = [timeline.lanes[gap.lane].rank if alone else None for gap in found]
    named: dict[int, LongGap] = {}
    for rank in dict.fromkeys(ranks):
        rows = [row for row, each in enumerate(ranks) if each == rank]
        calls = spans.try_table("calls", [], rank)
        if calls is not None:
            of_rank = _with_calls(calls, timeline, [found[row] for row in rows])
            named |= dict(zip(rows, of_rank, strict=True))
    return [named.get(row, gap) for row, gap in enumerate(found)]


def _with_calls(calls: Table, timeline: DeviceTimeline, gaps: list[LongGap]) -> list[LongGap]:
    """Add what the host did, on the thread that launched what ends the gap."""
    work = timeline.work
    threads = work.launching_threads(calls)
    took = calls.numbers("duration")
    long = np.flatnonzero(2 * took > min(gap.end_ns - gap.start_ns for gap in gaps))
    took, start, rank = took[long], calls.numbers("start")[long], calls.numbers("rank")[long]
    thread = calls.numbers("thread", NOT_RECORDED)[long]
    codes, texts = calls.texts("name")
    names = codes[long]
    found = []
    for gap in gaps:
        own_rank = timeline.lanes[gap.lane].rank
        known = threads[[] if gap.row is None else [gap.row]]
        if not (known != NOT_RECORDED).any():  # A thread that launches nothing only waits.
            known = threads[(work.rank == own_rank) & (threads != NOT_RECORDED)]
        shared = (start + took).clip(max=gap.end_ns) - start.clip(min=gap.start_ns)
        inside = (rank == own_rank) & (2 * shared > gap.end_ns - gap.start_ns) & (names >= 0)
        inside &= np.isin(thread, known)
        rows = np.flatnonzero(inside)
        call = texts[names[rows[np.argmin(took[rows])]]] if len(rows) else None
        found.append(gap._replace(call=call))
    return found
