"""What each rank's device did in each stage: compute, communication, copies, idle, unknown."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lightning_rlprof.analysis.device_runs import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    NO_STAGE,
    DeviceRuns,
    Lane,
    device_runs,
    grid_of,
)
from lightning_rlprof.analysis.partition import paint
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["breakdown"]

_PARTS = ("compute", "exposed communication", "exposed copy", "idle", "unknown")
_HIDDEN = ("overlapped communication", "overlapped copy")
_COPIES = ("exposed copy", "overlapped copy")
_NOTHING = "no kernels and no copies of a device were recorded"
_UNTRACED = "untraced"
_TOTAL = "total"

_Sums = dict[int, list[int]]
"""By stage: what `_PARTS` took, then `_HIDDEN`."""


def breakdown(spans: Spans, *, per_rank: bool = True) -> Table:
    """Divide the time of each rank's device among kinds of work, idle and unknown, by stage.

    The wall of a row is compute + exposed communication + exposed copy + idle + unknown, and walls
    of a rank's device add up to the time from the first thing that its rank recorded to the last,
    in integer nanoseconds. What is overlapped runs beside compute (copies: or communication) and is
    in no sum. The last row is the total.

    Work counts to the stage that launched it, time in which nothing runs to the stage that the
    host was in; "untraced" is no stage. Unknown: nothing ran, and nobody looked, or it was inside
    of a graph's replay.

    Abstains without work of a device.

    Args:
        spans: The run.
        per_rank: A row per rank, device and stage; else one per stage.
    """
    runs = device_runs(spans)
    name = "breakdown" if per_rank else "breakdown by stage"
    columns = (
        *([Column("rank", "count"), Column("device", "count")] if per_rank else []),
        Column("stage", "text"),
        *(Column(each, "duration", "ns") for each in ("wall", *_PARTS, *_HIDDEN)),
    )
    if not runs.lanes:
        return Table(name, columns, abstained=" ".join([_NOTHING, *runs.remarks]))
    parts = [_sums(lane, len(runs.stages)) for lane in runs.lanes]
    return Table(name, columns, _rows(parts, runs, per_rank), " ".join(runs.remarks))


def _rows(parts: Sequence[_Sums], runs: DeviceRuns, per_rank: bool) -> list[tuple[Cell, ...]]:
    """Return the rows of each device, or of all as one, and the total."""
    whole = _added(parts)
    places: list[tuple[Cell, ...]] = [(lane.rank, lane.device) for lane in runs.lanes]
    pairs = zip(places, parts, strict=True) if per_rank else [((), whole)]
    rows = [(*place, *row) for place, sums in pairs for row in _stages(sums, runs)]
    total = [sum(each) for each in zip(*whole.values(), strict=True)]
    return [*rows, (*(None, None) * per_rank, _TOTAL, *_line(total, runs))]


def _sums(lane: Lane, width: int) -> _Sums:
    """Sum the time of one device by stage, of which there are as many as the width."""
    host, runs = lane.host, lane.runs
    grid = grid_of(lane, host.start_ns, host.end_ns)
    count = len(grid.busy)
    at = np.append(host.stage, NO_STAGE)[paint(*grid.cells(host.start_ns, host.end_ns), count)]
    stage, there = [], []
    for kind in (COMPUTE, COMMUNICATION, COPY):
        own = np.flatnonzero(runs.kind == kind)
        top = paint(grid.first[own], grid.last[own], count)
        stage.append(np.append(runs.stage[own], NO_STAGE)[top])
        there.append(top >= 0)
    compute, communication, copy = there
    masks = (
        (compute, stage[COMPUTE]),
        (communication & ~compute, stage[COMMUNICATION]),
        (copy & ~compute & ~communication, stage[COPY]),
        (~grid.busy & grid.seen, at),
        (~grid.busy & ~grid.seen, at),
        (communication & compute, stage[COMMUNICATION]),
        (copy & (compute | communication), stage[COPY]),
    )
    sums = np.zeros((width + 1, len(masks)), dtype=np.int64)
    ns = np.diff(grid.times)
    for column, (mask, stages) in enumerate(masks):
        np.add.at(sums[:, column], stages[mask] - NO_STAGE, ns[mask])
    some = np.flatnonzero(sums.any(axis=1)).tolist()
    return {each + NO_STAGE: sums[each].tolist() for each in some}


def _added(parts: Iterable[_Sums]) -> _Sums:
    whole: _Sums = {}
    for sums in parts:
        for stage, own in sums.items():
            before = whole.get(stage, [0] * len(own))
            whole[stage] = [a + b for a, b in zip(before, own, strict=True)]
    return whole


def _stages(sums: _Sums, runs: DeviceRuns) -> Iterator[tuple[Cell, ...]]:
    """Yield a row per stage by wall, untraced last."""
    walls = {stage: sum(own[: len(_PARTS)]) for stage, own in sums.items()}
    for stage in sorted(sums, key=lambda each: (each == NO_STAGE, -walls[each], each)):
        name = _UNTRACED if stage == NO_STAGE else runs.stages[stage]
        yield name, *_line(sums[stage], runs)


def _line(own: Sequence[int], runs: DeviceRuns) -> Iterator[Cell]:
    """Yield the wall and its parts; of copies that nobody recorded nothing is known."""
    yield sum(own[: len(_PARTS)])
    for name, ns in zip((*_PARTS, *_HIDDEN), own, strict=True):
        yield ns if runs.copies or name not in _COPIES else None
