"""What devices ran as tracks of a Chrome trace: kernels and copies, one track per stream."""

from collections.abc import Iterator
from itertools import repeat

import numpy as np

from lightning_rlprof.analysis.device.device_counters import CAPTURED, counter_samples
from lightning_rlprof.analysis.device.work import NOT_RECORDED, device_work
from lightning_rlprof.report.chrome_trace import (
    deal,
    encoded,
    micro,
    named,
    sample_tracks,
)
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import NO_PARENT, Spans

_FIRST = 1 << 20  # Threads of a rank have lower numbers.
_AT_ONCE = 10_000
_NUMBERS = ("device", "stream", "start", "duration", "step", "launch")


class DeviceTracks:
    """Kernels and copies of a run by rank, device and stream, and counters of its devices.

    Attributes:
        remarks: What is not there, and why.
    """

    def __init__(self, spans: Spans) -> None:
        self.remarks: list[str] = []
        work = device_work(spans, notes=self.remarks)
        tables = [each for each in (work.kernels, work.copies) if each is not None]
        self.remarks += [table.note for table in tables if table.note]
        if not tables and not self.remarks:
            self.remarks.append("no kernels: the run holds no capture of a device")
        self._spans = spans
        self._counters = [*counter_samples(spans, self.remarks, CAPTURED)]
        names = (work.named[0], [each.short for each in work.short_names])
        kinds = (work.named[0], [each.kind for each in work.short_names])
        texts = {"name": names, "full": work.named, "class": kinds, "stage": work.stages()}
        is_copy = (np.arange(len(work)) >= work.kernel_count).astype(np.int64)
        columns = {"rank": work.rank, "is_copy": is_copy}
        columns |= {name: work.numbers(name) for name in _NUMBERS}
        columns |= {name: codes for name, (codes, _) in texts.items()}
        order = np.lexsort([columns[name] for name in ("start", "stream", "device", "rank")])
        self._columns = {name: column[order] for name, column in columns.items()}
        self._encoded = {name: [*map(encoded, own)] for name, (_, own) in texts.items()}
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
                yield [*named(pid, tid, name)]
                for first in range(0, len(lane), _AT_ONCE):
                    track = f'"pid":{pid},"tid":{tid}'
                    yield [*self._slices(lane[first : first + _AT_ONCE], track)]
                tid += 1
        for samples, metrics in self._counters:
            # The first rank also shows samples without a rank.
            first = rank == self._spans.ranks[0]
            own = samples.rows((samples.rank == rank) | (first & (samples.rank < 0)))
            if sampled := [*sample_tracks(own, metrics, pid)]:
                yield sampled

    def _title(self, row: int) -> str:
        """Name a track by what is known of it."""
        places = {name: int(self._columns[name][row]) for name in ("device", "stream")}
        told = [f"{name} {number}" for name, number in places.items() if number != NOT_RECORDED]
        return ", ".join(told) or "device"

    def _lanes(self, rows: Int64s) -> list[list[int]]:
        """Deal out what overlaps on one stream to the fewest tracks: Perfetto would drop it."""
        start = self._columns["start"][rows]
        columns = (rows, start, start + self._columns["duration"][rows], rows)
        values = (column.tolist() for column in columns)
        return deal(zip(*values, repeat(NO_PARENT), repeat(False), repeat(False)))

    def _slices(self, rows: list[int], track: str) -> Iterator[str]:
        texts = self._encoded
        names = ("start", "duration", "launch", "step", "name", "stage", "is_copy")
        columns = (self._columns[name][np.array(rows)].tolist() for name in names)
        for start, length, launch, step, name, stage, is_copy in zip(*columns, strict=True):
            category = "gpu_memcpy" if is_copy else "kernel"
            title = texts["name"][name] if name >= 0 else f'"{category}"'
            told = []
            if name >= 0 and not is_copy:
                told = [f'"kernel":{texts["full"][name]}', f'"class":{texts["class"][name]}']
            told += [f'"step":{step}'] if step != NOT_RECORDED else []
            told += [f'"stage":{texts["stage"][stage]}'] if stage >= 0 else []
            told += [f'"queued_us":{micro(start - launch)}'] if launch != NOT_RECORDED else []
            yield (
                f'{{"ph":"X",{track},"ts":{micro(start)},"dur":{micro(length)},'
                f'"name":{title},"cat":"{category}","args":{{{",".join(told)}}}}}'
            )
