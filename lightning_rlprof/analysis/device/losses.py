"""What is known to be missing of what devices did, as facts that every analysis of devices reads.

A loss makes idle time unknown: what looks idle may be work that was not recorded.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.group_summary import rows_by_group
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.kernels import UNKNOWN, is_launch, lost_launches, matches
from lightning_rlprof.tables.spans import Spans, apart
from lightning_rlprof.tables.table import Table

NEVER = 2**63 - 1
"""Launch time of device work whose launch was not recorded; the end of a loss without one."""

LOST = 0.05
"""Share of launches without a kernel that is normal: a capture ends before its last kernels do."""

NO_TIMES: tuple[Int64s, Int64s] = np.empty(0, np.int64), np.empty(0, np.int64)
"""Starts and ends of a loss that makes no time unknown."""

_ALWAYS = np.zeros(1, np.int64) - NEVER, np.zeros(1, np.int64) + NEVER


class LossCode(str, Enum):
    """What is missing."""

    LAUNCHES = "launches-without-kernel"
    KERNELS = "kernels-without-launch"
    ROWS = "rows-left-out"
    STEPS = "steps-without-kernel"
    EDGES = "edges-of-recording"


_TEXTS = {
    LossCode.LAUNCHES: "{count:,} of {of:,} launches have no kernel: device time is unknown "
    "until the next kernel",
    LossCode.KERNELS: "{count:,} of {of:,} kernels have no launch: why devices idled before them "
    "is unknown",
    LossCode.ROWS: "{count:,} of {of:,} kernels and copies could not be read: idle time is unknown",
    LossCode.STEPS: "{count:,} of {of:,} steps have no kernel: device time in them is unknown",
    LossCode.EDGES: "{ms:,.3g} ms at the edge of the recording without work are unknown, not idle",
}


class DeviceLoss(NamedTuple):
    """One loss of one rank.

    Attributes:
        code: What is missing.
        rank: Whose it is; None for all.
        missing: How many launches, kernels, rows or steps are concerned, or nanoseconds of edges.
        of: How many there are.
        times: Starts and ends of the time in which idle devices may have worked.
    """

    code: LossCode
    rank: int | None
    missing: int
    of: int
    times: tuple[Int64s, Int64s] = NO_TIMES

    @property
    def hides_time(self) -> bool:
        """Whether it makes device time unknown."""
        return len(self.times[0]) > 0

    def to_dict(self) -> dict[str, str | int | None]:
        """Return the facts as plain data for JSON."""
        return {"code": self.code.value, "rank": self.rank, "missing": self.missing, "of": self.of}

    @property
    def is_large(self) -> bool:
        """Whether shares of device time prove nothing: more than `LOST` is missing."""
        return self.code in (LossCode.LAUNCHES, LossCode.ROWS) and self.missing > LOST * self.of


def loss_texts(losses: Iterable[DeviceLoss]) -> list[str]:
    """Return what is missing, a text for each code with the ranks summed."""
    sums: dict[LossCode, list[int]] = {}
    for each in losses:
        own = sums.setdefault(each.code, [0, 0])
        own[:] = own[0] + each.missing, own[1] + each.of
    found = []
    for code, (missing, of) in sums.items():
        found.append(_TEXTS[code].format(count=missing, of=of, ms=missing / 1e6))
    return found


class LaunchMatch(NamedTuple):
    """Launches of kernels beside kernels.

    Attributes:
        launches: How many calls that launch one kernel each were recorded.
        unmatched: How many of them have no kernel.
        kernels: How many kernels were recorded.
        unlaunched: How many of them have no launch, if others have one.
        losses: Both per rank, without launches that were still queued when the recording ended.
    """

    launches: int
    unmatched: int
    kernels: int
    unlaunched: int
    losses: tuple[DeviceLoss, ...]


def launch_match(spans: Spans) -> LaunchMatch:
    """Match the calls that launch kernels with kernels, both ways.

    In a complete trace each launch has its kernel. Exceptions are the last launches of a capture
    and those that a graph captured. Kernels that began before the recording have no launch.
    """
    return spans.once("launch_match", _launch_match, ("calls", "kernels"))


def _launch_match(spans: Spans) -> LaunchMatch:
    kernels = spans.try_table("kernels", [])
    rank = call = kernel_rank = launch = start = end = stream = NO_TIMES[0]
    record = 0, 0
    found = [
        _launches(calls)
        for each in apart(spans, "calls")
        if (calls := spans.try_table("calls", [], each)) is not None
    ]
    if found:
        rank, call = (np.concatenate(each) for each in [*zip(*found, strict=True)][:2])
        ends = [int(spans.end_ns.max(initial=-NEVER)), *(each[3] for each in found)]
        record = min(each[2] for each in found), max(ends)
    if kernels is not None and len(kernels.rows):
        kernel_rank, start = (kernels.numbers(name) for name in ("rank", "start"))
        names = [column.name for column in kernels.columns]
        launch, stream = (
            kernels.numbers(name, UNKNOWN) if name in names else np.full(len(start), UNKNOWN)
            for name in ("launch", "stream")
        )
        end = start + kernels.numbers("duration")
    losses: list[DeviceLoss] = []
    count = unmatched = unlaunched = 0
    for each in np.union1d(rank, kernel_rank).tolist():
        own, of_rank = np.sort(call[rank == each]), kernel_rank == each
        known, began = launch[of_rank], start[of_rank]
        if len(known) and not (known != UNKNOWN).any():
            continue  # No kernel names its launch, so none of them is known to be missing.
        count += len(own)
        matched = np.isin(own, known)
        unmatched += int(np.count_nonzero(~matched))
        lost = own[lost_launches(own, matched, int(end[of_rank].max(initial=0)), record)]
        alone = int(np.count_nonzero(known == UNKNOWN))
        unlaunched += alone
        if len(lost):
            times = _until_next(lost, known, began, stream[of_rank])
            losses.append(DeviceLoss(LossCode.LAUNCHES, each, len(lost), len(own), times))
        if alone:
            losses.append(DeviceLoss(LossCode.KERNELS, each, alone, len(known)))
    return LaunchMatch(count, unmatched, len(launch), unlaunched, tuple(losses))


def _launches(calls: Table) -> tuple[Int64s, Int64s, int, int]:
    """Return rank and start of the calls that launch a kernel, and when all calls were."""
    launches = matches(calls.texts("name"), is_launch)
    rank, start = calls.numbers("rank")[launches], calls.numbers("start")
    last = int((start + calls.numbers("duration")).max(initial=-NEVER))
    return rank, start[launches], int(start.min(initial=NEVER)), last


def _until_next(
    lost: Int64s, launch: Int64s, start: Int64s, stream: Int64s
) -> tuple[Int64s, Int64s]:
    """Return the time from each lost launch to the starts of the kernels that are launched next.

    The stream of what is lost is unknown, so it may have run until all streams continued.
    """
    end = np.full(len(lost), -1)
    for own in rows_by_group(stream):
        order = own[np.lexsort((start[own], launch[own]))]
        at = np.searchsorted(launch[order], lost, "right")
        end = np.maximum(end, np.append(start[order], -1)[at])
    return lost, np.maximum(lost, np.where(end < 0, NEVER, end))


def losses_of_tables(spans: Spans) -> Iterator[DeviceLoss]:
    """Yield what is missing by the tables of the run: launches, kernels, and rows left out.

    Rows without a time hide work at any time, unless the launches show when that was.
    """
    match = launch_match(spans)
    yield from match.losses
    tables = [spans.try_table(name, []) for name in ("kernels", "memcpy")]
    lost, there = (
        sum(count(table) for table in tables if table is not None)
        for count in (lambda table: table.rows_lost, lambda table: len(table.rows))
    )
    found = DeviceLoss(LossCode.ROWS, None, lost, lost + there, _ALWAYS)
    if found.is_large and not match.launches:
        yield found


def losses_in_steps(
    spans: Spans, rank: int, begun: Int64s, ended: Int64s, launched: Int64s
) -> DeviceLoss | None:
    """Return the steps of a rank without device work and launches, beside others that have some.

    The arrays are times of its device work.
    """
    rows = spans.rows(kind="step", rank=rank)
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    first, last = (np.sort(times) for times in (begun, ended))
    works = np.searchsorted(first, end) > np.searchsorted(last, start, "right")
    calls = np.sort(launched)
    works |= np.searchsorted(calls, end) > np.searchsorted(calls, start)
    if works.all() or not works.any():
        return None
    times = start[~works], end[~works]
    return DeviceLoss(LossCode.STEPS, rank, len(times[0]), len(rows), times)
