"""Evidence from devices: idle time that the host causes, and a kernel that dominates."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.timeline import NEVER, Lane, LaneWork, grid_of
from lightning_rlprof.analysis.device.wait_chain import LATENCY_NS
from lightning_rlprof.analysis.findings.finding import (
    KERNELS_LOST,
    MEDIUM,
    Finding,
    NotChecked,
    RunData,
    judge,
    place_at,
    quoted,
    share_interval,
)
from lightning_rlprof.analysis.findings.rules import DOMINANT_KERNEL, LONG_GAPS, SHORT_GAPS
from lightning_rlprof.analysis.step_selection import capture_slowdown
from lightning_rlprof.analysis.time_categories import Category, kernel_categories
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans

SHORT_NS = 100_000
"""Gaps up to here are the cost of launching; in longer ones the host did something else."""

FEWEST_KERNELS = 200
"""Kernels and copies needed to check these rules."""

_PARTS = 20  # parts of a device's time, with equally many kernels each, for the bootstrap
_TIMES = ("start", "duration", "launch")
_GAPS = """
with work as ({work}), free as (
  select *, max(start_ns + duration_ns) over (partition by rank, device
    order by start_ns, launch_ns nulls last
    rows between unbounded preceding and 1 preceding) as idle_ns from work where duration_ns > 0)
select rank, device, count(*) as gaps, sum(start_ns - idle_ns) as gap_ns from free
where start_ns > idle_ns and start_ns - idle_ns <= {short} and launch_ns > idle_ns
and graph is null group by rank, device order by rank, device"""


class _HostWait(NamedTuple):
    """Idle time of one device before work that the host launched late.

    Attributes:
        late: That time in each part.
        unknown: Idle time without a known cause in each part.
        whole: Observed time in each part.
        short_ns: Sum of the short gaps.
        gaps: How many short gaps there are.
        longest: The longest gap: (ns, rank, start, end).
    """

    late: Float64s
    unknown: Float64s
    whole: Float64s
    short_ns: int
    gaps: int
    longest: tuple[int, int, int, int]


def device_idle(run: RunData) -> Iterator[Finding | NotChecked]:
    """Report devices that idle until the host launches work; nothing without recorded devices.

    Many short gaps are the cost of launching. A few long ones mean that the host did something
    else. The slowdown that the profiler causes is subtracted from the lower bound.
    """
    lanes = [lane for lane in run.devices.lanes if len(lane.profiled[0])]
    if not lanes:
        return
    fewest = min(len(lane.work.start_ns) for lane in lanes)
    if fewest < FEWEST_KERNELS:
        yield _too_few(SHORT_GAPS.name, fewest)
        return
    waits = [_host_wait(lane) for lane in lanes]
    late, unknown, whole = (
        np.sum([getattr(each, name) for each in waits], axis=0)
        for name in ("late", "unknown", "whole")
    )
    slower = capture_slowdown(run.spans)
    low, high = share_interval(late, whole, late + unknown)
    low = max(0.0, low - (slower / (1 + slower) if slower is not None and slower > 0 else 0.0))
    decision = judge(SHORT_GAPS, low, high)
    if decision is None:
        return
    if isinstance(decision, NotChecked):
        yield decision
    elif run.launches is not None and run.launches.lossy:
        yield NotChecked(SHORT_GAPS.name, KERNELS_LOST)
    else:
        confidence = MEDIUM if slower is None else decision
        yield _idle_finding(run.spans, waits, (low, high), confidence)


def _too_few(rule: str, kernels: int) -> NotChecked:
    return NotChecked(rule, f"needs {FEWEST_KERNELS} kernels, has {kernels}")


def _idle_finding(
    spans: Spans, waits: list[_HostWait], share: tuple[float, float], confidence: str
) -> Finding:
    cost, whole = (int(sum(getattr(w, n).sum() for w in waits)) for n in ("late", "whole"))
    short_ns, gaps = sum(each.short_ns for each in waits), sum(each.gaps for each in waits)
    longest_ns, rank, start, end = max(each.longest for each in waits)
    if 2 * short_ns > cost:
        rule, query = SHORT_GAPS, _short_gaps_query(spans)
        detail = f"{gaps:,} gaps up to {SHORT_NS // 1000} µs before late launches"
    else:
        rule, query = LONG_GAPS, _gap_query(spans, rank, start, end)
        detail = f"the longest gap takes {longest_ns / 1e6:.3g} ms"
    return Finding(
        rule,
        rule.title,
        cost,
        int(share[0] * whole),
        int(share[1] * whole),
        confidence,
        f"{cost / whole:.0%} of the captured time; {detail}",
        query,
        place_at(spans, rank, start, end),
    )


def _host_wait(lane: Lane) -> _HostWait:
    """Measure when a device waited for its host, with the definitions of `idle`."""
    work, grid = lane.work, grid_of(lane)
    start, end = grid.idle()
    launch = work.starting_at(end)[1]
    known, after = launch <= end, launch > start
    until = np.where(end - launch.clip(start, end) <= LATENCY_NS, end, launch.clip(start, end))
    late = np.where(known & after, until - start, 0)
    cuts = work.start_ns[np.arange(1, _PARTS) * len(work.start_ns) // _PARTS]
    longest = int(np.argmax(late)) if len(late) else 0
    times = (int(start[longest]), int(end[longest])) if len(late) else (0, 0)
    short = _short_gaps(work)
    return _HostWait(
        _by_part(cuts, start, late),
        _by_part(cuts, start, np.where(known, 0, end - start)),
        _by_part(cuts, grid.times[:-1], np.diff(grid.times) * grid.profiled),
        *(int(short.sum()), len(short)),
        (int(late.max(initial=0)), lane.rank, *times),
    )


def _by_part(cuts: Int64s, times: Int64s, ns: Int64s) -> Float64s:
    """Sum lengths in each part; cuts and times are ascending."""
    parts = np.split(ns, np.searchsorted(times, cuts))
    return np.array([part.sum() for part in parts], np.float64)


def _short_gaps(work: LaneWork) -> Int64s:
    """Return the short gaps before work that was launched during the gap; same as `_GAPS`."""
    free = np.maximum.accumulate(work.end_ns)[:-1]
    gap, launch, graph = work.start_ns[1:] - free, work.launch_ns[1:], work.graph[1:]
    keep = (gap > 0) & (gap <= SHORT_NS) & (launch > free) & (launch < NEVER) & (graph < 0)
    found: Int64s = gap[keep]
    return found


def _short_gaps_query(spans: Spans) -> str:
    work = _work_query(spans, ("rank", "device", "start", "duration", "launch", "graph"))
    return " ".join(_GAPS.format(work=work, short=SHORT_NS).split())


def _gap_query(spans: Spans, rank: int, from_ns: int, to_ns: int) -> str:
    """Return the SELECT of the work that ended when a gap began, and began when it ended."""
    columns = ("rank", "device", "stream", "kernel", "start", "duration", "launch")
    where = f"rank = {rank} and (start_ns + duration_ns = {from_ns} or start_ns = {to_ns})"
    return f"select * from ({_work_query(spans, columns)}) where {where} order by start_ns"


def _work_query(spans: Spans, names: Collection[str]) -> str:
    """Return the SELECT of kernels and copies, with null for columns that one of them lacks."""
    parts = []
    for name in ("kernels", "memcpy"):
        if (table := spans.try_table(name, [])) is not None:
            present = {column.name for column in table.columns}
            columns = ", ".join(_selected(each, present) for each in names)
            parts.append(f"select {columns} from {name}")
    return " union all ".join(parts)


def _selected(name: str, present: Collection[str]) -> str:
    """Return a column in SQL: times end in their unit, and a copy's kind is its name."""
    if name == "kernel" and name not in present:
        return "kind as kernel"
    column = f"{name}_ns" if name in _TIMES else name
    return column if name in present else f"null as {column}"


_LEAST_SHARE = 0.05  # of the observed time: a device that does next to nothing is not reported
_LONGEST_NAME = 80  # letters of a kernel's name in a title


def dominant_kernel(run: RunData) -> Iterator[Finding | NotChecked]:
    """Report the compute kernel with the most time, if it dominates; nothing without kernels."""
    table = run.spans.try_table("kernels", [])
    if table is None or not len(table.rows):
        return
    code, names = table.texts("kernel")
    if len(code) < FEWEST_KERNELS:
        yield _too_few(DOMINANT_KERNEL.name, len(code))
        return
    is_compute = np.append(kernel_categories(names), Category.CUSTOM)[code] == Category.COMPUTE
    if not is_compute.any():
        return
    rank, start, duration = (table.numbers(name) for name in ("rank", "start", "duration"))
    top = int(np.argmax(np.bincount(code[is_compute], duration[is_compute], len(names))))
    rows = np.flatnonzero(code == top)
    part = np.empty(len(start), np.int64)  # parts have equally many kernels
    part[np.argsort(start, kind="stable")] = np.arange(len(start)) * _PARTS // len(start)
    own = np.bincount(part[rows], duration[rows], _PARTS).astype(np.float64)
    if own.sum() < _LEAST_SHARE * run.observed_ns:
        return
    whole_by_part = np.bincount(part, duration, _PARTS).astype(np.float64)
    low, high = share_interval(own, whole_by_part)
    decision = judge(DOMINANT_KERNEL, low, high)
    if decision is None:
        return
    if isinstance(decision, NotChecked):
        yield decision
        return
    name, cost, whole = names[top], int(duration[rows].sum()), int(duration.sum())
    kernel = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
    longest = int(rows[np.argmax(duration[rows])])
    from_ns = int(start[longest])
    yield Finding(
        DOMINANT_KERNEL,
        DOMINANT_KERNEL.title.format(share=cost / whole, kernel=kernel),
        cost,
        int(low * whole),
        int(high * whole),
        decision,
        f"{len(rows):,} of {len(code):,} kernels",
        f"select * from kernels where kernel = {quoted(name)} order by duration_ns desc",
        place_at(run.spans, int(rank[longest]), from_ns, from_ns + int(duration[longest])),
    )
