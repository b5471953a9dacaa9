"""Read the rank files of an rlprof run into the columns of `Spans`, on a common timeline."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.clocks.clock_alignment import Meetings, OnAxis, clock_table, on_axis
from lightning_rlprof.loaders.iterations import join_optimizer_steps
from lightning_rlprof.loaders.process_roles import drivers_wait, give_steps
from lightning_rlprof.loaders.rank_names import disagreeing, missing, rank_in_name
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import KINDS, PHASES, VALIDATIONS, Header, Note, Number
from lightning_rlprof.records.run_directory import (
    MetricsLine,
    RankTrace,
    SampleLine,
    SpanLine,
    read_trace,
)
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.background_metrics import background_metrics
from lightning_rlprof.tables.sample_names import sample_names
from lightning_rlprof.tables.spans import NO_PARENT, Counter, RankNote, RunWarning, Spans, Thread


def _counters(
    lines: list[SpanLine], late: Mapping[int, Mapping[str, Number | None]]
) -> dict[str, Counter]:
    """Collect one rank's counters by name; those written after their span, by its id, win."""
    found: dict[str, tuple[list[int], list[Number]]] = {}
    for row, line in enumerate(lines):
        counters = line.counters or {}
        if line.id in late:
            counters = {**counters, **late[line.id]}
        for name, value in counters.items():
            if value is None:  # written for a number that is not finite
                continue
            rows, values = found.setdefault(name, ([], []))
            rows.append(row)
            values.append(value)
    return {
        name: Counter(np.array(rows, np.int64), _exact(values))
        for name, (rows, values) in found.items()
    }


def _exact(values: list[Number]) -> np.ndarray[Any, Any]:
    """Return an array that holds every value as it is: no integer becomes a float."""
    kinds = set(map(type, values))
    if kinds == {int} and max(map(abs, values)) < 2**63:
        return np.array(values, dtype=np.int64)
    return np.array(values, dtype=np.float64 if kinds == {float} else object)


def merge(ranks: Sequence[Mapping[str, Counter]], counts: Sequence[int]) -> dict[str, Counter]:
    """Join the counters of ranks; ``counts`` are their numbers of spans.

    Where the types of two ranks differ, the values stay Python numbers.
    """
    starts = [0, *np.cumsum(counts).tolist()]
    merged: dict[str, Counter] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        own = [
            (start, rank[name]) for start, rank in zip(starts, ranks, strict=False) if name in rank
        ]
        types = {counter.values.dtype for _, counter in own}
        kind = types.pop() if len(types) == 1 else np.dtype(object)
        merged[name] = Counter(
            np.concatenate([counter.rows + start for start, counter in own]),
            np.concatenate([counter.values.astype(kind) for _, counter in own]),
        )
    return merged


NO_STAGES = (
    "no stage is marked, so the phases of the training loop are the stages. "
    "Mark your own with stage() or wrap"
)
"""What a run without marks says of its stages."""

_EVALUATIONS = ("test", "predict")  # of a Trainer that does only this: whole steps
_HOOK = re.compile(r".+\.on_train_(?:batch_start|batch_end|epoch_end)")  # of other callbacks
_KIND = {kind: code for code, kind in enumerate(KINDS)}
# Times below 2**60 (36 years of uptime) and anchors below 2**62 (the year 2116): on the common axis
# every time, and every difference of two, fits into 64 bits.
_LARGEST = 2**60
_LARGEST_ANCHOR = 2**62
_LARGEST_EXCHANGED = 2**58
_MOST_RANKS = 2**20


@dataclass
class _Rank:
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
    ranks: dict[int, _Rank] = {}
    problems: list[RunWarning] = []
    broken: list[TraceError] = []
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    for count, file in enumerate(files, start=1):
        try:
            problems += _add_rank(_read_rank(file, names, threads), ranks)
        except TraceError as error:
            broken.append(error)
            problems.append(RunWarning(rank_in_name(file.name), str(error)))
        if progress is not None:
            progress(count, len(files))
    if not ranks:
        raise broken[0]
    _close_world(ranks)
    if path.is_dir():
        world = max(rank.header.world_size for rank in ranks.values())
        problems += missing(world, [*ranks, *(each.rank for each in problems)])
    spans = _assemble(path, dict(sorted(ranks.items())), names, threads, problems)
    return phases_as_stages(validation_as_stage(drivers_wait(spans)))


def validation_as_stage(spans: Spans) -> Spans:
    """Let validations be stages that include what runs in them: it is not training.

    A rollout in a validation becomes a region of it, so that no table counts it as training.
    """
    stage, region = KINDS.index("stage"), KINDS.index("region")
    whole = np.array([*(name in VALIDATIONS for name in spans.names), False])[spans.name]
    alone = np.array([*(name in _EVALUATIONS for name in spans.names), False])[spans.name]
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
    if len(validations):  # which include their transfers
        width = int(max(spans.id.max(), spans.parent.max())) + 1
        whose = spans.rank[validations] * width + spans.id[validations]
        rows &= ~np.isin(spans.rank * width + spans.parent, whose)
    if not rows.any():
        return spans
    notes = (RankNote(None, 0, "info", NO_STAGES, Code.NO_STAGES.value), *spans.notes)
    return replace(spans, kind=np.where(rows, stage, spans.kind), notes=notes)


def _add_rank(rank: _Rank, ranks: dict[int, _Rank]) -> list[RunWarning]:
    """Add a rank to the run unless its file does not belong there."""
    number, name = rank.header.rank, rank.path.name
    if number in ranks:
        other = ranks[number].path.name
        return [RunWarning(number, f"{name} is left out: its rank is {number}, as in {other}")]
    first = next(iter(ranks.values()), rank)
    ranks[number] = rank
    if rank.header.run_id != first.header.run_id:
        text = f"{name} belongs to run {rank.header.run_id}, {first.path.name} to another one"
        return [RunWarning(number, text)]
    return []


def from_traces(path: Path, traces: Sequence[RankTrace]) -> Spans:
    """Return what logs of other programs told of ranks as one run.

    Args:
        path: What the user asked for.
        traces: One per rank; of two with one rank the second is left out, with a warning.
    """
    ranks: dict[int, _Rank] = {}
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    problems: list[RunWarning] = []
    for trace in traces:
        problems += _add_rank(_rank_of(trace, names, threads), ranks)
    _close_world(ranks)
    return drivers_wait(_assemble(path, dict(sorted(ranks.items())), names, threads, problems))


def _read_rank(file: Path, names: dict[str, int], threads: dict[Thread, int]) -> _Rank:
    return _rank_of(read_trace(file), names, threads)


def _rank_of(trace: RankTrace, names: dict[str, int], threads: dict[Thread, int]) -> _Rank:
    file, number = trace.path, trace.header.rank
    if not 0 <= number < _MOST_RANKS:
        raise TraceError(
            f"{file}: rank {number} in its header is out of range (0 to {_MOST_RANKS - 1})"
        )
    if not -_LARGEST < trace.header.unix_ns - trace.header.clock_ns < _LARGEST_ANCHOR:
        raise TraceError(f"{file}: the clock values in its header are out of range")
    if trace.header.open_world and not trace.lost_lines:
        # Ray kills a worker whose job has ended: that it was, no worker can write.
        trace.status = trace.status or "finished"
    lines, problems = _valid_spans(trace)
    columns = _columns(lines, number, trace.threads, names, threads)
    order = np.lexsort((columns["id"], columns["start_ns"]))
    columns = {name: column[order] for name, column in columns.items()}
    problems += _check_ids(columns, number)
    counters = _counters([lines[at] for at in order.tolist()], trace.late)
    head = _checked_header(trace.header, problems)
    exchanges = [
        (rank, [each for each in readings if _is_possible(*each)])
        for rank, readings in trace.exchanges
    ]
    named = [each for each in trace.samples if 0 <= each.id < _LARGEST]
    parts = head, columns, counters, trace.notes, trace.status, problems, exchanges, named
    metrics = [
        each for each in trace.metrics if -_LARGEST < each.since_ns <= each.clock_ns < _LARGEST
    ]
    return _Rank(file, *parts, metrics)


def _checked_header(head: Header, problems: list[RunWarning]) -> Header:
    """Return a header whose world can be true; one that cannot is as small as its rank allows."""
    if 0 < head.world_size <= _MOST_RANKS:
        return head
    text = f"ignored the world size {head.world_size} of its header (allowed: 1 to {_MOST_RANKS})"
    problems.append(RunWarning(head.rank, text))
    return replace(head, world_size=head.rank + 1)


def _close_world(ranks: "dict[int, _Rank]") -> None:
    """Let the world of ranks that came and went be as large as all of them."""
    for rank, own in ranks.items():
        if own.header.open_world:
            ranks[rank] = replace(own, header=replace(own.header, world_size=max(ranks) + 1))


def _is_possible(sent: int, arrived: int, answered: int, received: int) -> bool:
    most = _LARGEST_EXCHANGED
    return -most < sent <= received < most and -most < arrived <= answered < most


def _valid_spans(trace: RankTrace) -> tuple[list[SpanLine], list[RunWarning]]:
    """Return the spans that can be true, and say how many cannot, and how the file ended."""
    rank, lines = trace.header.rank, trace.spans
    small = [line for line in lines if _is_in_range(line)]
    forward = [line for line in small if line.end_ns >= line.start_ns]
    lost, far, backward = trace.lost_lines, len(lines) - len(small), len(small) - len(forward)
    texts = [
        (lost, f"{lost} of its lines can't be read"),
        (far, f"{far} spans are left out: their numbers are out of range"),
        (backward, f"{backward} spans are left out: they end before they start"),
        (trace.status is None, "its file is truncated: the rank was killed or is still running"),
        (trace.status not in (None, "finished"), f"it ended early: {trace.status}"),
    ]
    return forward, [RunWarning(rank, text) for is_so, text in texts if is_so]


def _is_in_range(line: SpanLine) -> bool:
    return (
        -_LARGEST < line.start_ns < _LARGEST
        and -_LARGEST < line.end_ns < _LARGEST
        and 0 <= line.id < _LARGEST
        and 0 <= line.step < _LARGEST
        and (line.parent is None or 0 <= line.parent < _LARGEST)
    )


def _columns(
    lines: list[SpanLine],
    rank: int,
    thread_names: Mapping[int, str],
    codes: dict[str, int],
    threads: dict[Thread, int],
) -> dict[str, Int64s]:
    """Turn one rank's lines into columns; names and threads become codes."""
    for name in dict.fromkeys(line.name for line in lines):
        codes.setdefault(name, len(codes))
    idents: dict[int, int] = {}
    for ident in dict.fromkeys(line.thread for line in lines):
        thread = Thread(rank, ident, thread_names.get(ident, f"thread {ident}"))
        idents[ident] = threads.setdefault(thread, len(threads))
    columns: dict[str, Iterable[int]] = {
        "name": (codes[line.name] for line in lines),
        "kind": (_KIND[line.kind] for line in lines),
        "step": (line.step for line in lines),
        "start_ns": (line.start_ns for line in lines),
        "end_ns": (line.end_ns for line in lines),
        "thread": (idents[line.thread] for line in lines),
        "id": (line.id for line in lines),
        "parent": (NO_PARENT if line.parent is None else line.parent for line in lines),
    }
    return {name: np.fromiter(own, np.int64, len(lines)) for name, own in columns.items()}


def _check_ids(columns: dict[str, Int64s], rank: int) -> list[RunWarning]:
    """Say how many spans share an id or name a parent that is not in the file."""
    ids, parents = columns["id"], columns["parent"]
    twins = len(ids) - len(np.unique(ids))
    orphans = int(np.count_nonzero((parents != NO_PARENT) & ~np.isin(parents, ids)))
    texts = [
        (twins, "{} spans share an id with another span"),
        (orphans, "{} spans lost their parent, which never ended"),
    ]
    return [RunWarning(rank, text.format(count)) for count, text in texts if count]


def _assemble(
    path: Path,
    ranks: dict[int, _Rank],
    names: dict[str, int],
    threads: Mapping[Thread, int],
    problems: list[RunWarning],
) -> Spans:
    """Put all ranks on one axis that starts with the first event."""
    headers = {number: rank.header for number, rank in ranks.items()}
    problems += disagreeing(headers.values())
    clocks, doubts = on_axis(headers, {number: rank.meetings for number, rank in ranks.items()})
    starts = [
        int(clocks[number].unix(rank.columns["start_ns"][:1])[0])
        for number, rank in ranks.items()
        if len(rank.columns["start_ns"])
    ]
    zero = min(starts, default=min(header.unix_ns for header in headers.values()))
    lives = {
        number: [int(rank.columns["start_ns"][0]), int(rank.columns["end_ns"].max())]
        for number, rank in ranks.items()
        if len(rank.columns["id"])
    }
    table = clock_table(headers, clocks, lives)
    tables = {"clocks": lambda known=table: known} if table is not None else {}
    if any(rank.samples for rank in ranks.values()):
        named = sample_names({number: rank.samples for number, rank in ranks.items()})
        tables[named.name] = lambda known=named: known
    sampled = {number: rank.metrics for number, rank in ranks.items() if rank.metrics}
    if sampled:
        table = background_metrics(sampled, lambda rank, times: clocks[rank].unix(times) - zero)
        tables[table.name] = lambda known=table: known
    for number, rank in ranks.items():
        for column in ("start_ns", "end_ns"):
            rank.columns[column] = clocks[number].unix(rank.columns[column]) - zero
    columns = {number: rank.columns for number, rank in ranks.items()}
    counters = {number: rank.counters for number, rank in ranks.items()}
    size = join_optimizer_steps(columns, counters, headers, names)
    if any(header.open_world for header in headers.values()):
        give_steps(columns, counters, headers, names.setdefault("step", len(names)))
    every = list(ranks.values())
    counts = [len(rank.columns["id"]) for rank in every]
    joined: dict[str, Any] = {
        name: np.concatenate([rank.columns[name] for rank in every]) for name in every[0].columns
    }
    return Spans(
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


def _of_iterations(size: int) -> list[RankNote]:
    text = f"a step is an iteration of the program's loop, with {size} steps of optimizers"
    code = Code.STEPS_JOINED.value
    return [RankNote(None, 0, "info", text, code, {"steps": size})] if size > 1 else []


def _notes(ranks: dict[int, _Rank], clocks: Mapping[int, OnAxis], zero: int) -> list[RankNote]:
    found = []
    for number, rank in ranks.items():
        known = [min(max(note.clock_ns, -_LARGEST), _LARGEST) for note in rank.notes]
        times = clocks[number].unix(np.array(known, np.int64))
        found += [
            RankNote(number, time - zero, note.level, note.text, note.code, note.facts)
            for time, note in zip(times.tolist(), rank.notes, strict=True)
        ]
    return sorted(found, key=lambda note: note.time_ns)
