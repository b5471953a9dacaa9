"""Where the time of a step goes: the table of stages, the gaps between them, and one sentence.

The rows of the table, "untraced" included, add up to the time of the steps exactly.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.analysis.steps.partition import (
    UNTRACED,
    Partition,
    Segments,
    exclusive_ns,
    partition,
    stages_in_steps,
)
from lightning_rlprof.analysis.steps.step_matrix import StageWork, step_matrix
from lightning_rlprof.analysis.steps.step_selection import FEWEST, Counted, counted
from lightning_rlprof.analysis.steps.waiting import WAITING, waiting_times
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

STATISTICS = (
    Column("total", "duration", "ns"),
    Column("mean", "duration", "ns"),
    Column("inclusive mean", "duration", "ns"),
    Column("p50", "duration", "ns"),
    Column("p95", "duration", "ns"),
    Column("max", "duration", "ns"),
    Column("count", "count"),
)
"""What every table of stages has of their spans; see `exclusive_statistics`."""

_COLUMNS = (  # most important first: a narrow terminal shows as many as fit
    Column("stage", "text"),
    Column("share", "share"),
    *STATISTICS,
    Column("slowest rank", "count"),
)


_NONE: tuple[Cell, ...] = (None,) * 6


def stages(spans: Spans, *, ranks: Collection[int] | None = None, per_rank: bool = False) -> Table:
    """Divide the step time among stages; ``total`` adds up to the step time exactly.

    All times are exclusive: each instant of the training thread belongs to the innermost open
    stage. ``mean`` is ``total`` by ``count``, the spans with time in the steps of all ranks.
    ``inclusive mean`` is the mean of whole spans, with the stages nested in them; None if it is the
    same. The slowest rank has the most time of that stage per step.

    Where ranks meet inside a stage, the time that they waited for the last one is not part of the
    stage: it has a row ``waiting in ...`` of its own.

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
    times = step_matrix(spans, ranks).by_rank(spans, choice.mask)
    slowest, work, waits = _slowest(times), times.work_ns, times.waits_ns
    if not per_rank:
        work, waits = (ns.sum(axis=0, keepdims=True) for ns in (work, waits))
    by_span = _by_span(spans, cut, choice, times.ranks if per_rank else None)
    rows: list[tuple[Cell, ...]] = []
    for at, (own, waited) in enumerate(zip(work.tolist(), waits.tolist(), strict=True)):
        codes = [code for code in range(len(spans.names)) if own[code] or (at, code) in by_span]
        whole = sum(own) + sum(waited)
        own_rows = [
            (spans.names[code], own[code], by_span.get((at, code), _NONE), slowest.get(code))
            for code in codes
        ]
        own_rows += [
            (WAITING.format(name), ns, _NONE, None)
            for name, ns in zip(spans.names, waited, strict=False)
            if ns
        ]
        own_rows.sort(key=lambda row: -row[1])
        own_rows.append(("untraced", own[UNTRACED], _NONE, None))
        for stage, ns, statistics, slow in own_rows:
            row = (stage, ns / whole if whole else None, ns, *statistics)
            rows.append((int(times.ranks[at]), *row) if per_rank else (*row, slow))
    return Table(name, columns, rows, choice.note)


def _by_span(
    spans: Spans, cut: Partition, choice: Counted, ranks: Int64s | None
) -> dict[tuple[int, int], tuple[Cell, ...]]:
    """Return (mean, inclusive mean, p50, p95, max, count) of the spans in counted steps.

    Keys are the position of the rank, 0 if ``ranks`` is None, and the code of the name.
    """
    own = Segments(*(column[choice.mask[cut.divided.step]] for column in cut.divided))
    exclusive = exclusive_ns(spans, own)
    waits = waiting_times(spans)
    whole = spans.rows(kind="step")
    some = np.isin(whole, cut.steps[choice.mask])[waits.step] & (waits.stage != UNTRACED)
    np.subtract.at(exclusive, waits.stage_row[some], waits.ns[some])
    rows, step = stages_in_steps(spans, cut.steps)  # those without length have no segment
    there = exclusive != 0
    there[rows[choice.mask[step]]] = True
    rows = np.flatnonzero(there)
    at = np.zeros_like(rows) if ranks is None else np.searchsorted(ranks, spans.rank[rows])
    keys = at * len(spans.names) + spans.name[rows]
    found = exclusive_statistics(keys, exclusive[rows], spans.duration_ns[rows])
    return {divmod(key, len(spans.names)): cells[1:] for key, cells in found.items()}


def exclusive_statistics(
    groups: Int64s, exclusive: Int64s, inclusive: Int64s
) -> dict[int, tuple[Cell, ...]]:
    """Return the cells of `STATISTICS` by group, of spans as columns of one length.

    All but ``inclusive mean`` are of the exclusive times. That one is None if it is ``mean``.
    """
    found, whole = summarize(groups, exclusive), summarize(groups, inclusive)
    names = ("total", "mean", "p50", "p95", "max", "count")
    columns = (getattr(found, name).tolist() for name in names)
    return {
        key: (total, mean, with_inner if with_inner != mean else None, *rest)
        for key, with_inner, total, mean, *rest in zip(
            found.group.tolist(), whole.mean.tolist(), *columns, strict=True
        )
    }


def _slowest(times: StageWork) -> dict[int, int]:
    """Return per stage the rank with the most work per step; the lowest if several.

    None with one rank, or with fewer than three steps: the slowest rank is then chance.
    """
    if len(times.ranks) < 2 or times.steps.min() < FEWEST:
        return {}
    work = times.work_ns
    rank = times.ranks[np.argmax(work / times.steps[:, None], axis=0)]
    return {code: int(rank[code]) for code in np.flatnonzero(work[:, :-1].any(axis=0)).tolist()}


_GAP_COLUMNS = (
    Column("after", "text"),
    Column("before", "text"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("mean", "duration", "ns"),
    Column("max", "duration", "ns"),
    Column("count", "count"),
    Column("worst rank", "count"),
    Column("worst step", "count"),
)


def gaps(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """List the gaps between stages, largest total first; they add up to "untraced" exactly."""
    cut = partition(spans, ranks)
    if not len(cut.steps):
        return Table("gaps", _GAP_COLUMNS, abstained="no complete step was recorded")
    choice, found = counted(spans, cut.steps), find_gaps(cut, spans)
    found = Gaps(*(column[choice.mask[found.step]] for column in found))
    names = (*spans.names, "step boundary")
    keys = found.after * len(names) + found.before
    sums = summarize(keys, found.ns)
    order = np.lexsort((found.ns, keys))
    last = order[np.cumsum(sums.count) - 1]  # the longest of each pair, the last one if several
    worst = cut.steps[found.step[last]]
    whole = int((cut.divided.end_ns - cut.divided.start_ns)[choice.mask[cut.divided.step]].sum())
    numbers = (sums.total, sums.mean, sums.max, sums.count, spans.rank[worst], spans.step[worst])
    rows: list[tuple[Cell, ...]] = []
    for key, *row in zip(sums.group.tolist(), *(each.tolist() for each in numbers), strict=True):
        after, before = names[key // len(names)], names[key % len(names)]
        rows.append((after, before, row[0] / whole, *row))
    rows.sort(key=lambda row: row[2] or 0.0, reverse=True)
    return Table("gaps", _GAP_COLUMNS, rows, choice.note)


class Gaps(NamedTuple):
    """Untraced time ranges, each as long as possible within one step, by thread and time.

    Attributes:
        step: Index into ``Partition.steps``.
        ns: Its length; never zero.
        after: Index into ``Spans.names`` of the stage before it; ``len(names)`` at a step's start.
        before: Index of the stage behind it; ``len(names)`` at a step's end.
    """

    step: Int64s
    ns: Int64s
    after: Int64s
    before: Int64s


def find_gaps(cut: Partition, spans: Spans) -> Gaps:
    """Return the untraced time of all steps: neighboring segments without a stage are one gap."""
    own, edge = cut.divided, len(spans.names)
    bare = np.flatnonzero(own.stage == UNTRACED)
    breaks = np.flatnonzero((np.diff(bare) > 1) | (np.diff(own.step[bare]) != 0))
    first = np.concatenate([bare[:1], bare[breaks + 1]])
    last = np.concatenate([bare[breaks], bare[-1:]])
    names = np.append(np.append(spans.name, UNTRACED)[own.stage], UNTRACED)
    step = np.append(own.step, -1)  # index -1 and index len read this -1: no step
    after = np.where(step[first - 1] == step[first], names[first - 1], edge)
    before = np.where(step[last + 1] == step[last], names[last + 1], edge)
    return Gaps(own.step[first], own.end_ns[last] - own.start_ns[first], after, before)


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


def stages_headline(spans: Spans) -> str:
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
        return f"No stages are marked in {steps} steps. Mark them with stage() or wrap."
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
