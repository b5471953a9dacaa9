"""Device activity of an Nsight Systems export, joined to the ranges around its launches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rlprof.loaders.attribution import NOWHERE, Found, Launches, stages_at
from lightning_rlprof.loaders.enclosing import innermost
from lightning_rlprof.loaders.kernels import UNKNOWN, Coded, Kernels, distinct, kernel_table, known
from lightning_rlprof.loaders.nsys_export import STRINGS, Export, coded
from lightning_rlprof.loaders.nsys_ranges import Ranges, possible, process_of
from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import Column, ColumnRows, Table

__all__ = ["ACTIVITIES", "Device"]

_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALL = "CUPTI_ACTIVITY_KIND_RUNTIME"

ACTIVITIES = (_KERNEL, _COPY, _SYNC)
"""Tables whose rows belong to processes; the kernels come first."""

_COLUMNS = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
_COPIES = {
    **{1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD"},
    **{9: "HtoH", 10: "PtoP", 11: "UVM HtoD", 12: "UVM DtoH", 13: "UVM DtoD"},
}
_SYNCS = {1: "event", 2: "stream waits for event", 3: "stream", 4: "context"}


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of one activity, sorted by rank and start, with what was found about them."""

    columns: Mapping[str, Int64s]
    rank: Int64s
    launches: Launches
    found: Found
    remarks: list[str]


class Device:
    """Read what devices did; each call reads the file anew and keeps nothing.

    Args:
        export: The export.
        ranges: Its ranges.
        ranks: Rank of each process, by globalPid.
        zero_ns: Where the axis of what is returned begins, in the export's time.
    """

    def __init__(
        self, export: Export, ranges: Ranges, ranks: Mapping[int, int], zero_ns: int
    ) -> None:
        self._export, self._ranges, self._zero = export, ranges, zero_ns
        self._ranks = ranks

    def tables(self) -> dict[str, Callable[[], Table]]:
        """Return what can be read, by name."""
        readers = {
            "kernels": (_KERNEL, lambda: kernel_table(*self.kernels())),
            "memcpy": (_COPY, self.copies),
            "sync": (_SYNC, self.syncs),
        }
        return {name: read for name, (table, read) in readers.items() if self._export.has(table)}

    def kernels(self) -> tuple[Kernels, str]:
        """Return the kernels by rank and start, and what must be known about them."""
        rows = self._rows(_KERNEL, "demangledName", "shortName", "graphNodeId", "graphId")
        columns, found = rows.columns, rows.found
        return Kernels(
            rows.rank,
            columns["deviceId"],
            columns["streamId"],
            self._kernel_names(columns["demangledName"], columns["shortName"]),
            columns["start"] - self._zero,
            columns["end"] - self._zero,
            distinct(found.stage, self._ranges.names),
            found.step,
            distinct(self._innermost(rows), self._ranges.names),
            np.where(rows.launches.time_ns == UNKNOWN, UNKNOWN, rows.launches.time_ns - self._zero),
        ), "; ".join([*rows.remarks, *self._graphs(columns)])

    def copies(self) -> Table:
        """Return one row per copy between memories."""
        rows = self._rows(_COPY, "copyKind", "bytes")
        kinds = _labels(rows.columns["copyKind"], _COPIES)
        size = known(rows.columns["bytes"])
        middle = ((Column("kind", "text"), kinds), (Column("bytes", "count", "B"), size))
        return self._table("memcpy", rows, *middle)

    def syncs(self) -> Table:
        """Return one row per wait of the host or of a stream for the device."""
        rows = self._rows(_SYNC, "syncType")
        return self._table(
            "sync", rows, (Column("kind", "text"), _labels(rows.columns["syncType"], _SYNCS))
        )

    def _table(self, name: str, rows: _Rows, *middle: tuple[Column, Any]) -> Table:
        columns, stage = rows.columns, distinct(rows.found.stage, self._ranges.names)
        cells: dict[Column, Any] = {
            Column("rank", "count"): rows.rank,
            Column("device", "count"): known(columns["deviceId"]),
            Column("stream", "count"): known(columns["streamId"]),
            **dict(middle),
            Column("start", "duration", "ns"): columns["start"] - self._zero,
            Column("duration", "duration", "ns"): columns["end"] - columns["start"],
            Column("stage", "text"): stage,
            Column("step", "count"): known(rows.found.step, nothing=0),
        }
        note = "; ".join(rows.remarks)
        return Table(name, tuple(cells), ColumnRows(list(cells.values())), note=note)

    def _rows(self, table: str, *more: str) -> _Rows:
        columns = self._export.numbers(table, *_COLUMNS, *more)
        start, end, process = columns["start"], columns["end"], columns["globalPid"]
        sound = possible(start) & possible(end) & (start <= end)
        sound &= np.isin(process, list(self._ranks))
        rank = np.zeros(len(process), dtype=np.int64)
        for each, number in self._ranks.items():
            rank[process == each] = number
        order = np.lexsort((start, rank))
        order = order[sound[order]]
        columns = {name: column[order] for name, column in columns.items()}
        launches = self._launches(columns["globalPid"], columns["correlationId"])
        found = stages_at(self._ranges.stages(), launches)
        remarks = _remarks(len(sound) - len(order), launches, found)
        return _Rows(columns, rank[order], launches, found, remarks)

    def _launches(self, process: Int64s, correlation: Int64s) -> Launches:
        """Find the call that launched each row: correlations are numbered by each process."""
        calls = self._export.numbers(_CALL, "start", "globalTid", "correlationId")
        start, thread, number = calls["start"], calls["globalTid"], calls["correlationId"]
        own = np.where(possible(start) & (number != UNKNOWN), process_of(thread), NOWHERE)
        found = np.full(len(process), -1, dtype=np.int64)
        for each in np.unique(process).tolist():
            of_process = np.flatnonzero(own == each)
            by_number = of_process[np.lexsort((start[of_process], number[of_process]))]
            rows = np.flatnonzero(process == each)
            at = np.searchsorted(number[by_number], correlation[rows])
            rows, at = rows[at < len(by_number)], at[at < len(by_number)]
            same = number[by_number[at]] == correlation[rows]
            found[rows[same]] = by_number[at[same]]
        joined = found >= 0
        return Launches(
            np.where(joined, process, NOWHERE),
            np.append(thread, NOWHERE)[found],
            np.append(start, UNKNOWN)[found],
        )

    def _innermost(self, rows: _Rows) -> Int64s:
        """Return the name of the innermost range around each launch, of whatever domain."""
        ranges, when = self._ranges, rows.launches.time_ns
        columns = (ranges.thread, ranges.start_ns, ranges.end_ns)
        found = innermost(*columns, rows.launches.thread, when)
        lent = innermost(*columns, rows.found.thread, when)
        return np.append(ranges.name, -1)[np.where(found < 0, lent, found)]

    def _kernel_names(self, long: Int64s, short: Int64s) -> Coded:
        texts = self._export.strings(np.concatenate([long, short]), STRINGS)
        return coded(np.where(np.isin(long, list(texts)), long, short), texts)

    def _graphs(self, columns: Mapping[str, Int64s]) -> list[str]:
        replayed = (columns["graphNodeId"] > 0) | (columns["graphId"] > 0)
        whole = len(self._export.numbers(_GRAPH, "start")["start"])
        return _counted(
            (replayed.sum(), "kernels ran in replays of CUDA graphs and count to their launch"),
            (whole, "replays of CUDA graphs hide their kernels (nsys --cuda-graph-trace=node)"),
        )


def _remarks(lost: int, launches: Launches, found: Found) -> list[str]:
    """Say how many rows are lost, and for how many little is known."""
    return _counted(
        (lost, "rows are left out: their times or their process are wrong"),
        (
            np.count_nonzero(launches.time_ns == UNKNOWN),
            "launches were not recorded: their stage, step and range are not known",
        ),
        (
            np.count_nonzero(found.lent),
            "launches came from threads that mark nothing, as autograd's do: they count to what "
            "the training thread was in",
        ),
    )


def _counted(*texts: tuple[Any, str]) -> list[str]:
    return [f"{count} {text}" for count, text in texts if count]


def _labels(numbers: Int64s, labels: Mapping[int, str]) -> Coded:
    there = {each: labels.get(each, f"kind {each}") for each in np.unique(numbers).tolist()}
    there.pop(UNKNOWN, None)
    return coded(numbers, there)
