"""Quantities of memory: room at each stage's own peak, fragmentation, and running out of memory."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.advice.evidence import Evidence
from lightning_rlprof.analysis.advice.rule import Measured, Measurement, NoData, Quantity
from lightning_rlprof.analysis.steps.execution_mode import Mode, execution_mode
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.tables.arrays import Float64s, Int64s

CAPTURE_MEMORY = "Capture two steps or more with profile_with_memory: true"

_FEWEST = 2  # steps: the peak of a single one does not tell whether another one fits
_STAGE = KINDS.index("stage")
_OUT = "interrupted by OutOfMemoryError"


class _Peaks(NamedTuple):
    """Memory at the own peak of each captured span of some stages, in bytes.

    ``total`` is what the device has, as it was recorded: the data sheet's size is more.
    """

    row: Int64s
    peak: Int64s
    other: Int64s
    reserved: Int64s
    total: Int64s


def _peaks(run: Evidence, stages: tuple[str, ...]) -> _Peaks | NoData:
    """Return the own peaks of stages; no data unless they were captured.

    Only what a capture stores is a stage's own peak, and it has ``device_other_bytes``, too.
    Elsewhere ``device_peak_bytes`` is the highest since the training began.
    """
    spans = run.spans
    names = [not stages or standard_stage(name) in stages for name in spans.names]
    keep = np.array([*names, False], dtype=bool)[spans.name] & (spans.kind == _STAGE)
    peak, other, reserved, size = (
        spans.per_row(f"device_{name}_bytes") for name in ("peak", "other", "reserved", "total")
    )
    rows = np.flatnonzero(keep & (peak >= 0) & (other >= 0))
    if len(np.unique(spans.step[rows])) < _FEWEST:
        what = f"of stage {stages[0]} " if stages else ""
        count = len(np.unique(spans.step[rows]))
        return NoData(f"{count} captured steps have the memory peak {what}".strip(), CAPTURE_MEMORY)
    total = np.zeros(int(spans.rank.max(initial=0)) + 1, np.int64)
    np.maximum.at(total, spans.rank, size)
    if not (total[spans.rank[rows]] > 0).all():
        return NoData(
            "The size of the device's memory was not recorded",
            "Stages of 50 ms or more have it, with torch 2.6 or later on an accelerator",
        )
    return _Peaks(rows, peak[rows], other[rows], reserved[rows], total[spans.rank[rows]])


def _over_steps(run: Evidence, rows: Int64s, values: Float64s, most: bool) -> Measured:
    """Return the worst value of each step: its median over steps, and its range."""
    steps, place = np.unique(run.spans.step[rows], return_inverse=True)
    worst = np.full(len(steps), -np.inf if most else np.inf)
    (np.maximum if most else np.minimum).at(worst, place, values)
    return Measured(float(np.median(worst)), float(worst.min()), float(worst.max()), "range")


def _of_peaks(
    text: str, stages: tuple[str, ...], of: Callable[[_Peaks], Float64s], *, most: bool
) -> Quantity:
    def measure(run: Evidence) -> Measurement:
        found = _peaks(run, stages)
        if isinstance(found, NoData):
            return found
        return _over_steps(run, found.row, of(found), most)

    return Quantity(f"{text}, of the device's memory", "share", measure)


def room(text: str, *stages: str) -> Quantity:
    """Return the memory that is free at a stage's own peak, on the rank with the least.

    Used are torch's tensors at their peak, and what others hold outside torch's allocator. The
    interval is the range over captured steps.
    """
    return _of_peaks(
        text, stages, lambda found: 1 - (found.peak + found.other) / found.total, most=False
    )


def _fragmentation(run: Evidence) -> Measurement:
    """Return what torch reserves beyond tensors at the highest peak of each step."""
    found = _peaks(run, ())
    if isinstance(found, NoData):
        return found
    known = found.reserved >= 0
    if not known.all():
        return NoData("Reserved memory was not recorded", CAPTURE_MEMORY)
    spans = run.spans
    order = np.lexsort((found.peak, spans.rank[found.row], spans.step[found.row]))
    step, rank = spans.step[found.row[order]], spans.rank[found.row[order]]
    last = np.append((np.diff(step) != 0) | (np.diff(rank) != 0), True)
    highest = order[last]
    beyond = (found.reserved - found.peak)[highest] / found.total[highest]
    return _over_steps(run, found.row[highest], beyond, most=True)


def _out_of_memory(run: Evidence) -> Measurement:
    """Return whether a rank ran out of device memory, by its notes and by how it ended."""
    spans = run.spans
    has_note = any(each.code == Code.OUT_OF_MEMORY for each in spans.notes)
    if has_note or _OUT in spans.statuses.values():
        return Measured(1.0, 1.0, 1.0)
    cut = [rank for rank, status in spans.statuses.items() if status is None]
    if cut or not spans.statuses:
        ranks = ", ".join(map(str, cut[:4])) or "all"
        return NoData(f"The end of ranks was not recorded: {ranks}", "See the log of the job")
    return Measured(0.0, 0.0, 0.0)


def _host_room(run: Evidence) -> Measurement:
    """Return the free host memory, on the host with the least; ranks of one host share it."""
    spans = run.spans
    rss = np.maximum(spans.per_row("host_rss_bytes"), 0) + np.maximum(
        spans.per_row("children_rss_bytes"), 0
    )
    limit = spans.per_row("host_limit_bytes")
    rows = np.flatnonzero((rss > 0) & np.isin(spans.step, run.included))
    hosts = [head.host for head in spans.headers.values()]
    names = sorted(set(hosts))
    of_rank = np.zeros(int(spans.rank.max(initial=0)) + 1, np.int64)
    for rank, host in zip(spans.headers, hosts, strict=True):
        of_rank[rank] = names.index(host)
    limits = np.zeros(len(names), np.int64)
    np.maximum.at(limits, of_rank[spans.rank], limit)
    if not len(rows) or not (limits > 0).all():
        return NoData("Host memory and its limit were not recorded", "Record on Linux")
    steps, step = np.unique(spans.step[rows], return_inverse=True)
    width = len(of_rank)
    most = np.zeros((len(steps), width), np.int64)  # each rank at its highest
    np.maximum.at(most, (step, spans.rank[rows]), rss[rows])
    used = np.zeros((len(steps), len(names)))
    for rank, place in enumerate(of_rank.tolist()):
        used[:, place] += most[:, rank]
    free = (1 - used / limits).min(axis=1)
    return Measured(float(np.median(free)), float(free.min()), float(free.max()), "range")


def _shares_devices(run: Evidence) -> Measurement:
    """Return whether the ranks that update also generate."""
    mode = execution_mode(run.spans)
    if mode is None:
        return NoData("The run lacks rollouts or updates", "Mark both: see docs/stages.md")
    found = float(mode is Mode.INTEGRATED)
    return Measured(found, found, found)


def _asynchronous(run: Evidence) -> Measurement:
    mode = execution_mode(run.spans)
    if mode is None:
        return NoData("The run lacks rollouts or updates", "Mark both: see docs/stages.md")
    found = float(mode is Mode.ASYNCHRONOUS)
    return Measured(found, found, found)


UPDATE_ROOM = room("free at the update's own peak", "actor_update")
ROLLOUT_ROOM = room("free at the rollout's own peak", "actor_generate")
LOG_PROB_ROOM = room(
    "free at the own peak of log-prob passes",
    "actor_compute_log_prob",
    "reference_compute_log_prob",
)
CRITIC_ROOM = room("free at the critic's own peak", "critic_update", "critic_compute_values")
HELD_BY_OTHERS = _of_peaks(
    "held outside torch's allocator during the update",
    ("actor_update",),
    lambda found: found.other / found.total,
    most=True,
)
FRAGMENTATION = Quantity(
    "reserved beyond tensors at the peak, of the device's memory", "share", _fragmentation
)
OUT_OF_MEMORY = Quantity("a rank ran out of device memory", "yes/no", _out_of_memory)
HOST_ROOM = Quantity("free host memory, of its limit", "share", _host_room)
SHARED_DEVICES = Quantity("rollout and update share devices", "yes/no", _shares_devices)
ASYNCHRONOUS = Quantity("rollout and update run at the same time", "yes/no", _asynchronous)
