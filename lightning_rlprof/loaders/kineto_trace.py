"""One torch.profiler trace as columns: its annotations, its device work, and where they stand."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.attribution import Launches, Stages, stages_at
from lightning_rlprof.loaders.chrome_bytes import Source
from lightning_rlprof.loaders.chrome_events import (
    ANNOTATION,
    DEVICE_ANNOTATION,
    KERNEL,
    LARGEST_TIME,
    LAUNCH,
    MOST_LANES,
    ChromeColumns,
    Event,
)
from lightning_rlprof.loaders.chrome_stream import SIZE, ChromeStream
from lightning_rlprof.loaders.enclosing import innermost
from lightning_rlprof.model import KINDS, STAGES
from lightning_rlprof.spans import Int64s

__all__ = ["REGION", "STAGE", "STEP", "KinetoTrace", "Ranges", "read_trace", "told"]

T = TypeVar("T")

STEP, STAGE, REGION = (KINDS.index(kind) for kind in ("step", "stage", "region"))

_STEP_NAME = re.compile(r"ProfilerStep#(\d{1,15})")
_STEP_FILE = re.compile(r"step-(\d{1,15})")
# Before torch 2.3 times were since 1970, now they are since a quarter of a year began, which has
# 8 * 10**15 nanoseconds. 10**18 was in 2001.
_SINCE_1970 = range(10**18, LARGEST_TIME)


@dataclass(frozen=True, eq=False)
class Ranges:
    """Annotations as columns, by start and of two that begin at once the longer one first.

    Attributes:
        lane: Code of the thread (the stream, on the device).
        process: Code of the process (the device).
        name: Code of the name.
        kind: Index into `lightning_rlprof.model.KINDS`: step, stage or region.
        step: Step that it is or lies in, 0 where none is known.
        start_ns: In the trace's own time.
        end_ns: In the trace's own time.
    """

    lane: Int64s
    process: Int64s
    name: Int64s
    kind: Int64s
    step: Int64s
    start_ns: Int64s
    end_ns: Int64s

    def stages(self, *kinds: int) -> Stages:
        """Return those of some kinds for `stages_at`."""
        rows = np.isin(self.kind, kinds)
        columns = (self.process, self.lane, self.kind, self.name, self.step)
        return Stages(*(each[rows] for each in (*columns, self.start_ns, self.end_ns)))

    def around(self, kinds: tuple[int, ...], lane: Int64s, time_ns: Int64s) -> Int64s:
        """Return the innermost of some kinds around each moment on a lane, -1 where none is."""
        rows = np.flatnonzero(np.isin(self.kind, kinds))
        columns = (self.lane[rows], self.start_ns[rows], self.end_ns[rows])
        return np.append(rows, -1)[innermost(*columns, lane, time_ns)]


@dataclass(frozen=True, eq=False)
class KinetoTrace:
    """What is kept of a trace; times are nanoseconds as the trace counts them.

    Attributes:
        path: The file.
        top: What stands beside the events, by key, as JSON.
        columns: Names, threads and how many events were lost.
        processes: Code of the process of each lane.
        ranges: Annotations of the host.
        shadows: Annotations as the device saw them: around the kernels that they launched.
        kernels: Columns start_ns, end_ns, lane, name, launch, device, stream.
        launches: Columns start_ns, lane, name, launch: calls of the driver.
        problems: What was lost, and how the file ended, where that was not its end.
        complete: Whether it was read to its end.
    """

    path: Path
    top: Mapping[str, msgspec.Raw]
    columns: ChromeColumns
    processes: Int64s
    ranges: Ranges
    shadows: Ranges
    kernels: Mapping[str, Int64s]
    launches: Mapping[str, Int64s]
    problems: list[str]
    complete: bool

    @property
    def file_step(self) -> int:
        """Step that the file's name tells, 0 without, or where the trace itself tells steps."""
        found = _STEP_FILE.match(self.path.name) or _STEP_FILE.match(self.path.parent.name)
        return int(found[1]) if found and STEP not in self.ranges.kind else 0

    @property
    def zero_ns(self) -> int:
        """When the first annotation or kernel began."""
        starts = (self.ranges.start_ns, self.kernels["start_ns"])
        return min((int(each.min()) for each in starts if len(each)), default=0)

    @property
    def unix_ns(self) -> int:
        """Wall-clock time of `zero_ns`; 0 where that is not known."""
        base = told(self.top, "baseTimeNanoseconds", int, 0)
        if 0 < base + self.zero_ns < LARGEST_TIME and base > 0:
            return base + self.zero_ns
        return self.zero_ns if self.zero_ns in _SINCE_1970 else 0


def told(top: Mapping[str, msgspec.Raw], key: str, kind: type[T], otherwise: T) -> T:
    """Return what stands beside the events under a key, if it is of that kind."""
    try:
        return msgspec.json.decode(top[key], type=kind)
    except (KeyError, ValueError):
        return otherwise


def read_trace(path: Path) -> KinetoTrace:
    """Read a trace of torch.profiler: plain, .gz or .zst, complete or cut off.

    Takes about 4 ms per MB of JSON, and memory for the columns: 56 bytes per kernel, 32 per call of
    the driver and per annotation.

    Raises:
        TraceError: It cannot be read or is no Chrome trace.
    """
    columns = ChromeColumns()
    stream = _stream(path, columns)
    pids: dict[Any, int] = {}
    codes = [pids.setdefault(pid, len(pids)) for pid, _ in columns.lanes]
    processes = np.array(codes, np.int64)
    return KinetoTrace(
        path,
        stream.top,
        columns,
        processes,
        _ranges(columns, ANNOTATION, processes),
        _ranges(columns, DEVICE_ANNOTATION, processes),
        columns.rows(KERNEL),
        columns.rows(LAUNCH),
        [*stream.problems, *_losses(stream.lost, columns)],
        stream.complete,
    )


def _stream(path: Path, columns: ChromeColumns) -> ChromeStream[Event]:
    """Read all events into columns."""
    with Source(path) as source:
        stream = ChromeStream(source, msgspec.json.Decoder(list[Event]), SIZE)
        if not stream.open():
            why = f" ({source.problem})" if source.problem else ""
            raise TraceError(f'{path}: is no Chrome trace: it has no array "traceEvents"{why}')
        for batch in stream:
            columns.add(batch)
    return stream


def _losses(broken: int, columns: ChromeColumns) -> list[str]:
    texts = [
        (broken, f"{broken} events are left out: they cannot be read"),
        (columns.lost, f"{columns.lost} events are left out: their times cannot be true"),
        (columns.unpaired, f"{columns.unpaired} events are left out: begin and end stand apart"),
        (columns.crowded, f"of more than {MOST_LANES:,} threads, those beyond are taken as one"),
    ]
    return [text for count, text in texts if count]


def _ranges(columns: ChromeColumns, kind: int, processes: Int64s) -> Ranges:
    rows = columns.rows(kind)
    order = np.lexsort((-rows["end_ns"], rows["start_ns"]))
    lane, name, start, end = (
        rows[column][order] for column in ("lane", "name", "start_ns", "end_ns")
    )
    names = list(columns.names)
    kinds, steps = np.full(len(names), REGION), np.zeros(len(names), np.int64)
    for code in np.unique(name).tolist():
        if names[code] in STAGES:
            kinds[code] = STAGE
        elif found := _STEP_NAME.fullmatch(names[code]):
            kinds[code], steps[code] = STEP, int(found[1])
    alone = Ranges(lane, processes[lane], name, kinds[name], steps[name], start, end)
    around = stages_at(alone.stages(STEP), Launches(alone.process, lane, start)).step
    return replace(alone, step=np.where(alone.kind == STEP, alone.step, around))
