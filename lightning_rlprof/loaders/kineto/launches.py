"""Find the launch of each kernel and copy, and the stage, step and range around that launch."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.chrome.decoding import MISSING
from lightning_rlprof.loaders.chrome.spill import ROWS, Columns, Grown, beside, in_order
from lightning_rlprof.loaders.kineto.event_kinds import LAUNCH
from lightning_rlprof.loaders.kineto.trace import REGION, STAGE, STEP, KinetoTrace
from lightning_rlprof.loaders.stage_attribution import NOWHERE, Launches, stages_at
from lightning_rlprof.tables.arrays import group_sizes, group_starts
from lightning_rlprof.tables.kernels import UNKNOWN

_GRAPH = "GraphLaunch"  # cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch
_PLACED: dict[str, type[np.generic]] = {
    **dict.fromkeys(("stage", "range"), np.int32),
    **dict.fromkeys(("step", "launch_ns", "call_ns", "thread", "graph"), np.int64),
}
_CALL = {"launch_ns": UNKNOWN, "call_ns": UNKNOWN, "caller": NOWHERE, "replay": 0}


def place(trace: KinetoTrace, work: Grown, what: str) -> tuple[Grown, list[str]]:
    """Find the call of each piece of device work, and the stage, step and range of that.

    These are those around the call on its thread. A thread without marks borrows from the training
    thread. Without a call, they are those that the device recorded around the kernel.

    Args:
        trace: The trace.
        work: Kernels or copies in any order; start_ns, lane and launch are among the columns.
        what: What remarks call them.

    Returns:
        The work by start, and how many rows have missing (`UNKNOWN`) or uncertain values. It has
        more columns. stage and range are codes of names, of the innermost range in the latter, -1
        without. step is 0 without; of a file without steps, the one in its name. launch_ns counts
        from `KinetoTrace.zero_ns`, call_ns is the length of the call, thread the caller's identity.
        graph is the number of the CUDA graph replay, from 1 by time.
    """
    ordered = Grown(work.types)
    asked = Grown(dict.fromkeys(("launch", "start_ns", "row"), np.int64))
    for block in in_order(work.parts(), "start_ns"):
        told = np.flatnonzero(block["launch"] != MISSING)
        own = {name: block[name][told] for name in ("launch", "start_ns")}
        asked.add({**own, "row": told + len(ordered)})
        ordered.add(block)
    rows, missing, lent, inside = Grown({**work.types, **_PLACED}), 0, 0, 0
    replays: set[int] = set()
    marks = _Marks(trace)
    for part in beside(ordered, in_order(_calls_of(trace, asked), "row"), _CALL):
        missing += int(np.count_nonzero(part["caller"] == NOWHERE))
        lent += marks.place(part)
        replayed = part["graph"][part["graph"] != UNKNOWN]
        inside += len(replayed)
        replays.update(np.unique(replayed).tolist())
        rows.add({name: part[name] for name in rows.types})
    texts = (
        (missing, "have no recorded launch: their stage may be unknown"),
        (
            lent,
            "were launched by threads without marks, such as autograd's: they belong to the stage "
            "of the training thread",
        ),
        (inside, f"ran in {len(replays)} CUDA graph replays: idle time inside a replay is unknown"),
    )
    return rows, [f"{count} {what} {text}" for count, text in texts if count]


def _calls_of(trace: KinetoTrace, asked: Grown) -> Iterator[Columns]:
    """Yield the calls of the driver beside the rows of the work that has their number, too.

    Traces of several processes may be merged in one file, and use a number twice; then it is the
    last call before the work.
    """
    nothing = {"call_ns": 0, "caller": 0, "replay": 0}
    work = (
        {**part, **{name: np.full(len(part["row"]), each) for name, each in nothing.items()}}
        for part in asked.parts()
    )
    calls = _calls(trace)
    if len(asked) <= ROWS:
        known = np.unique(asked.rows()["launch"])
        calls = (_only(part, np.isin(part["launch"], known)) for part in calls)
    for block in in_order(chain(calls, work), "launch", "start_ns", "row", whole=1):
        called, at = block["row"] < 0, np.arange(len(block["row"]))
        first = group_starts(block["launch"])
        sizes = group_sizes(first, len(at))
        last = np.maximum.accumulate(np.where(called, at, -1))
        early = np.minimum.reduceat(np.where(called, at, len(at)), first)
        call = np.where(last >= np.repeat(first, sizes), last, np.repeat(early, sizes))
        own = np.flatnonzero(~called & (call < len(at)))
        call = call[own]
        told = {name: block[name][call] for name in nothing}
        began = block["start_ns"][call] - trace.zero_ns
        yield {"row": block["row"][own], "launch_ns": began, **told}


def _calls(trace: KinetoTrace) -> Iterator[Columns]:
    """Yield the calls of the driver that have a number; row is -1."""
    launches = trace.grown(LAUNCH)  # before the names: they may be read with it
    names = list(trace.columns.names)
    graphs = np.array([_GRAPH in name for name in names] or [False])
    starts = [part["start_ns"][graphs[part["name"]]] for part in launches.parts()]
    by_time = np.argsort(np.concatenate([*starts, np.empty(0, np.int64)]), kind="stable")
    replay = np.empty(len(by_time), np.int64)
    replay[by_time] = np.arange(1, len(by_time) + 1)
    for part in launches.parts():
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
        self._stages, self._inner = trace.ranges.only(STAGE, STEP), trace.ranges.only(STAGE, REGION)
        kinds = ((STAGE,), (STEP,), (STAGE, REGION))
        self._shadows = [trace.shadows.only(*each) for each in kinds]

    def place(self, work: dict[str, npt.NDArray[Any]]) -> int:
        """Add what each call lay in; returns for how many another thread told it."""
        trace, lane = self._trace, work["caller"]
        lost = lane == NOWHERE
        began = np.where(lost, UNKNOWN, work["launch_ns"] + trace.zero_ns)
        launches = Launches(np.append(trace.columns.processes, NOWHERE)[lane], lane, began)
        found = stages_at(self._stages, launches)
        inner = self._inner.name_at(lane, began)
        inner = np.where(inner < 0, self._inner.name_at(found.thread, began), inner)
        on_device = np.where(lost, work["lane"], NOWHERE), work["start_ns"]
        stages, steps, ranges = self._shadows
        step = np.where(lost, steps.step_at(*on_device), found.step)
        work |= {
            "stage": np.where(lost, stages.name_at(*on_device), found.stage),
            "range": np.where(lost, ranges.name_at(*on_device), inner),
            "step": np.where(step > 0, step, trace.file_step),
            "thread": np.append(trace.idents, UNKNOWN)[lane],
            "graph": np.where(work["replay"] > 0, work["replay"], UNKNOWN),
        }
        return int(np.count_nonzero(found.lent))
