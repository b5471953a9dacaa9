"""Quantities from counters of engines, devices and hosts, and facts of the machine and versions."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.advice.evidence import Evidence
from lightning_rlprof.analysis.advice.rule import Measured, Measurement, NoData, Quantity
from lightning_rlprof.analysis.advice.time_shares import share_by_step
from lightning_rlprof.analysis.device.device_counters import (
    COUNTERS,
    background_samples,
    counter_samples,
)
from lightning_rlprof.analysis.steps.partition import open_spans
from lightning_rlprof.tables.arrays import Float64s, Int64s

_KV_USAGE = re.compile(r"(?:.*:)?(?:gpu_|kv_)cache_usage(?:_perc)?|(?:.*:)?token_usage")
_ENGINE = re.compile(
    _KV_USAGE.pattern + r"|(?:.*:)?num_(?:preempted|preemptions_total|requests_\w+|running\w*)"
)
_BUSY = 50.0  # percent: an idle device lowers its clock on purpose
_FIRST_VLLM = (0, 8, 3)
_HOW = "Record background_metrics on a machine that reports it"
_HOW_VERSIONS = "Record through rlprof's integration of verl or TRL"
_PERCENT = 100.0
_Key = tuple[int, int, int]


class _Samples(NamedTuple):
    """Samples of a counter: RL step, -1 outside steps, and value."""

    step: Int64s
    value: Float64s


def _steps_at(run: Evidence, rank: Int64s, time: Int64s) -> Int64s:
    """Return the step that each rank was in at a time; a lone rank has what names none."""
    spans = run.spans
    only = spans.ranks[0] if len(spans.ranks) == 1 else -1
    rank = np.where(rank == -1, only, rank)
    step = np.full(len(rank), -1)
    for each in np.unique(rank[rank >= 0]).tolist():
        rows = open_spans(spans, "step", each, time[rank == each])
        step[rank == each] = np.append(spans.step, -1)[rows]
    return step


def _engine_samples(run: Evidence, names: re.Pattern[str]) -> _Samples:
    """Return what tables of counters hold under matching names, and what spans counted."""
    spans = run.spans
    parts: list[_Samples] = []
    for found, metrics in counter_samples(spans, [], COUNTERS):
        match = np.array([*(bool(names.fullmatch(each.lower())) for each in metrics), False])
        own = found.rows(match[found.metric])
        parts.append(_Samples(_steps_at(run, own.rank, own.time), own.value))
    for name in spans.counters:
        if names.fullmatch(name.lower()):
            rows, values = spans.amounts(name)
            parts.append(_Samples(spans.step[rows], values))
    if not parts:
        return _Samples(np.zeros(0, np.int64), np.zeros(0))
    step, value = (np.concatenate(each) for each in zip(*parts, strict=True))
    return _Samples(step, value)


def _mean(run: Evidence, found: _Samples) -> Measurement:
    """Return the mean of samples in included steps, with a bootstrap over steps."""
    keep = np.isin(found.step, run.included)
    place = np.searchsorted(run.included, found.step[keep])
    count = np.bincount(place, minlength=len(run.included)).astype(np.float64)
    sums = np.bincount(place, found.value[keep], len(run.included)).astype(np.float64)
    return share_by_step(sums[count > 0], count[count > 0])


def _kv_usage(run: Evidence) -> Measurement:
    found = _engine_samples(run, _KV_USAGE)
    if not len(found.value):
        how = "Call count(kv_cache_usage=...) in actor_generate, with what the engine reports"
        return NoData("The use of the KV cache was not recorded", how)
    return _mean(run, found)


def _engine_counters(run: Evidence) -> Measurement:
    found = float(len(_engine_samples(run, _ENGINE).value) > 0)
    return Measured(found, found, found)


def _background(run: Evidence, metric: str) -> dict[_Key, float]:
    """Return the samples of a background metric by rank, device and the time when they ended."""
    found = background_samples(run.spans, metric)
    if found is None:
        return {}
    time = found.time + np.maximum(found.duration, 0)
    keys = zip(*(each.tolist() for each in (found.rank, found.device, time)), strict=True)
    return dict(zip(keys, found.value.tolist(), strict=True))


def sampled(text: str, names: tuple[str, ...], scale: float = 1.0) -> Quantity:
    """Return the mean over samples of the highest of some background metrics, by ``scale``."""

    def measure(run: Evidence) -> Measurement:
        highest: dict[_Key, float] = {}
        for name in names:
            for key, each in _background(run, name).items():
                highest[key] = max(each, highest.get(key, each))
        if not highest:
            return NoData(f"No {names[0]} was sampled", _HOW)
        rank, _, time = np.array([*highest], np.int64).T
        value = np.array([*highest.values()]) / scale
        return _mean(run, _Samples(_steps_at(run, rank, time), value))

    return Quantity(text, "share", measure)


def _clock(run: Evidence) -> Measurement:
    """Return the clock of busy devices by the highest that they may have."""
    clock, most, busy = (
        _background(run, f"device_{name}")
        for name in ("clock_mhz", "max_clock_mhz", "busy_percent")
    )
    limits = {key[:2]: value for key, value in most.items() if value > 0}
    keys = [key for key in clock if key[:2] in limits and busy.get(key, 0.0) >= _BUSY]
    if not keys:
        return NoData("Clocks of a busy device were not sampled", _HOW)
    rank, _, time = np.array(keys, np.int64).T
    value = np.array([clock[key] / limits[key[:2]] for key in keys])
    return _mean(run, _Samples(_steps_at(run, rank, time), value))


def _on_npu(run: Evidence) -> Measurement:
    heads = run.spans.headers.values()
    found = any(
        head.device.lower().startswith("npu") or "ascend" in head.hardware.lower() for head in heads
    )
    return Measured(*(float(found),) * 3)


def _engine(run: Evidence) -> Measurement:
    """Return whether the run has a version of vLLM or SGLang."""
    packages = {name for head in run.spans.headers.values() for name in head.versions}
    if packages & {"vllm", "sglang"}:
        return Measured(1.0, 1.0, 1.0)
    return NoData("No version of a rollout engine was recorded", _HOW_VERSIONS)


def _old_vllm(run: Evidence) -> Measurement:
    """Return whether vLLM is older than 0.8.3, by the versions in the headers."""
    versions = {head.versions.get("vllm", "") for head in run.spans.headers.values()} - {""}
    if not versions:
        return NoData("No version of vLLM was recorded", _HOW_VERSIONS)
    found = float(any(_numbers(each) < _FIRST_VLLM for each in versions))
    return Measured(found, found, found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version.partition("+")[0])[:3])


def frameworks(run: Evidence) -> Iterator[str]:
    """Yield the frameworks of a run, by the versions in its headers."""
    named = {"verl": "verl", "trl": "TRL", "vllm": "vLLM", "mindspeed-rl": "MindSpeed-RL"}
    versions = {name for head in run.spans.headers.values() for name in head.versions}
    for package, framework in named.items():
        if package in versions:
            yield framework


KV_USAGE = Quantity("KV cache in use", "share", _kv_usage)
ENGINE_COUNTERS = Quantity(
    "counters of the rollout engine were recorded", "yes/no", _engine_counters
)
CLOCK = Quantity("clock of busy devices, of their highest", "share", _clock)
HEAT = sampled(
    "samples in which heat lowers the clock",
    ("device_thermal_throttled", "device_hardware_slowdown"),
)
POWER_LIMITED = sampled(
    "samples in which the power limit lowers the clock", ("device_power_throttled",)
)
CPU_LIMITED = sampled(
    "periods in which the container's CPU quota was used up", ("cpu_throttled_percent",), _PERCENT
)
DISK_PRESSURE = sampled(
    "time in which every thread waited for a disk", ("io_full_pressure_percent",), _PERCENT
)
MEMORY_PRESSURE = sampled(
    "time in which every thread waited for memory", ("memory_full_pressure_percent",), _PERCENT
)
ENGINE = Quantity("a rollout engine is in use", "yes/no", _engine)
ON_NPU = Quantity("the devices are Ascend NPUs", "yes/no", _on_npu)
OLD_VLLM = Quantity("vLLM is older than 0.8.3", "yes/no", _old_vllm)
