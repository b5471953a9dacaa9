"""How fast each link between two ranks moves data, and which one is slowest."""

from collections.abc import Collection, Sequence

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, group_starts
from lightning_rlprof.tables.kernels import UNKNOWN
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    *columns_of("count", "source", "destination"),
    *columns_of("text", "group", "transport"),
    Column("bytes", "count", "bytes"),
    Column("time", "duration", "ns"),
    Column("bandwidth", "number", "GB/s"),
    Column("of median", "ratio"),
)
_NO_LINKS = (
    "This run has no bandwidth of links. torch_npu.profiler records it from level1 on "
    "(integrated: {profile_level: level1})."
)
_NUMBERED = "In rows with a group, a rank that recorded nothing has its number within that group."

_Row = tuple[Cell, ...]


def links(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Show the bandwidth of each link between two ranks, the slowest of its transport first.

    ``bandwidth`` is bytes over the time in which the link moved them, over all collectives and
    steps. ``of median`` compares it with the median of the links of its transport. Copies inside
    a device are left out. If the rank at an end is unknown, its number within the ``group`` of the
    row is shown.

    Args:
        spans: The run.
        ranks: Only what these recorded; None for all.
    """
    notes: list[str] = []
    table = spans.try_table("links", notes)
    if table is None:
        return Table("links", _COLUMNS, abstained=" ".join([_NO_LINKS, *notes]))
    names = ("rank", "source", "destination", "size", "transfer")
    rank, source, destination, size, time = (table.numbers(name, UNKNOWN) for name in names)
    keep = (source != destination) & (size > 0) & (time > 0)
    if ranks is not None:
        keep &= np.isin(rank, list(ranks))
    sender, receiver = (_global_ranks(table, name) for name in ("source", "destination"))
    unknown = (sender == UNKNOWN) | (receiver == UNKNOWN)
    group, groups = table.texts("group")
    transport, transports = table.texts("transport")
    columns = [
        np.where(sender == UNKNOWN, source, sender),
        np.where(receiver == UNKNOWN, destination, receiver),
        np.where(unknown, group, UNKNOWN),
        transport,
    ]
    columns = [column[keep] for column in columns]
    if not keep.any():
        return Table("links", _COLUMNS, abstained=" ".join([_NO_LINKS, *notes]))
    if unknown[keep].any():
        notes.append(_NUMBERED)
    order = np.lexsort(columns[::-1])
    first = group_starts(*(column[order] for column in columns))
    moved, took = (np.add.reduceat(column[keep][order], first) for column in (size, time))
    rows = _rows([column[order][first] for column in columns], groups, transports, moved, took)
    return Table("links", _COLUMNS, rows, " ".join([_slowest(rows[0]), *notes]))


def _global_ranks(table: Table, end: str) -> Int64s:
    """Return the rank at one end of each link, as any row knows it, else `UNKNOWN`."""
    group, names = table.texts("group")
    width = len(names) + 1
    known: dict[int, int] = {}
    keys = {}
    for each in ("source", "destination"):
        keys[each] = table.numbers(each, UNKNOWN) * width + group + 1
        rank = table.numbers(f"{each} rank", UNKNOWN)
        told = rank != UNKNOWN
        known |= dict(zip(keys[each][told].tolist(), rank[told].tolist(), strict=True))
    return np.array([known.get(key, UNKNOWN) for key in keys[end].tolist()], np.int64)


def _rows(
    heads: Sequence[Int64s],
    groups: Sequence[str],
    transports: Sequence[str],
    moved: Int64s,
    took: Int64s,
) -> list[_Row]:
    sender, receiver, group, transport = heads
    speed = moved / took  # bytes per ns are GB/s
    codes = np.unique(transport).tolist()
    median = {code: float(np.median(speed[transport == code])) for code in codes}
    columns = (each.tolist() for each in (sender, receiver, group, transport, moved, took, speed))
    rows: list[_Row] = []
    for source, to, of, by, *amounts, rate in zip(*columns, strict=True):
        texts = (groups[of] if of >= 0 else None, transports[by] if by >= 0 else None)
        rows.append((source, to, *texts, *amounts, rate, rate / median[by]))
    return sorted(rows, key=lambda row: (row[-1], row[-2], row[:2]))


def _slowest(row: _Row) -> str:
    """Name the first link."""
    source, destination, group, transport, _, _, speed, ratio = row
    over = f" in group {group}" if group else ""
    over += f" over {transport}" if transport else ""
    text = f"Slowest link of its transport: rank {source} to rank {destination}{over}"
    return f"{text}, {speed:.4g} GB/s, {ratio:.2f}x the median."
