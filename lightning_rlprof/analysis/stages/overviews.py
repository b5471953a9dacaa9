"""Whole spans that no step's partition holds: regions, and stages beside the training thread.

Every step on its own: how long it took and what each stage took of it.

Which rank takes longest in each stage, and by how much; differences, no verdicts.

What each rank recorded: its steps, the time in and outside them, and how it ended.

Host time of each stage beside the time that the device took for it.
"""

from collections.abc import Collection, Iterator

import numpy as np

from lightning_rlprof.analysis.stages.partition import (
    UNTRACED,
    Cells,
    Partition,
    containing_step,
    partition,
    rows_on_ranks,
)
from lightning_rlprof.analysis.statistics.group_summary import mean, summarize
from lightning_rlprof.analysis.step_selection import FEWEST, STATES, Counted, counted, states
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, ColumnRows, Table

_MOST_STAGES = 30


def steps(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """List every step of every rank; the stages and ``untraced`` add up to ``wall`` exactly.

    Stages beyond the thirty with the most time are summed in a column "other stages". ``state``
    is ``complete``, ``capture`` (a recorder's heavy tool was on in this step) or ``interrupted``.
    """
    cut = partition(spans, ranks)
    cells = cut.cells(spans)
    shown, rest = _longest(cells, len(cut.steps), len(spans.names))
    names = [*(spans.names[code] for code in shown.tolist()), *["other stages"] * rest]
    columns = (
        Column("rank", "count"),
        Column("step", "count"),
        Column("state", "text"),
        Column("wall", "duration", "ns"),
        *(Column(name, "duration", "ns") for name in names),
        Column("untraced", "duration", "ns"),
    )
    if not len(cut.steps):
        return Table("steps", columns, abstained="no step was recorded to its end")
    times = _times(cells, shown, len(cut.steps), len(names))
    state = (states(spans, cut.steps), STATES)
    who = (spans.rank[cut.steps], spans.step[cut.steps])
    return Table("steps", columns, ColumnRows([*who, state, times.sum(axis=0), *times]))


def _longest(cells: Cells, steps: int, names: int) -> tuple[Int64s, bool]:
    """Return the stages with the most time, longest first, and whether there are others."""
    (totals,) = cells.sums(np.zeros(steps, dtype=np.int64), 1, names)
    order = np.argsort(-totals[1:], kind="stable")
    order = order[totals[1:][order] > 0]
    return order[:_MOST_STAGES], len(order) > _MOST_STAGES


def _times(cells: Cells, shown: Int64s, steps: int, width: int) -> Int64s:
    """Return exclusive time per column and step; the last column is untraced."""
    names = cells.name if cells.columns else cells.names
    column = np.full(max(int(names.max(initial=0)), 0) + 2, width - 1, dtype=np.int64)
    column[shown + 1] = np.arange(len(shown))
    column[UNTRACED + 1] = width
    times = np.zeros((width + 1, steps), dtype=np.int64)
    if cells.columns:
        np.add.at(times.ravel(), column[names + 1] * steps + cells.step, cells.ns)
        return times
    for place, ns in zip(column[names + 1].tolist(), cells.ns.reshape(steps, -1).T, strict=True):
        times[place] += ns
    return times


_COLUMNS = (
    Column("stage", "text"),
    Column("slowest rank", "count"),
    Column("its time per step", "duration", "ns"),
    Column("median of others", "duration", "ns"),
    Column("ratio", "ratio"),
    Column("steps", "count"),
)
_NOTE = (
    "Differences, no verdicts: the rank with the longest time may have had more work, or have "
    "waited for the others."
)


def slowest_ranks(spans: Spans) -> Table:
    """Name per stage the rank with the most exclusive time per step, beside others that run it.

    Abstains with one rank. With fewer than three steps no rank is named.
    """
    cut = partition(spans)
    choice = counted(spans, cut.steps)
    numbers, count = np.unique(spans.rank[cut.steps][choice.mask], return_counts=True)
    if len(numbers) < 2:
        return Table(
            "slowest_ranks", _COLUMNS, abstained="ranks are compared where two or more have steps"
        )
    fewest = int(count.min())
    if fewest < FEWEST:
        reason = f"a rank has {fewest} steps, too few to compare ranks ({FEWEST} needed)"
        return Table("slowest_ranks", _COLUMNS, abstained=reason)
    totals = _totals(spans, cut, choice, numbers)
    means = totals // count[:, None]
    rows: list[tuple[Cell, ...]] = []
    for code in np.argsort(-totals.sum(axis=0), kind="stable").tolist():
        if not totals[:, code].any():
            continue
        worst = int(np.argmax(means[:, code]))
        ran = np.delete(means[:, code], worst)
        ran = ran[ran > 0]
        others = int(np.median(ran)) if len(ran) else None
        name = "untraced" if code - 1 == UNTRACED else spans.names[code - 1]
        own = int(means[worst, code])
        ratio = own / others if others else None
        rows.append((name, int(numbers[worst]), own, others, ratio, fewest))
    return Table("slowest_ranks", _COLUMNS, rows, f"{choice.note} {_NOTE}".strip())


def _totals(spans: Spans, cut: Partition, choice: Counted, ranks: Int64s) -> Int64s:
    """Return exclusive time in the counted steps by rank and name, untraced first."""
    place = np.searchsorted(ranks, spans.rank[cut.steps])
    place[~choice.mask] = -1
    return cut.cells(spans).sums(place, len(ranks), len(spans.names))


_STEP = KINDS.index("step")
_COVERAGE_COLUMNS = (
    Column("rank", "count"),
    Column("host", "text"),
    Column("device", "text"),
    Column("spans", "count"),
    Column("steps", "count"),
    Column("in steps", "duration", "ns"),
    Column("outside steps", "duration", "ns"),
    Column("ended", "text"),
)


def rank_status(spans: Spans) -> Table:
    """List the ranks; ``in steps`` and ``outside steps`` add up to first event to last exactly."""
    cut = partition(spans)
    cells = cut.cells(spans)
    inside = np.zeros(max(spans.ranks, default=0) + 1, dtype=np.int64)
    np.add.at(inside, spans.rank[cut.steps][cells.step], cells.ns)
    rows: list[tuple[Cell, ...]] = []
    for rank, header in spans.headers.items():
        mine = spans.rows(rank=rank)
        first = int(spans.start_ns[mine].min()) if len(mine) else 0
        last = int(spans.end_ns[mine].max()) if len(mine) else 0
        steps = int(np.count_nonzero(spans.kind[mine] == _STEP))
        ended = spans.statuses.get(rank) or "file just stops"
        took = int(inside[rank])
        times = (took, last - first - took)
        rows.append((rank, header.host, header.hardware, len(mine), steps, *times, ended))
    return Table("rank_status", _COVERAGE_COLUMNS, rows)


_DEVICE_COLUMNS = (
    Column("stage", "text"),
    Column("host mean", "duration", "ns"),
    Column("device mean", "duration", "ns"),
    Column("device by host", "ratio"),
    Column("measured", "count"),
    Column("count", "count"),
)
_DEVICE_NOTE = (
    "Device time runs from where the device reached the stage to where it had done the work that "
    "the stage queued. Far above the host's, the stage left work behind that later stages wait "
    "for; far below, the device waited for the host."
)
_COUNTER = "device_ns"


def host_vs_device(spans: Spans) -> Table:
    """Compare per stage the mean host time of a span with the mean device time of the same spans.

    ``measured`` counts the spans that have a device time, ``count`` all of them; means are over the
    measured ones, inclusive, over all ranks. The host's longest stage comes first.

    Abstains where no span has a device time.
    """
    if _COUNTER not in spans.counters:
        reason = "no device time was recorded: it takes an accelerator, and device_time not false"
        return Table("host_vs_device", _DEVICE_COLUMNS, abstained=reason)
    steps = spans.rows(kind="step")
    choice = counted(spans, steps)
    rows = spans.rows(kind="stage")
    step = containing_step(spans, steps, rows, spans.thread)
    rows = rows[(step >= 0) & choice.mask[step]] if len(steps) else rows
    at, nanoseconds = spans.amounts(_COUNTER, np.int64)
    known = np.isin(at, rows)
    at, nanoseconds = at[known], nanoseconds[known]
    lines = _lines(spans, rows, at, nanoseconds)
    return Table("host_vs_device", _DEVICE_COLUMNS, lines, f"{choice.note} {_DEVICE_NOTE}".strip())


def _lines(spans: Spans, rows: Int64s, at: Int64s, device_ns: Int64s) -> list[tuple[Cell, ...]]:
    size = len(spans.names)
    counts = np.bincount(spans.name[rows], minlength=size)
    measured = np.bincount(spans.name[at], minlength=size)
    host, device = np.zeros(size, np.int64), np.zeros(size, np.int64)
    np.add.at(host, spans.name[at], spans.duration_ns[at])
    np.add.at(device, spans.name[at], device_ns)
    lines: list[tuple[Cell, ...]] = []
    for code in np.argsort(-host, kind="stable").tolist():
        number = int(measured[code])
        if number:
            ratio = int(device[code]) / int(host[code]) if host[code] else None
            own, its = (mean(int(total[code]), number) for total in (host, device))
            lines.append((spans.names[code], own, its, ratio, number, int(counts[code])))
    return lines


_STATISTICS = (
    Column("total", "duration", "ns"),
    Column("mean", "duration", "ns"),
    Column("p50", "duration", "ns"),
    Column("p95", "duration", "ns"),
    Column("max", "duration", "ns"),
    Column("count", "count"),
)
_OUTSIDE = "outside steps"


def background_stages(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum stages of other threads than the training's (``in background``) or ``outside steps``.

    They run beside the steps, so they have no share of them. A span belongs where it starts.
    """
    columns = (Column("stage", "text"), Column("where", "text"), *_STATISTICS)
    steps, rows = rows_on_ranks(spans, "step", ranks), rows_on_ranks(spans, "stage", ranks)
    choice = counted(spans, steps)
    rows = rows[containing_step(spans, steps, rows, spans.thread) < 0]
    table: list[tuple[Cell, ...]] = [
        (name, _OUTSIDE if outside else "in background", *cells)
        for name, outside, cells in _sums(spans, steps, choice, rows)
    ]
    return Table("background_stages", columns, table, choice.note)


def regions(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum regions: data fetch, training step, optimizer, checkpoints, validation, annotations.

    Regions lie in one another and in stages, so their shares of the counted steps' time do not
    add up to one. A span belongs where it starts.
    """
    where = Column("where", "text")
    columns = (Column("region", "text"), where, Column("share", "share"), *_STATISTICS)
    steps, rows = rows_on_ranks(spans, "step", ranks), rows_on_ranks(spans, "region", ranks)
    choice = counted(spans, steps)
    whole = int(spans.duration_ns[steps[choice.mask]].sum())
    table: list[tuple[Cell, ...]] = [
        (name, _OUTSIDE, None, *cells) if outside else (name, "in steps", cells[0] / whole, *cells)
        for name, outside, cells in _sums(spans, steps, choice, rows)
    ]
    return Table("regions", columns, table, choice.note)


def _sums(
    spans: Spans, steps: Int64s, choice: Counted, rows: Int64s
) -> Iterator[tuple[str, bool, list[int]]]:
    """Yield (name, outside steps, statistics), largest total first; other steps are left out."""
    step = containing_step(spans, steps, rows, spans.rank)
    keep = (step < 0) | np.append(choice.mask, True)[step]
    rows, outside = rows[keep], (step[keep] < 0).astype(np.int64)
    found = summarize(spans.name[rows] * 2 + outside, spans.duration_ns[rows])
    columns = (found.total, found.mean, found.p50, found.p95, found.max, found.count)
    for at in np.argsort(-found.total, kind="stable").tolist():
        code, place = divmod(int(found.group[at]), 2)
        yield spans.names[code], bool(place), [int(column[at]) for column in columns]
