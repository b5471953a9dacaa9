"""What one rank's spans say that it did: intervals with labels, and what was opened inside them."""

from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.time_categories import NO_CATEGORY, WHOLE, Category
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.intervals import open_count, unions
from lightning_rlprof.tables.spans import NO_PARENT, Spans

_STAGE, _REGION = KINDS.index("stage"), KINDS.index("region")
_NONE = -1
_FEWEST_REQUESTS = 4  # of fewer at once, "less than half of them" is one or none


@dataclass(frozen=True, eq=False)
class Activity:
    """The labelled spans of one rank, and pairs of them: ``inner`` was opened inside ``outer``.

    Attributes:
        start_ns: Start of each.
        end_ns: End of each.
        label: `Category` of each.
        outer: Index of a span in which another one was opened.
        inner: Index of that other one; it may end later than the outer one.
    """

    start_ns: Int64s
    end_ns: Int64s
    label: Int64s
    outer: Int64s
    inner: Int64s


def activity(spans: Spans, rows: slice, labels: Int64s, joined: Int64s) -> Activity:
    """Categorize the stages and regions of one rank.

    A name that means nothing takes the label of the nearest span around it that has one; a stage
    without is "custom stage", a region without says nothing. Those of `WHOLE` hold for all that was
    opened inside.

    Args:
        spans: The run.
        rows: The rank's rows.
        labels: Category per name.
        joined: Collectives of which it is known when their transfer began: before that the rank
            waited. Shape (2, n): rows counted from the rank's first, and times.
    """
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    parent = _parents(spans.id[rows], spans.parent[rows], start, end)
    label = _labels(spans.kind[rows], labels[spans.name[rows]], parent)
    outer = _nearest(parent, label != NO_CATEGORY)
    keep = np.flatnonzero(label != NO_CATEGORY)
    place = np.full(len(label) + 1, _NONE)  # the last item is read for "none"
    place[keep] = np.arange(len(keep))
    began = start.copy()
    began[joined[0]] = joined[1]
    return _divided(start[keep], end[keep], label[keep], place[outer[keep]], began[keep])


def _divided(start: Int64s, end: Int64s, label: Int64s, outer: Int64s, began: Int64s) -> Activity:
    """Add to each collective its wait as one more span, with the same spans inside."""
    waited = np.flatnonzero((began > start) & (label == Category.COMMUNICATION))
    wait = np.full(len(label) + 1, _NONE)
    wait[waited] = np.arange(len(label), len(label) + len(waited))
    outers, inners = _pairs(end, outer)
    held = wait[outers] >= 0
    return Activity(
        np.append(start, start[waited]),
        np.append(end, began[waited]),
        np.append(label, np.full(len(waited), int(Category.COLLECTIVE_WAIT))),
        np.concatenate([outers, wait[outers[held]], waited]),
        np.concatenate([inners, inners[held], wait[waited]]),
    )


def host_labels(own: Activity, times: Int64s) -> Int64s:
    """Return the label of each cell between neighbouring times, untraced without a span.

    Of the spans that are open those count in which no other one is open. Where they are several,
    of threads or tasks, the first label in order of precedence wins.

    Args:
        own: What the rank did.
        times: Distinct and ascending; the ends of all spans are among them.
    """
    first, last = np.searchsorted(times, own.start_ns), np.searchsorted(times, own.end_ns)
    begin = np.maximum(first[own.outer], first[own.inner])
    end = np.minimum(last[own.outer], last[own.inner])
    outer, begin, end = unions(own.outer, begin, end)
    hidden, cells = own.label[outer], len(times) - 1
    found = np.full(cells, int(Category.UNTRACED))
    for each in np.unique(own.label)[::-1].tolist():
        mine, less = np.flatnonzero(own.label == each), np.flatnonzero(hidden == each)
        count = open_count(first[mine], last[mine], cells)
        if len(less):
            count -= open_count(begin[less], end[less], cells)
        np.putmask(found, count > 0, each)
    return found


def rollout_tail(own: Activity, times: Int64s) -> Mask | None:
    """Tell the cells in which fewer than half of a rollout's requests are left, for good.

    Requests are the innermost rollout spans; a rollout is a stretch in which one at least is open,
    and the most that were open at once stand for its slots. None where there never were four.
    """
    holds = own.outer[own.label[own.inner] == Category.ROLLOUT]
    requests = own.label == Category.ROLLOUT
    requests[holds] = False
    first = np.searchsorted(times, own.start_ns[requests])
    last = np.searchsorted(times, own.end_ns[requests])
    count = open_count(first, last, len(times) - 1)
    heads = np.flatnonzero((count > 0) & (np.append(0, count[:-1]) == 0))
    if not len(heads):
        return None
    slots = np.append(np.maximum.reduceat(count, heads), 0)
    if slots.max() < _FEWEST_REQUESTS:
        return None
    stretch = np.cumsum(np.isin(np.arange(len(count)), heads)) - 1
    most = slots[stretch]
    full = np.flatnonzero(2 * count >= np.maximum(most, 1))
    last_full = np.full(len(slots), -1)
    last_full[stretch[full]] = full  # the last one stays
    tail: Mask = (count > 0) & (most >= _FEWEST_REQUESTS)
    tail &= np.arange(len(count)) > last_full[stretch]
    return tail


def _parents(ids: Int64s, parent: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Return the index of each span's parent, `_NONE` without one.

    A parent that began later is none, nor one that began at once and ended sooner: a damaged file
    cannot lead in circles.
    """
    order = np.argsort(ids, kind="stable")
    row = order[np.minimum(np.searchsorted(ids[order], parent), len(ids) - 1)]
    equal = start[row] == start
    longer = (end[row] > end) | ((end[row] == end) & (row < np.arange(len(ids))))
    before = (start[row] < start) | (equal & longer)
    return np.where((parent != NO_PARENT) & (ids[row] == parent) & before, row, _NONE)


def _nearest(parent: Int64s, wanted: Mask) -> Int64s:
    """Return the nearest wanted one around each span, `_NONE` where there is none."""
    found = parent.copy()
    at = np.flatnonzero(found >= 0)
    while len(at := at[~wanted[found[at]]]):
        found[at] = found[found[at]]  # each time over twice as many
        at = at[found[at] >= 0]
    return found


def _labels(kind: Int64s, named: Int64s, parent: Int64s) -> Int64s:
    """Return the label of each span by its name, else by what is around it."""
    ours = (kind == _STAGE) | (kind == _REGION)
    named = np.where(ours, named, NO_CATEGORY)
    around = np.append(named, NO_CATEGORY)[_nearest(parent, named != NO_CATEGORY)]
    label = np.where(named == NO_CATEGORY, around, named)
    label[(label == NO_CATEGORY) & (kind == _STAGE)] = Category.CUSTOM
    label[~ours] = NO_CATEGORY
    top = _nearest(parent, np.isin(named, WHOLE))
    at = np.flatnonzero(top >= 0)
    while len(at := at[top[top[at]] >= 0]):  # the outermost one has the last word
        top[at] = top[top[at]]
    return np.where((top >= 0) & ours, named[top], label)


def _pairs(end: Int64s, outer: Int64s) -> tuple[Int64s, Int64s]:
    """Return (outer, inner) for each span and the one around it, and for those that it outlives.

    A task may end after the span that it was opened in; until then the next one around is hidden
    by it, too.
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
