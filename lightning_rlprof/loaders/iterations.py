"""Steps that no rank marked: iterations of a program's own loop, and steps of servers.

A PPO iteration is a rollout and all of its updates. Where a program has a loop of its own, its
rollout shows in the optimizer's steps alone: each n-th one takes much longer, from the first on.

In runs of many processes, servers without steps get those of the trainer, and drivers wait: a
driver, whose role is ``controller``, waits in each of its stages for the workers that do the work.
Counted as work, it would be counted twice.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_rlprof.records.records import FIRST_ROLE_RANK, KINDS, OPTIMIZER_STEP, SHADOW, Header
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import cells_of, edges, open_count
from lightning_rlprof.tables.spans import DRIVER, NO_PARENT, Counter, Spans, drivers

_MIN_ITERATIONS = 4  # The first step is long in every program, so it proves nothing.
_MIN_TIMES_AS_LONG = 5  # The rollout's step takes this multiple of the median of the other steps.
# Occasional validations take a smaller share of all time than rollouts do.
_MIN_ROLLOUT_SHARE = 0.15
_MAX_STRAY_SHARE = 0.05  # On a busy machine, this share of the other steps takes as long.
_MAX_SIZE = 4_096
_RAW = ("capture", SHADOW)  # Names of captures contain the numbers of these steps, too.
_LOADED = "data_fetch"  # A loader has a batch for each step of the optimizer.
_STEP, _STAGE, _REGION = (KINDS.index(kind) for kind in ("step", "stage", "region"))


def optimizer_steps_per_iteration(lengths_ns: Int64s) -> int:
    """Return how many steps of the optimizer an iteration has; 1 unless their lengths show more.

    Args:
        lengths_ns: Of all steps, from the first on; a rollout is in the step that ends it.

    Example::

        >>> optimizer_steps_per_iteration(np.tile([50_000, 1_000, 1_000], 4))
        3
    """
    total = int(lengths_ns.sum())
    for size in range(2, min((len(lengths_ns) - 1) // (_MIN_ITERATIONS - 1), _MAX_SIZE) + 1):
        rollouts = lengths_ns[::size]
        # This saves the medians, which take time in long runs.
        if rollouts.sum() < _MIN_ROLLOUT_SHARE * total:
            continue
        others = lengths_ns[np.arange(len(lengths_ns)) % size != 0]
        usual, long = float(np.median(others)), float(np.median(rollouts))
        if long < _MIN_TIMES_AS_LONG * usual:
            continue
        border = np.sqrt(max(usual, 1.0) * long)
        if np.mean(rollouts < border) <= _MAX_STRAY_SHARE >= np.mean(others >= border):
            return size
    return 1


class StepEvidence:
    """What a rank's file says of its steps and iterations; it adds up while the file is written.

    A loader's batches, captures and shadow steps keep the steps as they are.

    Args:
        header: Of the rank.
    """

    def __init__(self, header: Header) -> None:
        self.is_by_optimizer = header.step_unit == OPTIMIZER_STEP
        self.is_raw = False
        self._lengths: list[Int64s] = []
        self._fetched: set[int] = set()

    def take(
        self, own: Mapping[str, Int64s], counters: Collection[str], names: Mapping[str, int]
    ) -> None:
        """Add spans.

        Args:
            own: Their columns, in the order of time.
            counters: Names of counters that the rank has so far.
            names: Codes of names.
        """
        if not self.is_by_optimizer:
            return
        steps = own["kind"] == _STEP
        self._lengths.append((own["end_ns"] - own["start_ns"])[steps])
        self._fetched.update(own["step"][own["name"] == names.get(_LOADED, -1)].tolist())
        self.is_raw |= any(name in counters for name in _RAW)

    def steps_per_iteration(self) -> int:
        """Return how many steps of the optimizer are one by this rank's own steps."""
        lengths = np.concatenate([np.empty(0, np.int64), *self._lengths])
        self._lengths = [lengths]
        if 2 * len(self._fetched) > len(lengths):
            return 1
        return optimizer_steps_per_iteration(lengths)


def steps_per_iteration(ranks: Mapping[int, StepEvidence]) -> int:
    """Return how many steps of the optimizer are one step; the lowest rank decides for all."""
    if not ranks or any(each.is_raw or not each.is_by_optimizer for each in ranks.values()):
        return 1
    return ranks[min(ranks)].steps_per_iteration()


def join_optimizer_steps(
    columns: Mapping[int, dict[str, Int64s]],
    counters: Mapping[int, dict[str, Counter]],
    size: int,
) -> None:
    """Let each ``size`` steps of the optimizer be one step, in place.

    Args:
        columns: By rank, sorted by start.
        counters: By rank.
        size: How many; 1 changes nothing.
    """
    if size > 1:
        for rank, each in columns.items():
            _join(each, counters[rank], size)


def iteration_of(step: Int64s, size: int) -> Int64s:
    """Return the iterations of steps of the optimizer; what is before the first step stays."""
    return np.where(step > 0, (step - 1) // size + 1, step)


def _join(own: dict[str, Int64s], counters: dict[str, Counter], size: int) -> None:
    own["step"] = iteration_of(own["step"], size)
    steps = np.flatnonzero(own["kind"] == _STEP)
    numbers = own["step"][steps]
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    if not len(steps):
        return
    own["end_ns"][steps[begins]] = np.maximum.reduceat(own["end_ns"][steps], begins)
    kept = np.ones(len(own["kind"]), bool)
    kept[steps] = False
    kept[steps[begins]] = True
    into = np.arange(len(kept))
    into[steps] = np.repeat(steps[begins], np.diff(begins, append=len(steps)))
    place = np.cumsum(kept) - 1
    for name, counter in counters.items():
        counters[name] = _added_up(name, Counter(place[into[counter.rows]], counter.values))
    for name, column in own.items():
        own[name] = column[kept]


def _added_up(name: str, counter: Counter) -> Counter:
    """Return one value per span: the sum of durations and numbers of pauses, else the highest."""
    order = np.argsort(counter.rows, kind="stable")
    rows, begins = np.unique(counter.rows[order], return_index=True)
    join: Any = np.add if name.endswith("_ns") or name.startswith("gc_") else np.maximum
    return Counter(rows, join.reduceat(counter.values[order], begins))


def give_steps(
    columns: Mapping[int, dict[str, Int64s]],
    counters: Mapping[int, dict[str, Counter]],
    headers: Mapping[int, Header],
    names: dict[str, int],
) -> None:
    """Add steps to ranks that have stages and no step, in place.

    They are those of the driver, else of the lowest rank that has some, which tile the time from
    the first to the last; without any, one step is as long as the rank's record. Only processes of
    an open world get some: others have theirs, or have been stopped before the first. Between its
    requests, a server that rlprof counts apart from the ranks of the training is idle.

    Args:
        columns: By rank, on one axis of time, sorted by start.
        counters: By rank; rows are moved along.
        headers: By rank.
        names: Codes of names; those of steps and idle time are added.
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
            _insert(own, counters[rank], bounds, names, idles=rank >= FIRST_ROLE_RANK)


def _steps_of(own: dict[str, Int64s]) -> Int64s:
    """Return number, start and end of each step."""
    rows = np.flatnonzero(own["kind"] == _STEP)
    found: Int64s = np.stack([own[name][rows] for name in ("step", "start_ns", "end_ns")], axis=1)
    return found


def _insert(
    own: dict[str, Int64s],
    counters: dict[str, Counter],
    bounds: Int64s,
    names: dict[str, int],
    *,
    idles: bool,
) -> None:
    stages = np.flatnonzero(own["kind"] == _STAGE)
    length = own["end_ns"][stages] - own["start_ns"][stages]
    threads, place = np.unique(own["thread"][stages], return_inverse=True)
    busiest = threads[np.argmax(np.bincount(place, length))]
    at = np.searchsorted(bounds[:, 1], own["start_ns"], "right") - 1
    inside = (at >= 0) & (own["start_ns"] < bounds[at, 2])
    own["step"] = np.where(inside, bounds[at, 0], 0)
    gaps = _gaps(own["start_ns"][stages], own["end_ns"][stages], bounds) if idles else bounds[:0]
    kinds = [(names.setdefault("step", len(names)), _STEP)] * len(bounds)
    kinds += [(names.setdefault("idle", len(names)), _REGION)] * len(gaps) if len(gaps) else []
    bounds = np.concatenate([bounds, gaps])
    count, before = len(bounds), len(own["id"])
    new = {
        "name": np.array(kinds)[:, 0],
        "kind": np.array(kinds)[:, 1],
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


def _gaps(start: Int64s, end: Int64s, bounds: Int64s) -> Int64s:
    """Return number of the step, start and end of each time in a step without a stage."""
    times = edges(start, end, bounds[:, 1], bounds[:, 2])
    at = np.searchsorted(bounds[:, 1], times[:-1], "right") - 1
    free = (at >= 0) & (times[:-1] < bounds[at, 2])
    free &= open_count(*cells_of(times, start, end), len(times) - 1) == 0
    found: Int64s = np.stack([bounds[at, 0], times[:-1], times[1:]], axis=1)[free]
    return found


def drivers_wait(spans: Spans) -> Spans:
    """Let the steps and stages of drivers be regions, if their workers are in the run."""
    found = sorted(drivers(spans))
    if not found:
        return spans
    waiting = np.isin(spans.rank, found) & np.isin(spans.kind, (_STEP, _STAGE))
    if not waiting.any():
        return spans
    return replace(spans, kind=np.where(waiting, _REGION, spans.kind))
