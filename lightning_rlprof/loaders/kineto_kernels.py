"""Kernels of a torch.profiler trace joined to their launches, and to what the launches lay in."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.loaders.attribution import NOWHERE, Launches, stages_at
from lightning_rlprof.loaders.chrome_events import MISSING
from lightning_rlprof.loaders.kernels import UNKNOWN, Kernels
from lightning_rlprof.loaders.kineto_trace import REGION, STAGE, STEP, KinetoTrace
from lightning_rlprof.spans import Int64s

__all__ = ["kernels_of"]

_GRAPH = "GraphLaunch"  # cudaGraphLaunch, cuGraphLaunch, hipGraphLaunch


class _Place(NamedTuple):
    """What each kernel belongs to: codes of names, -1 without, and the step, 0 without."""

    stage: Int64s
    step: Int64s
    range: Int64s


def kernels_of(trace: KinetoTrace, rank: int) -> tuple[Kernels, list[str]]:
    """Return the kernels by start, on the axis that begins at ``trace.zero_ns``, and remarks.

    Stage, step and range are those around the launch: on its thread, or, where that marks nothing,
    on the thread that trains. Without a launch, they are those that the device saw around the
    kernel itself.
    """
    order = np.argsort(trace.kernels["start_ns"], kind="stable")
    rows = {name: column[order] for name, column in trace.kernels.items()}
    call = _calls(rows, trace.launches)
    lane, time_ns = (
        np.append(trace.launches[each], NOWHERE)[call] for each in ("lane", "start_ns")
    )
    launches = Launches(np.append(trace.processes, NOWHERE)[lane], lane, time_ns)
    place, lent = _places(trace, rows, launches)
    names, zero = list(trace.columns.names), trace.zero_ns
    kernels = Kernels(
        rank=np.full(len(order), rank, np.int64),
        device=np.where(rows["device"] == MISSING, UNKNOWN, rows["device"]),
        stream=np.where(rows["stream"] == MISSING, UNKNOWN, rows["stream"]),
        name=(rows["name"], names),
        start_ns=rows["start_ns"] - zero,
        end_ns=rows["end_ns"] - zero,
        stage=(place.stage, names),
        step=np.where(place.step > 0, place.step, trace.file_step),
        range=(place.range, names),
        launch_ns=np.where(call < 0, UNKNOWN, time_ns - zero),
    )
    return kernels, _remarks(trace, call, lent)


def _calls(kernels: Mapping[str, Int64s], launches: Mapping[str, Int64s]) -> Int64s:
    """Return the row of each kernel's launch, -1 where it was not recorded.

    Traces of several processes may be merged in one file, and use a number twice; then it is the
    last call before the kernel.
    """
    order = np.lexsort((launches["start_ns"], launches["launch"]))
    order = order[launches["launch"][order] != MISSING]
    numbers, starts = launches["launch"][order], launches["start_ns"][order]
    first = np.searchsorted(numbers, kernels["launch"], "left")
    last = np.searchsorted(numbers, kernels["launch"], "right")
    for row in np.flatnonzero(last - first > 1).tolist():
        before = np.searchsorted(starts[first[row] : last[row]], kernels["start_ns"][row], "right")
        first[row] += max(int(before) - 1, 0)
    return np.append(order, -1)[np.where(last > first, first, -1)]


def _places(
    trace: KinetoTrace, kernels: Mapping[str, Int64s], launches: Launches
) -> tuple[_Place, Int64s]:
    """Return what each kernel belongs to, and which kernels have that from another thread."""
    ranges, shadows = trace.ranges, trace.shadows
    found = stages_at(ranges.stages(STAGE, STEP), launches)
    inner = ranges.around((STAGE, REGION), launches.thread, launches.time_ns)
    lent = ranges.around((STAGE, REGION), found.thread, launches.time_ns)
    inner = np.where(inner < 0, lent, inner)
    lost = launches.thread == NOWHERE
    lane = np.where(lost, kernels["lane"], NOWHERE)
    shadow = [
        shadows.around(kinds, lane, kernels["start_ns"])
        for kinds in ((STAGE,), (STEP,), (STAGE, REGION))
    ]
    place = _Place(
        np.where(lost, np.append(shadows.name, -1)[shadow[0]], found.stage),
        np.where(lost, np.append(shadows.step, 0)[shadow[1]], found.step),
        np.where(lost, np.append(shadows.name, -1)[shadow[2]], np.append(ranges.name, -1)[inner]),
    )
    return place, np.flatnonzero(found.lent)


def _remarks(trace: KinetoTrace, call: Int64s, lent: Int64s) -> list[str]:
    """Say for how many kernels little is known."""
    names = list(trace.columns.names)
    graphs = [code for code in np.unique(trace.launches["name"]).tolist() if _GRAPH in names[code]]
    replayed = np.isin(np.append(trace.launches["name"], -1)[call], graphs)
    texts: list[tuple[Any, str]] = [
        (
            np.count_nonzero(call < 0),
            "{} kernels: their launch was not recorded, and little is known of their stage",
        ),
        (
            len(lent),
            "{} kernels were launched by threads that mark nothing, as autograd's do: they count "
            "to what the training thread was in",
        ),
        (
            np.count_nonzero(replayed),
            f"{{}} kernels ran in {len(np.unique(call[replayed]))} replays of graphs: whether the "
            "device idled inside of one is not known",
        ),
    ]
    if not len(call):
        return ["no kernels in it: no device was profiled"]
    return [text.format(int(count)) for count, text in texts if count]
