"""What each device of a run ran, by kind and time, and when somebody looked at it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.step_selection import captures
from lightning_rlprof.analysis.time_categories import Category, kernel_categories
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, differs
from lightning_rlprof.tables.intervals import cells_of, edges, open_count
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

COMPUTE, COMMUNICATION, COPY = range(3)
"""Kinds of device work."""

NO_STAGE = -1
"""Stands for work that was launched in no stage, or nobody knows in which."""

NEVER = 2**63 - 1
"""Stands for the launch of work of which no launch was recorded."""

_KINDS = np.array([COMPUTE, COMMUNICATION, COMPUTE, COPY])  # by label
_HIDDEN = "hide their kernels"  # the note of a table in which replays of graphs have no rows
_UNSEEN = "Replays of graphs hide their kernels: whether the device idled is not known."
_NO_COPIES = "Copies were not recorded: they are among idle."
_NONE = -1
_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")
_EMPTY = np.empty(0, np.int64)


class Runs(NamedTuple):
    """Pieces of device work as columns of one length, by start, then launch; none is empty.

    Attributes:
        start_ns: On the run's axis.
        end_ns: Later than the start.
        kind: `COMPUTE`, `COMMUNICATION` or `COPY`.
        stage: Index into `DeviceRuns.stages` of the stage that launched it, or `NO_STAGE`.
        launch_ns: When the call that launched it began, or `NEVER`.
        graph: Number of the replay of a graph, -1 without.
    """

    start_ns: Int64s
    end_ns: Int64s
    kind: Int64s
    stage: Int64s
    launch_ns: Int64s
    graph: Int64s

    def begun(self, times: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first launched piece that begins at each time, and its launch, or `NEVER`."""
        at = np.searchsorted(self.start_ns, times)
        begins = np.append(self.start_ns, NEVER)[at] == times
        return at, np.where(begins, np.append(self.launch_ns, NEVER)[at], NEVER)


class HostStages(NamedTuple):
    """The stages of the thread that trains, by start; they may nest. See `Runs` for ``stage``."""

    start_ns: Int64s
    end_ns: Int64s
    stage: Int64s


@dataclass(frozen=True, eq=False)
class Lane:
    """One device as one rank used it.

    Attributes:
        rank: Of the process.
        device: Its number, None where that is not known.
        runs: What ran on any of its streams.
        host: What its rank was in.
        start_ns: Where the record of the rank begins: its first span, launch or device work.
        end_ns: Where that ends.
        known: Disjoint intervals in which somebody looked at the device: starts and ends.
    """

    rank: int
    device: int | None
    runs: Runs
    host: HostStages
    start_ns: int
    end_ns: int
    known: tuple[Int64s, Int64s]


@dataclass(eq=False)
class DeviceRuns:
    """What devices ran in a run.

    Attributes:
        lanes: By rank and device; of what nothing was recorded there is none.
        stages: Names of stages.
        copies: Whether copies were recorded, be it that there were none.
        remarks: What the reader must know.
    """

    lanes: list[Lane] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    copies: bool = False
    remarks: list[str] = field(default_factory=list)


class Grid(NamedTuple):
    """A lane's time, gapless from its start to its end, cut wherever something changes.

    Attributes:
        times: Edges of the cells, ascending; one more than cells.
        first: Cell in which each of the lane's runs begins.
        last: Cell before which it ends.
        busy: Whether anything runs, per cell.
        seen: Whether somebody looked at the device: in the rest, nothing running is not idle.
    """

    times: Int64s
    first: Int64s
    last: Int64s
    busy: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.bool_]

    def cells(self, start_ns: Int64s, end_ns: Int64s) -> tuple[Int64s, Int64s]:
        """Return the cells in which intervals begin and those before which they end."""
        return cells_of(self.times, start_ns, end_ns)

    def idle(self) -> tuple[Int64s, Int64s]:
        """Return from where to where the device idled."""
        turns = np.diff((~self.busy & self.seen).astype(np.int8), prepend=0, append=0)
        return self.times[np.flatnonzero(turns > 0)], self.times[np.flatnonzero(turns < 0)]


def device_runs(spans: Spans) -> DeviceRuns:
    """Read the tables ``kernels`` and ``memcpy`` once, as a lane per rank and device.

    Somebody looked at a device inside of captures that hold device work of its rank. Without
    captures, a trace of a device tool tells of all its time, but for steps that are missing in
    between; beside spans of our own, which tell more than the tool, it is from the rank's first
    device work to the last. Where replays of graphs hide their kernels, nobody looked.
    """
    found = DeviceRuns(stages=list(spans.names))
    kernels, copies = (spans.try_table(name, found.remarks) for name in ("kernels", "memcpy"))
    tables = [table for table in (kernels, copies) if table is not None and len(table.rows)]
    places = {name: code for code, name in enumerate(found.stages)}
    parts = [_columns(table, places) for table in tables]
    found.stages = list(places)
    columns: list[Int64s] = [np.concatenate(each) for each in zip(*parts, strict=True)]
    if not columns or not len(columns[0]):
        return found
    found.copies = copies is not None or bool((columns[4] == COPY).any())
    hidden = kernels is not None and _HIDDEN in kernels.note
    found.remarks += [_UNSEEN] * hidden + [_NO_COPIES] * (not found.copies)
    found.lanes = _lanes(spans, columns, hidden)
    silent = len(set(spans.ranks) - {lane.rank for lane in found.lanes})
    if silent:
        found.remarks.append(f"Of {silent} ranks no device work was recorded: they have no row.")
    return found


def grid_of(lane: Lane, *others: Int64s) -> Grid:
    """Cut a lane's time at all that begins or ends, and at others' edges.

    Inside of a replay of a graph nothing running is not known to be idle: from its first kernel to
    its last nobody is told what waits for what.
    """
    runs = lane.runs
    replays = _replays(runs)
    ends = np.array([lane.start_ns, lane.end_ns])
    parts = [runs.start_ns, runs.end_ns, *lane.known, *others, *replays, ends]
    times = edges(*(part.clip(*ends) for part in parts))
    count = len(times) - 1
    first, last = cells_of(times, runs.start_ns, runs.end_ns)
    known, replayed = (
        open_count(*cells_of(times, *each), count) > 0 for each in (lane.known, replays)
    )
    return Grid(times, first, last, open_count(first, last, count) > 0, known & ~replayed)


def _replays(runs: Runs) -> tuple[Int64s, Int64s]:
    """Return from where to where each replay of a graph reaches.

    A replay has one launch. Files of several captures may use a number again.
    """
    at = np.flatnonzero(runs.graph != _NONE)
    graph, launch = runs.graph[at], runs.launch_ns[at]
    order = np.lexsort((launch, graph))
    at, graph, launch = at[order], graph[order], launch[order]
    heads = np.flatnonzero(differs(graph, launch))
    return (
        np.minimum.reduceat(runs.start_ns[at], heads),
        np.maximum.reduceat(runs.end_ns[at], heads),
    )


def _columns(table: Table, places: dict[str, int]) -> tuple[Int64s, ...]:
    """Return rank, device and the columns of `Runs`, without rows that take no time."""
    there = {column.name for column in table.columns}
    codes, stages = table.texts("stage")
    own = [places.setdefault(stage, len(places)) for stage in stages]
    start, duration = table.numbers("start"), table.numbers("duration")
    if "kernel" in there:
        named, names = table.texts("kernel")
        kind = _KINDS[np.append(kernel_categories(names), Category.COMPUTE)][named]
    else:
        kind = np.full(len(start), COPY)
    launch, graph = (
        table.numbers(name, nothing) if name in there else np.full(len(start), nothing)
        for name, nothing in (("launch", NEVER), ("graph", _NONE))
    )
    device = table.numbers("device", _NONE) if "device" in there else np.full(len(start), _NONE)
    stage = np.array([*own, NO_STAGE], np.int64)[codes]
    rank, end = table.numbers("rank"), start + duration
    rows = (rank, device, start, end, kind, stage, launch, graph)
    some = duration > 0
    return rows if some.all() else tuple(column[some] for column in rows)


def _lanes(spans: Spans, columns: list[Int64s], hidden: bool) -> list[Lane]:
    rank, device, start, *_, launch, _graph = columns
    order = np.lexsort((launch, start, device, rank))
    if (np.diff(order) < 0).any():
        columns = [column[order] for column in columns]
    rank, device, *rest = columns
    lanes: list[Lane] = []
    for each, of_rank in _stretches(rank):
        work = Runs(*(column[of_rank] for column in rest))
        host = _host(spans, each)
        extent = _extent(spans, each, work)
        known = (_EMPTY, _EMPTY) if hidden else _known(spans, each, work, extent)
        for number, own in _stretches(device[of_rank]):
            runs = Runs(*(column[own] for column in work))
            name = None if number == _NONE else number
            lanes.append(Lane(each, name, runs, host, *extent, known))
    return lanes


def _stretches(column: Int64s) -> Iterator[tuple[int, slice]]:
    """Yield each value of a sorted column and where it stands."""
    heads = np.flatnonzero(differs(column))
    ends = np.append(heads[1:], len(column)).tolist()
    for value, head, end in zip(column[heads].tolist(), heads.tolist(), ends, strict=True):
        yield value, slice(head, end)


def _extent(spans: Spans, rank: int, work: Runs) -> tuple[int, int]:
    rows = spans.rows(rank=rank)
    starts = (spans.start_ns[rows], work.start_ns, work.launch_ns)  # what is NEVER is no minimum
    ends = (spans.end_ns[rows], work.end_ns)
    first = min(int(each.min()) for each in starts if len(each))
    return first, max(int(each.max()) for each in ends if len(each))


def _known(spans: Spans, rank: int, work: Runs, extent: tuple[int, int]) -> tuple[Int64s, Int64s]:
    """Return when somebody looked at the devices of a rank; see `device_runs`."""
    if (windows := captures(spans, rank, work.start_ns)) is not None:
        return windows
    header = spans.headers.get(rank)
    if header is not None and header.config:  # of our own: what a tool wrote names no configuration
        return work.start_ns.min()[None], work.end_ns.max()[None]
    steps = spans.rows(kind="step", rank=rank)
    leap = np.flatnonzero(np.diff(spans.step[steps]) > 1)
    starts = np.append(extent[0], spans.start_ns[steps[leap + 1]])
    return starts, np.append(spans.end_ns[steps[leap]], extent[1])


def _host(spans: Spans, rank: int) -> HostStages:
    """Return the stages of the thread with most steps, then with most stages."""
    rows = spans.rows(rank=rank)
    stages = rows[spans.kind[rows] == _STAGE]
    threads, codes = np.unique(spans.thread[rows], return_inverse=True)
    counts = [
        np.bincount(codes, spans.kind[rows] == kind, len(threads)) for kind in (_STAGE, _STEP)
    ]
    if len(stages):
        stages = stages[spans.thread[stages] == threads[np.lexsort(counts)[-1]]]
    return HostStages(spans.start_ns[stages], spans.end_ns[stages], spans.name[stages])
