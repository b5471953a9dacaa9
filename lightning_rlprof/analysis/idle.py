"""Why each rank's device idled: the host was late, launching took time, a collective, unknown."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device_runs import (
    COMMUNICATION,
    NO_STAGE,
    Lane,
    device_runs,
    grid_of,
)
from lightning_rlprof.analysis.device_walk import LATENCY_NS
from lightning_rlprof.analysis.partition import paint
from lightning_rlprof.analysis.statistics import summarize
from lightning_rlprof.analysis.sweep import edges
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["idle"]

_COLUMNS = (
    Column("rank", "count"),
    Column("device", "count"),
    Column("kind", "text"),
    Column("stage", "text"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("count", "count"),
    Column("median", "duration", "ns"),
    Column("longest", "duration", "ns"),
)
_HOST, _LAUNCH, _COLLECTIVE, _UNKNOWN = range(4)
_KINDS = ("host bound", "launch bound", "waiting for a collective", "unknown")
_NO_WORK = "no kernels and no copies of a device were recorded"
_NO_IDLE = "no device is known to have idled"
_UNTRACED = "untraced"


class _Pieces(NamedTuple):
    """Disjoint pieces of idle time, ascending; those of one gap have its number."""

    start_ns: Int64s
    end_ns: Int64s
    kind: Int64s


def idle(spans: Spans) -> Table:
    """Divide the idle time of each rank's device by why it idled, and by what the host was in.

    A device idles while none of its streams runs anything; a gap lasts until the next work begins.
    Host bound: that was launched only after the device had run empty; the whole gap, or, where the
    work lay launched for more than `LATENCY_NS`, until the launch. Launch bound: it was launched
    before and began within `LATENCY_NS`. Waiting for a collective: it lay launched for longer, and
    is a collective. Unknown: all else; its launch was not recorded, say, or nothing came.

    Totals add up to ``idle`` in `breakdown`, per device and stage. ``share`` is of the device's
    idle time. A gap in which the host was in several stages counts in each with its part.

    Abstains without work of a device, and where none is known to have idled.
    """
    runs = device_runs(spans)
    rows: list[tuple[Cell, ...]] = []
    for lane in runs.lanes:
        rows += [(lane.rank, lane.device, *row) for row in _rows(lane, runs.stages)]
    if not rows:
        reason = _NO_IDLE if runs.lanes else _NO_WORK
        return Table("idle", _COLUMNS, abstained=" ".join([reason, *runs.remarks]))
    return Table("idle", _COLUMNS, rows, " ".join(runs.remarks))


def _rows(lane: Lane, names: list[str]) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per kind and stage of one device, most time first."""
    kind, stage, ns = _by_stage(lane, _pieces(lane, *grid_of(lane).idle()))
    whole = int(ns.sum())
    keys = kind * (len(names) + 1) + stage - NO_STAGE
    found = summarize(keys, ns)
    columns = (found.group, found.total, found.count, found.p50, found.max)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for key, total, *rest in sorted(rows, key=lambda row: (-row[1], row[0])):
        each, code = divmod(key, len(names) + 1)
        name = names[code + NO_STAGE] if code else _UNTRACED
        yield _KINDS[each], name, total / whole, total, *rest


def _pieces(lane: Lane, start: Int64s, end: Int64s) -> _Pieces:
    """Divide gaps by kind."""
    runs = lane.runs
    at, launch = runs.begun(end)
    known, late = launch <= end, launch > start  # a launch after the work itself is no launch
    ready = np.where(known, launch, end).clip(start, end)
    short = end - ready <= LATENCY_NS
    joins = np.append(runs.kind, COMMUNICATION)[at] == COMMUNICATION
    whole = np.where(short, np.where(late, _HOST, _LAUNCH), np.where(joins, _COLLECTIVE, _UNKNOWN))
    whole[~known] = _UNKNOWN
    split = np.flatnonzero(known & late & ~short)  # late, and then not at once
    first = np.append(np.where(known & ~short, ready, start), start[split])
    last = np.append(end, ready[split])
    order = np.argsort(first, kind="stable")
    kind = np.append(whole, np.full(len(split), _HOST))
    return _Pieces(first[order], last[order], kind[order])


def _by_stage(lane: Lane, pieces: _Pieces) -> tuple[Int64s, Int64s, Int64s]:
    """Return kind, stage of the host and length of each piece, cut where the stage changes.

    Of a piece, what lies in one stage is one part, also where another stage lies in between.
    """
    host = lane.host
    times = edges(pieces.start_ns, pieces.end_ns, host.start_ns, host.end_ns)
    count = max(len(times) - 1, 0)
    inside, stage = (
        paint(np.searchsorted(times, start), np.searchsorted(times, end), count)
        for start, end in ((pieces.start_ns, pieces.end_ns), (host.start_ns, host.end_ns))
    )
    cells = np.flatnonzero(inside >= 0)
    codes = np.append(host.stage, NO_STAGE)[stage[cells]]
    width = int(codes.max(initial=NO_STAGE)) - NO_STAGE + 1
    keys, place = np.unique(inside[cells] * width + codes - NO_STAGE, return_inverse=True)
    ns = np.zeros(len(keys), np.int64)
    np.add.at(ns, place, np.diff(times)[cells])
    return pieces.kind[keys // width], keys % width + NO_STAGE, ns
