"""The table of device kernels, the same whatever recorded them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.table import Column, ColumnRows, Table, columns_of, noted

UNKNOWN = -(2**63) + 1
"""Stands for an integer that was not recorded."""

HIDDEN_IN_GRAPHS = "kernels inside CUDA graphs aren't visible"
"""Marks in the table's note that each replay of a graph was recorded as a whole."""

Coded = tuple[Int64s, Sequence[str]]
"""A column of texts: a code per row and the text of each code; below 0 is "not known"."""

COLUMNS = (
    *columns_of("count", "rank", "device", "stream"),
    Column("kernel", "text"),
    Column("start", "time", "ns"),
    Column("duration", "duration", "ns"),
    Column("stage", "text"),
    Column("step", "count"),
    Column("range", "text"),
    Column("launch", "time", "ns"),
    Column("launch duration", "duration", "ns"),
    *columns_of("count", "thread", "graph"),
)
"""Of the table."""

NPU_COLUMNS = (
    *columns_of("text", "op type", "input shapes"),
    Column("block dim", "count"),
    *columns_of("duration", "aicore time", "vector time", unit="ns"),
)
"""More columns of it, of kernels on Ascend: CANN's name of the operator, the shapes of its inputs,
the number of cores, and how long its matrix and its vector cores were busy."""

_LAUNCHES = ("launch_ns", "call_ns", "thread", "graph")  # where nothing is known of them: None


@dataclass(frozen=True, eq=False)
class Kernels:
    """Kernels as columns of one length.

    Attributes:
        rank: Global rank of the process that launched it.
        device: Number of the device as the process counts it.
        stream: Stream (CUDA, ROCm) or queue.
        name: Full name.
        start_ns: On the axis of the `Spans` that they belong to.
        end_ns: On the same axis.
        stage: RL stage that its launch lies in.
        step: RL step that its launch lies in; below 1 where that is not known.
        range: Innermost marked range (NVTX, record_function) that its launch lies in.
        launch_ns: When it was launched, on the same axis; `UNKNOWN` where that was not recorded.
            None, as for those that follow, where nothing is known of launches.
        call_ns: How long the call took that launched it.
        thread: Identity of the thread that launched it.
        graph: Number of the replay of a graph that it ran in, else `UNKNOWN`; all that one call
            replayed have one number.
        npu: Those of `NPU_COLUMNS` that were recorded, by name; numbers with `UNKNOWN`.
    """

    rank: Int64s
    device: Int64s
    stream: Int64s
    name: Coded
    start_ns: Int64s
    end_ns: Int64s
    stage: Coded
    step: Int64s
    range: Coded
    launch_ns: Int64s | None = None
    call_ns: Int64s | None = None
    thread: Int64s | None = None
    graph: Int64s | None = None
    npu: Mapping[str, Any] = field(default_factory=dict)

    def later(self, by_ns: int) -> "Kernels":
        """Return the same kernels on an axis whose zero lies that much earlier."""
        launch = self.launch_ns
        if launch is not None:
            launch = np.where(launch == UNKNOWN, UNKNOWN, launch + by_ns)
        start, end = self.start_ns + by_ns, self.end_ns + by_ns
        return replace(self, start_ns=start, end_ns=end, launch_ns=launch)


def distinct(codes: Int64s, texts: Sequence[str]) -> Coded:
    """Return the same column with each text kept once.

    Example::

        >>> distinct(np.array([2, 0, -1, 1]), ["gemm", "copy", "gemm"])
        (array([ 0,  0, -1,  1]), ['gemm', 'copy'])
    """
    place: dict[str, int] = {}
    own = [place.setdefault(text, len(place)) for text in texts]
    return np.array([*own, -1], dtype=np.int64)[codes], list(place)


def matches(column: Coded, test: Callable[[str], object]) -> Mask:
    """Return which rows of a column have a text that passes a test.

    Example::

        >>> matches((np.array([1, 0, -1]), ["gemm", "copy"]), lambda text: text == "gemm").tolist()
        [False, True, False]
    """
    codes, texts = column
    return np.array([*(bool(test(text)) for text in texts), False])[codes]


def find(keys: Int64s, numbers: Int64s) -> Int64s:
    """Return the first row of the keys that equals each number, -1 without and for `UNKNOWN`.

    Example::

        >>> find(np.array([7, 5, 7]), np.array([5, 7, 6, UNKNOWN])).tolist()
        [1, 0, -1, -1]
    """
    order = np.argsort(keys, kind="stable")
    ordered = np.append(keys[order], UNKNOWN)
    at = np.searchsorted(ordered[:-1], numbers)
    found = (ordered[at] == numbers) & (numbers != UNKNOWN)
    return np.where(found, np.append(order, -1)[at], -1)


def join(parts: Sequence[Kernels]) -> Kernels:
    """Return the kernels of all parts, of which there is one at least, in that order.

    Replays of graphs are numbered on, so that those of two parts stay apart.
    """
    columns: dict[str, Any] = {}
    for name in (each.name for each in fields(Kernels) if each.name != "npu"):
        own = [getattr(part, name) for part in parts]
        if name in _LAUNCHES:
            own = [
                np.full(len(part.rank), UNKNOWN) if column is None else column
                for column, part in zip(own, parts, strict=True)
            ]
        own = numbered_on(own) if name == "graph" else own
        columns[name] = end_to_end(own) if isinstance(own[0], tuple) else np.concatenate(own)
    return Kernels(**columns, npu=_join_npu(parts))


def _join_npu(parts: Sequence[Kernels]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for column in npu_columns(parts):
        is_text = column.kind == "text"
        own = [
            part.npu[column.name]
            if column.name in part.npu
            else (np.full(len(part.rank), -1), [])
            if is_text
            else np.full(len(part.rank), UNKNOWN)
            for part in parts
        ]
        columns[column.name] = end_to_end(own) if is_text else np.concatenate(own)
    return columns


def npu_columns(parts: Iterable[Kernels]) -> list[Column]:
    """Return those of `NPU_COLUMNS` that any of the parts has."""
    recorded = set().union(*(part.npu for part in parts))
    return [column for column in NPU_COLUMNS if column.name in recorded]


def end_to_end(columns: Sequence[Coded]) -> Coded:
    """Return columns of texts as one, each text kept once.

    Example::

        >>> end_to_end([(np.array([0]), ["gemm"]), (np.array([-1, 1]), ["copy", "gemm"])])
        (array([ 0, -1,  0]), ['gemm', 'copy'])
    """
    texts: list[str] = []
    codes = []
    for own, names in columns:
        codes.append(np.where(own < 0, -1, own + len(texts)))
        texts += names
    return distinct(np.concatenate(codes), texts)


def numbered_on(parts: Sequence[Int64s]) -> list[Int64s]:
    """Return numbers of parts that count apart, from 0, so that no two parts share one.

    Example::

        >>> [part.tolist() for part in numbered_on([np.array([0, 2]), np.array([0, 1])])]
        [[0, 2], [3, 4]]
    """
    found, free = [], 0
    for part in parts:
        found.append(np.where(part == UNKNOWN, UNKNOWN, part + free))
        free += int(part.max(initial=-1)) + 1
    return found


def known(numbers: Int64s, nothing: int = UNKNOWN) -> Any:
    """Return a column for `ColumnRows` that reads as None where a number stands for nothing."""
    missing = numbers == nothing
    return np.ma.masked_array(numbers, missing) if missing.any() else numbers


def kernel_table(kernels: Kernels, remarks: Iterable[str] = ()) -> Table:
    """Return one row per kernel, in the order given.

    Columns: rank, device, stream, kernel, start and duration in nanoseconds; stage, step and range
    that its launch is known to lie in; when the launch began, how long the call took, and its
    thread; the number of the graph's replay that the kernel ran in; what NPUs record besides. None:
    not known, or none.

    Args:
        kernels: The columns.
        remarks: What the reader must know, e.g. that some launches were not recorded.
    """
    columns = (*COLUMNS, *npu_columns([kernels]))
    return Table("kernels", columns, ColumnRows(kernel_columns(kernels)), **noted(remarks))


def kernel_columns(kernels: Kernels) -> list[Any]:
    """Return the columns of that table, for `ColumnRows`."""
    return [
        kernels.rank,
        known(kernels.device),
        known(kernels.stream),
        kernels.name,
        kernels.start_ns,
        kernels.end_ns - kernels.start_ns,
        kernels.stage,
        known(np.maximum(kernels.step, 0), nothing=0),
        kernels.range,
        *(
            known(np.full(len(kernels.rank), UNKNOWN) if column is None else column)
            for column in (getattr(kernels, name) for name in _LAUNCHES)
        ),
        *(
            kernels.npu[column.name] if column.kind == "text" else known(kernels.npu[column.name])
            for column in npu_columns([kernels])
        ),
    ]
