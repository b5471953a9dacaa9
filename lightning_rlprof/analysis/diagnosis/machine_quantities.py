"""Quantities of machines: CPUs, short memory, slow disks, throttled devices, rollout engines."""

from dataclasses import replace

import numpy as np

from lightning_rlprof.analysis.device.device_counters import Samples, background_samples
from lightning_rlprof.analysis.diagnosis.evidence import (
    PARTS,
    Evidence,
    Fact,
    Measured,
    Measurement,
    NoData,
    Quantity,
    exact,
    place_at,
    quoted,
    share_interval,
)
from lightning_rlprof.analysis.diagnosis.step_quantities import CPU_WAIT_SHARE, CPU_WAITS
from lightning_rlprof.records.records import BACKGROUND_METRICS, ENGINE_KV_CACHE
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans

FEWEST_SAMPLES = 60
"""Samples of a metric needed, which is a minute of them."""

_MIN_BUSY_SHARE = 0.8  # With more of its CPUs in use, a machine is busy.
SWAPS = 1e6
"""Bytes per second read from swap from which on the memory of a host is short."""
_HOW = "Record background_metrics for a minute, on a machine that reports it"
_RUNNING, _WAITING = "engine_running_requests", "engine_waiting_requests"


def _in_training(spans: Spans, samples: Samples) -> Samples:
    """Return the samples between the first step and the last one."""
    steps = spans.rows(kind="step")
    if not len(steps):
        return samples
    trains = samples.time >= spans.start_ns[steps].min()
    return samples.rows(trains & (samples.time < spans.end_ns[steps].max()))


def _worst(spans: Spans, samples: Samples, *metrics: str) -> Measured:
    """Return the mean over time of a share, of the rank and device where it is highest.

    Samples before the first step and after the last one do not count.

    Args:
        spans: The run.
        samples: Shares between 0 and 1, by rank, device and time.
        metrics: What the query selects; the first is what was sampled.

    Raises:
        NoData: The samples are too few.
    """
    samples = _in_training(spans, samples)
    lasting = np.append(np.diff(samples.time), 0)[: len(samples.time)]
    found, most = [], 0
    key = samples.rank * (int(samples.device.max(initial=0)) + 2) + samples.device
    for each in np.unique(key).tolist():
        own = np.flatnonzero(key == each)
        most = max(most, len(own))
        if len(own) < FEWEST_SAMPLES:
            continue
        weight = np.where(samples.duration[own] > 0, samples.duration[own], lasting[own])
        weight[-1] = max(samples.duration[own[-1]], 0)  # How long it lasted is not known.
        found.append(_mean(spans, samples.rows(own), weight.astype(np.float64)))
    if not found:
        NoData.unless(most, FEWEST_SAMPLES, f"samples of {metrics[0]}", _HOW)
    worst = max(found, key=lambda each: each.low)
    names = ", ".join(map(quoted, metrics))
    query = f"select * from {BACKGROUND_METRICS} where name in ({names}) order by rank, time_ns"
    return replace(worst, query=query)


def _mean(spans: Spans, samples: Samples, weight: Float64s) -> Measured:
    """Return the mean of the samples of one rank and device, and where it is highest."""
    share = samples.value
    cuts = np.arange(PARTS) * len(share) // PARTS
    low, high = share_interval(np.add.reduceat(share * weight, cuts), np.add.reduceat(weight, cuts))
    at = int(np.argmax(share))
    rank, start = int(samples.rank[at]), int(samples.time[at])
    mean = float((share * weight).sum() / max(weight.sum(), 1))
    facts = [Fact("rank", rank), Fact("of the time", mean, "share", low, high)]
    if samples.device[at] >= 0:
        facts.insert(1, Fact("device", int(samples.device[at])))
    facts.append(Fact("seconds sampled", float(weight.sum()) / 1e9))
    end = start + int(max(samples.duration[at], 0))
    place = place_at(spans, rank, start, end)
    return Measured(mean, low, high, facts=tuple(facts), place=place)


def _sampled(text: str, metric: str, *more: str) -> Quantity:
    """Return the mean of a background metric in percent, where it is highest."""

    def measure(run: Evidence) -> Measurement:
        samples = background_samples(run.spans, metric)
        if samples is None:
            raise NoData(f"No {metric} was sampled", _HOW)
        return _worst(run.spans, samples._replace(value=samples.value / 100), metric, *more)

    return Quantity(text, "share", measure)


# ---- CPUs


def _cores(run: Evidence, metric: str) -> float | None:
    """Return the mean of a metric of CPUs over the training, hosts added up; None if unknown."""
    samples = background_samples(run.spans, metric)
    own = None if samples is None else _in_training(run.spans, samples)
    if own is None or not len(own.value):
        return None
    return sum(float(own.value[own.rank == rank].mean()) for rank in np.unique(own.rank).tolist())


def _own_cpu(run: Evidence) -> Measurement:
    """Return what the processes of the training use of the CPUs that are in use."""
    own, host = _cores(run, "process_cpu_cores"), _cores(run, "host_cpu_cores")
    if own is None or not host:
        raise NoData("What this process uses of the CPUs was not sampled", _HOW)
    share = min(own / host, 1.0)
    facts = (Fact("own processes use", own, "number"), Fact("cores of", host, "number"))
    return exact(share, facts=facts)


def _other_cpu(run: Evidence) -> Measurement:
    """Return what programs outside of the container, or else of the training, use of the CPUs."""
    host, count = _cores(run, "host_cpu_cores"), _cores(run, "host_cpu_count")
    own = _cores(run, "container_cpu_cores")
    own = _cores(run, "process_cpu_cores") if own is None else own
    if own is None or not host or not count:
        raise NoData("What other programs use of the CPUs was not sampled", _HOW)
    share = max(host - own, 0.0) / host
    facts = (Fact("other programs use", max(host - own, 0.0) / count, "share"),)
    return exact(share, facts=facts)


def _busy(run: Evidence) -> Measurement:
    """Return whether CPUs are short: training threads wait for one, or nearly all are in use."""
    wait = run.value(CPU_WAIT_SHARE)
    host, count = _cores(run, "host_cpu_cores"), _cores(run, "host_cpu_count")
    if wait is None and (host is None or not count):
        raise NoData("Whether CPUs are free is unknown", "Record on Linux")
    waits = wait is not None and wait.value > CPU_WAITS
    return exact(float(waits or bool(host and count and host / count > _MIN_BUSY_SHARE)))


def _no_wait(run: Evidence) -> Measurement:
    wait = run.value(CPU_WAIT_SHARE)
    return exact(float(wait is None or wait.value <= CPU_WAITS))


# ---- memory of the host


def _memory_pressure(run: Evidence) -> Measurement:
    """Return how long all active threads wait for memory, or the host reads from swap."""
    found, lacking = list[Measured](), list[NoData]()
    for metric, by in (
        ("memory_full_pressure_percent", "waits for memory"),
        ("swap_in_bytes_per_s", "reads from swap"),
    ):
        samples = background_samples(run.spans, metric)
        if samples is None:
            continue
        is_share = metric.endswith("_percent")
        share = samples.value / 100 if is_share else (samples.value > SWAPS).astype(np.float64)
        try:
            own = _worst(run.spans, samples._replace(value=share), metric, "container_memory_bytes")
        except NoData as few:
            lacking.append(few)
        else:
            found.append(replace(own, facts=(Fact("by", by, "text"), *own.facts)))
    if not found:
        raise next(iter(lacking), NoData("No pressure of memory was sampled", _HOW))
    return max(found, key=lambda each: each.low)


# ---- clocks of devices


def _throttled(text: str, metric: str) -> Quantity:
    """Return the share of clock cycles that the worst device lost while it was throttled.

    Lost are those between its clock and its highest one. A low clock alone does not count: an idle
    device has one.
    """

    def measure(run: Evidence) -> Measurement:
        spans = run.spans
        clock, highest, throttled = (
            background_samples(spans, name)
            for name in ("device_clock_mhz", "device_max_clock_mhz", metric)
        )
        if clock is None or highest is None:
            raise NoData("Clocks of devices were not sampled", _HOW)
        if throttled is None:
            raise NoData("The driver does not report why clocks are low")
        most = dict(zip(_places(highest), highest.value.tolist(), strict=True))
        clocks = dict(zip(_places(clock, clock.time), clock.value.tolist(), strict=True))
        places = _places(throttled, throttled.time)
        part = [clocks.get(each, np.nan) / (most.get(each[:2]) or np.nan) for each in places]
        drop = 1 - np.array(part)
        known = np.isfinite(drop)
        if not known.any():
            raise NoData("Clocks of devices were not sampled", _HOW)
        lost = np.clip(drop[known], 0, 1) * (throttled.value[known] > 0)
        lost_there = throttled.rows(known)._replace(value=lost)
        return _worst(spans, lost_there, metric, "device_clock_mhz")

    return Quantity(text, "share", measure)


def _places(samples: Samples, *more: Int64s) -> list[tuple[int, ...]]:
    columns = (samples.rank, samples.device, *more)
    return list(zip(*(each.tolist() for each in columns), strict=True))


# ---- rollout engines


def _while_any(run: Evidence, metric: str, *others: str) -> Samples:
    """Return the samples of an engine's metric, each with its time, while others are above 0.

    Raises:
        NoData: One of them was not sampled.
    """
    sampled = [background_samples(run.spans, name) for name in (metric, *others)]
    known = [each for each in sampled if each is not None]
    if len(known) < len(sampled):
        how = "Set engine_metrics to the URL of its /metrics page"
        raise NoData("No rollout engine was sampled", how)
    own, *more = known
    above = [each.rows(each.value > 0) for each in more]
    at = {place for each in above for place in _places(each, each.time)}
    inside = np.array([place in at for place in _places(own, own.time)], dtype=bool)
    lasting = np.diff(own.time, append=own.time[-1:])  # Another engine begins earlier.
    return own._replace(duration=np.maximum(lasting, 1)).rows(inside)


def _requests_wait(run: Evidence) -> Measurement:
    """Return how long requests wait at an engine, of the time in which it has any."""
    samples = _while_any(run, _WAITING, _RUNNING, _WAITING)
    waits = samples._replace(value=(samples.value > 0).astype(np.float64))
    return _worst(run.spans, waits, _WAITING, _RUNNING)


def _kv_cache(run: Evidence) -> Measurement:
    """Return how full the KV cache is while requests wait."""
    samples = _while_any(run, ENGINE_KV_CACHE, _WAITING)
    return _worst(run.spans, samples._replace(value=samples.value / 100), ENGINE_KV_CACHE, _WAITING)


CPU_QUOTA = _sampled(
    "periods in which the container's CPU quota was used up",
    "cpu_throttled_percent",
    "cpu_quota_cores",
    "container_cpu_cores",
)
OWN_CPU = Quantity("own processes, of the CPUs in use", "share", _own_cpu)
OTHER_CPU = Quantity("other programs, of the CPUs in use", "share", _other_cpu)
CPU_BUSY = Quantity("the machine's CPUs are short", "yes/no", _busy)
NO_CPU_WAIT = Quantity("training threads do not wait for a CPU", "yes/no", _no_wait)
MEMORY_PRESSURE = Quantity(
    "time in which threads wait for memory of the host", "share", _memory_pressure
)
DISK_PRESSURE = _sampled("time in which every thread waits for a disk", "io_full_pressure_percent")
HEAT = _throttled("clock cycles that heat takes", "device_thermal_throttled")
POWER = _throttled("clock cycles that the power limit takes", "device_power_throttled")
SLOWDOWN = _throttled("clock cycles that a hardware slowdown takes", "device_hardware_slowdown")
REQUESTS_WAIT = Quantity(
    "time in which requests wait at an engine, of its busy time", "share", _requests_wait
)
KV_CACHE = Quantity("KV cache in use while requests wait", "share", _kv_cache)
