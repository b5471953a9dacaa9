"""Overview tables of a run: steps, the status of ranks, roles, and regions.

Each function returns one table. `stage_times` has the table of stages.
"""

from collections.abc import Collection

import numpy as np

from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.analysis.steps.execution_mode import execution_mode
from lightning_rlprof.analysis.steps.partition import (
    UNTRACED,
    containing_step,
    exclusive_ns,
    partition,
    rows_on_ranks,
    stages_in_steps,
)
from lightning_rlprof.analysis.steps.step_matrix import step_matrix
from lightning_rlprof.analysis.steps.step_selection import STATES, counted, states
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, ColumnRows, Table, columns_of

_MOST_STAGES = 30


def steps(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """List every step of every rank; its columns of times add up to ``wall`` exactly.

    The thirty stages with the most work have a column each; "other stages" sums the rest, and
    "waiting" what the rank waited for others in any of them. ``state`` is one of
    `step_selection.STATES`.
    """
    cells = step_matrix(spans, ranks)
    work = cells.total(cells.work_ns, np.zeros_like(cells.steps), (1, len(spans.names) + 1))[0]
    waiting = int(cells.waits_ns.sum())
    order = np.argsort(-work[:UNTRACED], kind="stable")
    order = order[work[order] > 0]
    shown = order[:_MOST_STAGES]
    names = [spans.names[code] for code in shown.tolist()]
    names += ["other stages"] * (len(order) > len(shown)) + ["waiting"] * bool(waiting)
    columns = (
        Column("rank", "count"),
        Column("step", "count"),
        Column("state", "text"),
        Column("wall", "duration", "ns"),
        *(Column(name, "duration", "ns") for name in [*names, "untraced"]),
    )
    if not len(cells.steps):
        return Table("steps", columns, abstained="no complete step was recorded")
    column = np.full(len(work), len(shown))
    column[shown], column[UNTRACED] = np.arange(len(shown)), len(names)
    times = np.zeros((len(names) + 1, len(cells.steps)), dtype=np.int64)
    np.add.at(times, (column[cells.name], cells.step), cells.work_ns)
    if waiting:
        np.add.at(times, (np.full_like(cells.step, len(names) - 1), cells.step), cells.waits_ns)
    state = (states(spans, cells.steps), STATES)
    who = (spans.rank[cells.steps], spans.step[cells.steps])
    return Table("steps", columns, ColumnRows([*who, state, times.sum(axis=0), *times]))


_STATUS_COLUMNS = (
    Column("rank", "count"),
    Column("host", "text"),
    Column("device", "text"),
    Column("spans", "count"),
    Column("steps", "count"),
    Column("in steps", "duration", "ns"),
    Column("outside steps", "duration", "ns"),
    Column("status", "text"),
)


def rank_status(spans: Spans) -> Table:
    """List the ranks, and how each one's recording ended.

    ``in steps`` and ``outside steps`` add up to the time from its first to its last event exactly.
    """
    matrix = step_matrix(spans)
    ranks, steps, work, waits = matrix.by_rank(spans, np.ones(len(matrix.steps), dtype=bool))
    own = zip(steps.tolist(), (work + waits).sum(axis=1).tolist(), strict=True)
    by_rank = dict(zip(ranks.tolist(), own, strict=True))
    rows: list[tuple[Cell, ...]] = []
    for rank, header in spans.headers.items():
        mine = spans.rows(rank=rank)
        first = int(spans.start_ns[mine].min()) if len(mine) else 0
        last = int(spans.end_ns[mine].max()) if len(mine) else 0
        count, took = by_rank.get(rank, (0, 0))
        status = spans.statuses.get(rank) or "truncated"
        known = (rank, header.host, header.hardware, len(mine))
        rows.append((*known, count, took, last - first - took, status))
    return Table("rank_status", _STATUS_COLUMNS, rows)


_ROLE_COLUMNS = (
    Column("role", "text"),
    *columns_of("count", "ranks", "hosts"),
    *columns_of("duration", "from", "to", unit="ns"),
    *columns_of("share", "working", "waiting", "idle", "untraced"),
    *columns_of("share", "data wait", "backpressure", "weight sync"),
)
_ROLE_NOTE = (
    "Shares of the time in steps; the first four add up. waiting: for data (data wait), for space "
    "(backpressure), or for other ranks. working contains the weight sync. idle: between the calls "
    "of an actor. A driver waits wherever its workers work, and has no shares."
)
_WHO_WAITS = (Category.DATA_WAIT, Category.BACKPRESSURE, Category.WEIGHT_SYNC)
_WAITS = (Category.DATA_WAIT, Category.BACKPRESSURE, Category.COLLECTIVE_WAIT)


def roles(spans: Spans) -> Table:
    """List the roles of a run: how many ranks, from when to when, and how busy they are.

    ``from`` and ``to`` are the first and the last event of the role, since the first of the run.
    The first four shares add up to 1. The note names the mode, see `execution_mode`.

    Abstains if all ranks have one role.
    """
    found: dict[str, list[int]] = {}
    for rank, header in spans.headers.items():
        found.setdefault(header.role, []).append(rank)
    if len(found) < 2:
        reason = f"all ranks have the role {next(iter(found), 'actor')}"
        return Table("roles", _ROLE_COLUMNS, abstained=reason)
    matrix = step_matrix(spans)
    times = matrix.by_rank(spans, np.ones(len(matrix.steps), dtype=bool))
    category = categories_of(spans.names)[:-1]
    is_idle = category == Category.UNATTRIBUTED_IDLE
    is_wait = np.isin(category, _WAITS)
    groups = (~is_idle & ~is_wait, is_wait, is_idle)
    rows: list[tuple[Cell, ...]] = []
    for role, ranks in found.items():
        own = np.isin(spans.rank, ranks)
        first, last = (None, None)
        if own.any():
            first, last = int(spans.start_ns[own].min()), int(spans.end_ns[own].max())
        mine = np.isin(times.ranks, ranks)
        ns, waits = (each[mine].sum(axis=0) for each in (times.work_ns, times.waits_ns))
        total = int((ns + waits).sum())
        parts = [int(ns[:-1][group].sum()) for group in groups] + [int(ns[-1])]
        parts[1] += int(waits.sum())
        parts += [int(ns[:-1][category == each].sum()) for each in _WHO_WAITS]
        shares = [part / total if total else None for part in parts]
        hosts = len({spans.headers[rank].host for rank in ranks})
        rows.append((role, len(ranks), hosts, first, last, *shares))
    mode = execution_mode(spans)
    head = "" if mode is None else f"Rollout and training are {mode.value}. "
    return Table("roles", _ROLE_COLUMNS, rows, head + _ROLE_NOTE)


_PLACES = ("in steps", "other thread", "outside steps")
_REGION_COLUMNS = (
    *columns_of("text", "name", "kind", "location"),
    Column("share", "share"),
    Column("longest", "duration", "ns"),
    Column("on rank", "count"),
    *columns_of("duration", "total", "per call", "inclusive per call", unit="ns"),
    *columns_of("duration", "p50 per call", "p95 per call", "max per call", unit="ns"),
    Column("calls", "count"),
)
_REGION_NOTE = "Times of regions are of whole spans, those of stages exclusive."


def regions(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum regions, and the stages that are no part of a step: on other threads and outside steps.

    Regions are data fetch, training step, optimizer, checkpoints, validation, annotations. Their
    times are those of whole spans: they nest in one another and in stages, so their shares of the
    step time do not add up to 100%. Times of stages are exclusive, as those of `stages`; where
    whole spans are longer, ``inclusive per call`` says so. ``location`` is where the span starts.
    Of several ranks, ``longest`` is the time per call on the rank where it is longest, ``on rank``.

    Args:
        spans: The run.
        ranks: Only these; None for all.
    """
    cut, width = partition(spans, ranks), int(spans.rank.max(initial=0)) + 1
    choice = counted(spans, cut.steps)
    step_ns = int(spans.duration_ns[cut.steps[choice.mask]].sum())
    in_steps, outside = (exclusive_ns(spans, each) for each in (cut.divided, cut.outside))
    stages, training = rows_on_ranks(spans, "stage", ranks), stages_in_steps(spans, cut.steps)[0]
    beside = np.setdiff1d(stages, training)
    rows = np.union1d(rows_on_ranks(spans, "region", ranks), beside[in_steps[beside] == 0])
    step = containing_step(spans, cut.steps, rows, spans.rank)
    keep = (step < 0) | np.append(choice.mask, True)[step]
    rows, step, whole = rows[keep], step[keep], spans.duration_ns[rows[keep]]
    is_stage = (spans.kind[rows] == KINDS.index("stage")).astype(np.int64)
    place = np.where(step < 0, _PLACES.index("outside steps"), is_stage)
    group, own = (spans.name[rows] * 2 + is_stage) * len(_PLACES) + place, whole.copy()
    own[is_stage > 0] = outside[rows[is_stage > 0]]
    sums, by_rank = summarize(group, own), summarize(group * width + spans.rank[rows], own)
    longest: dict[int, tuple[int | None, int | None]] = {}
    for at in np.lexsort((by_rank.group, by_rank.mean)).tolist():  # the last one of a group stays
        key, rank = divmod(int(by_rank.group[at]), width)
        longest[key] = (int(by_rank.mean[at]), rank) if len(spans.ranks) > 1 else (None, None)
    columns = (sums.total, sums.mean, summarize(group, whole).mean, sums.p50, sums.p95, sums.max)
    table: list[tuple[Cell, ...]] = []
    for key, total, mean_ns, inclusive, *rest in zip(
        *(each.tolist() for each in (sums.group, *columns, sums.count)), strict=True
    ):
        (code, stage), at = divmod(key // len(_PLACES), 2), key % len(_PLACES)
        share = total / step_ns if at == 0 else None
        names = (spans.names[code], "stage" if stage else "region", _PLACES[at])
        more = inclusive if inclusive != mean_ns else None
        table.append((*names, share, *longest[key], total, mean_ns, more, *rest))
    table.sort(key=lambda row: -(row[6] or 0))  # type: ignore[operator]
    note = f"{choice.note} {_REGION_NOTE}".strip()
    return Table("regions", _REGION_COLUMNS, table, note)
