"""Device work by stream with its launches, and what the host did meanwhile, rank by rank."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.analysis.labels import Label, kernel_labels
from lightning_rlprof.analysis.sweep import differs
from lightning_rlprof.model import KINDS, copy_name
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Table

__all__ = ["UNKNOWN", "Queue", "queues"]

UNKNOWN = -(2**63)
"""Stands for a number that is not known."""

_KERNEL, _COMMUNICATION, _COPY = "kernel", "communication", "copy"
_WAITS = re.compile(r"synchronize|(?:cuda|hip)Memcpy(?:WithStream)?$", re.IGNORECASE)
_ON_DEVICE = "stream waits for event"  # of nsys: no host waits in it
_NUMBERS = ("rank", "device", "stream", "start", "duration")
_LAUNCHED = ("launch", "launch duration", "thread", "graph")
_Host = tuple[Int64s, Int64s, Int64s, Sequence[str], npt.NDArray[np.bool_]]
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
        table = read(spans, table_name, remarks)
        if table is not None:
            parts.append(_columns(table, column, names, stages))
    if not parts:
        return
    work = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    calls, syncs = read(spans, "calls", remarks), read(spans, "sync", remarks)
    for rank in _distinct(work["rank"]).tolist():
        rows = (work["rank"] == rank) & (work["duration"] > 0)
        if rows.any() and (ranks is None or rank in ranks):
            keep = slice(None) if rows.all() else rows
            own = {name: column[keep] for name, column in work.items()}
            host = _calls(spans, calls, rank, own) or _syncs(syncs, rank)
            yield rank, _queue(own, host, [*names], [*stages]) if host else None


def _queue(
    own: dict[str, Int64s], host: _Host, names: Sequence[tuple[str, str | None]], stages: list[str]
) -> Queue:
    begun, over, code, called, waiting = host
    start, launch = own["start"], own["launch"]
    end, told = start + own["duration"], launch != UNKNOWN
    returned = launch + np.maximum(own["launch duration"], 0)
    # Copies that end before the call that launched them: it has waited for them.
    rows = told & (end <= returned)
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
    """Tell of each piece whether it is in a replay of a graph, and not the first one there."""
    graph, launch, start = (own[name] for name in ("graph", "launch", "start"))
    order = np.lexsort((start, launch, graph))
    later = np.zeros(len(order), bool)
    later[order] = ~differs(graph[order], launch[order])
    later &= graph != UNKNOWN
    return later


def _columns(
    table: Table, named: str, names: dict[Any, int], stages: dict[str, int]
) -> dict[str, Int64s]:
    there = {column.name for column in table.columns}
    nothing = np.full(len(table.rows), UNKNOWN)
    found = {
        name: numbers(table, name, UNKNOWN) if name in there else nothing
        for name in (*_NUMBERS, *_LAUNCHED)
    }
    code, own = texts(table, named)
    if named == "kernel":
        labels = kernel_labels(own)
        parts = [_KERNEL if label == Label.COMPUTE else _COMMUNICATION for label in labels]
        keys = [*zip(parts, own, strict=True), (_KERNEL, None)]
    else:
        keys = [*((_COPY, copy_name(text)) for text in own), (_COPY, None)]
    places = [names.setdefault(key, len(names)) for key in keys]
    found["name"] = np.array(places, np.int64)[code]
    stage, own = texts(table, "stage")
    codes = [stages.setdefault(text, len(stages)) for text in own]
    found["stage"] = np.array([*codes, -1], np.int64)[stage]
    return found


def _calls(spans: Spans, table: Table | None, rank: int, work: dict[str, Int64s]) -> _Host | None:
    """Return the calls of the threads that launch work or train."""
    if table is None:
        return None
    rows = spans.rows(rank=rank)
    trains = np.unique(spans.thread[rows[np.isin(spans.kind[rows], _TRAINS)]]).tolist()
    threads = [*_distinct(work["thread"]).tolist(), *(spans.threads[at].ident for at in trains)]
    thread = numbers(table, "thread")
    there = _distinct(thread)
    own = np.isin(there, threads)[np.searchsorted(there, thread)]
    own &= numbers(table, "rank") == rank
    return _host(table, "name", own, lambda name: _WAITS.search(name) is not None)


def _syncs(table: Table | None, rank: int) -> _Host | None:
    """Return the waits that Nsight Systems tells apart from other calls."""
    if table is None:
        return None
    own = numbers(table, "rank") == rank
    return _host(table, "kind", own, lambda kind: kind != _ON_DEVICE)


def _host(
    table: Table, named: str, own: npt.NDArray[np.bool_], waits: Callable[[str], bool]
) -> _Host | None:
    if not own.any():
        return None
    rows = slice(None) if own.all() else own
    code, names = texts(table, named)
    waiting = np.array([*map(waits, names), False])[code[rows]]
    start = numbers(table, "start")[rows]
    return start, start + numbers(table, "duration")[rows], code[rows], names, waiting
