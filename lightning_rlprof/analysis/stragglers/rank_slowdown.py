"""Slowdown of each rank relative to the others, step by step, at equal work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.statistics.robust import expected, leave_one_out_median, nan_median
from lightning_rlprof.analysis.statistics.time_series import lasting
from lightning_rlprof.analysis.steps.clock_uncertainty import uncertainty_ns
from lightning_rlprof.analysis.steps.rank_matrix import RankMatrix
from lightning_rlprof.analysis.steps.wait_detection import detect_waits
from lightning_rlprof.analysis.steps.work import counted_amounts
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Spans

WHOLE = -1
"""Stands for all stages without waiting; other series are an index into ``Spans.names``."""


_COVERED = 0.5  # of the usual time: steps with less of it are not compared
_EDGE = 0.02  # of a rank's steps at either end of its work: too rare to compare with


@dataclass(frozen=True, eq=False)
class RankSlowdown:
    """Slowdowns of a group of ranks; a series is a stage, or all stages without waiting together.

    Attributes:
        stages: Index into ``Spans.names`` of each series, the first is `WHOLE`.
        effect: Slowdown relative to the others at equal work; 0.1 is 10% longer. Shape
            (ranks, steps, series), NaN for steps that can't be compared.
        most: As ``effect`` for `WHOLE`, if the others waited as long as they may have: what a
            slow rank can at most have.
        fitted: The same for `WHOLE`, also if no other rank had as much or as little work.
        unequal: The same for `WHOLE` without adjusting for work.
        device: As ``effect`` for `WHOLE`, by the device's clock; None without device times.
        own_ns: Time in stages without waiting, including those that no other rank runs; NaN for
            steps without data.
        compared_ns: The part of it in stages in which ranks are compared.
        share: Share of each series in that time.
        waiting: Share of the time of all stages that is in stages with waiting.
        seen: Series in which a slow rank would show.
        has_sync: Whether the ranks wait for one another somewhere in a step.
        counted: Whether work was counted.
        lasting: Number of steps that count as one sample, because steps are autocorrelated.
    """

    stages: Int64s
    effect: Float64s
    most: Float64s
    fitted: Float64s
    unequal: Float64s
    device: Float64s | None
    own_ns: Float64s
    compared_ns: Float64s
    share: Float64s
    waiting: float
    seen: Mask
    has_sync: bool
    counted: bool
    lasting: int


def rank_slowdown(spans: Spans, matrix: RankMatrix) -> RankSlowdown:
    """Compare the ranks of a matrix with one another.

    Stages with waiting are excluded. From stages that may include some, the time by which a rank
    was early is subtracted.
    """
    known = ~np.isnan(matrix.own_ns)
    # A stage that no rank ran in a step has no work there; lost spans of one rank are unknown.
    ran = np.broadcast_to(known.any(axis=0), known.shape)
    work = counted_amounts(lambda name: matrix.counter(spans, name), ran, known, matrix.stage)
    explained = _explained(matrix, matrix.own_ns, work)
    waits = detect_waits(
        matrix, explained, work[0] if work else None, one_clock=_one_clock(spans, matrix)
    )
    own = np.where(waits.bound, np.nan, matrix.own_ns)
    stages = np.concatenate([[WHOLE], np.unique(matrix.stage)])
    member = (matrix.stage[:, None] == stages) | (stages == WHOLE)
    typical = np.nan_to_num(nan_median(explained.reshape(-1, len(member))))
    usual = typical * ~waits.bound
    share = usual @ member
    alike = np.where(_comparable(work), own, np.nan)
    evenly = np.broadcast_to(np.where(usual > 0, usual, np.nan), own.shape)
    effect = _relative_slowdown(alike, waits.early_ns, explained, member)
    return RankSlowdown(
        stages,
        effect,
        _relative_slowdown(alike, waits.early_ns, explained, member[:, :1], waited=True)[:, :, 0],
        _relative_slowdown(own, waits.early_ns, explained, member[:, :1])[:, :, 0],
        _relative_slowdown(own, waits.early_ns, evenly, member[:, :1])[:, :, 0],
        _device_slowdown(
            spans, matrix, work, np.where(np.isnan(alike), np.nan, waits.early_ns), member
        ),
        *_own_ns(matrix, waits.bound),
        share / max(float(share[0]), 1.0),
        1 - float(share[0]) / max(float(typical.sum()), 1.0),
        waits.seen @ member,
        waits.has_sync,
        bool(work),
        lasting(effect[:, :, 0]),
    )


def _own_ns(matrix: RankMatrix, bound: Mask) -> tuple[Float64s, Float64s]:
    """Return each rank's time in stages without waiting, and the part that can be compared."""
    compared: Float64s = np.nan_to_num(matrix.own_ns)[:, :, ~bound].sum(axis=2)
    found = compared.copy()
    rank, step, stage, ns = matrix.uncompared
    free = ~np.isin(stage, matrix.stage[bound])
    np.add.at(found, (rank[free], step[free]), ns[free])
    known = np.sum(~np.isnan(matrix.own_ns), axis=2)
    known[rank, step] += 1
    found[known == 0] = np.nan
    return found, compared


def _one_clock(spans: Spans, matrix: RankMatrix) -> bool:
    return uncertainty_ns(spans, matrix.ranks.tolist()) == 0


def _explained(matrix: RankMatrix, ns: Float64s, work: Sequence[Float64s]) -> Float64s:
    found = np.full(ns.shape, np.nan)
    for stage in np.unique(matrix.stage).tolist():
        slots = matrix.stage == stage
        found[:, :, slots] = expected(ns[:, :, slots], [each[:, :, slots] for each in work])
    return found


def _comparable(work: Sequence[Float64s]) -> Mask:
    """Mark where a rank's work is in the range of other ranks; outside, ranks can't be compared."""
    inside: Mask = np.ones((1, 1, 1), dtype=bool)
    for each in work:
        ordered = np.sort(each, axis=1)
        count = np.maximum(np.sum(~np.isnan(each), axis=1, keepdims=True), 1)
        low = np.take_along_axis(ordered, ((count - 1) * _EDGE).astype(np.int64), 1)
        high = np.take_along_axis(ordered, np.ceil((count - 1) * (1 - _EDGE)).astype(np.int64), 1)
        inside = inside & (each >= -_highest_other(-low)) & (each <= _highest_other(high))
    return inside


def _highest_other(values: Float64s) -> Float64s:
    """Return for each rank the highest value of another one."""
    values = np.where(np.isnan(values), -np.inf, values)
    first = values.max(axis=0, keepdims=True)
    top = np.argmax(values, axis=0, keepdims=True)
    rest = values.copy()
    np.put_along_axis(rest, top, -np.inf, 0)
    own = np.arange(len(values)).reshape(-1, 1, 1) == top
    found: Float64s = np.where(own, rest.max(axis=0, keepdims=True), first)
    return found


def _relative_slowdown(
    ns: Float64s, early: Float64s, explained: Float64s, member: Mask, *, waited: bool = False
) -> Float64s:
    """Return the relative excess over the others' median, per series; NaN is left out.

    The time by which a rank was early is subtracted from its own time, and not from the others'.
    With ``waited`` it is the other way round. A stage that isn't run in every step is only expected
    in the others.
    """
    valid = ~np.isnan(ns) & ~np.isnan(explained) & ~np.isnan(early)
    weight = np.nan_to_num(nan_median(np.where(valid, explained, np.nan).reshape(-1, len(member))))
    covered, there = (valid * weight) @ member, np.where(valid, explained, 0.0) @ member
    usual = (valid.any(axis=0) * weight) @ member
    there = np.where((covered > 0) & (covered >= _COVERED * usual), there, np.nan)
    took = (np.where(valid, ns, 0.0) @ member) / there
    charged = (np.where(valid, np.maximum(ns - early, 0.0), 0.0) @ member) / there
    own, others = (took, charged) if waited else (charged, took)
    usually = leave_one_out_median(others, len(took) // 2)
    found: Float64s = own / np.where(usually > 0, usually, np.nan) - 1.0
    return found


def _device_slowdown(
    spans: Spans, matrix: RankMatrix, work: Sequence[Float64s], early: Float64s, member: Mask
) -> Float64s | None:
    took = matrix.counter(spans, "device_ns")
    if took is None:
        return None
    found: Float64s = _relative_slowdown(took, early, _explained(matrix, took, work), member)[
        :, :, 0
    ]
    return found
