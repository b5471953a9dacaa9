"""Where the time of every step went, by rank, step and stage: computed once, read by all.

A row of the matrix is a step of a rank, a column a stage, or untraced time. A cell has the rank's
own work, without waiting for other ranks; the waiting; and how often the stage was called. All
cells of a row add up to the step exactly, in integer nanoseconds.

All ranks leave a collective together, and a stage that includes waiting, too. The last rank to
arrive has the shortest stay, and each other rank waited for as long as its own stay exceeds that.
Only durations are compared, never the clocks of two ranks.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.steps.partition import (
    UNTRACED,
    partition,
    rows_on_ranks,
    stages_in_steps,
)
from lightning_rlprof.analysis.steps.sync_points import find_sync_points
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.intervals import edges, last_begun
from lightning_rlprof.tables.spans import Spans

_AT_ONCE = 2**20  # Segments whose cells are found together; more take memory, and no less time.
_MAX_CELLS_PER_KEY = 8  # With more possible cells, sorting the keys is cheaper than a table of all.

WAITING = "waiting in {}"
"""Name of the time that ranks waited for others inside a stage, in every table."""


class StageWork(NamedTuple):
    """Time by rank and stage, divided into work and waiting.

    Attributes:
        ranks: Ranks with one of the steps, ascending.
        steps: How many of them each rank has.
        work_ns: Time without waiting per rank and name, untraced last; shape (ranks, names + 1).
        waits_ns: Time waited in each; outside any stage under the name of the collective.
    """

    ranks: Int64s
    steps: Int64s
    work_ns: Int64s
    waits_ns: Int64s


class Amounts(NamedTuple):
    """What stages counted, by step and name.

    Attributes:
        step: Index into ``StepMatrix.steps``.
        name: Index into ``Spans.names``.
        amount: The sum of the counter.
        spans: How many spans counted it.
    """

    step: Int64s
    name: Int64s
    amount: Float64s
    spans: Int64s


@dataclass(frozen=True, eq=False)
class StepMatrix:
    """The cells of the matrix that are not empty, by step and name.

    Attributes:
        steps: Rows of the step spans, by rank and start: the rows of the matrix.
        step: Index into ``steps`` of each cell.
        name: Index into ``Spans.names``, or `UNTRACED`.
        work_ns: Time in which the stage was the innermost one and the rank did not wait.
        waits_ns: Time waited there; outside any stage under the name of the collective.
        calls: How often the stage began in the step.
    """

    steps: Int64s
    step: Int64s
    name: Int64s
    work_ns: Int64s
    waits_ns: Int64s
    calls: Int64s

    def total(self, values: Int64s, rows: Int64s, shape: tuple[int, int]) -> Int64s:
        """Sum one value per cell by a row for each step and by name, untraced last.

        Args:
            values: ``work_ns``, ``waits_ns`` or ``calls``.
            rows: The row of each step of ``steps``; -1 leaves it out.
            shape: Number of rows, and of names with untraced.
        """
        at = rows[self.step]
        some = at >= 0
        found = np.zeros(shape[0] * shape[1], np.int64)
        np.add.at(found, at[some] * shape[1] + self.name[some] % shape[1], values[some])
        return found.reshape(shape)

    def by_rank(self, spans: Spans, mask: Mask) -> StageWork:
        """Sum work and waiting of each stage by rank; ``mask`` chooses among ``steps``."""
        rank = spans.rank[self.steps]
        ranks, steps = np.unique(rank[mask], return_counts=True)
        rows = np.where(mask, np.searchsorted(ranks, rank), -1)
        shape = (len(ranks), len(spans.names) + 1)
        sums = (self.total(values, rows, shape) for values in (self.work_ns, self.waits_ns))
        return StageWork(ranks, steps, *sums)

    def amounts(self, spans: Spans, counter: str) -> "Amounts":
        """Return what stages counted in each cell that has the counter."""
        rows, values = spans.amounts(counter)
        place, step = stages_in_steps(spans, self.steps)
        own = np.minimum(np.searchsorted(place, rows), max(len(place) - 1, 0))
        known = np.append(place, -1)[own] == rows
        width = len(spans.names)
        keys = np.append(step, -1)[own[known]] * width + spans.name[rows[known]]
        cells, at = _cells(len(self.steps) * width, keys)
        amount = np.zeros(len(cells))
        np.add.at(amount, at(keys), values[known])
        count = np.bincount(at(keys), minlength=len(cells))
        return Amounts(cells // width, cells % width, amount, count)


def step_matrix(spans: Spans, ranks: Collection[int] | None = None) -> StepMatrix:
    """Return the matrix of some ranks (None: of all); that of all is computed once per run.

    Raises:
        TraceError: A rank is not in the run.
    """
    whole = spans.once("step matrix", _compute, ("clocks",))
    if ranks is None:
        return whole
    steps = rows_on_ranks(spans, "step", ranks)
    at = np.full(len(whole.steps) + 1, -1, np.int64)
    at[np.searchsorted(whole.steps, steps)] = np.arange(len(steps))
    mine = np.flatnonzero(at[whole.step] >= 0)
    columns = (whole.name, whole.work_ns, whole.waits_ns, whole.calls)
    return StepMatrix(steps, at[whole.step[mine]], *(column[mine] for column in columns))


def _compute(spans: Spans) -> StepMatrix:
    cut, waits = partition(spans), waiting_times(spans)
    width = len(spans.names) + 1
    names, divided = np.append(spans.name, UNTRACED), cut.divided  # An index of -1 reads the last.
    parts = [slice(low, low + _AT_ONCE) for low in range(0, len(divided.step), _AT_ONCE)]
    began, step = stages_in_steps(spans, cut.steps)
    keys = (
        waits.step * width + waits.stage + 1,
        waits.step * width + waits.name + 1,
        step * width + spans.name[began] + 1,
    )

    def keys_of(part: slice) -> Int64s:
        found: Int64s = divided.step[part] * width + names[divided.stage[part]] + 1
        return found

    cells, at = _cells(len(cut.steps) * width, *map(edges, map(keys_of, parts)), *keys)
    work, waited, calls = np.zeros((3, len(cells)), np.int64)
    for part in parts:
        np.add.at(work, at(keys_of(part)), divided.end_ns[part] - divided.start_ns[part])
    np.subtract.at(work, at(keys[0]), waits.ns)
    np.add.at(waited, at(keys[1]), waits.ns)
    np.add.at(calls, at(keys[2]), 1)
    return StepMatrix(cut.steps, cells // width, cells % width - 1, work, waited, calls)


def _cells(size: int, *keys: Int64s) -> tuple[Int64s, Callable[[Int64s], Int64s]]:
    """Return the cells that occur among ``size``, ascending, and what finds the place of a key."""
    if size > _MAX_CELLS_PER_KEY * sum(map(len, keys)):
        cells = edges(*keys)
        return cells, lambda asked: np.searchsorted(cells, asked)
    there = np.zeros(size, bool)
    for own in keys:
        there[own] = True
    place = np.cumsum(there) - 1
    return np.flatnonzero(there), lambda asked: place[asked]


class Waits(NamedTuple):
    """Waits of training threads, by thread and time.

    Attributes:
        row: Row of the span in which the rank waited.
        start_ns: When the wait began.
        end_ns: When it ended.
        whole_stage: Whether the span is a stage, or a phase of the loop, with work of its own;
            that it includes waiting is then seen from many steps.
        last: Row of the span of the rank that arrived last, for which this one waited.
    """

    row: Int64s
    start_ns: Int64s
    end_ns: Int64s
    whole_stage: Mask
    last: Int64s


def find_waits(spans: Spans) -> Waits:
    """Find when training threads waited for other ranks; once per run.

    A rank waits at the beginning of a collective, and at the end of a stage with work of its own.
    """
    return spans.once("waits", _find_waits, ("clocks",))


def _find_waits(spans: Spans) -> Waits:
    threads = np.unique(spans.thread[spans.rows(kind="step")])
    points = find_sync_points(spans, threads, tables=False)
    start, end, whole = points.start_ns, points.end_ns, points.whole_stage[points.group]
    ns = end - start - points.transfer_ns[points.group]
    start, end = np.where(whole, end - ns, start), np.where(whole, end, start + ns)
    some, last = ns > 0, np.zeros(len(points.size), np.int64)
    shortest = np.lexsort((points.start_ns - points.end_ns, points.group))  # The last is shortest.
    last[points.group[shortest]] = points.row[shortest]
    last = last[points.group[some]]
    return Waits(points.row[some], start[some], end[some], whole[some], last)


class WaitingTimes(NamedTuple):
    """Waiting of ranks in the steps of a `Partition`; what is in one stage may be in several rows.

    Attributes:
        step: Index into ``Partition.steps``.
        stage_row: Row of the innermost stage, or `UNTRACED`.
        stage: Name of it as an index into ``Spans.names``, or `UNTRACED`.
        name: That name; outside any stage that of the collective.
        ns: Time waited, never zero.
    """

    step: Int64s
    stage_row: Int64s
    stage: Int64s
    name: Int64s
    ns: Int64s


def waiting_times(spans: Spans) -> WaitingTimes:
    """Return how long ranks waited in which stages of which steps of `partition`; once per run."""
    return spans.once("waiting times", _waiting_times, ("clocks",))


def _waiting_times(spans: Spans) -> WaitingTimes:
    waits, cut = find_waits(spans), partition(spans)
    part = cut.divided
    thread, own = spans.thread[cut.steps][part.step], spans.thread[waits.row]
    first = np.maximum(last_begun(thread, part.start_ns, own, waits.start_ns), 0)
    last = last_begun(thread, part.start_ns, own, waits.end_ns - 1)
    count = np.maximum(last - first + 1, 0)
    at = np.repeat(np.arange(len(own)), count)
    segment = np.arange(len(at)) + np.repeat(first - np.cumsum(count) + count, count)
    begin = np.maximum(waits.start_ns[at], part.start_ns[segment])
    ns = np.minimum(waits.end_ns[at], part.end_ns[segment]) - begin
    some = (ns > 0) & (thread[segment] == own[at])
    at, segment = at[some], segment[some]
    stage_row = part.stage[segment]
    stage = np.append(spans.name, UNTRACED)[stage_row]
    name = np.where(stage == UNTRACED, spans.name[waits.row[at]], stage)
    return WaitingTimes(part.step[segment], stage_row, stage, name, ns[some])
