"""What each stage of each rank took step by step, and what its work explains of that."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.dag import Dag
from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.longest import OWN
from lightning_rlprof.analysis.worked import expected
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["Worked", "Workload", "workload"]


class Worked(NamedTuple):
    """A stage on the chains of one role: time and expected time, shape (chains, steps)."""

    name: int
    chains: Int64s
    took: Floats
    should: Floats


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
    took: Floats = np.where(total > 0, total, np.nan)
    heads = np.full(len(spans), -1)
    heads[rows] = at  # pieces of one stage span lie in one cell
    counted = [_counter(spans, name, heads, took) for name in ("tokens", "tokens_sq")]
    work = [each for each in counted if each is not None] if counted[0] is not None else []
    stages = tuple(_stages(graph, took, work))
    return Workload(own, at, shape, stages, bool(work))


def _stages(graph: Dag, took: Floats, work: list[Floats]) -> Iterator[Worked]:
    roles = np.array(graph.roles)
    for role in dict.fromkeys(graph.roles):
        chains = np.flatnonzero(roles == role)
        for name in range(len(took)) if len(chains) > 1 else ():
            own = took[name, chains]
            if not np.isnan(own).all():
                should = expected(own, [each[name, chains] for each in work])
                yield Worked(name, chains, own, should)


def _counter(spans: Spans, name: str, cell: Int64s, took: Floats) -> Floats | None:
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
    found: Floats = np.where(counts[:, None, None], own, step)
    return found
