"""A run with what several quantities need of it, each computed on first use and once."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from lightning_rlprof.analysis.device.launches import UnmatchedLaunches, unmatched_launches
from lightning_rlprof.analysis.device.timeline import DeviceTimeline, device_timeline
from lightning_rlprof.analysis.diagnosis.problem import (
    Fact,
    Measured,
    Measurement,
    NoData,
    Place,
    Quantity,
)
from lightning_rlprof.analysis.ledger.ledger import OUTSIDE, Accounts, accounts_of, compute_accounts
from lightning_rlprof.analysis.steps.partition import exclusive_ns, open_spans, partition
from lightning_rlprof.analysis.steps.step_selection import counted, shadow_steps
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans

PARTS = 20
"""Parts of the devices' time, with equally much work each, for the bootstrap."""

FEWEST_STEPS = 5
"""Steps from which on a share of the step time counts: fewer may all be unusual."""

FEWEST_KERNELS = 200
"""Kernels and copies per device needed for shares by parts."""

_MEASURED: "WeakKeyDictionary[Spans, dict[Quantity, Measurement]]" = WeakKeyDictionary()
_DRAWS = 1_000
_MAX_PARTS = 1_000  # parts of the run that the bootstrap draws from; more are merged first


class Evidence:
    """A run and what was measured of it.

    A quantity is measured once as long as the run is there, for all that ask. Tables of profilers
    are read once for all quantities: they can be large.
    """

    def __init__(self, spans: Spans) -> None:
        self.spans = replace(
            spans, tables={name: cache(read) for name, read in spans.tables.items()}
        )
        self._measured = _MEASURED.setdefault(spans, {})

    def measure(self, quantity: Quantity) -> Measurement:
        """Return a quantity of the run, measured once."""
        if quantity not in self._measured:
            self._measured[quantity] = quantity.measure(self)
        return self._measured[quantity]

    def value(self, quantity: Quantity) -> Measured | None:
        """Return a quantity that is one number; None if the run does not show it."""
        found = self.measure(quantity)
        return found if isinstance(found, Measured) else None

    @cached_property
    def devices(self) -> DeviceTimeline:
        """What devices ran."""
        return device_timeline(self.spans)

    @cached_property
    def has_steps(self) -> bool:
        """Whether a step is complete."""
        return len(self.spans.rows(kind="step")) > 0

    @cached_property
    def observed_ns(self) -> int:
        """Time in which a profiler recorded the devices, summed over devices."""
        profiled = [lane.profiled for lane in self.devices.lanes]
        return sum(int((end - start).sum()) for start, end in profiled)

    @cached_property
    def launches(self) -> UnmatchedLaunches | None:
        """How many launches have no kernel; None without a torch.profiler capture."""
        return unmatched_launches(self.spans)

    @cached_property
    def accounts(self) -> Accounts:
        """The job's time by category and step, ranks summed."""
        return accounts_of(self.spans)

    @cached_property
    def category_ns(self) -> Float64s:
        """Time of each step by category; shape (steps, categories), ranks summed.

        Steps in which a rank warmed up, and those that recorded only their length, are 0.
        """
        ns = self.accounts.job_ns[:OUTSIDE].astype(np.float64)
        ns = np.where(ns[:, [Category.WARM_UP]] > 0, 0.0, ns)
        ns[np.isin(self.accounts.steps, shadow_steps(self.spans))] = 0.0
        return ns

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
    def exclusive_ns(self) -> Int64s:
        """Time of each span in steps without that of the stages inside it; 0 for other kinds."""
        return exclusive_ns(self.spans, partition(self.spans).divided)

    @cached_property
    def device_accounts(self) -> Accounts:
        """The time in which devices were profiled by category and part.

        Parts are steps if enough of them were profiled, else `PARTS` with equally much work.
        """
        rows = self.spans.rows(kind="step")
        low = min((int(lane.work.start_ns[0]) for lane in self.devices.lanes), default=0)
        high = max((int(lane.work.end_ns.max()) for lane in self.devices.lanes), default=0)
        during = rows[(self.spans.start_ns[rows] < high) & (self.spans.end_ns[rows] > low)]
        number, first = np.unique(self.spans.step[during], return_index=True)
        if len(number) >= FEWEST_STEPS:
            during = during[first]
            ends = np.append(self.spans.start_ns[during], self.spans.end_ns[during])
            return compute_accounts(self.spans, cuts=np.unique(ends))
        starts = np.sort(np.concatenate([lane.work.start_ns for lane in self.devices.lanes]))
        cuts = starts[np.arange(1, PARTS) * len(starts) // PARTS]
        return compute_accounts(self.spans, cuts=cuts)

    @cached_property
    def stages(self) -> list[str]:
        """Names of the stages in included steps."""
        rows = self.spans.rows(kind="stage")
        rows = rows[np.isin(self.spans.step[rows], self.included)]
        return [self.spans.names[code] for code in np.unique(self.spans.name[rows]).tolist()]

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
        return np.bincount(place, amount[keep], len(self.included)).astype(np.float64)

    def of_captures(self, found: Measured) -> Measured:
        """Return a share of the captured time with what it is of the job, if steps are alike."""
        whole = max(float(self.category_ns.sum()), float(self.observed_ns))
        bounds = (found.low * whole, found.high * whole)
        captured = Fact("of the captured time", found.value, "share", found.low, found.high)
        return replace(
            found,
            lost_ns=found.value * whole,
            bounds_ns=bounds,
            facts=(captured, *found.facts),
        )


def exact_share(part: Float64s, whole: Float64s) -> Measurement:
    """Return the share that steps spent on something; what they did cost has no interval."""
    if len(whole) < FEWEST_STEPS:
        why = f"{len(whole)} complete steps after warm-up; {FEWEST_STEPS} are needed"
        return NoData(why, "Record more steps")
    if not whole.sum():
        return NoData("The included steps have none of it", "Record more steps")
    share = float(part.sum() / whole.sum())
    return Measured(share, share, share, lost_ns=float(part.sum()))


def sampled_share(part: Float64s, whole: Float64s) -> Measurement:
    """Return a share with its 95% interval, by a bootstrap over steps."""
    found = exact_share(part, whole)
    if not isinstance(found, Measured):
        return found
    low, high = share_interval(part, whole)
    return Measured(found.value, low, high)


def share_interval(
    part: Float64s, whole: Float64s, most: Float64s | None = None
) -> tuple[float, float]:
    """Return the 95% confidence interval of a share, by a bootstrap over parts of the run.

    Args:
        part: Time of interest in each part of the run.
        whole: Length of each part.
        most: Upper limit of the time of interest, if some of it is unknown; default ``part``.
    """
    part, whole, most = map(_merged, (part, whole, part if most is None else most))
    draws = _draws(len(part))
    length = np.maximum(draws @ whole, 1.0)
    low, high = np.quantile(draws @ part / length, 0.025), np.quantile(draws @ most / length, 0.975)
    return float(low), float(high)


def _merged(parts: Float64s) -> Float64s:
    """Return at most `_MAX_PARTS` parts: neighbors are added up."""
    if len(parts) <= _MAX_PARTS:
        return parts
    merged: Float64s = np.add.reduceat(parts, np.arange(_MAX_PARTS) * len(parts) // _MAX_PARTS)
    return merged


@lru_cache(maxsize=1)  # most quantities of one run have the same number of parts
def _draws(parts: int) -> Float64s:
    """Return how often each part is drawn, shape (draws, parts)."""
    drawn = np.random.default_rng(0).integers(0, parts, (_DRAWS, parts))
    place = (drawn + parts * np.arange(_DRAWS)[:, None]).ravel()
    return np.bincount(place, minlength=_DRAWS * parts).reshape(_DRAWS, parts).astype(np.float64)


def place_of(spans: Spans, rows: Int64s) -> Place | None:
    """Return the place of the first of some spans; None if there are none."""
    if not len(rows):
        return None
    row = int(rows[0])
    step = int(spans.step[row]) or None
    return Place(int(spans.rank[row]), step, int(spans.start_ns[row]), int(spans.end_ns[row]))


def place_at(spans: Spans, rank: int, from_ns: int, to_ns: int) -> Place:
    """Return the place of a time range, with the step of its rank that contains its start."""
    row = int(open_spans(spans, "step", rank, np.array([from_ns]))[0])
    return Place(rank, int(spans.step[row]) if row >= 0 else None, from_ns, to_ns)


def quoted(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def spans_query(spans: Spans, rows: Sequence[int]) -> str:
    """Return the SELECT of exactly these spans, by rank and id."""
    names = ", ".join(f"({spans.rank[row]}, {spans.id[row]})" for row in rows)
    return f"select * from spans where (rank, id) in ({names}) order by duration_ns desc"
