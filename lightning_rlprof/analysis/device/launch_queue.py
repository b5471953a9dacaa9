"""Device work by stream with its launches, and what the host did meanwhile, rank by rank."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.time_categories import Category, kernel_categories
from lightning_rlprof.records.records import KINDS, copy_name
from lightning_rlprof.tables.arrays import Int64s, differs
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

UNKNOWN = -(2**63)
"""Stands for a number that is not known."""

_KERNEL, _COMMUNICATION, _COPY = "kernel", "communication", "copy"
_WAITS = re.compile(
    r"synchronize|(?:cuda|hip)(?:Memcpy(?:WithStream)?|Free(?:Host)?)$|aclrtMemcpy$", re.IGNORECASE
)
_DRIVER = "runtime"  # the kind of call that may wait; others are called as they like
_ON_DEVICE = "stream waits for event"  # of nsys: no host waits in it
_NUMBERS = ("rank", "device", "stream", "start", "duration")
_LAUNCHED = ("launch", "launch duration", "thread", "graph")
_TRAINS = (KINDS.index("step"), KINDS.index("stage"))


class Queue(NamedTuple):
    """Kernels and copies of one rank as columns of one length, with what two of them are codes of.

    Attributes:
        start: On the run's axis, in nanoseconds.
        end: Later than the start.
        stream: Number of its stream, on any device.
        handed: When the call that launched it was over, or it began if that was before; of a
            replay of a graph, but for what begins first, when that call began. `UNKNOWN` where it
            was not recorded.
        name: Index into ``names``.
        stage: Index into ``stages``, -1 where none is known.
        launch: When that call began, or the work itself where that was not recorded.
        names: A part and a name each: kernel, communication or copy, and which.
        stages: Names of stages.
        waits: Where calls began and ended in which the host waited for the device, or may have.
        calls: Where all calls of the host began and ended, and their names as indices.
        called: Names of calls.
    """

    start: Int64s
    end: Int64s
    stream: Int64s
    handed: Int64s
    name: Int64s
    stage: Int64s
    launch: Int64s
    names: Sequence[tuple[str, str | None]]
    stages: Sequence[str]
    waits: tuple[Int64s, Int64s]
    calls: tuple[Int64s, Int64s, Int64s]
    called: Sequence[str]


class _Host(NamedTuple):
    """Calls of a rank: begin, end, code of the name, names, and which of them wait."""

    begun: Int64s
    over: Int64s
    code: Int64s
    called: Sequence[str]
    waiting: npt.NDArray[np.bool_]


class _Calls:
    """A table of calls by rank and thread."""

    def __init__(self, table: Table, named: str, waits: Callable[[str], bool]) -> None:
        self._start = table.numbers("start")
        self._end = self._start + table.numbers("duration")
        self._code, self._names = table.texts(named)
        self._waits = np.array([*map(waits, self._names), False])[self._code]
        there = {column.name for column in table.columns}
        self._thread = table.numbers("thread") if "thread" in there else None
        if named != "kind":
            kind, kinds = table.texts("kind")
            self._waits &= np.array([*(each == _DRIVER for each in kinds), False])[kind]
        self._rows = _by_rank(table.numbers("rank"))

    def of(self, rank: int, threads: Sequence[int]) -> _Host | None:
        """Return the calls of some threads of a rank, of all where no thread is told."""
        if rank not in self._rows:
            return None
        rows = self._rows[rank]
        if self._thread is not None and threads:
            there = _distinct(thread := self._thread[rows])
            keep = np.isin(there, threads)[np.searchsorted(there, thread)]
            if keep.any() and not keep.all():  # threads that are not told are not these
                rows = np.arange(len(self._start))[rows][keep]
        host = _Host(
            self._start[rows], self._end[rows], self._code[rows], self._names, self._waits[rows]
        )
        return host if len(host.code) else None


def queues(
    spans: Spans, ranks: Collection[int] | None, remarks: list[str]
) -> Iterator[tuple[int, Queue | None]]:
    """Yield what each rank's devices ran; None instead where no calls of its host were recorded.

    Args:
        spans: The run.
        ranks: Only these; None for all.
        remarks: What could not be read is added.
    """
    names: dict[tuple[str, str | None], int] = {}
    stages: dict[str, int] = {}
    parts = []
    for table_name, column in (("kernels", "kernel"), ("memcpy", "kind")):
        table = spans.try_table(table_name, remarks)
        if table is not None:
            parts.append(_columns(table, column, names, stages))
    if not parts:
        return
    work = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    hosts = [_calls(spans.try_table("calls", remarks)), _waits(spans.try_table("sync", remarks))]
    for rank, rows in _by_rank(work["rank"]).items():
        own = {name: column[rows] for name, column in work.items()}
        some = own["duration"] > 0
        if some.any() and (ranks is None or rank in ranks):
            own = own if some.all() else {name: column[some] for name, column in own.items()}
            threads = _threads(spans, rank, own["thread"])
            found = (host.of(rank, threads) for host in hosts if host is not None)
            first = next((each for each in found if each is not None), None)
            yield rank, None if first is None else _queue(own, first, [*names], [*stages])


def _queue(
    own: dict[str, Int64s],
    host: "_Host",
    names: Sequence[tuple[str, str | None]],
    stages: list[str],
) -> Queue:
    begun, over, code, called, waiting = host
    start, launch = own["start"], own["launch"]
    end, told = start + own["duration"], launch != UNKNOWN
    returned = launch + np.maximum(own["launch duration"], 0)
    # Copies to the host that end before the call that launched them: it has waited for them. All
    # else may end before its call does, and nobody waits for it.
    fetches = [part == _COPY and str(name).endswith("toH") for part, name in names]
    rows = told & np.array(fetches)[own["name"]] & (end <= returned)
    waits = (
        np.append(begun[waiting], launch[rows]),
        np.append(over[waiting], returned[rows]),
    )
    device, stream = (_codes(own[name]) for name in ("device", "stream"))
    stream += device * (int(stream.max()) + 1)
    handed = np.where(_replayed(own), launch, np.minimum(returned, start))
    columns = (start, end, stream, np.where(told, handed, UNKNOWN), own["name"], own["stage"])
    begin = np.where(told, launch, start)
    return Queue(*columns, begin, names, stages, waits, (begun, over, code), called)


def _codes(values: Int64s) -> Int64s:
    return np.searchsorted(_distinct(values), values)


def _distinct(values: Int64s) -> Int64s:
    """Return each value once, ascending; quick where equal ones follow one another."""
    return np.unique(values[differs(values)])


def _replayed(own: dict[str, Int64s]) -> npt.NDArray[np.bool_]:
    """Tell of each piece whether it is in a replay of a graph, and not the first one there.

    Copies tell no graph: what was launched at once with a kernel of one is in it, too.
    """
    graph, launch, start = (own[name] for name in ("graph", "launch", "start"))
    order = np.lexsort((start, launch))
    heads = differs(launch[order])
    replays = np.maximum.reduceat((graph != UNKNOWN)[order], np.flatnonzero(heads))
    later = np.zeros(len(order), bool)
    later[order] = ~heads & replays[np.cumsum(heads) - 1]
    later &= launch != UNKNOWN
    return later


def _columns(
    table: Table, named: str, names: dict[Any, int], stages: dict[str, int]
) -> dict[str, Int64s]:
    there = {column.name for column in table.columns}
    nothing = np.full(len(table.rows), UNKNOWN)
    found = {
        name: table.numbers(name, UNKNOWN) if name in there else nothing
        for name in (*_NUMBERS, *_LAUNCHED)
    }
    code, own = table.texts(named)
    if named == "kernel":
        labels = kernel_categories(own)
        parts = [_KERNEL if label == Category.COMPUTE else _COMMUNICATION for label in labels]
        keys = [*zip(parts, own, strict=True), (_KERNEL, None)]
    else:
        keys = [(_COPY, copy_name(text)) for text in (*own, None)]
    places = [names.setdefault(key, len(names)) for key in keys]
    found["name"] = np.array(places, np.int64)[code]
    stage, own = table.texts("stage")
    codes = [stages.setdefault(text, len(stages)) for text in own]
    found["stage"] = np.array([*codes, -1], np.int64)[stage]
    return found


def _by_rank(rank: Int64s) -> dict[int, Any]:
    """Return the rows of each rank: a slice where they lie together, as they do in most tables."""
    order, own, heads = None, rank, np.flatnonzero(differs(rank))
    if (np.diff(rank[heads]) < 0).any():
        order = np.argsort(rank, kind="stable")
        own = rank[order]
        heads = np.flatnonzero(differs(own))
    ends = [*heads.tolist(), len(own)]
    rows = (slice(*each) for each in pairwise(ends))
    return {int(own[each.start]): each if order is None else order[each] for each in rows}


def _threads(spans: Spans, rank: int, launching: Int64s) -> list[int]:
    """Return the threads that launch work or train."""
    rows = spans.rows(rank=rank)
    trains = np.unique(spans.thread[rows[np.isin(spans.kind[rows], _TRAINS)]]).tolist()
    known = _distinct(launching[launching != UNKNOWN]).tolist()
    return [*known, *(spans.threads[at].ident for at in trains)]


def _calls(table: Table | None) -> _Calls | None:
    """Return the calls of a host, of which some wait."""
    waits = _WAITS.search
    return None if table is None else _Calls(table, "name", lambda name: waits(name) is not None)


def _waits(table: Table | None) -> _Calls | None:
    """Return the waits of a host, which is all that Nsight Systems and Ascend tell."""
    return None if table is None else _Calls(table, "kind", lambda kind: kind != _ON_DEVICE)
