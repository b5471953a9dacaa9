"""Step time of an asynchronous run after a change: each step ends with its last rank.

Ranks that generate and ranks that train work at the same time. In each step the one that has most
to do decides, so the recorded steps are replayed one by one. Where rollouts go on over the ends of
steps, their ranks are servers that only have to keep up on average.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.steps.execution_mode import (
    generating_and_training_ranks,
    rollouts_and_updates,
)
from lightning_rlprof.analysis.steps.partition import containing_step
from lightning_rlprof.analysis.steps.step_matrix import StepMatrix, step_matrix
from lightning_rlprof.analysis.steps.step_selection import MIN_STEPS, counted
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Spans

_NO_WORK = (Category.DATA_WAIT, Category.BACKPRESSURE, Category.UNATTRIBUTED_IDLE)
_MAX_LATER = 0.1  # If more of the rollouts end in a later step, they go on over steps.
_MIN_EXPLAINED_SHARE = 0.9  # The work of the slower pool must be at least this share of the step.


class Pools(NamedTuple):
    """What ranks that train and ranks that generate work in each step, in ns by name of the stage.

    Attributes:
        step_ns: Wall time of each included step, mean of the training ranks.
        training: Work by training rank, step and name; untraced time is last.
        rollout: The same of rollout ranks, untraced time left out.
        names: Names of the stages.
    """

    step_ns: Float64s
    training: Float64s
    rollout: Float64s
    names: tuple[str, ...]

    def longest_ns(self, factors: Mapping[str, float] | None = None, more: int = 0) -> Float64s:
        """Return for each step the work of the rank that has most, after a change.

        Args:
            factors: What is left of the time of stages: 0.5 of one that is twice as fast.
            more: Further rollout ranks.
        """
        factor = np.array([(factors or {}).get(name, 1.0) for name in self.names])
        ranks = len(self.rollout)
        training = self.training @ np.append(factor, 1.0)
        rollout = self.rollout @ factor * (ranks / (ranks + more))
        found: Float64s = np.maximum(training.max(axis=0), rollout.max(axis=0))
        return found


def find_pools(spans: Spans) -> Pools | str:
    """Return the pools of an asynchronous run, or why its steps can't be predicted."""
    generates, trains = generating_and_training_ranks(spans)
    matrix = step_matrix(spans)
    included = counted(spans, matrix.steps).mask
    ranks = spans.rank[matrix.steps]
    own = included & np.isin(ranks, trains)
    steps, place = np.unique(spans.step[matrix.steps[own]], return_inverse=True)
    if len(steps) < MIN_STEPS:
        return f"{len(steps)} steps are included; {MIN_STEPS} are needed."
    wall = np.bincount(place, spans.took_ns(matrix.steps[own])) / np.bincount(place)
    training, rollout = (_work(spans, matrix, each, steps) for each in (trains, generates))
    _without_meeting(spans, training, rollout)
    if _go_on(spans, matrix.steps[included], generates):
        rollout[:] = rollout.mean(axis=(0, 1))
    pools = Pools(wall, training, rollout[:, :, :-1], spans.names)
    explained = float(pools.longest_ns().mean() / max(wall.mean(), 1.0))
    if not _MIN_EXPLAINED_SHARE <= explained <= 1 / _MIN_EXPLAINED_SHARE:
        return (
            f"The work of the slower ranks explains {explained:.0%} of a step; "
            f"{_MIN_EXPLAINED_SHARE:.0%} are needed to predict another."
        )
    return pools


def _go_on(spans: Spans, steps: Int64s, generates: Int64s) -> bool:
    """Return whether rollouts cross the ends of steps, instead of ending with them."""
    rows, _ = rollouts_and_updates(spans)
    rows = rows[np.isin(spans.rank[rows], generates)]
    place = containing_step(spans, steps, rows, spans.rank)
    inside = place >= 0
    ends = spans.end_ns[steps[place[inside]]]
    return bool(np.mean(spans.end_ns[rows[inside]] > ends) > _MAX_LATER) if inside.any() else True


def _work(spans: Spans, matrix: StepMatrix, ranks: Int64s, steps: Int64s) -> Float64s:
    """Return the work of some ranks by rank, step and name, without waiting of any kind."""
    rank, step = spans.rank[matrix.steps], spans.step[matrix.steps]
    at = np.minimum(np.searchsorted(steps, step), len(steps) - 1)
    known = np.isin(rank, ranks) & (steps[at] == step)
    rows = np.where(known, np.searchsorted(ranks, rank) * len(steps) + at, -1)
    shape = (len(ranks) * len(steps), len(spans.names) + 1)
    found: Float64s = matrix.totals(rows, shape, matrix.work_ns)[0].astype(np.float64)
    found[:, :-1][:, np.isin(categories_of(spans.names)[:-1], _NO_WORK)] = 0
    return found.reshape(len(ranks), len(steps), -1)


def _without_meeting(spans: Spans, training: Float64s, rollout: Float64s) -> None:
    """Take out what ranks wait for one another in weight syncs, which both kinds of ranks enter."""
    codes = np.flatnonzero(categories_of(spans.names)[:-1] == Category.WEIGHT_SYNC)
    for code in codes.tolist():
        every: Mask = np.concatenate([training[:, :, code], rollout[:, :, code]])
        took = every[every.any(axis=1)]
        if len(took) > 1 and training[:, :, code].any() and rollout[:, :, code].any():
            shortest = float(np.median(took.min(axis=0)))
            for pool in (training, rollout):
                pool[:, :, code] = np.minimum(pool[:, :, code], shortest)
