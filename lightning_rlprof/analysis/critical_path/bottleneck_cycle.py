"""Bottleneck cycle of overlapping (asynchronous) steps: what limits their rate.

All steps are laid over one another as one steady graph. Its nodes are places that every step
passes: the n-th time in a step that a thread arrives at a sync point, produces a handoff, or
continues. An edge is what happens between two of them, and how many steps later it ends. The cycle
with the most time per step limits the rate.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.step_graph import (
    UNTRACED_STAGE,
    Timeline,
    find_timeline,
    seconds,
)
from lightning_rlprof.analysis.steps.partition import stages_in_steps
from lightning_rlprof.analysis.steps.step_selection import FEWEST
from lightning_rlprof.analysis.steps.sync_points import has_handoffs
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s, number_occurrences
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_PARTS = {-1: "transfer", -2: "handoff"}
_TRANSFER, _HANDOFF = _PARTS  # stand for the chain of an edge that is no chain's work
_MOSTLY = 0.5  # of the steps must have an edge, else it is not part of the steady step


class SteadyGraph(NamedTuple):
    """The edges of one steady step; ``edges`` has the columns of `_passed`, ``ns`` is a mean.

    ``of`` is the edge of each column of ``passed``, or -1.
    """

    edges: Int64s
    passed: Int64s
    of: Int64s


def steady_graph(timeline: Timeline) -> SteadyGraph:
    """Lay all steps over one another: keep the edges that most steps have, with their mean time."""
    passed = _passed(timeline)
    key, inverse = np.unique(passed[:3], axis=1, return_inverse=True)
    of = inverse.ravel()
    times = np.bincount(of, minlength=key.shape[1])
    kept = np.flatnonzero(times >= max(_MOSTLY * times.max(initial=0), 2))
    number = np.full(len(times), -1)
    number[kept] = np.arange(len(kept))
    known = passed[5] != UNKNOWN
    sums = np.bincount(of[known], passed[5, known], len(times))
    mean = np.rint(sums / np.maximum(np.bincount(of[known], minlength=len(times)), 1))
    edges = passed[:, np.unique(of, return_index=True)[1][kept]]
    edges[5] = mean[kept]
    return SteadyGraph(edges, passed, number[of])


def _passed(timeline: Timeline) -> Int64s:
    """Return all that was passed: steps, source, target, chain, name, ns, start and end.

    Arriving at a place and continuing from it are two nodes: 2 x place, and that + 1. All visitors
    of a sync point share one node to continue from: that of its first thread. The time of a handoff
    is known only if it was produced after its consumer started to wait.
    """
    spans, sync_points, handoffs = timeline.spans, timeline.sync_points, timeline.handoffs
    meets, waits, needs = len(sync_points.size), len(handoffs.chain), handoffs.consumer_row
    fine = np.flatnonzero(handoffs.produced_ns <= handoffs.end_ns[handoffs.wait])
    ready = handoffs.start_ns.copy()
    np.maximum.at(ready, handoffs.wait[fine], handoffs.produced_ns[fine])
    late, transfer = ready > handoffs.start_ns, handoffs.end_ns - ready
    no_ns = np.zeros_like(handoffs.wait)
    columns = (
        (sync_points.chain, handoffs.chain, handoffs.producer),
        (sync_points.start_ns, handoffs.start_ns, handoffs.produced_ns),
        (sync_points.end_ns, handoffs.end_ns, handoffs.produced_ns),
        (np.ones_like(sync_points.chain), np.ones(waits, int), np.where(handoffs.is_mark, 2, 0)),
        (sync_points.group, meets + np.arange(waits), np.full(len(handoffs.wait), -1)),
        (sync_points.name, spans.name[needs], spans.name[needs[handoffs.wait]]),
        (sync_points.step[sync_points.group], spans.step[needs], spans.step[handoffs.producer_row]),
        (sync_points.transfer_ns[sync_points.group], np.where(late, 0, transfer), no_ns),
    )
    visits = np.array([np.concatenate(each) for each in columns], dtype=np.int64)
    order = np.lexsort(visits[3::-1])
    chain, come, leave, _, wait, name, step, ns = visits[:, order]
    kind = np.where((wait >= 0) & (wait < meets), _TRANSFER, _HANDOFF)
    what = np.stack([chain, name * 2 + (wait >= 0), step])
    what[2] = number_occurrences(*what)[0]
    place = np.unique(what, axis=1, return_inverse=True)[1].ravel() * 2

    waiting = np.flatnonzero(wait >= 0)
    first = waiting[np.unique(wait[waiting], return_index=True)[1]]
    leaves, leave_step = place + 1, step.copy()
    leaves[waiting] = leaves[first[wait[waiting]]]
    leave_step[waiting] = step[first[wait[waiting]]]
    through = (leave_step - step, place, leaves, kind, name, ns, leave - ns, leave)

    before = np.flatnonzero(chain[1:] == chain[:-1])
    after = before + 1
    since, until = leave[before], np.maximum(come[after], leave[before])
    work = (step[after] - leave_step[before], leaves[before], place[after], chain[after])

    giver = np.argsort(order)[len(sync_points.chain) + waits + fine]
    number = handoffs.wait[fine]
    taker = first[meets + number]
    shown = late[number] & (handoffs.produced_ns[fine] == ready[number])
    took = np.where(shown, transfer[number], UNKNOWN)
    over = (step[taker] - step[giver], place[giver], leaves[taker], np.full_like(giver, _HANDOFF))
    return np.hstack(
        [
            np.stack(through),
            np.stack([*work, name[after], until - since, since, until]),
            np.stack([*over, name[taker], took, leave[taker], leave[taker]]),
        ]
    )


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
    best, gain = None, weight + 1
    while len(edges := _cycle_with_gain(source, target, gain)):
        best = Cycle(edges, int(weight[edges].sum()), int(steps[edges].sum()))
        if best.steps <= 0:
            raise ValueError(f"a cycle of {len(edges)} edges takes {best.steps} steps")
        gain = weight * best.steps - steps * best.weight
    return best


def _cycle_with_gain(source: Int64s, target: Int64s, gain: Int64s) -> Int64s:
    """Return the edges of a cycle whose gains add up to more than 0; empty if there is none.

    As long as such a cycle exists, some node is reached with a higher gain in each round. The edges
    by which nodes were reached contain a cycle after as many rounds as there are nodes, or sooner.
    """
    nodes = int(max(source.max(initial=-1), target.max(initial=-1))) + 1
    best, by = np.zeros(nodes, dtype=np.int64), np.full(nodes, -1)
    while True:
        reach, top = best[source] + gain, best.copy()
        np.maximum.at(top, target, reach)
        better = np.flatnonzero((reach == top[target]) & (reach > best[target]))
        if not len(better):
            return better
        best, by[target[better]] = top, better
        node, seen = int(target[better[0]]), dict[int, int]()
        while node not in seen and by[node] >= 0:
            seen[node] = int(by[node])
            node = int(source[by[node]])
        if node in seen:
            edges = [*seen.values()]
            return np.array(edges[[*seen].index(node) :][::-1])


_COLUMNS = (
    Column("stage", "text"),
    Column("part", "text"),
    Column("role", "text"),
    Column("rank", "count"),
    Column("share", "share"),
    Column("per cycle", "duration", "ns"),
)
_IDLE = (Category.DATA_WAIT, Category.WEIGHT_SYNC, Category.COLLECTIVE_WAIT)


def bottleneck_cycle(spans: Spans) -> Table:
    """Divide the cycle that limits the rate of asynchronous steps, longest part first.

    Each part of the cycle depends on itself some steps earlier, and no other cycle takes as long
    per step. Only for runs that count samples or weight versions and whose steps overlap.
    """
    found = _parts(spans)
    if isinstance(found, str):
        return Table("bottleneck_cycle", _COLUMNS, abstained=found)
    return Table("bottleneck_cycle", _COLUMNS, *found)


def _parts(spans: Spans) -> tuple[list[tuple[Cell, ...]], str] | str:
    """Return the rows and the note, or why the run has no bottleneck cycle."""
    threads = np.unique(spans.thread[spans.rows(kind="step")])
    if len(threads) < 2 or not has_handoffs(spans):
        return "No samples or weight versions are counted. Call count(sample=...) or version=..."
    timeline = find_timeline(spans)
    spans, intervals = timeline.spans, timeline.intervals
    if intervals.synchronized or not _overlap(timeline):
        return "Steps don't overlap."
    if len(intervals.steps) < FEWEST:
        return f"{len(intervals.steps)} steps have usable boundaries; {FEWEST} are needed."
    graph = steady_graph(timeline)
    steps, source, target, chains, names, ns = graph.edges[:6]
    try:
        cycle = heaviest_cycle(source, target, ns, steps)
    except ValueError as error:
        return f"Steps of different ranks can't be aligned: {error}."
    if cycle is None or not cycle.weight:
        return "No dependency cycle occurs in most steps."
    sums = Counter[tuple[Cell, ...]]()
    for edge in cycle.edges.tolist():
        chain = int(chains[edge])
        if chain < 0:
            stage = timeline.sync_points.names[names[edge]]
            sums[stage, _PARTS[chain], None, None] += int(ns[edge])
            continue
        rank = spans.threads[timeline.threads[chain]].rank
        for name, own in _divided(timeline, chain, graph, edge).items():
            sums[name, "work", spans.headers[rank].role, rank] += own
    rows = [(*part, own / cycle.weight, own) for part, own in sums.most_common() if own]
    on = "1 step" if cycle.steps == 1 else f"{cycle.steps} steps"
    text = f"The cycle takes {seconds(cycle.weight)} and {on}"
    each, measured = seconds(cycle.weight / cycle.steps), seconds(float(intervals.wall_ns.mean()))
    return rows, f"{text}: {each} per step. Measured mean step: {measured}."


def _overlap(timeline: Timeline) -> bool:
    """Return whether most steps start, on some rank, before the previous one has ended on all."""
    spans, cut, intervals = timeline.spans, timeline.cut, timeline.intervals
    rows, step = stages_in_steps(spans, cut.steps)
    works = ~np.isin(categories_of(spans.names), _IDLE)[spans.name[rows]]
    numbers = np.append(intervals.steps, intervals.steps[-1:] + 1)
    place = np.searchsorted(numbers, spans.step[cut.steps[step]])
    known = works & (np.append(numbers, -1)[place] == spans.step[cut.steps[step]])
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(first, place[known], spans.start_ns[rows[known]])
    end = intervals.end_ns.max(axis=0, initial=0)
    return 2 * int((first[1:] < end).sum()) > len(end)


def _divided(timeline: Timeline, chain: int, graph: SteadyGraph, edge: int) -> dict[str, int]:
    """Divide the mean time of an edge by the stages that its thread is in."""
    names = timeline.spans.names
    stretches = np.stack(timeline.stage_stretches())
    _, start, end, row = stretches[:, stretches[0] == chain]
    begin, until = np.sort(graph.passed[6:, graph.of == edge])
    place = np.minimum(np.searchsorted(until, start, "right"), len(until) - 1)
    inside = np.maximum(np.minimum(end, until[place]) - np.maximum(start, begin[place]), 0)
    sums = np.bincount(timeline.spans.name[row], inside, len(names))
    mean = {names[at]: round(sums[at] / len(begin)) for at in np.flatnonzero(sums).tolist()}
    return mean | {UNTRACED_STAGE: max(int(graph.edges[5, edge]) - sum(mean.values()), 0)}
