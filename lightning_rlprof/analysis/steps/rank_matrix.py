"""Stage spans of ranks by rank, step and occurrence, and the replica of each rank.

`build_rank_matrix` puts the stage spans of comparable ranks into one array. `replicas` returns
which ranks form one model replica, and which have the same parallel position in other replicas.

If ranks wait for one another, for instance in a collective, a stage ends for all when the last rank
has arrived: early ranks stay longer, by just as much. A stage without waiting takes the same time
for early and late ranks. On one clock, a rank that is late in every step shows that as well.
`detect_waits` tells them apart. Without a common clock, arrival is measured from meeting places:
ends or starts of stages at which the ranks are at the same point of the step. These are found
without comparing clocks.

Runs, ranks, steps and what-if edits are compared at equal work: all ask `counted_amounts` what was
counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.statistics.robust import (
    deviation_from_median,
    leave_one_out_median,
    nan_median,
    slope,
)
from lightning_rlprof.analysis.steps.partition import UNTRACED, partition, partition_parts
from lightning_rlprof.analysis.steps.step_selection import counted
from lightning_rlprof.records.records import KINDS, PHASES, Header
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask, number_occurrences
from lightning_rlprof.tables.intervals import last_begun
from lightning_rlprof.tables.spans import Spans

MAX_OCCURRENCES = 32
"""Number of occurrences of a stage in a step that are compared: the first ones."""

_MAX_CELLS, _MIN_STEPS = 4_000, 30  # More cells of a slot cost time and change nothing.
_STAGE, _REGION = KINDS.index("stage"), KINDS.index("region")
Cells = tuple[Int64s, Int64s, Int64s]
_ORDER = ("tp", "cp", "ep", "pp")

_MAX_SHARP_PART = 0.25  # Ranks that are closer than this part of their spread elsewhere meet.
_LIKELY, _MAX_PLACES = 6.0, 6  # A place has up to this multiple of the sharpest one's spread.
_FREE, _BOUND = -0.3, -0.5  # The slope of work is 0, that of waiting -1.
_SURE = 2.0  # A slope is known to within this many standard errors.
_FINER = 1.4  # From a place, this multiple of its spread can be measured.
_EQUAL = 1 / 3  # Ranks that are closer than this part of the steps' spread may wait for each other.
_SAME = 0.02  # Work is never as even as this part of it, so they do wait.
_OF_TWO = 2**0.5  # The difference of two steps deviates by this multiple of one step's.
_ABSORBED = 0.25  # Where ranks wait, less of their distance at the start is left at the end.
_MIN_SPANS = 20  # A slot needs this many spans to show it.

AMOUNTS = ("tokens", "tokens_sq", "tokens_max")
"""Counters of work: tokens, the sum of their squares over samples, and those of the longest."""


@dataclass(frozen=True, eq=False)
class RankMatrix:
    """Stage spans of some ranks, comparable cell by cell; NaN if a cell has no span.

    A slot is a stage and its occurrence in the step. Arrays have the shape (ranks, steps, slots).
    If ranks ran a stage a different number of times in a step, only those with the most have cells.
    Spans lost from a file must not shift the others. A stage that only one of several ranks
    runs has no slot.

    Attributes:
        ranks: Rank of each row.
        steps: RL step of each column, ascending.
        stage: Index into ``Spans.names`` of each slot, slots in the order of the step.
        start_ns: Start of each span.
        end_ns: End of each span.
        own_ns: Time in which no stage inside was open.
        rows: Rows of the run's spans that have a cell.
        places: Their cells: ranks, steps and slots.
        uncompared: Own time of spans without a cell: ranks, steps, stages and nanoseconds.
    """

    ranks: Int64s
    steps: Int64s
    stage: Int64s
    start_ns: Float64s
    end_ns: Float64s
    own_ns: Float64s
    rows: Int64s
    places: Cells
    uncompared: tuple[Int64s, Int64s, Int64s, Int64s]

    def some_steps(self) -> Int64s:
        """Return columns spread over the run, enough to estimate how ranks behave."""
        ranks, steps, _ = self.start_ns.shape
        count = min(steps, max(_MAX_CELLS // ranks, _MIN_STEPS))
        return np.unique(np.linspace(0, steps - 1, count).astype(np.int64))

    def counter(self, spans: Spans, name: str) -> Float64s | None:
        """Return a counter of the spans, NaN for spans without it; None if no span has it."""
        values = spans.amounts(name).at(self.rows, np.nan)
        known = ~np.isnan(values)
        if not known.any():
            return None
        chosen = tuple(each[known] for each in self.places)
        return _placed(self.start_ns.shape, chosen, values[known])


@dataclass(frozen=True, eq=False)
class StageRows:
    """The stage spans of all ranks in included steps.

    Attributes:
        rows: Rows of the run's spans, by rank and start.
        own_ns: Time of each in which no stage inside it was open.
        steps: Included RL steps, ascending.
        note: Which steps are excluded.
    """

    rows: Int64s
    own_ns: Int64s
    steps: Int64s
    note: str


def with_phases(spans: Spans) -> Spans:
    """Let the phases of a training loop that ran inside a stage be stages of their own.

    An update that is one stage hides who was slow in its forward pass: its backward pass ends with
    all ranks at the same time. The phases tell them apart.
    """
    kind = spans.once("kinds with phases", _kinds_with_phases)
    return spans if kind is spans.kind else replace(spans, kind=kind)


def _kinds_with_phases(spans: Spans) -> Int64s:
    phases = np.array([*(name in PHASES for name in spans.names), False])[spans.name]
    rows = np.flatnonzero(phases & (spans.kind == _REGION))
    if not len(rows):
        return spans.kind
    cut = partition(spans)
    part, thread = cut.divided, spans.thread[cut.steps]
    at = last_begun(thread[part.step], part.start_ns, spans.thread[rows], spans.start_ns[rows])
    inside = _is_stage(spans, np.append(part.stage, UNTRACED)[at])
    inside &= spans.start_ns[rows] < np.append(part.end_ns, 0)[at]
    kind = spans.kind.copy()
    kind[rows[inside]] = _STAGE
    return kind if inside.any() else spans.kind


def _is_stage(spans: Spans, rows: Int64s) -> Mask:
    """Return which rows are stages; `UNTRACED` and regions are not."""
    found: Mask = (spans.kind[rows] == _STAGE) & (rows != UNTRACED)
    return found


def stage_rows(spans: Spans, since: int = 0) -> StageRows:
    """Return the stage spans of the training threads in complete steps, from a step on."""
    steps = spans.rows(kind="step")
    choice = counted(spans, steps, since)
    own = np.zeros(len(spans), dtype=np.int64)
    for part in partition_parts(spans, since=since):
        cut, counts = part.divided, choice.mask[np.searchsorted(steps, part.steps)]
        inside = _is_stage(spans, cut.stage) & counts[cut.step]
        np.add.at(own, cut.stage[inside], (cut.end_ns - cut.start_ns)[inside])
    whole, rows = steps[choice.mask], np.flatnonzero(own)
    # A stage may cross the edge of a step. If its own step is lost, only a slice of it is there.
    width = int(spans.step.max(initial=0)) + 1
    own_step, there = (spans.rank[some] * width + spans.step[some] for some in (rows, whole))
    rows = rows[np.isin(own_step, there)]
    return StageRows(rows, own[rows], np.unique(spans.step[whole]), choice.note)


def build_rank_matrix(spans: Spans, found: StageRows, ranks: Sequence[int]) -> RankMatrix:
    """Put the stage spans of some ranks side by side."""
    numbers = np.array(sorted(ranks), dtype=np.int64)
    mine = np.isin(spans.rank[found.rows], numbers)
    rows, own, name = found.rows[mine], found.own_ns[mine], spans.name[found.rows[mine]]
    rank = np.searchsorted(numbers, spans.rank[rows])
    step = np.searchsorted(found.steps, spans.step[rows])
    nth, count = number_occurrences((rank * len(found.steps) + step) * len(spans.names) + name)
    most = np.zeros((len(found.steps), len(spans.names)), dtype=np.int64)
    np.maximum.at(most, (step, name), count)
    ran = np.zeros((len(numbers), len(spans.names)), dtype=bool)
    ran[rank, name] = True
    shared = ran.sum(axis=0) >= min(len(numbers), 2)
    keep = (count == most[step, name]) & (nth < MAX_OCCURRENCES) & shared[name]
    uncompared = (rank[~keep], step[~keep], name[~keep], own[~keep])
    rows, own, rank, step = (each[keep] for each in (rows, own, rank, step))
    slots, slot = np.unique((name * MAX_OCCURRENCES + nth)[keep], return_inverse=True)
    shape = (len(numbers), len(found.steps), len(slots))
    order = _in_order(_placed(shape, (rank, step, slot), spans.start_ns[rows]))
    at = (rank, step, np.argsort(order)[slot])
    start, end, own_ns = (
        _placed(shape, at, each) for each in (spans.start_ns[rows], spans.end_ns[rows], own)
    )
    stage = slots[order] // MAX_OCCURRENCES
    return RankMatrix(numbers, found.steps, stage, start, end, own_ns, rows, at, uncompared)


def _placed(shape: tuple[int, ...], at: tuple[Int64s, ...], values: npt.NDArray[Any]) -> Float64s:
    found = np.full(shape, np.nan)
    found[at] = values
    return found


def _in_order(start_ns: Float64s) -> Int64s:
    """Return the slots in the order of the step: by their mean start after its first slot."""
    if not start_ns.shape[2]:
        return np.zeros(0, dtype=np.int64)
    after = start_ns - np.fmin.reduce(start_ns, axis=2, keepdims=True)
    known = ~np.isnan(after)
    mean = np.where(known, after, 0.0).sum(axis=(0, 1)) / np.maximum(known.sum(axis=(0, 1)), 1)
    return np.argsort(mean, kind="stable")


class Replicas(NamedTuple):
    """The replica and parallel position of each rank; arrays over ranks.

    Attributes:
        ranks: Ascending.
        replica: The model replica that the rank is part of.
        place: Its parallel position: ranks of one position are compared with one another.
        work: Positions with the same number share layers, experts and samples evenly.
    """

    ranks: Int64s
    replica: Int64s
    place: Int64s
    work: Int64s

    def members(self) -> dict[int, list[int]]:
        """Return the ranks of each replica."""
        copies = np.unique(self.replica).tolist()
        return {copy: self.ranks[self.replica == copy].tolist() for copy in copies}

    def lines(self) -> list[list[int]]:
        """Return the ranks of each parallel position, in the order of positions."""
        places = np.unique(self.place).tolist()
        return [self.ranks[self.place == place].tolist() for place in places]


def replicas(spans: Spans, ranks: Sequence[int]) -> Replicas:
    """Return replicas by the key ``parallel`` of the recorded configuration.

    Ranks are ordered as in Megatron and in device meshes: tensor, context and expert parallel,
    replicas, pipeline. Without the key, or if ranks disagree, each rank is a replica of its own.
    """
    numbers = np.array(sorted(ranks), dtype=np.int64)
    headers = [spans.headers[rank] for rank in numbers.tolist()]
    known = {(*_sizes(header), header.world_size) for header in headers}
    tp, cp, ep, pp, world = known.pop() if len(known) == 1 else (1, 1, 1, 1, 1)
    copies, rest = divmod(world, tp * cp * ep * pp)
    if rest or copies == world:
        alone = np.zeros_like(numbers)
        return Replicas(numbers, numbers, alone, alone)
    share = tp * cp
    work = numbers // (share * ep * copies) * ep + numbers // share % ep
    replica = numbers // (share * ep) % copies
    return Replicas(numbers, replica, work * share + numbers % share, work)


def _sizes(header: Header) -> tuple[int, ...]:
    """Return the sizes of tensor, context, expert and pipeline parallelism."""
    said = header.config.get("parallel")
    sizes = [said.get(key, 1) for key in _ORDER] if isinstance(said, dict) else [0]
    known = all(type(size) is int and size > 0 for size in sizes)
    return tuple(sizes) if known else (1,) * len(_ORDER)


@dataclass(frozen=True, eq=False)
class MeetingPlaces:
    """Places of a step where ranks are likely to meet, the sharpest first.

    Attributes:
        times_ns: When each rank was there, on its own clock; shape (ranks, steps, places).
        apart_ns: Spread of ranks in the time between two visits of the sharpest place.
        sharp: Whether that is far less than their spread elsewhere in the step.
    """

    times_ns: Float64s
    apart_ns: float
    sharp: bool

    def since(self, start_ns: Float64s, place: int) -> Float64s:
        """Return times since the same rank was last at a place, slot by slot."""
        here = self.times_ns[:, :, place, None]
        before = np.concatenate([np.full_like(here[:, :1], np.nan), here[:, :-1]], axis=1)
        later = nan_median((start_ns - here).reshape(-1, start_ns.shape[2])) >= 0
        return start_ns - np.where(later, here, before)


def find_meeting_places(matrix: RankMatrix) -> MeetingPlaces:
    """Find where ranks meet: there, all take equally long from one step to the next.

    Of all ends and starts of slots, takes those whose distance to the previous step differs least
    between ranks. If ranks never meet, none of them waits, and the place doesn't matter.
    """
    start = matrix.start_ns
    following = np.concatenate([start[:, :, 1:], start[:, :, :1]], axis=2)  # It stays in a step.
    some = matrix.some_steps()[1:]  # The first one has none before it.
    intervals = [edges[:, some] - edges[:, some - 1] for edges in (matrix.end_ns, following)]
    spread = [_spread(each) for each in intervals]
    off = np.minimum(*spread)
    order = np.argsort(off, kind="stable")[:_MAX_PLACES]
    best = float(off[order[0]])
    likely = order[off[order] <= _LIKELY * best]
    ends = np.where(spread[0] <= spread[1], matrix.end_ns, following)[:, :, likely]
    elsewhere = _spread(start[:, some] - ends[:, some, :1])
    widest = float(np.max(elsewhere[np.isfinite(elsewhere)], initial=0.0))
    return MeetingPlaces(ends, best, best <= _MAX_SHARP_PART * widest)


def _spread(times: Float64s) -> Float64s:
    """Return the spread of ranks in each slot, infinite if too few of them are known."""
    off = np.abs(deviation_from_median(times)).reshape(-1, times.shape[2])
    known = np.sum(~np.isnan(off), axis=0)
    enough = known * 2 >= max(int(known.max(initial=0)), 1)
    return np.where(enough, nan_median(off), np.inf)


@dataclass(frozen=True, eq=False)
class DetectedWaits:
    """Waiting in the slots of a rank matrix.

    Attributes:
        bound: Slots that include waiting.
        seen: Slots in which a slow rank would show. Excludes those that include waiting, and those
            that take all ranks the same time although it changes from step to step.
        early_ns: How much earlier than the median of the others a rank started a slot: the most
            that it can have waited longer. 0 without waiting.
        has_sync: Whether there is a place in the step where the ranks meet.
    """

    bound: Mask
    seen: Mask
    early_ns: Float64s
    has_sync: bool


def detect_waits(
    matrix: RankMatrix, explained_ns: Float64s, work: Float64s | None, *, one_clock: bool
) -> DetectedWaits:
    """Separate work from waiting, slot by slot.

    Args:
        matrix: Two ranks or more.
        explained_ns: Time that `expected` computes for the work; same shape as the matrix's arrays.
        work: Tokens, to separate "early because of less work" from "early, so it waited"; None if
            not counted.
        one_clock: Whether all ranks read the same clock, as on one host. If not, lateness counts
            from where the ranks last met.
    """
    places = find_meeting_places(matrix)
    some = matrix.some_steps()
    since = matrix.start_ns[:, some] if one_clock else places.since(matrix.start_ns, 0)[:, some]
    rest = (matrix.own_ns - explained_ns)[:, some]
    free, bound, equal = (np.zeros(len(matrix.stage), dtype=bool) for _ in range(3))
    for slot in range(len(free)):
        late, longer = deviation_from_median(since[:, :, slot]), rest[:, :, slot]
        found = [slope(late, longer)]
        if work is not None:
            found.append(slope(late, longer, work[:, some, slot]))
        bound[slot] = any(each + _SURE * error < _BOUND for each, error in found)
        own = matrix.own_ns[:, some, slot]
        enough = np.sum(~np.isnan(own)) >= _MIN_SPANS
        bound[slot] |= enough and _held_together(own, _SAME)
        bound[slot] |= enough and one_clock and _absorbs(late, longer)
        # A slope of 0 means nothing if it is measured from a place that isn't sharp itself.
        moves = np.abs(late - nan_median(late, axis=1)[:, None])
        sharp = one_clock or float(nan_median(moves.ravel())) >= _FINER * places.apart_ns
        free[slot] = not bound[slot] and sharp and found[0][0] - _SURE * found[0][1] > _FREE
        equal[slot] = _held_together(longer, _EQUAL)
    early = np.zeros(matrix.start_ns.shape)
    early[:, :, ~free] = _early(matrix, places, ~free, one_clock)
    return DetectedWaits(bound, (free | ~equal) & ~bound, early, places.sharp)


def _early(matrix: RankMatrix, places: MeetingPlaces, slots: Mask, one_clock: bool) -> Float64s:
    """Return how early ranks were in some slots, the most that any meeting place allows.

    Ranks may be apart at a place by the same time in every step, which no interval shows.
    """
    start = matrix.start_ns[:, :, slots]
    if one_clock:
        return np.maximum(leave_one_out_median(start) - start, 0.0)
    found = np.zeros(start.shape)
    for place in range(places.times_ns.shape[2]):
        since = places.since(matrix.start_ns, place)[:, :, slots]
        found = np.maximum(found, leave_one_out_median(since) - since)
    return found


def _absorbs(late: Float64s, longer: Float64s) -> bool:
    """Return whether a slot makes up for lateness, also for one that is the same in every step."""
    rest = np.abs(late + deviation_from_median(longer)).ravel()
    return float(nan_median(rest)) < _ABSORBED * float(nan_median(np.abs(late).ravel()))


def _held_together(times: Float64s, closer: float) -> bool:
    """Return whether ranks take the same time in each step, though not from step to step.

    Steps are compared with the ones before them: a stage that is slower from a step on moves all
    ranks once, and they need not wait for one another.
    """
    common = nan_median(times)
    steps = float(nan_median(np.abs(np.diff(common)))) / _OF_TWO
    return float(nan_median(np.abs(deviation_from_median(times)).ravel())) < closer * steps


def counted_amounts(
    counter: Callable[[str], Float64s | None], ran: Mask, known: Mask, stage: Int64s
) -> list[Float64s]:
    """Return the amounts of work by rank, step and slot; empty if no tokens were counted.

    A stage that lacks a counter in more than half of its spans has what its rank counted in the
    whole step.

    Args:
        counter: Returns a counter by name, NaN for spans without it; None if no span has it. The
            shape is (ranks, steps, slots).
        ran: Where a slot may have an amount: elsewhere it counts as 0. The same shape.
        known: Where a slot has a span. The same shape.
        stage: Stage of each slot.

    Example::

        >>> tokens = np.array([[[3.0, np.nan], [4.0, np.nan]]])
        >>> there = np.ones((1, 2, 2), bool)
        >>> found = counted_amounts({"tokens": tokens}.get, there, there, np.arange(2))
        >>> found[0].tolist()
        [[[3.0, 3.0], [4.0, 4.0]]]
    """
    amounts = {name: counter(name) for name in AMOUNTS}
    if amounts["tokens"] is None:
        return []
    return [_filled(own, ran, known, stage) for own in amounts.values() if own is not None]


def _filled(own: Float64s, ran: Mask, known: Mask, stage: Int64s) -> Float64s:
    counted = np.sum(~np.isnan(own), axis=(0, 1))
    often = counted * 2 >= np.maximum(known.sum(axis=(0, 1)), 1)
    counts = np.isin(stage, stage[often])
    if not counts.any():
        return np.full_like(own, np.nan)
    own = np.where(ran, own, 0.0)
    step = own[:, :, counts].sum(axis=2)  # It is NaN if one of them was lost.
    return np.where(counts, own, step[:, :, None])
