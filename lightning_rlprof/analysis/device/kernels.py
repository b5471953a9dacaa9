"""Which kernels and copies take the device's time: a row per name, with exact sums."""

from collections.abc import Collection

import numpy as np

from lightning_rlprof.analysis.device.work import OTHERS, DeviceWork, device_work, no_work
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    *columns_of("text", "kernel", "kind"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("count", "count"),
    *columns_of("duration", "mean", "p50", "p95", "max", "std", unit="ns"),
    Column("stage", "text"),
    Column("share in stage", "share"),
    Column("ranks", "count"),
)
_KINDS = ("compute", "communication", "copy")  # The kind of work is the index.


def kernels(spans: Spans, *, top: int | None = None, ranks: Collection[int] | None = None) -> Table:
    """Sum kernels and copies by name, those first that take most of the devices' time.

    ``share`` is relative to the time of all kernels and copies. Each counts for as long as it ran,
    even if several ran at once: it shows what was run, not how busy a device was. ``stage`` is the
    one with most of a kernel's time; kernels launched in an unknown stage count to none.

    Args:
        spans: The run.
        top: Only the first names; the last row, `OTHERS`, sums up all others, with statistics.
            None shows every name.
        ranks: Only these; None for all.

    Raises:
        RlprofError: ``top`` is below 1.
    """
    if top is not None and top < 1:
        raise RlprofError(f"top={top}: must be 1 or more, or None for all kernels")
    notes: list[str] = []
    work = device_work(spans, ranks, notes)
    if not len(work):
        return Table("kernels", _COLUMNS, abstained=no_work(ranks, notes))
    codes, names = work.named
    totals = np.zeros(len(names) + 1, np.int64)
    np.add.at(totals, codes, work.duration)
    seen = np.unique(codes % len(totals))  # Code -1, for an unknown name, becomes the last.
    order = seen[np.argsort(-totals[seen], kind="stable")]
    place = np.zeros(len(totals), np.int64)
    place[order] = np.arange(len(order)).clip(max=len(order) if top is None else top)
    shown = [*names, None]
    heads: list[tuple[Cell, Cell]] = [
        (shown[code], None if shown[code] is None else _KINDS[work.name_kinds[code]])
        for code in order[:top].tolist()
    ]
    if len(heads) < len(order):
        heads.append((OTHERS, None))
        notes.append(f"{OTHERS} sums up the names beyond the first {top}.")
    return Table("kernels", _COLUMNS, _rows(work, place[codes], heads), " ".join(notes))


def _rows(work: DeviceWork, row: Int64s, heads: list[tuple[Cell, Cell]]) -> list[tuple[Cell, ...]]:
    """Return a row per head; ``row`` is the one that each kernel or copy counts to."""
    found, whole = summarize(row, work.duration), int(work.duration.sum())
    main = _main_stages(work, row)
    width = int(work.rank.max()) + 1
    ranks = np.bincount(np.unique(row * width + work.rank) // width)
    mean = np.bincount(row, work.duration) / found.count
    variance = np.bincount(row, (work.duration - mean[row]) ** 2) / found.count
    std = np.rint(np.sqrt(variance)).astype(int)
    columns = (found.total, found.count, found.mean, found.p50, found.p95, found.max, std)
    cells = zip(*(column.tolist() for column in columns), strict=True)
    rows: list[tuple[Cell, ...]] = []
    for at, (head, (total, *others)) in enumerate(zip(heads, cells, strict=True)):
        share = total / whole if whole else None
        stage, in_stage = main.get(at, (None, 0))
        part = in_stage / total if stage is not None and total else None
        rows.append((*head, share, total, *others, stage, part, int(ranks[at])))
    return rows


def _main_stages(work: DeviceWork, row: Int64s) -> dict[int, tuple[str, int]]:
    """Return for each row the stage with most of its time, if known, and that time."""
    stage, names = work.stages()
    keep = stage >= 0
    width = max(len(names), 1)
    found = summarize(row[keep] * width + stage[keep], work.duration[keep])
    # The longest stage comes last, so that the dictionary keeps it.
    order = np.argsort(found.total, kind="stable")
    pairs = zip(found.group[order].tolist(), found.total[order].tolist(), strict=True)
    return {key // width: (names[key % width], ns) for key, ns in pairs}
