"""What host and device of each rank did: intervals with categories, and how spans nest."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.communication.collectives import (
    Calls,
    doubt_texts,
    match_collectives,
    read_calls,
)
from lightning_rlprof.analysis.device.timeline import (
    IDLE_CATEGORIES,
    Lane,
    device_timeline,
    idle_causes,
)
from lightning_rlprof.analysis.device.work import DeviceWork
from lightning_rlprof.analysis.statistics.group_summary import rows_by_group
from lightning_rlprof.analysis.steps.time_categories import (
    ENCLOSING,
    NO_CATEGORY,
    Category,
    categories_of,
)
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s, Mask
from lightning_rlprof.tables.intervals import open_count, unions
from lightning_rlprof.tables.spans import NO_PARENT, Spans

_STAGE, _REGION = KINDS.index("stage"), KINDS.index("region")
_FEWEST_REQUESTS = 4  # With fewer requests at once, "less than half" is one or zero.
# The kind of work is the index.
_CATEGORIES = (Category.COMPUTE, Category.COMMUNICATION, Category.MEMCPY)
# Work launched in a stage of these categories belongs to it: kernels, and regions that compute,
# such as the forward of a generation. Other work belongs to what its name means.
# Stages that wait are not among them: work that runs meanwhile was launched earlier.
_LAUNCHING = (
    Category.ROLLOUT,
    Category.ROLLOUT_TAIL,
    Category.WEIGHT_SYNC,
    Category.REWARD,
    Category.OFFLOAD,
    Category.EVALUATION,
)
# A kernel and its collective agree in these columns.
_IDENTITY = ("rank", "device", "stream", "start")
_WAIT_UNKNOWN = "A wait that is unknown counts as exposed communication, not as collective wait."
_MOST_IDS_PER_SPAN = 8
_ROUNDING_NS = (0, -1, 1)  # The two tables of an Ascend output can differ by a nanosecond.


@dataclass(frozen=True, eq=False)
class Activity:
    """The spans of one rank with a category, and pairs of them, ``inner`` opened in ``outer``.

    Attributes:
        start_ns: Start of each.
        end_ns: End of each.
        category: `Category` of each.
        outer: Index of a span in which another one was opened.
        inner: Index of that other one; it may end later than the outer one.
    """

    start_ns: Int64s
    end_ns: Int64s
    category: Int64s
    outer: Int64s
    inner: Int64s


def host_activity(spans: Spans, rows: slice, categories: Int64s, waits: Int64s) -> Activity:
    """Categorize the stages and regions of one rank.

    A name without a category takes that of the nearest span around it that has one. Otherwise a
    stage is a custom stage, and a region is left out. Categories of `ENCLOSING` include all that
    was opened inside.

    Args:
        spans: The run.
        rows: The rank's rows.
        categories: Category per name.
        waits: When the rank waited for others, and in which span. Shape (3, n): rows counted from
            the rank's first, starts and ends.
    """
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    parent = _parents(spans.id[rows], spans.parent[rows], start, end)
    category = _categories(spans.kind[rows], categories[spans.name[rows]], parent)
    outer = _nearest(parent, category != NO_CATEGORY)
    keep = np.flatnonzero(category != NO_CATEGORY)
    place = np.full(len(category) + 1, UNKNOWN)  # The last item stands for no outer span.
    place[keep] = np.arange(len(keep))
    around = np.where(category != NO_CATEGORY, np.arange(len(category)), outer)[waits[0]]
    start, end, category, outer = start[keep], end[keep], category[keep], place[outer[keep]]
    # Each wait is one more span, with the same spans inside as the one that it is in.
    waited, begun, over = place[around], waits[1], waits[2]
    some = (waited >= 0) & ~np.isin(np.append(category, NO_CATEGORY)[waited], ENCLOSING)
    waited, begun, over = waited[some], begun[some], over[some]
    order = np.argsort(waited, kind="stable")
    waited, begun, over = waited[order], begun[order], over[order]
    outers, inners = _pairs(end, outer)
    first, last = np.searchsorted(waited, outers), np.searchsorted(waited, outers, "right")
    wait = len(category) + np.arange(len(waited))
    inside = np.repeat(np.arange(len(outers)), last - first)
    which = np.arange(len(inside)) - np.repeat(np.cumsum(last - first) - last, last - first)
    return Activity(
        np.append(start, begun),
        np.append(end, over),
        np.append(category, np.full(len(waited), int(Category.COLLECTIVE_WAIT))),
        np.concatenate([outers, wait[which], waited]),
        np.concatenate([inners, inners[inside], wait]),
    )


def host_categories(own: Activity, times: Int64s) -> Int64s:
    """Return the category of each cell between neighboring times, untraced without a span.

    Of the open spans, those count in which no other one is open. If there are several, of threads
    or tasks, the category with the smallest number wins.

    Args:
        own: What the rank did.
        times: Distinct and ascending; they include the ends of all spans.
    """
    first, last = np.searchsorted(times, own.start_ns), np.searchsorted(times, own.end_ns)
    begin = np.maximum(first[own.outer], first[own.inner])
    end = np.minimum(last[own.outer], last[own.inner])
    outer, begin, end = unions(own.outer, begin, end)
    hidden, cells = own.category[outer], len(times) - 1
    found = np.full(cells, int(Category.UNTRACED))
    for each in np.flatnonzero(np.bincount(own.category))[::-1].tolist():
        mine, less = np.flatnonzero(own.category == each), np.flatnonzero(hidden == each)
        count = open_count(first[mine], last[mine], cells)
        if len(less):
            count -= open_count(begin[less], end[less], cells)
        np.putmask(found, count > 0, each)
    return found


def rollout_tail(own: Activity, times: Int64s) -> Mask | None:
    """Mark the cells in which fewer than half of a rollout's requests still run, until its end.

    Requests are the innermost rollout spans. A rollout is a time range in which at least one is
    open, and its slots are the most that were open at once. None if there never were four.
    """
    with_requests = own.outer[own.category[own.inner] == Category.ROLLOUT]
    requests = own.category == Category.ROLLOUT
    requests[with_requests] = False
    first = np.searchsorted(times, own.start_ns[requests])
    last = np.searchsorted(times, own.end_ns[requests])
    count = open_count(first, last, len(times) - 1)
    heads = np.flatnonzero((count > 0) & (np.append(0, count[:-1]) == 0))
    if not len(heads):
        return None
    slots = np.append(np.maximum.reduceat(count, heads), 0)
    if slots.max() < _FEWEST_REQUESTS:
        return None
    rollout_of = np.cumsum(np.isin(np.arange(len(count)), heads)) - 1
    most = slots[rollout_of]
    full = np.flatnonzero(2 * count >= np.maximum(most, 1))
    last_full = np.full(len(slots), -1)
    last_full[rollout_of[full]] = full  # If a rollout has several, the last one is kept.
    tail: Mask = (count > 0) & (most >= _FEWEST_REQUESTS)
    tail &= np.arange(len(count)) > last_full[rollout_of]
    return tail


def _parents(ids: Int64s, parent: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return the index of each span's parent, `UNKNOWN` without one.

    A parent that began later is ignored, as is one that began at the same time and ended sooner:
    so a damaged file cannot contain a cycle.
    """
    highest = int(ids.max(initial=0))
    if highest < _MOST_IDS_PER_SPAN * len(ids):  # A rank numbers its spans, so that they are dense.
        first = np.zeros(highest + 1, np.int64)  # Of several with one id the first one counts.
        first[ids[::-1]] = np.arange(len(ids))[::-1]
        row = first[np.minimum(parent, highest)]
    else:
        order = np.argsort(ids, kind="stable")
        row = order[np.minimum(np.searchsorted(ids[order], parent), len(ids) - 1)]
    equal = start[row] == start
    longer = (end[row] > end) | ((end[row] == end) & (row < np.arange(len(ids))))
    before = (start[row] < start) | (equal & longer)
    return np.where((parent != NO_PARENT) & (ids[row] == parent) & before, row, UNKNOWN)


def _nearest(parent: Int64s, wanted: Mask) -> Int64s:
    """Return the nearest wanted span around each span, `UNKNOWN` if there is none."""
    found = parent.copy()
    at = np.flatnonzero(found >= 0)
    while len(at := at[~wanted[found[at]]]):
        found[at] = found[found[at]]  # Each pass doubles the distance.
        at = at[found[at] >= 0]
    return found


def _categories(kind: Int64s, named: Int64s, parent: Int64s) -> Int64s:
    """Return the category of each span by its name, else by the spans around it."""
    relevant = (kind == _STAGE) | (kind == _REGION)
    named = np.where(relevant, named, NO_CATEGORY)
    stage = _nearest(parent, (kind == _STAGE) & (named != NO_CATEGORY))
    computes = (kind == _REGION) & (named == Category.COMPUTE)
    launched = computes & np.isin(np.append(named, NO_CATEGORY)[stage], _LAUNCHING)
    named = np.where(launched, named[stage], named)
    around = np.append(named, NO_CATEGORY)[_nearest(parent, named != NO_CATEGORY)]
    category = np.where(named == NO_CATEGORY, around, named)
    category[(category == NO_CATEGORY) & (kind == _STAGE)] = Category.CUSTOM
    category[~relevant] = NO_CATEGORY
    top = _nearest(parent, np.isin(named, ENCLOSING))
    at = np.flatnonzero(top >= 0)
    while len(at := at[top[top[at]] >= 0]):  # The outermost span counts.
        top[at] = top[top[at]]
    return np.where((top >= 0) & relevant, named[top], category)


def _pairs(end: Int64s, outer: Int64s) -> tuple[Int64s, Int64s]:
    """Return (outer, inner) for each span and the one around it, and those that it outlives.

    A task may end after the span that it was opened in. Until then it also hides the next span
    around.
    """
    inner = np.flatnonzero(outer >= 0)
    above = outer[inner]
    pairs = [(above, inner)]
    while len(inner):
        out = end[inner] > end[above]
        inner, above = inner[out], outer[above[out]]
        inner, above = inner[above >= 0], above[above >= 0]
        pairs.append((above, inner))
    return np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs])


class DeviceTime(NamedTuple):
    """What one rank's devices ran, and why they were idle: disjoint intervals per category.

    Attributes:
        start_ns: Start of each interval.
        end_ns: Its end.
        category: Its category; idle time has those of `IDLE_CATEGORIES`.
        is_idle: Whether it is idle time.
        profiled: Starts and ends of the time in which the devices were profiled.
        record: When the rank's record begins and ends.
    """

    start_ns: Int64s
    end_ns: Int64s
    category: Int64s
    is_idle: Mask
    profiled: tuple[Int64s, Int64s]
    record: tuple[int, int]


@dataclass(eq=False)
class DeviceOccupancy:
    """Device time of a run.

    Attributes:
        by_rank: Device time by rank; ranks without recorded device work are missing.
        categories: Categories with data, even if they took no time.
        unknown_transfers: Kernels of collectives without a match, or without ranks of their group.
        notes: What a reader needs to know.
    """

    by_rank: dict[int, DeviceTime] = field(default_factory=dict)
    categories: set[Category] = field(default_factory=set)
    unknown_transfers: int = 0
    notes: list[str] = field(default_factory=list)


class _Work(NamedTuple):
    """Kernels or copies as columns of equal length."""

    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    category: Int64s


def device_occupancy(spans: Spans) -> DeviceOccupancy:
    """Categorize the work and the idle time of a run's devices; see `device_timeline`.

    A kernel launched in a rollout, weight sync, reward, offload or evaluation belongs to that.
    Other kernels are compute, communication or memcpy by their names. Collectives that match
    across ranks are divided into wait and transfer, see `match_collectives`.

    Takes as long as reading the tables, which can be gigabytes.
    """
    timeline = device_timeline(spans)
    found = DeviceOccupancy(notes=[*timeline.notes])
    device = timeline.work
    if not device.tables:
        return found
    if device.kernel_count:
        found.categories |= {Category.COMPUTE, Category.COMMUNICATION}
    if device.copies is not None:
        found.categories.add(Category.MEMCPY)
    work = _work(spans, device, found)
    found.categories |= {Category(each) for each in np.unique(work.category).tolist()}
    rows_of = {int(work.rank[rows[0]]): rows for rows in rows_by_group(work.rank)}
    for rank, lanes in groupby(timeline.lanes, key=lambda lane: lane.rank):
        own = _Work(*(column[rows_of[rank]] for column in work))
        time = found.by_rank[rank] = _device_time(own, [*lanes])
        found.categories |= {Category(each) for each in np.unique(time.category).tolist()}
        if len(time.profiled[0]):
            found.categories.add(Category.HOST_IDLE)
    return found


def _work(spans: Spans, device: DeviceWork, found: DeviceOccupancy) -> _Work:
    """Return kernels and copies by category, matched collectives as wait and transfer."""
    codes, stages = device.stages()
    of_stage, begin = categories_of(stages), device.numbers("start")
    category = np.array(_CATEGORIES)[device.kind]
    launched = np.flatnonzero(np.isin(of_stage, _LAUNCHING)[codes])
    category[launched] = of_stage[codes[launched]]
    work = _Work(device.rank, begin, begin + device.duration, category)
    at = np.flatnonzero(category == Category.COMMUNICATION)
    if not len(at):
        return work
    took = _transfers(spans, device, at, found)
    at, took = at[took != UNKNOWN], took[took != UNKNOWN]
    arrived = work.start_ns[at]
    work.start_ns[at] = np.maximum(work.end_ns[at] - took, arrived)
    wait = np.full(len(at), int(Category.COLLECTIVE_WAIT))
    waits = _Work(work.rank[at], arrived, work.start_ns[at], wait)
    columns = [*work]
    del work, begin, category  # One column after the other, so that not all are there twice.
    return _Work(*(np.append(columns.pop(0), each) for each in waits))


def _transfers(spans: Spans, device: DeviceWork, at: Int64s, found: DeviceOccupancy) -> Int64s:
    """Return the transfer of some kernels, `UNKNOWN` without a match; say what is doubtful."""
    calls = read_calls(spans, [])
    if calls is None:
        return np.full(len(at), UNKNOWN)
    matched, _ = match_collectives(spans, calls)
    row = _rows_of_kernels(calls, device, at)
    collective = np.append(matched.collective, UNKNOWN)[row]
    took: Int64s = np.append(matched.transfer_ns, UNKNOWN)[collective]
    lacking = np.append(matched.lacking, True)[collective]
    found.unknown_transfers = int(np.count_nonzero(lacking))
    if texts := doubt_texts(matched):
        found.notes += [*texts, _WAIT_UNKNOWN]
    return took


def _rows_of_kernels(calls: Calls, device: DeviceWork, at: Int64s) -> Int64s:
    """Return the call of a collective that each of some kernels is, -1 without one."""
    found = np.full(len(at), -1)
    listed = np.stack([calls.rank, calls.device, calls.stream, calls.start_ns])
    own = np.stack([device.numbers(key)[at] for key in _IDENTITY])
    for later in _ROUNDING_NS:
        left = np.flatnonzero(found < 0)
        wanted = own[:, left] + np.array([[0], [0], [0], [later]])
        place = np.unique(np.hstack([listed, wanted]), axis=1, return_inverse=True)[1].ravel()
        row = np.full(len(place), -1)
        row[place[: listed.shape[1]]] = np.arange(listed.shape[1])
        found[left] = row[place[listed.shape[1] :]]
    return found


def _device_time(work: _Work, lanes: Sequence[Lane]) -> DeviceTime:
    """Unite a rank's intervals of each category: kernels of several streams count once."""
    gaps = [idle_causes(lane) for lane in lanes]
    start, end, cause = (np.concatenate(columns) for columns in zip(*gaps, strict=True))
    columns = (
        (np.array(IDLE_CATEGORIES)[cause], start, end),
        (work.category, work.start_ns, work.end_ns),
    )
    zero, of_kind = lanes[0].start_ns, []
    for category, first, last in columns:
        of_kind.append(unions(category, first - zero, last - zero))
    category, start, end = (np.concatenate(each) for each in zip(*of_kind, strict=True))
    is_idle = np.arange(len(category)) < len(of_kind[0][0])
    record = min(lane.start_ns for lane in lanes), max(lane.end_ns for lane in lanes)
    return DeviceTime(start + zero, end + zero, category, is_idle, lanes[0].profiled, record)
