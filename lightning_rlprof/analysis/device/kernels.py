"""Which kernels take the device's time: one row per name, sums exact however few are shown."""

from collections.abc import Collection, Sequence

import numpy as np

from lightning_rlprof.analysis.device.work import OTHERS, Work, device_work
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.analysis.time_categories import Category, kernel_categories
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_COLUMNS = (
    Column("kernel", "text"),
    Column("kind", "text"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("count", "count"),
    Column("mean", "duration", "ns"),
    Column("p50", "duration", "ns"),
    Column("p95", "duration", "ns"),
    Column("max", "duration", "ns"),
    Column("std", "duration", "ns"),
    Column("stage", "text"),
    Column("share in stage", "share"),
    Column("ranks", "count"),
)
_KINDS = {
    Category.COMPUTE: "compute",
    Category.COMMUNICATION: "communication",
    Category.MEMCPY: "copy",
}


def kernels(spans: Spans, *, top: int | None = None, ranks: Collection[int] | None = None) -> Table:
    """Sum kernels and copies by name, those first that take most of the devices' time.

    ``share`` is of the time of all kernels and copies, each counted for as long as it ran, also
    where several ran at once: it says what was run, not how busy a device was. The stage is the one
    that has most of a kernel's time; a kernel whose stage is not known counts to none.

    Args:
        spans: The run.
        top: Only so many names; all others are one row, the last one, called `OTHERS`, with
            statistics over all that it holds. None shows every name.
        ranks: Only these; None for all.

    Raises:
        RlprofError: ``top`` is below 1.
    """
    if top is not None and top < 1:
        raise RlprofError(f"top={top}: kernels shows 1 or more names, or all of them (None)")
    remarks: list[str] = []
    runs = device_work(spans, ranks, remarks)
    if not len(runs.rank):
        of = "" if ranks is None else f" of ranks {sorted(ranks)}"
        why = "; ".join([f"no device tool recorded kernels{of}", *remarks])
        return Table("kernels", _COLUMNS, abstained=why)
    heads, group = _heads(runs, top)
    if heads[-1] == (OTHERS, None):
        remarks.append(f"{OTHERS} holds the names beyond the first {top}.")
    rows = _rows(runs, group, heads)
    return Table("kernels", _COLUMNS, rows, " ".join(remarks))


def _heads(runs: Work, top: int | None) -> tuple[list[tuple[Cell, Cell]], Int64s]:
    """Return name and kind of each row of the table, and the row of each run."""
    totals = np.zeros(len(runs.names) + 1, np.int64)
    np.add.at(totals, runs.name, runs.duration)
    seen = np.unique(runs.name % len(totals))  # -1, a name that is not known, becomes the last
    order = seen[np.argsort(-totals[seen], kind="stable")]
    place = np.zeros(len(totals), np.int64)
    place[order] = np.arange(len(order)).clip(max=len(order) if top is None else top)
    shown: list[str | None] = [*runs.names, None]
    heads: list[tuple[Cell, Cell]] = [
        (shown[code], _kind(shown[code])) for code in order[:top].tolist()
    ]
    if len(heads) < len(order):
        heads.append((OTHERS, None))
    return heads, place[runs.name]


def _kind(name: str | None) -> str | None:
    return None if name is None else _KINDS[Category(int(kernel_categories([name])[0]))]


def _rows(runs: Work, group: Int64s, heads: Sequence[tuple[Cell, Cell]]) -> list[tuple[Cell, ...]]:
    """Return a row per group; groups are numbered as ``heads`` are."""
    found, whole = summarize(group, runs.duration), int(runs.duration.sum())
    stage, part = _main_stage(runs, group, len(heads))
    width = int(runs.rank.max()) + 1
    ranks = np.bincount(np.unique(group * width + runs.rank) // width)
    std = _deviation(runs.duration, group, found.count)
    columns = (found.total, found.count, found.mean, found.p50, found.p95, found.max, std)
    rows: list[tuple[Cell, ...]] = []
    for at, head in enumerate(heads):
        own = [int(column[at]) for column in columns]
        main = runs.stages[stage[at]] if stage[at] >= 0 else None
        inside = _share(int(part[at]), own[0]) if main is not None else None
        rows.append((*head, _share(own[0], whole), *own, main, inside, int(ranks[at])))
    return rows


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _main_stage(runs: Work, group: Int64s, count: int) -> tuple[Int64s, Int64s]:
    """Return per group the stage with most of its time, -1 where none is known, and that time."""
    keep = runs.stage >= 0
    width = int(runs.stage.max(initial=0)) + 1
    found = summarize(group[keep] * width + runs.stage[keep], runs.duration[keep])
    order = np.argsort(found.total, kind="stable")  # the longest one is written last
    stage, part = np.full(count, -1), np.zeros(count, np.int64)
    stage[found.group[order] // width] = found.group[order] % width
    part[found.group[order] // width] = found.total[order]
    return stage, part


def _deviation(values: Int64s, group: Int64s, count: Int64s) -> Int64s:
    """Return the standard deviation of each group, all of whose values are known."""
    mean = np.bincount(group, values) / count
    return np.rint(np.sqrt(np.bincount(group, (values - mean[group]) ** 2) / count)).astype(int)
