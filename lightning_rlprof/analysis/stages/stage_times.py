"""Where the time of a step goes: the table of stages, and one sentence about it.

The rows of the table, "untraced" included, add up to the time of the steps exactly.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.stages.partition import UNTRACED, Partition, partition
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
_EVERY_RANK = 0  # the rank in keys of rows that sum all ranks


class _Key(NamedTuple):
    """A row of the table: a rank, or all of them, and an index into ``Spans.names``."""

    rank: int
    name: int


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
    inclusive = _inclusive(spans, cut, choice, per_rank)
    times = _times(spans, cut, choice)
    totals = dict.fromkeys(inclusive, 0) | _totals(times, per_rank)
    last: dict[int, int] = {} if per_rank else _slowest(times)
    rows: list[tuple[Cell, ...]] = []
    for key, share in _shares(totals):
        stage = "untraced" if key.name == UNTRACED else spans.names[key.name]
        row = (stage, share, totals[key], *inclusive.get(key, (None,) * 5))
        rows.append((key.rank, *row) if per_rank else (*row, last.get(key.name)))
    return Table(name, columns, rows, choice.note)


def _shares(totals: dict[_Key, int]) -> Iterator[tuple[_Key, float | None]]:
    """Yield the rows by rank and time, untraced last, each with its share of the rank's steps."""
    whole: dict[int, int] = {}
    for key, total in totals.items():
        whole[key.rank] = whole.get(key.rank, 0) + total
    for key in sorted(totals, key=lambda key: (key.rank, key.name == UNTRACED, -totals[key])):
        yield key, totals[key] / whole[key.rank] if whole[key.rank] else None


class _Times(NamedTuple):
    """Exclusive time in the counted steps.

    Attributes:
        ranks: Ranks with counted steps, ascending.
        steps: How many of them each rank has.
        ns: Time per rank and name, untraced first.
    """

    ranks: Int64s
    steps: Int64s
    ns: Int64s


def _times(spans: Spans, cut: Partition, choice: Counted) -> _Times:
    rank = spans.rank[cut.steps]
    ranks, steps = np.unique(rank[choice.mask], return_counts=True)
    place = np.where(choice.mask, np.searchsorted(ranks, rank), -1)
    return _Times(ranks, steps, cut.cells(spans).sums(place, len(ranks), len(spans.names)))


def _totals(times: _Times, per_rank: bool) -> dict[_Key, int]:
    """Return the time of each row; every rank has an untraced one."""
    ranks, ns = times.ranks.tolist(), times.ns
    if not per_rank:
        ranks, ns = [_EVERY_RANK], ns.sum(axis=0, keepdims=True)
    some = ns > 0
    some[:, UNTRACED + 1] = True
    places = zip(*(each.tolist() for each in np.nonzero(some)), ns[some].tolist(), strict=True)
    return {_Key(ranks[place], name - 1): total for place, name, total in places}


def _inclusive(
    spans: Spans, cut: Partition, choice: Counted, per_rank: bool
) -> dict[_Key, tuple[int, ...]]:
    """Return (mean, p50, p95, max, count) of whole spans that start in a counted step."""
    width = len(spans.names)
    group = spans.rank[cut.steps] * width if per_rank else np.full_like(cut.steps, _EVERY_RANK)
    rows, step = cut.stages(spans)
    rows, step = rows[choice.mask[step]], step[choice.mask[step]]
    found = summarize(group[step] + spans.name[rows], spans.duration_ns[rows])
    stats = zip(found.mean, found.p50, found.p95, found.max, found.count, strict=True)
    keys = (_Key(*divmod(key, width)) for key in found.group.tolist())
    return {key: tuple(map(int, values)) for key, values in zip(keys, stats, strict=True)}


def _slowest(times: _Times) -> dict[int, int]:
    """Return per stage the rank with the most exclusive time per step; the lowest if several.

    None with one rank, or with fewer than three steps: the slowest rank is then chance.
    """
    if len(times.ranks) < 2 or times.steps.min() < FEWEST:
        return {}
    count = dict(zip(times.ranks.tolist(), times.steps.tolist(), strict=True))
    best: dict[int, tuple[float, int]] = {}
    for (rank, name), total in _totals(times, per_rank=True).items():
        if name != UNTRACED:
            best[name] = max(best.get(name, (0.0, -rank)), (total / count[rank], -rank))
    return {name: -rank for name, (_, rank) in best.items()}


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
