"""Read the rank files of an rlprof run into the columns of `Spans`, on a common timeline."""

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.clocks import Meetings, OnAxis, clock_table, on_axis
from lightning_rlprof.loaders.iterations import (
    StepEvidence,
    drivers_wait,
    give_steps,
    join_optimizer_steps,
    steps_per_iteration,
)
from lightning_rlprof.loaders.join_ranks import joined_counter, merge
from lightning_rlprof.loaders.rank_names import missing, rank_in_name
from lightning_rlprof.loaders.span_lines import exact, groups, parse
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import (
    FIRST_ROLE_RANK,
    KINDS,
    PHASES,
    VALIDATIONS,
    Header,
    Note,
    Number,
    stated_world_size,
)
from lightning_rlprof.records.run_directory import (
    MetricsLine,
    RankReader,
    RankTrace,
    SampleLine,
    SpanLine,
    whole_trace,
)
from lightning_rlprof.system.process import give_back
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.rank_tables import background_metrics, sample_names
from lightning_rlprof.tables.spans import NO_PARENT, Counter, RankNote, RunWarning, Spans, Thread

NO_STAGES = (
    "no stage is marked, so the phases of the training loop are the stages. "
    "Mark your own with stage() or wrap"
)
"""What a run without marks says of its stages."""

_EVALUATIONS = ("test", "predict")  # A Trainer that does only this has them as whole steps.
# Callbacks have these hooks.
_HOOK = re.compile(r".+\.on_train_(?:batch_start|batch_end|epoch_end)")
_LEFT_OUT = Code.ROWS_LEFT_OUT
_KILLED = "its file is truncated: the rank was killed or is still running"
_KIND = {kind: code for code, kind in enumerate(KINDS)}
_INTEGERS = [*map(attrgetter, ("step", "start_ns", "end_ns", "id"))]
COLUMNS = ("name", "kind", "step", "start_ns", "end_ns", "thread", "id", "parent")
"""What a rank's file says of each span; `Spans` has these columns of all ranks."""

_SHORT = ("thread", "id", "parent")  # These columns have 32 bits: no analysis multiplies them.

# Times below 2**60 (36 years of uptime) and anchors below 2**62 (the year 2116): on the common axis
# every time, and every difference of two, fits into 64 bits.
_MAX_INT = 2**60
_MAX_ANCHOR = 2**62
_MAX_EXCHANGED = 2**58
_MAX_RANKS = 2**20
_MANY = 10_000_000  # Spans; the memory of fewer is soon used again, and new memory costs more.
_MOST_IDS_PER_SPAN = 8
# If there are more, a rank that is followed drops names that are in no span.
_MAX_NAMES_KEPT = 1_024


@dataclass
class Rank:
    """One rank's columns on its own clock, before they share an axis."""

    path: Path
    header: Header
    columns: dict[str, Int64s]
    counters: dict[str, Counter]
    notes: list[Note]
    status: str | None
    problems: list[RunWarning]
    meetings: Meetings
    samples: list[SampleLine]
    metrics: list[MetricsLine]


def read_run(
    path: Path, files: list[Path], progress: Callable[[int, int], None] | None = None
) -> Spans:
    """Read the files of one run; a file that cannot be read becomes a problem of the run.

    Args:
        path: What the user asked for, kept in ``Spans.path``.
        files: The rank files.
        progress: Called after each file with how many are read, and how many there are.

    Raises:
        TraceError: None of the files can be read.
    """
    ranks: dict[int, Rank] = {}
    problems: list[RunWarning] = []
    broken: list[TraceError] = []
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    with _no_search_for_cycles():
        for count, file in enumerate(files, start=1):
            try:
                trace, columns = _read(file)
                problems += _add_rank(_rank_of(trace, columns, names, threads), ranks)
            except TraceError as error:
                broken.append(error)
                problems.append(
                    RunWarning(rank_in_name(file.name), str(error), Code.RANK_UNREADABLE.value)
                )
            if progress is not None:
                progress(count, len(files))
    if not ranks:
        raise broken[0]
    _close_world(ranks)
    if path.is_dir():
        world = stated_world_size(rank.header for rank in ranks.values())
        problems += missing(world, [*ranks, *(each.rank for each in problems)])
    return _assemble(path, ranks, names, threads, problems)


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Let Python not look for cycles among a million lines, which takes an eighth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_window(
    path: Path, ranks: Sequence[tuple[RankTrace, "RankColumns"]], steps_per_iteration: int
) -> Spans:
    """Return what is known of the last steps of a run that is being written, as `read_run` does.

    Args:
        path: The run directory.
        ranks: What each file said, and the spans of it that are kept; a header of each.
        steps_per_iteration: How many steps of the optimizer are one step of the run.
    """
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    found: dict[int, Rank] = {}
    for trace, columns in ranks:
        _add_rank(rank_of(trace, columns, names, threads), found)
    _close_world(found)
    return _assemble(path, found, names, threads, [], steps_per_iteration)


def validation_as_stage(spans: Spans) -> Spans:
    """Let validations be stages that include what runs in them: it is not training.

    A rollout in a validation becomes a region of it, so that no table counts it as training.
    """
    stage, region = KINDS.index("stage"), KINDS.index("region")
    whole = np.array([*(name in VALIDATIONS for name in spans.names), False])[spans.name]
    alone = np.array([*(name in _EVALUATIONS for name in spans.names), False])[spans.name]
    if alone.any():
        alone &= np.isin(spans.start_ns, spans.start_ns[spans.kind == KINDS.index("step")])
    whole = (whole | alone) & (spans.kind == region)
    if not whole.any():
        return spans
    kind, parent = np.where(whole, stage, spans.kind), spans.parent.copy()
    for rank in np.unique(spans.rank[whole]).tolist():
        outer = np.flatnonzero(whole & (spans.rank == rank))
        outer = outer[np.argsort(spans.start_ns[outer], kind="stable")]
        outside = whole | (spans.kind == KINDS.index("step")) | _contains(spans, outer)
        inner = np.flatnonzero(~outside & (spans.rank == rank))
        at = np.searchsorted(spans.start_ns[outer], spans.start_ns[inner], "right") - 1
        inside = (at >= 0) & (spans.end_ns[inner] <= spans.end_ns[outer][at])
        inner, around = inner[inside], outer[at[inside]]
        kind[inner] = np.where(kind[inner] == stage, region, kind[inner])
        parent[inner] = np.where(parent[inner] == NO_PARENT, spans.id[around], parent[inner])
    return replace(spans, kind=kind, parent=parent)


def _contains(spans: Spans, rows: Int64s) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which spans are ancestors of these rows, which are of one rank."""
    own = np.flatnonzero(spans.rank == spans.rank[rows[0]])
    own = own[np.argsort(spans.id[own], kind="stable")]
    found = np.zeros(len(spans), bool)
    while len(rows):
        at = np.searchsorted(spans.id[own], spans.parent[rows]).clip(max=len(own) - 1)
        rows = np.unique(own[at[spans.id[own[at]] == spans.parent[rows]]])
        rows = rows[~found[rows]]
        found[rows] = True
    return found


def phases_as_stages(spans: Spans) -> Spans:
    """Let the phases of Lightning's loop be the stages of a run in which nothing is marked.

    They are regions that the callback records. As stages they have self time:
    ``training_step`` is forward and loss where Lightning runs the backward pass.
    """
    stage, region = KINDS.index("stage"), KINDS.index("region")
    phases = [name in PHASES or bool(_HOOK.fullmatch(name)) for name in spans.names]
    rows = np.array([*phases, False])[spans.name] & (spans.kind == region)
    validation = np.array([*(name in VALIDATIONS for name in spans.names), False])[spans.name]
    if (~validation & (spans.kind == stage)).any():
        return spans
    validations = np.flatnonzero(spans.kind == stage)
    if len(validations):  # Validations include their transfers.
        width = int(max(spans.id.max(), spans.parent.max())) + 1
        whose = spans.rank[validations] * width + spans.id[validations]
        rows &= ~np.isin(spans.rank * width + spans.parent, whose)
    if not rows.any():
        return spans
    notes = (RankNote(None, 0, "info", NO_STAGES, Code.NO_STAGES.value), *spans.notes)
    return replace(spans, kind=np.where(rows, stage, spans.kind), notes=notes)


def _add_rank(rank: Rank, ranks: dict[int, Rank]) -> list[RunWarning]:
    """Add a rank to the run unless its file does not belong there."""
    number, name = rank.header.rank, rank.path.name
    if number in ranks:
        other = ranks[number].path.name
        text = f"{name} is left out: its rank is {number}, as in {other}"
        return [RunWarning(number, text, Code.RANK_LEFT_OUT.value)]
    first = next(iter(ranks.values()), rank)
    ranks[number] = rank
    if rank.header.run_id != first.header.run_id:
        text = f"{name} belongs to run {rank.header.run_id}, {first.path.name} to another one"
        return [RunWarning(number, text, Code.RUNS_MIXED.value)]
    return []


def from_traces(path: Path, traces: Sequence[RankTrace]) -> Spans:
    """Return what logs of other programs told of ranks as one run.

    Args:
        path: What the user asked for.
        traces: One per rank; of two with one rank the second is left out, with a warning.
    """
    ranks: dict[int, Rank] = {}
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    problems: list[RunWarning] = []
    for trace in traces:
        columns = RankColumns()
        columns.take(trace.spans)
        problems += _add_rank(_rank_of(trace, columns, names, threads), ranks)
    worlds = [each.header.world_size for each in ranks.values() if not each.header.open_world]
    problems += missing(max(worlds, default=0), ranks)
    _close_world(ranks)
    return _assemble(path, ranks, names, threads, problems)


class _ColumnReader(RankReader):
    """Read a rank's file into columns; its trace keeps no spans.

    Attributes:
        columns: What was read of its spans.
    """

    columns: "RankColumns"

    def _begin(self) -> None:
        super()._begin()
        self.columns = RankColumns()

    def _take_block(self, block: bytes) -> None:
        if self.trace is None:
            header, _, block = block.partition(b"\n")
            self._take([header])
        others = self.columns.take_block(block)
        if others is None:
            super()._take_block(block)
        else:
            self._take(others)

    def _take(self, lines: list[bytes]) -> None:
        super()._take(lines)
        if self.trace is not None and self.trace.spans:
            self.columns.take(self.trace.spans)
            self.trace.spans.clear()


def _read(file: Path) -> tuple[RankTrace, "RankColumns"]:
    """Read one rank's file, however it ended; raises TraceError as `read_trace`."""
    reader = _ColumnReader(file)
    return whole_trace(reader), reader.columns


def _rank_of(
    trace: RankTrace, read: "RankColumns", names: dict[str, int], threads: dict[Thread, int]
) -> Rank:
    check_header(trace.path, trace.header)
    if trace.header.open_world and not trace.lost_lines:
        # Ray kills a worker whose job has ended, so that it cannot write that it finished.
        trace.status = trace.status or "finished"
    problems = _problems(trace, read)
    rank = rank_of(trace, read, names, threads)
    rank.problems += [*problems, *_check_ids(rank.columns, trace.header.rank)]
    head = checked_header(trace.header, rank.problems)
    return replace(rank, header=head)


def check_header(file: Path, header: Header) -> None:
    """Refuse a header whose numbers fit no run; raises TraceError."""
    if not 0 <= header.rank < _MAX_RANKS:
        raise TraceError(
            f"{file}: rank {header.rank} in its header is out of range (0 to {_MAX_RANKS - 1})"
        )
    if not -_MAX_INT < header.unix_ns - header.clock_ns < _MAX_ANCHOR:
        raise TraceError(f"{file}: the clock values in its header are out of range")


def rank_of(
    trace: RankTrace, read: "RankColumns", names: dict[str, int], threads: dict[Thread, int]
) -> Rank:
    """Return a rank of a run, without what cannot be true; codes of names and threads are added."""
    columns, counters = read.sorted(trace, names, threads)
    exchanges = [
        (rank, [each for each in readings if _is_possible(*each)])
        for rank, readings in trace.exchanges
    ]
    named = [each for each in trace.samples if 0 <= each.id < _MAX_INT]
    metrics = [
        each for each in trace.metrics if -_MAX_INT < each.since_ns <= each.clock_ns < _MAX_INT
    ]
    said = trace.notes, trace.status
    return Rank(trace.path, trace.header, columns, counters, *said, [], exchanges, named, metrics)


def checked_header(head: Header, problems: list[RunWarning]) -> Header:
    """Return a header whose world can be true; one that cannot is as small as its rank allows."""
    if 0 < head.world_size <= _MAX_RANKS:
        return head
    text = f"ignored the world size {head.world_size} of its header (allowed: 1 to {_MAX_RANKS})"
    problems.append(RunWarning(head.rank, text, Code.HEADER_IMPOSSIBLE.value))
    return replace(head, world_size=head.rank + 1)


def _close_world(ranks: dict[int, Rank]) -> None:
    """Let the world of ranks that came and went be as large as all of them; servers have none."""
    heads = [each.header for rank, each in ranks.items() if rank < FIRST_ROLE_RANK]
    sizes = (each.rank + 1 if each.open_world else each.world_size for each in heads)
    world = max(sizes, default=0)
    for rank, own in ranks.items():
        if own.header.open_world:
            ranks[rank] = replace(own, header=replace(own.header, world_size=world))


def _is_possible(sent: int, arrived: int, answered: int, received: int) -> bool:
    most = _MAX_EXCHANGED
    return -most < sent <= received < most and -most < arrived <= answered < most


def _problems(trace: RankTrace, read: "RankColumns") -> list[RunWarning]:
    """Say how many lines and spans are lost, and how the file ended."""
    lost, far, backward, status = trace.lost_lines, read.far, read.backward, trace.status
    texts = [
        (lost, _LEFT_OUT, f"{lost} of its lines can't be read"),
        (far, _LEFT_OUT, f"{far} spans are left out: their numbers are out of range"),
        (backward, _LEFT_OUT, f"{backward} spans are left out: they end before they start"),
        (status is None, Code.RANK_OPEN, _KILLED),
        (status not in (None, "finished"), Code.ENDED_EARLY, f"it ended early: {status}"),
    ]
    return [RunWarning(trace.header.rank, text, code.value) for is_so, code, text in texts if is_so]


class RankColumns:
    """One rank's spans as columns, in the order in which they ended; lines are added as they come.

    Attributes:
        cells: A row for each name in `COLUMNS`, a column for each span. Names and threads are
            places in ``names`` and ``idents``.
        counters: By name; their rows are columns of ``cells``.
        far: How many spans were left out because their numbers are out of range.
        backward: How many were, because they end before they start.
    """

    def __init__(self) -> None:
        self.cells: Int64s = np.empty((len(COLUMNS), 0), np.int64)
        self.names: dict[str, int] = {}
        self.idents: dict[int, int] = {}
        self.counters: dict[str, Counter] = {}
        self.far = self.backward = 0

    def __len__(self) -> int:
        """Return the number of spans."""
        return int(self.cells.shape[1])

    def column(self, name: str) -> Int64s:
        """Return a column by its name."""
        found: Int64s = self.cells[COLUMNS.index(name)]
        return found

    def take(self, lines: Sequence[SpanLine]) -> None:
        """Add spans; those that cannot be true are left out and counted."""
        try:
            numbers = _numbers(lines)
        except OverflowError:  # Some number has more than 64 bits.
            some = [line for line in lines if _fits(line)]
            self.far += len(lines) - len(some)
            return self.take(some)
        step, start, end, own, parent = numbers
        near, sound = _sound(*numbers)
        if not sound.all():
            self.far += int(np.count_nonzero(~near))
            self.backward += int(np.count_nonzero(near & ~sound))
            return self.take([line for line, fits in zip(lines, sound, strict=True) if fits])
        self._take_counters(_counters(map(attrgetter("counters"), lines)))
        name = _codes(self.names, [*map(attrgetter("name"), lines)])
        kinds = map(_KIND.__getitem__, map(attrgetter("kind"), lines))
        kind = np.fromiter(kinds, np.int64, len(lines))
        thread = _codes(self.idents, [*map(attrgetter("thread"), lines)])
        self._add(np.stack([name, kind, step, start, end, thread, own, parent]))

    def take_block(self, block: bytes) -> list[bytes] | None:
        """Add the spans of a block of lines and return the others; None if it must be decoded.

        Args:
            block: As of `lightning_rlprof.loaders.span_lines.parse`.
        """
        found = parse(block)
        if found is None:
            return None
        step, start, end, ident, own, parent = found.numbers
        _, sound = _sound(step, start, end, own, parent)
        if not sound.all():
            return None
        self._take_counters(found.counters)
        name = _codes(self.names, found.names)[found.name]
        where, code = groups(ident)
        order = np.argsort(where)  # Threads are numbered as they come.
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        thread = _codes(self.idents, ident[where[order]].tolist())[place[code]]
        self._add(np.stack([name, found.kind, step, start, end, thread, own, parent]))
        return found.others

    def _add(self, cells: Int64s) -> None:
        self.cells = np.concatenate([self.cells, cells], axis=1) if len(self) else cells

    def _take_counters(self, found: Mapping[str, Counter]) -> None:
        """Add counters of rows, which are counted from those that come next."""
        for name, (rows, values) in found.items():
            new, old = Counter(rows + len(self), values), self.counters.get(name)
            self.counters[name] = new if old is None else joined_counter([old, new])

    def since(self, row: int) -> "RankColumns":
        """Return what ended from a row on, without a change of this one."""
        if not row:
            return self
        own = copy(self)
        own.counters = dict(self.counters)
        own.drop_before(row)
        return own

    def drop_before(self, row: int) -> None:
        """Forget the spans that ended before a row did; rows are numbered from there on."""
        self.cells = self.cells[:, row:].copy()
        if len(self.names) > _MAX_NAMES_KEPT:
            at, known = COLUMNS.index("name"), [*self.names]
            used, self.cells[at] = np.unique(self.cells[at], return_inverse=True)
            self.names = {known[code]: place for place, code in enumerate(used.tolist())}
        for name, (rows, values) in list(self.counters.items()):
            at = int(np.searchsorted(rows, row))
            self.counters[name] = Counter(rows[at:] - row, values[at:])
            if at == len(rows):
                del self.counters[name]

    def sorted(
        self, trace: RankTrace, names: dict[str, int], threads: dict[Thread, int]
    ) -> tuple[dict[str, Int64s], dict[str, Counter]]:
        """Return columns by start and id, and their counters with those that were written late.

        Args:
            trace: What else the file says.
            names: Codes of names in the run; new ones are added.
            threads: Codes of threads in the run, as ``names``.
        """
        number = trace.header.rank
        named = [
            Thread(number, ident, trace.threads.get(ident, f"thread {ident}"))
            for ident in self.idents
        ]
        codes = {
            "name": [names.setdefault(name, len(names)) for name in self.names],
            "thread": [threads.setdefault(thread, len(threads)) for thread in named],
        }
        order = np.lexsort((self.column("id"), self.column("start_ns")))
        # Each column is an array of its own, so that its memory can be given back alone.
        cells = zip(COLUMNS, self.cells, strict=True)
        columns: dict[str, Int64s] = {name: own[order] for name, own in cells}
        for column, code in codes.items():
            columns[column] = np.array(code, np.int64)[columns[column]]
        for column in _SHORT:
            columns[column] = _short(columns[column])
        columns["kind"] = columns["kind"].astype(np.int8)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        counters = self.counters
        if trace.late:
            counters = _with_late(counters, self.column("id"), trace.late)
        found = {}
        for name, (rows, values) in counters.items():
            moved = place[rows]
            by_row = np.argsort(moved, kind="stable")
            found[name] = Counter(moved[by_row], values[by_row])
        return columns, found


def _short(column: Int64s) -> Any:
    """Return a column in 32 bits if sums of two of its numbers fit there, too."""
    return column.astype(np.int32) if column.max(initial=0) < 2**30 else column


def _codes(known: dict[Any, int], values: Sequence[Any]) -> Int64s:
    """Return the place of each value among those that are known; new ones are added."""
    for value in dict.fromkeys(values):
        known.setdefault(value, len(known))
    return np.fromiter(map(known.__getitem__, values), np.int64, len(values))


def _counters(lines: Iterable[Mapping[str, Number | None] | None]) -> dict[str, Counter]:
    """Return the counters of lines by name; None stands for a number that is not finite."""
    found: dict[str, tuple[list[int], list[Number]]] = {}
    for row, own in enumerate(lines):
        for name, value in own.items() if own else ():
            if value is not None:
                rows, values = found.setdefault(name, ([], []))
                rows.append(row)
                values.append(value)
    return {
        name: Counter(np.array(rows, np.int64), exact(values))
        for name, (rows, values) in found.items()
    }


def _numbers(lines: Sequence[SpanLine]) -> Int64s:
    """Return step, start, end, id and parent; -2 is a parent that cannot be one."""
    parents = map(attrgetter("parent"), lines)
    known = (NO_PARENT if each is None else each if each >= 0 else -2 for each in parents)
    columns = (*(map(get, lines) for get in _INTEGERS), known)
    return np.stack([np.fromiter(column, np.int64, len(lines)) for column in columns])


def _sound(
    step: Int64s, start: Int64s, end: Int64s, own: Int64s, parent: Int64s
) -> tuple[Mask, Mask]:
    """Return which spans have numbers in range, and which of these end after they start."""
    near = (start > -_MAX_INT) & (start < _MAX_INT) & (end > -_MAX_INT) & (end < _MAX_INT)
    near &= (own >= 0) & (own < _MAX_INT) & (step >= 0) & (step < _MAX_INT)
    near &= (parent >= NO_PARENT) & (parent < _MAX_INT)
    return near, near & (end >= start)


def _fits(line: SpanLine) -> bool:
    numbers = (line.step, line.start_ns, line.end_ns, line.id, line.parent or 0)
    return all(-_MAX_INT < number < _MAX_INT for number in numbers)


def _with_late(
    counters: Mapping[str, Counter], ids: Int64s, late: Mapping[int, Mapping[str, Number | None]]
) -> dict[str, Counter]:
    """Return counters in which those that were written after their span, by its id, win."""
    known = np.array([each for each in late if 0 <= each < _MAX_INT], np.int64)
    new: dict[str, dict[int, Number | None]] = {}
    for row in np.flatnonzero(np.isin(ids, known)).tolist():
        for name, value in late[int(ids[row])].items():
            new.setdefault(name, {})[row] = value
    found = dict(counters)
    for name, by_row in new.items():
        own = counters.get(name)
        pairs = () if own is None else zip(own.rows.tolist(), own.values.tolist(), strict=True)
        both = sorted({**dict(pairs), **by_row}.items())
        known_values = {row: value for row, value in both if value is not None}
        found.pop(name, None)
        if known_values:
            rows = np.array([*known_values], np.int64)
            found[name] = Counter(rows, exact([*known_values.values()]))
    return found


def _check_ids(columns: dict[str, Int64s], rank: int) -> list[RunWarning]:
    """Say how many spans share an id or name a parent that is not in the file."""
    ids, parents = columns["id"], columns["parent"]
    highest = int(ids.max(initial=0))
    if highest < _MOST_IDS_PER_SPAN * len(ids):  # A rank numbers its spans, so that they are dense.
        there = np.zeros(highest + 2, bool)  # The last one stands for what is higher.
        there[ids] = True
        different = int(np.count_nonzero(there))
        known = there[np.minimum(parents, highest + 1)]
    else:
        different, known = len(np.unique(ids)), np.isin(parents, ids)
    twins = len(ids) - different
    orphans = int(np.count_nonzero((parents != NO_PARENT) & ~known))
    texts = [
        (twins, Code.IDS_SHARED, "{} spans share an id with another span"),
        (orphans, Code.PARENTS_LOST, "{} spans lost their parent, which never ended"),
    ]
    return [RunWarning(rank, text.format(n), code.value) for n, code, text in texts if n]


def _assemble(
    path: Path,
    ranks: dict[int, Rank],
    names: dict[str, int],
    threads: Mapping[Thread, int],
    problems: list[RunWarning],
    size: int | None = None,
) -> Spans:
    """Put all ranks on one axis that starts with the first event.

    Spans become stages or regions by what their run is: of validations, drivers, phases.
    """
    ranks = dict(sorted(ranks.items()))
    headers = {number: rank.header for number, rank in ranks.items()}
    clocks, doubts = on_axis(headers, {number: rank.meetings for number, rank in ranks.items()})
    lives = {
        number: [int(rank.columns["start_ns"][0]), int(rank.columns["end_ns"].max())]
        for number, rank in ranks.items()
        if len(rank.columns["id"])
    }
    starts = [int(clocks[number].unix(np.array(life))[0]) for number, life in lives.items()]
    zero = min(starts, default=min(header.unix_ns for header in headers.values()))
    samples = {number: rank.samples for number, rank in ranks.items() if rank.samples}
    metrics = {number: rank.metrics for number, rank in ranks.items() if rank.metrics}
    made = (
        clock_table(headers, clocks, lives),
        sample_names(samples) if samples else None,
        background_metrics(metrics, lambda rank, times: clocks[rank].unix(times) - zero)
        if metrics
        else None,
    )
    tables = {each.name: lambda known=each: known for each in made if each is not None}
    for number, rank in ranks.items():
        for column in ("start_ns", "end_ns"):
            rank.columns[column] = clocks[number].unix(rank.columns[column]) - zero
    columns = {number: rank.columns for number, rank in ranks.items()}
    counters = {number: rank.counters for number, rank in ranks.items()}
    if size is None:
        size = _steps_per_iteration(columns, counters, headers, names)
    join_optimizer_steps(columns, counters, size)
    if any(header.open_world for header in headers.values()):
        give_steps(columns, counters, headers, names)
    every = list(ranks.values())
    counts = [len(rank.columns["id"]) for rank in every]
    joined: dict[str, Any] = {}
    for name in [*every[0].columns]:  # Only one column is in memory twice.
        joined[name] = np.concatenate([rank.columns.pop(name) for rank in every])
        if len(joined[name]) > _MANY:
            give_back()
    spans = Spans(
        path,
        tuple(names),
        tuple(threads),
        rank=np.repeat(np.array(list(ranks), dtype=np.int64), counts),
        **joined,
        counters=merge([rank.counters for rank in every], counts),
        headers=headers,
        statuses={number: rank.status for number, rank in ranks.items()},
        notes=(*_of_iterations(size), *_notes(ranks, clocks, zero)),
        warnings=(*problems, *doubts, *(own for rank in every for own in rank.problems)),
        unix_ns=zero,
        wall_off={number: own.off for number, own in clocks.items() if own.clock is not None},
        tables=tables,
    )
    return phases_as_stages(validation_as_stage(drivers_wait(spans)))


def _steps_per_iteration(
    columns: Mapping[int, dict[str, Int64s]],
    counters: Mapping[int, dict[str, Counter]],
    headers: Mapping[int, Header],
    names: Mapping[str, int],
) -> int:
    evidence = {rank: StepEvidence(header) for rank, header in headers.items()}
    for rank, each in evidence.items():
        each.take(columns[rank], counters[rank], names)
    return steps_per_iteration(evidence)


def _of_iterations(size: int) -> list[RankNote]:
    text = f"a step is an iteration of the program's loop, with {size} steps of optimizers"
    code = Code.STEPS_JOINED.value
    return [RankNote(None, 0, "info", text, code, {"steps": size})] if size > 1 else []


def _notes(ranks: dict[int, Rank], clocks: Mapping[int, OnAxis], zero: int) -> list[RankNote]:
    found = []
    for number, rank in ranks.items():
        known = [min(max(note.clock_ns, -_MAX_INT), _MAX_INT) for note in rank.notes]
        times = clocks[number].unix(np.array(known, np.int64))
        found += [
            RankNote(number, time - zero, note.level, note.text, note.code, note.facts)
            for time, note in zip(times.tolist(), rank.notes, strict=True)
        ]
    return sorted(found, key=lambda note: note.time_ns)
