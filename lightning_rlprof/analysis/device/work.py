"""The kernels and copies of a run as arrays: the one reader that every device analysis uses."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from lightning_rlprof.analysis.device.kernel_names import (
    CLASSES,
    KernelName,
    is_collective,
    is_copy,
    kernel_names,
)
from lightning_rlprof.analysis.device.losses import launch_match, loss_texts
from lightning_rlprof.records.records import copy_name
from lightning_rlprof.tables.arrays import Int64s, Mask, differs
from lightning_rlprof.tables.kernels import HIDDEN_IN_GRAPHS
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

COMPUTE, COMMUNICATION, COPY = range(3)
"""Kinds of device work."""

NOT_RECORDED = -(2**63)
"""Stands for an integer that was not recorded."""

NO_STAGE = -1
"""Stands for work launched outside of any stage, or in an unknown one."""

NO_REPLAY = -1
"""Stands for work that did not run in a graph replay."""

NO_CALL = -1
"""Stands for a launch whose host call was not recorded."""

OTHERS = "others"
"""Names the row that sums up what is not among the top."""

GRAPHS_NOTE = "Kernels inside CUDA graphs aren't visible, so device idle time is unknown."

_EMPTY = np.empty(0, np.int64)
_Texts: TypeAlias = tuple[Int64s, list[str]]


@dataclass(frozen=True, eq=False)
class DeviceWork:
    """Kernels, then copies, as columns of one length. A column is read when it is asked for.

    Attributes:
        kernels: The table, None if the run has none.
        copies: The table ``memcpy``, None if the run has none.
        ranks: The ranks whose rows are included; None for all.
    """

    kernels: Table | None
    copies: Table | None
    ranks: Collection[int] | None = None

    def __len__(self) -> int:
        """Return how many kernels and copies there are."""
        return len(self.rank)

    @cached_property
    def tables(self) -> list[Table]:
        """The tables that have rows, of any rank."""
        return [each for each in (self.kernels, self.copies) if each is not None and len(each.rows)]

    @cached_property
    def rank(self) -> Int64s:
        """Rank of the process that launched each row."""
        return self.numbers("rank")

    @cached_property
    def duration(self) -> Int64s:
        """Nanoseconds that each row ran."""
        return self.numbers("duration")

    @cached_property
    def kernel_count(self) -> int:
        """How many rows are kernels; these come first."""
        is_kernel = [np.full(len(table.rows), table is self.kernels) for table in self.tables]
        return int(self._rows(is_kernel).sum())

    @property
    def hidden_in_graphs(self) -> bool:
        """Whether kernels inside CUDA graphs were not recorded one by one."""
        return self.kernels is not None and HIDDEN_IN_GRAPHS in self.kernels.note

    def numbers(self, column: str, unknown: int = NOT_RECORDED) -> Int64s:
        """Return a column of integers, ``unknown`` if a value was not recorded.

        ``step`` is also unknown outside of steps.
        """
        return self._rows(optional_numbers(table, column, unknown) for table in self.tables)

    @cached_property
    def named(self) -> _Texts:
        """Codes and names of kernels and copies; code -1 is a kernel whose name is unknown."""
        codes: list[Int64s] = []
        names: list[str] = []
        for table in self.tables:
            if table is self.kernels:
                code, texts = table.texts("kernel")
                codes.append(code)
                names += texts
            else:
                code, texts = table.texts("kind")
                codes.append(np.where(code < 0, len(texts), code) + len(names))
                names += map(copy_name, (*texts, None))
        return self._rows(codes), names

    @cached_property
    def ranges(self) -> _Texts:
        """Codes and names of the annotation around each launch; code -1 without one."""
        codes: list[Int64s] = []
        names: list[str] = []
        for table in self.tables:
            known = _has(table, "range")
            code, texts = table.texts("range") if known else (np.full(len(table.rows), -1), [])
            codes.append(np.where(code < 0, -1, code + len(names)))
            names += texts
        return self._rows(codes), names

    @cached_property
    def kind(self) -> Int64s:
        """`COMPUTE`, `COMMUNICATION` or `COPY` of each row, by its name."""
        kind: Int64s = self.name_kinds[self.named[0]]
        return kind

    @cached_property
    def work_class(self) -> Int64s:
        """Index into `CLASSES` of each row, by its name; "other" without one."""
        known = [CLASSES.index(name.kind) for name in self.short_names]
        found: Int64s = np.array([*known, CLASSES.index("other")])[self.named[0]]
        return found

    @cached_property
    def replay(self) -> Int64s:
        """The graph replay that each row ran in, as a number of its own, or `NO_REPLAY`.

        A replay is all that one call launched, if a graph is known of any of it.
        """
        graph = self.numbers("graph")
        if not (graph != NOT_RECORDED).any():
            return np.broadcast_to(np.int64(NO_REPLAY), len(graph))
        launch = self.numbers("launch")
        is_launched = launch != NOT_RECORDED
        calls = (self.rank, is_launched, np.where(is_launched, launch, graph))
        keys = (*calls, self.numbers("launch duration"))
        order = np.lexsort(keys)
        is_first = differs(*(key[order] for key in keys))
        in_graph = np.maximum.reduceat((graph != NOT_RECORDED)[order], np.flatnonzero(is_first))
        found = np.empty(len(order), np.int64)
        numbers = np.where(in_graph, np.cumsum(in_graph) - 1, NO_REPLAY)
        found[order] = numbers[np.cumsum(is_first) - 1]
        return found

    @cached_property
    def name_kinds(self) -> Int64s:
        """Kind of each name, then that of kernels without a name."""
        return np.array([*map(work_kind, self.named[1]), COMPUTE], np.int8)

    @cached_property
    def short_names(self) -> list[KernelName]:
        """Short name and class of each name in `named`: different kernels look different."""
        return kernel_names(self.named[1])

    def stages(self, first: Sequence[str] = ()) -> _Texts:
        """Return the stage that launched each row, or `NO_STAGE`, and the names of stages.

        ``first`` are names that get the first codes.
        """
        places = {name: code for code, name in enumerate(first)}
        columns = []
        for table in self.tables:
            codes, names = table.texts("stage")
            here = [places.setdefault(name, len(places)) for name in names]
            columns.append(np.array([*here, NO_STAGE], np.int64)[codes])
        return self._rows(columns), list(places)

    def launching_threads(self, calls: Table) -> Int64s:
        """Return the thread that launched each row.

        A table without threads gets them from the driver calls in the table ``calls``.
        """
        columns = []
        for table in self.tables:
            if _has(table, "thread"):
                columns.append(table.numbers("thread", NOT_RECORDED))
            else:
                names = ("rank", "launch", "launch duration")
                launch = [optional_numbers(table, name) for name in names]
                threads = np.append(calls.numbers("thread", NOT_RECORDED), NOT_RECORDED)
                columns.append(threads[launch_calls(calls, *launch)])
        return self._rows(columns)

    @cached_property
    def _included(self) -> Mask | slice:
        if self.ranks is None:
            return slice(None)
        rank = np.concatenate([_EMPTY, *(table.numbers("rank") for table in self.tables)])
        return np.isin(rank, list(self.ranks))

    def _rows(self, columns: Iterable[Int64s]) -> Int64s:
        return np.concatenate([_EMPTY, *columns])[self._included]


def work_kind(name: str) -> int:
    """Return `COMPUTE`, `COMMUNICATION` or `COPY` by the name of a kernel or copy.

    Example::

        >>> [work_kind(name) for name in ("ampere_sgemm", "ncclDevKernel_AllReduce", "Memcpy HtoD")]
        [0, 1, 2]
    """
    if is_copy(name):
        return COPY
    return COMMUNICATION if is_collective(name) else COMPUTE


def device_work(
    spans: Spans, ranks: Collection[int] | None = None, notes: list[str] | None = None
) -> DeviceWork:
    """Return the kernels and copies of a run.

    Args:
        spans: The run.
        ranks: Only these; None for all.
        notes: A reason is added for each table that could not be read, or lost all of its rows.
    """
    reasons: list[str] = [] if notes is None else notes
    kernels, copies = (spans.try_table(name, reasons) for name in ("kernels", "memcpy"))
    if kernels is not None and not len(kernels.rows) and kernels.losses:
        reasons.append(f"The table kernels is empty: {'; '.join(kernels.losses)}.")
    found = DeviceWork(kernels, copies, ranks)
    if not found.tables and notes is not None:
        notes += [f"{text}." for text in loss_texts(launch_match(spans).losses)]
    return found


def no_work(ranks: Collection[int] | None, notes: Sequence[str] = ()) -> str:
    """Say that these ranks have neither kernels nor copies, and why, or how to record them."""
    of = "This run has" if ranks is None else f"Ranks {sorted(ranks)} have"
    if notes:
        return " ".join([f"{of} no device kernels or copies that can be read.", *notes])
    how = "Capture a step with torch.profiler or Nsight Systems."
    return f"{of} no device kernels or copies. {how}"


def launch_calls(calls: Table, rank: Int64s, launch: Int64s, duration: Int64s) -> Int64s:
    """Return the row of the driver call that each launch is, the last of equal ones, or `NO_CALL`.

    Args:
        calls: The table ``calls``.
        rank: Rank of each launch.
        launch: When its call began.
        duration: How long the call took.
    """
    codes, kinds = calls.texts("kind")
    rows = np.flatnonzero(codes == (kinds.index("runtime") if "runtime" in kinds else len(kinds)))
    starts, ranks, durations = (calls.numbers(name)[rows] for name in ("start", "rank", "duration"))
    order = np.argsort(starts, kind="stable")
    first, place = (np.searchsorted(starts, launch, side, order) for side in ("left", "right"))
    found = np.full(len(launch), NO_CALL)
    left = np.flatnonzero(place > first)
    while len(left):  # Several calls can begin at once, on different ranks or threads.
        place[left] -= 1
        call = order[place[left]]
        same = (ranks[call] == rank[left]) & (durations[call] == duration[left])
        found[left[same]] = rows[call[same]]
        left = left[~same & (place[left] > first[left])]
    return found


def optional_numbers(table: Table, column: str, unknown: int = NOT_RECORDED) -> Int64s:
    """Return a column of a table, ``unknown`` throughout if the table lacks it."""
    if _has(table, column):
        return table.numbers(column, unknown)
    return np.full(len(table.rows), unknown)


def _has(table: Table, column: str) -> bool:
    return any(each.name == column for each in table.columns)
