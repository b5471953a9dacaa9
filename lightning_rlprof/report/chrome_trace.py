"""A run as a Chrome trace for ui.perfetto.dev: one process per rank, one track per thread.

The format is https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Slices of one track must nest, else Perfetto drops them: spans that overlap, as asyncio tasks do, go
to further tracks ("lanes") of their thread, each with the spans that were opened inside it.
Steps of a rank are on one track, epochs on another. What a thread waits for other ranks is on a
track below it; an arrow points to its end from the rank that arrived last.

Clocks that nothing compared are marked beside the host of each rank.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlprof.analysis.device.device_counters import Samples, counter_samples
from lightning_rlprof.analysis.stages import StepTimes
from lightning_rlprof.analysis.steps.step_matrix import find_waits
from lightning_rlprof.records.records import BACKGROUND_METRICS, EXPORT, KINDS, Number
from lightning_rlprof.records.run_directory import mode_made_of
from lightning_rlprof.report.summary import without_captures
from lightning_rlprof.system.files import opened_draft
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import NO_PARENT, Spans

if TYPE_CHECKING:
    from lightning_rlprof.report.device_tracks import DeviceTracks

MAX_COUNTER_EVENTS = 10_000
"""Of one counter; of more, each event is the largest of several."""

MAX_FLOWS = 50_000
"""Arrows in a trace; of more waits, the longest have one."""

_UNCALIBRATED = "UNCALIBRATED"
_STEP, _EPOCH, _MARK = (KINDS.index(kind) for kind in ("step", "epoch", "mark"))
_LOOSE = tuple(KINDS.index(kind) for kind in ("epoch", "step", "region"))
_MEMORY = {
    "device_allocated_bytes": "device memory allocated (bytes)",
    "device_reserved_bytes": "device memory reserved (bytes)",
    "host_rss_bytes": "host memory (bytes)",
    "children_rss_bytes": "host memory of child processes (bytes)",
}


def write_trace(
    spans: Spans,
    path: Path,
    *,
    devices: "DeviceTracks | None" = None,
    watermark: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the trace at once or not at all; a name that ends in ``.gz`` is compressed.

    Args:
        spans: The run.
        path: The file; one that exists is replaced.
        devices: What devices ran: tracks of their own below each rank's threads.
        watermark: Why times of ranks cannot be compared, for the metadata; ranks are marked, too.
        progress: Called after each rank with (ranks written, ranks in all).

    Raises OSError where the file cannot be written.
    """
    with opened_draft(path, mode_made_of(spans.path)) as file:
        _write(spans, file, devices, watermark, progress)


def _write(
    spans: Spans,
    file: Any,
    devices: "DeviceTracks | None",
    watermark: str,
    progress: Callable[[int, int], None] | None,
) -> None:
    other = {**EXPORT, "unix_ns": str(spans.unix_ns), "path": spans.path.name}
    other |= {"clocks": f"{_UNCALIBRATED}: {watermark}"} if watermark else {}
    analyzed = spans if devices else without_captures(spans)
    counters, waits = _CounterTracks(StepTimes(analyzed)), _WaitTracks(analyzed)
    flows, left_out = ([], 0) if watermark else waits.flows()
    other |= {"arrows": f"{left_out} shorter waits have none"} if left_out else {}
    file.write(f'{{"displayTimeUnit":"ms","otherData":{encoded(other)},"traceEvents":[\n'.encode())
    names = [encoded(name) for name in spans.names]
    clock = _UNCALIBRATED if watermark else ""
    # Perfetto reports an error for a trailing comma, and for an empty event that avoids it.
    comma = b""
    for done, rank in enumerate(spans.ranks, start=1):
        host = _rank_events(spans, rank, names, clock, waits)
        values = counters.events(rank, _pid(rank))
        kernels = devices.events(rank, _pid(rank)) if devices else ()
        for part in chain([chain(host, values)], kernels):
            events = ",\n".join(part)
            file.write(comma + events.encode("utf-8", "backslashreplace"))
            comma = b",\n"
        if progress is not None:
            progress(done, len(spans.ranks))
    for flow in waits.flow_events(flows):
        file.write(f",\n{flow}".encode())
    file.write(b"\n]}\n")


def _pid(rank: int) -> int:
    return rank + 1  # Process 0 would be the idle process of the operating system.


def _rank_events(
    spans: Spans, rank: int, names: list[str], clock: str, waits: "_WaitTracks"
) -> Iterator[str]:
    pid, rows = _pid(rank), spans.rows(rank=rank)
    who = ", ".join(filter(None, (spans.headers[rank].host, clock)))
    yield about(pid, 0, "process_name", name=f"rank {rank} ({who})")
    yield about(pid, 0, "process_sort_index", sort_index=rank)
    arguments = _arguments(spans, rows)
    steps, epochs = (rows[spans.kind[rows] == kind] for kind in (_STEP, _EPOCH))
    others = rows[~np.isin(spans.kind[rows], (_STEP, _EPOCH))]
    tid = 0  # Numbers start at 1, since thread 0 would merge into the process's main thread.
    for label, own in [("epochs", epochs), ("steps", steps), *_threads(spans, others)]:
        for number, lane in enumerate(lanes(spans, own), start=1):
            tid += 1
            waits.track[lane] = tid
            yield from named(pid, tid, label if number == 1 else f"{label} ({number})")
            yield from _slices(spans, lane, f'"pid":{pid},"tid":{tid}', names, arguments)
        if found := waits.within(own):
            tid += 1
            yield from named(pid, tid, f"{label}: waiting")
            yield from (waits.slice(at, pid, tid) for at in found)


def _threads(spans: Spans, rows: Int64s) -> Iterator[tuple[str, Int64s]]:
    """Yield each thread's name and rows, in the order in which they first appear."""
    codes, first = np.unique(spans.thread[rows], return_index=True)
    for code in codes[np.argsort(first)].tolist():
        yield spans.threads[code].name, rows[spans.thread[rows] == code]


def _slices(
    spans: Spans, rows: list[int], track: str, names: list[str], arguments: dict[int, str]
) -> Iterator[str]:
    at = np.array(rows, dtype=np.int64)
    columns = (spans.start_ns, spans.duration_ns, spans.name, spans.kind, spans.step)
    values = zip(rows, *(column[at].tolist() for column in columns), strict=True)
    for row, start, length, name, kind, step in values:
        title = f'"step {step}"' if kind == _STEP else names[name]
        what = f'{track},"ts":{micro(start)},"name":{title},"cat":"{KINDS[kind]}"'
        more = f'"args":{{"step":{step}{arguments.get(row, "")}}}'
        if kind == _MARK:
            yield f'{{"ph":"i","s":"t",{what},{more}}}'
        else:
            yield f'{{"ph":"X","dur":{micro(length)},{what},{more}}}'


def _arguments(spans: Spans, rows: Int64s) -> dict[int, str]:
    """Return by row the counters as the rest of a JSON object."""
    found: dict[int, str] = {}
    if len(rows):
        for name, counter in spans.counters.items():
            first, last = np.searchsorted(counter.rows, [rows[0], rows[-1] + 1])
            key = encoded(name if name != "step" else "step (counter)")
            own = counter.rows[first:last].tolist()
            for row, value in zip(own, counter.values[first:last].tolist(), strict=True):
                found[row] = f"{found.get(row, '')},{key}:{_number(value)}"
    return found


def _number(value: Number) -> str:
    # JSON has no infinity; Perfetto reads integers beyond 64 bits only as text.
    if isinstance(value, int):
        return str(value) if -(2**63) <= value < 2**63 else f'"{value}"'
    return repr(value) if math.isfinite(value) else f'"{value}"'


# ---- lanes: spans of one thread, dealt out so that they nest as they were opened


class _Lane:
    """What is drawn in one lane, and the ends, ids and looseness of the spans still open there."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.open: list[tuple[int, int, bool]] = []

    def takes(self, start: int, end: int, parent: int, loose: bool) -> bool:
        """Tell whether a span nests here, in time and in who opened it."""
        while self.open and self.open[-1][0] <= start:
            self.open.pop()
        if not self.open:
            return True
        if self.open[-1][0] < end:
            return False
        for _, around, passes in reversed(self.open):
            if around == parent or not passes:
                return loose or around == parent
        return loose or parent == NO_PARENT


def lanes(spans: Spans, rows: Int64s) -> list[list[int]]:
    """Return the rows of one thread by lane, each in drawing order; the fewest lanes come first.

    A span is drawn on top of its parent only. A task that overlaps its sibling gets another lane,
    even where it happens to lie within it. Spans recorded with known ends (steps, epochs, regions
    without a parent) know no family and nest by time alone.
    """
    order = rows[np.lexsort((spans.id[rows], -spans.end_ns[rows], spans.start_ns[rows]))]
    known = np.isin(spans.parent[order], spans.id[rows])
    parents = np.where(known, spans.parent[order], NO_PARENT)
    loose = np.isin(spans.kind[order], _LOOSE) & (parents == NO_PARENT)
    is_mark = spans.kind[order] == _MARK
    columns = (order, *(column[order] for column in (spans.start_ns, spans.end_ns, spans.id)))
    values = (column.tolist() for column in (*columns, parents, loose, is_mark))
    return deal(zip(*values, strict=True))


def deal(spans: Iterable[tuple[int, int, int, int, int, bool, bool]]) -> list[list[int]]:
    """Return rows by lane.

    Args:
        spans: By start, the longest first: row, start, end, id, parent or `NO_PARENT`, whether it
            nests by time alone, and whether it is an instant, which covers nothing.
    """
    found = [_Lane()]
    for row, start, end, span_id, parent, free, is_mark in spans:
        lane = found[0] if is_mark else _choose(found, start, end, parent, free)
        lane.rows.append(row)
        if not is_mark:
            lane.open.append((end, span_id, free))
    return [lane.rows for lane in found if lane.rows]


def _choose(found: list[_Lane], start: int, end: int, parent: int, loose: bool) -> _Lane:
    """Return the first lane on top of the parent, else the first empty one, else a new one."""
    empty = None
    for lane in found:
        if lane.takes(start, end, parent, loose):
            if lane.open:
                return lane
            empty = empty or lane
    if empty is None:
        found.append(empty := _Lane())
    return empty


# ---- counters, and waiting with arrows


class _CounterTracks:
    """Counters of the ranks of a run.

    Tokens per second are those that a rank counted in a step, over the time of that step. Memory is
    what spans recorded at their end.
    """

    def __init__(self, series: StepTimes) -> None:
        self._spans, self._steps = series.spans, series.matrix.steps
        self._memory = {title: self._spans.amounts(name) for name, title in _MEMORY.items()}
        found = series.matrix.amounts(self._spans, "tokens")
        stage = None if series.tokens is None else series.tokens[0]
        own = np.array([name == stage for name in self._spans.names], bool)[found.name]
        tokens = np.bincount(found.step[own], found.amount[own], len(self._steps))
        self._rates = tokens / np.maximum(self._spans.took_ns(self._steps), 1) * 1e9
        self._background = [*counter_samples(self._spans, [], (BACKGROUND_METRICS,))]

    def events(self, rank: int, pid: int) -> Iterator[str]:
        """Yield the counters of a rank; one event where a value changes."""
        spans, bounds = self._spans, np.searchsorted(self._spans.rank, [rank, rank + 1])
        first, last = np.searchsorted(spans.rank[self._steps], [rank, rank + 1])
        if self._rates[first:last].any():
            steps = self._steps[first:last]
            times = np.append(spans.start_ns[steps], spans.end_ns[steps].max())
            yield from track(pid, "tokens/s", times, np.append(self._rates[first:last], 0.0))
        for title, (rows, values) in self._memory.items():
            low, high = np.searchsorted(rows, bounds)
            times, order = spans.end_ns[rows[low:high]], np.argsort(spans.end_ns[rows[low:high]])
            yield from track(pid, title, times[order], values[low:high][order].astype(np.float64))
        for samples, metrics in self._background:
            yield from sample_tracks(samples.rows(samples.rank == rank), metrics, pid)


def sample_tracks(samples: Samples, metrics: Sequence[str], pid: int) -> Iterator[str]:
    """Yield what was sampled on one rank, a track per metric and device."""
    samples = samples.rows(np.lexsort((samples.time, samples.device, samples.metric)))
    heads = np.flatnonzero((np.diff(samples.metric) != 0) | (np.diff(samples.device) != 0)) + 1
    for rows in np.split(np.arange(len(samples.time)), heads) if len(samples.time) else ():
        own = samples.rows(rows)
        code, device = int(own.metric[0]), int(own.device[0])
        name = metrics[code] if code >= 0 else "counter"
        title = name if device < 0 else f"device {device} {name}"
        yield from track(pid, title, np.maximum(own.time, 0), own.value)


def track(pid: int, name: str, times: Int64s, values: Float64s) -> Iterator[str]:
    """Yield the events of one counter, ascending in time, at most `MAX_COUNTER_EVENTS`."""
    changed = np.append(True, np.diff(values) != 0)[: len(values)]
    times, values = times[changed], values[changed]
    if len(values) > MAX_COUNTER_EVENTS:
        heads = np.unique(
            np.linspace(0, len(values), MAX_COUNTER_EVENTS, endpoint=False).astype(int)
        )
        times, values = times[heads], np.maximum.reduceat(values, heads)
    title = encoded(name)
    for time, value in zip(times.tolist(), values.tolist(), strict=True):
        shown = encoded(int(value) if value.is_integer() else round(value, 3))
        yield (
            f'{{"ph":"C","pid":{pid},"tid":0,"ts":{micro(time)},"name":{title},'
            f'"args":{{"value":{shown}}}}}'
        )


class _WaitTracks:
    """Waits of a run, and on which tracks these and the spans of the last ranks are drawn.

    Attributes:
        track: By row of the run, the number of its track in the process of its rank.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans, self._waits = spans, find_waits(spans)
        self._own = np.zeros(len(self._waits.row), np.int64)  # Track of each wait.
        self._thread = spans.thread[self._waits.row]  # The waits are sorted by thread.
        self.track = np.zeros(len(spans), np.int64)

    def within(self, rows: Int64s) -> list[int]:
        """Return the waits in some rows of a thread, by index and time."""
        if not len(rows):
            return []
        low, high = np.searchsorted(self._thread, self._spans.thread[rows[0]] + np.arange(2))
        mine: list[int] = np.flatnonzero(np.isin(self._waits.row[low:high], rows)).tolist()
        return [int(low) + at for at in mine]

    def slice(self, at: int, pid: int, tid: int) -> str:
        """Return a wait as a slice, and note on which track it is."""
        spans, waits = self._spans, self._waits
        self._own[at] = tid
        start, length = int(waits.start_ns[at]), int(waits.end_ns[at] - waits.start_ns[at])
        step, last = int(spans.step[waits.row[at]]), int(spans.rank[waits.last[at]])
        return (
            f'{{"ph":"X","dur":{micro(length)},"pid":{pid},"tid":{tid},"ts":{micro(start)},'
            f'"name":"waiting","cat":"waiting","args":{{"step":{step},"last rank":{last}}}}}'
        )

    def flows(self) -> tuple[list[int], int]:
        """Return the waits that get an arrow, by index, and how many shorter ones get none.

        No arrow points backward in time, as clocks that are off would make it.
        """
        spans, waits = self._spans, self._waits
        forward = spans.rank[waits.last] != spans.rank[waits.row]
        forward &= spans.start_ns[waits.last] < spans.end_ns[waits.row]
        found = np.flatnonzero(forward)
        if len(found) > MAX_FLOWS:
            length = (waits.end_ns - waits.start_ns)[found]
            found = np.sort(found[np.argsort(-length, kind="stable")[:MAX_FLOWS]])
        return found.tolist(), int(forward.sum()) - len(found)

    def flow_events(self, found: list[int]) -> Iterator[str]:
        """Yield both ends of each arrow: in the last rank's slice, and at the end of the wait."""
        spans, waits = self._spans, self._waits
        for at in found:
            last, row = int(waits.last[at]), int(waits.row[at])
            # One ns earlier, the arrow ends within the slice.
            arrives, lies = int(waits.end_ns[at]) - 1, self._own[at]
            leaves = int(spans.start_ns[last])
            if waits.whole_stage[at]:  # The last rank's work ends the wait.
                leaves = max(leaves, min(arrives, int(spans.end_ns[last]) - 1))
            # The last rank's arrival ends the wait, so the arrow points at the span around it.
            if leaves > arrives:
                arrives, lies = leaves, self.track[row]
            what = f'"cat":"waiting","name":"last arrival","id":{at + 1}'
            for phase, (span, tid, time) in {
                '"s"': (last, self.track[last], leaves),
                '"f","bp":"e"': (row, lies, arrives),
            }.items():
                pid = _pid(int(spans.rank[span]))
                yield f'{{"ph":{phase},"pid":{pid},"tid":{tid},"ts":{micro(time)},{what}}}'


# ---- events


def about(pid: int, tid: int, what: str, **args: Any) -> str:
    """Return the event that names a track or process, or gives it a place.

    Example::

        >>> about(1, 2, "thread_name", name="MainThread")
        '{"ph":"M","pid":1,"tid":2,"name":"thread_name","args":{"name":"MainThread"}}'
    """
    return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{what}","args":{encoded(args)}}}'


def micro(ns: int) -> str:
    """Return nanoseconds as microseconds with three decimals: a float would lose some.

    Example::

        >>> micro(2**60 + 7), micro(-5)
        ('1152921504606846.983', '-0.005')
    """
    return f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


def encoded(value: Any) -> str:
    """Return a value as JSON without white space."""
    return json.dumps(value, separators=(",", ":"))


def named(pid: int, tid: int, title: str) -> Iterator[str]:
    """Yield the events that name a track, and put it where its number says."""
    yield about(pid, tid, "thread_name", name=title)
    yield about(pid, tid, "thread_sort_index", sort_index=tid)
