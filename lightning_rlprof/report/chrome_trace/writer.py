"""A run as a Chrome trace for ui.perfetto.dev: one process per rank, one track per thread.

The format is https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Slices of one track must nest, else Perfetto drops them: spans that overlap, as asyncio tasks do, go
to further tracks ("lanes") of their thread, each with the spans that were opened inside it.
Steps of a rank are on one track, epochs on another. A wait for other ranks is a slice inside its
stage; an arrow points to its end from the rank that arrived last. The job is on top.

Beside a rank's host stands by how much its clock may be off. Where that is not known, a watermark
above all ranks says so.

Spans of one thread dealt out to lanes in which they nest as they were opened.
"""

import gzip
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.analysis.stages import StepTimes
from lightning_rlprof.records.background_metrics import BACKGROUND_METRICS
from lightning_rlprof.records.records import EXPORT, KINDS, Number
from lightning_rlprof.records.run_directory import mode_made_of
from lightning_rlprof.report.chrome_trace.device_tracks import DeviceTracks
from lightning_rlprof.report.chrome_trace.job_tracks import job_events
from lightning_rlprof.report.chrome_trace.run_tracks import (
    CounterTracks,
    WaitSlices,
    about,
    encoded,
    micro,
    sample_arrows,
)
from lightning_rlprof.system.files import draft_of
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import NO_PARENT, Spans

_LANES_MARK = KINDS.index("mark")
_LOOSE = tuple(KINDS.index(kind) for kind in ("epoch", "step", "region"))


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
    columns = (spans.start_ns, spans.end_ns, spans.id, spans.kind)
    values = (column[order].tolist() for column in columns)
    found = [_Lane()]
    for row, free, parent, start, end, span_id, kind in zip(
        order.tolist(), loose.tolist(), parents.tolist(), *values, strict=True
    ):
        if kind == _LANES_MARK:  # an instant covers nothing
            found[0].rows.append(row)
            continue
        lane = _choose(found, start, end, parent, free)
        lane.rows.append(row)
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


_UNCALIBRATED = "UNCALIBRATED"
_STEP, _EPOCH, _MARK = KINDS.index("step"), KINDS.index("epoch"), KINDS.index("mark")


def write_trace(
    spans: Spans,
    path: Path,
    *,
    devices: DeviceTracks | None = None,
    watermark: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the trace at once or not at all; a name that ends in ``.gz`` is compressed.

    Args:
        spans: The run.
        path: The file; one that exists is replaced.
        devices: What devices ran: tracks of their own below each rank's threads.
        watermark: Why times of ranks cannot be compared: in the metadata and above all tracks.
        progress: Called after each rank with (ranks written, ranks in all).

    Raises OSError where the file cannot be written.
    """
    with (
        draft_of(path, mode_made_of(spans.path)) as part,
        part.open("wb") as raw,
        _packed(raw, path.suffix) as file,
    ):
        _write(spans, file, devices, watermark, progress)


def _packed(raw: Any, suffix: str) -> Any:
    if suffix == ".gz":
        return gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0)
    return nullcontext(raw)


def _write(
    spans: Spans,
    file: Any,
    devices: DeviceTracks | None,
    watermark: str,
    progress: Callable[[int, int], None] | None,
) -> None:
    other = {**EXPORT, "unix_ns": str(spans.unix_ns), "path": spans.path.name}
    other |= {"clocks": f"{_UNCALIBRATED}: {watermark}"} if watermark else {}
    analyzed = spans if devices else _without_captures(spans)
    counters, waits = CounterTracks(StepTimes(analyzed)), WaitSlices(analyzed)
    flows, left_out = ([], 0) if watermark else waits.flows()
    other |= {"arrows": f"{left_out} shorter waits have none"} if left_out else {}
    file.write(f'{{"displayTimeUnit":"ms","otherData":{encoded(other)},"traceEvents":[\n'.encode())
    names = [encoded(name) for name in spans.names]
    clocks = dict.fromkeys(spans.ranks, _UNCALIBRATED) if watermark else _unsure(spans)
    above = [*_watermark(spans, watermark)] if watermark else []
    above += job_events(analyzed, _pid(max(spans.ranks, default=0) + 2))
    if above:
        file.write(",\n".join([*above, ""]).encode("utf-8", "backslashreplace"))
    comma = b""  # a trailing comma, or an empty event to avoid it, is an error to Perfetto
    for done, rank in enumerate(spans.ranks, start=1):
        host = _rank_events(spans, rank, names, clocks.get(rank, ""), waits)
        values = counters.events(rank, _pid(rank))
        kernels = devices.events(rank, _pid(rank)) if devices else ()
        for part in chain([chain(host, values)], kernels):
            events = ",\n".join(part)
            file.write(comma + events.encode("utf-8", "backslashreplace"))
            comma = b",\n"
        if progress is not None:
            progress(done, len(spans.ranks))
    launches = devices.flow_events(waits.track, len(spans) + 1) if devices else ()
    arrows = () if watermark else sample_arrows(analyzed, waits.track)
    for flow in chain(waits.flow_events(flows), launches, arrows):
        file.write(f",\n{flow}".encode())
    file.write(b"\n]}\n")


def _without_captures(spans: Spans) -> Spans:
    """Leave out the tables of profilers, which can take minutes to read."""
    kept = {"clocks", BACKGROUND_METRICS}
    return replace(spans, tables={k: read for k, read in spans.tables.items() if k in kept})


def _watermark(spans: Spans, text: str) -> Iterator[str]:
    """Yield a track above all ranks, with one slice as long as the run."""
    pid = _pid(max(spans.ranks, default=0) + 1)
    yield about(pid, 0, "process_name", name=f"{_UNCALIBRATED}: {text}")
    yield about(pid, 0, "process_sort_index", sort_index=-2)
    yield about(pid, 1, "thread_name", name="do not compare times of ranks")
    start = int(spans.start_ns.min(initial=0))
    length = int(spans.end_ns.max(initial=0)) - start
    what = f'"pid":{pid},"tid":1,"ts":{micro(start)},"dur":{micro(length)}'
    yield f'{{"ph":"X",{what},"cat":"clocks","name":{encoded(f"{_UNCALIBRATED}: {text}")}}}'


def _unsure(spans: Spans) -> dict[int, str]:
    """Return by rank what stands beside its host, for those that may be off."""
    if "clocks" not in spans.tables:
        return {}
    table = spans.table("clocks")
    told = zip(table.column("rank"), table.column("uncertainty"), strict=True)
    return {
        rank: f"±{unsure / 1e6:.3f} ms"
        for rank, unsure in told
        if isinstance(rank, int) and isinstance(unsure, int) and unsure
    }


def _pid(rank: int) -> int:
    return rank + 1  # 0 would be the idle process of the operating system


def _rank_events(
    spans: Spans, rank: int, names: list[str], clock: str, waits: WaitSlices
) -> Iterator[str]:
    pid, rows = _pid(rank), spans.rows(rank=rank)
    who = ", ".join(filter(None, (spans.headers[rank].host, clock)))
    yield about(pid, 0, "process_name", name=f"rank {rank} ({who})")
    yield about(pid, 0, "process_sort_index", sort_index=rank)
    arguments = _arguments(spans, rows)
    steps, epochs = (rows[spans.kind[rows] == kind] for kind in (_STEP, _EPOCH))
    others = rows[~np.isin(spans.kind[rows], (_STEP, _EPOCH))]
    tid = 0  # counted before use: thread 0 would melt into the process's main thread
    for label, own in [("epochs", epochs), ("steps", steps), *_threads(spans, others)]:
        apart: list[int] = []  # waits that would cut a slice in two
        for number, lane in enumerate(lanes(spans, own), start=1):
            tid += 1
            yield from _named(pid, tid, label if number == 1 else f"{label} ({number})")
            drawn, more = waits.merged(lane, tid)
            apart += more
            slices = _slices(spans, lane, f'"pid":{pid},"tid":{tid}', names, arguments)
            yield from (next(slices) if at >= 0 else waits.slice(at, pid, tid) for at in drawn)
        if apart:
            tid += 1
            yield from _named(pid, tid, f"{label}: waiting")
            yield from (waits.slice(at, pid, tid) for at in apart)


def _named(pid: int, tid: int, title: str) -> Iterator[str]:
    yield about(pid, tid, "thread_name", name=title)
    yield about(pid, tid, "thread_sort_index", sort_index=tid)


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
