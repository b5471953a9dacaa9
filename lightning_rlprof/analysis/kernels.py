"""Which kernels and copies take the device's time: a row per short name, with exact sums."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import OTHERS, DeviceWork, device_work, no_work
from lightning_rlprof.analysis.operators import call_tree
from lightning_rlprof.analysis.statistics.group_summary import summarize
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import Coded, distinct, find
from lightning_rlprof.tables.spans import Spans, apart
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    *columns_of("text", "short name", "class"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("count", "count"),
    *columns_of("duration", "mean", "p50", "p95", "max", "std", unit="ns"),
    Column("stage", "text"),
    Column("share in stage", "share"),
    Column("ranks", "count"),
    *columns_of("text", "operator", "module", "kind", "kernel"),
)
_KINDS = ("compute", "communication", "copy")  # The kind of work is the index.
_VAGUE = ("send_recv", "collective")  # NCCL runs several operations in kernels of these names.
_LAUNCHERS = ("operator", "module")
_MAX_CALLS_SEARCHED = 1_000_000  # Launches of more take seconds to look up.
_UNSEARCHED = f"operator and module are left out: more than {_MAX_CALLS_SEARCHED:,} calls."


class _Head(NamedTuple):
    """What a row says of its kernel, by its names alone."""

    short: str | None = None
    group: str | None = None
    kind: str | None = None
    full: str | None = None


def kernels(spans: Spans, *, top: int | None = None, ranks: Collection[int] | None = None) -> Table:
    """Sum kernels and copies by short name, those first that take most of the devices' time.

    ``share`` is relative to the time of all kernels and copies. Each counts for as long as it ran,
    even if several ran at once: it shows what was run, not how busy a device was. ``stage`` is the
    one with most of a kernel's time; kernels launched in an unknown stage count to none. So are
    ``operator`` and ``module`` of what launched it, and ``kernel`` of its full names.

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
    full, names = work.named
    codes, shorts = distinct(full, [each.short for each in work.short_names])
    codes, shorts = _by_operation(spans, work, codes, shorts)
    totals = np.zeros(len(shorts) + 1, np.int64)
    np.add.at(totals, codes, work.duration)
    seen = np.unique(codes % len(totals))  # Code -1, for an unknown name, becomes the last.
    order = seen[np.argsort(-totals[seen], kind="stable")]
    place = np.zeros(len(totals), np.int64)
    place[order] = np.arange(len(order)).clip(max=len(order) if top is None else top)
    heads, places = [_Head()] * len(totals), {name: at for at, name in enumerate(names)}
    for code, (name, _) in _longest(work, codes, work.named).items():
        at = places[name]
        kind = work.short_names[at].kind
        heads[code] = _Head(shorts[code], kind, _KINDS[work.name_kinds[at]], name)
    shown = [heads[code] for code in order[:top].tolist()]
    if len(shown) < len(order):
        shown.append(_Head(short=OTHERS, full=OTHERS))
        notes.append(f"{OTHERS} sums up the names beyond the first {top}.")
    rows = _rows(_searched_calls(spans, notes), work, place[codes], shown)
    return Table("kernels", _COLUMNS, rows, " ".join(notes))


def _searched_calls(spans: Spans, notes: list[str]) -> Table | None:
    """Return the calls, unless there are none or too many; ranks are not put together to know."""
    calls, count, ranks = None, 0, apart(spans, "calls")
    for rank in ranks:
        calls = spans.try_table("calls", [], rank)
        count += 0 if calls is None else len(calls.rows)
        if count > _MAX_CALLS_SEARCHED:
            notes.append(_UNSEARCHED)
            return None
    return calls if len(ranks) == 1 else spans.try_table("calls", [])


def _rows(
    calls: Table | None, work: DeviceWork, row: Int64s, heads: list[_Head]
) -> list[tuple[Cell, ...]]:
    """Return a row per head; ``row`` is the one that each kernel or copy counts to."""
    found, whole = summarize(row, work.duration), int(work.duration.sum())
    main, launchers = _longest(work, row, work.stages()), _launchers(calls, work, row)
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
        rows.append(
            (
                *(head.short, head.group, share, total, *others, stage, part, int(ranks[at])),
                *(each.get(at, (None, 0))[0] for each in launchers),
                *(head.kind, head.full),
            )
        )
    return rows


def _by_operation(spans: Spans, work: DeviceWork, codes: Int64s, shorts: Sequence[str]) -> Coded:
    """Divide names that several collectives share by the one that the profiler recorded."""
    table = spans.try_table("collectives", [])
    if table is None or not len(table.rows):
        return codes, shorts
    at = find(table.numbers("start"), work.numbers("start"))
    at = np.where(table.numbers("rank")[at] == work.rank, at, -1)
    found, texts = table.texts("operation")
    operation = np.append(found, -1)[at]
    known = np.array([*(each.startswith(_VAGUE) for each in shorts), False])[codes]
    known &= operation >= 0
    pairs, own = np.unique(codes[known] * len(texts) + operation[known], return_inverse=True)
    named = [
        f"{texts[pair % len(texts)]} ({shorts[pair // len(texts)]})" for pair in pairs.tolist()
    ]
    divided = codes.copy()
    divided[known] = len(shorts) + own
    return divided, [*shorts, *named]


def _launchers(
    calls: Table | None, work: DeviceWork, row: Int64s
) -> list[dict[int, tuple[str, int]]]:
    """Return for each row the operator and the module that launched most of its time."""
    found: list[dict[int, tuple[str, int]]] = []
    for kind in _LAUNCHERS:
        tree = None if calls is None else call_tree(calls, kind, work.ranks)
        if calls is None or tree is None or not len(tree.name):
            found.append({})
            continue
        # The last name stands for what nothing launched.
        name = np.append(tree.name, -1)[tree.launching(work, calls)]
        found.append(_longest(work, row, (name, tree.names)))
    return found


def _longest(work: DeviceWork, row: Int64s, texts: Coded) -> dict[int, tuple[str, int]]:
    """Return for each row the text with most of its time, if one is known, and that time."""
    codes, names = texts
    keep, width = (codes >= 0) & (row >= 0), max(len(names), 1)
    found = summarize(row[keep] * width + codes[keep], work.duration[keep])
    # The longest text comes last, so that the dictionary keeps it.
    order = np.argsort(found.total, kind="stable")
    pairs = zip(found.group[order].tolist(), found.total[order].tolist(), strict=True)
    return {key // width: (names[key % width], ns) for key, ns in pairs}
