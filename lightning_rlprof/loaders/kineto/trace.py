"""Read one torch.profiler trace into columns: annotations, kernels, launches, and the rest later.

torch.profiler records annotations of the host, and their shadows on the device.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.chrome.byte_source import Source
from lightning_rlprof.loaders.chrome.decoding import LARGEST_TIME, Event, EventDecoder
from lightning_rlprof.loaders.chrome.event_stream import SIZE, ChromeStream
from lightning_rlprof.loaders.chrome.spill import Grown
from lightning_rlprof.loaders.kineto.event_columns import MOST_LANES, ChromeColumns
from lightning_rlprof.loaders.kineto.event_kinds import (
    ANNOTATION,
    DEVICE_ANNOTATION,
    EVERY,
    KERNEL,
    LAUNCH,
)
from lightning_rlprof.loaders.rank_names import labels_of_verl
from lightning_rlprof.loaders.stage_attribution import Launches, Stages, stages_at
from lightning_rlprof.records.records import KINDS, STAGES
from lightning_rlprof.system.process import give_back
from lightning_rlprof.tables.arrays import Int64s

STEP, STAGE, REGION = (KINDS.index(kind) for kind in ("step", "stage", "region"))
"""Codes of the kinds of an annotation."""

_STEP_NAME = re.compile(r"ProfilerStep#(\d{1,15})")


def _read_ranges(columns: ChromeColumns, kind: int) -> Stages:
    """Return the annotations of one kind by start, and of two that begin at once the longer first.

    Their threads and processes are codes of lanes (streams, on the device) and of pids. The step
    is the one that it is or lies in, 0 where none is known.
    """
    rows = columns.grown(kind).rows()
    order = np.lexsort((-rows["end_ns"], rows["start_ns"]))
    lane, name, start, end = (
        rows[column][order] for column in ("lane", "name", "start_ns", "end_ns")
    )
    names = list(columns.names)
    kinds, steps = np.full(len(names), REGION, np.int8), np.zeros(len(names), np.int64)
    for code in np.unique(name).tolist():
        if names[code] in STAGES:
            kinds[code] = STAGE
        elif found := _STEP_NAME.fullmatch(names[code]):
            kinds[code], steps[code] = STEP, int(found[1])
    process = columns.processes[lane]
    ranges = Stages(process, lane, kinds[name], name, steps[name], start, end)
    around = stages_at(ranges.only(STEP), Launches(process, lane, start)).step
    return replace(ranges, step=np.where(ranges.kind == STEP, ranges.step, around))


T = TypeVar("T")

_UNREAD = "events are left out: they cannot be read"
_UNTRUE = "events are left out: their times are out of range"
_OTHERS = "events share one name: the trace has too many different names"
_FIRST = frozenset({KERNEL, LAUNCH, ANNOTATION, DEVICE_ANNOTATION})
_STEP_FILE = re.compile(r"step-(\d{1,15})")
# Before torch 2.3 times were since 1970, now they are since a quarter of a year began, which has
# 8 * 10**15 nanoseconds. 10**18 was in 2001.
_SINCE_1970 = range(10**18, LARGEST_TIME)


@dataclass(frozen=True, eq=False)
class KinetoTrace:
    """What is kept of a trace; times are nanoseconds as the trace counts them.

    Attributes:
        path: The file.
        top: What stands beside the events, by key, as JSON.
        columns: Names, threads, and what the events became.
        ranges: Annotations of the host.
        shadows: Annotations as the device saw them: around the kernels that they launched.
        problems: What was lost, and how the file ended, where that was not its end.
        complete: Whether it was read to its end.
        version: Size and time of the file when it was read.
    """

    path: Path
    top: Mapping[str, msgspec.Raw]
    columns: ChromeColumns
    ranges: Stages
    shadows: Stages
    problems: list[str]
    complete: bool
    version: tuple[int, int]
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _more: list[ChromeColumns] = field(default_factory=list)

    def grown(self, kind: int) -> Grown:
        """Return the columns of one kind; all kinds that were not kept are read at the first time.

        Raises:
            TraceError: The file cannot be read again, or is another one by now.
        """
        with self._turn:
            if kind not in self.columns.wanted and not self._more:
                if _version(self.path) != self.version:
                    raise TraceError(f"{self.path}: changed since it was loaded; load it again")
                rest = ChromeColumns(EVERY - self.columns.wanted, self.columns)
                _stream(self.path, rest)
                self._more.append(rest)
        return self._of(kind).grown(kind)

    def losses(self, *kinds: int, more: int = 0) -> list[str]:
        """Say how many events of some kinds are left out, and why, as far as they were read."""
        texts = (
            (more + sum(self._of(kind).unread[kind] for kind in kinds), _UNREAD),
            (sum(self._of(kind).lost[kind] for kind in kinds), _UNTRUE),
            (self.columns.names.merged, _OTHERS),
        )
        return [f"{count} {text}" for count, text in texts if count]

    def _of(self, kind: int) -> ChromeColumns:
        return self.columns if kind in self.columns.wanted or not self._more else self._more[0]

    @property
    def idents(self) -> Int64s:
        """Identity of the thread of each lane, wrapped to 64 bits."""
        lanes = enumerate(tid for _, tid in self.columns.lanes)
        return np.array([(ident(tid, lane) + 2**63) % 2**64 - 2**63 for lane, tid in lanes])

    @property
    def file_step(self) -> int:
        """Step that the file's name tells, 0 without, or where the trace itself tells steps."""
        if STEP in self.ranges.kind:
            return 0
        found = _STEP_FILE.match(self.path.name) or _STEP_FILE.match(self.path.parent.name)
        return int(found[1]) if found else labels_of_verl(self.path.name)[1]

    @property
    def zero_ns(self) -> int:
        """When the first annotation or kernel began."""
        first = self.columns.first_ns
        return min((first[kind] for kind in (ANNOTATION, KERNEL) if kind in first), default=0)

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
    except (KeyError, *NOT_JSON):
        return otherwise


def ident(tid: Any, lane: int) -> int:
    """Return the identity of a thread, one of our own where a text stands for its number."""
    return tid if isinstance(tid, int) else -1 - lane


def read_trace(path: Path, *, every: bool = False) -> KinetoTrace:
    """Read a trace of torch.profiler: plain, .gz or .zst, complete or cut off.

    Takes 2 to 3 ms per MB, twice that with ``every``; columns beyond 4 MB lie in a temporary file.

    Args:
        path: The file.
        every: Keep what any table needs; else kernels, launches and annotations, the rest later.

    Raises:
        TraceError: It cannot be read or is not a Chrome trace.
    """
    version = _version(path)
    columns = ChromeColumns(EVERY if every else _FIRST)
    stream = _stream(path, columns)
    trace = KinetoTrace(
        path,
        stream.top,
        columns,
        _read_ranges(columns, ANNOTATION),
        _read_ranges(columns, DEVICE_ANNOTATION),
        list(stream.problems),
        stream.complete,
        version,
    )
    if stream.truncated and not columns.counts[KERNEL]:
        trace.problems[0] += " (no kernel was read)"
    trace.problems.extend(trace.losses(*EVERY, more=stream.lost))
    if columns.lanes.merged:
        text = f"of more than {MOST_LANES:,} threads, the rest are counted as one thread"
        trace.problems.append(text)
    return trace


def _version(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    return found.st_size, found.st_mtime_ns


def _stream(path: Path, columns: ChromeColumns) -> ChromeStream[Event]:
    """Read all events into columns."""
    with Source(path) as source:
        stream = ChromeStream(source, EventDecoder(), SIZE)
        if not stream.open():
            why = f" ({source.problem})" if source.problem else ""
            raise TraceError(f'{path}: not a Chrome trace, no array "traceEvents"{why}')
        for batch in stream:
            columns.add(batch)
    give_back()
    return stream
