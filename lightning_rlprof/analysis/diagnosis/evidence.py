"""What is measured of a run: quantities, facts, intervals, conditions, and missing data.

`Evidence` is a run with what several quantities need of it, each computed on first use and once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from lightning_rlprof.analysis.communication.collectives import communication_of
from lightning_rlprof.analysis.device.losses import launch_match
from lightning_rlprof.analysis.device.timeline import DeviceTimeline, device_timeline
from lightning_rlprof.analysis.ledger.ledger import OUTSIDE, Accounts, accounts_of, compute_accounts
from lightning_rlprof.analysis.steps.partition import exclusive_ns, open_spans, partition
from lightning_rlprof.analysis.steps.step_selection import counted, shadow_steps
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of

MET, NOT_MET, UNDECIDED = "met", "not met", "undecided"
"""What a condition is: its whole interval is beyond the limit, on the other side, or neither."""

HIGH, MEDIUM = "high", "medium"
"""Confidence of a finding."""

Unit = Literal["share", "ratio", "count", "number", "bytes", "yes/no", "ms", "text"]
"""How a value is written."""


PARTS = 20
"""Parts of the devices' time, with equally much work each, for the bootstrap."""

FEWEST_STEPS = 5
"""Steps from which on a share of the step time counts: fewer may all be unusual."""

FEWEST_KERNELS = 200
"""Kernels and copies per device needed for shares by parts."""

_MEASURED: "WeakKeyDictionary[Spans, dict[Quantity, Measurement | NoData]]" = WeakKeyDictionary()
_DRAWS = 1_000
# The bootstrap draws from at most this many parts of the run; more are merged first.
_MAX_PARTS = 1_000


def shown(value: float, unit: Unit) -> str:
    """Return a value as text.

    Example::

        >>> shown(0.613, "share"), shown(0.004, "share"), shown(1.52, "ratio")
        ('61%', '0.4%', '1.52x')
    """
    if unit == "yes/no":
        return "yes" if value > 0.5 else "no"
    if unit == "share":
        return f"{value:.0%}" if abs(value) >= 0.0995 or not value else f"{value:.1%}"
    if unit == "bytes":
        return f"{value / 2**20:,.4g} MiB"
    if unit == "ratio":
        return f"{value:.2f}x"
    if unit == "ms":
        return f"{value:,.3g} ms"
    return (
        f"{value:,.0f}" if unit == "count" and (value >= 10 or not value % 1) else f"{value:,.3g}"
    )


class Fact(NamedTuple):
    """One thing that was measured, by name; ``low`` and ``high`` are its interval, if it has one.

    Example::

        >>> Fact("rank", 3).text, Fact("growth per step", 2**20, "bytes").text
        ('rank 3', 'growth per step 1 MiB')
    """

    name: str
    value: str | int | float
    unit: Unit = "count"
    low: float | None = None
    high: float | None = None

    @property
    def amount(self) -> str:
        """The value as text."""
        return self.value if isinstance(self.value, str) else shown(self.value, self.unit)

    @property
    def text(self) -> str:
        """The fact in words."""
        interval = ""
        if self.low is not None and self.high is not None:
            interval = f" (95% CI {shown(self.low, self.unit)}–{shown(self.high, self.unit)})"
        if self.name.startswith("of ") and self.unit == "share":
            return f"{self.amount} {self.name}{interval}"
        return f"{self.name} {self.amount}{interval}"


class Place(NamedTuple):
    """Where in the run to look: rank, step, and times on the run's timeline.

    ``step`` is None outside steps. ``from_ns`` and ``to_ns`` are None if no times are known.
    """

    rank: int
    step: int | None
    from_ns: int | None
    to_ns: int | None


@dataclass(frozen=True)
class Measured:
    """A quantity of a run with its interval; an exact one has equal bounds.

    Attributes:
        value: The quantity.
        low: Lower bound.
        high: Upper bound.
        lost_ns: Time of the job that it is, ranks summed; None if it is not a time.
        bounds_ns: The same at the bounds, if it was taken from captured steps.
        facts: What else is known of it.
        query: The SELECT that returns the events measured.
        place: Where the first of them is.
        confidence: Of a finding, if the interval does not decide it.
    """

    value: float
    low: float
    high: float
    lost_ns: float | None = None
    bounds_ns: tuple[float, float] | None = None
    facts: tuple[Fact, ...] = ()
    query: str = ""
    place: Place | None = None
    confidence: str = ""


class NoData(Exception):  # noqa: N818 -- it is an answer
    """Why a run does not show a quantity, and how to record it; both begin a sentence."""

    def __init__(self, why: str, how: str = "") -> None:
        super().__init__(why)
        self.why, self.how = why, how

    @classmethod
    def unless(cls, found: int, fewest: int, what: str, how: str = "Record more steps") -> None:
        """Raise it if there is too little of something.

        Example::

            >>> NoData.unless(3, 5, "complete steps")
            Traceback (most recent call last):
            lightning_rlprof.analysis.diagnosis.evidence.NoData: 3 complete steps; 5 are needed
        """
        if found < fewest:
            raise cls(f"{found} {what}; {fewest} are needed", how)


Measurement = Measured | tuple[Measured, ...]
"""What a quantity is; several of it if it may be beyond the limit at several places."""


@dataclass(frozen=True)
class Quantity:
    """Something that a run shows as a number; compared with a limit, it is a `Condition`.

    Attributes:
        text: What it is, as in ``rollout, of the job``.
        unit: How its values are written.
        measure: Returns it; raises `NoData` if the run does not show it.

    Example::

        >>> share = Quantity("rollout", "share", lambda run: exact(0.6))
        >>> (share > 0.5).bound, (share < 0.5).bound
        ('above 50%', 'below 50%')
    """

    text: str
    unit: Unit
    measure: Callable[["Evidence"], Measurement]

    def __gt__(self, limit: float) -> "Condition":
        """Return the condition that it is above a limit."""
        return Condition(self, limit)

    def __lt__(self, limit: float) -> "Condition":
        """Return the condition that it is below a limit."""
        return Condition(self, limit, below=True)

    @property
    def yes(self) -> "Condition":
        """The condition that the answer to a yes/no quantity is yes."""
        return self > 0.5

    @property
    def no(self) -> "Condition":
        """The condition that it is no."""
        return self < 0.5


def exact(value: float, **more: Any) -> Measured:
    """Return a quantity that has no interval; ``more`` are further fields of `Measured`."""
    return Measured(value, value, value, **more)


@dataclass(frozen=True)
class Condition:
    """A quantity and its limit; met if the whole interval is above it, or below it."""

    quantity: Quantity
    limit: float
    below: bool = False

    def state(self, found: Measured) -> str:
        """Return whether the condition is met, contradicted or undecided.

        Example::

            >>> limit = Quantity("", "share", exact) > 0.5
            >>> [limit.state(Measured(0.5, low, high)) for low, high in
            ...  ((0.6, 0.7), (0.4, 0.6), (0.3, 0.5))]
            ['met', 'undecided', 'not met']
        """
        met, contradicted = found.low > self.limit, found.high <= self.limit
        if self.below:
            met, contradicted = found.high < self.limit, found.low >= self.limit
        return MET if met else NOT_MET if contradicted else UNDECIDED

    def confidence(self, found: Measured) -> str:
        """Return how sure a met condition is: high if the interval is far beyond the limit."""
        if found.confidence or self.quantity.unit != "share":
            return found.confidence or HIGH
        limit = self.limit
        clearly = (
            found.high < limit / 2 if self.below else found.low > min(2 * limit, (1 + limit) / 2)
        )
        return HIGH if clearly else MEDIUM

    @property
    def bound(self) -> str:
        """The limit in words, as in ``above 50%``."""
        if self.quantity.unit == "yes/no":
            return "no" if self.below else "yes"
        return f"{'below' if self.below else 'above'} {shown(self.limit, self.quantity.unit)}"


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

    def measure(self, quantity: Quantity) -> Measurement | NoData:
        """Return a quantity of the run, or why the run does not show it; measured once."""
        if quantity not in self._measured:
            try:
                self._measured[quantity] = quantity.measure(self)
            except NoData as lacking:
                self._measured[quantity] = lacking.with_traceback(None)
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
    def sees_losses(self) -> bool:
        """Whether launches were recorded, without which lost kernels cannot be detected."""
        return launch_match(self.spans).launches > 0

    @cached_property
    def collectives(self) -> list[dict[str, Any]]:
        """The rows of `communication`."""
        return rows_of(communication_of(self.spans, self.devices))

    @cached_property
    def accounts(self) -> Accounts:
        """The job's time by category and step, ranks summed."""
        return accounts_of(self.spans)

    @cached_property
    def category_ns(self) -> Float64s:
        """Time of each step by category; shape (steps, categories), ranks summed.

        Steps in which a rank warmed up, and those that recorded only their length, are 0, as is the
        time of ranks that lack a step.
        """
        ns = self.accounts.job_ns[:OUTSIDE].astype(np.float64)
        ns = np.where(ns[:, [Category.WARM_UP]] > 0, 0.0, ns)
        ns[:, Category.OUTSIDE_STEPS] = 0.0
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
        amount = self.spans.took_ns(rows) if values is None else values
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


def exact_share(part: Float64s, whole: Float64s) -> Measured:
    """Return the share that steps spent on something; what they did cost has no interval.

    Raises:
        NoData: The steps are too few.
    """
    NoData.unless(len(whole), FEWEST_STEPS, "complete steps after warm-up")
    if not whole.sum():
        raise NoData("The included steps have none of it", "Record more steps")
    return exact(float(part.sum() / whole.sum()), lost_ns=float(part.sum()))


def sampled_share(part: Float64s, whole: Float64s) -> Measured:
    """Return a share with its 95% interval, by a bootstrap over steps; raises as `exact_share`."""
    exact_share(part, whole)
    return estimated_share(part, whole)


def estimated_share(part: Float64s, whole: Float64s) -> Measured:
    """Return a share with its 95% interval, by a bootstrap over parts of the run."""
    return Measured(float(part.sum() / whole.sum()), *share_interval(part, whole))


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


# Most quantities of one run have the same number of parts, so they share the draws.
@lru_cache(maxsize=1)
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
