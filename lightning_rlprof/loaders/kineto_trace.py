"""One torch.profiler trace as columns: its annotations, its device work, and where they stand."""

import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.heap import give_back
from lightning_rlprof.loaders.chrome_bytes import Source
from lightning_rlprof.loaders.chrome_columns import MOST_LANES, ChromeColumns
from lightning_rlprof.loaders.chrome_events import LARGEST_TIME, Event, EventDecoder
from lightning_rlprof.loaders.chrome_kinds import (
    ANNOTATION,
    DEVICE_ANNOTATION,
    EVERY,
    KERNEL,
    LAUNCH,
)
from lightning_rlprof.loaders.chrome_sort import ROWS
from lightning_rlprof.loaders.chrome_stream import SIZE, ChromeStream
from lightning_rlprof.loaders.kineto_ranges import STEP, Ranges, ranges_of
from lightning_rlprof.spans import Int64s

__all__ = ["KinetoTrace", "ident", "read_trace", "told"]

T = TypeVar("T")

_UNREAD = "events are left out: they cannot be read"
_UNTRUE = "events are left out: their times cannot be true"
_UNPAIRED = "events are left out: begin and end stand apart"
_OTHERS = "the names of {} events are taken as one: there are too many"
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
        counts: Events of each kind in the file, kept or not.
        ranges: Annotations of the host.
        shadows: Annotations as the device saw them: around the kernels that they launched.
        problems: What was lost, and how the file ended, where that was not its end.
        complete: Whether it was read to its end.
        version: Size and time of the file when it was read.
    """

    path: Path
    top: Mapping[str, msgspec.Raw]
    columns: ChromeColumns
    counts: Mapping[int, int]
    ranges: Ranges
    shadows: Ranges
    problems: list[str]
    complete: bool
    version: tuple[int, int]
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _more: list[ChromeColumns] = field(default_factory=list)

    def rows(self, *kinds: int) -> list[dict[str, Any]]:
        """Return the columns of some kinds; see `ChromeColumns.rows`.

        Kinds that were not kept are read from the file, all of them at the first time.

        Raises:
            TraceError: The file cannot be read again, or is another one by now.
        """
        self._keep(kinds)
        return [self._of(kind).rows(kind) for kind in kinds]

    def parts(self, kind: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield the columns of one kind, some rows at a time; raises as `rows` does."""
        self._keep((kind,))
        return self._of(kind).grown(kind).parts(ROWS)

    def types(self, kind: int) -> Mapping[str, type[np.generic]]:
        """Return the types of the columns of one kind; raises as `rows` does."""
        self._keep((kind,))
        return self._of(kind).grown(kind).types

    def count(self, kind: int) -> int:
        """Return the number of rows of one kind; raises as `rows` does."""
        self._keep((kind,))
        return len(self._of(kind).grown(kind))

    def _keep(self, kinds: tuple[int, ...]) -> None:
        with self._turn:
            if not self.columns.wanted.issuperset(kinds) and not self._more:
                if _version(self.path) != self.version:
                    raise TraceError(f"{self.path}: has changed since it was read; load it again")
                rest = ChromeColumns(EVERY - self.columns.wanted, self.columns)
                _stream(self.path, rest)
                self._more.append(rest)

    def losses(self, *kinds: int) -> list[str]:
        """Say how many events of some kinds are left out, and why; they have been read."""
        texts = _counted(
            (sum(self._of(kind).unread[kind] for kind in kinds), _UNREAD),
            (sum(self._of(kind).lost[kind] for kind in kinds), _UNTRUE),
            (sum(self._of(kind).unpaired[kind] for kind in kinds), _UNPAIRED),
        )
        merged = self.columns.names.merged
        return [*texts, *([_OTHERS.format(merged)] if merged else [])]

    def _of(self, kind: int) -> ChromeColumns:
        return self.columns if kind in self.columns.wanted else self._more[0]

    @property
    def processes(self) -> Int64s:
        """Code of the process of each lane."""
        pids: dict[Any, int] = {}
        codes = [pids.setdefault(pid, len(pids)) for pid, _ in self.columns.lanes]
        return np.array(codes, np.int64)

    @property
    def idents(self) -> Int64s:
        """Identity of the thread of each lane, wrapped to 64 bits."""
        lanes = enumerate(tid for _, tid in self.columns.lanes)
        return np.array([(ident(tid, lane) + 2**63) % 2**64 - 2**63 for lane, tid in lanes])

    @property
    def file_step(self) -> int:
        """Step that the file's name tells, 0 without, or where the trace itself tells steps."""
        found = _STEP_FILE.match(self.path.name) or _STEP_FILE.match(self.path.parent.name)
        return int(found[1]) if found and STEP not in self.ranges.kind else 0

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
        TraceError: It cannot be read or is no Chrome trace.
    """
    version = _version(path)
    columns = ChromeColumns(EVERY if every else _FIRST)
    stream = _stream(path, columns)
    pids: dict[Any, int] = {}
    processes = np.array([pids.setdefault(pid, len(pids)) for pid, _ in columns.lanes], np.int64)
    trace = KinetoTrace(
        path,
        stream.top,
        columns,
        dict(columns.counts),
        ranges_of(columns, ANNOTATION, processes),
        ranges_of(columns, DEVICE_ANNOTATION, processes),
        list(stream.problems),
        stream.complete,
        version,
    )
    trace.problems.extend(_losses(stream.lost, trace))
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
            raise TraceError(f'{path}: is no Chrome trace: it has no array "traceEvents"{why}')
        for batch in stream:
            columns.add(batch)
    columns.end()
    give_back()
    return stream


def _losses(broken: int, trace: KinetoTrace) -> list[str]:
    columns = trace.columns
    unread, lost = sum(columns.unread.values()), sum(columns.lost.values())
    texts = _counted(
        (broken + unread, _UNREAD),
        (lost, _UNTRUE),
        (sum(columns.unpaired.values()), _UNPAIRED),
    )
    if columns.lanes.merged:
        texts.append(f"of more than {MOST_LANES:,} threads, those beyond are taken as one")
    if columns.names.merged:
        texts.append(_OTHERS.format(columns.names.merged))
    return texts


def _counted(*texts: tuple[int, str]) -> list[str]:
    return [f"{count} {text}" for count, text in texts if count]
