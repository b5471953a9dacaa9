"""Quantities of devices: categories of captured time, host-bound idle, kernels, collectives."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.communication.collectives import read_calls
from lightning_rlprof.analysis.device.kernel_names import kernel_name, kernel_names
from lightning_rlprof.analysis.device.losses import LOST, NEVER, loss_texts
from lightning_rlprof.analysis.device.timeline import (
    HOST_BOUND,
    IDLE_CATEGORIES,
    UNATTRIBUTED,
    Lane,
    LaneWork,
    grid_of,
    idle_causes,
)
from lightning_rlprof.analysis.device.work import COMMUNICATION, COMPUTE, COPY, NO_REPLAY, work_kind
from lightning_rlprof.analysis.diagnosis.evidence import (
    FEWEST_KERNELS,
    FEWEST_STEPS,
    MEDIUM,
    PARTS,
    Evidence,
    Fact,
    Measured,
    Measurement,
    NoData,
    Place,
    Quantity,
    estimated_share,
    exact,
    place_at,
    place_of,
    quoted,
    share_interval,
    spans_query,
)
from lightning_rlprof.analysis.diagnosis.step_quantities import (
    COLLECTIVE_WAIT,
    COMMUNICATION_SPANS,
    COPY_SPANS,
)
from lightning_rlprof.analysis.efficiency.peak_flops import recorded_device
from lightning_rlprof.analysis.ledger.ledger import OUTSIDE
from lightning_rlprof.analysis.sizing.speed import speeds
from lightning_rlprof.analysis.statistics.rank_tests import median_bounds
from lightning_rlprof.analysis.steps.step_selection import capture_slowdown, states
from lightning_rlprof.analysis.steps.time_categories import (
    Category,
    categories_of,
    kind_of,
)
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.intervals import NONE, enclosing
from lightning_rlprof.tables.spans import Spans

CAPTURE_ALL = "Capture the same steps on all ranks with torch.profiler (ranks: all)"
CAPTURE = "Capture a few steps with torch.profiler, npu_profiler or nsys"

UNVERIFIED = 0.2
"""Up to this share kernels prove nothing if lost ones cannot be detected.

A fifth of the kernels may be lost, and what they hid is then up to a fifth of the time.
"""

SHORT_NS = 100_000
"""Gaps up to here are the cost of launching; in longer ones the host did something else."""

LARGER, FASTER = 8, 4
"""A collective is small if another of its group is this much larger, and reaches this bandwidth."""

SMALL_BYTES = 2**20
"""Collectives of this size and more are never small."""

MIN_COLLECTIVES = 20
"""Matched collectives needed to check an operation."""

_MIN_OBSERVED_SHARE = 0.05  # A device that does less of the observed time is not reported.
_MIN_MATCHED_SHARE = 0.9  # If fewer of the calls match, wait and transfer are unknown.
_MAX_SPANS_SHOWN = 3
_FUSABLE = ("elementwise", "reduction", "data movement")
_KEYS = ("operation", "group", "stage")


def _check_kernels(run: Evidence, how: str = CAPTURE) -> None:
    """Raise `NoData` if kernels do not show shares of time: there are none, or too few."""
    if not run.devices.lanes:
        raise NoData("No profiler recorded devices", how)
    fewest = min(len(lane.work.start_ns) for lane in run.devices.lanes)
    NoData.unless(fewest, FEWEST_KERNELS, "kernels per device", "Capture whole steps")


def _check_losses(run: Evidence) -> None:
    """Raise `NoData` if kernels were lost."""
    if large := [each for each in run.devices.losses if each.is_large]:
        raise NoData("; ".join(loss_texts(large)), "Capture fewer steps at a time")


def _verified(run: Evidence, found: Measured) -> Measured:
    """Return a share from kernels with a lower bound that lost kernels cannot raise."""
    if not run.sees_losses and found.low <= UNVERIFIED:
        return replace(found, low=0.0)
    return found


# ---- categories of the captured time


def device_share(category: Category, spans: Quantity | None = None, how: str = CAPTURE) -> Quantity:
    """Return the share of a category in the time in which devices were profiled.

    Args:
        category: One that kernels show.
        spans: What to measure instead if spans show it and no kernel does.
        how: How to record it.
    """

    def measure(run: Evidence) -> Measurement:
        source = run.accounts.sources.get(category)
        few_steps = np.count_nonzero(run.category_ns.any(axis=1)) < FEWEST_STEPS
        if source != "kernels" and not (source == "both" and few_steps):
            if spans is not None and source is not None:
                return _of_spans(run, category, spans)
            _check_kernels(run, how)
            _check_losses(run)
            raise NoData(f"No {category.text} was recorded", how)
        _check_kernels(run, how)
        _check_losses(run)
        ns = run.device_accounts.job_ns[:OUTSIDE].astype(np.float64)
        ns[:, Category.WARM_UP] = 0.0
        ns = ns[ns.any(axis=1)]
        query, place = _longest_work(run, category)
        found = _verified(run, estimated_share(ns[:, category], ns.sum(axis=1)))
        return run.of_captures(replace(found, query=query, place=place))

    return Quantity(f"{category.text}, of the captured time", "share", measure)


def _of_spans(run: Evidence, category: Category, spans: Quantity) -> Measurement:
    if category == Category.COMMUNICATION and _unmatched_spans(run):
        raise NoData("Too few collectives are matched across ranks", CAPTURE_ALL)
    return spans.measure(run)


def _longest_work(run: Evidence, category: Category) -> tuple[str, Place | None]:
    """Return the SELECT of a category's work, and the place of the longest of it.

    Of idle time it is the longest interval, and all work: what ran before and after it.
    """
    longest: tuple[int, int, int, int] | None = None
    for lane in run.devices.lanes:
        if category in IDLE_CATEGORIES and category != Category.COLLECTIVE_WAIT:
            start, end, cause = idle_causes(lane)
            own = cause == IDLE_CATEGORIES.index(category)
        else:
            start, end = lane.work.start_ns, lane.work.end_ns
            own = lane.work.kind == (COPY if category == Category.MEMCPY else COMMUNICATION)
        if own.any():
            at = int(np.argmax(np.where(own, end - start, -1)))
            each = (int(end[at] - start[at]), lane.rank, int(start[at]), int(end[at]))
            longest = max(longest or each, each)
    place = None if longest is None else place_at(run.spans, *longest[1:])
    if category == Category.MEMCPY and run.spans.try_table("memcpy", []) is not None:
        return "select * from memcpy order by duration_ns desc", place
    if category in (Category.COMMUNICATION, Category.COLLECTIVE_WAIT):
        where = "where class = 'communication'"
        return f"select * from kernels {where} order by duration_ns desc", place
    return "select * from kernels order by rank, start_ns", place


def _unmatched(run: Evidence) -> Measurement:
    """Return of how many collectives the transfer is unknown, in a job that has other ranks."""
    heads = run.spans.headers.values()
    several = len(heads) != 1 or any(head.world_size > 1 or not head.config for head in heads)
    from_kernels = run.accounts.sources.get(Category.COMMUNICATION) in ("kernels", "both")
    alone = run.accounts.unknown_transfers if several and from_kernels else 0
    return exact(float(alone), facts=(Fact("collectives with unknown transfer", alone),))


def _unmatched_spans(run: Evidence) -> bool:
    """Return whether ranks lack collectives that others have: then waiting looks like transfer."""
    spans, accounts = run.spans, run.accounts
    if len(accounts.ranks) + len(accounts.silent) < 2:
        return False
    rows = np.flatnonzero((categories_of(spans.names) == Category.COMMUNICATION)[spans.name])
    width = int(spans.rank.max(initial=0)) + 1
    calls = (spans.step[rows] * len(spans.names) + spans.name[rows]) * width + spans.rank[rows]
    calls, ranks = np.unique(np.unique(calls) // width, return_counts=True)
    most = np.zeros(len(spans.names), np.int64)
    np.maximum.at(most, calls % len(spans.names), ranks)
    fewer = np.count_nonzero(ranks < most[calls % len(spans.names)])
    return bool(fewer > LOST * len(calls)) or accounts.unknown_transfers > 0


# ---- idle until the host launches


class _HostWait(NamedTuple):
    """Idle time of one device before work that the host launched late.

    Attributes:
        parts: That time, idle time without a known cause, and observed time; shape (3, parts).
        short: The short gaps.
        longest: The longest gap: (ns, rank, start, end).
    """

    parts: Float64s
    short: Int64s
    longest: tuple[int, int, int, int]


def _host_bound(run: Evidence) -> Measurement:
    """Return how long devices idled until the host launched work.

    The slowdown that the profiler causes is taken off the lower bound, idle time without a known
    cause is added to the upper one.
    """
    _check_kernels(run)
    lanes = [lane for lane in run.devices.lanes if len(lane.profiled[0])]
    waits = [_host_wait(lane) for lane in lanes]
    if not waits:
        _check_losses(run)
        raise NoData("No profiler recorded devices", CAPTURE)
    late, unknown, whole = np.sum([each.parts for each in waits], axis=0)
    if not whole.sum():
        raise NoData("All kernels ran in graph replays, where idle time is unknown", CAPTURE)
    slower = capture_slowdown(run.spans)
    low, high = share_interval(late, whole, late + unknown)
    low = max(0.0, low - (slower / (1 + slower) if slower is not None and slower > 0 else 0.0))
    if low > UNVERIFIED:
        _check_losses(run)  # What was lost may look like a late host.
    longest_ns, rank, start, end = max(each.longest for each in waits)
    where = f"rank = {rank} and (start_ns + duration_ns = {start} or start_ns = {end})"
    query = f"select * from ({_work_query(run.spans)}) where {where} order by start_ns"
    return run.of_captures(
        Measured(
            float(late.sum() / whole.sum()),
            low,
            high,
            facts=(Fact("longest gap", longest_ns / 1e6, "ms"),),
            query=query,
            place=place_at(run.spans, rank, start, end),
            confidence=MEDIUM if slower is None else "",
        )
    )


def _short_gaps_share(run: Evidence) -> Measurement:
    """Return the share of host-bound idle time that is in short gaps."""
    waits = [_host_wait(lane) for lane in run.devices.lanes if len(lane.profiled[0])]
    late = sum(float(each.parts[0].sum()) for each in waits)
    short = np.concatenate([np.zeros(0), *(each.short for each in waits)])
    fact = Fact(f"gaps up to {SHORT_NS // 1000} µs before late launches:", len(short))
    return exact(float(short.sum()) / late if late else 0.0, facts=(fact,))


def _host_wait(lane: Lane) -> _HostWait:
    """Measure when a device waited for its host, with the definitions of `idle`."""
    work, grid = lane.work, grid_of(lane)
    start, end, cause = idle_causes(lane)
    unknown = work.starting_at(end)[1] > end
    late = np.where(cause == HOST_BOUND, end - start, 0)
    cuts = work.start_ns[np.arange(1, PARTS) * len(work.start_ns) // PARTS]
    longest = int(np.argmax(late)) if len(late) else 0
    times = (int(start[longest]), int(end[longest])) if len(late) else (0, 0)
    parts = [
        _by_part(cuts, start, late),
        _by_part(cuts, start, np.where(unknown & (cause == UNATTRIBUTED), end - start, 0)),
        _by_part(cuts, grid.times[:-1], np.diff(grid.times) * grid.profiled),
    ]
    longest_gap = (int(late.max(initial=0)), lane.rank, *times)
    return _HostWait(np.array(parts), _short_gaps(work), longest_gap)


def _by_part(cuts: Int64s, times: Int64s, ns: Int64s) -> Float64s:
    """Sum lengths in each part; cuts and times are ascending."""
    parts = np.split(ns, np.searchsorted(times, cuts))
    return np.array([part.sum() for part in parts], np.float64)


def _short_gaps(work: LaneWork) -> Int64s:
    """Return the short gaps before work that was launched during the gap."""
    free = np.maximum.accumulate(work.end_ns)[:-1]
    gap, launch = work.start_ns[1:] - free, work.launch_ns[1:]
    keep = (gap > 0) & (gap <= SHORT_NS) & (launch > free) & (launch < NEVER)
    keep &= work.replay[1:] == NO_REPLAY
    found: Int64s = gap[keep]
    return found


def _work_query(spans: Spans) -> str:
    """Return the SELECT of kernels and copies; copies lack some columns of kernels."""
    tables = [name for name in ("kernels", "memcpy") if spans.try_table(name, []) is not None]
    return " union all by name ".join(f"select * from {name}" for name in tables)


# ---- kernels


class _Kernels(NamedTuple):
    """Kernels by start; ``code`` is that of their name."""

    names: Sequence[str]
    code: Int64s
    is_compute: Mask
    rank: Int64s
    start: Int64s
    duration: Int64s


def _kernels(run: Evidence) -> _Kernels:
    """Return the kernels of a run; raises `NoData` without any."""
    table = run.spans.try_table("kernels", [])
    if table is None or not len(table.rows):
        raise NoData("No profiler recorded kernels", CAPTURE)
    code, names = table.texts("kernel")
    is_compute = np.array([*(work_kind(name) == COMPUTE for name in names), False])[code]
    columns = [code, is_compute, *map(table.numbers, ("rank", "start", "duration"))]
    order = np.argsort(table.numbers("start"), kind="stable")
    return _Kernels(names, *(column[order] for column in columns))


def _dominant_kernel(run: Evidence) -> Measurement:
    """Return the share of kernel time of the compute kernel with the most time."""
    names, code, is_compute, rank, start, duration = _kernels(run)
    NoData.unless(len(code), FEWEST_KERNELS, "kernels", "Capture whole steps")
    if not is_compute.any():
        return exact(0.0)
    top = int(np.argmax(np.bincount(code[is_compute], duration[is_compute], len(names))))
    own = np.where(code == top, duration, 0).astype(np.float64)
    if own.sum() < _MIN_OBSERVED_SHARE * run.observed_ns:
        return exact(0.0)
    found, longest = _by_count(own, duration.astype(np.float64)), int(np.argmax(own))
    from_ns = int(start[longest])
    return replace(
        found,
        lost_ns=float(own.sum()),
        facts=(
            Fact("kernel", kernel_names(names)[top].short, "text"),
            Fact("of kernel time", found.value, "share"),
            Fact("launches", int(np.count_nonzero(code == top))),
        ),
        query=f"select * from kernels where name = {quoted(names[top])} order by duration_ns desc",
        place=place_at(run.spans, int(rank[longest]), from_ns, from_ns + int(duration[longest])),
    )


def _fusable(run: Evidence) -> Measurement:
    """Return the share of compute time in kernels that a compiler can fuse with others."""
    kernels = _kernels(run)
    count = int(np.count_nonzero(kernels.is_compute))
    NoData.unless(count, FEWEST_KERNELS, "compute kernels", CAPTURE)
    matches = (kernel_name(name).kind in _FUSABLE for name in kernels.names)
    own = np.array([*matches, False])[kernels.code]
    took = np.where(kernels.is_compute, kernels.duration, 0).astype(np.float64)
    return _by_count(np.where(own, took, 0.0), took)


def _by_count(part: Float64s, whole: Float64s) -> Measured:
    """Return a share with its interval, by parts with equally many entries."""
    at = np.arange(len(part)) * PARTS // len(part)
    return estimated_share(*(np.bincount(at, each, PARTS).astype(float) for each in (part, whole)))


def _rollout_graphs(run: Evidence) -> Measurement:
    """Return the share of the rollout's kernels that ran in graph replays."""
    if run.devices.work.hidden_in_graphs:
        return exact(1.0)
    names = [*(standard_stage(name) == "actor_generate" for name in run.devices.stages), False]
    inside = np.array(names, dtype=bool)
    own = [lane.work.replay[inside[lane.work.stage]] for lane in run.devices.lanes]
    replay = np.concatenate([np.zeros(0, np.int64), *own])
    NoData.unless(len(replay), FEWEST_KERNELS, "kernels of the rollout", CAPTURE)
    return _by_count((replay != NO_REPLAY).astype(np.float64), np.ones(len(replay)))


# ---- FLOPs of training


def _training_mfu(run: Evidence) -> Measurement:
    """Return the MFU of training by counted FLOPs, with an interval over steps.

    Only spans that counted ``flops``, in complete steps and training stages: decoding is limited by
    memory, so its MFU is always low. An MFU above 100% means wrong inputs.
    """
    how = "Count flops=... in the update, or give the model: model: config.json"
    spans = run.spans
    rows, flops = _training_flops(spans)
    devices = {rank: recorded_device(head) for rank, head in spans.headers.items()}
    peaks = {rank: device.tflops if device else 0.0 for rank, device in devices.items()}
    peak = np.array([peaks.get(rank, 0.0) for rank in spans.rank[rows].tolist()])  # TFLOP/s.
    rows, flops, peak = rows[peak > 0], flops[peak > 0], peak[peak > 0]
    if not len(rows):
        raise NoData("FLOPs of the update, or the device's peak, are unknown", how)
    steps, place = np.unique(spans.step[rows], return_inverse=True)
    NoData.unless(len(steps), FEWEST_STEPS, "steps with counted FLOPs")
    took = spans.took_ns(rows).astype(np.float64)
    used, possible = flops / 1_000, took * peak  # Thousand FLOPs.
    if (used > possible).any():
        raise NoData("Training MFU is above 100%, see data_quality", how)
    by_step = [np.bincount(place, each).astype(np.float64) for each in (used, possible)]
    low, high = share_interval(*by_step)
    mfu = float(used.sum() / possible.sum())
    rows = rows[np.argsort(used / possible)]
    names = ", ".join(sorted({spans.names[code] for code in spans.name[rows].tolist()}))
    return Measured(
        mfu,
        low,
        high,
        lost_ns=float(took.sum()) * (1 - mfu),
        facts=(
            Fact("MFU", mfu, "share", low, high),
            Fact("stages", names, "text"),
        ),
        query=spans_query(spans, rows[:_MAX_SPANS_SHOWN].tolist()),
        place=place_of(spans, rows),
    )


def _slow_stages(run: Evidence) -> Measurement:
    """Return each stage whose time is known by what it needs at worst.

    The time above that is lost.
    """
    found = run.spans.once("speeds", speeds, ("clocks",))
    unknown = [each for each in found if each.verdict == "unknown"]
    judged = [each for each in found if each.low is not None and each.high]
    if unknown and not judged:
        needs = dict.fromkeys(each.needs for each in unknown)
        raise NoData("How fast stages may be is unknown", f"Needed: {'; '.join(needs)}")
    accounts = run.spans.rows(kind="step")
    steps = len(np.unique(run.spans.step[accounts])) * len(np.unique(run.spans.rank[accounts]))
    return tuple(
        exact(
            each.seconds / (each.high or 1.0),
            lost_ns=max(each.seconds - (each.high or 0.0), 0.0) * 1e9 * steps,
            facts=(
                Fact("stage", each.stage, "text"),
                Fact("takes", f"{each.seconds:.3g} s a step, attainable are {each.bounds}", "text"),
                Fact("cause:", each.cause, "text"),
                *([Fact("to know better:", each.needs, "text")] if each.missing else []),
            ),
        )
        for each in judged
    )


def _training_flops(spans: Spans) -> tuple[Int64s, Float64s]:
    """Return the training spans of complete steps that counted FLOPs, and how many."""
    rows, flops = spans.amounts("flops")
    trains = np.array([kind_of(name) == "training" for name in spans.names], dtype=bool)
    keep = trains[spans.name[rows]] & (flops > 0) & (spans.took_ns(rows) > 0)
    keep &= spans.kind[rows] == KINDS.index("stage")  # In validations they are regions.
    steps = spans.rows(kind="step")
    complete = np.unique(spans.step[steps[states(spans, steps) == 0]])
    keep &= np.isin(spans.step[rows], complete)
    rows, flops = rows[keep], flops[keep]
    thread, start, end = spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows]
    order = np.lexsort((spans.id[rows], -end, start, thread))
    # Of spans inside one another, the outer one has counted the FLOPs of both.
    outer = order[enclosing(thread[order], start[order], end[order]) == NONE]
    return rows[outer], flops[outer]


# ---- collectives


def _exposed_operations(text: str, *operations: str) -> Quantity:
    """Return the exposed time of some collectives, of the time in which devices were profiled."""

    def measure(run: Evidence) -> Measurement:
        _check_kernels(run, CAPTURE_ALL)
        _check_losses(run)
        rows = [row for row in run.collectives if row["operation"] in operations]
        exposed = sum(row["exposed"] or 0 for row in rows)
        return _verified(run, exact(exposed / max(run.observed_ns, 1)))

    return Quantity(f"{text}, of the captured time", "share", measure)


def _message_bytes(run: Evidence) -> Measurement:
    """Return the median size of gradient reductions, with its interval."""
    calls = read_calls(run.spans, [])
    if calls is None:
        raise NoData("No profiler recorded collectives", CAPTURE_ALL)
    code, names = calls.operation
    reduces = ("all_reduce", "reduce_scatter")
    wanted = np.array([*(name in reduces for name in names), False], dtype=bool)[code]
    sizes = calls.bytes[wanted & (calls.bytes >= 0)]
    what = "gradient reductions have a size"
    NoData.unless(len(sizes), MIN_COLLECTIVES, what, CAPTURE_ALL)
    bounds = median_bounds(sizes.astype(np.float64))
    return Measured(float(np.median(sizes)), *((0.0, np.inf) if bounds is None else bounds))


def _small_collectives(run: Evidence) -> Measurement:
    """Return the exposed time of each kind of small collective, of the captured time."""
    if "collectives" not in run.spans.tables or not run.observed_ns:
        raise NoData("No profiler recorded collectives", CAPTURE_ALL)
    rows = [row for row in run.collectives if row["median bytes"]]
    found, reasons = [], []
    for row in rows:
        try:
            own = _small(run, row, rows)
        except NoData as reason:
            reasons.append(reason)
        else:
            found += [own] if own is not None else []
    if reasons and not found:
        raise reasons[0]
    return tuple(found)


def _small(run: Evidence, row: dict[str, Any], rows: list[dict[str, Any]]) -> Measured | None:
    """Check one operation of a group in one stage; None if it is not small or not slow."""
    what = f"{row['operation']} of group {row['group']} in {row['stage'] or 'no stage'}"
    if row["group size"] == 1 or row["median bytes"] >= SMALL_BYTES:
        return None
    if row["transfer"] is None or row["matched"] * row["ranks"] < _MIN_MATCHED_SHARE * row["count"]:
        why = f"Transfer and wait of {what} can't be separated ({row['doubt']})"
        raise NoData(why, CAPTURE_ALL)
    NoData.unless(row["matched"], MIN_COLLECTIVES, f"matched {what}", CAPTURE)
    larger = [
        each["algbw"]
        for each in rows
        if each["group"] == row["group"]
        and each["algbw"] is not None
        and each["matched"] >= MIN_COLLECTIVES
        and each["median bytes"] >= LARGER * row["median bytes"]
    ]
    if not larger or row["algbw"] is None:
        raise NoData(f"The group of {what} has no collective {LARGER}x as large to compare with")
    ratio = max(larger) / row["algbw"]
    if ratio < FASTER:
        return None
    where = [
        f"{column} is null" if row[name] is None else f"{column} = {quoted(row[name])}"
        for name, column in zip(_KEYS, ("operation", "communicator", "stage"), strict=True)
    ]
    facts = (
        Fact("collective", what, "text"),
        Fact("bandwidth of larger ones", ratio, "ratio"),
        Fact("matched", row["matched"]),
        Fact("median bytes", row["median bytes"]),
        Fact("GB/s", row["algbw"], "number"),
    )
    least, share, most = (each / run.observed_ns for each in _exposed_transfer(row))
    query = f"select * from collectives where {' and '.join(where)} order by rank, start_ns"
    found = Measured(share, least, most, facts=facts, query=query, confidence=MEDIUM)
    return run.of_captures(found)


def _exposed_transfer(row: dict[str, Any]) -> tuple[int, int, int]:
    """Return the exposed transfer of a row in nanoseconds: at least, likely, and at most.

    The exposed time includes waiting.
    """
    total, exposed = row["total"], row["exposed"] or 0
    transfer = min(int(row["transfer"] * row["count"]), total)
    low, high = max(0, exposed - (total - transfer)), min(transfer, exposed)
    whole = exposed + (row["overlapped"] or 0)
    likely = round(transfer * exposed / whole) if whole else 0
    return low, min(high, max(low, likely)), high


# ---- kinds of devices


def _has_accelerator(run: Evidence) -> Measurement:
    """Return whether a rank has an accelerator: what concerns one is not said of a run on CPUs."""
    heads = run.spans.headers.values()
    named = any(head.device.partition(":")[0].lower() != "cpu" for head in heads)
    return exact(float(named or bool(run.devices.lanes)))


def _on_npu(run: Evidence) -> Measurement:
    heads = [(head.device.lower(), head.hardware.lower()) for head in run.spans.headers.values()]
    return exact(float(any(kind.startswith("npu") or "ascend" in name for kind, name in heads)))


HOST_BOUND_IDLE = Quantity("host-bound idle, of the captured time", "share", _host_bound)
SHORT_GAPS = Quantity("short gaps, of host-bound idle", "share", _short_gaps_share)
DOMINANT_KERNEL = Quantity("the largest kernel, of kernel time", "share", _dominant_kernel)
POINTWISE = Quantity(
    "elementwise, reduction and data movement kernels, of the time of compute kernels",
    "share",
    _fusable,
)
ROLLOUT_GRAPHS = Quantity("graph replays in the rollout, of its kernels", "share", _rollout_graphs)
SLOW_STAGES = Quantity("seconds of a stage, of what it needs at worst", "ratio", _slow_stages)
MFU = Quantity("training MFU", "share", _training_mfu)
UNMATCHED = Quantity("collectives with unknown transfer", "count", _unmatched)
ALL_GATHER = _exposed_operations("exposed all-gather", "all_gather")
REDUCTION = _exposed_operations("exposed gradient reduction", "all_reduce", "reduce_scatter")
ALL_TO_ALL = _exposed_operations("exposed all-to-all", "all_to_all")
POINT_TO_POINT = _exposed_operations("exposed send and receive", "send", "recv", "send_recv")
MESSAGE_BYTES = Quantity("median size of a gradient reduction", "bytes", _message_bytes)
SMALL_COLLECTIVES = Quantity(
    "exposed time of small collectives, of the captured time", "share", _small_collectives
)
COMMUNICATION_SHARE = device_share(Category.COMMUNICATION, COMMUNICATION_SPANS, CAPTURE_ALL)
MEMCPY = device_share(Category.MEMCPY, COPY_SPANS)
WAIT_FOR_RANKS = device_share(Category.COLLECTIVE_WAIT, COLLECTIVE_WAIT, CAPTURE_ALL)
LAUNCH_LATENCY = device_share(Category.LAUNCH_LATENCY)
UNATTRIBUTED_IDLE = device_share(Category.UNATTRIBUTED_IDLE)
HAS_ACCELERATOR = Quantity("the run has an accelerator", "yes/no", _has_accelerator)
ON_NPU = Quantity("the devices are Ascend NPUs", "yes/no", _on_npu)
