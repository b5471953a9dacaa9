"""Critical path of a step, and the slack of everything else."""

from typing import Any

import numpy as np

from lightning_rlprof.analysis.critical_path.replay import WORK, LongestPath, longest_path, replay
from lightning_rlprof.analysis.critical_path.step_graph import StepGraph, seconds, step_graph
from lightning_rlprof.analysis.steps.sync_points import (
    WITHIN_UNCERTAINTY,
    is_within_uncertainty,
    uncertainty_ns,
)
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table, columns_of

_COLUMNS: tuple[Column, ...] = (
    *columns_of("text", "stage", "part", "role"),
    Column("rank", "count"),
    Column("share", "share"),
    *columns_of("duration", "per step", "slack", "total", unit="ns"),
    *columns_of("count", "steps", "count"),
)
_LATE = "late start"
_PARTS = ("work", "transfer", "handoff")


def critical_path(spans: Spans, *, per_rank: bool = False) -> Table:
    """Divide complete steps by what is on their longest path, longest first, with the slack.

    ``part`` is the ``work`` of a stage, a ``transfer`` in it, or the ``handoff`` of a sample or of
    weights: the time from when it is ready until its consumer continues. ``total`` is the time on
    the path; totals add up to the steps. ``per step`` is the mean over all steps, ``steps`` the
    number of steps in which the row was on the path. ``slack`` is how much longer the tightest of
    its ``count`` occurrences alone could take without making its step longer: 0 on the path.

    Args:
        spans: The run.
        per_rank: One row per rank; else ``rank`` is the one most often on the path.
    """
    graph = step_graph(spans)
    if isinstance(graph, str):
        return Table("critical_path", _COLUMNS, abstained=graph)
    measured = (graph.schedule, graph.ns, graph.transfer_ns, graph.offset_ns)
    interval_ns, found = replay(*measured).interval_ns, longest_path(*measured)
    whole_ns = int(interval_ns.sum())
    rows = _rows(graph, found, max(whole_ns, 1), per_rank=per_rank)
    late = whole_ns - sum(row[7] for row in rows)
    if late:
        below = is_within_uncertainty(late // len(graph.steps), uncertainty_ns(graph.spans))
        part = WITHIN_UNCERTAINTY if below else "work"
        rows.append((_LATE, part, None, None, late / whole_ns, None, 0, late, None, None))
    error = float(np.median(np.abs(interval_ns / np.maximum(graph.wall_ns, 1) - 1)))
    took = seconds(float(np.median(graph.wall_ns)))
    text = f"Median step: {took} ({len(graph.steps)} steps). Replay error: {error:.2%}."
    return Table("critical_path", _COLUMNS, rows, f"{text} {graph.note}")


def _rows(
    graph: StepGraph, found: LongestPath, whole_ns: int, *, per_rank: bool
) -> list[tuple[Any, ...]]:
    """Return a row per stage, part and role or rank."""
    schedule = graph.schedule
    first_of_role = np.array([graph.roles.index(role) for role in graph.roles])
    who = np.arange(len(graph.ranks)) if per_rank else first_of_role
    key = (graph.name * 2 + (schedule.sync_point != WORK)) * len(graph.ranks)
    key += who[schedule.run // schedule.interval_count]
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    # `WORK` reads the last item.
    part = np.append(1 + graph.is_handoff, 0)[schedule.sync_point[first]]

    on, size = np.flatnonzero(found.on), len(first)
    chain, interval = np.divmod(schedule.run[on], schedule.interval_count)
    step_ns = np.zeros((size, schedule.interval_count), dtype=np.int64)
    chain_ns = np.zeros((size, len(graph.ranks)), dtype=np.int64)
    np.add.at(step_ns, (of[on], interval), found.weight[on])
    np.add.at(chain_ns, (of[on], chain), found.weight[on])
    slack = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(slack, of, found.slack)
    total = step_ns.sum(axis=1)
    mean = np.rint(total / schedule.interval_count).astype(np.int64)
    steps, count = (step_ns > 0).sum(axis=1), np.bincount(of)
    chain = schedule.run[first] // schedule.interval_count
    ranks = graph.ranks[chain if per_rank else chain_ns.argmax(axis=1)]

    rows = []
    for at in np.argsort(-total, kind="stable").tolist():
        one, own = first[at], int(total[at])
        rank = int(ranks[at]) if own or per_rank else None
        whose = (graph.names[graph.name[one]], _PARTS[part[at]], graph.roles[chain[at]], rank)
        times = (own / whole_ns, int(mean[at]), int(slack[at]), own)
        rows.append((*whose, *times, int(steps[at]), int(count[at])))
    return rows
