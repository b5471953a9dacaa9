"""What a rule is, what it reports, and how its measured interval becomes a decision."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.launches import UnmatchedLaunches, unmatched_launches
from lightning_rlprof.analysis.device.timeline import DeviceTimeline, device_timeline
from lightning_rlprof.analysis.findings.cpu_contention import CpuWaits, cpu_waits
from lightning_rlprof.analysis.ledger.accounts import Accounts, compute_accounts
from lightning_rlprof.analysis.ledger.ledger import accounts_of
from lightning_rlprof.analysis.steps.partition import open_spans
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

HIGH, MEDIUM = "high", "medium"
"""Confidence of a finding. With less than medium confidence, a rule reports nothing."""

KERNELS_LOST = "kernels were lost, see data_quality"

PARTS = 20
"""Parts of the devices' time, with equally much work each, for the bootstrap."""

FEWEST_STEPS = 5
"""Steps needed to know how much a share changes from step to step."""

FEWEST_KERNELS = 200
"""Kernels and copies per device needed to check rules by parts."""

_DRAWS = 1_000
_MOST_PARTS = 1_000  # parts of the run that the bootstrap draws from; more are merged first


class Rule(NamedTuple):
    """When a problem is reported, and what to do about it.

    Attributes:
        name: What the note calls the rule if it could not be checked.
        title: Headline of the finding; evidence fills in the fields in braces.
        threshold: Share above which the rule reports.
        suggestion: What to try.
        ruled_out_if: Observation that disproves the finding.
        command: Command that shows the number; RUN stands for the run.
        reports_below: Whether low values are the problem, as with MFU.
        idea: Whether it is time that might be saved rather than time that was lost. Problems come
            first.
    """

    name: str
    title: str
    threshold: float
    suggestion: str
    ruled_out_if: str
    command: str
    reports_below: bool = False
    idea: bool = False


class Place(NamedTuple):
    """Where in the run to look: rank, step, and times on the run's timeline.

    ``step`` is None outside steps. ``from_ns`` and ``to_ns`` are None if no times are known.
    """

    rank: int
    step: int | None
    from_ns: int | None
    to_ns: int | None


class Finding(NamedTuple):
    """One problem worth acting on.

    Attributes:
        rule: The rule that reports it.
        title: The rule's title with its values.
        cost: Rank time in nanoseconds; None if the problem has no cost in time.
        low: Lower bound of the cost.
        high: Upper bound of the cost.
        confidence: `HIGH` or `MEDIUM`.
        evidence: The measurement, in words.
        query: The SELECT that returns exactly the events measured.
        place: Where the first of them is.
    """

    rule: Rule
    title: str
    cost: int | None
    low: int | None
    high: int | None
    confidence: str
    evidence: str
    query: str
    place: Place | None


class NotChecked(NamedTuple):
    """A rule that could not decide, and why."""

    rule: str
    why: str


Results = list[Finding | NotChecked]
"""What a check returns: what its rules report, and the rules that it could not check."""


class RunData:
    """A run with what several rules need of it, computed on first use and once.

    Tables of profilers are read once too: they can be gigabytes.
    """

    def __init__(self, spans: Spans) -> None:
        self.spans = replace(
            spans, tables={name: cache(read) for name, read in spans.tables.items()}
        )

    @cached_property
    def devices(self) -> DeviceTimeline:
        """What devices ran."""
        return device_timeline(self.spans)

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
    def cpu_waits(self) -> CpuWaits | None:
        """How long training threads waited for a CPU; None if that was not recorded."""
        return cpu_waits(self.spans)

    @cached_property
    def accounts(self) -> Accounts:
        """The job's time by category and step, ranks summed."""
        return accounts_of(self.spans)

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


def judge(
    rule: Rule, low: float, high: float, threshold: float | None = None
) -> str | NotChecked | None:
    """Compare the 95% confidence interval of a share with a rule's threshold.

    Returns:
        The confidence of a finding if the whole interval is beyond the threshold, None if all of
        it is on the harmless side, `NotChecked` if it includes the threshold.

    Example::

        >>> rule = Rule("idle", "Device idle", 0.2, "", "", "")
        >>> judge(rule, 0.3, 0.5), judge(rule, 0.5, 0.6), judge(rule, 0.1, 0.15)
        ('medium', 'high', None)
        >>> judge(rule, 0.1, 0.3).why
        '95% CI 10–30% includes the threshold of 20%'
    """
    limit = rule.threshold if threshold is None else threshold
    beyond, harmless = low > limit, high < limit
    clearly = low > min(2 * limit, (1 + limit) / 2)
    if rule.reports_below:
        beyond, harmless, clearly = harmless, beyond, high < limit / 2
    if harmless:
        return None
    if not beyond:
        why = f"95% CI {100 * low:.0f}–{high:.0%} includes the threshold of {limit:.0%}"
        return NotChecked(rule.name, why)
    return HIGH if clearly else MEDIUM


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
    """Return at most `_MOST_PARTS` parts: neighbors are added up."""
    if len(parts) <= _MOST_PARTS:
        return parts
    merged: Float64s = np.add.reduceat(parts, np.arange(_MOST_PARTS) * len(parts) // _MOST_PARTS)
    return merged


@lru_cache(maxsize=1)  # most rules of one run have the same number of parts
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


Row = dict[str, Any]
"""One row of a table by column name."""


def rows_of(table: Table) -> list[Row]:
    """Return the rows of a table, each by column name."""
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def quoted(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def spans_query(spans: Spans, rows: Sequence[int]) -> str:
    """Return the SELECT of exactly these spans, by rank and id."""
    names = ", ".join(f"({spans.rank[row]}, {spans.id[row]})" for row in rows)
    return f"select * from spans where (rank, id) in ({names}) order by duration_ns desc"
