"""What the device sections of the HTML report draw, as a bounded file can hold it.

Lanes of kernels, launches and queues, idle gaps, the icicle and memory; sums are of all devices.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.gaps import (
    CAUSES,
    IN_REPLAY,
    Gaps,
    LongGap,
    gaps_of,
    longest_gaps,
)
from lightning_rlprof.analysis.device.kernel_names import CLASSES, kernel_names
from lightning_rlprof.analysis.device.launches import first_of_launches, queue_depths
from lightning_rlprof.analysis.device.timeline import TABLES, DeviceTimeline, Lane, device_timeline
from lightning_rlprof.analysis.device.work import (
    COPY,
    NO_REPLAY,
    NOT_RECORDED,
)
from lightning_rlprof.analysis.statistics.group_summary import rows_by_group, summarize
from lightning_rlprof.report.html.icicle import Stacks, icicle
from lightning_rlprof.system.process import give_back
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import NONE
from lightning_rlprof.tables.spans import Spans

WORK_CLASSES = (*CLASSES, "copy")
"""Classes of kernels, then that of copies."""

_MAX_SINGLE = 12_000  # Kernels and copies; beyond, bins of time sum them up.
_MAX_WINDOW = 3_000  # Single ones in each of two windows beside the bins.
_MAX_BINS = 16_384  # Of all streams.
_BINS_OF_STREAM = (256, 2_048)
_MAX_DEVICES, _MAX_STREAMS = 8, 6
_MAX_GAPS, _MAX_LAUNCHES, _MAX_QUEUE, _MAX_MEMORY = 1_500, 4_000, 3_000, 2_400
_FEW_DEVICES = 4  # Of more than these, each has a fifth of the gaps, launches and queue.
_MAX_BYTES = 1_100_000  # Of the JSON, so that a page stays below 2 MB.
_MAX_FULL_NAMES = 200_000  # Characters of full names; the rarest kernels have short ones only.
_BUILT_IN = re.compile(r"<built-in (?:method|function) (\w+).*")
_FOLDERS = re.compile(r"^.*/(?=[^/]+\.py)")
_LONGEST_GAPS = {True: 6, False: 3}  # Of several devices, or of one.


class IdleRow(NamedTuple):
    """One cause of time without work, over all devices; ``share`` is of their wall time."""

    cause: str
    share: float
    of_idle: float | None
    total_ns: int
    gaps: int
    median_ns: int
    longest_ns: int


class GapView(NamedTuple):
    """One of the longest gaps as the page lists it; times are those of the drawn axis.

    ``drawn`` is the number of its device among those that are drawn, or `NONE`.
    """

    start_ns: int
    end_ns: int
    cause: str
    before: str
    device: str
    call: str
    drawn: int


@dataclass(frozen=True)
class DeviceDrawing:
    """What the page draws of its devices; without any, ``lanes`` is empty.

    Attributes:
        data: For the scripts: lanes, hosts, gaps, icicle and memory.
        idle: A row per cause, most time first.
        gaps: The longest ones.
        idle_ns: Idle time of all devices.
        devices: How many there are.
    """

    data: dict[str, Any]
    idle: list[IdleRow] = field(default_factory=list)
    gaps: list[GapView] = field(default_factory=list)
    idle_ns: int = 0
    devices: int = 0


class _Texts:
    """A table of texts that grows by those that are used."""

    def __init__(self) -> None:
        self.place: dict[Any, int] = {}

    def codes(self, codes: Int64s, texts: Sequence[Any]) -> Int64s:
        """Return the place of each code's text in the table, `NONE` for a code below 0."""
        used = np.unique(codes[codes >= 0])
        own = np.full(len(texts) + 1, NONE)
        for code in used.tolist():
            own[code] = self.place.setdefault(texts[code], len(self.place))
        return own[np.where(codes < 0, len(texts), codes)]


def draw_devices(spans: Spans) -> DeviceDrawing:
    """Return what the page draws of its devices; half the bins until it fits.

    Example::

        drawing = draw_devices(load("trace.json.gz"))
        print(len(json.dumps(drawing.data)))
    """
    if spans.tables.keys().isdisjoint(TABLES):
        return DeviceDrawing({"lanes": [], "icicle": [], "classes": WORK_CLASSES})
    timeline = device_timeline(spans)
    work = timeline.work
    stacks = Stacks(spans, work)
    give_back()
    names = kernel_names(work.named[1])
    kinds = np.array([WORK_CLASSES.index(each.kind) for each in names] + [CLASSES.index("other")])
    kinds[work.name_kinds == COPY] = len(CLASSES)
    shorts = [*(each.short for each in names), "unknown kernel"]
    boxes = icicle(work, stacks, shorts, kinds.tolist())
    if not timeline.lanes:
        return DeviceDrawing({"lanes": [], "icicle": boxes, "classes": WORK_CLASSES})
    gaps = [gaps_of(lane) for lane in timeline.lanes]
    several = len(timeline.lanes) > 1
    longest = longest_gaps(spans, timeline, gaps, _LONGEST_GAPS[several])
    drawn = _Lanes(spans, timeline, gaps, longest, stacks, shorts, kinds)
    low, high = _BINS_OF_STREAM
    bins = min(high, max(low, _MAX_BINS // len(drawn.streams)))
    data = drawn.data(bins) | {"icicle": boxes}
    while len(json.dumps(data, separators=(",", ":"))) > _MAX_BYTES and bins > 1:
        bins //= 2
        data = drawn.data(bins) | {"icicle": boxes}
    rows, idle_ns = _idle_rows(timeline, gaps)
    views = [_gap_view(gap, timeline, drawn, shorts) for gap in longest]
    return DeviceDrawing(data, rows, views, idle_ns, len(timeline.lanes))


def _idle_rows(timeline: DeviceTimeline, gaps: Sequence[Gaps]) -> tuple[list[IdleRow], int]:
    """Return a row per cause, and all idle time."""
    wall = sum(lane.end_ns - lane.start_ns for lane in timeline.lanes)
    cause = np.concatenate([each.cause for each in gaps])
    found = summarize(cause, np.concatenate([each.end_ns - each.start_ns for each in gaps]))
    columns = (found.group, found.total, found.count, found.p50, found.max)
    idle_ns = int(found.total[found.group < IN_REPLAY].sum())
    rows = [
        IdleRow(
            CAUSES[code], total / wall, total / idle_ns if code < IN_REPLAY else None, total, *rest
        )
        for code, total, *rest in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return sorted(rows, key=lambda row: (row.of_idle is None, -row.total_ns)), idle_ns


def _gap_view(
    gap: LongGap, timeline: DeviceTimeline, drawn: "_Lanes", shorts: Sequence[str]
) -> GapView:
    lane = timeline.lanes[gap.lane]
    before = "" if gap.row is None else shorts[timeline.work.named[0][gap.row]]
    start, end = gap.start_ns - drawn.zero_ns, gap.end_ns - drawn.zero_ns
    name = _device_name(timeline.lanes, lane) if len(timeline.lanes) > 1 else ""
    call = _FOLDERS.sub("", _BUILT_IN.sub(r"\1 (built-in)", gap.call or ""))
    number = drawn.shown.index(gap.lane) if gap.lane in drawn.shown else NONE
    return GapView(start, end, CAUSES[gap.cause], before, name, call, number)


def _device_name(lanes: Sequence[Lane], lane: Lane) -> str:
    alone = sum(other.rank == lane.rank for other in lanes) == 1
    device = "" if alone or lane.device is None else f" device {lane.device}"
    return f"rank {lane.rank}{device}"


class _Lanes:
    """The devices that are drawn, from which the data of any number of bins is made.

    Attributes:
        shown: Which lanes of the timeline are drawn.
        zero_ns: Where the axis begins: with the first work or the profiling.
        streams: Rows of work of each stream that is drawn, with its device.
    """

    def __init__(
        self,
        spans: Spans,
        timeline: DeviceTimeline,
        gaps: Sequence[Gaps],
        longest: Sequence[LongGap],
        stacks: Stacks,
        shorts: Sequence[str],
        kinds: Int64s,
    ) -> None:
        self._spans, self._timeline, self._stacks = spans, timeline, stacks
        self._names, self._kinds = shorts, kinds
        work = timeline.work
        self._work = work
        self._start, self._launch = work.numbers("start"), work.numbers("launch")
        self._end = self._start + work.duration
        self._stream = work.numbers("stream")
        parts = [*((lane.work.start_ns, lane.work.end_ns) for lane in timeline.lanes)]
        parts += [lane.profiled for lane in timeline.lanes]
        self.zero_ns = min(int(first.min()) for first, _ in parts if len(first))
        self._length = max(int(last.max()) for _, last in parts if len(last)) - self.zero_ns
        self._busy = [
            lane.end_ns - lane.start_ns - int((own.end_ns - own.start_ns).sum())
            for lane, own in zip(timeline.lanes, gaps, strict=True)
        ]
        self.shown = self._chosen([gap.lane for gap in longest])
        self._gaps = [gaps[at] for at in self.shown]
        self.streams: list[tuple[int, int, Int64s]] = []
        self._more: list[int] = []
        for number, at in enumerate(self.shown):
            rows = timeline.lanes[at].work.row
            groups = rows_by_group(self._stream[rows])
            groups = sorted(groups, key=lambda own: -int(work.duration[rows[own]].sum()))
            self._more.append(max(0, len(groups) - _MAX_STREAMS))
            for own in groups[:_MAX_STREAMS]:
                self.streams.append((number, int(self._stream[rows[own[0]]]), rows[own]))

    def _chosen(self, wanted: list[int]) -> list[int]:
        """Return the devices that are drawn: the busiest, least busy and median one, some more."""
        by_busy = sorted(range(len(self._busy)), key=lambda at: -self._busy[at])
        first = [by_busy[0], by_busy[-1], by_busy[(len(by_busy) - 1) // 2], *wanted, *by_busy]
        return sorted(list(dict.fromkeys(first))[:_MAX_DEVICES])

    def data(self, bins: int) -> dict[str, Any]:
        """Return the data for the scripts.

        Args:
            bins: How many columns of time sum up a stream, if kernels are too many to be single.
        """
        texts = {name: _Texts() for name in ("kernels", "operators", "modules", "stages", "ranges")}
        lanes, windows = [], []
        shown = sum(len(rows) for _, _, rows in self.streams)
        if shown > _MAX_SINGLE:
            windows = self._windows()
        for device, stream, rows in self.streams:
            lane: dict[str, Any] = {"device": device, "n": len(rows)}
            lane["stream"] = None if stream == NOT_RECORDED else stream
            single = rows
            if windows:
                lane |= self._bins(rows, bins, texts["kernels"])
                inside = np.zeros(len(rows), np.bool_)
                for first, last in windows:
                    inside |= (self._end[rows] > first) & (self._start[rows] < last)
                single = rows[inside]
            lanes.append(lane | self._marks(single, texts))
        few = len(self.shown) <= _FEW_DEVICES
        limits = [each if few else each // 5 for each in (_MAX_GAPS, _MAX_LAUNCHES, _MAX_QUEUE)]
        lanes_of = self._timeline.lanes
        devices = [
            {"name": _device_name(lanes_of, lanes_of[at]), "rank": lanes_of[at].rank}
            | {"more": more, "gaps": self._gap_columns(gaps, limits[0])}
            for at, more, gaps in zip(self.shown, self._more, self._gaps, strict=True)
        ]
        return {
            "length": self._length,
            "classes": WORK_CLASSES,
            "causes": CAUSES,
            "all": len(lanes_of),
            "count": len(self._work),
            "windows": [[first - self.zero_ns, last - self.zero_ns] for first, last in windows],
            "devices": devices,
            "lanes": lanes,
            "hosts": self._hosts(limits[1], limits[2], texts["operators"]),
            "memory": self._memory(),
            "steps": self._steps(stages=False),
            "host_stages": self._steps(stages=True),
            "kernels": self._kernels(texts.pop("kernels")),
            **{name: [*each.place] for name, each in texts.items()},
        }

    def _kernels(self, used: _Texts) -> list[list[Any]]:
        """Return short name, class and full name of the kernels that the lanes name."""
        codes, full = self._work.named
        spent = np.bincount(codes % len(self._names), self._work.duration, len(self._names))
        left = _MAX_FULL_NAMES
        found: dict[int, list[Any]] = {}
        for code in sorted(used.place, key=lambda code: -spent[code]):
            name = full[code] if code < len(full) else ""
            left -= len(name)
            own = [self._names[code], int(self._kinds[code])]
            found[code] = [*own, name] if left > 0 and name != own[0] else own
        return [found[code] for code in used.place]

    def _windows(self) -> list[tuple[int, int]]:
        """Return the times of single kernels beside bins: from the median and the slowest step.

        Without two steps they begin with the first kernel and in the middle.
        """
        rows = np.concatenate([rows for _, _, rows in self.streams])
        starts = np.sort(self._start[rows], kind="stable")
        begins = [int(starts[0]), int(starts[len(starts) // 2])]
        spans, rank = self._spans, self._timeline.lanes[self.shown[0]].rank
        steps = spans.rows(kind="step", rank=rank)
        first, last = (np.searchsorted(starts, t[steps]) for t in (spans.start_ns, spans.end_ns))
        steps = steps[last > first]  # Kernels began in them.
        if len(steps) > 1:
            order = steps[np.argsort(spans.took_ns(steps), kind="stable")]
            begins = spans.start_ns[order[[(len(order) - 1) // 2, -1]]].tolist()
        found: list[tuple[int, int]] = []
        for begin in sorted(set(begins)):
            at = int(np.searchsorted(starts, begin))
            last_start = starts[min(at + _MAX_WINDOW, len(starts) - 1)]
            if not found or begin >= found[-1][1]:
                found.append((begin, int(last_start)))
        return found

    def _marks(self, rows: Int64s, texts: dict[str, _Texts]) -> dict[str, list[int]]:
        """Return single kernels as columns; those of which nothing is known are left out."""
        rows = rows[np.argsort(self._start[rows], kind="stable")]
        work, stacks = self._work, self._stacks
        start, launch = self._start[rows], self._launch[rows]
        known = (launch != NOT_RECORDED) & (launch <= start)
        stage, stages = work.stages()
        columns = {
            "l": np.where(known, start - np.where(known, launch, 0), NONE),
            "t": texts["stages"].codes(stage[rows], stages),
            "r": texts["ranges"].codes(work.ranges[0][rows], work.ranges[1]),
            "x": np.where(work.replay[rows] == NO_REPLAY, NONE, work.replay[rows]),
            "o": texts["operators"].codes(stacks.operator[rows], stacks.operator_names),
            "m": texts["modules"].codes(stacks.module[rows], stacks.module_names),
        }
        found = {"s": np.diff(start, prepend=self.zero_ns), "d": work.duration[rows]}
        found["k"] = self._name_codes(rows, texts["kernels"])
        found |= {name: column for name, column in columns.items() if (column != NONE).any()}
        return {name: column.tolist() for name, column in found.items()}

    def _name_codes(self, rows: Int64s, kernels: _Texts) -> Int64s:
        own = self._work.named[0][rows] % len(self._names)
        return kernels.codes(own, range(len(self._names)))

    def _bins(self, rows: Int64s, count: int, kernels: _Texts) -> dict[str, Any]:
        """Return the time of each class in bins of one width, with the longest kernel of each."""
        width = -(-self._length // count)
        start, end = self._start[rows] - self.zero_ns, self._end[rows] - self.zero_ns
        kind = self._kinds[self._work.named[0][rows]]
        edges = np.arange(count + 1) * width
        sums = [
            np.diff(_time_before(start[kind == each], end[kind == each], edges))
            for each in range(len(WORK_CLASSES))
        ]
        at = start // width
        started = np.bincount(at, minlength=count)
        order = np.lexsort((end - start, at))
        longest = order[np.cumsum(started) - 1]
        names = self._name_codes(rows[longest], kernels).tolist()
        lengths = (end - start)[longest].tolist()
        found = []
        for number, own in enumerate(np.stack(sums, axis=1).tolist()):
            if any(own):
                here = (names[number], lengths[number]) if started[number] else (NONE, 0)
                pairs = [part for pair in enumerate(own) if pair[1] for part in pair]
                found.append([number, int(started[number]), *here, *pairs])
        return {"width": width, "bins": found}

    def _gap_columns(self, gaps: Gaps, limit: int) -> dict[str, list[int]]:
        """Return the longest gaps on the axis, by start."""
        start, end = (
            (each - self.zero_ns).clip(0, self._length) for each in (gaps.start_ns, gaps.end_ns)
        )
        rows = np.sort(np.argsort(start - end, kind="stable")[:limit])
        rows = rows[end[rows] > start[rows]]
        columns = {"s": np.diff(start[rows], prepend=0), "d": (end - start)[rows]}
        return {name: column.tolist() for name, column in columns.items()} | {
            "c": gaps.cause[rows].tolist()
        }

    def _hosts(self, calls: int, points: int, operators: _Texts) -> list[dict[str, Any]]:
        """Return launch calls and the queue of each rank; of many the longest and shortest."""
        work = self._work
        rows = first_of_launches(self._launch, work.replay, self._start)
        took = work.numbers("launch duration", 0)
        found = []
        for rank in dict.fromkeys(self._timeline.lanes[at].rank for at in self.shown):
            own = rows[work.rank[rows] == rank]
            sound = own[self._start[own] >= self._launch[own]]
            if not len(sound):
                continue
            _, times, depth = queue_depths(
                work.rank[sound], self._launch[sound], self._start[sound]
            )
            kept = extremes(times, depth, points)
            own = own[np.argsort(self._launch[own], kind="stable")]
            shown = own[extremes(self._launch[own], took[own], calls)]
            host: dict[str, Any] = {"rank": rank, "n": len(own), "max": int(depth.max())}
            host["s"] = np.diff(self._launch[shown], prepend=self.zero_ns).tolist()
            host["d"] = took[shown].tolist()
            host["qt"] = np.diff(times[kept], prepend=self.zero_ns).tolist()
            host["q"] = depth[kept].tolist()
            codes = operators.codes(self._stacks.operator[shown], self._stacks.operator_names)
            found.append(host | {"o": codes.tolist()})
        return found

    def _memory(self) -> list[dict[str, Any]]:
        """Return allocated bytes over time of each device, the highest and lowest of each bin."""
        table = self._spans.try_table("memory", [])
        if table is None:
            return []
        rank, device = table.numbers("rank"), table.numbers("device", NOT_RECORDED)
        time = table.numbers("time") - self.zero_ns
        size = table.numbers("allocated", NOT_RECORDED)
        codes, names = table.texts("component")
        found = []
        for number, at in enumerate(self.shown):
            lane = self._timeline.lanes[at]
            own = (rank == lane.rank) & (size != NOT_RECORDED)
            own &= (device == lane.device) & (time >= 0) & (time <= self._length)
            if not own.any():
                continue
            # Of several allocators the one that holds most, which may contain the others.
            most = codes[own][np.argmax(size[own])]
            rows = np.flatnonzero(own & (codes == most))
            rows = rows[np.argsort(time[rows], kind="stable")]
            rows = rows[extremes(time[rows], size[rows], _MAX_MEMORY // len(self.shown))]
            series = {"device": number, "name": names[most] if most >= 0 else ""}
            series["t"] = np.diff(time[rows], prepend=0).tolist()
            found.append(series | {"b": size[rows].tolist()})
        return found

    def _steps(self, *, stages: bool) -> list[list[Any]]:
        """Return steps or stages of the first rank that is drawn: start, duration, name."""
        spans, lane = self._spans, self._timeline.lanes[self.shown[0]]
        if stages:
            host = lane.host
            start, end = host.start_ns, host.end_ns
            texts: Iterable[Any] = [self._timeline.stages[code] for code in host.stage.tolist()]
        else:
            rows = spans.rows(kind="step", rank=lane.rank)
            start, end, texts = spans.start_ns[rows], spans.end_ns[rows], spans.step[rows].tolist()
        first, last = ((each - self.zero_ns).clip(0, self._length) for each in (start, end))
        found = zip(first.tolist(), (last - first).tolist(), texts, strict=True)
        return [[*row] for row in found if row[1]][:_MAX_GAPS]


def extremes(times: Int64s, values: Int64s, points: int) -> Int64s:
    """Return which points of a curve to keep: the highest and lowest of each of equal bins.

    Example::

        >>> extremes(np.arange(6), np.array([3, 9, 4, 1, 2, 2]), 2).tolist()
        [1, 3]
    """
    if len(times) <= points:
        return np.arange(len(times))
    bins = max(1, points // 2)
    at = (times - times[0]) * bins // max(1, int(times[-1] - times[0]) + 1)
    orders = np.lexsort((values, at)), np.lexsort((-values, at))
    kept = [order[np.flatnonzero(np.diff(at[order], prepend=-1))] for order in orders]
    return np.unique(np.concatenate(kept))


def _time_before(start: Int64s, end: Int64s, times: Int64s) -> Int64s:
    """Return how long intervals lasted before each time, summed; they may overlap."""
    total = np.zeros(len(times), np.int64)
    for edges, sign in ((np.sort(start), 1), (np.sort(end), -1)):
        before = np.searchsorted(edges, times)
        total += sign * (before * times - np.append(0, np.cumsum(edges))[before])
    return total
