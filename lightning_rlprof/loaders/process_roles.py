"""Runs of many processes: servers without steps get those of the trainer, and drivers wait.

A driver, whose role is ``controller``, waits in each of its stages for the workers that do the
work. Counted as work, it would be counted twice.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lightning_rlprof.records.records import KINDS, Header
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import DRIVER, NO_PARENT, Counter, Spans, drivers

_STEP, _STAGE, _REGION = (KINDS.index(kind) for kind in ("step", "stage", "region"))


def give_steps(
    columns: Mapping[int, dict[str, Int64s]],
    counters: Mapping[int, dict[str, Counter]],
    headers: Mapping[int, Header],
    step_name: int,
) -> None:
    """Add steps to ranks that have stages and no step, in place.

    They are those of the driver, else of the lowest rank that has some, which tile the time from
    the first to the last; without any, one step is as long as the rank's record. Only processes of
    an open world get some: others have theirs, or have been stopped before the first.

    Args:
        columns: By rank, on one axis of time, sorted by start.
        counters: By rank; rows are moved along.
        headers: By rank.
        step_name: Code of the name of steps.
    """
    sources = sorted(columns, key=lambda rank: (headers[rank].role != DRIVER, rank))
    steps = next((found for rank in sources if len(found := _steps_of(columns[rank]))), None)
    for rank, own in columns.items():
        is_stage = own["kind"] == _STAGE
        if not headers[rank].open_world or not is_stage.any() or (own["kind"] == _STEP).any():
            continue
        first, last = int(own["start_ns"].min()), int(own["end_ns"].max())
        bounds = np.array([[1, first, last]]) if steps is None else steps
        bounds = bounds[(bounds[:, 2] > first) & (bounds[:, 1] < last)]
        if len(bounds):
            _insert(own, counters[rank], bounds, step_name)


def _steps_of(own: dict[str, Int64s]) -> Int64s:
    """Return number, start and end of each step."""
    rows = np.flatnonzero(own["kind"] == _STEP)
    found: Int64s = np.stack([own[name][rows] for name in ("step", "start_ns", "end_ns")], axis=1)
    return found


def _insert(
    own: dict[str, Int64s], counters: dict[str, Counter], bounds: Int64s, name: int
) -> None:
    stages = np.flatnonzero(own["kind"] == _STAGE)
    length = own["end_ns"][stages] - own["start_ns"][stages]
    threads, place = np.unique(own["thread"][stages], return_inverse=True)
    busiest = threads[np.argmax(np.bincount(place, length))]
    at = np.searchsorted(bounds[:, 1], own["start_ns"], "right") - 1
    inside = (at >= 0) & (own["start_ns"] < bounds[at, 2])
    own["step"] = np.where(inside, bounds[at, 0], 0)
    count, before = len(bounds), len(own["id"])
    new = {
        "name": np.full(count, name),
        "kind": np.full(count, _STEP),
        "step": bounds[:, 0],
        "start_ns": bounds[:, 1],
        "end_ns": bounds[:, 2],
        "thread": np.full(count, busiest),
        "id": own["id"].max() + 1 + np.arange(count),
        "parent": np.full(count, NO_PARENT),
    }
    for column, added in new.items():
        own[column] = np.concatenate([own[column], added])
    order = np.lexsort((own["id"], own["start_ns"]))
    moved = np.empty(before + count, np.int64)
    moved[order] = np.arange(before + count)
    for column in own:
        own[column] = own[column][order]
    for key, counter in counters.items():
        rows = moved[counter.rows]
        again = np.argsort(rows, kind="stable")
        counters[key] = Counter(rows[again], counter.values[again])


def drivers_wait(spans: Spans) -> Spans:
    """Let the steps and stages of drivers be regions, if their workers are in the run."""
    waiting = np.isin(spans.rank, sorted(drivers(spans)))
    waiting &= np.isin(spans.kind, (_STEP, _STAGE))
    if not waiting.any():
        return spans
    return replace(spans, kind=np.where(waiting, _REGION, spans.kind))
