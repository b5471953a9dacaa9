"""Find the launch of each kernel and copy, and the stage, step and range around that launch."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.chrome.decoding import MISSING
from lightning_rlprof.loaders.chrome.spill import ROWS, Columns, Grown, beside, heads, in_order
from lightning_rlprof.loaders.kineto.event_kinds import LAUNCH
from lightning_rlprof.loaders.kineto.trace import REGION, STAGE, STEP, KinetoTrace
from lightning_rlprof.loaders.stage_attribution import NOWHERE, Launches, stages_at
from lightning_rlprof.tables.kernels import UNKNOWN

_GRAPH = "GraphLaunch"  # cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch
_PLACED: dict[str, type[np.generic]] = {
    **dict.fromkeys(("stage", "range"), np.int32),
    **dict.fromkeys(("step", "launch_ns", "call_ns", "thread", "graph"), np.int64),
}
_CALL = {"launch_ns": UNKNOWN, "call_ns": UNKNOWN, "caller": NOWHERE, "replay": 0}


class Placed(NamedTuple):
    """Kernels or copies by start, with their launches and the stages of these.

    Attributes:
        rows: The columns that were given, and those below; `UNKNOWN` stands for missing values.
            stage, range: Codes of the names of the stage and of the innermost range, -1 without.
            step: 0 without; of a file without steps, the one in its name.
            launch_ns: When the call began, counted from `KinetoTrace.zero_ns`.
            call_ns: How long the call took.
            thread: Identity of the calling thread.
            graph: Number of the CUDA graph replay that it ran in, from 1 by time.
        remarks: How many rows have unknown values; "{}" is replaced by what the rows are.
    """

    rows: Grown
    remarks: list[str]


def placed(
    trace: KinetoTrace, parts: Iterable[Columns], types: Mapping[str, type[np.generic]]
) -> Placed:
    """Find the call of each piece of device work, and the stage, step and range of that.

    These are those around the call on its thread. A thread without marks borrows from the training
    thread. Without a call, they are those that the device recorded around the kernel.

    Args:
        trace: The trace.
        parts: Some rows of work at a time, in any order; start_ns, lane and launch are among the
            columns.
        types: Of the columns.
    """
    work, asked = _work(parts, types)
    calls = in_order(_calls_of(trace, asked), "row")
    rows, missing, lent, inside = Grown({**types, **_PLACED}), 0, 0, 0
    replays: set[int] = set()
    marks = _Marks(trace)
    for part in beside(work, calls, _CALL):
        missing += int(np.count_nonzero(part["caller"] == NOWHERE))
        lent += marks.place(part)
        replayed = part["graph"][part["graph"] != UNKNOWN]
        inside += len(replayed)
        replays.update(np.unique(replayed).tolist())
        rows.add({name: part[name] for name in rows.types})
    return Placed(rows, _remarks(missing, lent, inside, len(replays)))


def _work(parts: Iterable[Columns], types: Mapping[str, type[np.generic]]) -> tuple[Grown, Grown]:
    """Return the work by start, and the numbers of the calls that launched it."""
    work = Grown(types)
    asked = Grown(dict.fromkeys(("launch", "start_ns", "row"), np.int64))
    for block in in_order(parts, "start_ns"):
        told = np.flatnonzero(block["launch"] != MISSING)
        own = {name: block[name][told] for name in ("launch", "start_ns")}
        asked.add({**own, "row": told + len(work)})
        work.add(block)
    return work, asked


def _calls_of(trace: KinetoTrace, asked: Grown) -> Iterator[Columns]:
    """Yield the calls of the driver beside the rows of the work that has their number, too.

    Traces of several processes may be merged in one file, and use a number twice; then it is the
    last call before the work.
    """
    nothing = {"call_ns": 0, "caller": 0, "replay": 0}
    work = (
        {**part, **{name: np.full(len(part["row"]), each) for name, each in nothing.items()}}
        for part in asked.parts(ROWS)
    )
    calls = _calls(trace)
    if len(asked) <= ROWS:
        known = np.unique(asked.column("launch"))
        calls = (_only(part, np.isin(part["launch"], known)) for part in calls)
    for block in in_order(chain(calls, work), "launch", "start_ns", "row", whole=1):
        called, at = block["row"] < 0, np.arange(len(block["row"]))
        first = heads(block["launch"])
        lengths = np.diff(np.append(first, len(at)))
        last = np.maximum.accumulate(np.where(called, at, -1))
        early = np.minimum.reduceat(np.where(called, at, len(at)), first)
        call = np.where(last >= np.repeat(first, lengths), last, np.repeat(early, lengths))
        own = np.flatnonzero(~called & (call < len(at)))
        call = call[own]
        told = {name: block[name][call] for name in nothing}
        began = block["start_ns"][call] - trace.zero_ns
        yield {"row": block["row"][own], "launch_ns": began, **told}


def _calls(trace: KinetoTrace) -> Iterator[Columns]:
    """Yield the calls of the driver that have a number; row is -1."""
    trace.count(LAUNCH)  # before the names: they may be read with it
    names = list(trace.columns.names)
    graphs = np.array([_GRAPH in name for name in names] or [False])
    starts = [part["start_ns"][graphs[part["name"]]] for part in trace.parts(LAUNCH)]
    by_time = np.argsort(np.concatenate([*starts, np.empty(0, np.int64)]), kind="stable")
    replay = np.empty(len(by_time), np.int64)
    replay[by_time] = np.arange(1, len(by_time) + 1)
    for part in trace.parts(LAUNCH):
        own = graphs[part["name"]]
        number = np.zeros(len(own), np.int64)
        number[own], replay = replay[: (count := np.count_nonzero(own))], replay[count:]
        columns = {
            "launch": part["launch"],
            "start_ns": part["start_ns"],
            "row": np.full(len(own), -1),
            "call_ns": part["end_ns"] - part["start_ns"],
            "caller": part["lane"].astype(np.int64),
            "replay": number,
        }
        yield _only(columns, part["launch"] != MISSING)


def _only(rows: Columns, own: npt.NDArray[np.bool_]) -> Columns:
    return {name: column[own] for name, column in rows.items()}


class _Marks:
    """What a trace marks, made ready to be asked."""

    def __init__(self, trace: KinetoTrace) -> None:
        self._trace = trace
        self._stages = trace.ranges.stages(STAGE, STEP)
        self._inner = trace.ranges.of(STAGE, REGION)
        self._shadows = [trace.shadows.of(*kinds) for kinds in ((STAGE,), (STEP,), (STAGE, REGION))]

    def place(self, work: dict[str, npt.NDArray[Any]]) -> int:
        """Add what each call lay in; returns for how many another thread told it."""
        trace, lane = self._trace, work["caller"]
        ranges, shadows = trace.ranges, trace.shadows
        lost = lane == NOWHERE
        began = np.where(lost, UNKNOWN, work["launch_ns"] + trace.zero_ns)
        launches = Launches(np.append(trace.processes, NOWHERE)[lane], lane, began)
        found = stages_at(self._stages, launches)
        inner = self._inner.at(lane, began)
        inner = np.where(inner < 0, self._inner.at(found.thread, began), inner)
        own = np.where(lost, work["lane"], NOWHERE)
        shadow = [each.at(own, work["start_ns"]) for each in self._shadows]
        inside = np.append(ranges.name, -1)[inner]
        step = np.where(lost, np.append(shadows.step, 0)[shadow[1]], found.step)
        work |= {
            "stage": np.where(lost, np.append(shadows.name, -1)[shadow[0]], found.stage),
            "range": np.where(lost, np.append(shadows.name, -1)[shadow[2]], inside),
            "step": np.where(step > 0, step, trace.file_step),
            "thread": np.append(trace.idents, UNKNOWN)[lane],
            "graph": np.where(work["replay"] > 0, work["replay"], UNKNOWN),
        }
        return int(np.count_nonzero(found.lent))


def _remarks(missing: int, lent: int, inside: int, replays: int) -> list[str]:
    texts: list[tuple[int, str]] = [
        (missing, "have no recorded launch: their stage may be unknown"),
        (
            lent,
            "were launched by threads without marks, such as autograd's: they belong to the stage "
            "of the training thread",
        ),
        (
            inside,
            f"ran in {replays} CUDA graph replays: idle time inside a replay is unknown",
        ),
    ]
    return [f"{count} {{}} {text}" for count, text in texts if count]
