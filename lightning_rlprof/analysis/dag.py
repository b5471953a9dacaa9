"""What each thread did between joins, step by step: the graph that paths and what-ifs go through.

A lap is a step from the moment that all ranks leave the last join of the step before to the moment
that they leave its own last one: there all are at the same place at the same time, whatever their
clocks say. Where no join is attended by all, a lap is the step as the clocks tell it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.counted import counted
from lightning_rlprof.analysis.joins import Joins, joins
from lightning_rlprof.analysis.longest import OWN, Plan, plan
from lightning_rlprof.analysis.partition import UNTRACED, Flat, Partition, paint, partition
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["BETWEEN", "Dag", "dag"]

Mask = npt.NDArray[np.bool_]

BETWEEN = "between stages"
"""How the time of a training thread in which no stage was open is called."""

_MOST = 1_600_000  # stages that are looked at; of more, the last steps
_MOSTLY = 0.5  # of the steps must have a join of all, else steps are cut by the clock


@dataclass(frozen=True, eq=False)
class Dag:
    """Pieces of runs, by run and time; they tile each lap of each thread.

    Attributes:
        names: What ``name`` stands for; the last one is `BETWEEN`.
        ranks: Rank of each chain.
        roles: Role of each chain.
        steps: RL step of each lap, ascending.
        wall_ns: How long each lap took.
        offset_ns: How much later than its lap each run began; 0 where laps begin at joins.
        name: Stage of each piece, or of a join outside of stages its own name.
        row: Row of the stage in the run, or `UNTRACED`.
        ns: How long each piece took, waiting included.
        transfer_ns: The shortest stay in each join.
        waits: Joins that are a whole stage, with the last one's own work in it.
        plan: In which order joins come.
        note: What the reader must know.
    """

    names: tuple[str, ...]
    ranks: Int64s
    roles: tuple[str, ...]
    steps: Int64s
    wall_ns: Int64s
    offset_ns: Int64s
    name: Int64s
    row: Int64s
    ns: Int64s
    transfer_ns: Int64s
    waits: Mask
    plan: Plan
    note: str


class _Laps(NamedTuple):
    """Begin and end of laps on each chain's clock, shape (chains, laps), and their steps."""

    begin_ns: Int64s
    end_ns: Int64s
    steps: Int64s
    joined: bool

    def only(self, kept: Int64s | slice) -> "_Laps":
        return _Laps(self.begin_ns[:, kept], self.end_ns[:, kept], self.steps[kept], self.joined)


class _Pieces(NamedTuple):
    run: Int64s
    join: Int64s
    name: Int64s
    row: Int64s
    ns: Int64s


def dag(spans: Spans) -> Dag | str:
    """Cut the complete steps of a run into pieces and joins; a text says why that cannot be done.

    Threads that have no steps are left out. So are steps that a thread lacks, and those in which
    joins come in different orders.
    """
    cut = partition(spans)
    choice, threads = counted(spans, cut.steps), np.unique(spans.thread[cut.steps])
    if not len(threads):
        return "no step was recorded"
    met = joins(spans, threads)
    if len(threads) > 1 and not len(met.step):
        return "nothing shows where ranks wait for one another: no span or table of collectives"
    laps = _recent(_in_order(_laps(spans, cut, threads, choice.mask, met)), cut)
    pieces = _pieces(spans, cut, threads, met, laps)
    order, used = _plan(pieces, laps)
    bad = np.unique(order.run[order.at][order.stuck[order.join[order.at]]] % max(order.laps, 1))
    if len(bad):
        laps = laps.only(np.delete(np.arange(len(laps.steps)), bad))
        pieces = _pieces(spans, cut, threads, met, laps)
        order, used = _plan(pieces, laps)
    if not len(laps.steps):
        return "no step is complete on all ranks with its joins in one order"
    note = " ".join(filter(None, [choice.note, _told(met, laps), _lost(len(bad))]))
    own, joint = (pieces.name, pieces.row, pieces.ns), (met.transfer_ns[used], met.waits[used])
    who = _who(spans, threads)
    return Dag((*met.names, BETWEEN), *who, *_walls(laps), *own, *joint, order, note)


def _plan(pieces: _Pieces, laps: _Laps) -> tuple[Plan, Int64s]:
    """Order the joins that occur, numbered anew; return which they were, too."""
    used = np.unique(pieces.join[pieces.join != OWN])
    join = np.where(pieces.join == OWN, OWN, np.searchsorted(used, pieces.join))
    return plan(pieces.run, join, laps.begin_ns.size, len(laps.steps)), used


def _who(spans: Spans, threads: Int64s) -> tuple[Int64s, tuple[str, ...]]:
    ranks = [spans.threads[thread].rank for thread in threads.tolist()]
    return np.array(ranks), tuple(spans.headers[rank].role for rank in ranks)


def _told(met: Joins, laps: _Laps) -> str:
    if len(laps.begin_ns) == 1:
        return "One thread: the path is all that it did."
    cut = "at the last join of all ranks, without comparing clocks"
    if not laps.joined:
        cut = "where ranks began and ended them by their clocks, as no join has all ranks"
    return f"Joins told by {met.source}. Steps are cut {cut}."


def _lost(laps: int) -> str:
    return f"Steps left out, as joins come in different orders: {laps}." if laps else ""


def _laps(spans: Spans, cut: Partition, threads: Int64s, complete: Mask, met: Joins) -> _Laps:
    numbers = np.unique(spans.step[cut.steps])
    fine = np.setdiff1d(numbers, spans.step[cut.steps[~complete]])
    chains = len(threads)
    full = met.size == chains
    mine = full[met.group] & (met.chain == 0)
    steps, group = met.step[met.group[mine]], met.group[mine]  # by time
    steps, first = np.unique(steps[::-1], return_index=True)
    last = group[::-1][first]
    if chains == 1 or len(steps) < _MOSTLY * len(numbers) or len(steps) < 2:
        return _by_clock(spans, cut, threads, fine)
    edge = np.zeros((chains, len(met.size)), dtype=np.int64)
    edge[met.chain, met.group] = met.end_ns
    edge = edge[:, last]
    place = np.searchsorted(numbers, steps)
    keep = np.flatnonzero(
        (np.diff(place) == 1) & np.isin(steps[1:], fine) & np.isin(steps[:-1], fine)
    )
    return _Laps(edge[:, keep], edge[:, keep + 1], steps[keep + 1], True)


def _by_clock(spans: Spans, cut: Partition, threads: Int64s, fine: Int64s) -> _Laps:
    """Return the steps that all threads have, from their own start to their own end."""
    rows = cut.steps[np.isin(spans.step[cut.steps], fine)]
    times = np.full((2, len(threads), len(fine)), -1, dtype=np.int64)
    at = np.searchsorted(threads, spans.thread[rows]), np.searchsorted(fine, spans.step[rows])
    times[(0, *at)], times[(1, *at)] = spans.start_ns[rows], spans.end_ns[rows]
    keep = (times >= 0).all(axis=(0, 1))
    return _Laps(times[0][:, keep], times[1][:, keep], fine[keep], False)


def _in_order(laps: _Laps) -> _Laps:
    """Leave out laps that are empty or begin before an earlier one ended, on any chain."""
    latest = np.maximum.accumulate(laps.end_ns, axis=1)[:, :-1]
    before = np.insert(latest, 0, np.iinfo(np.int64).min, axis=1)[:, : len(laps.steps)]
    fine = ((laps.end_ns > laps.begin_ns) & (laps.begin_ns >= before)).all(axis=0)
    return laps.only(np.flatnonzero(fine))


def _recent(laps: _Laps, cut: Partition) -> _Laps:
    """Keep the last steps where all are too many."""
    own = cut.divided
    stages = len(own.rows) if isinstance(own, Flat) else len(own.label)
    most = max(int(_MOST * len(laps.steps) / max(stages, 1)), 1)
    return laps.only(slice(-most, None))


def _walls(laps: _Laps) -> tuple[Int64s, Int64s, Int64s]:
    """Return the steps, how long laps took, and how much later than its lap each run began."""
    if laps.joined:
        took = np.sort(laps.end_ns - laps.begin_ns, axis=0)
        return laps.steps, took[len(took) // 2], np.zeros(laps.begin_ns.size, dtype=np.int64)
    first = laps.begin_ns.min(axis=0)
    return laps.steps, laps.end_ns.max(axis=0) - first, (laps.begin_ns - first).ravel()


def _stages(spans: Spans, cut: Partition) -> tuple[Int64s, ...]:
    """Return thread, start, end and row of the time that each stage has for itself."""
    own = cut.divided
    if isinstance(own, Flat):
        return spans.thread[own.rows], own.start_ns, own.end_ns, own.rows
    inside = own.label != UNTRACED
    row = own.label[inside]
    return spans.thread[row], own.start_ns[inside], own.end_ns[inside], row


def _pieces(spans: Spans, cut: Partition, threads: Int64s, met: Joins, laps: _Laps) -> _Pieces:
    """Cut the laps of all chains at the edges of stages and joins."""
    thread, start, end, row = _stages(spans, cut)
    chain, count = np.searchsorted(threads, thread), len(laps.steps)
    low, high = laps.begin_ns[:, :1].ravel(), laps.end_ns[:, -1:].ravel()
    if not count:
        return _Pieces(*np.zeros((5, 0), dtype=np.int64))
    near = (end > low[chain]) & (start < high[chain])
    chain, start, end, row = (each[near] for each in (chain, start, end, row))
    close = (met.end_ns > low[met.chain]) & (met.start_ns < high[met.chain])
    group, name = met.group[close], met.name[close]
    chains = np.repeat(np.arange(len(threads)), count)
    kinds = [
        (chain, start, end),
        (met.chain[close], met.start_ns[close], met.end_ns[close]),
        (chains, laps.begin_ns.ravel(), laps.end_ns.ravel()),
    ]
    times, (stage, join, lap) = _cells(kinds)
    keep = np.flatnonzero(lap >= 0)
    stage, join, run = stage[keep], join[keep], lap[keep]
    begins = (join < 0) | (np.diff(join, prepend=-2) != 0) | (np.diff(run, prepend=-1) != 0)
    heads = np.flatnonzero(begins)
    ns = np.add.reduceat((times[keep + 1] - times[keep]), heads)
    stage, join = stage[heads], join[heads]
    rows = np.append(row, UNTRACED)[stage]
    named = np.append(spans.name, len(met.names))[rows]  # -1 reads the last one
    named = np.where((rows < 0) & (join >= 0), np.append(name, 0)[join], named)
    return _Pieces(run[heads], np.append(group, OWN)[join], named, rows, ns)


def _cells(kinds: list[tuple[Int64s, Int64s, Int64s]]) -> tuple[Int64s, list[Int64s]]:
    """Cut chains at all edges; return the times, and per kind which interval a cell lies in."""
    chain = np.concatenate([each for kind in kinds for each in (kind[0], kind[0])])
    times = np.concatenate([each for kind in kinds for each in kind[1:]])
    low = int(times.min())
    width = int(times.max()) - low + 1
    keys = chain * width + (times - low)
    order = np.argsort(keys, kind="stable")
    new = np.diff(keys[order], prepend=-1) != 0
    place = np.empty_like(order)
    place[order] = np.cumsum(new) - 1
    edges, found, at = times[order[new]], [], 0
    for kind in kinds:
        size = len(kind[0])
        first, last = place[at : at + size], place[at + size : at + 2 * size]
        found.append(paint(first, last, len(edges) - 1))
        at += 2 * size
    return edges, found
