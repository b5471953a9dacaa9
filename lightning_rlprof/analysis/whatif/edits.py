"""Changes to what was measured: other durations for the pieces and joins of a graph.

What each stage of each rank took step by step, and what its work explains of that.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.replay import OWN
from lightning_rlprof.analysis.critical_path.step_graph import Dag
from lightning_rlprof.analysis.statistics.robust import expected, middle, middle_of_others
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Spans


class Worked(NamedTuple):
    """A stage on the chains of one role: time and expected time, shape (chains, steps)."""

    name: int
    chains: Int64s
    took: Float64s
    should: Float64s


class Workload(NamedTuple):
    """Own time in stages, joins left out; of roles that have several chains.

    Attributes:
        own: Pieces of the graph that count.
        at: Their cells in an array of ``shape``, flat.
        shape: Names, chains and steps.
        stages: What is known of each stage and role.
        counted: Whether anybody counted tokens.
    """

    own: Int64s
    at: Int64s
    shape: tuple[int, int, int]
    stages: tuple[Worked, ...]
    counted: bool


def workload(spans: Spans, graph: Dag) -> Workload:
    """Sum own time by stage, chain and step, and fit it to tokens and their squares."""
    its = graph.plan
    own = np.flatnonzero((its.join == OWN) & (graph.row >= 0))
    rows = graph.row[own]
    steps, step = np.unique(spans.step[rows], return_inverse=True)  # one may be far from all others
    shape = (len(graph.names), len(graph.ranks), max(len(steps), 1))
    places = (graph.name[own], its.run[own] // max(its.laps, 1), step)
    at = np.ravel_multi_index(places, shape)
    size = int(np.prod(shape))
    total = np.bincount(at, weights=graph.ns[own], minlength=size).reshape(shape)
    took: Float64s = np.where(total > 0, total, np.nan)
    heads = np.full(len(spans), -1)
    heads[rows] = at  # pieces of one stage span lie in one cell
    counted = [_counter(spans, name, heads, took) for name in ("tokens", "tokens_sq")]
    work = [each for each in counted if each is not None] if counted[0] is not None else []
    stages = tuple(_stages(graph, took, work))
    return Workload(own, at, shape, stages, bool(work))


def _stages(graph: Dag, took: Float64s, work: list[Float64s]) -> Iterator[Worked]:
    roles = np.array(graph.roles)
    for role in dict.fromkeys(graph.roles):
        chains = np.flatnonzero(roles == role)
        for name in range(len(took)) if len(chains) > 1 else ():
            own = took[name, chains]
            if not np.isnan(own).all():
                should = expected(own, [each[name, chains] for each in work])
                yield Worked(name, chains, own, should)


def _counter(spans: Spans, name: str, cell: Int64s, took: Float64s) -> Float64s | None:
    """Sum a counter by cell; stages that do not have it get what was counted in the whole step."""
    rows, values = spans.amounts(name)
    there = cell[rows] >= 0
    at, size = cell[rows[there]], took.size
    told = np.zeros(size, dtype=bool)
    told[at] = True
    if not told.any():
        return None
    sums = np.bincount(at, weights=values[there], minlength=size)
    own = np.where(told, sums, np.nan).reshape(took.shape)
    known, spent = told.reshape(took.shape).sum(axis=(1, 2)), (~np.isnan(took)).sum(axis=(1, 2))
    counts = (known * 2 >= spent) & (known > 0)
    ran = ~np.isnan(took) | ~np.isnan(own)  # other roles have other stages
    step = np.where(ran, own, 0.0)[counts].sum(axis=0)  # NaN where one of them was lost
    step = step if counts.any() else np.full(took.shape[1:], np.nan)
    found: Float64s = np.where(counts[:, None, None], own, step)
    return found


_HIDDEN = 0.05  # of the steps in stages that wait: what is inside of them cannot be balanced


class Edit(NamedTuple):
    """Durations after a change: of each piece, and of each join's transfer.

    ``least_ns``: no lap becomes shorter than that; None where nothing else happens beside it.
    """

    own_ns: Int64s
    transfer_ns: Int64s
    least_ns: Int64s | None = None


def scaled(graph: Dag, stage: int, by: float) -> Edit:
    """Make all work in a stage take so many times as long, transfers inside it included.

    Ranks still meet where they met.
    """
    its, mine = graph.plan, _inside(graph, stage)
    own, transfer = graph.ns.copy(), graph.transfer_ns.copy()
    own[mine] = np.rint(own[mine] * by)
    joint = np.unique(its.join[mine & (its.join != OWN)])
    transfer[joint] = np.rint(transfer[joint] * by)
    return Edit(own, transfer)


def overlapped(graph: Dag, stage: int) -> Edit:
    """Let all work in a stage happen beside everything else, and ranks still meet where they met.

    A lap is no shorter than any thread's own work and transfers in it.
    """
    its, mine = graph.plan, np.flatnonzero(_inside(graph, stage))
    joint = its.join[mine]
    work = np.where(joint == OWN, graph.ns[mine], np.append(graph.transfer_ns, 0)[joint])
    each = np.bincount(its.run[mine], work, its.runs).reshape(-1, its.laps)
    return scaled(graph, stage, 0.0)._replace(least_ns=np.rint(each.max(axis=0)).astype(np.int64))


def _inside(graph: Dag, stage: int) -> Mask:
    """Return the pieces of a stage; what it was handed before, or hands over, is none of it."""
    before = np.append(graph.given, False)[graph.plan.join] & (graph.row < 0)
    found: Mask = (graph.name == stage) & ~graph.plan.hands & ~before
    return found


def shortened(graph: Dag, row: Int64s, saved_ns: Int64s) -> Edit:
    """Take time off some stages, by row, ascending; from all of their pieces alike."""
    mine = np.flatnonzero((graph.plan.join == OWN) & np.isin(graph.row, row))
    place = np.searchsorted(row, graph.row[mine])
    whole = np.bincount(place, graph.ns[mine], len(row))
    left = np.clip(1 - saved_ns / np.maximum(whole, 1.0), 0.0, 1.0)
    own = graph.ns.copy()
    own[mine] = np.rint(own[mine] * left[place])
    return Edit(own, graph.transfer_ns)


def unslowed(graph: Dag, work: Workload) -> Edit:
    """Take off what each rank lastingly needs longer than the others of its role at equal work.

    Per stage, the median over steps of its time over what was expected, relative to the others'.
    What changes from step to step stays, and who is faster stays so. In a stage that waits as a
    whole the last rank is taken to be as slow as in that own stage in which it is least slow.
    """
    factor, least = np.ones(work.shape), np.full(work.shape[1], np.inf)
    for each in work.stages:
        pace = each.took / each.should
        over = np.fmax(middle(pace / middle_of_others(pace), axis=1), 1.0)
        factor[each.name, each.chains] = 1 / over[:, None]
        least[each.chains] = np.minimum(least[each.chains], over)
    least[np.isinf(least)] = 1.0
    return Edit(_own(graph, work, factor), _waiting(graph, least))


def _waiting(graph: Dag, slower: Float64s) -> Int64s:
    """Return transfers in which the last one to come is no longer so many times slower."""
    its = graph.plan
    group, chain = its.join[its.at], its.run[its.at] // max(its.laps, 1)
    shortest = graph.ns[its.at] == graph.transfer_ns[group]
    by = np.ones(len(graph.transfer_ns))
    by[group[shortest]] = slower[chain[shortest]]
    return np.where(graph.waits, np.rint(graph.transfer_ns / by), graph.transfer_ns).astype(
        np.int64
    )


def balanced(graph: Dag, work: Workload) -> Edit | None:
    """Give all ranks of a role the same work in each step.

    A stage's time changes as much as the time that is expected for its work. None where nobody
    counts tokens, and where much of the work is in stages that wait as a whole.
    """
    held = int(graph.transfer_ns[graph.waits].sum())
    if not work.counted or held > _HIDDEN * int(graph.wall_ns.sum()):
        return None
    factor = np.ones(work.shape)
    for each in work.stages:
        even = each.should.mean(axis=0) / each.should
        factor[each.name, each.chains] = np.where(np.isfinite(even), even, 1.0)
    return Edit(_own(graph, work, factor), graph.transfer_ns)


def _own(graph: Dag, work: Workload, factor: Float64s) -> Int64s:
    own = graph.ns.copy()
    own[work.own] = np.rint(own[work.own] * factor.ravel()[work.at])
    return own
