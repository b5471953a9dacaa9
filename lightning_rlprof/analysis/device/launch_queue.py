"""What each rank launched on its devices, and the calls in which its host waited for them."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import (
    COPY,
    NOT_RECORDED,
    device_work,
)
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, differs
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

_PARTS = ("kernel", "communication", "copy")  # by kind of work
_WAITS = re.compile(
    r"synchronize|(?:cuda|hip)(?:Memcpy(?:WithStream)?|Free(?:Host)?)$|aclrtMemcpy$", re.IGNORECASE
)
_DRIVER = "runtime"  # the kind of calls that may wait for a device
_STREAM_WAIT = "stream waits for event"  # of Nsight Systems: the host does not wait in it
_TRAINS = (KINDS.index("step"), KINDS.index("stage"))


class LaunchQueue(NamedTuple):
    """Kernels and copies of one rank as columns of one length, and the calls of its host.

    Attributes:
        start: On the run's time axis, in nanoseconds.
        end: Later than the start.
        stream: Number of its stream, unique over all devices.
        queued: When the call that launched it had returned, or its start if that was earlier. In
            a graph replay, except for its first work: when that call began. `NOT_RECORDED` if the
            launch was not recorded.
        name: Index into ``names``.
        stage: Index into ``stages``, -1 if unknown.
        launch: When that call began, or the start if it was not recorded.
        names: Part (kernel, communication or copy) and name.
        stages: Names of stages.
        waits: Starts and ends of calls in which the host waited, or may have waited, for a device.
        calls: Starts and ends of all calls of the host, and their names as indices.
        call_names: Names of calls.
    """

    start: Int64s
    end: Int64s
    stream: Int64s
    queued: Int64s
    name: Int64s
    stage: Int64s
    launch: Int64s
    names: Sequence[tuple[str, str | None]]
    stages: Sequence[str]
    waits: tuple[Int64s, Int64s]
    calls: tuple[Int64s, Int64s, Int64s]
    call_names: Sequence[str]


class _Calls(NamedTuple):
    """Calls of a rank's host: start, end, code of the name, names, and which of them wait."""

    start: Int64s
    end: Int64s
    code: Int64s
    names: Sequence[str]
    waits: Mask


class _CallTable:
    """A table of host calls by rank and thread.

    Args:
        table: The table.
        named: Its column of names.
        waits: Whether the host waits for a device in a call of some name.
    """

    def __init__(self, table: Table, named: str, waits: Callable[[str], bool]) -> None:
        start = table.numbers("start")
        code, names = table.texts(named)
        waiting = np.array([*map(waits, names), False])[code]
        if named != "kind":
            kind, kinds = table.texts("kind")
            waiting &= np.array([*(each == _DRIVER for each in kinds), False])[kind]
        self._calls = _Calls(start, start + table.numbers("duration"), code, names, waiting)
        there = {column.name for column in table.columns}
        self._thread = table.numbers("thread") if "thread" in there else None
        self._rows = _rows_by_rank(table.numbers("rank"))

    def on(self, rank: int, threads: Sequence[int]) -> _Calls | None:
        """Return the calls of a rank, those of some threads if their threads are known."""
        if rank not in self._rows:
            return None
        rows = self._rows[rank]
        if self._thread is not None and threads:
            there = _distinct(thread := self._thread[rows])
            keep = np.isin(there, threads)[np.searchsorted(there, thread)]
            if keep.any() and not keep.all():
                rows = np.arange(len(self._thread))[rows][keep]
        start, end, code, names, waits = self._calls
        found = _Calls(start[rows], end[rows], code[rows], names, waits[rows])
        return found if len(found.code) else None


def launch_queues(
    spans: Spans, ranks: Collection[int] | None, notes: list[str]
) -> Iterator[tuple[int, LaunchQueue | None]]:
    """Yield each rank that has device work, and what it launched; None without calls of its host.

    Args:
        spans: The run.
        ranks: Only these; None for all.
        notes: A reason is added for each table that could not be read.
    """
    work = device_work(spans, ranks, notes)
    if not work.tables:
        return
    codes, names = work.named
    parts = [_PARTS[kind] for kind in work.name_kinds]
    stage, stages = work.stages()
    columns = {
        name: work.numbers(name)
        for name in ("device", "stream", "start", "launch", "launch duration", "thread", "graph")
    }
    columns |= {"duration": work.duration, "stage": stage}
    columns["name"] = np.where(codes < 0, len(names), codes)
    hosts = []
    if (calls := spans.try_table("calls", notes)) is not None:
        hosts.append(_CallTable(calls, "name", lambda name: _WAITS.search(name) is not None))
    if (waits := spans.try_table("sync", notes)) is not None:  # Nsight Systems and Ascend
        hosts.append(_CallTable(waits, "kind", lambda kind: kind != _STREAM_WAIT))
    for rank, rows in _rows_by_rank(work.rank).items():
        own = {name: column[rows] for name, column in columns.items()}
        some = own["duration"] > 0
        if some.any():
            own = own if some.all() else {name: column[some] for name, column in own.items()}
            threads = _launching_threads(spans, rank, own["thread"])
            found = (host.on(rank, threads) for host in hosts)
            first = next((each for each in found if each is not None), None)
            pairs = [*zip(parts, (*names, None), strict=True)]
            yield rank, None if first is None else _queue(own, first, pairs, stages)


def _queue(
    own: dict[str, Int64s],
    calls: _Calls,
    names: Sequence[tuple[str, str | None]],
    stages: Sequence[str],
) -> LaunchQueue:
    start, launch = own["start"], own["launch"]
    end, known = start + own["duration"], launch != NOT_RECORDED
    returned = launch + np.maximum(own["launch duration"], 0)
    # The host waits for a copy to itself that ends before the call that launched it. Other work
    # can also end before its call does, but the host does not wait for it.
    fetches = [part == _PARTS[COPY] and str(name).endswith("toH") for part, name in names]
    rows = known & np.array(fetches)[own["name"]] & (end <= returned)
    waits = (
        np.append(calls.start[calls.waits], launch[rows]),
        np.append(calls.end[calls.waits], returned[rows]),
    )
    device, stream = (np.searchsorted(_distinct(own[k]), own[k]) for k in ("device", "stream"))
    stream += device * (int(stream.max()) + 1)
    queued = np.where(_after_first_in_replay(own), launch, np.minimum(returned, start))
    return LaunchQueue(
        start,
        end,
        stream,
        np.where(known, queued, NOT_RECORDED),
        own["name"],
        own["stage"],
        np.where(known, launch, start),
        names,
        stages,
        waits,
        (calls.start, calls.end, calls.code),
        calls.names,
    )


def _distinct(values: Int64s) -> Int64s:
    """Return each value once, ascending; quick if equal ones follow one another."""
    return np.unique(values[differs(values)])


def _after_first_in_replay(own: dict[str, Int64s]) -> Mask:
    """Return which rows belong to a graph replay and are not the first one there.

    Copies have no graph number: a copy launched at once with a kernel of a graph belongs to it.
    """
    graph, launch, start = (own[name] for name in ("graph", "launch", "start"))
    order = np.lexsort((start, launch))
    heads = differs(launch[order])
    replays = np.maximum.reduceat((graph != NOT_RECORDED)[order], np.flatnonzero(heads))
    later = np.zeros(len(order), bool)
    later[order] = ~heads & replays[np.cumsum(heads) - 1]
    later &= launch != NOT_RECORDED
    return later


def _rows_by_rank(rank: Int64s) -> dict[int, Any]:
    """Return the rows of each rank: a slice if they are adjacent, as in most tables."""
    order, own, heads = None, rank, np.flatnonzero(differs(rank))
    if (np.diff(rank[heads]) < 0).any():
        order = np.argsort(rank, kind="stable")
        own = rank[order]
        heads = np.flatnonzero(differs(own))
    rows = (slice(*each) for each in pairwise([*heads.tolist(), len(own)]))
    return {int(own[each.start]): each if order is None else order[each] for each in rows}


def _launching_threads(spans: Spans, rank: int, launching: Int64s) -> list[int]:
    """Return the threads that launch device work, have steps or have stages."""
    rows = spans.rows(rank=rank)
    trains = np.unique(spans.thread[rows[np.isin(spans.kind[rows], _TRAINS)]]).tolist()
    known = _distinct(launching[launching != NOT_RECORDED]).tolist()
    return [*known, *(spans.threads[at].ident for at in trains)]
