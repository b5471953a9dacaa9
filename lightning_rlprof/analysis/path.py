"""The critical path of a step: where it goes through, and slack beside it."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.counted import FEWEST
from lightning_rlprof.analysis.dag import Dag, dag
from lightning_rlprof.analysis.longest import OWN, Path, longest, replay
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["path"]

_COLUMNS = (
    Column("stage", "text"),
    Column("part", "text"),
    Column("role", "text"),
    Column("rank", "count"),
    Column("share", "share"),
    Column("per step", "duration", "ns"),
    Column("slack", "duration", "ns"),
    Column("total", "duration", "ns"),
    Column("steps", "count"),
    Column("count", "count"),
)
_LATE = "began later than the first rank"


class _Sums(NamedTuple):
    """What the table tells, row by row.

    ``first`` is a piece of the row, ``most`` the chain on which most of its time on the path is.
    """

    first: Int64s
    total: Int64s
    middle: Int64s
    slack: Int64s
    steps: Int64s
    number: Int64s
    most: Int64s


def path(spans: Spans, *, per_rank: bool = False) -> Table:
    """Divide steady steps by what is on their longest path, longest first; beside it is slack.

    ``part`` is a stage's ``own time`` or a ``transfer`` in it. ``total`` is its time on the path;
    all of them add up to the steps. ``per step`` is the median over the steps, ``steps`` in how
    many of them it was on the path. ``slack`` is how much longer the tightest of all its ``count``
    occurrences, that one alone, might have taken without its step becoming longer: 0 on the path.

    Args:
        spans: The run.
        per_rank: A row per rank, else ``rank`` is the one most often on the path.
    """
    graph = dag(spans)
    if isinstance(graph, str):
        return Table("path", _COLUMNS, abstained=graph)
    if len(graph.steps) < FEWEST:
        text = f"{len(graph.steps)} steps can be cut, it takes {FEWEST}"
        return Table("path", _COLUMNS, abstained=text)
    measured = (graph.plan, graph.ns, graph.transfer_ns, graph.offset_ns)
    laps, found = replay(*measured).lap, longest(*measured)
    sums = _sums(graph, found, per_rank=per_rank)
    whole, late = max(int(laps.sum()), 1), int(laps.sum()) - int(sums.total.sum())
    table = [_row(graph, sums, at, whole) for at in np.argsort(-sums.total, kind="stable").tolist()]
    if late:
        table.append((_LATE, "own time", None, None, late / whole, None, 0, late, None, None))
    error = float(np.median(np.abs(laps / np.maximum(graph.wall_ns, 1) - 1)))
    took = float(np.median(graph.wall_ns)) / 1e9
    text = f"Median of {len(graph.steps)} steps: {took:.4g} s; played again, {error:.2%} off."
    return Table("path", _COLUMNS, table, f"{text} {graph.note}")


def _row(graph: Dag, sums: _Sums, at: int, whole: int) -> tuple[Cell, ...]:
    first, total = int(sums.first[at]), int(sums.total[at])
    its = graph.plan
    return (
        graph.names[graph.name[first]],
        "own time" if its.join[first] == OWN else "transfer",
        graph.roles[its.run[first] // its.laps],
        int(graph.ranks[sums.most[at]]) if sums.most[at] >= 0 else None,
        total / whole,
        int(sums.middle[at]),
        int(sums.slack[at]),
        total,
        int(sums.steps[at]),
        int(sums.number[at]),
    )


def _sums(graph: Dag, found: Path, *, per_rank: bool) -> _Sums:
    its = graph.plan
    lap, chain = its.run % its.laps, its.run // its.laps
    first, of = _groups(graph, chain, per_rank=per_rank)
    size, on = len(first), np.flatnonzero(found.on)
    cells = np.zeros((size, its.laps), dtype=np.int64)
    np.add.at(cells, (of[on], lap[on]), found.weight[on])
    slack = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(slack, of, found.slack)
    total, most = cells.sum(axis=1), chain[first]
    if not per_rank:
        theirs = np.zeros((size, len(graph.ranks)), dtype=np.int64)
        np.add.at(theirs, (of[on], chain[on]), found.weight[on])
        most = np.where(total > 0, theirs.argmax(axis=1), -1)
    middle = np.rint(np.median(cells, axis=1)).astype(np.int64)
    count = np.bincount(of, minlength=size)
    return _Sums(first, total, middle, slack, (cells > 0).sum(axis=1), count, most)


def _groups(graph: Dag, chain: Int64s, *, per_rank: bool) -> tuple[Int64s, Int64s]:
    """Tell apart stage, part, role and, where asked for, chain: a piece of each, and whose each."""
    roles = {role: at for at, role in enumerate(dict.fromkeys(graph.roles))}
    who = np.arange(len(graph.ranks)) if per_rank else np.array([*map(roles.get, graph.roles)])
    keys = (graph.name * 2 + (graph.plan.join != OWN)) * len(who) + who[chain]
    first = np.full(2 * len(graph.names) * len(who), -1)
    first[keys[::-1]] = np.arange(len(keys))[::-1]
    used = np.flatnonzero(first >= 0)
    place = np.zeros_like(first)
    place[used] = np.arange(len(used))
    return first[used], place[keys]
