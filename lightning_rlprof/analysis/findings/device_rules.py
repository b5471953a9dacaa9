"""The rule on devices that wait: for launches of short work, or for a host that is elsewhere.

The rule on kernels: one that takes much of all their time.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.launches import Unpaired
from lightning_rlprof.analysis.device.timeline import NEVER, DeviceRuns, Lane, grid_of
from lightning_rlprof.analysis.device.wait_chain import LATENCY_NS
from lightning_rlprof.analysis.findings.finding import (
    HIGH,
    MEDIUM,
    Claim,
    Undecided,
    bounds,
    place_at,
    quoted,
)
from lightning_rlprof.analysis.step_selection import slowdown
from lightning_rlprof.analysis.time_categories import Category, kernel_categories
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

LATE = 0.2
"""Share of a device's observed time from which on waiting for the host is a finding.

A fifth: a trace that lost a fifth of its events, out of a device that never rested, shows no more.
"""

SHORT_NS = 100_000
"""Up to here a gap is the price of launching, beyond it the host did something else."""

FEWEST = 200
"""Pieces of device work below which nothing is said."""

_PIECES = 20  # stretches with as many pieces of work each, of which the bootstrap draws
_HOST = "devices that wait for the host"
_TIMES = ("start", "duration", "launch")
_GAPS = """
with work as ({work}), free as (
  select *, max(start_ns + duration_ns) over (partition by rank, device
    order by start_ns, launch_ns nulls last
    rows between unbounded preceding and 1 preceding) as idle_ns from work where duration_ns > 0)
select rank, device, count(*) as gaps, sum(start_ns - idle_ns) as gap_ns from free
where start_ns > idle_ns and start_ns - idle_ns <= {short} and launch_ns > idle_ns
and graph is null group by rank, device order by rank, device"""


class _Waits(NamedTuple):
    """Idle time of one device: by stretch; its short gaps; the longest, (ns, rank, from, to)."""

    late: Float64s
    unknown: Float64s
    whole: Float64s
    short: int
    gaps: int
    longest: tuple[int, int, int, int]


def device_claims(
    spans: Spans, devices: DeviceRuns, pairs: Unpaired | None
) -> Iterator[Claim | Undecided]:
    """Yield what the work of devices tells; nothing where nobody looked at any."""
    lanes = [lane for lane in devices.lanes if len(lane.known[0])]
    if not lanes:
        return
    pieces = min(len(lane.runs.start_ns) for lane in lanes)
    if pieces < FEWEST:
        yield Undecided(_HOST, f"of {pieces} pieces of device work")
        return
    waits = [_waits(lane) for lane in lanes]
    late, unknown, whole = (
        np.sum([getattr(each, name) for each in waits], axis=0)
        for name in ("late", "unknown", "whole")
    )
    slow = slowdown(spans)
    low, high = bounds(late, whole, late + unknown)
    low = max(0.0, low - (slow / (1 + slow) if slow is not None and slow > 0 else 0.0))
    if high < LATE:
        return
    if low <= LATE:
        yield Undecided(_HOST, f"{low:.0%} to {high:.0%} of the time where {LATE:.0%} counts")
        return
    if pairs is not None and pairs.lossy:
        yield Undecided(_HOST, "as kernels were lost: see the integrity sheet")
        return
    sure = HIGH if slow is not None and low > 2 * LATE else MEDIUM
    yield _late(spans, waits, (low, high), sure)


def _late(spans: Spans, waits: list[_Waits], share: tuple[float, float], sure: str) -> Claim:
    """Return the claim: many short gaps are launches, a few long ones are something else."""
    effect, whole = (int(sum(getattr(w, n).sum() for w in waits)) for n in ("late", "whole"))
    ends = (int(share[0] * whole), int(share[1] * whole))
    seen = f"{effect / whole:.0%} of the time seen"
    short, gaps = sum(each.short for each in waits), sum(each.gaps for each in waits)
    longest, rank, first, last = max(each.longest for each in waits)
    place = place_at(spans, rank, first, last)
    refuted = "the same steps without a profiler are shorter by as much: it slows the host"
    if 2 * short > effect:
        return Claim(
            "devices wait for the launches of short work",
            *(effect, *ends, sure),
            "CUDA graphs, torch.compile or fused kernels: fewer launches; or a larger micro-batch",
            f"{refuted}, or the share stays with a micro-batch of twice the size",
            f"{seen}; {gaps:,} gaps up to {SHORT_NS // 1000} µs before work that came too late",
            _gaps_query(spans),
            place,
            "rlprof show RUN idle",
        )
    return Claim(
        "devices run empty until the host launches again",
        *(effect, *ends, sure),
        "look at what the host does in the longest gaps: .item(), copies that block, Python",
        f"{refuted}, or the host waits there for something outside of it",
        f"{seen}; the longest gap takes {longest / 1e6:.3g} ms",
        _gap_query(spans, rank, first, last),
        place,
        "rlprof show RUN idle",
    )


def _waits(lane: Lane) -> _Waits:
    """Return when a device waited for its host, as `idle` tells it, and when nobody knows why."""
    runs, grid = lane.runs, grid_of(lane)
    start, end = grid.idle()
    launch = runs.begun(end)[1]
    known, after = launch <= end, launch > start
    until = np.where(end - launch.clip(start, end) <= LATENCY_NS, end, launch.clip(start, end))
    late = np.where(known & after, until - start, 0)
    cuts = runs.start_ns[np.arange(1, _PIECES) * len(runs.start_ns) // _PIECES]
    longest = int(np.argmax(late)) if len(late) else 0
    times = (int(start[longest]), int(end[longest])) if len(late) else (0, 0)
    gaps = _short(runs.start_ns, runs.end_ns, runs.launch_ns, runs.graph)
    return _Waits(
        _by_piece(cuts, start, late),
        _by_piece(cuts, start, np.where(known, 0, end - start)),
        _by_piece(cuts, grid.times[:-1], np.diff(grid.times) * grid.seen),
        *(int(gaps.sum()), len(gaps)),
        (int(late.max(initial=0)), lane.rank, *times),
    )


def _by_piece(cuts: Int64s, times: Int64s, ns: Int64s) -> Float64s:
    """Return the sum of lengths in each piece; cuts and times are ascending."""
    parts = np.split(ns, np.searchsorted(times, cuts))
    return np.array([part.sum() for part in parts], np.float64)


def _short(start: Int64s, end: Int64s, launch: Int64s, graph: Int64s) -> Int64s:
    """Return the short gaps before work that was launched into them; see `_GAPS`."""
    free = np.maximum.accumulate(end)[:-1]
    gap, launch, graph = start[1:] - free, launch[1:], graph[1:]
    keep = (gap > 0) & (gap <= SHORT_NS) & (launch > free) & (launch < NEVER) & (graph < 0)
    found: Int64s = gap[keep]
    return found


def _gaps_query(spans: Spans) -> str:
    """Return the SELECT of `_short` on each device."""
    every = _every(spans, ("rank", "device", "start", "duration", "launch", "graph"))
    return " ".join(_GAPS.format(work=every, short=SHORT_NS).split())


def _gap_query(spans: Spans, rank: int, from_ns: int, to_ns: int) -> str:
    """Return the SELECT of what ended as a gap began, and began as it ended."""
    every = _every(spans, ("rank", "device", "stream", "kernel", "start", "duration", "launch"))
    where = f"rank = {rank} and (start_ns + duration_ns = {from_ns} or start_ns = {to_ns})"
    return f"select * from ({every}) where {where} order by start_ns"


def _every(spans: Spans, names: Sequence[str]) -> str:
    """Return the SELECT of kernels and copies, with null for columns that one of them lacks."""
    parts = []
    for name in ("kernels", "memcpy"):
        if (table := spans.try_table(name, [])) is not None:
            there = {column.name for column in table.columns}
            columns = ", ".join(_selected(each, there) for each in names)
            parts.append(f"select {columns} from {name}")
    return " union all ".join(parts)


def _selected(name: str, there: Collection[str]) -> str:
    """Return a column as SQL calls it: times have their unit, a copy's kind is its name."""
    if name == "kernel" and name not in there:
        return "kind as kernel"
    called = f"{name}_ns" if name in _TIMES else name
    return called if name in there else f"null as {called}"


DOMINATES = 0.4
"""Share of the kernels' time from which on a single name is a finding."""

COUNTS = 0.05
"""Share of the time seen below which it is not worth a word: the devices do next to nothing."""


_LONGEST = 80  # letters of a name that a claim shows
_SUBJECT = "one kernel above all"


def kernel_claims(spans: Spans, seen_ns: int) -> Iterator[Claim | Undecided]:
    """Yield the kernel of compute that takes most, where that is much; nothing without kernels.

    Args:
        spans: The run.
        seen_ns: How long somebody looked at its devices.
    """
    table = spans.try_table("kernels", [])
    if table is None or not len(table.rows):
        return
    code, names = table.texts("kernel")
    if len(code) < FEWEST:
        yield Undecided(_SUBJECT, f"of {len(code)} kernels")
        return
    computes = np.append(kernel_categories(names), Category.CUSTOM)[code] == Category.COMPUTE
    if not computes.any():
        return
    duration = table.numbers("duration")
    top = int(np.argmax(np.bincount(code[computes], duration[computes], len(names))))
    mine = np.flatnonzero(code == top)
    own, whole = _kernel_rules_by_piece(table.numbers("start"), duration, mine)
    low, high = bounds(own, whole)
    if high < DOMINATES or own.sum() < COUNTS * seen_ns:
        return
    if low > DOMINATES:
        yield _claim(spans, table, mine, (low, high))
        return
    why = f"{low:.0%} to {high:.0%} of the kernels' time where {DOMINATES:.0%} counts"
    yield Undecided(_SUBJECT, why)


def _claim(spans: Spans, table: Table, mine: Int64s, share: tuple[float, float]) -> Claim:
    """Return the claim on the kernels of one name."""
    code, names = table.texts("kernel")
    rank, start, duration = (table.numbers(name) for name in ("rank", "start", "duration"))
    name, effect, whole = names[code[mine[0]]], int(duration[mine].sum()), int(duration.sum())
    longest = int(mine[np.argmax(duration[mine])])
    place = (int(rank[longest]), int(start[longest]), int(start[longest] + duration[longest]))
    low, high = share
    return Claim(
        f"one kernel takes {effect / whole:.0%} of the kernels' time: {_kernel_rules_short(name)}",
        *(effect, int(low * whole), int(high * whole)),
        HIGH if low > (1 + DOMINATES) / 2 else MEDIUM,
        "Nsight Compute on its longest launch; a matrix product: its dtype, and sizes in multiples "
        "of 64; else fuse it with its neighbours",
        "it is at a limit of the device already, of FLOP/s or of memory bandwidth",
        f"{len(mine):,} of {len(code):,} kernels",
        f"select * from kernels where kernel = {quoted(name)} order by duration_ns desc",
        place_at(spans, *place),
        "rlprof show RUN kernels",
    )


def _kernel_rules_short(name: str) -> str:
    """Return a name without what templates add beyond a line."""
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"


def _kernel_rules_by_piece(
    start: Int64s, duration: Int64s, mine: Int64s
) -> tuple[Float64s, Float64s]:
    """Return the time of some kernels, and of all, in stretches with as many kernels each."""
    piece = np.empty(len(start), np.int64)
    piece[np.argsort(start, kind="stable")] = np.arange(len(start)) * _PIECES // len(start)
    own: Float64s = np.bincount(piece[mine], duration[mine], _PIECES).astype(np.float64)
    whole: Float64s = np.bincount(piece, duration, _PIECES).astype(np.float64)
    return own, whole
