"""What the host called, of a torch.profiler trace: operators, modules, Python, the driver."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.attribution import Launches, stages_at
from lightning_rlprof.loaders.chrome_columns import MOST_LANES
from lightning_rlprof.loaders.chrome_events import MISSING
from lightning_rlprof.loaders.chrome_kinds import LAUNCH, OPERATOR, PYTHON
from lightning_rlprof.loaders.chrome_scratch import Grown
from lightning_rlprof.loaders.chrome_sort import ROWS, Columns, beside, heads, in_order
from lightning_rlprof.loaders.kernels import known
from lightning_rlprof.loaders.kineto_ranges import STAGE, STEP
from lightning_rlprof.loaders.kineto_trace import KinetoTrace
from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import Column, ColumnRows, PartRows, Table

__all__ = ["SLACK_NS", "Nesting", "call_table"]

SLACK_NS = 1_000
"""A call may end that much later than the call around it: older traces count microseconds, and
the ends of Python's functions are rounded."""

_COLUMNS = (
    Column("rank", "count"),
    Column("thread", "count"),
    Column("name", "text"),
    Column("kind", "text"),
    Column("start", "duration", "ns"),
    Column("duration", "duration", "ns"),
    Column("id", "count"),
    Column("parent", "count"),
    Column("stage", "text"),
    Column("step", "count"),
    Column("forward", "count"),
)
_KINDS = ("python", "operator", "runtime", "module")
_PYTHON, _RUNTIME, _MODULE = (_KINDS.index(kind) for kind in ("python", "runtime", "module"))
# In the order of `_KINDS`: of two calls that begin and end at once the outer one comes first.
_SOURCES = (PYTHON, OPERATOR, LAUNCH)
_MODULES = "nn.Module: "
_PLACED: dict[str, type[np.generic]] = {
    **dict.fromkeys(("lane", "name", "stage"), np.int32),
    "kind": np.int8,
    **dict.fromkeys(("start_ns", "length_ns", "parent", "step"), np.int64),
}
_NUMBERED: dict[str, type[np.generic]] = {
    **dict.fromkeys(("sequence", "start_ns", "row"), np.int64),
    **dict.fromkeys(("lane", "process"), np.int32),
    "backward": np.int8,
}


def call_table(trace: KinetoTrace, rank: int) -> Table:
    """Return one row per call of the host, by thread and start, outer calls first.

    A module's name stands without torch's ``nn.Module: ``. Stage and step are those around the
    start of the call, of the training thread for threads that mark nothing.
    """
    placed, numbered = _placed(trace)
    rows = Grown({**_PLACED, "forward": np.int64})
    for part in beside(placed, in_order(_forwards(numbered), "row"), {"forward": 0}):
        rows.add(part)
    names = list(trace.columns.names)
    texts = [name.removeprefix(_MODULES) for name in names]
    read = partial(_cells, rows, rank, trace.idents, names, texts)
    note = "; ".join(trace.losses(*_SOURCES))
    return Table("calls", _COLUMNS, PartRows(len(rows), read), note)


def _cells(
    rows: Grown, rank: int, idents: Int64s, names: list[str], texts: list[str], low: int, high: int
) -> ColumnRows:
    """Return some rows of the table."""
    part = rows.rows(low, high)
    cells: list[Any] = [
        np.broadcast_to(np.int64(rank), high - low),
        idents[part["lane"]],
        (part["name"], texts),
        (part["kind"], _KINDS),
        part["start_ns"],
        part["length_ns"],
        np.arange(low + 1, high + 1),
        known(part["parent"], nothing=0),
        (part["stage"], names),
        known(part["step"], nothing=0),
        known(part["forward"], nothing=0),
    ]
    return ColumnRows(cells)


def _placed(trace: KinetoTrace) -> tuple[Grown, Grown]:
    """Return the calls in order, with what is around them, and those that autograd numbers."""
    rows, numbered = Grown(_PLACED), Grown(_NUMBERED)
    trace.count(OPERATOR)  # before the names: they may be read with it
    nesting, stages, processes = Nesting(), trace.ranges.stages(STAGE, STEP), trace.processes
    modules = np.array([name.startswith(_MODULES) for name in trace.columns.names] or [False])
    for block in in_order(_calls(trace), "thread", "start_ns", "last"):
        lane, start, end = block["lane"].astype(np.int64), block["start_ns"], -block["last"]
        block["kind"][(block["kind"] == _PYTHON) & modules[block["name"]]] = _MODULE
        found = stages_at(stages, Launches(processes[lane], lane, start))
        own = np.flatnonzero(block["sequence"] >= 0)
        told = {name: block[name][own] for name in ("sequence", "start_ns", "lane")}
        process, backward = processes[lane[own]], block["forward"][own] > 0
        numbered.add({**told, "row": own + len(rows), "process": process, "backward": backward})
        rows.add(
            {
                **{name: block[name] for name in ("lane", "name", "kind")},
                "start_ns": start - trace.zero_ns,
                "length_ns": end - start,
                "parent": nesting.parents(lane, start, end, block["kind"] == _RUNTIME),
                "stage": found.stage,
                "step": np.where(found.step > 0, found.step, trace.file_step),
            }
        )
    return rows, numbered


def _calls(trace: KinetoTrace) -> Iterator[Columns]:
    """Yield the calls of all sources."""
    for kind, source in enumerate(_SOURCES):
        for part in trace.parts(source):
            nothing = np.full(len(part["lane"]), MISSING)
            yield {
                **{name: part[name] for name in ("lane", "name", "start_ns")},
                "thread": trace.idents[part["lane"]],
                "last": -part["end_ns"],
                "kind": np.full(len(nothing), kind, np.int8),
                "sequence": part.get("sequence", nothing),
                "forward": part.get("forward", nothing),
            }


class Nesting:
    """Finds the innermost call around each one, of calls that come some at a time."""

    def __init__(self) -> None:
        self._around, self._rows = _NOBODY, 0
        self._lane: int | None = None

    def parents(
        self, lane: Int64s, start: Int64s, end: Int64s, alone: npt.NDArray[np.bool_]
    ) -> Int64s:
        """Return the number, from 1, of the innermost call around each of those that follow.

        0 without one. A call may end `SLACK_NS` later than the one around it, and begins before
        that has ended.

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


class _Around(NamedTuple):
    """Calls of one lane that may still be around others, outer ones first."""

    number: Int64s
    end: Int64s


_NOBODY = _Around(np.empty(0, np.int64), np.empty(0, np.int64))


def _within(
    around: _Around, first: int, start: Int64s, end: Int64s, alone: npt.NDArray[np.bool_]
) -> tuple[Int64s, _Around]:
    """Return the parents of some calls of a lane, and what is still around those that follow."""
    known, own = len(around.number), np.flatnonzero(~alone)
    number = np.append(around.number, own + (first + 1))
    over = np.append(around.end, end[own])
    above = np.arange(-1, len(number) - 1)
    _climb(above[known:], start[own], end[own], over, above)
    leaf = np.flatnonzero(alone)
    at = np.searchsorted(own, leaf) + (known - 1)
    _climb(at, start[leaf], end[leaf], over, above)
    found, number = np.empty(len(start), np.int64), np.append(number, 0)  # -1 reads the last
    found[own], found[leaf] = number[above[known:]], number[at]
    chain, last = [], len(above) - 1
    while last >= 0:
        chain.append(last)
        last = int(above[last])
    return found, _Around(number[chain[::-1]], over[chain[::-1]])


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


def _forwards(numbered: Grown) -> Iterator[Columns]:
    """Yield the number of the forward operator of each backward one that has one, with its row.

    Both have autograd's sequence number, the backward one tells a forward thread, too. Of several
    forward operators with one number, which lie in each other, the last one before it made the
    node; torch's own arrows say the same. Threads count alike: a number that several of a process
    use is not told apart.
    """
    keys = ("process", "sequence", "start_ns", "backward", "row")
    for block in in_order(numbered.parts(ROWS), *keys):
        row, backward = block["row"], block["backward"] > 0
        forward = _before(heads(block["process"], block["sequence"]), backward, block["lane"])
        told = backward & (forward >= 0)
        yield {"row": row[told], "forward": row[forward[told]] + 1}


def _before(heads: Int64s, backward: npt.NDArray[np.bool_], lane: npt.NDArray[Any]) -> Int64s:
    """Return the place of the last forward operator before each row of its group, -1 without."""
    places = np.arange(len(backward))
    last = np.maximum.accumulate(np.where(backward, -1, places))
    low = np.minimum.reduceat(np.where(backward, MOST_LANES + 1, lane), heads)
    high = np.maximum.reduceat(np.where(backward, -1, lane), heads)
    lengths = np.diff(np.append(heads, len(backward)))
    sure = np.repeat(low == high, lengths)
    return np.where(sure & (last >= np.repeat(heads, lengths)), last, -1)
