"""The calls of a host: their parents, and the stage and step that a launch of theirs belongs to.

Also names the operators of torch that multiply matrices.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.spill import Columns, Grown, in_order
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, group_sizes, group_starts
from lightning_rlprof.tables.intervals import SLACK_NS, Enclosing, parents
from lightning_rlprof.tables.kernels import COLUMNS
from lightning_rlprof.tables.spans import NO_PARENT
from lightning_rlprof.tables.table import Column, columns_of

_COLUMNS = {
    column.name: column
    for column in (
        *COLUMNS,
        *columns_of("count", "id", "parent", "forward", "number", "group size"),
        *columns_of("count", "source", "destination", "source rank", "destination rank"),
        *columns_of("count", "bytes", "size", "allocated", "reserved", "active", unit="bytes"),
        *columns_of("text", "name", "kind", "component", "metric", "operator", "operation"),
        *columns_of("text", "group", "dtype", "transport", "dims", "types", "values"),
        Column("time", "time", "ns"),
        Column("transfer", "duration", "ns"),
        Column("value", "number"),
    )
}
CALL_KINDS = ("python", "operator", "runtime", "module")
"""Kinds of calls; of two that begin and end at once the outer one is of the earlier kind."""

MODULE = "nn.Module: "
"""What torch writes before the name of a module."""

NUMBERED: dict[str, type[np.generic]] = {
    **dict.fromkeys(("sequence", "start_ns", "row"), np.int64),
    **dict.fromkeys(("lane", "process"), np.int32),
    "backward": np.int8,
}
"""Columns of the operators that autograd numbers, as `forwards` takes them."""

_NO_LANE = 2**31 - 1
NOWHERE = -1
"""Stands for a process or thread that is not known."""

_STAGE, _STEP = KINDS.index("stage"), KINDS.index("step")

# These are numbers and ends of calls of one lane that may contain later calls, outer calls first.
_Around = tuple[Int64s, Int64s]
_NOBODY: _Around = np.empty(0, np.int64), np.empty(0, np.int64)

_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention")
PRODUCTS = frozenset(
    [
        f"aten::{name}"
        for name in (
            *("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"),
            *("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
        )
    ]
    + [
        f"aten::_scaled_dot_product_{name}{way}"
        for name in (*_ATTENTION, "flash_attention_for_cpu")
        for way in ("", "_backward")
    ]
    + [f"aten::_{name}_{way}" for name in _ATTENTION for way in ("forward", "backward")]
    + [
        f"flash_attn::_flash_attn_{name}ward"
        for name in ("for", "back", "varlen_for", "varlen_back")
    ]
    + [
        f"{engine}::{way}_fused_experts"
        for engine in ("vllm", "sglang")
        for way in ("inplace", "outplace")
    ]
    + [
        *("sgl_kernel::fp8_scaled_mm", "_C::cutlass_scaled_mm", "_vllm_fa2_C::varlen_fwd"),
        *("vllm::unified_attention", "vllm::unified_attention_with_output"),
    ]
)
"""Operators of torch, flash-attention, vLLM and SGLang that multiply matrices.

Some call others of them, as attention of torch calls its parts.
"""

NPU_PRODUCTS = PRODUCTS | {"aten::matmul"}
"""Those on Ascend: ``matmul`` is torch_npu's own there, and calls no other for an NPU's tensors."""


def columns_named(*names: str) -> tuple[Column, ...]:
    """Return columns of the tables of traces, which are the same whatever recorded them."""
    return tuple(_COLUMNS[name] for name in names)


CALL_COLUMNS = columns_named(
    *("rank", "thread", "name", "kind", "start", "duration"),
    *("id", "parent", "stage", "step", "forward"),
)
"""Of a table of calls."""


class Nesting:
    """Finds the innermost call around each one, of calls that come some at a time."""

    def __init__(self) -> None:
        self._around, self._rows = _NOBODY, 0
        self._lane: int | None = None

    def parents(
        self, lane: Int64s, start: Int64s, end: Int64s, alone: npt.NDArray[np.bool_]
    ) -> Int64s:
        """Return the number, from 1, of the innermost call around each call, 0 without one.

        A call may end `SLACK_NS` later than the one around it, and begins before that has ended.

        Args:
            lane: Of each call; those of one lane follow one another by start, outer calls first.
            start: Start of each call.
            end: End of each call.
            alone: Calls that never are around others.

        Example::

            >>> start, end = np.array([0, 10, 20, 95_000]), np.array([90_000, 50, 30, 99_000])
            >>> Nesting().parents(np.zeros(4, np.int64), start, end, np.zeros(4, bool)).tolist()
            [0, 1, 2, 0]
        """
        found = np.zeros(len(lane), np.int64)
        edges = [0, *(np.flatnonzero(np.diff(lane)) + 1).tolist(), len(lane)]
        for first, over in itertools.pairwise(edges) if len(lane) else ():
            part, own = slice(first, over), int(lane[first])
            around = self._around if own == self._lane else _NOBODY
            rows = (start[part], end[part], alone[part])
            found[part], self._around = _within(around, self._rows + first, *rows)
            self._lane = own
        self._rows += len(lane)
        return found


def _within(
    around: _Around, first: int, start: Int64s, end: Int64s, alone: npt.NDArray[np.bool_]
) -> tuple[Int64s, _Around]:
    """Return the parents of some calls of a lane, and what is still around those that follow."""
    known, own = len(around[0]), np.flatnonzero(~alone)
    number = np.append(around[0], own + (first + 1))
    over = np.append(around[1], end[own])
    above = np.arange(-1, len(number) - 1)
    _climb(above[known:], start[own], end[own], over, above)
    leaf = np.flatnonzero(alone)
    at = np.searchsorted(own, leaf) + (known - 1)
    _climb(at, start[leaf], end[leaf], over, above)
    found, number = np.empty(len(start), np.int64), np.append(number, 0)  # The row -1 reads this 0.
    found[own], found[leaf] = number[above[known:]], number[at]
    chain, last = [], len(above) - 1
    while last >= 0:
        chain.append(last)
        last = int(above[last])
    return found, (number[chain[::-1]], over[chain[::-1]])


def _climb(at: Int64s, start: Int64s, end: Int64s, over: Int64s, above: Int64s) -> None:
    """Go up from each call's nearest neighbour until one is around it.

    All climb at once; where ``at`` is part of ``above``, each takes the way that the others have
    gone so far, so that a thousand siblings take ten steps.
    """
    todo = np.flatnonzero(at >= 0)
    while len(todo):
        near = over[at[todo]]
        todo = todo[(near <= start[todo]) | (near + SLACK_NS < end[todo])]
        at[todo] = above[at[todo]]
        todo = todo[at[todo] >= 0]


def forwards(numbered: Grown) -> Iterator[Columns]:
    """Yield the number of the forward operator of each backward one that has one, with its row.

    Both have autograd's sequence number; the backward one has a forward thread, too. Several
    nested forward operators may have one number: the last one before the backward one made the
    node, as in torch's own arrows. Forward threads are numbered in another way there, so a
    sequence number that several threads of a process use is left out.
    """
    keys = ("process", "sequence", "start_ns", "backward", "row")
    for block in in_order(numbered.parts(), *keys):
        row, backward = block["row"], block["backward"] > 0
        lane, places = block["lane"], np.arange(len(row))
        last = np.maximum.accumulate(np.where(backward, -1, places))
        starts = group_starts(block["process"], block["sequence"])
        low = np.minimum.reduceat(np.where(backward, _NO_LANE, lane), starts)
        high = np.maximum.reduceat(np.where(backward, -1, lane), starts)
        sizes = group_sizes(starts, len(row))
        one_thread = np.repeat(low == high, sizes)
        told = backward & one_thread & (last >= np.repeat(starts, sizes))
        yield {"row": row[told], "forward": row[last[told]] + 1}


class Launches(NamedTuple):
    """Moments on threads of processes, as columns; `NOWHERE` finds nothing."""

    process: Int64s
    thread: Int64s
    time_ns: Int64s


@dataclass(frozen=True, eq=False)
class Stages:
    """Ranges that say what their process was doing, as columns of one length."""

    process: Int64s
    thread: Int64s
    kind: npt.NDArray[np.integer[Any]]
    name: Int64s
    step: Int64s
    start_ns: Int64s
    end_ns: Int64s

    def at(self, rows: Any) -> "Stages":
        """Return some of them."""
        return Stages(*(getattr(self, each.name)[rows] for each in fields(Stages)))

    def only(self, *kinds: int) -> "Stages":
        """Return those of some kinds."""
        own = np.isin(self.kind, kinds)
        # Nothing is copied if all kinds are kept.
        return self.at(slice(None) if own.all() else own)

    @cached_property
    def around(self) -> Enclosing:
        """All of them, to be asked for the innermost around a moment."""
        return Enclosing(self.thread, self.start_ns, self.end_ns)

    @cached_property
    def stages(self) -> "Stages":
        """Those that are stages."""
        return self.only(_STAGE)

    @cached_property
    def marking(self) -> "Stages":
        """Those that are stages or steps."""
        return self.only(_STAGE, _STEP)

    def name_at(self, thread: Int64s, time_ns: Int64s) -> Int64s:
        """Return the name of the innermost around each moment on a thread, -1 without one."""
        return np.append(self.name, -1)[self.around.at(thread, time_ns)]

    def name_around(self, launches: "Launches", found: "Found") -> Int64s:
        """Return the name of the innermost around each launch, on its own thread if it has one.

        Else it is that on the thread that told the stage.
        """
        own = self.name_at(launches.thread, launches.time_ns)
        return np.where(own < 0, self.name_at(found.thread, launches.time_ns), own)

    def step_at(self, thread: Int64s, time_ns: Int64s) -> Int64s:
        """Return the step of the innermost around each moment on a thread, 0 without one."""
        return np.append(self.step, 0)[self.around.at(thread, time_ns)]


class Found(NamedTuple):
    """What `stages_at` found, per launch.

    Attributes:
        stage: Code of the stage's name, -1 where there is none.
        step: The step, 0 where there is none.
        thread: The thread whose ranges told it.
        lent: Whether that is another thread than the launch's own.
    """

    stage: Int64s
    step: Int64s
    thread: Int64s
    lent: npt.NDArray[np.bool_]


def stages_at(stages: Stages, launches: Launches) -> Found:
    """Find the innermost stage, and the step of the innermost range, around each launch.

    Threads that mark nothing themselves borrow from the thread of their process that trains: while
    it waits for a backward pass, autograd's threads launch the kernels.
    """
    thread = launches.thread.copy()
    silent = ~np.isin(thread, stages.thread)
    for process in np.unique(launches.process[silent]).tolist():
        thread[silent & (launches.process == process)] = _training_thread(stages, process)
    around = stages.around.at(thread, launches.time_ns)
    return Found(
        stages.stages.name_at(thread, launches.time_ns),
        np.append(stages.step, 0)[around],
        thread,
        silent & (around >= 0),
    )


def counted(*texts: tuple[Any, str]) -> list[str]:
    """Return the texts of what there is, with how many there are."""
    return [f"{count} {text}" for count, text in texts if count]


def launch_remarks(what: str, missing: Any, lent: Any) -> list[str]:
    """Say of how many the launch is unknown, and for how many another thread tells the stage."""
    return counted(
        (missing, f"{what} have no recorded launch: their stage may be unknown"),
        (
            lent,
            f"{what} were launched by threads without marks, such as autograd's: they belong to "
            "the stage of the training thread",
        ),
    )


def _training_thread(stages: Stages, process: int) -> int:
    """Return the thread with most steps, then with most stages."""
    own = stages.process == process
    threads, codes = np.unique(stages.thread[own], return_inverse=True)
    if not len(threads):
        return NOWHERE
    counts = [
        np.bincount(codes, stages.kind[own] == kind, len(threads)) for kind in (_STAGE, _STEP)
    ]
    return int(threads[np.lexsort(counts)[-1]])


def as_spans(
    columns: Mapping[str, Int64s], lane: Int64s, zero_ns: int, *, closed: bool = True
) -> dict[str, Any]:
    """Return columns of `Spans`, sorted and numbered in each rank, with parents on each lane.

    What began first is outside; of two that began at once, the longer one.

    Args:
        columns: Rank, start and end among them, in any order.
        lane: Of each span.
        zero_ns: Where the axis of the spans begins.
        closed: As in `parents`.
    """
    order = np.lexsort((-columns["end_ns"], columns["start_ns"], columns["rank"]))
    found = {name: column[order] for name, column in columns.items()}
    start, end = found["start_ns"], found["end_ns"]
    ids = np.arange(len(order)) - np.searchsorted(found["rank"], found["rank"])
    outer = parents(lane[order], start, end, closed=closed)
    times = {"start_ns": start - zero_ns, "end_ns": end - zero_ns}
    return {**found, **times, "id": ids, "parent": np.append(ids, NO_PARENT)[outer]}
