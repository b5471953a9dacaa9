"""The critical path of steps inside a rank: which host code, launches, kernels and copies."""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.timeline import LATENCY_NS, missing_ranks, profiled_times
from lightning_rlprof.analysis.device.work import (
    COPY,
    GRAPHS_NOTE,
    NO_REPLAY,
    NOT_RECORDED,
    device_work,
    no_work,
    optional_numbers,
)
from lightning_rlprof.analysis.statistics.group_summary import rows_by_group, summarize
from lightning_rlprof.analysis.steps.partition import paint
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, differs, group_starts
from lightning_rlprof.tables.intervals import cells_of, covered_before, edges, open_count
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    *columns_of("text", "part", "name", "stage"),
    Column("share", "share"),
    Column("total", "duration", "ns"),
    Column("on path", "share"),
    Column("count", "count"),
)
_WORK = ("kernel", "communication", "copy")  # The kind of work is the index.
_WAITS = re.compile(
    r"synchronize|(?:cuda|hip)(?:Memcpy(?:WithStream)?|Free(?:Host)?)$|aclrtMemcpy$", re.IGNORECASE
)
_DRIVER = "runtime"  # Only calls of this kind may wait for a device.
# Nsight Systems records it, but the host does not wait in it.
_STREAM_WAIT = "stream waits for event"
_TRAINS = (KINDS.index("step"), KINDS.index("stage"))
_READ = ("device", "stream", "start", "launch", "launch duration", "thread")
HOST, LAUNCH, GAP = -1, -2, -3
"""What is on the path except device work: the host, from a launch to the start, a kernel gap."""

_LONG = GAP - 1
_PARTS = {HOST: "host", LAUNCH: "launch latency", GAP: "kernel gap", _LONG: "unattributed delay"}
_NO_STEP = "No step that was profiled launched device work."
_NO_CALLS = (
    "Host calls were not recorded, so what the host waited for is unknown. Capture a step with "
    "torch.profiler and profile_with_cpu."
)

_Interval = tuple[int, int, int]
"""Start and end of a path, and the work that ends there, or `HOST`."""

_Totals = defaultdict[tuple[str, str | None, str | None], Int64s]
"""By part, name and stage: time on the path, number of segments, and time of all its work."""


_NEVER = -(2**62)


class _HostCalls(NamedTuple):
    """Calls of a host: ``name`` is an index into ``names``, ``waits`` those that wait for a device.

    They wait by their names; whether the device was busy is not known.
    """

    start: Int64s
    end: Int64s
    name: Int64s
    waits: Mask
    names: Sequence[str]


class _LaunchQueue(NamedTuple):
    """Kernels and copies of one rank as columns of one length, and the calls of its host.

    ``name`` and ``stage`` are indices into ``names``, part and name of each, and into ``stages``.
    Streams are numbered over all devices.

    Attributes:
        queued: When the call that launched it had returned, or its start if that was earlier. In
            a graph replay, except for its first work: when that call began. `NOT_RECORDED` if the
            launch was not recorded.
        launch: When that call began, or the start if it was not recorded.
        waits: Starts and ends of calls in which the host waited, or may have waited, for a device.
    """

    start: Int64s
    end: Int64s
    stream: Int64s
    queued: Int64s
    name: Int64s
    stage: Int64s
    launch: Int64s
    names: Sequence[tuple[str, str | None]]
    stages: Sequence[str]
    waits: tuple[Int64s, Int64s]
    calls: _HostCalls


def device_critical_path(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
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
        ranks: Only these; None for all.
    """
    notes: list[str] = []
    totals: _Totals = defaultdict(lambda: np.zeros(3, np.int64))
    steps_of_ranks: list[set[int]] = []
    without_calls = 0
    for rank, queue in _launch_queues(spans, ranks, notes):
        if queue is None:
            without_calls += 1
            continue
        found = [*_step_intervals(spans, rank, queue)]
        _add_paths(totals, spans, rank, queue, [interval for interval, _ in found])
        steps_of_ranks.append({step for _, step in found})
    if not totals:
        why = " ".join([_NO_CALLS if without_calls else _NO_STEP, *notes])
        if not without_calls and not steps_of_ranks:
            why = no_work(ranks, notes)
        return Table("device_critical_path", _COLUMNS, abstained=why)
    notes.insert(0, _summary([each for each in steps_of_ranks if each], totals))
    if without_calls:
        notes.append(f"{without_calls} ranks are left out: their host calls were not recorded.")
    return Table("device_critical_path", _COLUMNS, _rows(totals), " ".join(notes))


def _summary(steps_of_ranks: Sequence[set[int]], totals: _Totals) -> str:
    """Return the share of each part of all paths, and how many steps these are."""
    count = sum(map(len, steps_of_ranks))
    steps = f"{count} steps" if count > 1 else "1 step"
    if any(min(each) < 0 for each in steps_of_ranks):
        steps = "the whole recording"
    parts: Counter[str] = Counter()
    for (part, _, _), (total, _, _) in totals.items():
        parts[part] += int(total)
    shares = [f"{part} {total / parts.total():.1%}" for part, total in parts.most_common()]
    shares = [share for share in shares if not share.endswith(" 0.0%")]
    of = f" on {len(steps_of_ranks)} ranks" if len(steps_of_ranks) > 1 else ""
    return f"Critical path over {steps}{of}: {', '.join(shares)}."


def _host_steps(spans: Spans, rank: int, queue: _LaunchQueue) -> Iterator[tuple[int, int, int]]:
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
    profiled = profiled_times(spans, rank, queue.start, queue.end, launch)
    for low, high in zip(*(each.tolist() for each in profiled), strict=True):
        for at in np.flatnonzero((start < high) & (end > low)).tolist():
            yield max(low, int(start[at])), min(high, int(end[at])), int(rows[at])


def _step_intervals(
    spans: Spans, rank: int, queue: _LaunchQueue
) -> Iterator[tuple[_Interval, int]]:
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
    totals: _Totals, spans: Spans, rank: int, queue: _LaunchQueue, intervals: Sequence[_Interval]
) -> None:
    """Add the critical paths of a rank to the totals."""
    columns = queue.start, queue.end, queue.stream, queue.queued
    path = critical_paths(*columns, queue.waits, intervals)
    length = path.end - path.start
    _add_work(totals, queue, path, intervals)
    is_delay = (path.what == LAUNCH) | (path.what == GAP)
    part = np.where(is_delay & (length > LATENCY_NS), _LONG, path.what)
    rows = np.flatnonzero(is_delay)
    stage = queue.stage[path.work[rows]]
    for code, stage_code, ns, count in _sums(-part[rows], stage, length[rows]):
        totals[_PARTS[-code], None, _text(queue.stages, stage_code)] += (ns, count, 0)
    on_host = path.what == HOST
    host_time = _host_time(spans, rank, queue.calls, path.start[on_host], path.end[on_host])
    for call, stage_code, ns, count in host_time:
        name, stage_name = _text(queue.calls.names, call), _text(spans.names, stage_code)
        totals[_PARTS[HOST], name, stage_name] += (ns, count, 0)


class PathSegments(NamedTuple):
    """Segments of critical paths as columns of one length.

    Attributes:
        start: Where each begins, in nanoseconds.
        end: Where it ends; later.
        what: Number of the device work, or `HOST`, `LAUNCH` or `GAP`.
        work: The device work itself, of a delay the work that it delayed, else `HOST`.
    """

    start: Int64s
    end: Int64s
    what: Int64s
    work: Int64s


def _add_work(
    totals: _Totals, queue: _LaunchQueue, path: PathSegments, intervals: Sequence[_Interval]
) -> None:
    """Add kernels and copies, with the time of all work of their name and stage."""
    on_device = path.what >= 0
    work, length = path.what[on_device], (path.end - path.start)[on_device]
    low, high = (np.array([each[at] for each in intervals], np.int64) for at in range(2))
    inside = covered_before(low, high, queue.end) - covered_before(low, high, queue.start)
    all_work = {(name, stage): ns for name, stage, ns, _ in _sums(queue.name, queue.stage, inside)}
    for name, stage, ns, count in _sums(queue.name[work], queue.stage[work], length):
        key = (*queue.names[name], _text(queue.stages, stage))
        totals[key] += (ns, count, all_work[name, stage])


def _sums(first: Int64s, second: Int64s, ns: Int64s) -> Iterator[tuple[int, int, int, int]]:
    """Yield each pair of codes, from -1 on, its time and number of rows."""
    width = int(second.max(initial=0)) + 2
    found = summarize((first + 1) * width + second + 1, ns)
    columns = (found.group // width - 1, found.group % width - 1, found.total, found.count)
    yield from zip(*(column.tolist() for column in columns), strict=True)


def _text(texts: Sequence[str], code: int) -> str | None:
    return texts[code] if code >= 0 else None


def _host_time(
    spans: Spans, rank: int, calls: _HostCalls, start: Int64s, end: Int64s
) -> Iterator[tuple[int, int, int, int]]:
    """Yield innermost call and stage in disjoint intervals, their time and number of segments.

    -1 means none. Times are on an axis on which the gaps between the intervals take no time.
    """
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    rows = spans.rows(kind="stage", rank=rank)
    layers = [
        _within(start, end, *columns)
        for columns in (
            (calls.start, calls.end, calls.name),
            (spans.start_ns[rows], spans.end_ns[rows], spans.name[rows]),
        )
    ]
    whole = np.array([0, (end - start).sum()])
    times = edges(whole, *(column for first, last, _ in layers for column in (first, last)))
    call, stage = (
        np.append(code, -1)[paint(*cells_of(times, first, last), len(times) - 1)]
        for first, last, code in layers
    )
    heads = group_starts(call, stage)
    return _sums(call[heads], stage[heads], np.add.reduceat(np.diff(times), heads))


def _within(
    low: Int64s, high: Int64s, start: Int64s, end: Int64s, code: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Return the parts of spans that are in some intervals, outer spans first; see `_host_time`."""
    first, last = covered_before(low, high, start), covered_before(low, high, end)
    rows = np.flatnonzero(last > first)
    rows = rows[np.lexsort((-end[rows], start[rows]))]
    return first[rows], last[rows], code[rows]


def _rows(totals: _Totals) -> list[tuple[Cell, ...]]:
    sums = {key: each.tolist() for key, each in totals.items()}
    whole = sum(total for total, _, _ in sums.values())
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], str(item[0])))
    return [
        (*key, total / whole, total, total / all_work if all_work >= total else None, count)
        for key, (total, count, all_work) in ordered
    ]


def _launch_queues(
    spans: Spans, ranks: Collection[int] | None, notes: list[str]
) -> Iterator[tuple[int, _LaunchQueue | None]]:
    """Yield each rank that has device work, and what it launched; None without calls of its host.

    A reason is added to the notes for each table that could not be read.
    """
    work = device_work(spans, ranks, notes)
    if not work.tables:
        return
    if work.hidden_in_graphs:
        notes.append(GRAPHS_NOTE)
    if ranks is None:
        notes += missing_ranks(spans, np.unique(work.rank).tolist())
    codes, texts = work.named
    parts = (_WORK[kind] for kind in work.name_kinds.tolist())
    names = [*zip(parts, (*texts, None), strict=True)]
    stage, stages = work.stages()
    columns = {name: work.numbers(name) for name in _READ}
    columns |= {"duration": work.duration, "stage": stage, "replay": work.replay}
    columns["name"] = np.where(codes < 0, len(texts), codes)
    hosts = []
    if (calls := spans.try_table("calls", notes)) is not None:
        hosts.append(_CallTable(calls, "name", lambda name: _WAITS.search(name) is not None))
    # Nsight Systems and Ascend record this table.
    if (waits := spans.try_table("sync", notes)) is not None:
        hosts.append(_CallTable(waits, "kind", lambda kind: kind != _STREAM_WAIT))
    some = np.flatnonzero(work.duration)
    for rank, rows in _rows_by_rank(work.rank[some]).items():
        own = {name: column[some[rows]] for name, column in columns.items()}
        threads = _launching_threads(spans, rank, own["thread"])
        found = next(filter(None, (host.on(rank, threads) for host in hosts)), None)
        yield rank, None if found is None else _queue_of(own, found, names, stages)


class _CallTable:
    """The host calls of a table, by rank and thread; ``waits`` tells those that wait by name."""

    def __init__(self, table: Table, named: str, waits: Callable[[str], bool]) -> None:
        start, (name, names) = table.numbers("start"), table.texts(named)
        waiting = np.array([*map(waits, names), False])[name]
        if named != "kind":
            kind, kinds = table.texts("kind")
            waiting &= np.array([*(each == _DRIVER for each in kinds), False])[kind]
        self._calls = _HostCalls(start, start + table.numbers("duration"), name, waiting, names)
        self._thread = optional_numbers(table, "thread")
        self._rows = _rows_by_rank(table.numbers("rank"))

    def on(self, rank: int, threads: Sequence[int]) -> _HostCalls | None:
        """Return the calls of a rank, those of some threads if their threads are known."""
        if rank not in self._rows:
            return None
        rows = self._rows[rank]
        on_threads = np.isin(self._thread[rows], threads)
        if on_threads.any():
            rows = rows[on_threads]
        start, end, name, waits, names = self._calls
        return _HostCalls(start[rows], end[rows], name[rows], waits[rows], names)


def _queue_of(
    own: dict[str, Int64s],
    calls: _HostCalls,
    names: Sequence[tuple[str, str | None]],
    stages: Sequence[str],
) -> _LaunchQueue:
    start, launch = own["start"], own["launch"]
    end, known = start + own["duration"], launch != NOT_RECORDED
    returned = launch + np.maximum(own["launch duration"], 0)
    # The host waits for a copy to itself that ends before the call that launched it. Other work
    # can also end before its call does, but the host does not wait for it.
    fetches = [part == _WORK[COPY] and str(name).endswith("toH") for part, name in names]
    rows = known & np.array(fetches)[own["name"]] & (end <= returned)
    waits = (
        np.append(calls.start[calls.waits], launch[rows]),
        np.append(calls.end[calls.waits], returned[rows]),
    )
    device, stream = (np.unique(own[name], return_inverse=True)[1] for name in ("device", "stream"))
    queued = np.where(_after_first_in_replay(own), launch, np.minimum(returned, start))
    return _LaunchQueue(
        start,
        end,
        stream + device * (int(stream.max()) + 1),
        np.where(known, queued, NOT_RECORDED),
        own["name"],
        own["stage"],
        np.where(known, launch, start),
        names,
        stages,
        waits,
        calls,
    )


def _after_first_in_replay(own: dict[str, Int64s]) -> Mask:
    """Return which rows belong to a graph replay and are not the first one there."""
    order = np.lexsort((own["start"], own["replay"]))
    replay = own["replay"][order]
    later = np.zeros(len(order), bool)
    later[order] = (replay != NO_REPLAY) & ~differs(replay)
    later &= own["launch"] != NOT_RECORDED
    return later


def _rows_by_rank(rank: Int64s) -> dict[int, Int64s]:
    return {int(rank[rows[0]]): rows for rows in rows_by_group(rank)}


def _launching_threads(spans: Spans, rank: int, launching: Int64s) -> list[int]:
    """Return the threads that launch device work, have steps or have stages."""
    rows = spans.rows(rank=rank)
    trains = np.unique(spans.thread[rows[np.isin(spans.kind[rows], _TRAINS)]]).tolist()
    known = np.unique(launching[launching != NOT_RECORDED]).tolist()
    return [*known, *(spans.threads[at].ident for at in trains)]


def critical_paths(
    start: Int64s,
    end: Int64s,
    stream: Int64s,
    queued: Int64s,
    waits: tuple[Int64s, Int64s],
    intervals: Iterable[tuple[int, int, int]],
) -> PathSegments:
    """Return the critical paths of a rank back through some intervals, each gapless, in any order.

    Work starts when it has been queued and the work before it on its stream has ended; it waited
    for the later one. How long each of the two takes until the start is a median: over work for
    which the other one was early, and up to `LATENCY_NS`. Work that starts later than both allow
    waited for the work that ended last on another stream, as after `cudaStreamWaitEvent`.

    Args:
        start: Where each kernel or copy starts, in nanoseconds.
        end: Where it ends; later.
        stream: Number of its stream.
        queued: When the host had launched it, or `NOT_RECORDED`.
        waits: Starts and ends of calls in which the host waits for the device.
        intervals: Where each begins and ends, and the work that ends there, or `HOST`.
    """
    queued = np.where(queued == NOT_RECORDED, _NEVER, np.minimum(queued, start))
    before = _waited_for(start, end, stream, queued)
    queued = np.where(queued == _NEVER, start, queued)
    by_end = np.argsort(end, kind="stable")
    awaited = by_end[_while_waiting(end[by_end], *waits)]
    # A memoryview makes Python numbers only of the few items that are read.
    ends, earlier, launched = end.data, before.data, queued.data
    awaited_ends = end[awaited].data
    chain: list[int] = []
    lows: list[int] = []
    hosts: list[tuple[int, int]] = []
    for low, high, last in intervals:
        now, at = high, last
        while now > low:
            if at == HOST:
                until, place = _NEVER, bisect_right(awaited_ends, now) - 1
                if place >= 0:
                    at, until = int(awaited[place]), awaited_ends[place]
                hosts.append((max(until, low), now))
                now = until
            else:
                chain.append(at)
                lows.append(low)
                now, at = (
                    (launched[at], HOST) if earlier[at] < 0 else (ends[earlier[at]], earlier[at])
                )
    work, low_ns = np.array(chain, np.int64), np.array(lows, np.int64)
    ready = np.where(before[work] >= 0, end[before[work]], queued[work])
    delay = np.where(before[work] >= 0, GAP, LAUNCH)
    host = np.array(hosts, np.int64).reshape(-1, 2).T
    no_work = np.full(len(hosts), HOST)
    columns = (
        (np.maximum(start[work], low_ns), np.maximum(ready, low_ns), host[0]),
        (end[work], start[work], host[1]),
        (work, delay, no_work),
        (work, work, no_work),
    )
    found = PathSegments(*map(np.concatenate, columns))
    return PathSegments(*(column[found.end > found.start] for column in found))


def _while_waiting(ends: Int64s, start: Int64s, end: Int64s) -> Mask:
    """Mark the ascending times at which one of the host's waits was open."""
    first, last = (np.searchsorted(ends, each, "right") for each in (start, end))
    return open_count(first, np.maximum(first, last), len(ends)) > 0


def _waited_for(start: Int64s, end: Int64s, stream: Int64s, queued: Int64s) -> Int64s:
    """Return the work that each kernel or copy waited for, -1 if that was the host."""
    same, other = np.full(len(start), -1), _last_ended(start, end)
    for each in np.unique(stream).tolist():
        rows = np.flatnonzero(stream == each)
        same[rows] = np.append(rows, -1)[_last_ended(start[rows], end[rows])]
    after = np.append(end, _NEVER)[same]
    launched = queued > _NEVER
    delay, gap = start - queued, start - after
    # Copies that start within their call have a delay of 0.
    latency = _median(delay[launched & (after <= queued) & (delay > 0)])
    turn = _median(gap[(same >= 0) & (queued + latency < after)])
    by_host = np.where(launched, queued + latency, _NEVER)
    by_stream = np.where(same >= 0, after + turn, _NEVER)
    ready = np.maximum(by_stream, by_host)
    late = start - ready > max(latency, turn)
    elsewhere = np.append(end, _NEVER)[other]
    on_stream = np.where(by_stream >= by_host, same, -1)
    return np.where(late & (elsewhere + turn > ready), other, on_stream)


def _last_ended(start: Int64s, end: Int64s) -> Int64s:
    """Return what ended last before each start, -1 if nothing did."""
    order = np.argsort(end, kind="stable")
    found: Int64s = np.append(order, -1)[np.searchsorted(end[order], start, "right") - 1]
    return found


def _median(delays: Int64s) -> int:
    delays = delays[delays <= LATENCY_NS]  # Work with a longer delay waited for something else.
    return int(np.median(delays)) if len(delays) else 0
