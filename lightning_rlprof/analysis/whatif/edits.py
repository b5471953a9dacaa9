"""Edits of a step graph: other durations for its segments and transfers.

`workload` first sums the work of each stage and rank, and fits it to the counted tokens.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.replay import WORK
from lightning_rlprof.analysis.critical_path.step_graph import StepGraph
from lightning_rlprof.analysis.statistics.robust import expected, leave_one_out_median, nan_median
from lightning_rlprof.analysis.steps.rank_matrix import AMOUNTS, counted_amounts
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Spans

# If whole-stage sync points take a larger share of the time, work can't be balanced.
_HIDDEN = 0.05


class StageWork(NamedTuple):
    """A stage on the chains of one role: actual and expected time, shape (chains, steps)."""

    name: int
    chains: Int64s
    actual_ns: Float64s
    expected_ns: Float64s


class Workload(NamedTuple):
    """Own time in stages, sync points left out; of roles that have several chains.

    Attributes:
        own: Segments of the graph that count.
        at: Their cells in an array of ``shape``, flat.
        shape: Names, chains and steps.
        stages: What is known of each stage and role.
        counted: Whether tokens were counted.
    """

    own: Int64s
    at: Int64s
    shape: tuple[int, int, int]
    stages: tuple[StageWork, ...]
    counted: bool


def workload(graph: StepGraph) -> Workload:
    """Sum work by stage, chain and step, and fit it to tokens and their squares."""
    spans, schedule = graph.spans, graph.schedule
    own = np.flatnonzero((schedule.sync_point == WORK) & (graph.row >= 0))
    rows = graph.row[own]
    # Step numbers can be far apart, so positions replace them.
    steps, step = np.unique(spans.step[rows], return_inverse=True)
    shape = (len(graph.names), len(graph.ranks), max(len(steps), 1))
    places = (graph.name[own], schedule.run[own] // schedule.interval_count, step)
    at = np.ravel_multi_index(places, shape)
    total = np.bincount(at, graph.ns[own], math.prod(shape)).reshape(shape)
    actual_ns: Float64s = np.where(total > 0, total, np.nan)
    cell = np.full(len(spans), -1)
    cell[rows] = at  # All segments of a stage span are in the same cell.
    known = np.moveaxis(~np.isnan(actual_ns), 0, 2)
    found = {name: _counter(spans, name, cell, actual_ns) for name in AMOUNTS}
    ran = known.copy()  # A role runs only some of the stages.
    for each in found.values():
        ran |= False if each is None else ~np.isnan(each)
    amounts = counted_amounts(found.get, ran, known, np.arange(shape[0]))
    work = [np.moveaxis(each, 2, 0) for each in amounts]
    stages = tuple(_stages(graph, actual_ns, work))
    return Workload(own, at, shape, stages, bool(work))


def _stages(graph: StepGraph, actual_ns: Float64s, work: list[Float64s]) -> Iterator[StageWork]:
    roles = np.array(graph.roles)
    for role in dict.fromkeys(graph.roles):
        chains = np.flatnonzero(roles == role)
        for name in range(len(actual_ns)) if len(chains) > 1 else ():
            own = actual_ns[name, chains]
            if not np.isnan(own).all():
                expected_ns = expected(own, [each[name, chains] for each in work])
                yield StageWork(name, chains, own, expected_ns)


def _counter(spans: Spans, name: str, cell: Int64s, actual_ns: Float64s) -> Float64s | None:
    """Sum a counter by chain, step and name, NaN where none was counted; None if nothing was."""
    rows, values = spans.amounts(name)
    there = cell[rows] >= 0
    if not there.any():
        return None
    sums = np.full(actual_ns.size, np.nan)
    sums[cell[rows[there]]] = 0.0
    np.add.at(sums, cell[rows[there]], values[there])
    return np.moveaxis(sums.reshape(actual_ns.shape), 0, 2)


class Edit(NamedTuple):
    """Durations after a change: of each segment, and of the transfer of each sync point.

    ``least_ns`` is the minimum of each interval; None if nothing overlaps.
    """

    own_ns: Int64s
    transfer_ns: Int64s
    least_ns: Int64s | None = None


def scale_stage(graph: StepGraph, stage: int, by: float) -> Edit:
    """Multiply all work in a stage, transfers inside it included; sync points stay."""
    schedule, mine = graph.schedule, _segments_in(graph, stage)
    own, transfer = graph.ns.copy(), graph.transfer_ns.copy()
    own[mine] = np.rint(own[mine] * by)
    joint = np.unique(schedule.sync_point[mine & (schedule.sync_point != WORK)])
    transfer[joint] = np.rint(transfer[joint] * by)
    return Edit(own, transfer)


def overlap_stage(graph: StepGraph, stage: int) -> Edit:
    """Let all work in a stage overlap with everything else; sync points stay.

    An interval is at least as long as any thread's work and transfers in that stage.
    """
    schedule, mine = graph.schedule, np.flatnonzero(_segments_in(graph, stage))
    joint = schedule.sync_point[mine]
    work = np.where(joint == WORK, graph.ns[mine], np.append(graph.transfer_ns, 0)[joint])
    each = np.bincount(schedule.run[mine], work, schedule.runs).reshape(-1, schedule.interval_count)
    least = np.rint(each.max(axis=0)).astype(np.int64)
    return scale_stage(graph, stage, 0.0)._replace(least_ns=least)


def _segments_in(graph: StepGraph, stage: int) -> Mask:
    """Return the segments of a stage, without the handoffs it waits for or produces."""
    before = np.append(graph.is_handoff, False)[graph.schedule.sync_point] & (graph.row < 0)
    found: Mask = (graph.name == stage) & ~graph.schedule.produces & ~before
    return found


def shorten_stages(graph: StepGraph, row: Int64s, saved_ns: Int64s) -> Edit:
    """Shorten some stages, given by ascending row; all of their segments in proportion."""
    mine = np.flatnonzero((graph.schedule.sync_point == WORK) & np.isin(graph.row, row))
    place = np.searchsorted(row, graph.row[mine])
    whole = np.bincount(place, graph.ns[mine], len(row))
    left = np.clip(1 - saved_ns / np.maximum(whole, 1.0), 0.0, 1.0)
    own = graph.ns.copy()
    own[mine] = np.rint(own[mine] * left[place])
    return Edit(own, graph.transfer_ns)


def remove_slowness(graph: StepGraph, work: Workload) -> Edit:
    """Remove the lasting slowness of each rank relative to its role, at equal work.

    Slowness is, per stage, the median over steps of actual by expected time, relative to the other
    ranks. Variation between steps stays, and faster ranks stay faster. In a sync point that is a
    whole stage, the last arrival counts as slow as in the stage in which it is least slow.
    """
    factor, least = np.ones(work.shape), np.full(work.shape[1], np.inf)
    for each in work.stages:
        pace = each.actual_ns / each.expected_ns
        over = np.fmax(nan_median(pace / leave_one_out_median(pace), axis=1), 1.0)
        factor[each.name, each.chains] = 1 / over[:, None]
        least[each.chains] = np.minimum(least[each.chains], over)
    least[np.isinf(least)] = 1.0
    return Edit(_scaled_work(graph, work, factor), _transfers_without(graph, least))


def _transfers_without(graph: StepGraph, slower: Float64s) -> Int64s:
    """Return the transfers as if the last arrival were not slower."""
    schedule, visits = graph.schedule, np.flatnonzero(graph.schedule.sync_point != WORK)
    group, chain = schedule.sync_point[visits], schedule.run[visits] // schedule.interval_count
    shortest = graph.ns[visits] == graph.transfer_ns[group]
    by = np.ones(len(graph.transfer_ns))
    by[group[shortest]] = slower[chain[shortest]]
    shorter = np.rint(graph.transfer_ns / by).astype(np.int64)
    return np.where(graph.whole_stage, shorter, graph.transfer_ns)


def balance_load(graph: StepGraph, work: Workload) -> Edit | None:
    """Give all ranks of a role the same work in each step.

    A stage's time changes as much as the time expected for its work. Returns None if no tokens are
    counted, or if much of the work is in sync points that are whole stages.
    """
    waiting_ns = int(graph.transfer_ns[graph.whole_stage].sum())
    if not work.counted or waiting_ns > _HIDDEN * int(graph.wall_ns.sum()):
        return None
    factor = np.ones(work.shape)
    for each in work.stages:
        even = each.expected_ns.mean(axis=0) / each.expected_ns
        factor[each.name, each.chains] = np.where(np.isfinite(even), even, 1.0)
    return Edit(_scaled_work(graph, work, factor), graph.transfer_ns)


def _scaled_work(graph: StepGraph, work: Workload, factor: Float64s) -> Int64s:
    own = graph.ns.copy()
    own[work.own] = np.rint(own[work.own] * factor.ravel()[work.at])
    return own
