"""What the quantities of advice share: the run, its included steps, and sums by step."""

from functools import cached_property

import numpy as np

from lightning_rlprof.analysis.findings.finding import RunData
from lightning_rlprof.analysis.ledger.accounts import OUTSIDE
from lightning_rlprof.analysis.steps.partition import exclusive_ns, partition
from lightning_rlprof.analysis.steps.step_selection import counted
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.tables.arrays import Float64s, Int64s


class Evidence(RunData):
    """A run with what several quantities need of it, computed on first use and once."""

    @cached_property
    def included(self) -> Int64s:
        """Numbers of the included steps, ascending: without warm-up, captures and interrupted."""
        rows = self.spans.rows(kind="step")
        return np.unique(self.spans.step[rows[counted(self.spans, rows).mask]])

    @cached_property
    def wall_ns(self) -> Float64s:
        """Length of each included step, ranks summed."""
        return self.by_step(self.spans.rows(kind="step"), None)

    @cached_property
    def category_ns(self) -> Float64s:
        """Time of each included step by category; shape (steps, categories), ranks summed."""
        of_job = self.accounts.job_ns[:OUTSIDE].astype(np.float64)
        own = of_job[np.isin(self.accounts.steps, self.included)]
        return own[~(own[:, Category.WARM_UP] > 0)]

    @cached_property
    def exclusive_ns(self) -> Int64s:
        """Time of each span in steps without that of the stages inside it; 0 for other kinds."""
        return exclusive_ns(self.spans, partition(self.spans).divided)

    def by_step(self, rows: Int64s, values: Float64s | None) -> Float64s:
        """Sum values of spans by included step; without values, their lengths.

        Args:
            rows: Rows of spans; those of other steps are left out.
            values: One value per row.
        """
        amount = self.spans.duration_ns[rows] if values is None else values
        step = self.spans.step[rows]
        keep = np.isin(step, self.included)
        place = np.searchsorted(self.included, step[keep])
        sums = np.bincount(place, amount[keep], len(self.included))
        return sums.astype(np.float64)
