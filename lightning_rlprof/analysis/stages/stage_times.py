"""Where the time of a step goes: the table of stages, and one sentence about it.

The rows of the table, "untraced" included, add up to the time of the steps exactly.
"""

from collections.abc import Collection

import numpy as np

from lightning_rlprof.analysis.stages.partition import (
    UNTRACED,
    Partition,
    RankTimes,
    partition,
)
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.analysis.step_selection import FEWEST, Counted, counted
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_COLUMNS = (  # most important first: a narrow terminal shows as many as fit
    Column("stage", "text"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("mean", "duration", "ns"),
    Column("p50", "duration", "ns"),
    Column("p95", "duration", "ns"),
    Column("max", "duration", "ns"),
    Column("count", "count"),
    Column("slowest rank", "count"),
)


def stages(spans: Spans, *, ranks: Collection[int] | None = None, per_rank: bool = False) -> Table:
    """Divide the step time among stages; ``total`` adds up to the step time exactly.

    ``total`` and ``share`` are exclusive: each instant of the training thread belongs to the
    innermost open stage, summed over ranks. ``mean`` to ``max`` and ``count`` are inclusive: whole
    spans with all that is nested in them. The slowest rank has the most time of that stage per
    step.

    Args:
        spans: The run.
        ranks: Only these; None for all.
        per_rank: One row per rank and stage, with the rank in the first column.
    """
    cut = partition(spans, ranks)
    name = "stages by rank" if per_rank else "stages"
    columns = (Column("rank", "count"), *_COLUMNS[:-1]) if per_rank else _COLUMNS
    if not len(cut.steps):
        return Table(name, columns, abstained="no complete step was recorded")
    choice = counted(spans, cut.steps)
    times = cut.by_rank(spans, choice.mask)
    slowest = _slowest(times)
    ns = times.ns if per_rank else times.ns.sum(axis=0, keepdims=True)
    inclusive = _inclusive(spans, cut, choice, times.ranks if per_rank else None)
    rows: list[tuple[Cell, ...]] = []
    for at, own in enumerate(ns.tolist()):
        codes = [code for code in range(len(spans.names)) if own[code] or (at, code) in inclusive]
        codes.sort(key=lambda code: -own[code])
        whole = sum(own)
        for code in [*codes, UNTRACED]:
            stage = "untraced" if code == UNTRACED else spans.names[code]
            share = own[code] / whole if whole else None
            row = (stage, share, own[code], *inclusive.get((at, code), (None,) * 5))
            rows.append((int(times.ranks[at]), *row) if per_rank else (*row, slowest.get(code)))
    return Table(name, columns, rows, choice.note)


def _inclusive(
    spans: Spans, cut: Partition, choice: Counted, ranks: Int64s | None
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return (mean, p50, p95, max, count) of whole spans that start in a counted step.

    Keys are the position of the rank, 0 if ``ranks`` is None, and the code of the name.
    """
    rows, step = cut.stages(spans)
    rows = rows[choice.mask[step]]
    at = np.zeros_like(rows) if ranks is None else np.searchsorted(ranks, spans.rank[rows])
    found = summarize(at * len(spans.names) + spans.name[rows], spans.duration_ns[rows])
    stats = zip(found.mean, found.p50, found.p95, found.max, found.count, strict=True)
    return {
        divmod(key, len(spans.names)): tuple(map(int, values))
        for key, values in zip(found.group.tolist(), stats, strict=True)
    }


def _slowest(times: RankTimes) -> dict[int, int]:
    """Return per stage the rank with the most exclusive time per step; the lowest if several.

    None with one rank, or with fewer than three steps: the slowest rank is then chance.
    """
    if len(times.ranks) < 2 or times.steps.min() < FEWEST:
        return {}
    rank = times.ranks[np.argmax(times.ns / times.steps[:, None], axis=0)]
    return {code: int(rank[code]) for code in np.flatnonzero(times.ns[:, :-1].any(axis=0)).tolist()}


_DOMINANT = 0.4
_ADVICE = {
    "actor_generate": "Check the rollout first: KV cache, batching, engine settings",
    "actor_update": "Check the update first: micro-batch size, precision, recomputation",
    "critic_update": "Check the critic update first: micro-batch size, precision",
    "actor_compute_log_prob": "Check the log-prob pass first: micro-batch size",
    "reference_compute_log_prob": "Check the reference pass first: micro-batch size",
    "compute_reward": "Check the reward first: score samples in parallel",
    "weight_sync": "Check the weight transfer first: bucket size, copies through the host",
}


def headline(spans: Spans) -> str:
    """Return which stage takes most of the step, what to check, and how much is untraced.

    Advice is given only if one stage takes 40% or more. Fewer than three steps are not enough.
    """
    rows = spans.rows(kind="step")
    steps = counted(spans, rows).steps
    if steps < FEWEST:
        return f"Not enough steps to show where the time goes: needs {FEWEST}, has {steps}."
    table = stages(spans)
    shares = dict(zip(table.column("stage"), table.column("share"), strict=True))
    untraced = float(shares.pop("untraced") or 0.0)
    if not shares:
        return f"No stages are marked in {steps} steps. Mark them with stage(...) or wrap:."
    name = str(next(iter(shares)))
    share = float(shares[name] or 0.0)
    if untraced > share:
        return f"{untraced:.0%} of the step is untraced. Largest stage: {name} ({share:.0%})."
    rest = f"{untraced:.0%}" if untraced >= 0.005 else "Almost nothing"
    if share < _DOMINANT:
        largest = f"{name} ({share:.0%} of the step)"
        return f"No stage dominates: the largest is {largest}. {rest} is untraced."
    advice = _ADVICE.get(name, f"Check {name} first")
    return f"{name} takes {share:.0%} of the step. {advice}. {rest} is untraced."
