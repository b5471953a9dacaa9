"""One steady step as a graph of places that every step passes: where ranks come, wait and go on.

Nodes are places: the n-th time in a step that a thread comes to a join of a name, hands something
over, or goes on. An edge is what takes place between two of them, over so many steps on.

The cycle of a graph with the most weight by step: how fast anything goes on for ever.

What the rate of an asynchronous training hangs on: the cycle with the most time by step.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.handoffs import Handed, handed, is_fed
from lightning_rlprof.analysis.critical_path.step_graph import seconds
from lightning_rlprof.analysis.critical_path.step_intervals import Laps, laps
from lightning_rlprof.analysis.critical_path.sync_points import Joins, joins
from lightning_rlprof.analysis.stages.partition import Flat, Partition, partition
from lightning_rlprof.analysis.step_selection import FEWEST, counted, last_steps
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.tables.arrays import Int64s, Mask, group_sizes, group_starts
from lightning_rlprof.tables.occurrences import number_occurrences
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

TRANSFER, HAND_OVER = -1, -2
"""Stand in place of a thread: the time is that of a join, or of handing something over."""


_UNKNOWN = -1
_MOSTLY = 0.5  # of the steps must have an edge, else it is none of the steady step


class Steady(NamedTuple):
    """The edges of one steady step.

    Attributes:
        source: Place at which each edge begins.
        target: Place at which it ends.
        ns: How long it takes in the mean.
        steps: How many steps it goes on.
        chain: Thread whose time it is, or `TRANSFER` or `HAND_OVER`.
        what: Name with which it ends.
        at: Of the times that an edge was passed: which edge.
        begin_ns: And when it began.
        end_ns: And when it ended.
    """

    source: Int64s
    target: Int64s
    ns: Int64s
    steps: Int64s
    chain: Int64s
    what: Int64s
    at: Int64s
    begin_ns: Int64s
    end_ns: Int64s


class _Events(NamedTuple):
    """What threads attend: by thread and time. ``join`` is -1 where something is handed over."""

    chain: Int64s
    come_ns: Int64s
    leave_ns: Int64s
    join: Int64s
    name: Int64s
    step: Int64s
    place: Int64s


def steady(met: Joins, got: Handed) -> Steady:
    """Lay all steps over one another."""
    count = len(met.size)
    own = _events(met, got)
    size = count + len(got.chain)
    last = np.full(size, np.iinfo(np.int64).min)
    waits = own.join >= 0
    np.maximum.at(last, own.join[waits], own.come_ns[waits])
    fine = got.given_ns <= got.end_ns[got.to]
    np.maximum.at(last, count + got.to[fine], got.given_ns[fine])
    transfer = np.append(met.transfer_ns, got.end_ns - last[count:])
    return _overlaid(_edges(own, got, transfer, last, fine))


def _events(met: Joins, got: Handed) -> _Events:
    """Return all that is attended, numbered by place."""
    waits, none = len(got.chain), np.full(len(got.to), -1)
    columns = (
        (met.chain, got.chain, got.giver),
        (met.start_ns, got.start_ns, got.given_ns),
        (met.end_ns, got.end_ns, got.given_ns),
        (met.group, len(met.size) + np.arange(waits), none),
        (met.name, got.name, got.what),
        (met.step[met.group], got.step, got.given_step),
        (np.full(len(met.chain), 1), np.full(waits, 1), np.where(got.mark, 2, 0)),
    )
    own = [np.concatenate(each) for each in columns]
    order = np.lexsort((own[6], own[2], own[1], own[0]))
    chain, come, leave, join, name, step, _ = (each[order] for each in own)
    kind = name * 2 + (join >= 0)
    key = (chain * (int(kind.max(initial=0)) + 1) + kind) * (int(step.max(initial=0)) + 1) + step
    nth = number_occurrences(key)[0]
    every = (chain * (int(kind.max(initial=0)) + 1) + kind) * (int(nth.max(initial=0)) + 1) + nth
    place = np.unique(every, return_inverse=True)[1]
    return _Events(chain, come, leave, join, name, step, place)


def _edges(own: _Events, got: Handed, transfer: Int64s, last: Int64s, fine: Mask) -> Int64s:
    """Return source, target, ns, steps, chain, name, begin and end of all that was passed.

    To come to a place and to go on from it are two nodes: 2 x place, and that + 1. All who come to
    a join share one place to go on from: that of its first thread. How long a hand-over takes is
    known of what came last, after who waits for it.
    """
    count = len(transfer) - len(got.chain)
    waits = np.flatnonzero(own.join >= 0)
    whose = np.full(len(transfer), -1)
    whose[own.join[waits][::-1]] = waits[::-1]
    goes = own.place * 2 + 1
    goes[waits] = goes[whose[own.join[waits]]]
    step = own.step.copy()
    step[waits] = step[whose[own.join[waits]]]
    nobody = np.where((own.join >= 0) & (own.join < count), TRANSFER, HAND_OVER)
    passes = np.append(transfer, 0)[own.join]
    passes[(own.join >= count) & (own.come_ns < np.append(last, 0)[own.join])] = 0
    ready = own.leave_ns - passes
    inner = (own.place * 2, goes, passes, step - own.step, nobody, own.name)
    through = np.stack([*inner, ready, own.leave_ns])
    same = np.flatnonzero(own.chain[1:] == own.chain[:-1])
    after = same + 1
    begin, end = own.leave_ns[same], np.maximum(own.come_ns[after], own.leave_ns[same])
    way = (goes[same], own.place[after] * 2, end - begin, own.step[after] - step[same])
    ways = np.stack([*way, own.chain[after], own.name[after], begin, end])
    to = whose[count + got.to[fine]]
    return np.hstack([through, ways, _overs(own, got, fine, to, goes[to], (transfer, last))])


def _overs(
    own: _Events, got: Handed, fine: Mask, to: Int64s, goes: Int64s, when: tuple[Int64s, Int64s]
) -> Int64s:
    """Return the same of what is handed over: from where that is done to where somebody goes on."""
    (transfer, last), giver, join = when, _giving(own, got)[fine], own.join[to]
    late = (got.given_ns[fine] == last[join]) & (own.come_ns[to] < last[join])
    ns, until = np.where(late, transfer[join], _UNKNOWN), own.leave_ns[to]
    over = (own.place[giver] * 2, goes, ns, own.step[to] - own.step[giver])
    return np.stack([*over, np.full(len(to), HAND_OVER), own.name[to], until, until])


def _giving(own: _Events, got: Handed) -> Int64s:
    """Return which event each hand-over is."""
    gives = np.flatnonzero(own.join < 0)
    mine = np.lexsort((own.name[gives], own.come_ns[gives], own.chain[gives]))
    theirs = np.lexsort((got.what, got.given_ns, got.giver))
    found = np.empty(len(gives), dtype=np.int64)
    found[theirs] = gives[mine]
    return found


def _overlaid(every: Int64s) -> Steady:
    """Add up what is passed in most steps."""
    low, places = int(every[3].min(initial=0)), int(every[:2].max(initial=0)) + 1
    key = (every[3] - low) * places**2 + every[0] * places + every[1]
    _, first, at = np.unique(key, return_index=True, return_inverse=True)
    times = np.bincount(at)
    kept = np.flatnonzero(times >= max(_MOSTLY * times.max(initial=0), 2))
    number = np.full(len(times), -1)
    number[kept] = np.arange(len(kept))
    known = every[2] != _UNKNOWN
    sums = np.bincount(at[known], every[2, known], len(times))
    mean = np.rint(sums / np.maximum(np.bincount(at[known], minlength=len(times)), 1))
    source, target, _, steps, chain, what = every[:6, first[kept]]
    some = number[at] >= 0
    passed = (number[at][some], every[6, some], every[7, some])
    return Steady(source, target, mean[kept].astype(np.int64), steps, chain, what, *passed)


class Cycle(NamedTuple):
    """A cycle: its edges in order, their weight together, and how many steps one round takes."""

    edges: Int64s
    weight: int
    steps: int


def heaviest(source: Int64s, target: Int64s, weight: Int64s, steps: Int64s) -> Cycle | None:
    """Return the cycle with the greatest weight by steps, None where there is none; exact.

    From any cycle to one that is heavier until there is none (Dinkelbach 1967; the cycles by
    Bellman-Ford). A round of any cycle must take one step or more.

    Args:
        source: Node at which each edge begins.
        target: Node at which it ends.
        weight: Its weight; below 2^40.
        steps: How many steps it goes on.

    Raises:
        ValueError: A round of some cycle takes no step.
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
    """Return the edges of a cycle whose gains add up to more than 0, None where there is none."""
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
    """Return the edges of a circle in which each node was reached by its edge, if there is one."""
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
    """Divide the cycle that a steady step of an asynchronous training hangs on, longest part first.

    What is in it comes after itself, some steps later: no other cycle takes as long by step. So no
    step comes sooner than its time by its steps. Only of runs that tell of samples or versions of
    the weights, in which steps overlap.
    """
    spans, _ = last_steps(spans)
    cut = partition(spans)
    choice, threads = counted(spans, cut.steps), np.unique(spans.thread[cut.steps])
    if len(threads) < 2 or not is_fed(spans):
        return _nothing(
            "No samples or weight versions are counted. Call count(sample=...) or version=..."
        )
    met = joins(spans, threads, fed=True)
    its = laps(spans, cut, threads, choice.mask, met, fed=True)
    if its.joined or not _overlap(spans, cut, its):
        return _nothing("Steps don't overlap.")
    if len(its.steps) < FEWEST:
        return _nothing(f"{len(its.steps)} steps have usable boundaries; {FEWEST} are needed.")
    got = handed(spans, threads, met, its)
    return _table(spans, cut, threads, (met, got), float(its.wall_ns.mean()))


def _nothing(why: str) -> Table:
    return Table("bottleneck_cycle", _COLUMNS, abstained=why)


def _overlap(spans: Spans, cut: Partition, its: Laps) -> bool:
    """Tell whether most steps begin, on some rank, before the one before has ended on all."""
    rows, step = cut.stages(spans)
    works = ~np.isin(categories_of(spans.names), _IDLE)[spans.name[rows]]
    numbers = np.append(its.steps, its.steps[-1:] + 1)
    place = np.searchsorted(numbers, spans.step[cut.steps[step]])
    known = works & (np.append(numbers, -1)[place] == spans.step[cut.steps[step]])
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(first, place[known], spans.start_ns[rows[known]])
    end = its.end_ns.max(axis=0, initial=0)
    return 2 * int((first[1:] < end).sum()) > len(end)


def _table(
    spans: Spans, cut: Partition, threads: Int64s, waits: tuple[Joins, Handed], took: float
) -> Table:
    graph = steady(*waits)
    try:
        found = heaviest(graph.source, graph.target, graph.ns, graph.steps)
    except ValueError as error:
        return _nothing(f"Steps of different ranks can't be aligned: {error}.")
    if found is None or not found.weight:
        return _nothing("No dependency cycle occurs in most steps.")
    names, parts = waits[0].names, Counter[tuple[str, str, int]]()
    for edge in found.edges.tolist():
        chain = int(graph.chain[edge])
        if chain < 0:
            part = "transfer" if chain == TRANSFER else "handoff"
            parts[names[graph.what[edge]], part, -1] += int(graph.ns[edge])
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


def _divided(spans: Spans, cut: Partition, thread: int, graph: Steady, edge: int) -> dict[str, int]:
    """Divide the mean time of an edge by the stages that its thread is in."""
    own = cut.divided
    if isinstance(own, Flat):
        row, start, end = own.rows, own.start_ns, own.end_ns
    else:
        row, start, end = own.label, own.start_ns, own.end_ns
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
