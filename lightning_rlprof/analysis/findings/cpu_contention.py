"""Training threads that wait for a CPU, and what that explains: slow steps, ranks that wait."""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.comparison.changes import OUTLIER
from lightning_rlprof.analysis.steps.step_selection import states
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans

CPU_WAIT = "cpu_wait_ns"
"""Counter of steps: time in which the training thread was ready, and every CPU was taken."""

EXPLAINED = "training threads waited for a CPU meanwhile"
"""Why a rule is not checked whose finding would be about the machine."""


class CpuWaits(NamedTuple):
    """Waiting for a CPU in complete steps, or what else their counters say of lost time.

    Attributes:
        steps: Their numbers, ascending.
        ns: Time waited; shape (steps, ranks).
        wall_ns: Length of the steps, ranks summed.
    """

    steps: Int64s
    ns: Int64s
    wall_ns: Int64s

    def explain_change(self, change: str, step: int, delta_ns: float) -> bool:
        """Return whether half of the longer time of a step, or of all since, was such waiting.

        A step takes as long as its slowest rank.
        """
        slowest = self.ns.max(axis=1)
        since = self.steps == step if change == OUTLIER else self.steps >= step
        if since.all() or not since.any():
            return False
        return bool(2 * (slowest[since].mean() - slowest[~since].mean()) >= delta_ns)

    def explain_ranks(self, cost_ns: float) -> bool:
        """Return whether half of the waiting for other ranks is because these had no CPU."""
        late = self.ns.max(axis=1, keepdims=True) - self.ns
        return bool(2 * late.sum() >= cost_ns)


def cpu_waits(spans: Spans) -> CpuWaits | None:
    """Return the waiting for a CPU of a run; None if no step has it."""
    return counted_in_steps(spans, CPU_WAIT)


def counted_in_steps(spans: Spans, counter: str) -> CpuWaits | None:
    """Return the time that a counter of steps says was lost; None if no step has it."""
    rows, ns = spans.amounts(counter, np.int64)
    steps = rows[spans.kind[rows] == KINDS.index("step")]
    steps = steps[states(spans, steps) == 0]
    if not len(steps):
        return None
    ns = np.minimum(ns[np.isin(rows, steps)], spans.duration_ns[steps])
    numbers, step = np.unique(spans.step[steps], return_inverse=True)
    ranks, rank = np.unique(spans.rank[steps], return_inverse=True)
    by_rank = np.zeros((len(numbers), len(ranks)), np.int64)
    wall = np.zeros(len(numbers), np.int64)
    np.add.at(by_rank, (step, rank), ns)
    np.add.at(wall, step, spans.duration_ns[steps])
    return CpuWaits(numbers, by_rank, wall)
