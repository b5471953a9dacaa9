"""Step time of an asynchronous run after a change: that of the slower pool, rollout or training."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.steps.execution_mode import generating_and_training_ranks
from lightning_rlprof.analysis.steps.step_matrix import StageWork, step_matrix
from lightning_rlprof.analysis.steps.step_selection import FEWEST, counted
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Spans

_NO_WORK = (Category.DATA_WAIT, Category.BACKPRESSURE, Category.UNATTRIBUTED_IDLE)


class Pools(NamedTuple):
    """What training and rollout work for a step, in nanoseconds by name of the stage.

    Attributes:
        step_ns: Wall time of each included step, mean of the training ranks.
        training: Work of a training rank per step by name; untraced time is last.
        rollout: Work of all rollout ranks together per step by name, untraced time left out.
        ranks: How many rollout ranks there are.
        names: Names of the stages.
    """

    step_ns: Float64s
    training: Float64s
    rollout: Float64s
    ranks: int
    names: tuple[str, ...]

    def predicted_ns(
        self, speed: Mapping[str, float] | None = None, removed: Sequence[str] = (), more: int = 0
    ) -> float:
        """Return the mean step after a change.

        Each pool overlaps with the other one. So a step takes as long as the work of the slower
        one, and what neither of them explains now, which stays.

        Args:
            speed: Speed of stages relative to now.
            removed: Stages that take no time any longer.
            more: Further rollout ranks.
        """
        factor = np.ones(len(self.names))
        for name, value in (speed or {}).items():
            factor[self.names.index(name)] = 1 / value
        for name in removed:
            factor[self.names.index(name)] = 0
        untraced = self.training[-1]
        training = float(self.training[:-1] @ factor + untraced)
        rollout = float(self.rollout @ factor) / (self.ranks + more)
        return float(self.step_ns.mean()) - self.slower_ns + max(training, rollout)

    @property
    def training_ns(self) -> float:
        """Work of a training rank per step."""
        return float(self.training.sum())

    @property
    def rollout_ns(self) -> float:
        """Work of a rollout rank per step."""
        return float(self.rollout.sum()) / self.ranks

    @property
    def slower_ns(self) -> float:
        """Work of the slower pool per step."""
        return max(self.training_ns, self.rollout_ns)


def find_pools(spans: Spans) -> Pools | str:
    """Return the pools of an asynchronous run, or why there are none."""
    generates, trains = generating_and_training_ranks(spans)
    matrix = step_matrix(spans)
    included = counted(spans, matrix.steps).mask
    ranks = spans.rank[matrix.steps]
    own = included & np.isin(ranks, trains)
    steps = np.unique(spans.step[matrix.steps[own]])
    if len(steps) < FEWEST:
        return f"{len(steps)} steps are included; {FEWEST} are needed."
    place = np.searchsorted(steps, spans.step[matrix.steps[own]])
    wall = np.bincount(place, spans.duration_ns[matrix.steps[own]]) / np.bincount(place)
    times = matrix.by_rank(spans, included)
    works = ~np.isin(categories_of(spans.names)[:-1], _NO_WORK)
    training = _per_step(times, trains, works, len(steps)) / len(trains)
    rollout = _per_step(times, generates, works, len(steps))
    return Pools(wall, training, rollout[:-1], len(generates), spans.names)


def _per_step(times: StageWork, ranks: Int64s, works: Mask, steps: int) -> Float64s:
    found: Float64s = (times.work_ns + times.waits_ns)[np.isin(times.ranks, ranks)].sum(
        axis=0
    ) / steps
    found[:-1][~works] = 0
    return found
