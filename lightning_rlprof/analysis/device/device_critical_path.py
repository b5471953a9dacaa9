"""The critical path of steps inside a rank: which host code, launches, kernels and copies."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from lightning_rlprof.analysis.device.launch_queue import LaunchQueue, launch_queues
from lightning_rlprof.analysis.device.wait_chain import (
    GAP,
    HOST,
    LATENCY_NS,
    LAUNCH,
    PathSegments,
    critical_paths,
)
from lightning_rlprof.analysis.device.work import OTHERS, no_work
from lightning_rlprof.analysis.stages.partition import paint, sum_cells
from lightning_rlprof.analysis.step_selection import captures
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.arrays import Int64s, differs
from lightning_rlprof.tables.intervals import covered_before, edges
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    *columns_of("text", "part", "name", "stage"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("on path", "share"),
    Column("count", "count"),
)
_LONG = GAP - 1
_PARTS = {HOST: "host", LAUNCH: "launch latency", GAP: "kernel gap", _LONG: "unattributed delay"}
_NO_STEP = "No step that was profiled launched device work."
_NO_CALLS = (
    "Host calls were not recorded, so what the host waited for is unknown. Capture a step with "
    "torch.profiler and profile_with_cpu."
)

_AT_ONCE = 1 << 15  # calls: in the processor's cache they take half as long
_Coded = tuple[Int64s, Int64s, Int64s]
"""Starts, ends and codes of intervals."""
_Key = tuple[str, str | None, str | None]
"""Part, name and stage."""
_Totals = defaultdict[_Key, list[int]]
"""By part, name and stage: time on the path, number of segments, and time of all its work."""


def device_critical_path(
    spans: Spans, *, top: int | None = 20, ranks: Collection[int] | None = None
) -> Table:
    """Divide step time among host, launches, kernels and copies on the critical path; exact sums.

    The path leads back from the end of each step. Device work waited for its launch, for the work
    before it on its stream, or for another stream. The host waited, in a call that waits for the
    device, for the work that ended last in it. See `critical_paths`.

    ``share`` is relative to the length of all paths. A path begins with its step, or at the end of
    the path before it, if that is later. It ends with the host's step and all work launched in it.
    ``on path`` is the part of that work's time that is on the path: at 0.1, making it faster helps
    little. Delays longer than `LATENCY_NS` are "unattributed delay".

    Args:
        spans: The run.
        top: How many rows; one more sums up the rest. None for all.
        ranks: Only these; None for all.

    Raises:
        RlprofError: ``top`` is below 1.
    """
    if top is not None and top < 1:
        raise RlprofError(f"top={top}: must be 1 or more, or None for all rows")
    notes: list[str] = []
    totals: _Totals = defaultdict(lambda: [0, 0, 0])
    steps_of_ranks: list[set[int]] = []
    without_calls = 0
    for rank, queue in launch_queues(spans, ranks, notes):
        if queue is None:
            without_calls += 1
            continue
        found = [*_step_intervals(spans, rank, queue)]
        if found:
            _add_paths(totals, spans, rank, queue, [interval for interval, _ in found])
        steps_of_ranks.append({step for _, step in found})
    if not totals:
        if without_calls or steps_of_ranks:
            why = " ".join([_NO_CALLS if without_calls else _NO_STEP, *notes])
        else:
            why = no_work(ranks, notes)
        return Table("device_critical_path", _COLUMNS, abstained=why)
    notes.insert(0, _summary([each for each in steps_of_ranks if each], totals))
    if without_calls:
        notes.append(f"{without_calls} ranks are left out: their host calls were not recorded.")
    return Table("device_critical_path", _COLUMNS, _rows(totals, top), " ".join(notes))


def _summary(steps_of_ranks: Sequence[set[int]], totals: _Totals) -> str:
    """Return the share of each part of all paths, and how many steps these are."""
    count = sum(map(len, steps_of_ranks))
    steps = f"{count} steps" if count > 1 else "1 step"
    if any(min(each) < 0 for each in steps_of_ranks):
        steps = "the whole recording"
    parts: Counter[str] = Counter()
    for (part, _, _), (total, _, _) in totals.items():
        parts[part] += total
    shares = [f"{part} {total / parts.total():.1%}" for part, total in parts.most_common()]
    shares = [share for share in shares if not share.endswith(" 0.0%")]
    of = f" on {len(steps_of_ranks)} ranks" if len(steps_of_ranks) > 1 else ""
    return f"Critical path over {steps}{of}: {', '.join(shares)}."


def _host_steps(spans: Spans, rank: int, queue: LaunchQueue) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and row of the profiled parts of each step on the host.

    Without steps, row -1 is the whole recording.
    """
    rows, launch = spans.rows(kind="step", rank=rank), queue.launch
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    if not len(rows):
        own = spans.rows(rank=rank)
        start = np.append(launch, spans.start_ns[own]).min()[None]
        end = np.append(queue.end, spans.end_ns[own]).max()[None]
        rows = np.array([-1])
    header, profiled = spans.headers.get(rank), captures(spans, rank, queue.start)
    if profiled is None:
        profiled = start[:1], end.max()[None]
        if header is not None and header.config:  # a profiler's trace next to rlprof's own spans
            profiled = launch.min()[None], queue.end.max()[None]
    for low, high in zip(*(each.tolist() for each in profiled), strict=True):
        for at in np.flatnonzero((start < high) & (end > low)).tolist():
            yield max(low, int(start[at])), min(high, int(end[at])), int(rows[at])


def _step_intervals(
    spans: Spans, rank: int, queue: LaunchQueue
) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yield start and end of each step's path, what ends there, and the step.

    A step ends when its host and all that it launched have ended; the next begins no earlier.
    """
    order, previous_end = np.argsort(queue.launch, kind="stable"), None
    launches = queue.launch[order]
    for start, end, step in _host_steps(spans, rank, queue):
        own = order[slice(*np.searchsorted(launches, [start, end]).tolist())]
        if len(own):
            last = int(own[np.argmax(queue.end[own])])
            high = int(queue.end[last])
            low = start if previous_end is None else max(start, previous_end)
            previous_end = max(high, end, low)
            if low < previous_end:
                yield (low, previous_end, last if high == previous_end else HOST), step


def _add_paths(
    totals: _Totals,
    spans: Spans,
    rank: int,
    queue: LaunchQueue,
    intervals: Sequence[tuple[int, int, int]],
) -> None:
    """Add the critical paths of a rank to the totals."""
    columns = queue.start, queue.end, queue.stream, queue.queued
    path = critical_paths(*columns, queue.waits, intervals)
    _add_work(totals, queue, path, intervals)
    length = path.end - path.start
    delayed = (path.what == LAUNCH) | (path.what == GAP)
    kind = np.where(delayed & (length > LATENCY_NS), _LONG, path.what)
    for what in (LAUNCH, GAP, _LONG):
        rows = kind == what
        stage = queue.stage[path.work[rows]]
        for _, code, ns, count in _sums(stage * 0, stage, length[rows], 1, len(queue.stages)):
            _add(totals, (_PARTS[what], None, _text(queue.stages, code)), ns, count)
    rows = path.what == HOST
    for call, stage_code, ns, count in _host_time(
        spans, rank, queue, path.start[rows], path.end[rows]
    ):
        key = (_PARTS[HOST], _text(queue.call_names, call), _text(spans.names, stage_code))
        _add(totals, key, ns, count)


def _add_work(
    totals: _Totals,
    queue: LaunchQueue,
    path: PathSegments,
    intervals: Sequence[tuple[int, int, int]],
) -> None:
    """Add kernels and copies, with the time of all work of their name and stage."""
    device = path.what >= 0
    work, length = path.what[device], (path.end - path.start)[device]
    low, high = (np.array([each[at] for each in intervals], np.int64) for at in range(2))
    inside = covered_before(low, high, queue.end) - covered_before(low, high, queue.start)
    sizes = len(queue.names), len(queue.stages)
    whole = sum_cells(queue.name, queue.stage, inside, *sizes)
    columns = (each.tolist() for each in (whole.step, whole.name, whole.ns))
    all_work = {(name, stage): ns for name, stage, ns in zip(*columns, strict=True)}
    for name, stage, ns, count in _sums(queue.name[work], queue.stage[work], length, *sizes):
        key = (*queue.names[name], _text(queue.stages, stage))
        _add(totals, key, ns, count, all_work[name, stage])


def _add(totals: _Totals, key: _Key, ns: int, count: int, all_work: int = 0) -> None:
    totals[key] = [a + b for a, b in zip(totals[key], (ns, count, all_work), strict=True)]


def _sums(
    first: Int64s, second: Int64s, length: Int64s, firsts: int, seconds: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield each pair of codes, its time and number of rows; a length is never 0.

    ``firsts`` and ``seconds`` are the numbers of codes.
    """
    sizes = (firsts, seconds)
    total, count = (
        sum_cells(first, second, each, *sizes) for each in (length, np.ones_like(length))
    )
    columns = (total.step, total.name, total.ns, count.ns)
    yield from zip(*(column.tolist() for column in columns), strict=True)


def _text(texts: Sequence[str], code: int) -> str | None:
    return texts[code] if code >= 0 else None


def _host_time(
    spans: Spans, rank: int, queue: LaunchQueue, start: Int64s, end: Int64s
) -> Iterator[tuple[int, int, int, int]]:
    """Yield innermost call and stage in disjoint intervals, their time and number of segments.

    -1 means none; a pair can occur more than once.
    """
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    rows = spans.rows(kind="stage", rank=rank)
    stages = _by_start(spans.start_ns[rows], spans.end_ns[rows], spans.name[rows])
    calls = _by_start(*queue.calls)
    chunks = np.searchsorted(calls[0], start) // _AT_ONCE
    sizes = len(queue.call_names) + 1, len(spans.names)
    for chunk in np.split(np.arange(len(start)), np.flatnonzero(np.diff(chunks)) + 1):
        own = start[chunk], end[chunk]
        call, stage, length = _innermost(own, _within(calls, *own), _within(stages, *own))
        for code, stage_code, ns, count in _sums(call, stage, length, *sizes):
            yield code - 1, stage_code, ns, count


def _by_start(start: Int64s, end: Int64s, code: Int64s) -> _Coded:
    """Return intervals by start, then by end, descending."""
    later, no_longer = np.diff(start), np.diff(end) <= 0
    if ((later > 0) | ((later == 0) & no_longer)).all():
        return start, end, code
    order = np.lexsort((-end, start))
    return start[order], end[order], code[order]


def _within(intervals: _Coded, start: Int64s, end: Int64s) -> _Coded:
    """Return the intervals that may share time with some disjoint, ascending ones."""
    high = int(np.searchsorted(intervals[0], end[-1])) if len(end) else 0
    rows = np.flatnonzero(intervals[1][:high] > start[:1])
    return intervals[0][rows], intervals[1][rows], intervals[2][rows]


def _innermost(
    own: tuple[Int64s, Int64s], calls: _Coded, stages: _Coded
) -> tuple[Int64s, Int64s, Int64s]:
    """Return call (0 for none), stage (-1 for none) and length of each segment of some intervals.

    Times are on an axis on which the gaps between the intervals take no time.
    """
    layers = [[covered_before(*own, times) for times in layer[:2]] for layer in (calls, stages)]
    whole = covered_before(*own, own[1][-1:])
    times = edges(whole - whole, whole, *(np.sort(each) for layer in layers for each in layer))
    call, stage = (
        np.append(code, -1)[
            paint(np.searchsorted(times, first), np.searchsorted(times, last), len(times) - 1)
        ]
        for (first, last), code in zip(layers, (calls[2], stages[2]), strict=True)
    )
    heads = np.flatnonzero(differs(call, stage))
    return call[heads] + 1, stage[heads], np.add.reduceat(np.diff(times), heads)


def _rows(totals: _Totals, top: int | None) -> list[tuple[Cell, ...]]:
    whole = sum(total for total, _, _ in totals.values())
    ordered = sorted(totals.items(), key=lambda item: (-item[1][0], str(item[0])))
    rows: list[tuple[Cell, ...]] = [
        (*key, total / whole, total, total / all_work if all_work >= total else None, count)
        for key, (total, count, all_work) in ordered[:top]
    ]
    if rest := ordered[len(rows) :]:
        total, count = (sum(each[at] for _, each in rest) for at in range(2))
        rows.append((None, OTHERS, None, total / whole, total, None, count))
    return rows
