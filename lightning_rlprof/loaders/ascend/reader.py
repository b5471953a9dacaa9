"""Output of torch_npu.profiler, text and database, as spans with tables of what the device did.

Ranges of several Ascend captures as the columns of `Spans`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import (
    Recorded,
    has_kernels,
    open_captures,
    read_capture,
    read_capture_kernels,
)
from lightning_rlprof.loaders.ascend.collectives import collectives_part
from lightning_rlprof.loaders.ascend.communication import COMMUNICATION
from lightning_rlprof.loaders.ascend.copies import copies_part
from lightning_rlprof.loaders.ascend.host_calls import calls_part
from lightning_rlprof.loaders.ascend.memory import MEMORY, MODULE_MEMORY, OPERATOR_MEMORY
from lightning_rlprof.loaders.ascend.operators import MODULES, OPERATOR_TYPES, OPERATORS, SHAPES
from lightning_rlprof.loaders.ascend.steps import OVERLAP, STEP_TRACE, SYNC
from lightning_rlprof.loaders.ascend.table_parts import Opened, Part, part_table
from lightning_rlprof.records.records import FORMAT, KINDS, Header
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.interval_nesting import parents
from lightning_rlprof.tables.kernels import COLUMNS, UNKNOWN, Kernels, join, kernel_table
from lightning_rlprof.tables.spans import NO_PARENT, Counter, RankNote, RunWarning, Spans, Thread
from lightning_rlprof.tables.table import Table

_MOST_RANKS = 2**20
_DEVICE_TIME = "device_ns"  # as `lightning_rlprof.recording.recorders.device_time` counts it


def axis_zero(captures: Sequence[Recorded]) -> int:
    """Return when the first thing in any capture began, 0 where none tells."""
    return min((each.first_ns for each in captures if each.first_ns != UNKNOWN), default=0)


def columns_of(captures: Sequence[Recorded], zero_ns: int) -> dict[str, Any]:
    """Return names, threads, columns and counters for `Spans`.

    Device time is how long the device was in a range that went through a stream.
    """
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    parts: dict[str, list[Int64s]] = {}
    for number, each in enumerate(captures):
        for name, column in _own(each, names, threads).items():
            parts.setdefault(name, []).append(column)
        # Threads of two processes may have one number, and yet nothing of one is in the other's.
        parts.setdefault("lane", []).append(parts["thread"][-1] * len(captures) + number)
    joined = {name: np.concatenate(own) for name, own in parts.items()}
    order = np.lexsort((-joined["end_ns"], joined["start_ns"], joined["rank"]))
    columns = {name: column[order] for name, column in joined.items()}
    ids = np.arange(len(order)) - np.searchsorted(columns["rank"], columns["rank"])
    times = (columns["start_ns"], columns["end_ns"])
    outer = parents(columns.pop("lane"), *times, closed=False)
    shadow = columns.pop("shadow")
    rows = np.flatnonzero(shadow != UNKNOWN)
    columns |= {"start_ns": times[0] - zero_ns, "end_ns": times[1] - zero_ns, "id": ids}
    return {
        **columns,
        "names": tuple(names),
        "threads": tuple(threads),
        "parent": np.append(ids, NO_PARENT)[outer],
        "counters": {_DEVICE_TIME: Counter(rows, shadow[rows])} if len(rows) else {},
    }


def _own(
    recorded: Recorded, names: dict[str, int], threads: dict[Thread, int]
) -> dict[str, Int64s]:
    """Return one capture's columns, its names and threads as codes of all captures."""
    ranges, rank = recorded.ranges, recorded.opened.rank
    code = [names.setdefault(text, len(names)) for text in ranges.names]
    idents, thread = np.unique(ranges.thread, return_inverse=True)
    lanes = [
        threads.setdefault(Thread(rank, ident, f"thread {ident}"), len(threads))
        for ident in idents.tolist()
    ]
    length = ranges.shadow_end_ns - ranges.shadow_start_ns
    return {
        "name": np.array([*code, -1], np.int64)[ranges.name],
        "kind": ranges.kind,
        "rank": np.full(len(ranges.name), rank),
        "step": ranges.step,
        "start_ns": ranges.start_ns,
        "end_ns": ranges.end_ns,
        "thread": np.array([*lanes, -1], np.int64)[thread],
        "shadow": np.where(ranges.shadow_start_ns == UNKNOWN, UNKNOWN, length),
    }


def headers_of(captures: Sequence[Recorded]) -> dict[int, Header]:
    """Return a header per rank; of several captures of one rank the first stands for it."""
    found: dict[int, Header] = {}
    world = max(_world(each) for each in captures)
    for each in captures:
        if each.opened.rank not in found:
            found[each.opened.rank] = _header(each, world)
    return dict(sorted(found.items()))


def _world(recorded: Recorded) -> int:
    """Return how many ranks there are, as the groups of processes tell, else up to this one."""
    groups, found = recorded.opened.capture.metadata.get("parallel_group_info"), {0}
    for group in groups.values() if isinstance(groups, dict) else ():
        ranks = group.get("global_ranks") if isinstance(group, dict) else None
        ranks = ranks if isinstance(ranks, list) else []
        found.update(rank for rank in ranks if isinstance(rank, int) and rank < _MOST_RANKS)
    return max(*found, recorded.opened.rank) + 1


def _header(recorded: Recorded, world: int) -> Header:
    opened, capture = recorded.opened, recorded.opened.capture
    activities = capture.option("activities", "common_config")
    only_cpu = isinstance(activities, list) and not any("NPU" in str(each) for each in activities)
    info: Mapping[str, Any] = capture.info
    return Header(
        FORMAT,
        run_id=str(capture.metadata.get("rlprof_run") or capture.path.name),
        rank=opened.rank,
        world_size=world,
        role=str(capture.metadata.get("role") or ""),
        host=opened.host,
        pid=capture.pid,
        device=opened.chip or ("cpu" if only_cpu else "npu"),
        unix_ns=max(recorded.first_ns, 0),
        clock_ns=0,
        versions={
            name: str(info[key])
            for name, key in (("torch_npu", "torch_npu_version"), ("cann", "cann_version"))
            if key in info
        },
    )


def notes_of(captures: Sequence[Recorded], zero_ns: int) -> Iterator[RankNote]:
    """Say what each capture is, and what it does not hold."""
    for each in captures:
        opened, capture = each.opened, each.opened.capture
        forms = (("text", capture.trace), ("database", opened.database))
        said = [name for name, there in forms if there is not None]
        level = capture.option("_profiler_level")
        said += [f"level {level}"] if level else []
        said += [f"window {w}"] if (w := capture.metadata.get("rlprof_window")) else []
        when = each.first_ns - zero_ns if each.first_ns != UNKNOWN else 0
        yield RankNote(opened.rank, when, "info", f"{capture.path.name}: {', '.join(said)}")
        if not each.ranges.own:
            text = f"{capture.path.name} marks no stages and no steps: MSTX was off, or not used"
            yield RankNote(opened.rank, when, "warning", text)


_DAY_NS = 86_400 * 10**9
_LONGEST_DAYS = 60  # the longest trainings
_SELDOM = 100  # a step is not so many times as long as what was captured of it

_PARTS: Mapping[str, Part] = {
    "communication": COMMUNICATION,
    "memory": MEMORY,
    "module_memory": MODULE_MEMORY,
    "modules": MODULES,
    "operator_memory": OPERATOR_MEMORY,
    "operator_types": OPERATOR_TYPES,
    "operators": OPERATORS,
    "overlap": OVERLAP,
    "shapes": SHAPES,
    "step_trace": STEP_TRACE,
    "sync": SYNC,
}


def read_ascend(path: Path) -> Spans:
    """Read one capture or several; their MSTX ranges are spans, tables are read when asked.

    In our own domain ``rlprof`` a stage's name is a stage and ``step`` a step; ranges of other
    domains are regions in the step of ours around them. Where a capture has both formats, its
    database is read, and its text where the database lacks something. Tables: kernels, memcpy,
    collectives, communication, step_trace, operators, modules, operator_types, overlap, memory,
    operator_memory, module_memory, sync and calls, those that any capture may hold.

    Args:
        path: A directory ``*_ascend_pt`` or one with several, the folder of analysed files in it,
            a ``trace_view.json`` or an ``ascend_pytorch_profiler*.db``.

    Raises:
        TraceError: It is none of that, or nothing of it can be read.
    """
    captures, problems = _recorded(path)
    zero = axis_zero(captures)
    headers = headers_of(captures)
    cut = {each.opened.rank for each in captures if not each.complete}
    return Spans(
        path,
        **columns_of(captures, zero),
        headers=headers,
        statuses={rank: None if rank in cut else "finished" for rank in headers},
        notes=tuple(notes_of(captures, zero)),
        warnings=tuple(problems),
        unix_ns=zero,
        tables=_tables(captures, zero),
    )


def read_ascend_kernels(path: Path) -> tuple[Kernels, int, list[str]]:
    """Read the kernels alone, for a run that has spans of its own.

    Where a capture marks neither stages nor steps and its window is not known, no step is told:
    torch_npu's own count is of no use to the run.

    Returns:
        Kernels by capture and start, the wall-clock time of zero on their axis (0 where it is not
        known), and what was lost or is doubtful.

    Raises:
        TraceError: See `read_ascend`.
    """
    captures, problems = _recorded(path)
    zero = axis_zero(captures)
    parts, remarks = [], [problem.text for problem in problems]
    for each in captures:
        kernels, own = read_capture_kernels(each)
        parts.append(_told(each, kernels).later(-zero))
        remarks += own
    return join(parts), zero, remarks


def _told(recorded: Recorded, kernels: Kernels) -> Kernels:
    """Return kernels without the steps that nothing but torch_npu's own count tells."""
    if recorded.ranges.own or recorded.opened.capture.window[0]:
        return kernels
    return replace(kernels, step=np.zeros_like(kernels.step))


def ascend_tables(
    ranks: Mapping[Path, int], zero_ns: int, filled: Callable[[Kernels], Kernels]
) -> dict[str, Callable[[], Table]]:
    """Return the tables of captures in a run's folder, all but the kernels.

    Args:
        ranks: The rank of each capture, by its directory.
        zero_ns: Wall-clock time of zero on the run's axis.
        filled: Adds stage and step of the run to what a capture knows neither of.
    """
    opened = [replace(e, rank=rank) for path, rank in ranks.items() for e in open_captures(path)[0]]

    def placed(each: Recorded, own: Kernels) -> Kernels:
        return filled(_told(each, own).later(-zero_ns)).later(zero_ns)

    return _part_tables(opened, zero_ns, read_capture, placed)


def _recorded(path: Path) -> tuple[list[Recorded], list[RunWarning]]:
    """Read the ranges of all captures; one that cannot be read is a problem of the others."""
    opened, guessed = open_captures(path)
    problems = [RunWarning(None, text) for text in guessed]
    captures: list[Recorded] = []
    broken: list[TraceError] = []
    for each in opened:
        try:
            captures.append(read_capture(each))
        except TraceError as error:
            broken.append(error)
            problems.append(RunWarning(each.rank, str(error)))
    if not captures:
        raise broken[0]
    captures.sort(key=lambda each: (each.opened.rank, max(each.first_ns, 0)))
    captures, copies = _without_copies(captures)
    problems += [RunWarning(each.opened.rank, text) for each in captures for text in each.problems]
    doubts = (_strangers, _twice, _apart)
    return captures, [*problems, *copies, *(one for doubt in doubts for one in doubt(captures))]


def _without_copies(captures: Sequence[Recorded]) -> tuple[list[Recorded], list[RunWarning]]:
    """Leave out captures that another one is the same as: copies would be added up."""
    first: dict[object, Recorded] = {}
    problems = []
    for each in captures:
        one = first.setdefault(_print(each), each)
        if one is not each:
            path, rank = each.opened.capture.path, each.opened.rank
            text = f"{path} is left out: it is the same as {one.opened.capture.path}"
            problems.append(RunWarning(rank, text))
    return list(first.values()), problems


def _print(recorded: Recorded) -> object:
    """Return what only copies of a capture share: rank, role, names and times."""
    capture, ranges = recorded.opened.capture, recorded.ranges
    if recorded.first_ns == UNKNOWN:
        return capture.path
    who = (recorded.opened.rank, str(capture.metadata.get("role")))
    times = (ranges.start_ns.tobytes(), ranges.end_ns.tobytes())
    return (who, recorded.first_ns, capture.began_ns, times, tuple(ranges.names))


def _strangers(captures: Sequence[Recorded]) -> list[RunWarning]:
    """Say which ranks are those of several programs, as where trainer and rollout count apart.

    Captures of one program come one after the other.
    """
    found: dict[int, set[tuple[str, int, str]]] = {}
    for each in captures:
        capture = each.opened.capture
        who = (capture.host, capture.pid, str(capture.metadata.get("role")))
        found.setdefault(each.opened.rank, set()).add(who)
    text = "captures of {} processes say that they are this rank: they stand side by side"
    several = {rank: text.format(len(own)) for rank, own in found.items() if len(own) > 1}
    both = "captures of one process overlap in time, and are added up: is one a part of the other?"
    met = {
        after.opened.rank: both
        for before, after in pairwise(captures)
        if before.opened.rank == after.opened.rank and 0 < after.first_ns < _last_ns(before)
    }
    return [RunWarning(rank, text) for rank, text in {**met, **several}.items()]


def _last_ns(recorded: Recorded) -> int:
    return int(recorded.ranges.end_ns.max(initial=0))


def _twice(captures: Sequence[Recorded]) -> list[RunWarning]:
    """Say which ranks have a step in captures far apart, as where two runs lie in one folder.

    Captures of several stages of one step hold it, too, each a part of it.
    """
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in captures:
        ranges, rank = each.ranges, each.opened.rank
        own = np.flatnonzero((ranges.kind == KINDS.index("step")) & (ranges.step > 0))
        columns = (ranges.step[own], ranges.start_ns[own], ranges.end_ns[own])
        for step, start, end in zip(*(column.tolist() for column in columns), strict=True):
            seen.setdefault((rank, step), []).append((start, end))
    found = {}
    for (rank, step), parts in seen.items():
        between = max(start for start, _ in parts) - min(end for _, end in parts)
        if between > _SELDOM * sum(end - start for start, end in parts):
            found[rank] = (
                f"step {step} is in captures far apart, and added up: are they of one run?"
            )
    return [RunWarning(rank, text) for rank, text in found.items()]


def _apart(captures: Sequence[Recorded]) -> list[RunWarning]:
    """Say that captures lie further apart than a run is long."""
    first = [each.first_ns for each in captures if each.first_ns > 0]
    days = (max(first, default=0) - min(first, default=0)) // _DAY_NS
    text = f"its captures lie {days} days apart, so its wall clock is no time of work: choose those"
    return [RunWarning(None, f"{text} of one run")] if days > _LONGEST_DAYS else []


def _tables(captures: Sequence[Recorded], zero_ns: int) -> dict[str, Callable[[], Table]]:
    known = {each.opened.capture.path: each for each in captures}
    opened = [each.opened for each in captures]
    tables = _part_tables(
        opened, zero_ns, lambda one: known[one.capture.path], lambda _, kernels: kernels
    )
    if any(has_kernels(each.opened) for each in captures):
        tables["kernels"] = partial(_kernels, captures, zero_ns)
    return tables


def _part_tables(
    captures: Sequence[Opened],
    zero_ns: int,
    recorded: Callable[[Opened], Recorded],
    filled: Callable[[Recorded, Kernels], Kernels],
) -> dict[str, Callable[[], Table]]:
    # The largest table comes last.
    launched = {"collectives": collectives_part, "memcpy": copies_part, "calls": calls_part}
    placed = {name: part(recorded, filled) for name, part in launched.items()}
    return {
        name: partial(part_table, name, part, captures, zero_ns)
        for name, part in {**_PARTS, **placed}.items()
        if any(part.has(each) for each in captures)
    }


def _kernels(captures: Sequence[Recorded], zero_ns: int) -> Table:
    parts, remarks = [], []
    for each in captures:
        try:
            kernels, own = read_capture_kernels(each)
        except TraceError as error:
            remarks.append(str(error))
            continue
        parts.append(kernels.later(-zero_ns))
        name = f"{each.opened.capture.path.name}: " if len(captures) > 1 else ""
        remarks += [name + text for text in own]
    if not parts:
        return Table("kernels", COLUMNS, abstained="; ".join(remarks))
    return kernel_table(join(parts), "; ".join(dict.fromkeys(remarks)))
