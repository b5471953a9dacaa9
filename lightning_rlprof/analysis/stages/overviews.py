"""Overview tables of a run: steps, slowest ranks, rank status, host and device time, regions.

Each function returns one table. `stage_times` has the table of stages.
"""

from collections.abc import Collection, Iterator

import numpy as np

from lightning_rlprof.analysis.stages.stage_times import CALLS
from lightning_rlprof.analysis.statistics.group_summary import mean, summarize
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
from lightning_rlprof.analysis.steps.step_selection import FEWEST, STATES, Counted, counted, states
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.tables.arrays import Int64s
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


_SLOWEST_COLUMNS = (
    Column("stage", "text"),
    Column("slowest rank", "count"),
    Column("time per step", "duration", "ns"),
    Column("peer median", "duration", "ns"),
    Column("ratio", "ratio"),
    Column("steps", "count"),
)
_SLOWEST_NOTE = (
    "The slowest rank may have had more work, or waited for the others: it need not be a straggler."
)


def slowest_ranks(spans: Spans) -> Table:
    """Name per stage the rank with the most work per step, and the median of its peers.

    Work is exclusive time without waiting for other ranks, as far as that is known. Peers are the
    other ranks that run the stage. Untraced time is of no stage: it has no row.

    Has no data with one rank, fewer than three steps on a rank, or without a stage.
    """
    matrix = step_matrix(spans)
    choice = counted(spans, matrix.steps)
    ranks, count, totals, _ = matrix.by_rank(spans, choice.mask)
    if len(ranks) < 2:
        reason = "a comparison needs two or more ranks with steps"
        return Table("slowest_ranks", _SLOWEST_COLUMNS, abstained=reason)
    fewest = int(count.min())
    if fewest < FEWEST:
        reason = f"comparing ranks needs {FEWEST} steps on each, one rank has {fewest}"
        return Table("slowest_ranks", _SLOWEST_COLUMNS, abstained=reason)
    means = totals // count[:, None]
    rows: list[tuple[Cell, ...]] = []
    totals = totals[:, :UNTRACED]
    for code in np.argsort(-totals.sum(axis=0), kind="stable").tolist():
        if not totals[:, code].any():
            continue
        slowest = int(np.argmax(means[:, code]))
        peers = np.delete(means[:, code], slowest)
        peers = peers[peers > 0]
        peer_median = int(np.median(peers)) if len(peers) else None
        time = int(means[slowest, code])
        ratio = time / peer_median if peer_median else None
        rows.append((spans.names[code], int(ranks[slowest]), time, peer_median, ratio, fewest))
    if not rows:
        return Table("slowest_ranks", _SLOWEST_COLUMNS, abstained="no stage was recorded")
    return Table("slowest_ranks", _SLOWEST_COLUMNS, rows, f"{choice.note} {_SLOWEST_NOTE}".strip())


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


_DEVICE_COLUMNS = (
    Column("stage", "text"),
    Column("host per call", "duration", "ns"),
    Column("device per call", "duration", "ns"),
    Column("device/host", "ratio"),
    Column("measured", "count"),
    Column("calls", "count"),
)
_DEVICE_NOTE = (
    "Device time: from when the device reaches the stage until it has done the stage's work. "
    "device/host far above 1: later stages wait for this work. Far below 1: the device waits for "
    "the host."
)
_COUNTER = "device_ns"


def host_vs_device(spans: Spans) -> Table:
    """Compare per stage the mean host time of a span with the mean device time of the same spans.

    ``measured`` counts the spans with a device time, ``calls`` all of them. Means are of whole
    spans, with the stages nested in them, over the measured spans of all ranks. The stage with the
    most host time is first.

    Has no data if no span has a device time.
    """
    if _COUNTER not in spans.counters:
        reason = "no device time was recorded: needs an accelerator, and device_time not false"
        return Table("host_vs_device", _DEVICE_COLUMNS, abstained=reason)
    steps = spans.rows(kind="step")
    choice = counted(spans, steps)
    rows = spans.rows(kind="stage")
    step = containing_step(spans, steps, rows, spans.thread)
    rows = rows[(step >= 0) & choice.mask[step]] if len(steps) else rows
    at, nanoseconds = spans.amounts(_COUNTER, np.int64)
    known = np.isin(at, rows)
    at, nanoseconds = at[known], nanoseconds[known]
    size = len(spans.names)
    counts = np.bincount(spans.name[rows], minlength=size)
    measured = np.bincount(spans.name[at], minlength=size)
    host, device = np.zeros((2, size), np.int64)
    np.add.at(host, spans.name[at], spans.duration_ns[at])
    np.add.at(device, spans.name[at], nanoseconds)
    lines: list[tuple[Cell, ...]] = []
    for code in np.argsort(-host, kind="stable").tolist():
        number = int(measured[code])
        if number:
            ratio = int(device[code]) / int(host[code]) if host[code] else None
            means = (mean(int(total[code]), number) for total in (host, device))
            lines.append((spans.names[code], *means, ratio, number, int(counts[code])))
    return Table("host_vs_device", _DEVICE_COLUMNS, lines, f"{choice.note} {_DEVICE_NOTE}".strip())


def _call_statistics(
    groups: Int64s, exclusive: Int64s, inclusive: Int64s
) -> dict[int, tuple[Cell, ...]]:
    """Return (total, mean, inclusive mean, p50, p95, max, calls) of spans by group.

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


_OUTSIDE = "outside steps"
_TOTAL = Column("total", "duration", "ns")
_PER_CALL = (
    *CALLS[:2],
    *columns_of("duration", "p50 per call", "p95 per call", "max per call", unit="ns"),
    CALLS[2],
)


def background_stages(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum the stages of threads other than the training thread, and those outside steps.

    ``location`` is ``in background`` or ``outside steps``, by where the span starts. These stages
    run in parallel with steps or outside them, so they have no share of the step time. Times are
    exclusive, as those of `stages`: an instant of a thread belongs to the innermost open stage.
    """
    columns = (Column("stage", "text"), Column("location", "text"), _TOTAL, *_PER_CALL)
    cut = partition(spans, ranks)
    in_steps, outside = (exclusive_ns(spans, each) for each in (cut.divided, cut.outside))
    beside = np.zeros(len(spans), bool)
    beside[rows_on_ranks(spans, "stage", ranks)] = True
    beside[stages_in_steps(spans, cut.steps)[0]] = False
    rows = np.flatnonzero(beside)
    rows = rows[in_steps[rows] == 0]
    choice = counted(spans, cut.steps)
    table: list[tuple[Cell, ...]] = [
        (name, _OUTSIDE if is_outside else "in background", *cells)
        for name, is_outside, _, cells in _sums(spans, cut.steps, choice, rows, outside[rows])
    ]
    return Table("background_stages", columns, table, choice.note)


def regions(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum regions: data fetch, training step, optimizer, checkpoints, validation, annotations.

    Times are those of whole spans. Regions nest in one another and in stages, so their shares of
    the step time do not add up to 100%. ``location`` is ``in steps`` or ``outside steps``, by where
    the span starts. Of several ranks, ``longest`` is the time per call on the rank where it
    is longest, ``on rank``.
    """
    slowest = (Column("longest", "duration", "ns"), Column("on rank", "count"))
    place = (Column("location", "text"), Column("share", "share"))
    own = (each for each in _PER_CALL if not each.name.startswith("inclusive"))
    columns = (Column("region", "text"), *place, *slowest, _TOTAL, *own)
    steps, rows = rows_on_ranks(spans, "step", ranks), rows_on_ranks(spans, "region", ranks)
    choice = counted(spans, steps)
    whole = int(spans.duration_ns[steps[choice.mask]].sum())
    table: list[tuple[Cell, ...]] = []
    for name, is_outside, longest, cells in _sums(
        spans, steps, choice, rows, spans.duration_ns[rows]
    ):
        total, middle, _, *rest = cells
        share = None if is_outside else total / whole  # type: ignore[operator]
        where = _OUTSIDE if is_outside else "in steps"
        table.append((name, where, share, *longest, total, middle, *rest))
    return Table("regions", columns, table, choice.note)


def _sums(
    spans: Spans, steps: Int64s, choice: Counted, rows: Int64s, ns: Int64s
) -> Iterator[tuple[str, bool, tuple[Cell, Cell], tuple[Cell, ...]]]:
    """Yield (name, outside steps, longest mean and its rank, statistics), largest total first.

    ``ns`` are the times of the rows. Excluded steps are left out.
    """
    step = containing_step(spans, steps, rows, spans.rank)
    keep = (step < 0) | np.append(choice.mask, True)[step]
    rows, ns, outside = rows[keep], ns[keep], (step[keep] < 0).astype(np.int64)
    group, width = spans.name[rows] * 2 + outside, int(spans.rank.max(initial=0)) + 1
    found = _call_statistics(group, ns, spans.duration_ns[rows])
    by_rank = summarize(group * width + spans.rank[rows], ns)
    longest: dict[int, tuple[int, int]] = {}
    for key, mean_ns in zip(by_rank.group.tolist(), by_rank.mean.tolist(), strict=True):
        own = (int(mean_ns), key % width)
        longest[key // width] = max(longest.get(key // width, (-1, 0)), own)
    for key in sorted(found, key=lambda key: -found[key][0]):  # type: ignore[operator]
        code, place = divmod(key, 2)
        slowest = longest[key] if len(spans.ranks) > 1 else (None, None)
        yield spans.names[code], bool(place), slowest, found[key]
