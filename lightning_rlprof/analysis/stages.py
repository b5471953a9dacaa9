"""Where the time of a step goes, by stage; the steps, ranks, roles and regions of a run."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.group_summary import mean, summarize
from lightning_rlprof.analysis.steps.execution_mode import execution_mode
from lightning_rlprof.analysis.steps.partition import (
    UNTRACED,
    Partition,
    containing_step,
    exclusive_ns,
    partition,
    partition_parts,
    rows_on_ranks,
    stages_in_steps,
)
from lightning_rlprof.analysis.steps.step_matrix import WAITING, StageWork, step_matrix
from lightning_rlprof.analysis.steps.step_selection import MIN_STEPS, STATES, counted, states
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS, VALIDATIONS
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, ColumnRows, Table, columns_of

UNTRACED_PART = "untraced"
"""Name of the part of a step that is in no stage."""

_COLUMNS = (  # The most important ones come first: a narrow terminal shows as many as fit.
    Column("stage", "text"),
    Column("share", "share"),
    *columns_of("duration", "mean", "p50", "p95", "max", unit="ns"),
    Column("slowest rank", "count"),
    Column("slowest / peers", "ratio"),
    *columns_of("duration", "per call", "inclusive per call", "device per call", unit="ns"),
    Column("calls", "count"),
    Column("total", "duration", "ns"),
)
_NOTE = "Times are per step, the mean of its ranks, unless a column says per call."
_DEVICE_NOTE = (
    "device per call: from when the device reaches the stage until it has done the stage's work. "
    "Far above the inclusive time: later stages wait for this work. Far below: the device waits "
    "for the host."
)
_CLOCKS = "clocks"
_DEVICE = "device_ns"
_GAP_COLUMNS = (
    *columns_of("text", "after", "before"),
    Column("share", "share"),
    *columns_of("duration", "total", "mean", "max", unit="ns"),
    *columns_of("count", "count", "worst rank", "worst step"),
)

_MAX_STAGES = 30
_STATUS_COLUMNS = (
    Column("rank", "count"),
    *columns_of("text", "host", "device"),
    *columns_of("count", "spans", "steps"),
    *columns_of("duration", "in steps", "outside steps", unit="ns"),
    Column("status", "text"),
)
_ROLE_COLUMNS = (
    Column("role", "text"),
    *columns_of("count", "ranks", "hosts"),
    *columns_of("duration", "from", "to", unit="ns"),
    *columns_of("share", "working", "waiting", "idle", "untraced"),
    *columns_of("share", "data wait", "backpressure", "weight sync"),
)
_ROLE_NOTE = (
    "Shares of the time in steps; the first four add up. waiting: for data (data wait), for space "
    "(backpressure), or for other ranks. working contains the weight sync. idle: between the calls "
    "of an actor. A driver waits wherever its workers work, and has no shares."
)
_WHO_WAITS = (Category.DATA_WAIT, Category.BACKPRESSURE, Category.WEIGHT_SYNC)
_WAITS = (Category.DATA_WAIT, Category.BACKPRESSURE, Category.COLLECTIVE_WAIT)
_PLACES = ("in steps", "other thread", "outside steps")
_REGION_COLUMNS = (
    *columns_of("text", "name", "kind", "location"),
    Column("share", "share"),
    *columns_of("duration", "total", "per call", "inclusive per call", unit="ns"),
    *columns_of("duration", "p50 per call", "p95 per call", "max per call", unit="ns"),
    Column("calls", "count"),
)
_REGION_NOTE = "Times of regions are of whole spans, those of stages exclusive."


class Calls(NamedTuple):
    """Single spans of a stage: means in ns, and how many there are.

    Attributes:
        own_ns: Mean of the time of its own; None where there is one call per step.
        whole_ns: Mean of whole spans, with the stages nested in them and the waiting; None if it
            is the same.
        device_ns: Mean of the device's time, over the spans that measured it.
        spans: How many spans there are.
    """

    own_ns: int | None
    whole_ns: int | None
    device_ns: int | None
    spans: int


@dataclass(frozen=True, eq=False)
class Part:
    """Time of one kind in each step: a stage, waiting in it, or untraced time.

    Attributes:
        name: What the reader sees.
        stage: The stage it belongs to, which gives its color.
        kind: ``stage``, ``waiting`` or ``untraced``.
        ns: Mean over the ranks of each step.
        total_ns: Sum over the ranks and the included steps.
    """

    name: str
    stage: str
    kind: str
    ns: Float64s
    total_ns: int


class PartStatistics(NamedTuple):
    """A part over the included steps; times in ns, ``share`` of the mean step, None of no time."""

    share: float | None
    mean: int
    p50: int
    p95: int
    max: int


def round_ns(ns: float) -> int:
    """Return a time in whole nanoseconds, the same on every screen: halves up."""
    return int(ns + 0.5)


class StepTimes:
    """A run by its steps, which `counted` divides into included ones and others.

    Every screen that shows step times reads them here, so one name has one number.

    Args:
        spans: The run.
        ranks: Only these; None for all.

    Attributes:
        numbers: Step numbers, ascending.
        state: Index into `STATES` of each.
        included: Which of them count.
        left_out: How many of the others there are, by state.
        note: The same in words.
    """

    def __init__(self, spans: Spans, ranks: Collection[int] | None = None) -> None:
        self.spans, self.matrix, self._ranks = spans, step_matrix(spans, ranks), ranks
        rows = self.matrix.steps
        self.numbers, self._place, count = np.unique(
            spans.step[rows], return_inverse=True, return_counts=True
        )
        self._count = count.astype(np.float64)
        self.state = np.zeros(len(self.numbers), np.int64)
        np.maximum.at(self.state, self._place, states(spans, rows))
        choice = counted(spans, rows)
        self._counts, self.note = choice.mask, choice.note
        self.included = np.zeros(len(self.numbers), bool)
        self.included[self._place[choice.mask]] = True
        left_out = np.bincount(self.state[~self.included], minlength=len(STATES)).tolist()
        self.left_out = {
            state: steps for state, steps in zip(STATES, left_out, strict=True) if steps
        }

    @cached_property
    def wall_ns(self) -> Float64s:
        """Duration of each step, mean over its ranks."""
        ns = self.spans.took_ns(self.matrix.steps)
        found: Float64s = np.bincount(self._place, ns, len(self.numbers)) / self._count
        return found

    @cached_property
    def parts(self) -> list[Part]:
        """What steps consist of, most time first, untraced last; they add up to `wall_ns`."""
        matrix, shape = self.matrix, (len(self.numbers), len(self.spans.names) + 1)
        columns = (matrix.work_ns, matrix.waits_ns, matrix.calls)
        work, waited, called = (sums.T for sums in matrix.totals(self._place, shape, *columns))
        found = [
            self._part(name.format(stage), stage, kind, times[code])
            for times, name, kind in ((work, "{}", "stage"), (waited, WAITING, "waiting"))
            for code, stage in enumerate(self.spans.names)
            if times[code].any() or (kind == "stage" and called[code].any())
        ]
        found.sort(key=lambda part: -part.total_ns)
        return [*found, self._part(UNTRACED_PART, UNTRACED_PART, "untraced", work[UNTRACED])]

    def _part(self, name: str, stage: str, kind: str, ns: Int64s) -> Part:
        return Part(name, stage, kind, ns / self._count, int(ns[self.included].sum()))

    def statistics(self, part: Part) -> PartStatistics:
        """Return the share, mean and quantiles of a part over the included steps, if any."""
        own, whole = part.ns[self.included], float(self.wall_ns[self.included].sum())
        times = (own.mean(), *np.quantile(own, (0.5, 0.95)), own.max())
        share = float(own.sum()) / whole if whole else None
        return PartStatistics(share, *map(round_ns, times))

    @cached_property
    def calls(self) -> dict[str, Calls]:
        """The single spans by stage: those that begin or have time in included steps."""
        counts = np.zeros(len(self.spans) + 1, bool)  # Untraced is last.
        whole_ns, of_name = np.zeros((2, len(self.spans.names)), np.int64)
        for part in partition_parts(self.spans, self._ranks):
            is_counted = self._counts[np.searchsorted(self.matrix.steps, part.steps)]
            rows, step = part.begun
            counts[rows[is_counted[step]]] = True
            if not part.is_plain:
                counts[part.divided.stage[is_counted[part.divided.step]]] = True
            rows = part.stages[counts[part.stages]]  # No other part has any of them.
            names = self.spans.name[rows]
            np.add.at(whole_ns, names, self.spans.end_ns[rows] - self.spans.start_ns[rows])
            np.add.at(of_name, names, 1)
        at, device = self.spans.amounts(_DEVICE, np.int64)
        known = counts[at]
        on_device = summarize(self.spans.name[at[known]], device[known])
        of_device = dict(zip(on_device.group.tolist(), on_device.mean.tolist(), strict=True))
        own = {part.stage: part.total_ns for part in self.parts if part.kind == "stage"}
        found: dict[str, Calls] = {}
        for code in np.flatnonzero(of_name).tolist():
            count = int(of_name[code])
            inclusive = mean(int(whole_ns[code]), count)
            each = mean(own[self.spans.names[code]], count)
            inner = inclusive if inclusive != each else None
            once = count == np.count_nonzero(self._counts)
            calls = Calls(None if once else each, inner, of_device.get(code), count)
            found[self.spans.names[code]] = calls
        return found

    @cached_property
    def work(self) -> StageWork:
        """Work and waiting of each rank in the included steps."""
        return self.matrix.by_rank(self.spans, self._counts)

    @cached_property
    def slowest(self) -> dict[str, tuple[int, float | None]]:
        """The rank with the most work per step by stage, and its work by the median of its peers.

        Of several it is the lowest. Peers are the other ranks that run the stage; without any, the
        ratio is None. Empty with one rank, or with fewer than three steps: the slowest rank is then
        chance. It may have had more work: it need not be a straggler.
        """
        times = self.work
        if len(times.ranks) < 2 or times.steps.min() < MIN_STEPS:
            return {}
        work = times.work_ns[:, :UNTRACED] / times.steps[:, None]
        found: dict[str, tuple[int, float | None]] = {}
        for code in np.flatnonzero(work.any(axis=0)).tolist():
            at = int(np.argmax(work[:, code]))
            peers = np.delete(work[:, code], at)
            peers = peers[peers > 0]
            ratio = float(work[at, code] / np.median(peers)) if len(peers) else None
            found[self.spans.names[code]] = int(times.ranks[at]), ratio
        return found

    @cached_property
    def training_ns(self) -> Float64s:
        """Duration of each step without the validation in it, mean over its ranks."""
        cells = self.matrix
        codes = [code for code, name in enumerate(self.spans.names) if name in VALIDATIONS]
        own = np.isin(cells.name, codes)
        ns = cells.work_ns[own].astype(np.int64) + cells.waits_ns[own]
        spent = np.bincount(self._place[cells.step[own]], ns, len(self.numbers))
        found: Float64s = self.wall_ns - spent / self._count
        return found

    @cached_property
    def tokens(self) -> tuple[str, Float64s] | None:
        """The stage whose tokens are the run's, and those of all ranks in each step.

        Those in validations do not count: they are of regions.
        """
        rows, amounts = self.spans.amounts("tokens")
        stages = self.spans.kind[rows] == KINDS.index("stage")
        rows, amounts = rows[stages], amounts[stages]
        names = self.spans.name[rows]
        if not len(rows):
            return None
        by_name = np.bincount(names, amounts, len(self.spans.names))
        generates = categories_of(self.spans.names) == Category.ROLLOUT
        chosen = np.where(generates[: len(by_name)], by_name, 0)
        code = int(np.argmax(chosen if chosen.any() else by_name))
        place = np.searchsorted(self.numbers, self.spans.step[rows])
        place = np.minimum(place, max(len(self.numbers) - 1, 0))
        own = (names == code) & np.isin(self.spans.step[rows], self.numbers)
        counted_tokens = np.bincount(place[own], amounts[own], len(self.numbers))
        return self.spans.names[code], counted_tokens.astype(np.float64)

    @cached_property
    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks over the time of the included steps, validations left out."""
        ns = float(self.training_ns[self.included].sum())
        if self.tokens is None or not ns:
            return None
        return float(self.tokens[1][self.included].sum()) / ns * 1e9


def step_times(spans: Spans, ranks: Collection[int] | None = None) -> StepTimes:
    """Return a run by its steps; of all ranks, that is computed once."""
    if ranks is None:
        return spans.once("step times", _step_times, (_CLOCKS,))
    return StepTimes(spans, ranks)


def _step_times(spans: Spans) -> StepTimes:
    """Keep no other table: those of a trace are large."""
    own = {name: table for name, table in spans.tables.items() if name == _CLOCKS}
    return StepTimes(replace(spans, tables=own))


def stages(spans: Spans, *, ranks: Collection[int] | None = None, per_rank: bool = False) -> Table:
    """Divide the mean step among stages; ``total`` adds up to the step time exactly.

    All times are exclusive: each instant of the training thread belongs to the innermost open
    stage. ``mean``, ``p50``, ``p95`` and ``max`` are of the time per step, the mean of its ranks;
    a step without the stage counts as zero. ``per call`` is the mean of the spans with time in the
    steps of all ranks, None if there is one per step. ``inclusive per call`` is that of whole
    spans, with the stages nested in them; None if it is the same. ``device per call`` is that of
    the device's time, None where it was not measured. The slowest rank has the most time of that
    stage per step; ``slowest / peers`` compares it with the median of the ranks that run it.

    Where ranks meet inside a stage, the time that they waited for the last one is not part of the
    stage: it has a row ``waiting in ...`` of its own.

    Args:
        spans: The run.
        ranks: Only these; None for all.
        per_rank: One row per rank and stage, with the rank in the first column.
    """
    name = "stages by rank" if per_rank else "stages"
    columns = (Column("rank", "count"), *_COLUMNS) if per_rank else _COLUMNS
    times = step_times(spans, ranks)
    if not len(times.numbers):
        return Table(name, columns, abstained="no complete step was recorded")
    if not per_rank:
        rows = [*_rows(times, times.slowest)]
    else:
        of_ranks = times.work.ranks.tolist()
        rows = [(rank, *row) for rank in of_ranks for row in _rows(StepTimes(spans, [rank]), {})]
    is_timed = any(each.device_ns is not None for each in times.calls.values())
    note = _DEVICE_NOTE if is_timed else ""
    return Table(name, columns, rows, " ".join(filter(None, (times.note, _NOTE, note))))


def _rows(
    times: StepTimes, slowest: Mapping[str, tuple[int, float | None]]
) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per part that has time in included steps, or spans in them."""
    for part in times.parts:
        own = times.calls.get(part.name) if part.kind == "stage" else None
        if own is None and not part.total_ns and part.kind != "untraced":
            continue
        slow = slowest.get(part.name, (None, None)) if part.kind == "stage" else (None, None)
        calls = own or (None,) * 4
        yield (part.name, *times.statistics(part), *slow, *calls, part.total_ns)


def gaps(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """List the gaps between stages, largest total first; they add up to "untraced" exactly."""
    cut = partition(spans, ranks)
    if not len(cut.steps):
        return Table("gaps", _GAP_COLUMNS, abstained="no complete step was recorded")
    choice, names = counted(spans, cut.steps), (*spans.names, "step boundary")
    found = find_gaps(cut, spans)
    step, ns, after, before = (column[choice.mask[found[0]]] for column in found)
    keys = after * len(names) + before
    sums = summarize(keys, ns)
    order = np.lexsort((ns, keys))
    last = order[np.cumsum(sums.count) - 1]  # The longest of each pair is last.
    worst = cut.steps[step[last]]
    whole = int((cut.divided.end_ns - cut.divided.start_ns)[choice.mask[cut.divided.step]].sum())
    numbers = (sums.total, sums.mean, sums.max, sums.count, spans.rank[worst], spans.step[worst])
    rows: list[tuple[Cell, ...]] = []
    for key, *row in zip(sums.group.tolist(), *(each.tolist() for each in numbers), strict=True):
        around = (names[code] for code in divmod(key, len(names)))
        rows.append((*around, row[0] / whole, *row))
    rows.sort(key=lambda row: row[2] or 0.0, reverse=True)
    return Table("gaps", _GAP_COLUMNS, rows, choice.note)


def find_gaps(cut: Partition, spans: Spans) -> tuple[Int64s, ...]:
    """Return the untraced time of all steps, by thread and time: its gaps as columns.

    Neighboring segments without a stage are one gap. The columns are its index into
    ``Partition.steps``, its length, and the names of the stages before and behind it as indices
    into ``Spans.names``; ``len(names)`` at the edge of a step.
    """
    own, edge = cut.divided, len(spans.names)
    bare = np.flatnonzero(own.stage == UNTRACED)
    breaks = np.flatnonzero((np.diff(bare) > 1) | (np.diff(own.step[bare]) != 0))
    first = np.concatenate([bare[:1], bare[breaks + 1]])
    last = np.concatenate([bare[breaks], bare[-1:]])
    names = np.append(np.append(spans.name, UNTRACED)[own.stage], UNTRACED)
    step = np.append(own.step, -1)  # Indices -1 and len read this -1, no step.
    after = np.where(step[first - 1] == step[first], names[first - 1], edge)
    before = np.where(step[last + 1] == step[last], names[last + 1], edge)
    return own.step[first], own.end_ns[last] - own.start_ns[first], after, before


def steps(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """List every step of every rank; its columns of times add up to ``wall`` exactly.

    The thirty stages with the most work have a column each; "other stages" sums the rest, and
    "waiting" what the rank waited for others in any of them. ``state`` is one of
    `step_selection.STATES`.
    """
    cells = step_matrix(spans, ranks)
    shape = (1, len(spans.names) + 1)
    work = cells.totals(np.zeros_like(cells.steps), shape, cells.work_ns)[0][0]
    waiting = int(cells.waits_ns.sum())
    order = np.argsort(-work[:UNTRACED], kind="stable")
    order = order[work[order] > 0]
    shown = order[:_MAX_STAGES]
    names = [spans.names[code] for code in shown.tolist()]
    names += ["other stages"] * (len(order) > len(shown)) + ["waiting"] * bool(waiting)
    columns = (
        *columns_of("count", "rank", "step"),
        Column("state", "text"),
        Column("wall", "duration", "ns"),
        *(Column(name, "duration", "ns") for name in [*names, "untraced"]),
    )
    if not len(cells.steps):
        return Table("steps", columns, abstained="no complete step was recorded")
    column = np.full(len(work), len(shown))
    column[shown], column[UNTRACED] = np.arange(len(shown)), len(names)
    times = np.zeros((len(names) + 1, len(cells.steps)), dtype=np.int64)
    np.add.at(times, (column[cells.name], cells.step), cells.work_ns)
    if waiting:
        np.add.at(times, (np.full_like(cells.step, len(names) - 1), cells.step), cells.waits_ns)
    state = (states(spans, cells.steps), STATES)
    who = (spans.rank[cells.steps], spans.step[cells.steps])
    return Table("steps", columns, ColumnRows([*who, state, times.sum(axis=0), *times]))


def rank_status(spans: Spans) -> Table:
    """List the ranks, and how each one's recording ended.

    ``in steps`` and ``outside steps`` add up to the time from its first to its last event exactly.
    """
    matrix = step_matrix(spans)
    ranks, steps, work, waits = matrix.by_rank(spans, np.ones(len(matrix.steps), dtype=bool))
    own = zip(steps.tolist(), (work + waits).sum(axis=1).tolist(), strict=True)
    by_rank = dict(zip(ranks.tolist(), own, strict=True))
    rows: list[tuple[Cell, ...]] = []
    for rank, header in spans.headers.items():
        mine = spans.rows(rank=rank)
        first = int(spans.start_ns[mine].min()) if len(mine) else 0
        last = int(spans.end_ns[mine].max()) if len(mine) else 0
        count, took = by_rank.get(rank, (0, 0))
        status = spans.statuses.get(rank) or "truncated"
        known = (rank, header.host, header.hardware, len(mine))
        rows.append((*known, count, took, last - first - took, status))
    return Table("rank_status", _STATUS_COLUMNS, rows)


def roles(spans: Spans) -> Table:
    """List the roles of a run: how many ranks, from when to when, and how busy they are.

    ``from`` and ``to`` are the first and the last event of the role, since the first of the run.
    The first four shares add up to 1. The note names the mode, see `execution_mode`.

    Abstains if all ranks have one role.
    """
    found: dict[str, list[int]] = {}
    for rank, header in spans.headers.items():
        found.setdefault(header.role, []).append(rank)
    if len(found) < 2:
        reason = f"all ranks have the role {next(iter(found), 'actor')}"
        return Table("roles", _ROLE_COLUMNS, abstained=reason)
    matrix = step_matrix(spans)
    times = matrix.by_rank(spans, np.ones(len(matrix.steps), dtype=bool))
    category = categories_of(spans.names)[:-1]
    is_idle = category == Category.UNATTRIBUTED_IDLE
    is_wait = np.isin(category, _WAITS)
    groups = (~is_idle & ~is_wait, is_wait, is_idle)
    rows: list[tuple[Cell, ...]] = []
    for role, ranks in found.items():
        own = np.isin(spans.rank, ranks)
        first, last = (None, None)
        if own.any():
            first, last = int(spans.start_ns[own].min()), int(spans.end_ns[own].max())
        mine = np.isin(times.ranks, ranks)
        ns, waits = (each[mine].sum(axis=0) for each in (times.work_ns, times.waits_ns))
        total = int((ns + waits).sum())
        parts = [int(ns[:-1][group].sum()) for group in groups] + [int(ns[-1])]
        parts[1] += int(waits.sum())
        parts += [int(ns[:-1][category == each].sum()) for each in _WHO_WAITS]
        shares = [part / total if total else None for part in parts]
        hosts = len({spans.headers[rank].host for rank in ranks})
        rows.append((role, len(ranks), hosts, first, last, *shares))
    mode = execution_mode(spans)
    head = "" if mode is None else f"Rollout and training are {mode.value}. "
    return Table("roles", _ROLE_COLUMNS, rows, head + _ROLE_NOTE)


def regions(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Sum regions, and the stages that are no part of a step: on other threads and outside steps.

    Regions are data fetch, training step, optimizer, checkpoints, validation, annotations. Their
    times are those of whole spans: they nest in one another and in stages, so their shares of the
    step time do not add up to 100%. Times of stages are exclusive, as those of `stages`; where
    whole spans are longer, ``inclusive per call`` says so. ``location`` is where the span starts.

    Args:
        spans: The run.
        ranks: Only these; None for all.
    """
    cut = partition(spans, ranks)
    choice = counted(spans, cut.steps)
    step_ns = int(spans.took_ns(cut.steps[choice.mask]).sum())
    in_steps, outside = (exclusive_ns(spans, each) for each in (cut.divided, cut.outside))
    shown = np.zeros(len(spans), bool)
    shown[rows_on_ranks(spans, "stage", ranks)] = True
    shown[stages_in_steps(spans, cut.steps)[0]] = False
    shown &= in_steps == 0
    shown[rows_on_ranks(spans, "region", ranks)] = True
    rows = np.flatnonzero(shown)
    step = containing_step(spans, cut.steps, rows, spans.rank)
    keep = (step < 0) | np.append(choice.mask, True)[step]
    rows, step, whole = rows[keep], step[keep], spans.took_ns(rows[keep])
    is_stage = (spans.kind[rows] == KINDS.index("stage")).astype(np.int64)
    place = np.where(step < 0, _PLACES.index("outside steps"), is_stage)
    group, own = (spans.name[rows] * 2 + is_stage) * len(_PLACES) + place, whole.copy()
    own[is_stage > 0] = outside[rows[is_stage > 0]]
    sums = summarize(group, own)
    columns = (sums.total, sums.mean, summarize(group, whole).mean, sums.p50, sums.p95, sums.max)
    table: list[tuple[Cell, ...]] = []
    for key, total, mean_ns, inclusive, *rest in zip(
        *(each.tolist() for each in (sums.group, *columns, sums.count)), strict=True
    ):
        (code, stage), at = divmod(key // len(_PLACES), 2), key % len(_PLACES)
        share = total / step_ns if at == 0 else None
        names = (spans.names[code], "stage" if stage else "region", _PLACES[at])
        more = inclusive if inclusive != mean_ns else None
        table.append((*names, share, total, mean_ns, more, *rest))
    table.sort(key=lambda row: -(row[4] or 0))  # type: ignore[operator]
    note = f"{choice.note} {_REGION_NOTE}".strip()
    return Table("regions", _REGION_COLUMNS, table, note)
