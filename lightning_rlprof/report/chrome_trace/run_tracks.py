"""What a Chrome trace shows beside spans: counters, waiting with arrows, and samples."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lightning_rlprof.analysis.device.device_counters import Samples, counter_samples
from lightning_rlprof.analysis.samples.sample_book import UNKNOWN, sample_book
from lightning_rlprof.analysis.samples.sample_tables import updates_of
from lightning_rlprof.analysis.stages import StepTimes
from lightning_rlprof.analysis.steps.step_matrix import find_waits
from lightning_rlprof.records.background_metrics import BACKGROUND_METRICS
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans

MAX_COUNTER_EVENTS = 10_000
"""Of one counter; of more, each event is the largest of several."""

MAX_FLOWS = 50_000
"""Arrows of one kind in a trace; of more, the longest waits have one."""

_MEMORY = {
    "device_allocated_bytes": "device memory allocated (bytes)",
    "device_reserved_bytes": "device memory reserved (bytes)",
    "host_rss_bytes": "host memory (bytes)",
    "children_rss_bytes": "host memory of child processes (bytes)",
}
_MARK = KINDS.index("mark")
_FIRST_SAMPLE_ARROW = 1 << 40  # numbers of other arrows are below


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


class CounterTracks:
    """Counters of the ranks of a run.

    Tokens per second are those that a rank counted in a step, over the time of that step. Memory is
    what spans recorded at their end.
    """

    def __init__(self, series: StepTimes) -> None:
        self._spans = series.spans
        self._steps = np.sort(series.matrix.steps)
        self._memory = {title: self._spans.amounts(name) for name, title in _MEMORY.items()}
        rows, amounts = self._spans.amounts("tokens")
        if series.tokens is not None:
            own = self._spans.name[rows] == self._spans.names.index(series.tokens[0])
            rows, amounts = rows[own], amounts[own]
        self._tokens = rows, amounts
        self._background = [*counter_samples(self._spans, [], (BACKGROUND_METRICS,))]

    def events(self, rank: int, pid: int) -> Iterator[str]:
        """Yield the counters of a rank; one event where a value changes."""
        spans, bounds = self._spans, np.searchsorted(self._spans.rank, [rank, rank + 1])
        yield from self._rates(bounds, pid)
        for title, (rows, values) in self._memory.items():
            low, high = np.searchsorted(rows, bounds)
            times, order = spans.end_ns[rows[low:high]], np.argsort(spans.end_ns[rows[low:high]])
            yield from track(pid, title, times[order], values[low:high][order].astype(np.float64))
        for samples, metrics in self._background:
            yield from sample_tracks(samples.rows(samples.rank == rank), metrics, pid)

    def _rates(self, bounds: Int64s, pid: int) -> Iterator[str]:
        spans, (rows, amounts) = self._spans, self._tokens
        first, last = np.searchsorted(self._steps, bounds)
        low, high = np.searchsorted(rows, bounds)
        steps, rows, amounts = self._steps[first:last], rows[low:high], amounts[low:high]
        if not len(steps) or not len(rows):
            return
        steps = steps[np.argsort(spans.step[steps], kind="stable")]
        place = np.minimum(np.searchsorted(spans.step[steps], spans.step[rows]), len(steps) - 1)
        known = spans.step[steps][place] == spans.step[rows]
        counted = np.bincount(place[known], amounts[known], len(steps))
        rates = counted / np.maximum(spans.duration_ns[steps], 1) * 1e9
        order = np.argsort(spans.start_ns[steps], kind="stable")
        times = np.append(spans.start_ns[steps][order], spans.end_ns[steps].max())
        yield from track(pid, "tokens/s", times, np.append(rates[order], 0.0))


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


class WaitSlices:
    """Waits of a run, and where their slices and those of the last ranks are drawn.

    Attributes:
        track: By row of the run, the number of its track in the process of its rank.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans, self._waits = spans, find_waits(spans)
        self._own = np.zeros(len(self._waits.row), np.int64)  # track of each wait
        self._order = np.argsort(self._waits.row, kind="stable")
        self._rows = self._waits.row[self._order]
        self.track = np.zeros(len(spans), np.int64)

    def merged(self, lane: list[int], tid: int) -> tuple[list[int], list[int]]:
        """Return what a track shows in drawing order, and the waits that do not nest there.

        A wait is ``~index``. Perfetto drops a slice that begins inside another and ends after it.

        Args:
            lane: Rows of the track, in drawing order.
            tid: Its number.
        """
        spans, waits, rows = self._spans, self._waits, np.array(lane, np.int64)
        self.track[rows] = tid
        low, high = np.searchsorted(self._rows, [rows.min(), rows.max() + 1])
        mine = self._order[low:high][np.isin(self._rows[low:high], rows)]
        if not len(mine):
            return lane, []
        self._own[mine] = tid
        start = np.concatenate([spans.start_ns[rows], waits.start_ns[mine]])
        end = np.concatenate([spans.end_ns[rows], waits.end_ns[mine]])
        item = np.concatenate([rows, ~mine])
        order = np.lexsort((item < 0, -end, start))
        left_out: set[int] = set()
        stack: list[tuple[int, int]] = []
        columns = (column[order].tolist() for column in (start, end, item))
        for begins, ends, each in zip(*columns, strict=True):
            if each >= 0 and spans.kind[each] == _MARK:
                continue
            while stack and stack[-1][0] <= begins:
                stack.pop()
            while each >= 0 and stack and stack[-1][0] < ends:  # rows nest: it is a wait
                left_out.add(stack.pop()[1])
            if stack and stack[-1][0] < ends:
                left_out.add(each)
            else:
                stack.append((ends, each))
        drawn = [each for each in item[order].tolist() if each not in left_out]
        return drawn, sorted(left_out, reverse=True)

    def slice(self, item: int, pid: int, tid: int) -> str:
        """Return a wait as a slice, and note on which track it is."""
        spans, waits, at = self._spans, self._waits, ~item
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
            arrives, lies = int(waits.end_ns[at]) - 1, self._own[at]  # within the slice
            leaves = int(spans.start_ns[last])
            if waits.whole_stage[at]:  # the last rank's own work ends the wait
                leaves = max(leaves, min(arrives, int(spans.end_ns[last]) - 1))
            if leaves > arrives:  # its arrival does, in the span around the wait
                arrives, lies = leaves, self.track[row]
            what = f'"cat":"waiting","name":"last arrival","id":{at + 1}'
            for phase, rank, tid, time in (
                ('"s"', spans.rank[last], self.track[last], leaves),
                ('"f","bp":"e"', spans.rank[row], lies, arrives),
            ):
                yield f'{{"ph":{phase},"pid":{rank + 1},"tid":{tid},"ts":{micro(time)},{what}}}'


def sample_arrows(spans: Spans, tracks: Int64s) -> Iterator[str]:
    """Yield both ends of the arrow of each trained sample; of many samples, of some evenly.

    Args:
        spans: The run.
        tracks: Track of each row.
    """
    book = sample_book(spans)
    phase = spans.kind[book.rows] != KINDS.index("mark")
    rows, owner = book.rows[phase], book.owner[phase]
    last = np.full(len(book), -1)
    last[owner] = rows  # the last one by start stays
    some = np.flatnonzero(book.fates("trained") & (last >= 0))
    if len(some) > MAX_FLOWS:
        some = some[np.linspace(0, len(some) - 1, MAX_FLOWS).astype(int)]
    updates = updates_of(spans, book.fate_row[some])
    for at, row, update in zip(some.tolist(), last[some].tolist(), updates.tolist(), strict=True):
        if update == UNKNOWN:
            continue
        leaves = max(int(spans.end_ns[row]) - 1, int(spans.start_ns[row]))
        arrives = max(int(spans.start_ns[update]), min(leaves, int(spans.end_ns[update]) - 1))
        if arrives < leaves:
            continue  # clocks that are off, or a phase that ends after its update
        what = f'"cat":"sample","name":"sample","id":{_FIRST_SAMPLE_ARROW + at}'
        for head, each, time in (('"s"', row, leaves), ('"f","bp":"e"', update, arrives)):
            place = f'"pid":{int(spans.rank[each]) + 1},"tid":{int(tracks[each])}'
            yield f'{{"ph":{head},{place},"ts":{micro(time)},{what}}}'
