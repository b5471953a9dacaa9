"""Evidence of low efficiency: small collectives at low bandwidth, and training at a low MFU."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_rlprof.analysis.collectives import communication
from lightning_rlprof.analysis.device.utilization import overlap_of
from lightning_rlprof.analysis.efficiency.peak_flops import kind_of, peak_of
from lightning_rlprof.analysis.findings.finding import (
    MEDIUM,
    Finding,
    NotChecked,
    Place,
    RunData,
    judge,
    place_at,
    place_of,
    quoted,
    share_interval,
    spans_query,
)
from lightning_rlprof.analysis.findings.rules import LOW_MFU, SMALL_COLLECTIVES
from lightning_rlprof.analysis.step_selection import states
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.interval_nesting import NONE, enclosing
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

_FEWEST_STEPS = 5
_SHOWN = 3


def low_mfu(run: RunData) -> Iterator[Finding | NotChecked]:
    """Report a low MFU of training; nothing if FLOPs or the device's peak are unknown.

    The cost is what reaching the threshold would save. Only spans that counted ``flops``, in
    complete steps and training stages: decoding is limited by memory, so its MFU is always low.
    An MFU above 100% means wrong inputs, so nothing is reported.
    """
    spans = run.spans
    rows, flops = _training_flops(spans)
    peaks = {rank: peak_of(head.hardware) or 0.0 for rank, head in spans.headers.items()}
    peak = np.array([peaks.get(rank, 0.0) for rank in spans.rank[rows].tolist()])  # TFLOP/s
    rows, flops, peak = rows[peak > 0], flops[peak > 0], peak[peak > 0]
    if not len(rows):
        return
    took = spans.duration_ns[rows].astype(np.float64)
    steps, place = np.unique(spans.step[rows], return_inverse=True)
    if len(steps) < _FEWEST_STEPS:
        why = f"needs {_FEWEST_STEPS} steps with counted FLOPs, has {len(steps)}"
        yield NotChecked(LOW_MFU.name, why)
        return
    possible = took * peak  # in thousand FLOPs
    if (flops / 1_000 > possible).any():
        yield NotChecked(LOW_MFU.name, "some of it is above 100%, see data_quality")
        return
    used_by_step = np.bincount(place, flops / 1_000).astype(np.float64)
    possible_by_step = np.bincount(place, possible).astype(np.float64)
    low, high = share_interval(used_by_step, possible_by_step)
    decision = judge(LOW_MFU, low, high)
    if isinstance(decision, NotChecked):
        yield decision
    elif decision is not None:
        mfu = float(used_by_step.sum() / possible_by_step.sum())
        lowest_first = rows[np.argsort(flops / possible)]
        yield _mfu_finding(spans, lowest_first, float(took.sum()), (low, mfu, high), decision)


def _training_flops(spans: Spans) -> tuple[Int64s, Float64s]:
    """Return the training spans of complete steps that counted FLOPs, and how many."""
    rows, flops = spans.amounts("flops")
    trains = np.array([kind_of(name) == "training" for name in spans.names], dtype=bool)
    keep = trains[spans.name[rows]] & (flops > 0) & (spans.duration_ns[rows] > 0)
    steps = spans.rows(kind="step")
    complete = np.unique(spans.step[steps[states(spans, steps) == 0]])
    keep &= np.isin(spans.step[rows], complete)
    rows, flops = rows[keep], flops[keep]
    thread, start, end = spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows]
    order = np.lexsort((spans.id[rows], -end, start, thread))
    # Of spans inside one another, the outer one has counted the FLOPs of both.
    outer = order[enclosing(thread[order], start[order], end[order]) == NONE]
    return rows[outer], flops[outer]


def _mfu_finding(
    spans: Spans, rows: Int64s, took_ns: float, mfu: tuple[float, float, float], confidence: str
) -> Finding:
    low, middle, high = mfu
    cost, least, most = (
        int(took_ns * (1 - share / LOW_MFU.threshold)) for share in (middle, high, low)
    )
    stages = ", ".join(sorted({spans.names[code] for code in spans.name[rows].tolist()}))
    shown = rows[:_SHOWN].tolist()
    lowest = ", ".join(f"{spans.rank[row]}/{spans.id[row]}" for row in shown)
    return Finding(
        LOW_MFU,
        LOW_MFU.title.format(mfu=middle, stages=stages),
        *(cost, least, most),
        confidence,
        f"MFU {100 * low:.1f}–{high:.1%} by counted FLOPs; lowest spans (rank/id): {lowest}; "
        f"the cost is what {LOW_MFU.threshold:.0%} would save",
        spans_query(spans, shown),
        place_of(spans, rows),
    )


LARGER, FASTER = 8, 4
"""A collective is small if another of its group is this much larger, and reaches this bandwidth."""

SMALL_BYTES = 2**20
"""Collectives of this size and more are never small."""

FEWEST_COLLECTIVES = 20
"""Matched collectives needed to check an operation."""

_LEAST_MATCHED = 0.9  # share of the calls; below, wait and transfer are unknown
_KEYS = ("operation", "group", "stage")

_Row = dict[str, Any]


def small_collectives(run: RunData) -> Iterator[Finding | NotChecked]:
    """Report the exposed time of small collectives; nothing without group and size of any."""
    if "collectives" not in run.spans.tables:
        return
    rows = [row for row in _dicts(communication(run.spans)) if row["median bytes"]]
    if not rows or not run.observed_ns:
        return
    exposed: dict[tuple[Any, Any], list[int]] = defaultdict(lambda: [0, 0])
    for row in _dicts(overlap_of(run.spans, run.devices)):
        sums = exposed[row["operation"], row["group"]]
        sums[0], sums[1] = sums[0] + row["exposed"], sums[1] + row["communication"]
    least_ns = SMALL_COLLECTIVES.threshold * run.observed_ns
    for row in rows:
        found = _small(run.spans, row, rows, exposed[row["operation"], row["group"]], least_ns)
        if found is not None:
            yield found


def _dicts(table: Table) -> list[_Row]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def _small(
    spans: Spans, row: _Row, rows: list[_Row], exposed: list[int], least_ns: float
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
    larger = [each for each in rows if _shows_bandwidth(each, row)]
    if not larger:
        return NotChecked(rule, f"the group has no collective {LARGER}x as large to compare with")
    best = max(larger, key=lambda each: float(each["algbw"]))
    ratio = float(best["algbw"]) / float(row["algbw"])
    low, cost, high = _exposed_transfer(row, *exposed)
    if ratio < FASTER or high < least_ns:
        return None
    if low < least_ns:
        return NotChecked(rule, "the exposed time may be waiting for peers")
    where = [
        f'"{name}" is null' if row[name] is None else f'"{name}" = {quoted(row[name])}'
        for name in _KEYS
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


def _shows_bandwidth(other: _Row, row: _Row) -> bool:
    """Return whether another collective shows the bandwidth between the same ranks."""
    same = other["group"] == row["group"] and other["algbw"] is not None
    enough = row["algbw"] is not None and other["matched"] >= FEWEST_COLLECTIVES
    return bool(same and enough and other["median bytes"] >= LARGER * row["median bytes"])


def _exposed_transfer(row: _Row, exposed: int, total_in_group: int) -> tuple[int, int, int]:
    """Return the exposed transfer of a row in nanoseconds: at least, likely, and at most.

    The exposed time is known per operation and group over all stages, and includes waiting.
    """
    total, transfer = int(row["total"]), min(int(row["transfer"] * row["count"]), int(row["total"]))
    low = max(0, exposed - (total_in_group - total) - (total - transfer))
    high = min(transfer, exposed)
    likely = round(transfer * exposed / total_in_group) if total_in_group else 0
    return low, min(high, max(low, likely)), high


def _first_call(spans: Spans, row: _Row) -> Place | None:
    table = spans.try_table("collectives", [])
    if table is None:
        return None
    keep = np.ones(len(table.rows), bool)
    for name in _KEYS:
        code, names = table.texts(name)
        keep &= code == (-1 if row[name] is None else names.index(row[name]))
    rank, start, took = (table.numbers(name)[keep] for name in ("rank", "start", "duration"))
    if not len(rank):
        return None
    at = int(np.argmin(start))
    return place_at(spans, int(rank[at]), int(start[at]), int(start[at] + took[at]))
