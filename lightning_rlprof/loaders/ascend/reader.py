"""Captures of torch_npu.profiler as spans, with tables of what the host and the device did."""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend.capture import (
    OpenCapture,
    TableReader,
    open_captures,
    read_table,
)
from lightning_rlprof.loaders.ascend.collectives import COLLECTIVES
from lightning_rlprof.loaders.ascend.communication import COMMUNICATION, LINKS
from lightning_rlprof.loaders.ascend.host_calls import CALLS, SHAPES, SYNC
from lightning_rlprof.loaders.ascend.kernels import KERNELS, MEMCPY, place_tasks
from lightning_rlprof.loaders.ascend.sheet_tables import (
    MEMORY,
    MODULE_MEMORY,
    OPERATOR_MEMORY,
    OPERATOR_TYPES,
    STEP_TRACE,
)
from lightning_rlprof.loaders.ascend.tasks import read_tasks
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import FORMAT, KINDS, Header
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import parents
from lightning_rlprof.tables.kernels import UNKNOWN, Kernels, join
from lightning_rlprof.tables.spans import (
    NO_PARENT,
    Counter,
    RankNote,
    RunWarning,
    Spans,
    Thread,
    note_of,
    warning_of,
)
from lightning_rlprof.tables.table import Table

_MAX_RANKS = 2**20
_DEVICE_TIME = "device_ns"  # the counter of `lightning_rlprof.recording.recorders.device_time`
_MAX_GAP_RATIO = 100  # between parts of one step, relative to their length

_READERS: Mapping[str, TableReader] = {
    "collectives": COLLECTIVES,
    "communication": COMMUNICATION,
    "links": LINKS,
    "memcpy": MEMCPY,
    "memory": MEMORY,
    "module_memory": MODULE_MEMORY,
    "operator_memory": OPERATOR_MEMORY,
    "operator_types": OPERATOR_TYPES,
    "shapes": SHAPES,
    "step_trace": STEP_TRACE,
    "sync": SYNC,
    "calls": CALLS,
}


def read_ascend(path: Path) -> Spans:
    """Read one capture or several: their MSTX ranges as spans, and their tables.

    In the domain ``rlprof`` the name of a stage is a stage and ``step`` a step. Ranges of other
    domains are regions in the step around them. A capture is read from its database, or, without
    one, from its text files. Each table is read when it is first used.

    Tables, if a capture may have them: kernels, memcpy, collectives, communication, links,
    step_trace, operator_types, memory, operator_memory, module_memory, shapes, sync and calls.

    Args:
        path: A directory ``*_ascend_pt`` or one with several, the folder of parsed files in it, a
            ``trace_view.json`` or an ``ascend_pytorch_profiler*.db``.

    Raises:
        TraceError: It is none of these, or nothing of it can be read.
    """
    captures, warnings = _read_captures(path)
    zero = _first_ns(captures)
    headers = _headers(captures)
    truncated = {each.rank for each in captures if not each.timeline.complete}
    return Spans(
        path,
        **_span_columns(captures, zero),
        headers=headers,
        statuses={rank: None if rank in truncated else "finished" for rank in headers},
        notes=tuple(_notes(captures, zero)),
        warnings=tuple(warnings),
        unix_ns=zero,
        tables=_tables(captures, zero, {**_READERS, "kernels": KERNELS}),
    )


def read_ascend_kernels(path: Path) -> tuple[Kernels, int, list[str]]:
    """Read only the kernels, for a run that has its own spans.

    If a capture marks neither stages nor steps and its window is unknown, its steps are 0: the
    count of torch_npu does not match the run's.

    Returns:
        Kernels by capture and start, the wall-clock time of zero on their time axis (0 if
        unknown), and what was lost or is doubtful.

    Raises:
        TraceError: See `read_ascend`.
    """
    captures, warnings = _read_captures(path)
    zero = _first_ns(captures)
    parts, remarks = [], [warning.text for warning in warnings]
    for each in captures:
        in_run = replace(each, fill=lambda kernels: kernels)
        kernels, more = place_tasks(in_run, read_tasks(each))
        parts.append(kernels.later(-zero))
        remarks += more
    return join(parts), zero, remarks


def ascend_tables(
    ranks: Mapping[Path, int], zero_ns: int, fill: Callable[[Kernels], Kernels]
) -> dict[str, Callable[[], Table]]:
    """Return the tables of captures in a run directory, all but the kernels.

    Args:
        ranks: The rank of each capture, by its directory.
        zero_ns: Wall-clock time of zero on the run's time axis.
        fill: Adds stage and step of the run to kernels that have neither.
    """

    def fill_since_1970(kernels: Kernels) -> Kernels:
        return fill(kernels.later(-zero_ns)).later(zero_ns)

    captures = [
        replace(each, rank=rank, fill=fill_since_1970)
        for path, rank in ranks.items()
        for each in open_captures(path)[0]
    ]
    return _tables(captures, zero_ns, _READERS)


def _tables(
    captures: Sequence[OpenCapture], zero_ns: int, readers: Mapping[str, TableReader]
) -> dict[str, Callable[[], Table]]:
    return {
        name: partial(read_table, name, reader, captures, zero_ns)
        for name, reader in readers.items()
        if any(reader.available(each) for each in captures)
    }


def _read_captures(path: Path) -> tuple[list[OpenCapture], list[RunWarning]]:
    """Read the ranges of all captures; an unreadable one becomes a warning, if others are read."""
    opened, remarks = open_captures(path)
    warnings = [warning_of(None, text, Code.CAPTURE_DOUBTFUL) for text in remarks]
    captures: list[OpenCapture] = []
    errors: list[TraceError] = []
    for each in opened:
        try:
            _ = each.timeline
            captures.append(each)
        except TraceError as error:
            errors.append(error)
            warnings.append(RunWarning(each.rank, str(error), Code.RANK_UNREADABLE.value))
    if not captures:
        raise errors[0]
    captures.sort(key=lambda each: (each.rank, max(each.timeline.first_ns, 0)))
    captures, copies = _without_copies(captures)
    for each in captures:
        warnings += [
            warning_of(each.rank, text, Code.CAPTURE_DOUBTFUL) for text in each.timeline.problems
        ]
    doubts = [*_overlapping_captures(captures), *_repeated_steps(captures)]
    return captures, [*warnings, *copies, *doubts]


def _without_copies(
    captures: Sequence[OpenCapture],
) -> tuple[list[OpenCapture], list[RunWarning]]:
    """Leave out copies of captures, as their times would be added up."""
    first: dict[object, OpenCapture] = {}
    warnings = []
    for each in captures:
        capture, timeline = each.capture, each.timeline
        ranges, role = timeline.ranges, str(capture.metadata.get("role"))
        times = (ranges.start_ns.tobytes(), ranges.end_ns.tobytes(), timeline.first_ns)
        same = (each.rank, role, times, tuple(ranges.names))
        key = capture.path if timeline.first_ns == UNKNOWN else same
        if (original := first.setdefault(key, each)) is not each:
            text = f"skipped {capture.path}: a copy of {original.capture.path}"
            warnings.append(RunWarning(each.rank, text, Code.CAPTURE_DOUBTFUL.value))
    return list(first.values()), warnings


def _overlapping_captures(captures: Sequence[OpenCapture]) -> list[RunWarning]:
    """Warn of ranks with captures of several processes, or captures that overlap in time."""
    processes = {
        (each.rank, each.capture.process, str(each.capture.metadata.get("role")))
        for each in captures
    }
    counts = collections.Counter(rank for rank, *_ in processes)
    overlapping = {
        after.rank: "captures of one process overlap in time, and are added up. Is one of "
        "them a part of the other?"
        for before, after in pairwise(captures)
        if before.rank == after.rank
        and 0 < after.timeline.first_ns < before.timeline.ranges.end_ns.max(initial=0)
    }
    several = {
        rank: f"captures of {count} processes have this rank; rlprof shows them side by side"
        for rank, count in sorted(counts.items())
        if count > 1
    }
    code = Code.CAPTURE_DOUBTFUL.value
    return [RunWarning(rank, text, code) for rank, text in {**overlapping, **several}.items()]


def _repeated_steps(captures: Sequence[OpenCapture]) -> list[RunWarning]:
    """Warn of ranks with a step in captures far apart: two runs may be in one folder.

    Captures of several stages of a step are close together.
    """
    times: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in captures:
        ranges, rank = each.timeline.ranges, each.rank
        rows = np.flatnonzero((ranges.kind == KINDS.index("step")) & (ranges.step > 0))
        columns = (ranges.step[rows], ranges.start_ns[rows], ranges.end_ns[rows])
        for step, start, end in zip(*(column.tolist() for column in columns), strict=True):
            times.setdefault((rank, step), []).append((start, end))
    found = {}
    for (rank, step), parts in times.items():
        gap = max(start for start, _ in parts) - min(end for _, end in parts)
        if gap > _MAX_GAP_RATIO * sum(end - start for start, end in parts):
            found[rank] = (
                f"step {step} is in captures far apart, and added up. Are they of one run?"
            )
    code = Code.CAPTURE_DOUBTFUL.value
    return [RunWarning(rank, text, code) for rank, text in found.items()]


def _first_ns(captures: Sequence[OpenCapture]) -> int:
    starts = [each.timeline.first_ns for each in captures]
    return min((start for start in starts if start != UNKNOWN), default=0)


def _span_columns(captures: Sequence[OpenCapture], zero_ns: int) -> dict[str, Any]:
    """Return names, threads, columns and counters for `Spans`.

    The counter of device time is the length on the device of ranges that went through a stream.
    """
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    parts: dict[str, list[Int64s]] = {}
    for number, each in enumerate(captures):
        for name, column in _coded_ranges(each, names, threads).items():
            parts.setdefault(name, []).append(column)
        # Threads of two processes may have one number, but their ranges do not nest.
        parts.setdefault("lane", []).append(parts["thread"][-1] * len(captures) + number)
    joined = {name: np.concatenate(columns) for name, columns in parts.items()}
    order = np.lexsort((-joined["end_ns"], joined["start_ns"], joined["rank"]))
    columns = {name: column[order] for name, column in joined.items()}
    ids = np.arange(len(order)) - np.searchsorted(columns["rank"], columns["rank"])
    times = (columns["start_ns"], columns["end_ns"])
    outer = parents(columns.pop("lane"), *times, closed=False)
    device_ns = columns.pop("device_ns")
    rows = np.flatnonzero(device_ns != UNKNOWN)
    columns |= {"start_ns": times[0] - zero_ns, "end_ns": times[1] - zero_ns, "id": ids}
    return {
        **columns,
        "names": tuple(names),
        "threads": tuple(threads),
        "parent": np.append(ids, NO_PARENT)[outer],
        "counters": {_DEVICE_TIME: Counter(rows, device_ns[rows])} if len(rows) else {},
    }


def _coded_ranges(
    opened: OpenCapture, names: dict[str, int], threads: dict[Thread, int]
) -> dict[str, Int64s]:
    """Return the columns of one capture; names and threads are codes of all captures."""
    ranges, rank = opened.timeline.ranges, opened.rank
    code = [names.setdefault(text, len(names)) for text in ranges.names]
    idents, thread = np.unique(ranges.thread, return_inverse=True)
    thread_codes = [
        threads.setdefault(Thread(rank, ident, f"thread {ident}"), len(threads))
        for ident in idents.tolist()
    ]
    length = ranges.device_end_ns - ranges.device_start_ns
    return {
        "name": np.array([*code, -1], np.int64)[ranges.name],
        "kind": ranges.kind,
        "rank": np.full(len(ranges.name), rank),
        "step": ranges.step,
        "start_ns": ranges.start_ns,
        "end_ns": ranges.end_ns,
        "thread": np.array([*thread_codes, -1], np.int64)[thread],
        "device_ns": np.where(ranges.device_start_ns == UNKNOWN, UNKNOWN, length),
    }


def _headers(captures: Sequence[OpenCapture]) -> dict[int, Header]:
    """Return a header per rank, that of its first capture."""
    groups = [ranks for each in captures for ranks in each.capture.groups.values()]
    ranks = [rank for group in groups for rank in group if isinstance(rank, int)]
    ranks = [rank for rank in ranks if rank < _MAX_RANKS] + [each.rank for each in captures]
    world = max(ranks) + 1
    found: dict[int, Header] = {}
    for each in captures:
        if each.rank not in found:
            found[each.rank] = _header(each, world)
    return dict(sorted(found.items()))


def _header(opened: OpenCapture, world_size: int) -> Header:
    capture, info = opened.capture, opened.capture.info
    return Header(
        FORMAT,
        run_id=str(capture.metadata.get("rlprof_run") or capture.path.name),
        rank=opened.rank,
        world_size=world_size,
        role=str(capture.metadata.get("role") or ""),
        host=opened.host,
        pid=capture.process[1],
        device=opened.chip or ("cpu" if capture.is_cpu_only else "npu"),
        unix_ns=max(opened.timeline.first_ns, 0),
        clock_ns=0,
        versions={
            name: str(info[key])
            for name, key in (("torch_npu", "torch_npu_version"), ("cann", "cann_version"))
            if key in info
        },
    )


def _notes(captures: Sequence[OpenCapture], zero_ns: int) -> Iterator[RankNote]:
    """Yield the format, level and window of each capture, and whether it has stages."""
    for each in captures:
        capture, timeline = each.capture, each.timeline
        formats = (("text", capture.trace), ("database", each.database))
        properties = [name for name, source in formats if source is not None]
        level = capture.option("_profiler_level")
        properties += [f"level {level}"] if level else []
        properties += [f"window {w}"] if (w := capture.metadata.get("rlprof_window")) else []
        when = timeline.first_ns - zero_ns if timeline.first_ns != UNKNOWN else 0
        text = f"{capture.path.name}: {', '.join(properties)}"
        yield note_of(each.rank, Code.CAPTURE_SETTINGS, text, when)
        if not timeline.ranges.has_stages:
            text = f"{capture.path.name} has no stages and no steps: MSTX was off or not used"
            yield note_of(each.rank, Code.NO_RANGES, text, when)
