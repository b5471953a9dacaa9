"""Quantities of device work: exposed collectives, idle time in a stage, kernels by name."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.advice.evidence import Evidence
from lightning_rlprof.analysis.advice.rule import Measured, Measurement, NoData, Quantity
from lightning_rlprof.analysis.advice.time_shares import (
    CAPTURE,
    CAPTURE_ALL,
    device_problem,
    unverified,
)
from lightning_rlprof.analysis.communication.collectives import read_calls
from lightning_rlprof.analysis.device.timeline import HOST_BOUND, Lane, idle_causes
from lightning_rlprof.analysis.device.work import COMMUNICATION, COMPUTE, NO_REPLAY, NO_STAGE
from lightning_rlprof.analysis.efficiency.matmuls import matmuls
from lightning_rlprof.analysis.findings.finding import (
    FEWEST_KERNELS,
    FEWEST_STEPS,
    PARTS,
    NotChecked,
    rows_of,
    share_interval,
)
from lightning_rlprof.analysis.findings.run_evidence import training_mfu
from lightning_rlprof.analysis.steps.partition import paint
from lightning_rlprof.analysis.steps.time_categories import Category, kernel_categories
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.intervals import (
    cells_of,
    covered_before,
    edges,
    open_count,
    unions,
)

_FEWEST_CALLS = 20
_LONG_NS = 50_000  # of a matmul: shorter ones are launch overhead


class _Times(NamedTuple):
    """Disjoint intervals, ascending, counted from the start of a lane."""

    start: Int64s
    end: Int64s

    def before(self, times: Int64s) -> Int64s:
        return covered_before(self.start, self.end, times)


def _times(lane: Lane, start: Int64s, end: Int64s) -> _Times:
    start, end = start - lane.start_ns, end - lane.start_ns
    keep = end > np.maximum(start, 0)
    start, end = np.maximum(start[keep], 0), end[keep]
    return _Times(*unions(np.zeros_like(start), start, end)[1:])


def _both(one: _Times, other: _Times) -> _Times:
    """Return the union of two sets of times."""
    start, end = (np.append(*pair) for pair in zip(one, other, strict=True))
    return _Times(*unions(np.zeros_like(start), start, end)[1:])


def _common(one: _Times, other: _Times, cuts: Int64s) -> Int64s:
    """Return how long both hold before each cut, by inclusion and exclusion."""
    return one.before(cuts) + other.before(cuts) - _both(one, other).before(cuts)


def _in_parts(
    run: Evidence, of_lane: Callable[[Lane, Int64s], tuple[Int64s, Int64s]]
) -> Measurement:
    """Return a share of the devices' time with its interval, by parts of equal length.

    Args:
        run: The run.
        of_lane: Returns the time of interest and the whole before each of some times.
    """
    part, whole = np.zeros(PARTS), np.zeros(PARTS)
    for lane in run.devices.lanes:
        profiled = _times(lane, *lane.profiled)
        if not len(profiled.start):
            continue
        cuts = np.linspace(profiled.start[0], profiled.end[-1], PARTS + 1).astype(np.int64)
        own, all_of_it = of_lane(lane, cuts)
        part += np.diff(own)
        whole += np.diff(all_of_it)
    if not whole.sum():
        return NoData("The captures have none of it", CAPTURE)
    found = Measured(float(part.sum() / whole.sum()), *share_interval(part, whole))
    return unverified(run, found)


def _stage_times(run: Evidence, lane: Lane, stage: str) -> _Times:
    """Return when a stage was the host's innermost one and the device was profiled."""
    host = lane.host
    own = np.array([*(standard_stage(name) == stage for name in run.devices.stages), False])
    times = edges(host.start_ns, host.end_ns, *lane.profiled)
    count = max(len(times) - 1, 0)
    if not count:
        return _times(lane, times, times)
    innermost = paint(*cells_of(times, host.start_ns, host.end_ns), count)
    inside = own[np.append(host.stage, NO_STAGE)[innermost]]
    inside &= open_count(*cells_of(times, *lane.profiled), count) > 0
    return _times(lane, times[:-1][inside], times[1:][inside])


def _exposed(lane: Lane, start: Int64s, end: Int64s) -> tuple[_Times, _Times]:
    """Return compute, and compute with these times: their difference is what is exposed."""
    work = lane.work
    is_compute = work.kind == COMPUTE
    compute = _times(lane, work.start_ns[is_compute], work.end_ns[is_compute])
    return compute, _both(compute, _times(lane, start, end))


def exposed_operations(text: str, *operations: str) -> Quantity:
    """Return the exposed time of some collectives, of the time in which devices were profiled."""

    def measure(run: Evidence) -> Measurement:
        if (problem := device_problem(run)) is not None:
            return problem._replace(how=CAPTURE_ALL)
        calls = read_calls(run.spans, [])
        if calls is None:
            return Measured(0.0, 0.0, 0.0)  # devices were recorded, and ran no collective
        code, names = calls.operation
        wanted = np.array([*(name in operations for name in names), False], dtype=bool)[code]

        def of_lane(lane: Lane, cuts: Int64s) -> tuple[Int64s, Int64s]:
            own = wanted & (calls.rank == lane.rank)
            compute, both = _exposed(lane, calls.start_ns[own], calls.end_ns[own])
            whole = _times(lane, *lane.profiled).before(cuts)
            return both.before(cuts) - compute.before(cuts), whole

        return _in_parts(run, of_lane)

    return Quantity(f"{text}, of the captured time", "share", measure)


def exposed_in_stage(text: str, stage: str) -> Quantity:
    """Return the exposed time of all collectives while the host is in a stage, of that time."""

    def measure(run: Evidence) -> Measurement:
        if (problem := device_problem(run)) is not None:
            return problem._replace(how=CAPTURE_ALL)

        def of_lane(lane: Lane, cuts: Int64s) -> tuple[Int64s, Int64s]:
            inside = _stage_times(run, lane, stage)
            own = lane.work.kind == COMMUNICATION
            compute, both = _exposed(lane, lane.work.start_ns[own], lane.work.end_ns[own])
            exposed = _common(both, inside, cuts) - _common(compute, inside, cuts)
            return exposed, inside.before(cuts)

        return _in_parts(run, of_lane)

    return Quantity(f"{text}, of its captured time", "share", measure)


def host_bound_in_stage(text: str, stage: str) -> Quantity:
    """Return the host-bound idle time while the host is in a stage, of that time."""

    def measure(run: Evidence) -> Measurement:
        if (problem := device_problem(run)) is not None:
            return problem

        def of_lane(lane: Lane, cuts: Int64s) -> tuple[Int64s, Int64s]:
            inside = _stage_times(run, lane, stage)
            start, end, cause = idle_causes(lane)
            late = cause == HOST_BOUND
            idle = _times(lane, start[late], end[late])
            return _common(idle, inside, cuts), inside.before(cuts)

        return _in_parts(run, of_lane)

    return Quantity(f"{text}, of its captured time", "share", measure)


def graph_share(text: str, stage: str) -> Quantity:
    """Return the share of a stage's kernels that ran in graph replays."""

    def measure(run: Evidence) -> Measurement:
        if run.devices.work.hidden_in_graphs:
            return Measured(1.0, 1.0, 1.0)
        names = [*(standard_stage(name) == stage for name in run.devices.stages), False]
        inside = np.array(names, dtype=bool)
        own = [lane.work.replay[inside[lane.work.stage]] for lane in run.devices.lanes]
        replay = np.concatenate([np.zeros(0, np.int64), *own])
        if len(replay) < FEWEST_KERNELS:
            why = f"{len(replay)} kernels of this stage; {FEWEST_KERNELS} are needed"
            return NoData(why, CAPTURE)
        return _by_count(run, (replay != NO_REPLAY).astype(np.float64), np.ones(len(replay)))

    return Quantity(f"{text}, of its kernels", "share", measure)


def _by_count(run: Evidence, part: Float64s, whole: Float64s) -> Measured:
    """Return a share with its interval, by parts with equally many entries."""
    at = np.arange(len(part)) * PARTS // len(part)
    own, every = (np.bincount(at, each, PARTS).astype(np.float64) for each in (part, whole))
    return Measured(float(part.sum() / whole.sum()), *share_interval(own, every))


def kernel_share(text: str, pattern: str) -> Quantity:
    """Return the share of compute time in kernels whose lower-case names match a pattern."""
    wanted = re.compile(pattern)

    def measure(run: Evidence) -> Measurement:
        table = run.spans.try_table("kernels", [])
        if table is None or not len(table.rows):
            return NoData("No profiler recorded kernels", CAPTURE)
        code, names = table.texts("kernel")
        is_compute = np.append(kernel_categories(names) == Category.COMPUTE, False)
        match = np.array([*(bool(wanted.search(name.lower())) for name in names), False])
        own, order = is_compute[code], np.argsort(table.numbers("start"), kind="stable")
        took = np.where(own, table.numbers("duration"), 0).astype(np.float64)[order]
        if np.count_nonzero(own) < FEWEST_KERNELS:
            why = f"{np.count_nonzero(own)} compute kernels; {FEWEST_KERNELS} are needed"
            return NoData(why, CAPTURE)
        return _by_count(run, np.where(match[code[order]], took, 0.0), took)

    return Quantity(f"{text}, of the time of compute kernels", "share", measure)


def _matmul_rate(run: Evidence) -> Measurement:
    """Return FLOPs of long matmuls by the device's peak, weighted by time."""
    table = matmuls(run.spans)
    if table.abstained is not None:
        return NoData("No matmul has recorded shapes", "Capture with record_shapes: true")
    rows = [
        (float(row["time"]), float(row["% of peak"]))
        for row in rows_of(table)
        if row["% of peak"] is not None and row["time"] >= _LONG_NS * row["calls"]
    ]
    if len(rows) < FEWEST_STEPS:
        why = (
            f"{len(rows)} kinds of matmuls of 50 µs or more have a rate; {FEWEST_STEPS} are needed"
        )
        return NoData(why, "Capture with record_shapes: true on a device whose peak is known")
    time, rate = np.array(rows).T
    return Measured(float(time @ rate / time.sum()), *share_interval(time * rate, time))


def _message_bytes(run: Evidence) -> Measurement:
    """Return the median size of gradient reductions, with a bootstrap interval."""
    calls = read_calls(run.spans, [])
    if calls is None:
        return NoData("No profiler recorded collectives", CAPTURE_ALL)
    code, names = calls.operation
    reduces = ("all_reduce", "reduce_scatter")
    wanted = np.array([*(name in reduces for name in names), False], dtype=bool)[code]
    sizes = calls.bytes[wanted & (calls.bytes >= 0)]
    if len(sizes) < _FEWEST_CALLS:
        why = f"{len(sizes)} gradient reductions have a size; {_FEWEST_CALLS} are needed"
        return NoData(why, CAPTURE_ALL)
    order = np.sort(sizes)
    around = 0.98 / np.sqrt(len(order))  # of ranks: 1.96 times the spread of a median's rank
    low, high = (
        float(order[int(np.clip((0.5 + each) * len(order), 0, len(order) - 1))])
        for each in (-around, around)
    )
    return Measured(float(np.median(order)), low, high)


def _mfu(run: Evidence) -> Measurement:
    found = training_mfu(run)
    how = "Count flops=... in the update, or give the model: model: config.json"
    if found is None:
        return NoData("FLOPs of the update, or the device's peak, are unknown", how)
    if isinstance(found, NotChecked):
        return NoData(f"Training MFU {found.why}", how)
    return Measured(float(found.used.sum() / found.possible.sum()), *found.interval)


def _fsdp1(run: Evidence) -> Measurement:
    """Return whether PyTorch's first FSDP runs, by the ranges that it records."""
    names = set(_range_names(run))
    if not names:
        return NoData("No profiler recorded host ranges", "Capture with profile_with_cpu: true")
    found = float(any(name.startswith("FullyShardedDataParallel.") for name in names))
    return Measured(found, found, found)


def _range_names(run: Evidence) -> Iterator[str]:
    for table, column in (("calls", "name"), ("kernels", "range"), ("operators", "name")):
        own = run.spans.try_table(table, [])
        if own is not None and column in [each.name for each in own.columns]:
            yield from own.texts(column)[1]


_POINTWISE = (
    r"elementwise|pointwise|reduce_kernel|softmax|layer_?norm|rms_?norm|rope|rotary|silu|swiglu"
    r"|cross_?entropy|index_select|catarray"
)

ALL_GATHER = exposed_operations("exposed all-gather", "all_gather")
REDUCTION = exposed_operations("exposed gradient reduction", "all_reduce", "reduce_scatter")
ALL_TO_ALL = exposed_operations("exposed all-to-all", "all_to_all")
POINT_TO_POINT = exposed_operations("exposed send and receive", "send", "recv", "send_recv")
ROLLOUT_COMMUNICATION = exposed_in_stage("exposed communication in rollout", "actor_generate")
UPDATE_COMMUNICATION = exposed_in_stage("exposed communication in the update", "actor_update")
ROLLOUT_HOST_BOUND = host_bound_in_stage("host-bound idle in rollout", "actor_generate")
ROLLOUT_GRAPHS = graph_share("graph replays in rollout", "actor_generate")
POINTWISE = kernel_share("pointwise and reduction kernels", _POINTWISE)
ROUTING = kernel_share(
    "routing and permutation of experts", r"permut|top_?k|router|moe_(?:align|sum|dispatch|combine)"
)
MATMUL_RATE = Quantity("rate of long matmuls, of the device's peak", "share", _matmul_rate)
MESSAGE_BYTES = Quantity("median size of a gradient reduction", "bytes", _message_bytes)
MFU = Quantity("training MFU", "share", _mfu)
FSDP1 = Quantity("FullyShardedDataParallel (FSDP1) is in use", "yes/no", _fsdp1)
