"""How much slower than the others each rank was, step by step, at equal work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.clock_uncertainty import uncertainty_ns
from lightning_rlprof.analysis.statistics.robust import expected, middle, middle_of_others
from lightning_rlprof.analysis.statistics.time_series import lasting
from lightning_rlprof.analysis.stragglers.rank_matrix import Lineup
from lightning_rlprof.analysis.stragglers.wait_detection import waits
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Spans

WHOLE = -1
"""Stands for all own stages together, where others are an index into ``Spans.names``."""


_COVERED = 0.5  # of the usual time: a step of which less is known says nothing
_EDGE = 0.02  # of a rank's steps at either end of its work: too rare to compare with


@dataclass(frozen=True, eq=False)
class Pace:
    """Effects of a group of ranks; a series is a stage, or all own ones together.

    Attributes:
        stages: Index into ``Spans.names`` of each series, the first `WHOLE`.
        effect: How much slower than the others, at equal work: 0.1 took 10 % longer. Shape
            (ranks, steps, series), NaN where a step says nothing.
        fitted: The same for `WHOLE`, also where no other rank had as much or as little to do.
        unequal: The same for `WHOLE` without regard to work.
        device: As ``effect`` for `WHOLE`, by the device's clock; None where nobody has one.
        own_ns: Time in stages that are the rank's own, those that no other rank runs, too; NaN in
            steps of which nothing is known.
        compared_ns: The part of it in stages in which ranks are compared.
        share: How much of that time each series is.
        seen: Series in which a slow rank would show.
        met: Whether the ranks wait for one another somewhere in a step.
        counted: Whether work was counted at all.
        lasting: For how many steps the ranks keep their pace: so many steps are one observation.
    """

    stages: Int64s
    effect: Float64s
    fitted: Float64s
    unequal: Float64s
    device: Float64s | None
    own_ns: Float64s
    compared_ns: Float64s
    share: Float64s
    seen: Mask
    met: bool
    counted: bool
    lasting: int


def pace(spans: Spans, lineup: Lineup) -> Pace:
    """Compare the ranks of a line-up with one another.

    Stages with waiting are left out; from those that may hold some, what a rank came earlier than
    the others is taken off.
    """
    work = _work(spans, lineup)
    explained = _explained(lineup, lineup.own_ns, work)
    held = waits(lineup, explained, work[0] if work else None, one_clock=_one_clock(spans, lineup))
    own = np.where(held.bound, np.nan, lineup.own_ns)
    stages = np.concatenate([[WHOLE], np.unique(lineup.stage)])
    member = (lineup.stage[:, None] == stages) | (stages == WHOLE)
    usual = np.nan_to_num(middle(explained.reshape(-1, len(member)))) * ~held.bound
    share = usual @ member
    alike = np.where(_comparable(work), own, np.nan)
    evenly = np.broadcast_to(np.where(usual > 0, usual, np.nan), own.shape)
    effect = _effect(alike, held.early_ns, explained, member)
    return Pace(
        stages,
        effect,
        _effect(own, held.early_ns, explained, member[:, :1])[:, :, 0],
        _effect(own, held.early_ns, evenly, member[:, :1])[:, :, 0],
        _device(spans, lineup, work, np.where(np.isnan(alike), np.nan, held.early_ns), member),
        *_own_ns(lineup, held.bound),
        share / max(float(share[0]), 1.0),
        held.seen @ member,
        held.met,
        bool(work),
        lasting(effect[:, :, 0]),
    )


def _own_ns(lineup: Lineup, bound: Mask) -> tuple[Float64s, Float64s]:
    """Return each rank's time in stages without waiting, and the part that can be compared."""
    compared: Float64s = np.nan_to_num(lineup.own_ns)[:, :, ~bound].sum(axis=2)
    found = compared.copy()
    rank, step, stage, ns = lineup.beside
    free = ~np.isin(stage, lineup.stage[bound])
    np.add.at(found, (rank[free], step[free]), ns[free])
    known = np.sum(~np.isnan(lineup.own_ns), axis=2)
    known[rank, step] += 1
    found[known == 0] = np.nan
    return found, compared


def _one_clock(spans: Spans, lineup: Lineup) -> bool:
    return uncertainty_ns(spans, lineup.ranks.tolist()) == 0


def _work(spans: Spans, lineup: Lineup) -> list[Float64s]:
    """Return tokens, and their squares where there are any; empty where nobody counted tokens.

    A stage that counts none itself is compared by what its rank counted in the whole step.
    """
    found = []
    for name in ("tokens", "tokens_sq"):
        own = lineup.counter(spans, name)
        if own is not None:
            found.append(_filled(own, ~np.isnan(lineup.own_ns), lineup.stage))
        elif name == "tokens":
            break
    return found


def _filled(own: Float64s, there: Mask, stage: Int64s) -> Float64s:
    told = ~np.isnan(own)
    often = told.sum(axis=(0, 1)) * 2 >= np.maximum(there.sum(axis=(0, 1)), 1)
    counts = np.isin(stage, stage[often])
    own = np.where(there.any(axis=0), own, 0.0)  # a stage that nobody ran in this step
    step = own[:, :, counts].sum(axis=2)  # NaN where one of them was lost
    return np.where(counts, own, step[:, :, None])


def _explained(lineup: Lineup, ns: Float64s, work: Sequence[Float64s]) -> Float64s:
    found = np.full(ns.shape, np.nan)
    for stage in np.unique(lineup.stage).tolist():
        slots = lineup.stage == stage
        found[:, :, slots] = expected(ns[:, :, slots], [each[:, :, slots] for each in work])
    return found


def _comparable(work: Sequence[Float64s]) -> Mask:
    """Tell where a rank's work is such as others had, too: beyond that nothing can be compared."""
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


def _effect(ns: Float64s, early: Float64s, explained: Float64s, member: Mask) -> Float64s:
    """Return the relative excess over the others' median, per series; NaN is left out.

    What a rank may have waited longer than they is taken off its own time, and not off theirs. A
    stage that is not run in every step is asked for in the others only.
    """
    valid = ~np.isnan(ns) & ~np.isnan(explained) & ~np.isnan(early)
    weight = np.nan_to_num(middle(np.where(valid, explained, np.nan).reshape(-1, len(member))))
    covered, there = (valid * weight) @ member, np.where(valid, explained, 0.0) @ member
    usual = (valid.any(axis=0) * weight) @ member
    there = np.where((covered > 0) & (covered >= _COVERED * usual), there, np.nan)
    took = (np.where(valid, ns, 0.0) @ member) / there
    charged = (np.where(valid, np.maximum(ns - early, 0.0), 0.0) @ member) / there
    found: Float64s = charged / middle_of_others(took, len(took) // 2) - 1.0
    return found


def _device(
    spans: Spans, lineup: Lineup, work: Sequence[Float64s], early: Float64s, member: Mask
) -> Float64s | None:
    took = lineup.counter(spans, "device_ns")
    if took is None:
        return None
    found: Float64s = _effect(took, early, _explained(lineup, took, work), member)[:, :, 0]
    return found
