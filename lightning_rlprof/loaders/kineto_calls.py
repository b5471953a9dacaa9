"""What the host called, of a torch.profiler trace: operators, modules, Python, the driver."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.attribution import Launches, stages_at
from lightning_rlprof.loaders.chrome_columns import MOST_LANES
from lightning_rlprof.loaders.chrome_kinds import LAUNCH, OPERATOR, PYTHON
from lightning_rlprof.loaders.chrome_scratch import Settled
from lightning_rlprof.loaders.kineto_launches import blocks
from lightning_rlprof.loaders.kineto_trace import STAGE, STEP, KinetoTrace
from lightning_rlprof.spans import Int64s
from lightning_rlprof.table import Column, ColumnRows, Table

__all__ = ["SLACK_NS", "call_table", "parents"]

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


def call_table(trace: KinetoTrace, rank: int) -> Table:
    """Return one row per call of the host, by thread and start, outer calls first.

    A module's name stands without torch's ``nn.Module: ``. Stage and step are those around the
    start of the call, of the training thread for threads that mark nothing.
    """
    settled, order = Settled(), _order(trace)
    names = list(trace.columns.names)
    lane, start, end = (_sorted(trace, name, order) for name in ("lane", "start_ns", "end_ns"))
    code, kind = _sorted(trace, "name", order), _kinds(trace, order)
    modules = np.array([name.startswith(_MODULES) for name in names] or [False])
    kind[(kind == _PYTHON) & modules[code]] = _MODULE
    settled.add(trace.idents[lane])
    settled.add(code)
    settled.add(kind)
    settled.add(start - trace.zero_ns)
    settled.add(end - start)
    settled.add(parents(lane, start, end, kind == _RUNTIME), nothing=0)
    del code, end
    stage, step = _marks(trace, lane, start)
    settled.add(stage)
    settled.add(step, nothing=0)
    del stage, step
    settled.add(_forwards(trace, order, lane, start), nothing=0)
    settled.add(np.arange(1, len(order) + 1))
    del order, lane, start, kind
    return _table(trace, rank, names, settled)


def _table(trace: KinetoTrace, rank: int, names: list[str], settled: Settled) -> Table:
    thread, name, kind, start, length, parent, stage, step, forward, number = settled.columns()
    cells: list[Any] = [
        np.broadcast_to(np.int64(rank), len(thread)),
        thread,
        (name, [name.removeprefix(_MODULES) for name in names]),
        (kind, _KINDS),
        start,
        length,
        number,
        parent,
        (stage, names),
        step,
        forward,
    ]
    return Table("calls", _COLUMNS, ColumnRows(cells), "; ".join(trace.losses(*_SOURCES)))


def parents(
    lane: npt.NDArray[Any], start: Int64s, end: Int64s, alone: npt.NDArray[np.bool_]
) -> Int64s:
    """Return the number, from 1, of the innermost call around each one, 0 without.

    A call may end `SLACK_NS` later than the one around it, and begins before that has ended.

    Args:
        lane: Of each call; those of one lane follow one another by start, outer calls first.
        start: Start of each call.
        end: End of each call.
        alone: Calls that never are around others.

    Example::

        >>> start, end = np.array([0, 10, 20, 95_000]), np.array([90_000, 50, 30, 99_000])
        >>> parents(np.zeros(4, np.int64), start, end, np.zeros(4, bool)).tolist()
        [0, 1, 2, 0]
    """
    found = np.zeros(len(lane), np.int64)
    around, last = _NOBODY, None
    for rows in blocks(len(lane)):
        cuts = np.flatnonzero(np.diff(lane[rows])) + 1 + rows.start
        edges = [rows.start, *cuts.tolist(), rows.stop]
        for first, over in itertools.pairwise(edges):
            part = slice(first, over)
            around, last = (around if lane[first] == last else _NOBODY), lane[first]
            found[part], around = _within(around, first, start[part], end[part], alone[part])
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


def _order(trace: KinetoTrace) -> npt.NDArray[np.int32]:
    """Return the order of the calls of all sources, put end to end."""
    lane = trace.column("lane", *_SOURCES)  # before the threads: they may be read with it
    by_ident = np.empty(len(trace.idents), np.int32)
    by_ident[np.argsort(trace.idents, kind="stable")] = np.arange(len(by_ident))
    thread = by_ident[lane]
    del lane
    start, last = (trace.column(name, *_SOURCES) for name in ("start_ns", "end_ns"))
    np.negative(last, out=last)
    # Of those that begin and end at once the source decides, by the stability of the sort.
    return np.lexsort((last, start, thread)).astype(np.int32)


def _sorted(trace: KinetoTrace, name: str, order: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    return trace.column(name, *_SOURCES)[order]


def _kinds(trace: KinetoTrace, order: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
    lengths = [trace.count(source) for source in _SOURCES]
    return np.repeat(np.arange(len(_SOURCES), dtype=np.int8), lengths)[order]


def _marks(
    trace: KinetoTrace, lane: npt.NDArray[Any], start: Int64s
) -> tuple[npt.NDArray[np.int32], Int64s]:
    """Return the stage and the step around the start of each call."""
    stages, processes = trace.ranges.stages(STAGE, STEP), trace.processes
    stage, step = np.empty(len(lane), np.int32), np.empty(len(lane), np.int64)
    for rows in blocks(len(lane), len(trace.ranges.name)):
        own = lane[rows].astype(np.int64)
        found = stages_at(stages, Launches(processes[own], own, start[rows]))
        stage[rows] = found.stage
        step[rows] = np.where(found.step > 0, found.step, trace.file_step)
    return stage, step


def _forwards(
    trace: KinetoTrace, order: npt.NDArray[np.int32], lane: npt.NDArray[Any], start: Int64s
) -> Int64s:
    """Return the number of the forward operator of each backward one, 0 without.

    Both have autograd's sequence number, the backward one tells a forward thread, too. Of several
    forward operators with one number, which lie in each other, the last one before it made the
    node; torch's own arrows say the same. Threads count alike: a number that several of a process
    use is not told apart.
    """
    sequence = trace.column("sequence", OPERATOR)
    numbered = np.flatnonzero(sequence >= 0)
    sequence, backward = sequence[numbered], trace.column("forward", OPERATOR)[numbered] > 0
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    rows = place[trace.count(PYTHON) + numbered]
    found = np.zeros(len(order), np.int64)
    if len(rows):
        process = trace.processes[lane[rows]]
        by_number = np.lexsort((rows, backward, start[rows], sequence, process))
        rows, backward = rows[by_number], backward[by_number]
        heads = _heads(process[by_number], sequence[by_number])
        forward = _before(heads, backward, lane[rows])
        told = backward & (forward >= 0)
        found[rows[told]] = rows[forward[told]] + 1
    return found


def _heads(*columns: Int64s) -> Int64s:
    """Return where one of some sorted columns changes."""
    changes = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(np.append(True, changes))


def _before(heads: Int64s, backward: npt.NDArray[np.bool_], lane: npt.NDArray[Any]) -> Int64s:
    """Return the place of the last forward operator before each row of its group, -1 without."""
    places = np.arange(len(backward))
    last = np.maximum.accumulate(np.where(backward, -1, places))
    low = np.minimum.reduceat(np.where(backward, MOST_LANES + 1, lane), heads)
    high = np.maximum.reduceat(np.where(backward, -1, lane), heads)
    lengths = np.diff(np.append(heads, len(backward)))
    sure = np.repeat(low == high, lengths)
    return np.where(sure & (last >= np.repeat(heads, lengths)), last, -1)
