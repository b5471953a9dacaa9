"""Read one torch.profiler trace into columns: annotations, kernels, launches, and the rest later.

torch.profiler records annotations of the host, and their shadows on the device. The stage, step and
range of a kernel are those around its launch.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import NOT_JSON, TraceError
from lightning_rlprof.loaders.chrome_events import (
    LARGEST_TIME,
    MISSING,
    SIZE,
    ChromeStream,
    Event,
    EventDecoder,
    Source,
)
from lightning_rlprof.loaders.host_calls import NOWHERE, Launches, Stages, stages_at
from lightning_rlprof.loaders.kineto.event_kinds import (
    ANNOTATION,
    DEVICE_ANNOTATION,
    EVERY,
    KERNEL,
    LAUNCH,
    MOST_LANES,
    ChromeColumns,
)
from lightning_rlprof.loaders.rank_names import labels_of_verl
from lightning_rlprof.loaders.spill import ROWS, Columns, Grown, beside, in_order
from lightning_rlprof.records.records import KINDS, STAGES
from lightning_rlprof.system.process import give_back
from lightning_rlprof.tables.arrays import Int64s, group_sizes, group_starts
from lightning_rlprof.tables.kernels import UNKNOWN
from lightning_rlprof.tables.table import Cut, Loss

STEP, STAGE, REGION = (KINDS.index(kind) for kind in ("step", "stage", "region"))
"""Codes of the kinds of an annotation."""

_STEP_NAME = re.compile(r"ProfilerStep#(\d{1,15})")
_GRAPH = "GraphLaunch"  # cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch
_PLACED: dict[str, type[np.generic]] = {
    **dict.fromkeys(("stage", "range"), np.int32),
    **dict.fromkeys(("step", "launch_ns", "call_ns", "thread", "graph"), np.int64),
}
_CALL = {"launch_ns": UNKNOWN, "call_ns": UNKNOWN, "caller": NOWHERE, "replay": 0}


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
        return [
            f"{count} {text}" if text == _OTHERS else Loss(f"{count} {text}")
            for count, text in texts
            if count
        ]

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
        trace.problems[0] = Cut(f"{trace.problems[0]} (no kernel was read)")
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


def place(trace: KinetoTrace, work: Grown, what: str) -> tuple[Grown, list[str]]:
    """Find the call of each piece of device work, and the stage, step and range of that.

    These are those around the call on its thread. A thread without marks borrows from the training
    thread. Without a call, they are those that the device recorded around the kernel.

    Args:
        trace: The trace.
        work: Kernels or copies in any order; start_ns, lane and launch are among the columns.
        what: What remarks call them.

    Returns:
        The work by start, and how many rows have missing (`UNKNOWN`) or uncertain values. It has
        more columns. stage and range are codes of names, of the innermost range in the latter, -1
        without. step is 0 without; of a file without steps, the one in its name. launch_ns counts
        from `KinetoTrace.zero_ns`, call_ns is the length of the call, thread the caller's identity.
        graph is the number of the CUDA graph replay, from 1 by time.
    """
    ordered = Grown(work.types)
    asked = Grown(dict.fromkeys(("launch", "start_ns", "row"), np.int64))
    for block in in_order(work.parts(), "start_ns"):
        told = np.flatnonzero(block["launch"] != MISSING)
        own = {name: block[name][told] for name in ("launch", "start_ns")}
        asked.add({**own, "row": told + len(ordered)})
        ordered.add(block)
    rows, missing, lent, inside = Grown({**work.types, **_PLACED}), 0, 0, 0
    replays: set[int] = set()
    marks = _Marks(trace)
    for part in beside(ordered, in_order(_calls_of(trace, asked), "row"), _CALL):
        missing += int(np.count_nonzero(part["caller"] == NOWHERE))
        lent += marks.place(part)
        replayed = part["graph"][part["graph"] != UNKNOWN]
        inside += len(replayed)
        replays.update(np.unique(replayed).tolist())
        rows.add({name: part[name] for name in rows.types})
    texts = (
        (missing, "have no recorded launch: their stage may be unknown"),
        (
            lent,
            "were launched by threads without marks, such as autograd's: they belong to the stage "
            "of the training thread",
        ),
        (inside, f"ran in {len(replays)} CUDA graph replays: idle time inside a replay is unknown"),
    )
    return rows, [f"{count} {what} {text}" for count, text in texts if count]


def _calls_of(trace: KinetoTrace, asked: Grown) -> Iterator[Columns]:
    """Yield the calls of the driver beside the rows of the work that has their number, too.

    Traces of several processes may be merged in one file, and use a number twice; then it is the
    last call before the work.
    """
    nothing = {"call_ns": 0, "caller": 0, "replay": 0}
    work = (
        {**part, **{name: np.full(len(part["row"]), each) for name, each in nothing.items()}}
        for part in asked.parts()
    )
    calls = _calls(trace)
    if len(asked) <= ROWS:
        known = np.unique(asked.rows()["launch"])
        calls = (_only(part, np.isin(part["launch"], known)) for part in calls)
    for block in in_order(chain(calls, work), "launch", "start_ns", "row", whole=1):
        called, at = block["row"] < 0, np.arange(len(block["row"]))
        first = group_starts(block["launch"])
        sizes = group_sizes(first, len(at))
        last = np.maximum.accumulate(np.where(called, at, -1))
        early = np.minimum.reduceat(np.where(called, at, len(at)), first)
        call = np.where(last >= np.repeat(first, sizes), last, np.repeat(early, sizes))
        own = np.flatnonzero(~called & (call < len(at)))
        call = call[own]
        told = {name: block[name][call] for name in nothing}
        began = block["start_ns"][call] - trace.zero_ns
        yield {"row": block["row"][own], "launch_ns": began, **told}


def _calls(trace: KinetoTrace) -> Iterator[Columns]:
    """Yield the calls of the driver that have a number; row is -1."""
    launches = trace.grown(LAUNCH)  # before the names: they may be read with it
    names = list(trace.columns.names)
    graphs = np.array([_GRAPH in name for name in names] or [False])
    starts = [part["start_ns"][graphs[part["name"]]] for part in launches.parts()]
    by_time = np.argsort(np.concatenate([*starts, np.empty(0, np.int64)]), kind="stable")
    replay = np.empty(len(by_time), np.int64)
    replay[by_time] = np.arange(1, len(by_time) + 1)
    for part in launches.parts():
        own = graphs[part["name"]]
        number = np.zeros(len(own), np.int64)
        number[own], replay = replay[: (count := np.count_nonzero(own))], replay[count:]
        columns = {
            "launch": part["launch"],
            "start_ns": part["start_ns"],
            "row": np.full(len(own), -1),
            "call_ns": part["end_ns"] - part["start_ns"],
            "caller": part["lane"].astype(np.int64),
            "replay": number,
        }
        yield _only(columns, part["launch"] != MISSING)


def _only(rows: Columns, own: npt.NDArray[np.bool_]) -> Columns:
    return {name: column[own] for name, column in rows.items()}


class _Marks:
    """What a trace marks, made ready to be asked."""

    def __init__(self, trace: KinetoTrace) -> None:
        self._trace = trace
        self._stages, self._inner = trace.ranges.marking, trace.ranges.only(STAGE, REGION)
        kinds = ((STAGE,), (STEP,), (STAGE, REGION))
        self._shadows = [trace.shadows.only(*each) for each in kinds]

    def place(self, work: dict[str, npt.NDArray[Any]]) -> int:
        """Add what each call lay in; returns for how many another thread told it."""
        trace, lane = self._trace, work["caller"]
        lost = lane == NOWHERE
        began = np.where(lost, UNKNOWN, work["launch_ns"] + trace.zero_ns)
        launches = Launches(np.append(trace.columns.processes, NOWHERE)[lane], lane, began)
        found = stages_at(self._stages, launches)
        inner = self._inner.name_around(launches, found)
        on_device = np.where(lost, work["lane"], NOWHERE), work["start_ns"]
        stages, steps, ranges = self._shadows
        step = np.where(lost, steps.step_at(*on_device), found.step)
        work |= {
            "stage": np.where(lost, stages.name_at(*on_device), found.stage),
            "range": np.where(lost, ranges.name_at(*on_device), inner),
            "step": np.where(step > 0, step, trace.file_step),
            "thread": np.append(trace.idents, UNKNOWN)[lane],
            "graph": np.where(work["replay"] > 0, work["replay"], UNKNOWN),
        }
        return int(np.count_nonzero(found.lent))
