"""What devices ran as tracks of a Chrome trace: kernels and copies, one track per stream."""

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import copy_name
from lightning_rlprof.report.chrome_trace.encoding import about, encoded, micro
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans

_FIRST = 1 << 20  # threads of a rank are numbered below
_UNKNOWN = -(2**63)
_AT_ONCE = 10_000
# The column that names what ran, and its category in torch.profiler's traces.
_TABLES = {"kernels": ("kernel", "kernel"), "memcpy": ("kind", "gpu_memcpy")}
_NUMBERS = ("rank", "device", "stream", "start", "duration", "step", "launch")
_TEXTS = ("name", "stage", "range", "category")

_Columns = dict[str, Int64s]


class DeviceTracks:
    """Kernels and copies of a run by rank, device and stream.

    Attributes:
        remarks: What is not there, and why.
    """

    def __init__(self, spans: Spans) -> None:
        self.remarks: list[str] = []
        self._texts: dict[str, int] = {}
        parts = [each for name in _TABLES if (each := self._part(spans, name)) is not None]
        if not parts and not self.remarks:
            self.remarks.append("no kernels: the run holds no capture of a device")
        names = (*_NUMBERS, *_TEXTS)
        none = np.empty(0, np.int64)
        found = {name: np.concatenate([none, *(part[name] for part in parts)]) for name in names}
        order = np.lexsort([found[name] for name in ("start", "stream", "device", "rank")])
        self._columns = {name: column[order] for name, column in found.items()}
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
                for first in range(0, len(lane), _AT_ONCE):
                    track = f'"pid":{pid},"tid":{tid}'
                    yield [*self._slices(lane[first : first + _AT_ONCE], track)]
                tid += 1

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


def _numbers(cells: Any) -> Int64s:
    """Return a column as an array, `_UNKNOWN` where nothing is known."""
    if isinstance(cells, tuple):
        return np.full(len(cells[0]), _UNKNOWN)
    return np.ma.filled(cells, _UNKNOWN).astype(np.int64, copy=False)
