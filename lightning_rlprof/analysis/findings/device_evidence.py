"""Evidence from devices: idle time, a kernel that dominates, and small collectives."""

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.communication.collectives import communication
from lightning_rlprof.analysis.device.timeline import (
    HOST_BOUND,
    NEVER,
    UNATTRIBUTED,
    Lane,
    LaneWork,
    grid_of,
    idle_causes,
)
from lightning_rlprof.analysis.device.utilization import overlap_of
from lightning_rlprof.analysis.device.work import NO_REPLAY
from lightning_rlprof.analysis.findings.finding import (
    FEWEST_KERNELS,
    KERNELS_LOST,
    MEDIUM,
    PARTS,
    Finding,
    NotChecked,
    Place,
    Results,
    Row,
    RunData,
    judge,
    place_at,
    quoted,
    rows_of,
    share_interval,
)
from lightning_rlprof.analysis.findings.rules import (
    DOMINANT_KERNEL,
    LONG_GAPS,
    SHORT_GAPS,
    SMALL_COLLECTIVES,
)
from lightning_rlprof.analysis.steps.step_selection import capture_slowdown
from lightning_rlprof.analysis.steps.time_categories import Category, kernel_categories
from lightning_rlprof.tables.arrays import UNKNOWN, Float64s, Int64s
from lightning_rlprof.tables.spans import Spans

SHORT_NS = 100_000
"""Gaps up to here are the cost of launching; in longer ones the host did something else."""

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
        parts: That time, idle time without a known cause, and observed time; shape (3, parts).
        short_ns: Sum of the short gaps.
        gaps: How many short gaps there are.
        longest: The longest gap: (ns, rank, start, end).
    """

    parts: Float64s
    short_ns: int
    gaps: int
    longest: tuple[int, int, int, int]


class HostBound(NamedTuple):
    """Idle time before work that the host launched late, on all devices.

    Attributes:
        late_ns: That time.
        observed_ns: Time in which devices were profiled.
        low: Lower bound of its share: the slowdown that the profiler causes is subtracted.
        high: Upper bound: idle time without a known cause is added.
        short_ns: Sum of the short gaps.
        gaps: How many short gaps there are.
        longest: The longest gap: (ns, rank, start, end).
        slowdown: How much longer captured steps take; None if unknown.
    """

    late_ns: int
    observed_ns: int
    low: float
    high: float
    short_ns: int
    gaps: int
    longest: tuple[int, int, int, int]
    slowdown: float | None


def host_bound(run: RunData) -> HostBound | NotChecked | None:
    """Return how long devices idled until the host launched work; None without devices."""
    lanes = [lane for lane in run.devices.lanes if len(lane.profiled[0])]
    if not lanes:
        return None
    fewest = min(len(lane.work.start_ns) for lane in lanes)
    if fewest < FEWEST_KERNELS:
        return NotChecked(SHORT_GAPS.name, f"needs {FEWEST_KERNELS} kernels, has {fewest}")
    waits = [_host_wait(lane) for lane in lanes]
    late, unknown, whole = np.sum([each.parts for each in waits], axis=0)
    slower = capture_slowdown(run.spans)
    low, high = share_interval(late, whole, late + unknown)
    low = max(0.0, low - (slower / (1 + slower) if slower is not None and slower > 0 else 0.0))
    short_ns, gaps = sum(each.short_ns for each in waits), sum(each.gaps for each in waits)
    longest = max(each.longest for each in waits)
    return HostBound(int(late.sum()), int(whole.sum()), low, high, short_ns, gaps, longest, slower)


def device_idle(run: RunData) -> Results:
    """Report devices that idle until the host launches work; nothing without recorded devices.

    Many short gaps are the cost of launching. A few long ones mean that the host did something
    else. The slowdown that the profiler causes is subtracted from the lower bound.
    """
    found = host_bound(run)
    if found is None:
        return []
    if isinstance(found, NotChecked):
        return [found]
    decision = judge(SHORT_GAPS, found.low, found.high)
    if decision is None:
        return []
    if isinstance(decision, NotChecked):
        return [decision]
    if run.launches is not None and run.launches.lossy:
        return [NotChecked(SHORT_GAPS.name, KERNELS_LOST)]
    cost, observed = found.late_ns, found.observed_ns
    longest_ns, rank, start, end = found.longest
    if 2 * found.short_ns > cost:
        work = _work_query(run.spans)
        rule, query = SHORT_GAPS, " ".join(_GAPS.format(work=work, short=SHORT_NS).split())
        detail = f"{found.gaps:,} gaps up to {SHORT_NS // 1000} µs before late launches"
    else:
        rule, query = LONG_GAPS, _gap_query(run.spans, rank, start, end)
        detail = f"the longest gap takes {longest_ns / 1e6:.3g} ms"
    finding = Finding(
        rule,
        rule.title,
        cost,
        int(found.low * observed),
        int(found.high * observed),
        MEDIUM if found.slowdown is None else decision,
        f"{cost / observed:.0%} of the captured time; {detail}",
        query,
        place_at(run.spans, rank, start, end),
    )
    return [finding]


def _host_wait(lane: Lane) -> _HostWait:
    """Measure when a device waited for its host, with the definitions of `idle`."""
    work, grid = lane.work, grid_of(lane)
    start, end, cause = idle_causes(lane)
    unknown = work.starting_at(end)[1] > end
    late = np.where(cause == HOST_BOUND, end - start, 0)
    cuts = work.start_ns[np.arange(1, PARTS) * len(work.start_ns) // PARTS]
    longest = int(np.argmax(late)) if len(late) else 0
    times = (int(start[longest]), int(end[longest])) if len(late) else (0, 0)
    short = _short_gaps(work)
    parts = [
        _by_part(cuts, start, late),
        _by_part(cuts, start, np.where(unknown & (cause == UNATTRIBUTED), end - start, 0)),
        _by_part(cuts, grid.times[:-1], np.diff(grid.times) * grid.profiled),
    ]
    longest_gap = (int(late.max(initial=0)), lane.rank, *times)
    return _HostWait(np.array(parts), int(short.sum()), len(short), longest_gap)


def _by_part(cuts: Int64s, times: Int64s, ns: Int64s) -> Float64s:
    """Sum lengths in each part; cuts and times are ascending."""
    parts = np.split(ns, np.searchsorted(times, cuts))
    return np.array([part.sum() for part in parts], np.float64)


def _short_gaps(work: LaneWork) -> Int64s:
    """Return the short gaps before work that was launched during the gap; same as `_GAPS`."""
    free = np.maximum.accumulate(work.end_ns)[:-1]
    gap, launch = work.start_ns[1:] - free, work.launch_ns[1:]
    keep = (gap > 0) & (gap <= SHORT_NS) & (launch > free) & (launch < NEVER)
    keep &= work.replay[1:] == NO_REPLAY
    found: Int64s = gap[keep]
    return found


def _gap_query(spans: Spans, rank: int, from_ns: int, to_ns: int) -> str:
    """Return the SELECT of the work that ended when a gap began, and began when it ended."""
    where = f"rank = {rank} and (start_ns + duration_ns = {from_ns} or start_ns = {to_ns})"
    return f"select * from ({_work_query(spans)}) where {where} order by start_ns"


def _work_query(spans: Spans) -> str:
    """Return the SELECT of kernels and copies; copies lack some columns of kernels."""
    selects = []
    for name in ("kernels", "memcpy"):
        if (table := spans.try_table(name, [])) is not None:
            has_graph = any(column.name == "graph" for column in table.columns)
            selects.append(f"select *{'' if has_graph else ', null as graph'} from {name}")
    return " union all by name ".join(selects)


_LEAST_SHARE = 0.05  # of the observed time: a device that does next to nothing is not reported


def dominant_kernel(run: RunData) -> Results:
    """Report the compute kernel with the most time, if it dominates; nothing without kernels."""
    table = run.spans.try_table("kernels", [])
    if table is None or not len(table.rows):
        return []
    code, names = table.texts("kernel")
    if len(code) < FEWEST_KERNELS:
        return [
            NotChecked(DOMINANT_KERNEL.name, f"needs {FEWEST_KERNELS} kernels, has {len(code)}")
        ]
    is_compute = np.append(kernel_categories(names), Category.CUSTOM)[code] == Category.COMPUTE
    if not is_compute.any():
        return []
    rank, start, duration = (table.numbers(name) for name in ("rank", "start", "duration"))
    top = int(np.argmax(np.bincount(code[is_compute], duration[is_compute], len(names))))
    rows = np.flatnonzero(code == top)
    part = np.empty(len(start), np.int64)  # parts have equally many kernels
    part[np.argsort(start, kind="stable")] = np.arange(len(start)) * PARTS // len(start)
    own = np.bincount(part[rows], duration[rows], PARTS).astype(np.float64)
    if own.sum() < _LEAST_SHARE * run.observed_ns:
        return []
    whole_by_part = np.bincount(part, duration, PARTS).astype(np.float64)
    low, high = share_interval(own, whole_by_part)
    decision = judge(DOMINANT_KERNEL, low, high)
    if decision is None:
        return []
    if isinstance(decision, NotChecked):
        return [decision]
    name, cost, whole = names[top], int(duration[rows].sum()), int(duration.sum())
    longest = int(rows[np.argmax(duration[rows])])
    from_ns = int(start[longest])
    finding = Finding(
        DOMINANT_KERNEL,
        DOMINANT_KERNEL.title.format(share=cost / whole, kernel=name),
        cost,
        int(low * whole),
        int(high * whole),
        decision,
        f"{len(rows):,} of {len(code):,} kernels",
        f"select * from kernels where name = {quoted(name)} order by duration_ns desc",
        place_at(run.spans, int(rank[longest]), from_ns, from_ns + int(duration[longest])),
    )
    return [finding]


LARGER, FASTER = 8, 4
"""A collective is small if another of its group is this much larger, and reaches this bandwidth."""

SMALL_BYTES = 2**20
"""Collectives of this size and more are never small."""

FEWEST_COLLECTIVES = 20
"""Matched collectives needed to check an operation."""

_LEAST_MATCHED = 0.9  # share of the calls; below, wait and transfer are unknown
_KEYS = ("operation", "group", "stage")


def small_collectives(run: RunData) -> Results:
    """Report the exposed time of small collectives; nothing without group and size of any."""
    if "collectives" not in run.spans.tables:
        return []
    rows = [row for row in rows_of(communication(run.spans)) if row["median bytes"]]
    if not rows or not run.observed_ns:
        return []
    exposed: dict[tuple[Any, Any], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows_of(overlap_of(run.spans, run.devices)):
        sums = exposed[row["operation"], row["group"]]
        sums[0], sums[1] = sums[0] + row["exposed"], sums[1] + row["communication"]
    least_ns = SMALL_COLLECTIVES.threshold * run.observed_ns
    found = [
        _small(run.spans, row, rows, exposed[row["operation"], row["group"]], least_ns)
        for row in rows
    ]
    return [each for each in found if each is not None]


def _small(
    spans: Spans,
    row: Row,
    rows: list[Row],
    exposed: list[int],
    least_ns: float,
) -> Finding | NotChecked | None:
    """Check one operation of a group in one stage."""
    what = f"{row['operation']} of group {row['group']} in {row['stage'] or 'no stage'}"
    if row["total"] < least_ns or row["group size"] == 1 or row["median bytes"] >= SMALL_BYTES:
        return None
    rule = f"{SMALL_COLLECTIVES.name}: {what}"
    if row["transfer"] is None or row["matched"] * row["ranks"] < _LEAST_MATCHED * row["count"]:
        return NotChecked(rule, "too few are matched across ranks to separate wait and transfer")
    if row["matched"] < FEWEST_COLLECTIVES:
        has = f"has {row['matched']}"
        return NotChecked(rule, f"needs {FEWEST_COLLECTIVES} matched collectives, {has}")
    larger = [
        each["algbw"]
        for each in rows
        if each["group"] == row["group"]
        and each["algbw"] is not None
        and each["matched"] >= FEWEST_COLLECTIVES
        and each["median bytes"] >= LARGER * row["median bytes"]
    ]
    if not larger or row["algbw"] is None:
        return NotChecked(rule, f"the group has no collective {LARGER}x as large to compare with")
    ratio = max(larger) / row["algbw"]
    low, cost, high = _exposed_transfer(row, *exposed)
    if ratio < FASTER or high < least_ns:
        return None
    if low < least_ns:
        return NotChecked(rule, "the exposed time may be waiting for peers")
    where = [
        f"{column} is null" if row[name] is None else f"{column} = {quoted(row[name])}"
        for name, column in zip(_KEYS, ("operation", "communicator", "stage"), strict=True)
    ]
    speed = f"1/{ratio:.0f} of the bandwidth of the group's larger ones"
    return Finding(
        SMALL_COLLECTIVES,
        SMALL_COLLECTIVES.title.format(what=f"{what} reaches {speed}"),
        *(cost, low, high, MEDIUM),
        f"{row['matched']:,} matched collectives of {row['ranks']} ranks, median "
        f"{row['median bytes']:,} bytes at {row['algbw']:.3g} GB/s",
        f"select * from collectives where {' and '.join(where)} order by rank, start_ns",
        _first_call(spans, row),
    )


def _exposed_transfer(row: Row, exposed: int, total_in_group: int) -> tuple[int, int, int]:
    """Return the exposed transfer of a row in nanoseconds: at least, likely, and at most.

    The exposed time is known per operation and group over all stages, and includes waiting.
    """
    total, transfer = int(row["total"]), min(int(row["transfer"] * row["count"]), int(row["total"]))
    low = max(0, exposed - (total_in_group - total) - (total - transfer))
    high = min(transfer, exposed)
    likely = round(transfer * exposed / total_in_group) if total_in_group else 0
    return low, min(high, max(low, likely)), high


def _first_call(spans: Spans, row: Row) -> Place:
    table = spans.table("collectives")
    keep = np.ones(len(table.rows), bool)
    for name in _KEYS:
        code, names = table.texts(name)
        keep &= code == (UNKNOWN if row[name] is None else names.index(row[name]))
    rank, start, took = (table.numbers(name)[keep] for name in ("rank", "start", "duration"))
    at = int(np.argmin(start))
    return place_at(spans, int(rank[at]), int(start[at]), int(start[at] + took[at]))
