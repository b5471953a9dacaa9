"""Every instant of every step given to exactly one stage, in integer nanoseconds.

At each instant the label is the stage span of the step's own thread that started last among those
that are open (ties: the greater id); where none is open the time is untraced.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.model import Kind
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["UNTRACED", "Cells", "Partition", "home", "paint", "partition", "select"]

UNTRACED = -1
"""Label of the time in a step that no stage covers."""


@dataclass(frozen=True, eq=False)
class Cells:
    """Exclusive time per step and stage: three columns sorted by step, then name.

    Attributes:
        step: Index into ``Partition.steps``.
        name: Index into ``Spans.names``, or `UNTRACED`.
        ns: Time in that step whose innermost stage has that name; never zero.
    """

    step: Int64s
    name: Int64s
    ns: Int64s


@dataclass(frozen=True, eq=False)
class Partition:
    """The steps of a run cut into segments, each with one label; gapless within a step.

    Attributes:
        steps: Rows of the step spans, by rank and start.
        start_ns: Start of every segment, by thread and time.
        end_ns: End of every segment.
        step: Index into ``steps`` per segment.
        label: Row of the stage span per segment, or `UNTRACED`.
    """

    steps: Int64s
    start_ns: Int64s
    end_ns: Int64s
    step: Int64s
    label: Int64s

    def names(self, spans: Spans) -> Int64s:
        """Return the index into ``Spans.names`` per segment, `UNTRACED` where there is none."""
        names = np.append(spans.name, UNTRACED)  # label -1 reads the last item
        return names[self.label]

    def cells(self, spans: Spans) -> Cells:
        """Sum the segments of each stage in each step."""
        width = len(spans.names) + 1
        keys = self.step * width + self.names(spans) + 1
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        heads = np.flatnonzero(np.diff(keys, prepend=-1))
        lengths = (self.end_ns - self.start_ns)[order]
        sums = np.add.reduceat(lengths, heads) if len(heads) else lengths
        return Cells(keys[heads] // width, keys[heads] % width - 1, sums)


def partition(spans: Spans, ranks: Collection[int] | None = None) -> Partition:
    """Cut all steps of some ranks (None: of all) into labelled segments.

    Raises:
        TraceError: A rank is not in the run.
    """
    steps, stages = select(spans, "step", ranks), spans.rows(kind="stage")
    stages = stages[np.argsort(spans.thread[stages], kind="stable")]
    threads = spans.thread[stages]
    pieces = [np.empty((4, 0), dtype=np.int64)]
    for thread in np.unique(spans.thread[steps]):
        own = np.flatnonzero(spans.thread[steps] == thread)
        first, last = np.searchsorted(threads, [thread, thread + 1])
        pieces.append(_cut(spans, steps, own, stages[first:last]))
    start, end, step, label = np.concatenate(pieces, axis=1)
    return Partition(steps, start, end, step, label)


def select(spans: Spans, kind: Kind, ranks: Collection[int] | None) -> Int64s:
    """Return the rows of a kind on some ranks, None for all.

    Raises:
        TraceError: A rank is not in the run.
    """
    rows = spans.rows(kind=kind)
    if ranks is None:
        return rows
    absent = sorted(set(ranks) - set(spans.ranks))
    if absent:
        have = ", ".join(map(str, spans.ranks))
        raise TraceError(f"rank {absent[0]} is not in this run, which has {have}")
    return rows[np.isin(spans.rank[rows], list(ranks))]


def _cut(spans: Spans, steps: Int64s, own: Int64s, stages: Int64s) -> Int64s:
    """Return (start, end, step, label) of one thread's segments inside steps."""
    edges = [steps[own], stages]
    starts = np.concatenate([spans.start_ns[rows] for rows in edges])
    ends = np.concatenate([spans.end_ns[rows] for rows in edges])
    times, places = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    first, last = places[: len(starts)], places[len(starts) :]
    cells, count = len(times) - 1, len(own)
    step = paint(first[:count], last[:count], cells)
    label = paint(first[count:], last[count:], cells)
    inside = np.flatnonzero(step >= 0)
    labels = np.append(stages, UNTRACED)  # paint says -1 for none, which reads the last item
    return np.stack([times[inside], times[inside + 1], own[step[inside]], labels[label[inside]]])


def paint(first: Int64s, last: Int64s, cells: int) -> Int64s:
    """Return for each cell the greatest i with ``first[i] <= cell < last[i]``, or -1.

    An interval is two overlapping blocks whose length is a power of two; blocks are handed down
    from the longest to the shortest, so the cost is ``cells x log2(longest)`` without a loop.

    Example::

        >>> paint(np.array([0, 1]), np.array([4, 2]), 5).tolist()
        [0, 1, 0, 0, -1]
    """
    top = np.full(max(cells, 0), -1, dtype=np.int64)
    index = np.flatnonzero(last > first)
    first, last = first[index], last[index]
    levels = np.frexp(last - first)[1] - 1  # floor of the binary logarithm
    for level in range(int(levels.max(initial=0)), -1, -1):
        half = 1 << level
        top[half:] = np.maximum(top[half:], top[:-half])
        here = levels == level
        np.maximum.at(top, first[here], index[here])
        np.maximum.at(top, last[here] - half, index[here])
    return top


def home(spans: Spans, steps: Int64s, rows: Int64s, group: Int64s) -> Int64s:
    """Return for each row the step in which it starts, as an index into ``steps``, or -1.

    Args:
        spans: The run.
        steps: Rows of step spans.
        rows: Rows to place.
        group: ``spans.thread`` or ``spans.rank``: what a step and its spans have in common.
    """
    found = np.full(len(rows), -1, dtype=np.int64)
    order = np.argsort(group[rows], kind="stable")
    groups = group[rows][order]
    long = spans.duration_ns[steps] > 0  # a step without length contains nothing, and hides none
    for key in np.unique(group[steps[long]]):
        own = np.flatnonzero(long & (group[steps] == key))
        first, last = np.searchsorted(groups, [key, key + 1])
        mine = order[first:last]
        at = np.searchsorted(spans.start_ns[steps[own]], spans.start_ns[rows[mine]], "right") - 1
        step = own[at]
        inside = (at >= 0) & (spans.start_ns[rows[mine]] < spans.end_ns[steps[step]])
        found[mine[inside]] = step[inside]
    return found
