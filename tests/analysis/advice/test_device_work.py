"""Shares of device time beside a count of every nanosecond, on random work."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_rlprof.analysis.advice.device_work import (
    ALL_GATHER,
    POINTWISE,
    ROLLOUT_COMMUNICATION,
    ROLLOUT_HOST_BOUND,
    UPDATE_COMMUNICATION,
)
from lightning_rlprof.analysis.advice.evidence import Evidence
from lightning_rlprof.analysis.advice.rule import Measured, Quantity
from lightning_rlprof.analysis.device.timeline import HOST_BOUND, device_timeline, idle_causes
from lightning_rlprof.tables.spans import Spans
from tests.builders.device_trace import CALLS, KERNELS, Cells, table
from tests.builders.runs import Row, loaded

LENGTH = 4_000
NAMES = ("gemm", "vectorized_elementwise", "ncclDevKernel_AllGather", "ncclDevKernel_AllReduce")
STAGES = (
    (0, 1_500, "actor_generate"),
    (1_700, 2_900, "actor_update"),
    (1_900, 2_200, "rollout"),  # inside the update
    (3_000, 3_600, "rollout"),
)


def random_run(seed: int, count: int = 230) -> tuple[Spans, list[Cells]]:
    """Return a run of random kernels on three streams, and its kernels."""
    random = np.random.default_rng(seed)
    starts = np.sort(random.integers(0, LENGTH - 30, count))
    kernels: list[Cells] = []
    for at, start in enumerate(starts.tolist()):
        cells = {"rank": 0, "device": 0, "stream": at % 3, "kernel": NAMES[random.integers(0, 4)]}
        times = {"start": start, "duration": int(random.integers(1, 25)), "step": 1}
        kernels.append({**cells, **times, "launch": max(start - int(random.integers(0, 9)), 0)})
    calls = [
        {"rank": 0, "name": "cudaLaunchKernel", "kind": "runtime", "start": row["launch"]}
        for row in kernels
    ]
    rows = [Row("step", "step", 1, 0, LENGTH)]
    rows += [Row(name, "stage", 1, start, end) for start, end, name in STAGES]
    tables = {
        "kernels": lambda: table("kernels", KERNELS, kernels),
        "calls": lambda: table("calls", CALLS, [{**call, "duration": 1} for call in calls]),
    }
    return replace(loaded(rows), tables=tables), kernels


def at_each_ns(kernels: list[Cells], *words: str) -> np.ndarray:
    """Return for every nanosecond whether a kernel with one of some words in its name runs."""
    runs = np.zeros(LENGTH, bool)
    for row in kernels:
        if any(word in str(row["kernel"]) for word in words):
            start = int(str(row["start"]))
            runs[start : start + int(str(row["duration"]))] = True
    return runs


def inside(*names: str) -> np.ndarray:
    """Return for every nanosecond whether the innermost stage has one of some names."""
    found = np.zeros(LENGTH, bool)
    for start, end, name in STAGES:
        found[start:end] = name in names
    return found


def value(quantity: Quantity, spans: Spans) -> float:
    found = quantity.measure(Evidence(spans))
    assert isinstance(found, Measured)
    assert found.low <= found.value <= found.high or found.low == found.high
    return found.value


@pytest.mark.parametrize("seed", range(12))
def test_exposed_communication_is_that_without_compute_at_the_same_time(seed: int) -> None:
    spans, kernels = random_run(seed)
    lane = device_timeline(spans).lanes[0]
    profiled = np.zeros(LENGTH, bool)
    for start, end in zip(*lane.profiled, strict=True):
        profiled[start:end] = True
    exposed = at_each_ns(kernels, "nccl") & ~at_each_ns(kernels, "gemm", "elementwise")
    gather = at_each_ns(kernels, "AllGather") & ~at_each_ns(kernels, "gemm", "elementwise")
    for quantity, of in (
        (ROLLOUT_COMMUNICATION, ("actor_generate", "rollout")),
        (UPDATE_COMMUNICATION, ("actor_update",)),
    ):
        whole = inside(*of) & profiled
        assert value(quantity, spans) == pytest.approx((exposed & whole).sum() / whole.sum())
    assert value(ALL_GATHER, spans) == pytest.approx((gather & profiled).sum() / profiled.sum())


@pytest.mark.parametrize("seed", range(12))
def test_host_bound_idle_of_a_stage_is_that_part_of_the_idle_time(seed: int) -> None:
    spans, _ = random_run(seed, count=200)
    lane = device_timeline(spans).lanes[0]
    idle, profiled = np.zeros((2, LENGTH), bool)
    for start, end, cause in zip(*idle_causes(lane), strict=True):
        idle[start:end] |= bool(cause == HOST_BOUND)
    for start, end in zip(*lane.profiled, strict=True):
        profiled[start:end] = True
    whole = inside("actor_generate", "rollout") & profiled
    expected = (idle & whole).sum() / whole.sum()
    assert value(ROLLOUT_HOST_BOUND, spans) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_the_share_of_pointwise_kernels_is_of_compute_alone(seed: int) -> None:
    spans, kernels = random_run(seed, count=600)
    took = {
        name: sum(int(str(row["duration"])) for row in kernels if row["kernel"] == name)
        for name in NAMES
    }
    expected = took[NAMES[1]] / (took[NAMES[0]] + took[NAMES[1]])
    assert value(POINTWISE, spans) == pytest.approx(expected)
