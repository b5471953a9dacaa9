"""What each rank launched on its devices, and the calls in which its host waited for them."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.device.work import (
    COPY,
    NOT_RECORDED,
    device_work,
    optional_numbers,
)
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, differs, group_starts
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

_PARTS = ("kernel", "communication", "copy")  # by kind of work
_WAITS = re.compile(
    r"synchronize|(?:cuda|hip)(?:Memcpy(?:WithStream)?|Free(?:Host)?)$|aclrtMemcpy$", re.IGNORECASE
)
_DRIVER = "runtime"  # the kind of calls that may wait for a device
_STREAM_WAIT = "stream waits for event"  # of Nsight Systems: the host does not wait in it
_TRAINS = (KINDS.index("step"), KINDS.index("stage"))
_READ = ("device", "stream", "start", "launch", "launch duration", "thread", "graph")


class HostCalls(NamedTuple):
    """Calls of a host: ``name`` is an index into ``names``, ``waits`` those that wait for a device.

    They wait by their names; whether the device was busy is not known.
    """

    start: Int64s
    end: Int64s
    name: Int64s
    waits: Mask
    names: Sequence[str]


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
        calls: All calls of the host.
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
    calls: HostCalls


class _CallTable:
    """The host calls of a table, by rank and thread.

    Args:
        table: The table.
        named: Its column of names.
        waits: Whether the host waits for a device in a call of some name.
    """

    def __init__(self, table: Table, named: str, waits: Callable[[str], bool]) -> None:
        start, (name, names) = table.numbers("start"), table.texts(named)
        waiting = np.array([*map(waits, names), False])[name]
        if named != "kind":
            kind, kinds = table.texts("kind")
            waiting &= np.array([*(each == _DRIVER for each in kinds), False])[kind]
        self._calls = HostCalls(start, start + table.numbers("duration"), name, waiting, names)
        self._thread = optional_numbers(table, "thread")
        self._rows = _rows_by_rank(table.numbers("rank"))

    def on(self, rank: int, threads: Sequence[int]) -> HostCalls | None:
        """Return the calls of a rank, those of some threads if their threads are known."""
        if rank not in self._rows:
            return None
        rows = self._rows[rank]
        on_threads = np.isin(self._thread[rows], threads)
        if on_threads.any():
            rows = rows[on_threads]
        start, end, name, waits, names = self._calls
        return HostCalls(start[rows], end[rows], name[rows], waits[rows], names)


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
    codes, texts = work.named
    parts = (_PARTS[kind] for kind in work.name_kinds.tolist())
    names = [*zip(parts, (*texts, None), strict=True)]
    stage, stages = work.stages()
    columns = {name: work.numbers(name) for name in _READ}
    columns |= {"duration": work.duration, "stage": stage}
    columns["name"] = np.where(codes < 0, len(texts), codes)
    hosts = []
    if (calls := spans.try_table("calls", notes)) is not None:
        hosts.append(_CallTable(calls, "name", lambda name: _WAITS.search(name) is not None))
    if (waits := spans.try_table("sync", notes)) is not None:  # Nsight Systems and Ascend
        hosts.append(_CallTable(waits, "kind", lambda kind: kind != _STREAM_WAIT))
    some = np.flatnonzero(work.duration)
    for rank, rows in _rows_by_rank(work.rank[some]).items():
        own = {name: column[some[rows]] for name, column in columns.items()}
        threads = _launching_threads(spans, rank, own["thread"])
        found = next(filter(None, (host.on(rank, threads) for host in hosts)), None)
        yield rank, None if found is None else _queue(own, found, names, stages)


def _queue(
    own: dict[str, Int64s],
    calls: HostCalls,
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
    device, stream = (np.unique(own[name], return_inverse=True)[1] for name in ("device", "stream"))
    queued = np.where(_after_first_in_replay(own), launch, np.minimum(returned, start))
    return LaunchQueue(
        start,
        end,
        stream + device * (int(stream.max()) + 1),
        np.where(known, queued, NOT_RECORDED),
        own["name"],
        own["stage"],
        np.where(known, launch, start),
        names,
        stages,
        waits,
        calls,
    )


def _after_first_in_replay(own: dict[str, Int64s]) -> Mask:
    """Return which rows belong to a graph replay and are not the first one there.

    Copies have no graph number: a copy launched at once with a kernel of a graph belongs to it.
    """
    graph, launch, start = (own[name] for name in ("graph", "launch", "start"))
    order = np.lexsort((start, launch))
    is_first = differs(launch[order])
    replays = np.maximum.reduceat((graph != NOT_RECORDED)[order], np.flatnonzero(is_first))
    later = np.zeros(len(order), bool)
    later[order] = ~is_first & replays[np.cumsum(is_first) - 1]
    later &= launch != NOT_RECORDED
    return later


def _rows_by_rank(rank: Int64s) -> dict[int, Int64s]:
    order = np.argsort(rank, kind="stable")
    starts = group_starts(rank[order])
    return dict(zip(rank[order[starts]].tolist(), np.split(order, starts[1:]), strict=False))


def _launching_threads(spans: Spans, rank: int, launching: Int64s) -> list[int]:
    """Return the threads that launch device work, have steps or have stages."""
    rows = spans.rows(rank=rank)
    trains = np.unique(spans.thread[rows[np.isin(spans.kind[rows], _TRAINS)]]).tolist()
    known = np.unique(launching[launching != NOT_RECORDED]).tolist()
    return [*known, *(spans.threads[at].ident for at in trains)]
