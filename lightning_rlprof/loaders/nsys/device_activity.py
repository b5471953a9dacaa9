"""Build the tables of an Nsight Systems export: kernels, copies, waits, and GPU metrics.

Kernels, copies and waits come with their launches, and with the ranges around these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rlprof.loaders.host_calls import NOWHERE, Found, Launches, stages_at
from lightning_rlprof.loaders.nsys.export import (
    STRINGS,
    Export,
    Ranges,
    pid_of,
    possible,
    process_of,
)
from lightning_rlprof.loaders.sqlite_tables import coded
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import innermost
from lightning_rlprof.tables.kernels import (
    HIDDEN_IN_GRAPHS,
    UNKNOWN,
    Coded,
    Kernels,
    distinct,
    find,
    kernel_table,
    known,
)
from lightning_rlprof.tables.table import Column, ColumnRows, Loss, Table, noted

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
"""The table of kernels in the export."""

_COPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SET = "CUPTI_ACTIVITY_KIND_MEMSET"
_SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALL = "CUPTI_ACTIVITY_KIND_RUNTIME"
_METRICS, _METRIC_NAMES = "GPU_METRICS", "TARGET_INFO_GPU_METRICS"
_DEVICES = "TARGET_INFO_CUDA_DEVICE"

ACTIVITIES = (KERNELS, _GRAPH, _COPY, _SET, _SYNC)
"""Tables whose rows belong to processes; all but the last one are of what devices ran."""

_GRAPHS = ("graphNodeId", "graphId")
_COLUMNS = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
_COPIES = {
    **{1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD"},
    **{9: "HtoH", 10: "PtoP", 11: "UVM HtoD", 12: "UVM DtoH", 13: "UVM DtoD", -1: "memset"},
}
_SYNCS = {1: "event", 2: "stream waits for event", 3: "stream", 4: "context"}


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of activities, sorted by rank and start, with what was found about them.

    Attributes:
        columns: Of the export; ``table`` is the number of the activity that a row is of.
        rank: Rank of its process.
        launches: The call that launched each.
        call_ns: How long that took, `UNKNOWN` where it was not recorded or did not end.
        found: What it lies in.
        remarks: What must be known about them.
    """

    columns: Mapping[str, Int64s]
    rank: Int64s
    launches: Launches
    call_ns: Int64s
    found: Found
    remarks: list[str]


@dataclass(frozen=True, eq=False)
class Device:
    """Read what devices did; each call reads the file again and keeps nothing.

    Attributes:
        export: The export.
        ranges: Its ranges.
        ranks: Rank of each process, by globalPid.
        zero_ns: Where the axis of what is returned begins, in the export's time.
    """

    export: Export
    ranges: Ranges
    ranks: Mapping[int, int]
    zero_ns: int

    def tables(self) -> dict[str, Callable[[], Table]]:
        """Return what can be read, by name."""
        has, found = self.export.has, dict[str, Callable[[], Table]]()
        if has(KERNELS) or has(_GRAPH):
            found["kernels"] = lambda: kernel_table(*self.kernels())
        if has(_COPY) or has(_SET):
            found["memcpy"] = self.copies
        if has(_SYNC):
            found["sync"] = self.syncs
        if has(_METRICS):
            found["gpu_metrics"] = self.metrics
        return found

    def kernels(self) -> tuple[Kernels, list[str]]:
        """Return the kernels by rank and start, and what must be known about them."""
        rows = self._rows((KERNELS,), "demangledName", "shortName", *_GRAPHS)
        columns, found = rows.columns, rows.found
        long, short = columns["demangledName"], columns["shortName"]
        names = self.export.strings(np.concatenate([long, short]), STRINGS)
        return Kernels(
            rows.rank,
            columns["deviceId"],
            columns["streamId"],
            coded(np.where(np.isin(long, list(names)), long, short), names),
            columns["start"] - self.zero_ns,
            columns["end"] - self.zero_ns,
            distinct(found.stage, self.ranges.names),
            found.step,
            distinct(self._innermost(rows), self.ranges.names),
            self._launch_ns(rows),
            rows.call_ns,
            _thread(rows),
            self._replays(rows),
        ), [*rows.remarks, *self._graphs(columns)]

    def copies(self) -> Table:
        """Return one row per copy between memories and per memset."""
        rows = self._rows((_COPY, _SET), "copyKind", "bytes", *_GRAPHS)
        kinds = _labels(np.where(rows.columns["table"], -1, rows.columns["copyKind"]), _COPIES)
        size = known(rows.columns["bytes"])
        middle = {Column("kind", "text"): kinds, Column("bytes", "count", "bytes"): size}
        last = {
            Column("launch", "time", "ns"): known(self._launch_ns(rows)),
            Column("launch duration", "duration", "ns"): known(rows.call_ns),
            Column("thread", "count"): known(_thread(rows)),
            Column("graph", "count"): known(self._replays(rows)),
        }
        return self._table("memcpy", rows, middle, last)

    def syncs(self) -> Table:
        """Return one row per wait of the host or of a stream for the device."""
        rows = self._rows((_SYNC,), "syncType")
        kinds = {Column("kind", "text"): _labels(rows.columns["syncType"], _SYNCS)}
        return self._table("sync", rows, kinds, {})

    def metrics(self) -> Table:
        """Return one row per sample in the order of the file; metrics without a name have none.

        The rank is that of the processes whose kernels ran on the GPU. It is unknown if those are
        of several ranks or of none, or if the export doesn't map GPUs to devices.
        """
        rows = self.export.numbers(_METRICS, "timestamp", "typeId", "metricId")
        value = self.export.reals(_METRICS, "value")["value"]
        sound = possible(rows["timestamp"]) & np.isfinite(value)
        rows = {name: column[sound] for name, column in rows.items()}
        kind = rows["typeId"]
        gpu = np.where(kind == UNKNOWN, UNKNOWN, kind & 0xFF)  # the lowest byte
        own = np.array([*_ranks_of_gpus(self.export, self.ranks), UNKNOWN], np.int64)
        cells: dict[Column, Any] = {
            Column("rank", "count"): known(own[np.where(kind == UNKNOWN, -1, gpu)]),
            Column("device", "count"): known(gpu),
            Column("time", "time", "ns"): rows["timestamp"] - self.zero_ns,
            Column("metric", "text"): _metric_names(self.export, kind, rows["metricId"]),
            Column("value", "number"): value[sound],
        }
        lost = np.count_nonzero(~sound)
        text = Loss(f"{lost} samples are left out: they have no time or no value")
        said = noted([text] if lost else [])
        return Table("gpu_metrics", tuple(cells), ColumnRows(list(cells.values())), **said)

    def _table(
        self, name: str, rows: _Rows, middle: Mapping[Column, Any], last: Mapping[Column, Any]
    ) -> Table:
        columns, stage = rows.columns, distinct(rows.found.stage, self.ranges.names)
        cells: dict[Column, Any] = {
            Column("rank", "count"): rows.rank,
            Column("device", "count"): known(columns["deviceId"]),
            Column("stream", "count"): known(columns["streamId"]),
            **middle,
            Column("start", "time", "ns"): columns["start"] - self.zero_ns,
            Column("duration", "duration", "ns"): columns["end"] - columns["start"],
            Column("stage", "text"): stage,
            Column("step", "count"): known(rows.found.step, nothing=0),
            **last,
        }
        said = noted(rows.remarks)
        return Table(name, tuple(cells), ColumnRows(list(cells.values())), **said)

    def _rows(self, tables: Sequence[str], *more: str) -> _Rows:
        columns, rank, lost = self._sound_rows(tables, *more)
        launches, call_ns = self._launches(columns["globalPid"], columns["correlationId"])
        found = stages_at(self.ranges.stages(), launches)
        return _Rows(columns, rank, launches, call_ns, found, _remarks(lost, launches, found))

    def _sound_rows(
        self, tables: Sequence[str], *more: str
    ) -> tuple[dict[str, Int64s], Int64s, int]:
        """Return rows of activities by rank and start, their ranks, and how many are left out."""
        read = [self.export.numbers(table, *_COLUMNS, *more) for table in tables]
        columns = {name: np.concatenate([each[name] for each in read]) for name in read[0]}
        columns["table"] = np.repeat(np.arange(len(read)), [len(each["start"]) for each in read])
        start, end, process = columns["start"], columns["end"], columns["globalPid"]
        sound = possible(start) & possible(end) & (start <= end)
        sound &= np.isin(process, list(self.ranks))
        rank = np.zeros(len(process), dtype=np.int64)
        for each, number in self.ranks.items():
            rank[process == each] = number
        order = np.lexsort((start, rank))
        order = order[sound[order]]
        columns = {name: column[order] for name, column in columns.items()}
        return columns, rank[order], len(sound) - len(order)

    def _launches(self, process: Int64s, correlation: Int64s) -> tuple[Launches, Int64s]:
        """Find the call that launched each row, and how long it took.

        Correlations are numbered by each process.
        """
        calls = self.export.numbers(_CALL, "start", "end", "globalTid", "correlationId")
        start, thread, number = calls["start"], calls["globalTid"], calls["correlationId"]
        own = np.where(possible(start) & (number != UNKNOWN), process_of(thread), NOWHERE)
        pairs = _pairs(np.append(own, process), np.append(number, correlation))
        of_call, of_row = np.split(pairs, [len(start)])
        order = np.argsort(start, kind="stable")
        found = np.append(order, -1)[find(of_call[order], of_row)]
        ended = possible(calls["end"]) & (calls["end"] >= start)
        call_ns = np.where(ended, calls["end"] - start, UNKNOWN)
        launches = Launches(
            np.where(found >= 0, process, NOWHERE),
            np.append(thread, NOWHERE)[found],
            np.append(start, UNKNOWN)[found],
        )
        return launches, np.append(call_ns, UNKNOWN)[found]

    def _launch_ns(self, rows: _Rows) -> Int64s:
        when = rows.launches.time_ns
        return np.where(when == UNKNOWN, UNKNOWN, when - self.zero_ns)

    def _innermost(self, rows: _Rows) -> Int64s:
        ranges, when = self.ranges, rows.launches.time_ns
        columns = (ranges.thread, ranges.start_ns, ranges.end_ns)
        found = innermost(*columns, rows.launches.thread, when)
        lent = innermost(*columns, rows.found.thread, when)
        return np.append(ranges.name, -1)[np.where(found < 0, lent, found)]

    def _replays(self, rows: _Rows) -> Int64s:
        """Return the number of each row's graph replay, else `UNKNOWN`.

        Replays of a rank are numbered by their beginnings, over kernels and copies. What one call
        launched has one correlation, also where the call itself was not recorded.
        """
        columns = rows.columns
        if not (in_graph := _replayed(columns)).any():
            return np.full(len(in_graph), UNKNOWN)
        every, rank, _ = self._sound_rows((KERNELS, _COPY, _SET), *_GRAPHS)
        own = np.flatnonzero(_replayed(every))
        calls = [
            np.append(every[name][own], columns[name]) for name in ("globalPid", "correlationId")
        ]
        replays, of_row = np.split(_pairs(*calls), [len(own)])
        keys, first = np.unique(replays, return_index=True)
        order, number = np.argsort(first), np.empty(len(first), np.int64)
        ranks = rank[own][first[order]]
        number[order] = np.arange(len(order)) - np.searchsorted(ranks, ranks)
        found = np.append(number, UNKNOWN)[find(keys, of_row)]
        return np.where(in_graph, found, UNKNOWN)

    def _graphs(self, columns: Mapping[str, Int64s]) -> list[str]:
        whole = len(self.export.numbers(_GRAPH, "start")["start"])
        return _counted(
            (
                _replayed(columns).sum(),
                "kernels ran in CUDA graph replays and belong to the stage of the launch",
            ),
            (whole, f"CUDA graph replays: {HIDDEN_IN_GRAPHS} (use nsys --cuda-graph-trace=node)"),
        )


def _replayed(columns: Mapping[str, Int64s]) -> Any:
    return (columns["graphNodeId"] > 0) | (columns["graphId"] > 0)


def _thread(rows: _Rows) -> Int64s:
    """Return the identity of the thread of each launch, as in `Spans.threads`."""
    thread = rows.launches.thread  # the process stands above
    return np.where(thread == NOWHERE, UNKNOWN, thread & 0xFFFFFF)


def _pairs(first: Int64s, second: Int64s) -> Int64s:
    """Return a number for each row that only rows with the same two values share."""
    _, codes = np.unique(first, return_inverse=True)
    _, more = np.unique(second, return_inverse=True)
    pairs: Int64s = codes * (len(second) + 1) + more
    return pairs


def _remarks(lost: int, launches: Launches, found: Found) -> list[str]:
    losses = _counted((lost, "rows are left out: their times or their process are invalid"))
    doubts = _counted(
        (
            np.count_nonzero(launches.time_ns == UNKNOWN),
            "launches were not recorded: their stage, step and range are unknown",
        ),
        (
            np.count_nonzero(found.lent),
            "launches came from threads without marks, such as autograd's: they belong to the "
            "stage of the training thread",
        ),
    )
    return [*map(Loss, losses), *doubts]


def _counted(*texts: tuple[Any, str]) -> list[str]:
    return [f"{count} {text}" for count, text in texts if count]


def _labels(numbers: Int64s, labels: Mapping[int, str]) -> Coded:
    there = {each: labels.get(each, f"kind {each}") for each in np.unique(numbers).tolist()}
    there.pop(UNKNOWN, None)
    return coded(numbers, there)


def _ranks_of_gpus(export: Export, ranks: Mapping[int, int]) -> list[int]:
    """Return the rank of each GPU by its number, up to 255."""
    devices = export.numbers(_DEVICES, "pid", "cudaId", "gpuId")
    columns = (column.tolist() for column in devices.values())
    place = {(pid, cuda): gpu for pid, cuda, gpu in zip(*columns, strict=True)}
    users: dict[int, set[int]] = {}
    if {"globalPid", "deviceId"} <= export.columns.get(KERNELS, frozenset()):
        for process, device in export.rows(f"SELECT DISTINCT globalPid, deviceId FROM {KERNELS}"):
            if process in ranks and (pid_of(process), device) in place:
                users.setdefault(place[pid_of(process), device], set()).add(ranks[process])
    own = [users.get(gpu, set()) for gpu in range(256)]
    return [next(iter(each)) if len(each) == 1 else UNKNOWN for each in own]


def _metric_names(export: Export, kind: Int64s, metric: Int64s) -> Coded:
    """Return names of metrics, which are numbered separately for each type of source."""
    there = export.numbers(_METRIC_NAMES, "typeId", "metricId")
    codes, names = export.texts(_METRIC_NAMES, "metricName")
    keys = zip(there["typeId"].tolist(), there["metricId"].tolist(), strict=True)
    known = dict(zip(keys, codes.tolist(), strict=False))
    _, first, pair = np.unique(_pairs(kind, metric), return_index=True, return_inverse=True)
    used = zip(kind[first].tolist(), metric[first].tolist(), strict=True)
    own = [known.get(each, -1) for each in used]
    return np.array(own, dtype=np.int64)[pair], names
