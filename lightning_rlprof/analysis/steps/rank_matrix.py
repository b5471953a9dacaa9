"""Stage spans of ranks by rank, step and occurrence, and the replica of each rank.

`build_rank_matrix` puts the stage spans of comparable ranks into one array. `replicas` returns
which ranks form one model replica, and which have the same parallel position in other replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.steps.partition import UNTRACED, partition
from lightning_rlprof.analysis.steps.step_selection import counted
from lightning_rlprof.records.records import KINDS, PHASES, Header
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask, number_occurrences
from lightning_rlprof.tables.intervals import last_begun
from lightning_rlprof.tables.spans import Spans

MOST = 32
"""Number of occurrences of a stage in a step that are compared: the first ones."""

_ENOUGH, _FEWEST = 4_000, 30  # cells of a slot, and steps; more cost time and change nothing

_STAGE, _REGION = KINDS.index("stage"), KINDS.index("region")

Cells = tuple[Int64s, Int64s, Int64s]


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
        count = min(steps, max(_ENOUGH // ranks, _FEWEST))
        return np.unique(np.linspace(0, steps - 1, count).astype(np.int64))

    def counter(self, spans: Spans, name: str) -> Float64s | None:
        """Return a counter of the spans, NaN for spans without it; None if no span has it."""
        at, values = spans.amounts(name)
        found = np.searchsorted(at, self.rows)
        known = np.append(at, -1)[found] == self.rows
        if not known.any():
            return None
        chosen = tuple(each[known] for each in self.places)
        return _placed(self.start_ns.shape, chosen, values[found[known]])


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
    found: Mask = np.append(spans.kind == _STAGE, False)[rows]
    return found


def stage_rows(spans: Spans, since: int = 0) -> StageRows:
    """Return the stage spans of the training threads in complete steps, from a step on."""
    cut = partition(spans)
    choice, part = counted(spans, cut.steps, since), cut.divided
    inside = _is_stage(spans, part.stage) & choice.mask[part.step]
    own = np.zeros(len(spans), dtype=np.int64)
    np.add.at(own, part.stage[inside], (part.end_ns - part.start_ns)[inside])
    whole, rows = cut.steps[choice.mask], np.flatnonzero(own)
    # A stage may cross the edge of a step: if its own step is lost, only a slice of it is there.
    width = int(spans.step.max(initial=0)) + 1
    rank_and_step = spans.rank * width + spans.step
    rows = rows[np.isin(rank_and_step[rows], rank_and_step[whole])]
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
    keep = (count == most[step, name]) & (nth < MOST) & shared[name]
    uncompared = (rank[~keep], step[~keep], name[~keep], own[~keep])
    rows, own, rank, step = (each[keep] for each in (rows, own, rank, step))
    slots, slot = np.unique((name * MOST + nth)[keep], return_inverse=True)
    shape = (len(numbers), len(found.steps), len(slots))
    order = _in_order(_placed(shape, (rank, step, slot), spans.start_ns[rows]))
    at = (rank, step, np.argsort(order)[slot])
    start, end, own_ns = (
        _placed(shape, at, each) for each in (spans.start_ns[rows], spans.end_ns[rows], own)
    )
    stage = slots[order] // MOST
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


_ORDER = ("tp", "cp", "ep", "pp")


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
