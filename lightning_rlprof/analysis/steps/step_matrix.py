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
    Part,
    containing_step,
    lanes,
    partition_parts,
    rows_on_ranks,
)
from lightning_rlprof.analysis.steps.sync_points import find_sync_points
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.system.process import give_back
from lightning_rlprof.tables.arrays import Float64s, Int64s, Integers, Mask
from lightning_rlprof.tables.intervals import edges, last_begun
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import packed

_STAGE = KINDS.index("stage")
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
    step: Integers
    name: Integers
    work_ns: Integers
    waits_ns: Integers
    calls: Integers

    def totals(self, rows: Int64s, shape: tuple[int, int], *columns: Integers) -> list[Int64s]:
        """Sum values of each cell by a row for each step and by name, untraced last.

        Args:
            rows: The row of each step of ``steps``; -1 leaves it out.
            shape: Number of rows, and of names with untraced.
            columns: ``work_ns``, ``waits_ns`` or ``calls``.
        """
        key = rows[self.step] * shape[1]
        key += self.name % np.int64(shape[1])
        some = key >= 0
        if not some.all():
            key, columns = key[some], tuple(values[some] for values in columns)
        found = np.zeros((len(columns), shape[0] * shape[1]), np.int64)
        for sums, values in zip(found, columns, strict=True):
            np.add.at(sums, key, values.astype(np.int64, copy=False))  # Of one type it is quick.
        return [sums.reshape(shape) for sums in found]

    def by_rank(self, spans: Spans, mask: Mask) -> StageWork:
        """Sum work and waiting of each stage by rank; ``mask`` chooses among ``steps``."""
        rank = spans.rank[self.steps]
        ranks, steps = np.unique(rank[mask], return_counts=True)
        rows = np.where(mask, np.searchsorted(ranks, rank), -1)
        shape = (len(ranks), len(spans.names) + 1)
        sums = self.totals(rows, shape, self.work_ns, self.waits_ns)
        return StageWork(ranks, steps, *sums)

    def amounts(self, spans: Spans, counter: str) -> "Amounts":
        """Return what stages counted in each cell that has the counter."""
        rows, values = spans.amounts(counter)
        step = containing_step(spans, self.steps, rows, lanes(spans))
        known, width = (spans.kind[rows] == _STAGE) & (step >= 0), len(spans.names)
        keys = step[known] * width + spans.name[rows[known]]
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
    steps = spans.rows(kind="step")
    parts = [_cells_of(spans, steps, part) for part in partition_parts(spans)]
    columns = [packed(np.concatenate(column)) for column in zip(*parts, strict=True)]
    del parts
    if (columns[0][1:] < columns[0][:-1]).any():  # The threads of a rank take turns.
        order = np.argsort(columns[0], kind="stable")
        columns = [column[order] for column in columns]
    give_back()  # To find waits and cells takes as much memory as the run.
    return StepMatrix(steps, *columns)


def _cells_of(spans: Spans, steps: Int64s, part: Part) -> tuple[Integers, ...]:
    """Return the columns of the cells of some threads, by step and name."""
    width, cut, waits = len(spans.names) + 1, part.divided, _waiting_times(spans, part)
    began, step = part.begun
    divided = cut.step * width + _names(spans, cut.stage) + 1
    keys = (
        waits.step * width + waits.stage + 1,
        waits.step * width + waits.name + 1,
        step * width + spans.name[began] + 1,
    )
    cells, at = _cells(len(part.steps) * width, divided, *keys)
    work, waited = np.zeros((2, len(cells)), np.int64)
    np.add.at(work, at(divided), cut.end_ns - cut.start_ns)
    np.subtract.at(work, at(keys[0]), waits.ns)
    np.add.at(waited, at(keys[1]), waits.ns)
    calls = np.bincount(at(keys[2]), minlength=len(cells))
    whole = np.searchsorted(steps, part.steps).astype(np.int32)
    columns = (whole[cells // width], cells % width - 1, work, waited, calls)
    return tuple(map(packed, columns))


def _names(spans: Spans, rows: Int64s) -> Int64s:
    """Return the names of stages; `UNTRACED` stays what it is."""
    return np.where(rows == UNTRACED, UNTRACED, spans.name[rows])


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
    came_last = points.end_ns - points.start_ns == points.transfer_ns[points.group]
    last[points.group[came_last]] = points.row[came_last]
    last = last[points.group[some]]
    return Waits(points.row[some], start[some], end[some], whole[some], last)


class _WaitingTimes(NamedTuple):
    """Waiting of ranks in the steps of a `Part`; what is in one stage may be in several rows.

    Attributes:
        step: Index into ``Part.steps``.
        stage: Name of the innermost stage as an index into ``Spans.names``, or `UNTRACED`.
        name: That name; outside any stage that of the collective.
        ns: Time waited, never zero.
    """

    step: Int64s
    stage: Int64s
    name: Int64s
    ns: Int64s


def _waiting_times(spans: Spans, of: Part) -> _WaitingTimes:
    """Return how long ranks waited in which stages of which steps."""
    waits, cut = find_waits(spans), of.divided
    steps_thread = spans.thread[of.steps]
    mine = np.flatnonzero(np.isin(spans.thread[waits.row], steps_thread))
    row, start, end = (each[mine] for each in (waits.row, waits.start_ns, waits.end_ns))
    thread, own = steps_thread[cut.step], spans.thread[row]
    first = np.maximum(last_begun(thread, cut.start_ns, own, start), 0)
    last = last_begun(thread, cut.start_ns, own, end - 1)
    count = np.maximum(last - first + 1, 0)
    at = np.repeat(np.arange(len(own)), count)
    segment = np.arange(len(at)) + np.repeat(first - np.cumsum(count) + count, count)
    begin = np.maximum(start[at], cut.start_ns[segment])
    ns = np.minimum(end[at], cut.end_ns[segment]) - begin
    some = (ns > 0) & (thread[segment] == own[at])
    at, segment = at[some], segment[some]
    stage = _names(spans, cut.stage[segment])
    name = np.where(stage == UNTRACED, spans.name[row[at]], stage)
    return _WaitingTimes(cut.step[segment], stage, name, ns[some])
