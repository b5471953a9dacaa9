"""Bottleneck cycle of overlapping (asynchronous) steps: what limits their rate.

All steps are laid over one another as one steady graph. Its nodes are places that every step
passes: the n-th time in a step that a thread arrives at a sync point, produces a handoff, or
continues. An edge is what happens between two of them, and how many steps later it ends. The cycle
with the most time per step limits the rate.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.handoffs import Handoffs, find_handoffs, has_handoffs
from lightning_rlprof.analysis.critical_path.step_graph import seconds
from lightning_rlprof.analysis.critical_path.step_intervals import (
    StepIntervals,
    find_step_intervals,
)
from lightning_rlprof.analysis.critical_path.sync_points import SyncPoints, find_sync_points
from lightning_rlprof.analysis.stages.partition import Partition, partition
from lightning_rlprof.analysis.step_selection import FEWEST, counted, last_steps
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.tables.arrays import Int64s, Mask, group_sizes, group_starts
from lightning_rlprof.tables.occurrences import number_occurrences
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

TRANSFER, HANDOFF = -1, -2
"""Stand for the thread of an edge: the time is that of a sync point, or of a handoff."""


UNKNOWN = -1
_MOSTLY = 0.5  # of the steps must have an edge, else it is none of the steady step


class SteadyGraph(NamedTuple):
    """The edges of one steady step.

    Attributes:
        source: Place at which each edge starts.
        target: Place at which it ends.
        ns: Its mean duration.
        steps: How many steps later it ends.
        chain: Chain whose time it is, or `TRANSFER` or `HANDOFF`.
        name: Name of what it ends with.
        at: Edge of each time that an edge was passed.
        begin_ns: When that started.
        end_ns: When it ended.
    """

    source: Int64s
    target: Int64s
    ns: Int64s
    steps: Int64s
    chain: Int64s
    name: Int64s
    at: Int64s
    begin_ns: Int64s
    end_ns: Int64s


class _Events(NamedTuple):
    """Visits of chains, by chain and time; ``wait`` is -1 for those that produce a handoff."""

    chain: Int64s
    come_ns: Int64s
    leave_ns: Int64s
    wait: Int64s
    name: Int64s
    step: Int64s
    place: Int64s


def steady_graph(sync_points: SyncPoints, handoffs: Handoffs) -> SteadyGraph:
    """Lay all steps over one another."""
    count = len(sync_points.size)
    events = _events(sync_points, handoffs)
    size = count + len(handoffs.chain)
    last = np.full(size, np.iinfo(np.int64).min)
    waits = events.wait >= 0
    np.maximum.at(last, events.wait[waits], events.come_ns[waits])
    fine = handoffs.produced_ns <= handoffs.end_ns[handoffs.wait]
    np.maximum.at(last, count + handoffs.wait[fine], handoffs.produced_ns[fine])
    transfer = np.append(sync_points.transfer_ns, handoffs.end_ns - last[count:])
    return _overlaid(_edges(events, handoffs, transfer, last, fine))


def _events(sync_points: SyncPoints, handoffs: Handoffs) -> _Events:
    """Return all visits, numbered by place."""
    waits, none = len(handoffs.chain), np.full(len(handoffs.wait), -1)
    columns = (
        (sync_points.chain, handoffs.chain, handoffs.producer),
        (sync_points.start_ns, handoffs.start_ns, handoffs.produced_ns),
        (sync_points.end_ns, handoffs.end_ns, handoffs.produced_ns),
        (sync_points.group, len(sync_points.size) + np.arange(waits), none),
        (sync_points.name, handoffs.name, handoffs.name),
        (sync_points.step[sync_points.group], handoffs.step, handoffs.produced_step),
        (np.full(len(sync_points.chain), 1), np.full(waits, 1), np.where(handoffs.is_mark, 2, 0)),
    )
    events = [np.concatenate(each) for each in columns]
    order = np.lexsort((events[6], events[2], events[1], events[0]))
    chain, come, leave, wait, name, step, _ = (each[order] for each in events)
    kind = name * 2 + (wait >= 0)
    key = (chain * (int(kind.max(initial=0)) + 1) + kind) * (int(step.max(initial=0)) + 1) + step
    nth = number_occurrences(key)[0]
    every = (chain * (int(kind.max(initial=0)) + 1) + kind) * (int(nth.max(initial=0)) + 1) + nth
    place = np.unique(every, return_inverse=True)[1]
    return _Events(chain, come, leave, wait, name, step, place)


def _edges(
    events: _Events, handoffs: Handoffs, transfer: Int64s, last: Int64s, fine: Mask
) -> Int64s:
    """Return source, target, ns, steps, chain, name, start and end of all that was passed.

    Arriving at a place and continuing from it are two nodes: 2 x place, and that + 1. All visitors
    of a sync point share one place to continue from: that of its first thread. The time of a
    handoff is known only if it was produced after its consumer started to wait.
    """
    count = len(transfer) - len(handoffs.chain)
    waits = np.flatnonzero(events.wait >= 0)
    whose = np.full(len(transfer), -1)
    whose[events.wait[waits][::-1]] = waits[::-1]
    goes = events.place * 2 + 1
    goes[waits] = goes[whose[events.wait[waits]]]
    step = events.step.copy()
    step[waits] = step[whose[events.wait[waits]]]
    kind_of_time = np.where((events.wait >= 0) & (events.wait < count), TRANSFER, HANDOFF)
    passes = np.append(transfer, 0)[events.wait]
    passes[(events.wait >= count) & (events.come_ns < np.append(last, 0)[events.wait])] = 0
    ready = events.leave_ns - passes
    inner = (events.place * 2, goes, passes, step - events.step, kind_of_time, events.name)
    through = np.stack([*inner, ready, events.leave_ns])
    same = np.flatnonzero(events.chain[1:] == events.chain[:-1])
    after = same + 1
    begin, end = events.leave_ns[same], np.maximum(events.come_ns[after], events.leave_ns[same])
    way = (goes[same], events.place[after] * 2, end - begin, events.step[after] - step[same])
    ways = np.stack([*way, events.chain[after], events.name[after], begin, end])
    to = whose[count + handoffs.wait[fine]]
    return np.hstack(
        [through, ways, _overs(events, handoffs, fine, to, goes[to], (transfer, last))]
    )


def _overs(
    events: _Events,
    handoffs: Handoffs,
    fine: Mask,
    to: Int64s,
    goes: Int64s,
    when: tuple[Int64s, Int64s],
) -> Int64s:
    """Return the same for handoffs: from producing them to where their consumer continues."""
    (transfer, last), giver, wait = when, _giving(events, handoffs)[fine], events.wait[to]
    late = (handoffs.produced_ns[fine] == last[wait]) & (events.come_ns[to] < last[wait])
    ns, until = np.where(late, transfer[wait], UNKNOWN), events.leave_ns[to]
    over = (events.place[giver] * 2, goes, ns, events.step[to] - events.step[giver])
    return np.stack([*over, np.full(len(to), HANDOFF), events.name[to], until, until])


def _giving(events: _Events, handoffs: Handoffs) -> Int64s:
    """Return the visit of each handoff."""
    gives = np.flatnonzero(events.wait < 0)
    mine = np.lexsort((events.name[gives], events.come_ns[gives], events.chain[gives]))
    theirs = np.lexsort((handoffs.name, handoffs.produced_ns, handoffs.producer))
    found = np.empty(len(gives), dtype=np.int64)
    found[theirs] = gives[mine]
    return found


def _overlaid(every: Int64s) -> SteadyGraph:
    """Sum the edges that are passed in most steps."""
    low, places = int(every[3].min(initial=0)), int(every[:2].max(initial=0)) + 1
    key = (every[3] - low) * places**2 + every[0] * places + every[1]
    _, first, at = np.unique(key, return_index=True, return_inverse=True)
    times = np.bincount(at)
    kept = np.flatnonzero(times >= max(_MOSTLY * times.max(initial=0), 2))
    number = np.full(len(times), -1)
    number[kept] = np.arange(len(kept))
    known = every[2] != UNKNOWN
    sums = np.bincount(at[known], every[2, known], len(times))
    mean = np.rint(sums / np.maximum(np.bincount(at[known], minlength=len(times)), 1))
    source, target, _, steps, chain, what = every[:6, first[kept]]
    some = number[at] >= 0
    passed = (number[at][some], every[6, some], every[7, some])
    return SteadyGraph(source, target, mean[kept].astype(np.int64), steps, chain, what, *passed)


class Cycle(NamedTuple):
    """A cycle: its edges in order, their total weight, and how many steps later it ends."""

    edges: Int64s
    weight: int
    steps: int


def heaviest_cycle(source: Int64s, target: Int64s, weight: Int64s, steps: Int64s) -> Cycle | None:
    """Return the cycle with the greatest weight per step, None without a cycle; exact.

    Goes from any cycle to a heavier one until there is none (Dinkelbach 1967); finds cycles by
    Bellman-Ford. Every cycle must end one step later or more.

    Args:
        source: Node at which each edge starts.
        target: Node at which it ends.
        weight: Its weight; below 2^40.
        steps: How many steps later it ends.

    Raises:
        ValueError: Some cycle ends in the step in which it starts.
    """
    nodes, best, gain = (
        int(max(source.max(initial=-1), target.max(initial=-1))) + 1,
        None,
        weight + 1,
    )
    while (edges := _positive(source, target, gain, nodes)) is not None:
        best = Cycle(edges, int(weight[edges].sum()), int(steps[edges].sum()))
        if best.steps <= 0:
            raise ValueError(f"a cycle of {len(edges)} edges takes {best.steps} steps")
        gain = weight * best.steps - steps * best.weight
    return best


def _positive(source: Int64s, target: Int64s, gain: Int64s, nodes: int) -> Int64s | None:
    """Return the edges of a cycle whose gains add up to more than 0, or None."""
    order = np.argsort(target, kind="stable")
    heads = group_starts(target[order])
    size, where = group_sizes(heads, len(order)), target[order][heads]
    best, by = np.zeros(nodes, dtype=np.int64), np.full(nodes, -1)
    while len(order):
        reach = best[source[order]] + gain[order]
        top = np.maximum.reduceat(reach, heads)
        better = top > best[where]
        if not better.any():
            break
        best[where] = np.where(better, top, best[where])
        chosen = order[np.repeat(better, size) & (reach == np.repeat(top, size))]
        by[target[chosen]] = chosen
        found = _circle(by, source)
        if found is not None:
            return found
    return None


def _circle(by: Int64s, source: Int64s) -> Int64s | None:
    """Return the edges of a cycle among the edges by which nodes were reached, or None."""
    nodes = len(by)
    up = np.append(np.where(by >= 0, source[by], nodes), nodes)
    far = up.copy()
    for _ in range(nodes.bit_length()):
        far = far[far]
    inside = far[far < nodes]
    if not len(inside):
        return None
    edges, node = [int(by[inside[0]])], int(up[inside[0]])
    while node != inside[0]:
        edges.append(int(by[node]))
        node = int(up[node])
    return np.array(edges[::-1], dtype=np.int64)


_COLUMNS = (
    Column("stage", "text"),
    Column("part", "text"),
    Column("role", "text"),
    Column("rank", "count"),
    Column("share", "share"),
    Column("per cycle", "duration", "ns"),
)
_BETWEEN = "untraced"
_IDLE = (Category.DATA_WAIT, Category.WEIGHT_SYNC, Category.COLLECTIVE_WAIT)


def bottleneck_cycle(spans: Spans) -> Table:
    """Divide the cycle that limits the rate of asynchronous steps, longest part first.

    Each part of the cycle depends on itself some steps earlier, and no other cycle takes as long
    per step. Only for runs that count samples or weight versions and whose steps overlap.
    """
    spans, _ = last_steps(spans)
    cut = partition(spans)
    choice, threads = counted(spans, cut.steps), np.unique(spans.thread[cut.steps])
    if len(threads) < 2 or not has_handoffs(spans):
        return _nothing(
            "No samples or weight versions are counted. Call count(sample=...) or version=..."
        )
    sync_points = find_sync_points(spans, threads, with_handoffs=True)
    intervals = find_step_intervals(
        spans, cut, threads, choice.mask, sync_points, with_handoffs=True
    )
    if intervals.synchronized or not _overlap(spans, cut, intervals):
        return _nothing("Steps don't overlap.")
    if len(intervals.steps) < FEWEST:
        return _nothing(
            f"{len(intervals.steps)} steps have usable boundaries; {FEWEST} are needed."
        )
    handoffs = find_handoffs(spans, threads, sync_points, intervals)
    return _table(spans, cut, threads, (sync_points, handoffs), float(intervals.wall_ns.mean()))


def _nothing(why: str) -> Table:
    return Table("bottleneck_cycle", _COLUMNS, abstained=why)


def _overlap(spans: Spans, cut: Partition, intervals: StepIntervals) -> bool:
    """Return whether most steps start, on some rank, before the previous one has ended on all."""
    rows, step = cut.stages(spans)
    works = ~np.isin(categories_of(spans.names), _IDLE)[spans.name[rows]]
    numbers = np.append(intervals.steps, intervals.steps[-1:] + 1)
    place = np.searchsorted(numbers, spans.step[cut.steps[step]])
    known = works & (np.append(numbers, -1)[place] == spans.step[cut.steps[step]])
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(first, place[known], spans.start_ns[rows[known]])
    end = intervals.end_ns.max(axis=0, initial=0)
    return 2 * int((first[1:] < end).sum()) > len(end)


def _table(
    spans: Spans, cut: Partition, threads: Int64s, waits: tuple[SyncPoints, Handoffs], took: float
) -> Table:
    graph = steady_graph(*waits)
    try:
        found = heaviest_cycle(graph.source, graph.target, graph.ns, graph.steps)
    except ValueError as error:
        return _nothing(f"Steps of different ranks can't be aligned: {error}.")
    if found is None or not found.weight:
        return _nothing("No dependency cycle occurs in most steps.")
    names, parts = waits[0].names, Counter[tuple[str, str, int]]()
    for edge in found.edges.tolist():
        chain = int(graph.chain[edge])
        if chain < 0:
            part = "transfer" if chain == TRANSFER else "handoff"
            parts[names[graph.name[edge]], part, -1] += int(graph.ns[edge])
        else:
            for name, ns in _divided(spans, cut, int(threads[chain]), graph, edge).items():
                parts[name, "work", chain] += ns
    rows = [_row(spans, threads, *each, found.weight) for each in parts.most_common() if each[1]]
    each, on = found.weight / found.steps, "1 step" if found.steps == 1 else f"{found.steps} steps"
    text = f"The cycle takes {seconds(found.weight)} and {on}: {seconds(each)} per step."
    note = f"{text} Measured mean step: {seconds(took)}."
    return Table("bottleneck_cycle", _COLUMNS, rows, note)


def _row(
    spans: Spans, threads: Int64s, part: tuple[str, str, int], ns: int, whole: int
) -> tuple[Cell, ...]:
    name, what, chain = part
    rank = spans.threads[threads[chain]].rank if chain >= 0 else None
    role = spans.headers[rank].role if rank is not None else None
    return name, what, role, rank, ns / whole, ns


def _divided(
    spans: Spans, cut: Partition, thread: int, graph: SteadyGraph, edge: int
) -> dict[str, int]:
    """Divide the mean time of an edge by the stages that its thread is in."""
    start, end, _, row = cut.divided
    mine = (row >= 0) & (spans.thread[row] == thread)
    row, start, end = row[mine], start[mine], end[mine]
    passed = graph.at == edge
    begin, until = np.sort(graph.begin_ns[passed]), np.sort(graph.end_ns[passed])
    place = np.minimum(np.searchsorted(until, start, "right"), len(until) - 1)
    inside = np.minimum(end, until[place]) - np.maximum(start, begin[place])
    inside = np.maximum(inside, 0)
    sums = np.bincount(spans.name[row], inside, len(spans.names))
    mean = {spans.names[at]: round(sums[at] / len(begin)) for at in np.flatnonzero(sums).tolist()}
    return mean | {_BETWEEN: max(int(graph.ns[edge]) - sum(mean.values()), 0)}
