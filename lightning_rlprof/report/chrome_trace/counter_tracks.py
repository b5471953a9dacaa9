"""Counters of a rank over time as tracks of a Chrome trace.

Tokens per second, memory, and what was sampled in the background.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_rlprof.analysis.device.device_counters import Samples, counter_samples
from lightning_rlprof.records.background_metrics import BACKGROUND_METRICS
from lightning_rlprof.report.chrome_trace.encoding import encoded, micro
from lightning_rlprof.report.step_series import StepSeries
from lightning_rlprof.tables.arrays import Float64s, Int64s

MOST_EVENTS = 10_000
"""Of one counter; of more, each event is the largest of several."""

_MEMORY = {
    "device_allocated_bytes": "device memory allocated (bytes)",
    "device_reserved_bytes": "device memory reserved (bytes)",
    "host_rss_bytes": "host memory (bytes)",
    "children_rss_bytes": "host memory of child processes (bytes)",
}


class CounterTracks:
    """Counters of the ranks of a run.

    Tokens per second are those that a rank counted in a step, over the time of that step. Memory is
    what spans recorded at their end.
    """

    def __init__(self, series: StepSeries) -> None:
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
    """Yield the events of one counter, ascending in time, at most `MOST_EVENTS`."""
    changed = np.append(True, np.diff(values) != 0)[: len(values)]
    times, values = times[changed], values[changed]
    if len(values) > MOST_EVENTS:
        heads = np.unique(np.linspace(0, len(values), MOST_EVENTS, endpoint=False).astype(int))
        times, values = times[heads], np.maximum.reduceat(values, heads)
    title = encoded(name)
    for time, value in zip(times.tolist(), values.tolist(), strict=True):
        shown = encoded(int(value) if value.is_integer() else round(value, 3))
        yield (
            f'{{"ph":"C","pid":{pid},"tid":0,"ts":{micro(time)},"name":{title},'
            f'"args":{{"value":{shown}}}}}'
        )
