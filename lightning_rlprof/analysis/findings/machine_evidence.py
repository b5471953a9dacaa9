"""Evidence from the machine: waiting for CPUs, short memory, throttled GPUs, garbage collection."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.device_counters import Samples, background_samples
from lightning_rlprof.analysis.findings.cpu_contention import (
    CPU_WAIT,
    CpuWaits,
    counted_in_steps,
)
from lightning_rlprof.analysis.findings.finding import (
    FEWEST_STEPS,
    MEDIUM,
    PARTS,
    Finding,
    NotChecked,
    Place,
    Results,
    Rule,
    RunData,
    judge,
    place_at,
    place_of,
    quoted,
    share_interval,
)
from lightning_rlprof.analysis.findings.rules import (
    CATEGORY_RULES,
    CPU_CONTENTION,
    CPU_QUOTA,
    HEAT,
    MEMORY_PRESSURE,
    NEIGHBORS,
    POWER,
    SLOWDOWN,
)
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.records.background_metrics import BACKGROUND_METRICS, GC_COUNT, GC_PAUSE
from lightning_rlprof.tables.arrays import Float64s
from lightning_rlprof.tables.spans import Spans

FEWEST_SAMPLES = 60
"""Samples of a metric needed, which is a minute of them."""

_NEIGHBORS_SHARE, _FULL = 0.25, 0.8  # of the machine: used by others; by all of its programs
_SWAPS = 1e6  # bytes per second


class _Share(NamedTuple):
    """Share of the time of one rank and device, with its interval, and where it is highest."""

    rank: int
    device: int
    mean: float
    low: float
    high: float
    place: Place
    seconds: float


class _Reported(NamedTuple):
    """A share that a rule reports, and with what confidence."""

    share: _Share
    confidence: str


def _shares(spans: Spans, samples: Samples, share: Float64s) -> list[_Share] | NotChecked:
    """Return the mean over time of a share per sample, by rank and device.

    Samples before the first step and after the last one do not count.

    Args:
        spans: The run.
        samples: One metric, by rank, device and time.
        share: Of each sample, between 0 and 1.

    Returns:
        Shares of those with enough samples; `NotChecked` without a rule's name if none has.
    """
    steps = spans.rows(kind="step")
    if len(steps):
        trains = samples.time >= spans.start_ns[steps].min()
        trains &= samples.time < spans.end_ns[steps].max()
        samples, share = samples.rows(trains), share[trains]
    lasting = np.append(np.diff(samples.time), 0)[: len(samples.time)]
    found, most = [], 0
    key = samples.rank * (int(samples.device.max(initial=0)) + 2) + samples.device
    for each in np.unique(key).tolist():
        own = np.flatnonzero(key == each)
        most = max(most, len(own))
        if len(own) < FEWEST_SAMPLES:
            continue
        weight = np.where(samples.duration[own] > 0, samples.duration[own], lasting[own])
        weight[-1] = max(samples.duration[own[-1]], 0)  # how long it lasted is not known
        part = share[own] * weight
        cuts = np.arange(PARTS) * len(own) // PARTS
        low, high = share_interval(
            np.add.reduceat(part, cuts), np.add.reduceat(weight, cuts).astype(np.float64)
        )
        at = int(own[np.argmax(share[own])])
        rank, start = int(samples.rank[at]), int(samples.time[at])
        end = start + int(max(samples.duration[at], 0))
        numbers = (float(part.sum() / max(weight.sum(), 1)), low, high)
        place = place_at(spans, rank, start, end)
        found.append(
            _Share(rank, int(samples.device[at]), *numbers, place, float(weight.sum()) / 1e9)
        )
    why = f"needs {FEWEST_SAMPLES} samples of background metrics, has {most}"
    return found or NotChecked("", why)


def _share_of(spans: Spans, metric: str) -> list[_Share] | NotChecked | None:
    """Return the shares of a metric in percent; None if it was not recorded."""
    samples = background_samples(spans, metric)
    return None if samples is None else _shares(spans, samples, samples.value / 100)


def _worst(rule: Rule, shares: list[_Share] | NotChecked) -> _Reported | NotChecked | None:
    """Return the highest share and its confidence if a rule reports it."""
    if isinstance(shares, NotChecked):
        return shares._replace(rule=rule.name)
    worst = max(shares, key=lambda each: each.low)
    decision = judge(rule, worst.low, worst.high)
    return _Reported(worst, decision) if isinstance(decision, str) else decision


def _query(*metrics: str) -> str:
    names = ", ".join(map(quoted, metrics))
    return f"select * from {BACKGROUND_METRICS} where name in ({names}) order by rank, time_ns"


# ---- CPUs


def cpu_contention(run: RunData) -> Results:
    """Report that training threads wait for a CPU, with its cause if background metrics show it.

    Without a wait, a quota that is used up is reported without a cost. Nothing if neither was
    recorded.
    """
    shares = _share_of(run.spans, "cpu_throttled_percent")
    quota = None if shares is None else _worst(CPU_QUOTA, shares)
    waits = _cpu_waits(run, run.cpu_waits)
    results: Results = [each for each in (quota, waits) if isinstance(each, NotChecked)]
    if isinstance(quota, _Reported):
        known = waits if isinstance(waits, Finding) else None
        results.append(_quota_finding(run.spans, *quota, known))
    elif isinstance(waits, Finding):
        results.append(_by_neighbors(run.spans, waits))
    return results


def _cpu_waits(run: RunData, waits: CpuWaits | None) -> Finding | NotChecked | None:
    if waits is None:
        return None
    counters = f"select rank, step, duration_ns, {CPU_WAIT} from spans where kind = 'step' "
    query = f"{counters}and {CPU_WAIT} is not null order by {CPU_WAIT} desc"
    return _lost_in_steps(run.spans, CPU_CONTENTION, waits, query)


def _lost_in_steps(
    spans: Spans, rule: Rule, lost: CpuWaits, query: str
) -> Finding | NotChecked | None:
    """Check the share of the step time that a counter says was lost."""
    if len(lost.steps) < FEWEST_STEPS:
        return NotChecked(rule.name, f"needs {FEWEST_STEPS} steps, has {len(lost.steps)}")
    own, whole = lost.ns.sum(axis=1).astype(np.float64), lost.wall_ns.astype(np.float64)
    low, high = share_interval(own, whole)
    decision = judge(rule, low, high)
    if not isinstance(decision, str):
        return decision
    longest = int(lost.steps[np.argmax(own)])
    rows = spans.rows(kind="step")
    return Finding(
        rule,
        rule.title,
        *(int(own.sum()), int(low * whole.sum()), int(high * whole.sum())),
        decision,
        f"{len(lost.steps)} steps, most of it in step {longest}",
        query,
        place_of(spans, rows[spans.step[rows] == longest]),
    )


def _quota_finding(
    spans: Spans,
    worst: _Share,
    confidence: str,
    waits: Finding | None,
) -> Finding:
    cores = background_samples(spans, "cpu_quota_cores")
    own = None if cores is None else cores.value[cores.rank == worst.rank]
    limit = f", {own[-1]:.3g} cores" if own is not None and len(own) else ""
    wait = "; the cost is the wait of training threads for a CPU" if waits else ""
    return Finding(
        CPU_QUOTA,
        CPU_QUOTA.title.format(share=worst.mean),
        *((waits.cost, waits.low, waits.high) if waits else (None, None, None)),
        MEDIUM if waits else confidence,
        f"host of rank {worst.rank}{limit}, 95% CI {100 * worst.low:.0f}–{worst.high:.0%} of the "
        f"periods in {worst.seconds:.0f} s{wait}",
        _query("cpu_throttled_percent", "cpu_quota_cores", "container_cpu_cores"),
        worst.place,
    )


def _by_neighbors(spans: Spans, waits: Finding) -> Finding:
    """Name programs outside of the container if they keep the CPUs busy."""
    host, own, count = (
        background_samples(spans, name)
        for name in ("host_cpu_cores", "container_cpu_cores", "host_cpu_count")
    )
    if host is None or own is None or count is None:
        return waits
    best = waits
    for rank in np.unique(host.rank).tolist():
        used, ours = (each.rows(each.rank == rank) for each in (host, own))
        cpus = count.value[count.rank == rank]
        common, at_host, at_own = np.intersect1d(used.time, ours.time, return_indices=True)
        if len(common) < FEWEST_SAMPLES or not len(cpus):
            continue
        used, others = used.rows(at_host), used.value[at_host] - ours.value[at_own]
        shares = _shares(spans, used, np.clip(others / cpus[-1], 0, 1))
        full = float((used.value * used.duration).sum() / used.duration.sum() / cpus[-1])
        if isinstance(shares, list) and shares[0].low > _NEIGHBORS_SHARE and full > _FULL:
            best = waits._replace(
                rule=NEIGHBORS,
                title=NEIGHBORS.title.format(share=shares[0].mean),
                evidence=f"{waits.evidence}; host of rank {rank}: {full:.0%} of {cpus[-1]:.0f} "
                f"CPUs in use, {shares[0].mean:.0%} by programs outside of this container",
            )
    return best


# ---- memory


def memory_pressure(run: RunData) -> Results:
    """Report that the host is short of memory: threads wait for it, or it swaps.

    It has no cost in time: what waits need not be a training thread. Nothing if neither was
    recorded.
    """
    spans, results = run.spans, list[Finding | NotChecked]()
    waits = _share_of(spans, "memory_full_pressure_percent")
    swapped = background_samples(spans, "swap_in_bytes_per_s")
    for what, shares in (
        ("all active threads wait for it in {:.0%} of the time", waits),
        (
            "it reads from swap in {:.0%} of the time",
            None
            if swapped is None
            else _shares(spans, swapped, (swapped.value > _SWAPS).astype(np.float64)),
        ),
    ):
        decision = None if shares is None else _worst(MEMORY_PRESSURE, shares)
        if isinstance(decision, _Reported):
            return [_memory_finding(spans, *decision, what)]
        if decision is not None and decision not in results:
            results.append(decision)
    return results


def _memory_finding(spans: Spans, worst: _Share, confidence: str, what: str) -> Finding:
    limits, used = (
        background_samples(spans, name)
        for name in ("container_memory_limit_bytes", "container_memory_bytes")
    )
    more = ""
    if limits is not None and used is not None and (used.rank == worst.rank).any():
        most = used.value[used.rank == worst.rank].max()
        limit = limits.value[limits.rank == worst.rank]
        if len(limit):
            more = f"; the container uses up to {most / limit[-1]:.0%} of its limit"
    return Finding(
        MEMORY_PRESSURE,
        MEMORY_PRESSURE.title.format(what=what.format(worst.mean)),
        *(None, None, None),
        confidence,
        f"host of rank {worst.rank}, 95% CI {100 * worst.low:.0f}–{worst.high:.0%} in "
        f"{worst.seconds:.0f} s{more}",
        _query("memory_full_pressure_percent", "swap_in_bytes_per_s", "container_memory_bytes"),
        worst.place,
    )


# ---- GPUs

_THROTTLED = {
    "device_thermal_throttled": HEAT,
    "device_power_throttled": POWER,
    "device_hardware_slowdown": SLOWDOWN,
}


def gpu_throttling(run: RunData) -> Results:
    """Report the device that loses most clock cycles to heat, to its power limit, to hardware.

    Lost are those between its clock and its highest one while it is throttled. A low clock alone is
    no evidence: an idle device has one. It has no cost in time: work that is limited by memory or
    by the host takes as long. Nothing if no clock was recorded.
    """
    spans = run.spans
    clock, highest = (
        background_samples(spans, name) for name in ("device_clock_mhz", "device_max_clock_mhz")
    )
    if clock is None or highest is None:
        return []
    results: Results = []
    most = {
        (rank, device): value
        for rank, device, value in zip(
            highest.rank.tolist(), highest.device.tolist(), highest.value.tolist(), strict=True
        )
    }
    for metric, rule in _THROTTLED.items():
        throttled = background_samples(spans, metric)
        if throttled is None:
            results.append(NotChecked(rule.name, "the driver does not tell why clocks are low"))
            continue
        found = _lost_cycles(spans, throttled, clock, most)
        decision = None if found is None else _worst(rule, found)
        if isinstance(decision, _Reported) and isinstance(found, list):
            results.append(_throttled_finding(spans, rule, metric, throttled, *decision, found))
        elif isinstance(decision, NotChecked) and decision not in results:
            results.append(decision)
    return list(dict.fromkeys(results))


def _lost_cycles(
    spans: Spans, throttled: Samples, clock: Samples, most: dict[tuple[int, int], float]
) -> list[_Share] | NotChecked | None:
    """Return the share of clock cycles that each device lost while it was throttled."""
    clocks = dict(
        zip(
            zip(clock.rank.tolist(), clock.device.tolist(), clock.time.tolist(), strict=True),
            clock.value.tolist(),
            strict=True,
        )
    )
    places = zip(
        throttled.rank.tolist(), throttled.device.tolist(), throttled.time.tolist(), strict=True
    )
    drop = np.array(
        [
            1 - clocks[place] / most[place[:2]]
            if place in clocks and most.get(place[:2])
            else np.nan
            for place in places
        ]
    )
    known = np.isfinite(drop)
    if not known.any():
        return None
    lost = np.clip(drop[known], 0, 1) * (throttled.value[known] > 0)
    return _shares(spans, throttled.rows(known), lost)


def _throttled_finding(
    spans: Spans,
    rule: Rule,
    metric: str,
    throttled: Samples,
    worst: _Share,
    confidence: str,
    found: list[_Share],
) -> Finding:
    own = throttled.rows((throttled.rank == worst.rank) & (throttled.device == worst.device))
    whole = _shares(spans, own, (own.value > 0).astype(np.float64))
    share = whole[0].mean if isinstance(whole, list) else 1.0
    others = sum(each.low > rule.threshold for each in found) - 1
    who = f"rank {worst.rank}" + (f" and {others} more" if others else "")
    device = "" if worst.device < 0 else f", device {worst.device}"
    return Finding(
        rule,
        rule.title.format(who=who, drop=worst.mean / share, share=share),
        *(None, None, None),
        confidence,
        f"rank {worst.rank}{device}: {worst.mean:.0%} of its clock cycles (95% CI "
        f"{100 * worst.low:.0f}–{worst.high:.0%}) in {worst.seconds:.0f} s",
        _query(metric, "device_clock_mhz", "device_temperature_celsius", "device_power_watts"),
        worst.place,
    )


# ---- garbage collection


def gc_pauses(run: RunData) -> Results:
    """Report that garbage collection pauses the training; nothing if it was not counted."""
    pauses = counted_in_steps(run.spans, GC_PAUSE)
    if pauses is None:
        return []
    query = (
        f"select rank, step, duration_ns, {GC_PAUSE}, {GC_COUNT} from spans where kind = 'step' "
        f"and {GC_PAUSE} is not null order by {GC_PAUSE} desc"
    )
    found = _lost_in_steps(run.spans, CATEGORY_RULES[Category.PYTHON_GC], pauses, query)
    return [] if found is None else [found]
