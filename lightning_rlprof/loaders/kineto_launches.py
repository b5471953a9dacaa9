"""What a torch.profiler trace knows of device work: its call on the host, and what that lay in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rlprof.loaders.attribution import NOWHERE, Found, Launches, stages_at
from lightning_rlprof.loaders.chrome_events import MISSING
from lightning_rlprof.loaders.chrome_kinds import LAUNCH
from lightning_rlprof.loaders.kernels import UNKNOWN
from lightning_rlprof.loaders.kineto_trace import REGION, STAGE, STEP, KinetoTrace
from lightning_rlprof.spans import Int64s

__all__ = ["Placed", "blocks", "placed"]

_BLOCK = 1 << 16  # rows; twenty arrays of that length are 10 MB

_GRAPH = "GraphLaunch"  # cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch
_WIDE = ("step", "launch_ns", "call_ns", "thread", "graph")
_NARROW = ("stage", "range")


@dataclass(frozen=True, eq=False)
class Placed:
    """What is known of device work beside itself, per row, and remarks in the end.

    Attributes:
        stage: Code of the stage's name, -1 without.
        range: Code of the innermost range's name, -1 without.
        step: The step, 0 without; a file that tells no steps may have one in its name.
        launch_ns: When the call began, on the axis from `KinetoTrace.zero_ns`, else `UNKNOWN`.
        call_ns: How long it took, else `UNKNOWN`.
        thread: Identity of the calling thread, else `UNKNOWN`.
        graph: Number of the replay of a graph that it ran in, from 1 by time, else `UNKNOWN`.
        remarks: For how many of the rows little is known.
    """

    stage: npt.NDArray[Any]
    range: npt.NDArray[Any]
    step: Int64s
    launch_ns: Int64s
    call_ns: Int64s
    thread: Int64s
    graph: Int64s
    remarks: list[str]


class _Calls:
    """The calls of the driver, to be found by the number that their device work has, too.

    Traces of several processes may be merged in one file, and use a number twice; then it is the
    last call before the work.
    """

    def __init__(self, trace: KinetoTrace) -> None:
        number, start = trace.column("launch", LAUNCH), trace.column("start_ns", LAUNCH)
        order = np.lexsort((start, number))
        order = order[number[order] != MISSING]
        self._number = number[order]
        self.start_ns = np.append(start[order], UNKNOWN)
        self.length_ns = np.append(trace.column("end_ns", LAUNCH)[order], UNKNOWN)
        self.length_ns[:-1] -= self.start_ns[:-1]
        self.lane = np.append(trace.column("lane", LAUNCH)[order], np.int32(NOWHERE))
        names = list(trace.columns.names)
        codes = trace.column("name", LAUNCH)[order]
        graphs = [code for code in np.unique(codes).tolist() if _GRAPH in names[code]]
        self.replay = np.zeros(len(order) + 1, np.int32)
        replays = np.flatnonzero(np.isin(codes, graphs))
        by_time = replays[np.argsort(self.start_ns[replays], kind="stable")]
        self.replay[by_time] = np.arange(1, len(by_time) + 1)

    def of(self, number: Int64s, start_ns: Int64s) -> Int64s:
        """Return the place in the columns of the call of each number, -1 without one."""
        first = np.searchsorted(self._number, number, "left")
        last = np.searchsorted(self._number, number, "right")
        for row in np.flatnonzero(last - first > 1).tolist():
            own = self.start_ns[first[row] : last[row]]
            first[row] += max(int(np.searchsorted(own, start_ns[row], "right")) - 1, 0)
        return np.where((last > first) & (number != MISSING), first, -1)


def placed(trace: KinetoTrace, work: Mapping[str, npt.NDArray[Any]]) -> Placed:
    """Find the call of each piece of device work, and the stage, step and range of that.

    These are those around the call: on its thread, or, where that marks nothing, on the one that
    trains. Without a call, they are those that the device saw around the work.

    Args:
        trace: The trace.
        work: Columns start_ns, lane, launch.
    """
    calls = _Calls(trace)
    length, missing, lent = len(work["start_ns"]), 0, 0
    columns: dict[str, Any] = {name: np.empty(length, np.int64) for name in _WIDE}
    columns |= {name: np.empty(length, np.int32) for name in _NARROW}
    for rows in blocks(length, len(trace.ranges.name)):
        part = {name: work[name][rows] for name in ("start_ns", "lane", "launch")}
        call = calls.of(part["launch"], part["start_ns"])
        found, places = _places(trace, part, call, calls)
        began = calls.start_ns[call] - trace.zero_ns
        columns["launch_ns"][rows] = np.where(call < 0, UNKNOWN, began)
        columns["call_ns"][rows] = calls.length_ns[call]
        columns["thread"][rows] = np.append(trace.idents, UNKNOWN)[calls.lane[call]]
        columns["graph"][rows] = np.where((no := calls.replay[call]) > 0, no, np.int64(UNKNOWN))
        for name, codes in places.items():
            columns[name][rows] = codes
        missing += int(np.sum(call < 0))
        lent += int(np.sum(found.lent))
    if trace.file_step:
        columns["step"] = np.where(columns["step"] > 0, columns["step"], trace.file_step)
    return Placed(**columns, remarks=_remarks(missing, lent, columns["graph"]))


def blocks(length: int, ranges: int = 0) -> Iterator[slice]:
    """Return which rows to join at once.

    Args:
        length: Number of rows.
        ranges: Number of what each block is joined to anew: more make larger blocks.
    """
    size = max(_BLOCK, 4 * ranges)
    return (slice(low, low + size) for low in range(0, length, size))


def _places(
    trace: KinetoTrace, work: Mapping[str, npt.NDArray[Any]], call: Int64s, calls: _Calls
) -> tuple[Found, dict[str, Int64s]]:
    """Return what each call lay in, and whether another thread told."""
    ranges, shadows, lane = trace.ranges, trace.shadows, calls.lane[call]
    launches = Launches(np.append(trace.processes, NOWHERE)[lane], lane, calls.start_ns[call])
    found = stages_at(ranges.stages(STAGE, STEP), launches)
    inner = ranges.around((STAGE, REGION), launches.thread, launches.time_ns)
    lent = ranges.around((STAGE, REGION), found.thread, launches.time_ns)
    inner = np.where(inner < 0, lent, inner)
    lost = launches.thread == NOWHERE
    own = np.where(lost, work["lane"], NOWHERE)
    shadow = [
        shadows.around(kinds, own, work["start_ns"])
        for kinds in ((STAGE,), (STEP,), (STAGE, REGION))
    ]
    inside = np.append(ranges.name, -1)[inner]
    return found, {
        "stage": np.where(lost, np.append(shadows.name, -1)[shadow[0]], found.stage),
        "step": np.where(lost, np.append(shadows.step, 0)[shadow[1]], found.step),
        "range": np.where(lost, np.append(shadows.name, -1)[shadow[2]], inside),
    }


def _remarks(missing: int, lent: int, graph: Int64s) -> list[str]:
    """Say for how many little is known; "{}" is what they are."""
    replayed = graph[graph != UNKNOWN]
    texts: list[tuple[int, str]] = [
        (missing, "their launch was not recorded, and little is known of their stage"),
        (
            lent,
            "were launched by threads that mark nothing, as autograd's do: they count to what the "
            "training thread was in",
        ),
        (
            len(replayed),
            f"ran in {len(np.unique(replayed))} replays of graphs: whether the device idled inside "
            "of one is not known",
        ),
    ]
    return [
        f"{count} {{}}{':' * (at == 0)} {text}" for at, (count, text) in enumerate(texts) if count
    ]
