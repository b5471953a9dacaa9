"""What each rank's host did, from its spans: intervals with categories, and how they nest."""

from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.time_categories import ENCLOSING, NO_CATEGORY, Category
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s, Mask
from lightning_rlprof.tables.intervals import open_count, unions
from lightning_rlprof.tables.spans import NO_PARENT, Spans

_STAGE, _REGION = KINDS.index("stage"), KINDS.index("region")
_FEWEST_REQUESTS = 4  # with fewer at once, "less than half" is one or zero


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


def host_activity(spans: Spans, rows: slice, categories: Int64s, collectives: Int64s) -> Activity:
    """Categorize the stages and regions of one rank.

    A name without a category takes that of the nearest span around it that has one. Otherwise a
    stage is a custom stage, and a region is left out. Categories of `ENCLOSING` include all that
    was opened inside.

    Args:
        spans: The run.
        rows: The rank's rows.
        categories: Category per name.
        collectives: Collectives whose transfer start is known: before it, the rank waited. Shape
            (2, n): rows counted from the rank's first, and times.
    """
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    parent = _parents(spans.id[rows], spans.parent[rows], start, end)
    category = _categories(spans.kind[rows], categories[spans.name[rows]], parent)
    outer = _nearest(parent, category != NO_CATEGORY)
    keep = np.flatnonzero(category != NO_CATEGORY)
    place = np.full(len(category) + 1, UNKNOWN)  # the last item is read for "no outer span"
    place[keep] = np.arange(len(keep))
    transfer = start.copy()
    transfer[collectives[0]] = collectives[1]
    return _with_waits(start[keep], end[keep], category[keep], place[outer[keep]], transfer[keep])


def _with_waits(
    start: Int64s, end: Int64s, category: Int64s, outer: Int64s, transfer: Int64s
) -> Activity:
    """Add the wait of each collective as one more span, with the same spans inside."""
    waited = np.flatnonzero((transfer > start) & (category == Category.COMMUNICATION))
    wait = np.full(len(category) + 1, UNKNOWN)
    wait[waited] = np.arange(len(category), len(category) + len(waited))
    outers, inners = _pairs(end, outer)
    inside = wait[outers] >= 0
    return Activity(
        np.append(start, start[waited]),
        np.append(end, transfer[waited]),
        np.append(category, np.full(len(waited), int(Category.COLLECTIVE_WAIT))),
        np.concatenate([outers, wait[outers[inside]], waited]),
        np.concatenate([inners, inners[inside], wait[waited]]),
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
    for each in np.unique(own.category)[::-1].tolist():
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
    last_full[rollout_of[full]] = full  # the last one stays
    tail: Mask = (count > 0) & (most >= _FEWEST_REQUESTS)
    tail &= np.arange(len(count)) > last_full[rollout_of]
    return tail


def _parents(ids: Int64s, parent: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return the index of each span's parent, `UNKNOWN` without one.

    A parent that began later is ignored, as is one that began at the same time and ended sooner:
    so a damaged file cannot contain a cycle.
    """
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
        found[at] = found[found[at]]  # each pass doubles the distance
        at = at[found[at] >= 0]
    return found


def _categories(kind: Int64s, named: Int64s, parent: Int64s) -> Int64s:
    """Return the category of each span by its name, else by the spans around it."""
    relevant = (kind == _STAGE) | (kind == _REGION)
    named = np.where(relevant, named, NO_CATEGORY)
    around = np.append(named, NO_CATEGORY)[_nearest(parent, named != NO_CATEGORY)]
    category = np.where(named == NO_CATEGORY, around, named)
    category[(category == NO_CATEGORY) & (kind == _STAGE)] = Category.CUSTOM
    category[~relevant] = NO_CATEGORY
    top = _nearest(parent, np.isin(named, ENCLOSING))
    at = np.flatnonzero(top >= 0)
    while len(at := at[top[top[at]] >= 0]):  # the outermost one counts
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
