"""What devices ran as tracks of a Chrome trace: kernels and copies, one track per stream."""

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.device.device_counters import CAPTURED, counter_samples
from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import KINDS, copy_name
from lightning_rlprof.report.chrome_trace.run_tracks import (
    MAX_FLOWS,
    about,
    encoded,
    micro,
    sample_tracks,
    track,
)
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import covered_before, last_begun, unions
from lightning_rlprof.tables.spans import Spans

_FIRST = 1 << 20  # threads of a rank are numbered below
_UNKNOWN = -(2**63)
_AT_ONCE = 10_000
_MARKED = (KINDS.index("stage"), KINDS.index("region"))
_PARTS = 100  # of a step, in each of which a device has a share of busy time
# The column that names what ran, and its category in torch.profiler's traces.
_TABLES = {"kernels": ("kernel", "kernel"), "memcpy": ("kind", "gpu_memcpy")}
_NUMBERS = ("rank", "device", "stream", "start", "duration", "step", "launch")
_TEXTS = ("name", "stage", "range", "category")

_Columns = dict[str, Int64s]


class DeviceTracks:
    """Kernels and copies of a run by rank, device and stream, and counters of its devices.

    Attributes:
        remarks: What is not there, and why.
    """

    def __init__(self, spans: Spans) -> None:
        self.remarks: list[str] = []
        self._texts: dict[str, int] = {}
        parts = [each for name in _TABLES if (each := self._part(spans, name)) is not None]
        if not parts and not self.remarks:
            self.remarks.append("no kernels: the run holds no capture of a device")
        self._spans = spans
        self._counters = [*counter_samples(spans, self.remarks, CAPTURED)]
        names = (*_NUMBERS, *_TEXTS)
        none = np.empty(0, np.int64)
        found = {name: np.concatenate([none, *(part[name] for part in parts)]) for name in names}
        order = np.lexsort([found[name] for name in ("start", "stream", "device", "rank")])
        self._columns = {name: column[order] for name, column in found.items()}
        self._track = np.zeros(len(order), np.int64)  # of each kernel, once it is drawn
        self._encoded = [encoded(text) for text in self._texts]
        if others := sorted({*self._columns["rank"].tolist()} - {*spans.ranks}):
            who = ", ".join(map(str, others))
            self.remarks.append(f"kernels of ranks without spans are left out: {who}")

    def events(self, rank: int, pid: int) -> Iterator[list[str]]:
        """Yield the tracks of a rank, some events of the process that stands for it at a time."""
        low, high = np.searchsorted(self._columns["rank"], [rank, rank + 1]).tolist()
        device, stream = (self._columns[name][low:high] for name in ("device", "stream"))
        changes = np.flatnonzero((np.diff(device) != 0) | (np.diff(stream) != 0)) + 1
        tid = _FIRST
        for rows in np.split(np.arange(low, high), changes) if high > low else ():
            title = self._title(int(rows[0]))
            for number, lane in enumerate(self._lanes(rows), start=1):
                name = title if number == 1 else f"{title} ({number})"
                yield [
                    about(pid, tid, "thread_name", name=name),
                    about(pid, tid, "thread_sort_index", sort_index=tid),
                ]
                self._track[lane] = tid
                for first in range(0, len(lane), _AT_ONCE):
                    track = f'"pid":{pid},"tid":{tid}'
                    yield [*self._slices(lane[first : first + _AT_ONCE], track)]
                tid += 1
        if high > low:
            yield [*self._busy(low, high, pid), *self._queued(low, high, pid)]
        for samples, metrics in self._counters:
            first = rank == self._spans.ranks[0]  # has what has no rank
            own = samples.rows((samples.rank == rank) | (first & (samples.rank < 0)))
            if sampled := [*sample_tracks(own, metrics, pid)]:
                yield sampled

    def _busy(self, low: int, high: int, pid: int) -> Iterator[str]:
        """Yield how busy each device of a rank is, in equal parts of each step with kernels.

        The last value of a capture is 0: what follows was not recorded.
        """
        spans, columns = self._spans, self._columns
        start, length, step = (columns[name][low:high] for name in ("start", "duration", "step"))
        steps = spans.rows(rank=int(columns["rank"][low]), kind="step")
        steps = steps[np.isin(spans.step[steps], step)]
        begins, ends = spans.start_ns[steps], spans.end_ns[steps]
        if not len(steps):  # a trace without steps
            begins, ends = start.min(keepdims=True), (start + length).max(keepdims=True)
        for device in np.unique(columns["device"][low:high]).tolist():
            own = columns["device"][low:high] == device
            first, last = start[own], start[own] + length[own]
            _, first, last = unions(np.zeros(len(first), np.int64), first, last)
            times, values = [], []
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                edges = np.unique(np.linspace(begin, end, _PARTS + 1).astype(np.int64))
                busy = np.diff(covered_before(first, last, edges))
                times.append(edges)
                values.append(np.append(100 * busy / np.maximum(np.diff(edges), 1), 0.0))
            # Where steps follow one another, the next one's first value replaces the 0.
            whole, shown = np.concatenate(times), np.concatenate(values)
            kept = np.append(whole[1:] > whole[:-1], True)
            yield from track(pid, f"{_device(device)} busy (%)", whole[kept], shown[kept])

    def _queued(self, low: int, high: int, pid: int) -> Iterator[str]:
        """Yield how much of each device's work was launched and had not started."""
        start, launch, devices = (
            self._columns[name][low:high] for name in ("start", "launch", "device")
        )
        known = (launch != _UNKNOWN) & (launch <= start)
        for device in np.unique(devices[known]).tolist():
            own = known & (devices == device)
            times = np.concatenate([launch[own], start[own]])
            change = np.repeat([1.0, -1.0], int(own.sum()))
            order = np.argsort(times, kind="stable")
            times, depth = times[order], np.cumsum(change[order])
            last = np.append(times[1:] != times[:-1], True)  # of changes at one time
            yield from track(pid, f"{_device(device)} launch queue depth", times[last], depth[last])

    def flow_events(self, tracks: Int64s, first_id: int) -> Iterator[str]:
        """Yield arrows from each mark to the first and the last kernel that was launched in it.

        Args:
            tracks: Track of each row of the run.
            first_id: Number of the first arrow.
        """
        spans, columns = self._spans, self._columns
        launch, start = columns["launch"], columns["start"]
        codes = {name: code for code, name in enumerate(spans.names)}
        named = np.array([*(codes.get(text, -1) for text in self._texts), -1], np.int64)
        name = named[columns["range"]]  # -1, unknown, is last
        name = np.where(name < 0, named[columns["stage"]], name)
        known = (name >= 0) & (launch != _UNKNOWN) & (launch <= start) & (columns["duration"] > 0)
        kernels, width = np.flatnonzero(known), len(codes)
        marks = np.flatnonzero(np.isin(spans.kind, _MARKED))
        lane = spans.rank[marks] * width + spans.name[marks]
        order = np.lexsort((spans.start_ns[marks], lane))
        marks, lane = marks[order], lane[order]
        own = columns["rank"][kernels] * width + name[kernels]
        at = last_begun(lane, spans.start_ns[marks], own, launch[kernels])
        kernels, around = kernels[at >= 0], marks[at[at >= 0]]
        within = launch[kernels] < spans.end_ns[around]
        kernels, around = kernels[within], around[within]
        order = np.lexsort((start[kernels], around))
        kernels, around = kernels[order], around[order]
        differs = np.diff(around) != 0
        ends = (np.append(True, differs) | np.append(differs, True))[: len(around)]
        pairs = zip(kernels[ends].tolist(), around[ends].tolist(), strict=True)
        for number, (row, mark) in enumerate(islice(pairs, MAX_FLOWS), start=first_id):
            pid = int(columns["rank"][row]) + 1
            what = f'"pid":{pid},"cat":"launch","name":"launch","id":{number}'
            places = (tracks[mark], int(launch[row])), (self._track[row], int(start[row]))
            for phase, (tid, time) in zip(('"s"', '"f","bp":"e"'), places, strict=True):
                yield f'{{"ph":{phase},"tid":{tid},"ts":{micro(time)},{what}}}'

    def _part(self, spans: Spans, name: str) -> _Columns | None:
        """Return the columns of a table, with texts as codes of our own; None without it."""
        if name not in spans.tables:
            return None
        try:
            table = spans.table(name)
        except TraceError as error:
            self.remarks.append(f"no {name}: {error}")
            return None
        if table.abstained is not None:
            self.remarks.append(f"no {name}: {table.abstained}")
            return None
        self.remarks += [table.note] if table.note else []
        heads = [column.name for column in table.columns]
        cells = dict(zip(heads, table.arrays(), strict=True))
        named, category = _TABLES[name]
        codes, texts = cells[named]
        if name == "memcpy":
            codes, texts = np.where(codes < 0, len(texts), codes), [*map(copy_name, (*texts, None))]
        one = (np.zeros(len(table.rows), np.int64), [category])
        cells |= {"name": (codes, texts), "category": one}
        nothing: Any = (np.full(len(table.rows), -1), [])
        columns = {each: _numbers(cells.get(each, nothing)) for each in _NUMBERS}
        columns |= {each: self._codes(*cells.get(each, nothing)) for each in _TEXTS}
        columns["name"] = np.where(columns["name"] < 0, columns["category"], columns["name"])
        return columns

    def _codes(self, codes: npt.NDArray[Any], texts: list[str]) -> Int64s:
        own = [self._texts.setdefault(text, len(self._texts)) for text in texts]
        return np.array([*own, -1], np.int64)[np.where(codes < 0, -1, codes)]

    def _title(self, row: int) -> str:
        """Name a track by what is known of it."""
        places = {name: int(self._columns[name][row]) for name in ("device", "stream")}
        told = [f"{name} {number}" for name, number in places.items() if number != _UNKNOWN]
        return ", ".join(told) or "device"

    def _lanes(self, rows: Int64s) -> list[list[int]]:
        """Deal out what overlaps on one stream to the fewest tracks: Perfetto would drop it."""
        start = self._columns["start"][rows]
        end = start + self._columns["duration"][rows]
        lanes: list[list[int]] = []
        busy: list[tuple[int, int]] = []  # until when, which lane
        for row, begins, ends in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
            if not busy or busy[0][0] > begins:
                heapq.heappush(busy, (ends, len(lanes)))
                lanes.append([row])
            else:
                lane = busy[0][1]
                heapq.heapreplace(busy, (ends, lane))
                lanes[lane].append(row)
        return lanes

    def _slices(self, rows: list[int], track: str) -> Iterator[str]:
        names = ("start", "duration", "launch", "step", *_TEXTS)
        at, texts = np.array(rows), self._encoded
        columns = (self._columns[name][at].tolist() for name in names)
        for start, length, launch, step, name, stage, around, category in zip(
            *columns, strict=True
        ):
            told = [f'"step":{step}'] if step != _UNKNOWN else []
            told += [f'"stage":{texts[stage]}'] if stage >= 0 else []
            told += [f'"range":{texts[around]}'] if around >= 0 else []
            told += [f'"queued_us":{micro(start - launch)}'] if launch != _UNKNOWN else []
            yield (
                f'{{"ph":"X",{track},"ts":{micro(start)},"dur":{micro(length)},'
                f'"name":{texts[name]},"cat":{texts[category]},"args":{{{",".join(told)}}}}}'
            )


def _device(number: int) -> str:
    return "device" if number == _UNKNOWN else f"device {number}"


def _numbers(cells: Any) -> Int64s:
    """Return a column as an array, `_UNKNOWN` where nothing is known."""
    if isinstance(cells, tuple):
        return np.full(len(cells[0]), _UNKNOWN)
    return np.ma.filled(cells, _UNKNOWN).astype(np.int64, copy=False)
