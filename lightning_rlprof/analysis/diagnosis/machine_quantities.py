"""Quantities of machines: who uses the CPUs, short memory, slow disks, throttled devices."""

from dataclasses import replace

import numpy as np

from lightning_rlprof.analysis.device.device_counters import Samples, background_samples
from lightning_rlprof.analysis.diagnosis.evidence import (
    PARTS,
    Evidence,
    place_at,
    quoted,
    share_interval,
)
from lightning_rlprof.analysis.diagnosis.problem import (
    Fact,
    Measured,
    Measurement,
    NoData,
    Quantity,
    exact,
)
from lightning_rlprof.analysis.diagnosis.step_quantities import CPU_WAIT_SHARE, CPU_WAITS
from lightning_rlprof.records.records import BACKGROUND_METRICS
from lightning_rlprof.tables.arrays import Float64s
from lightning_rlprof.tables.spans import Spans

FEWEST_SAMPLES = 60
"""Samples of a metric needed, which is a minute of them."""

_FULL = 0.8  # of the machine's CPUs in use: then it is busy
SWAPS = 1e6
"""Bytes per second read from swap from which on the memory of a host is short."""
_HOW = "Record background_metrics for a minute, on a machine that reports it"


def _in_training(spans: Spans, samples: Samples) -> Samples:
    """Return the samples between the first step and the last one."""
    steps = spans.rows(kind="step")
    if not len(steps):
        return samples
    trains = samples.time >= spans.start_ns[steps].min()
    return samples.rows(trains & (samples.time < spans.end_ns[steps].max()))


def _worst(spans: Spans, samples: Samples, share: Float64s, *metrics: str) -> Measurement:
    """Return the mean over time of a share per sample, of the rank and device where it is highest.

    Samples before the first step and after the last one do not count.

    Args:
        spans: The run.
        samples: One metric, by rank, device and time.
        share: Of each sample, between 0 and 1.
        metrics: What the query selects.
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
        found.append(_mean(spans, samples.rows(own), share[own], weight.astype(np.float64)))
    if not found:
        return NoData(f"{most} samples of {metrics[0]}; {FEWEST_SAMPLES} are needed", _HOW)
    worst = max(found, key=lambda each: each.low)
    names = ", ".join(map(quoted, metrics))
    query = f"select * from {BACKGROUND_METRICS} where name in ({names}) order by rank, time_ns"
    return replace(worst, query=query)


def _mean(spans: Spans, samples: Samples, share: Float64s, weight: Float64s) -> Measured:
    """Return the mean of the samples of one rank and device, and where it is highest."""
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
            return NoData(f"No {metric} was sampled", _HOW)
        return _worst(run.spans, samples, samples.value / 100, metric, *more)

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
        return NoData("What this process uses of the CPUs was not sampled", _HOW)
    share = min(own / host, 1.0)
    facts = (Fact("own processes use", own, "number"), Fact("cores of", host, "number"))
    return replace(exact(share), facts=facts)


def _other_cpu(run: Evidence) -> Measurement:
    """Return what programs outside of the container, or else of the training, use of the CPUs."""
    host, count = _cores(run, "host_cpu_cores"), _cores(run, "host_cpu_count")
    own = _cores(run, "container_cpu_cores")
    own = _cores(run, "process_cpu_cores") if own is None else own
    if own is None or not host or not count:
        return NoData("What other programs use of the CPUs was not sampled", _HOW)
    share = max(host - own, 0.0) / host
    facts = (Fact("other programs use", max(host - own, 0.0) / count, "share"),)
    return replace(exact(share), facts=facts)


def _busy(run: Evidence) -> Measurement:
    """Return whether CPUs are short: training threads wait for one, or nearly all are in use."""
    wait = run.value(CPU_WAIT_SHARE)
    host, count = _cores(run, "host_cpu_cores"), _cores(run, "host_cpu_count")
    if wait is None and (host is None or not count):
        return NoData("Whether CPUs are free is unknown", "Record on Linux")
    waits = wait is not None and wait.value > CPU_WAITS
    return exact(float(waits or bool(host and count and host / count > _FULL)))


def _no_wait(run: Evidence) -> Measurement:
    wait = run.value(CPU_WAIT_SHARE)
    return exact(float(wait is None or wait.value <= CPU_WAITS))


# ---- memory of the host


def _memory_pressure(run: Evidence) -> Measurement:
    """Return how long all active threads wait for memory, or the host reads from swap."""
    found: list[Measurement] = []
    for metric, limit in (
        ("memory_full_pressure_percent", None),
        ("swap_in_bytes_per_s", SWAPS),
    ):
        samples = background_samples(run.spans, metric)
        if samples is not None:
            share = samples.value / 100 if limit is None else (samples.value > limit).astype(float)
            more = Fact("by", "waits for memory" if limit is None else "reads from swap", "text")
            own = _worst(run.spans, samples, share, metric, "container_memory_bytes")
            found.append(
                replace(own, facts=(more, *own.facts)) if isinstance(own, Measured) else own
            )
    measured = [each for each in found if isinstance(each, Measured)]
    if measured:
        return max(measured, key=lambda each: each.low)
    return found[0] if found else NoData("No pressure of memory was sampled", _HOW)


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
            return NoData("Clocks of devices were not sampled", _HOW)
        if throttled is None:
            return NoData("The driver does not report why clocks are low")
        most = dict(zip(_places(highest, time=False), highest.value.tolist(), strict=True))
        clocks = dict(zip(_places(clock, time=True), clock.value.tolist(), strict=True))
        drop = np.array(
            [
                1 - clocks[place] / most[place[:2]]
                if place in clocks and most.get(place[:2])
                else np.nan
                for place in _places(throttled, time=True)
            ]
        )
        known = np.isfinite(drop)
        if not known.any():
            return NoData("Clocks of devices were not sampled", _HOW)
        lost = np.clip(drop[known], 0, 1) * (throttled.value[known] > 0)
        return _worst(spans, throttled.rows(known), lost, metric, "device_clock_mhz")

    return Quantity(text, "share", measure)


def _places(samples: Samples, *, time: bool) -> list[tuple[int, ...]]:
    columns = [samples.rank, samples.device, *([samples.time] if time else [])]
    return list(zip(*(each.tolist() for each in columns), strict=True))


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
