"""Steps of loops that no framework marks: from an optimizer's steps to iterations.

A PPO iteration is a rollout and all of its updates. Where a program has a loop of its own, its
rollout shows in the optimizer's steps alone: each n-th one takes much longer, from the first on.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_rlprof.records.records import KINDS, OPTIMIZER_STEP, Header
from lightning_rlprof.records.shadow_steps import SHADOW
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Counter

_STEP = KINDS.index("step")
_FEWEST = 4  # iterations that have begun; the first step is long in every program
_TIMES_AS_LONG = 5  # the rollout's step, against the median of the others
_SHARE = 0.15  # of all time in the steps with a rollout: a validation now and then has less
_MOST_STRAY = 0.05  # of all other steps that take as long: a busy machine
_LARGEST = 4_096  # optimizer's steps of an iteration
_RAW = ("capture", SHADOW)  # whose numbers stand elsewhere, too: in names of captures
_LOADED = "data_fetch"  # by the batches of a loader, whose steps are the optimizer's


def optimizer_steps_per_iteration(lengths_ns: Int64s) -> int:
    """Return how many steps of the optimizer an iteration has; 1 unless their lengths show more.

    Args:
        lengths_ns: Of all steps, from the first on; a rollout is in the step that ends it.

    Example::

        >>> optimizer_steps_per_iteration(np.tile([50_000, 1_000, 1_000], 4))
        3
    """
    total = int(lengths_ns.sum())
    for size in range(2, min((len(lengths_ns) - 1) // (_FEWEST - 1), _LARGEST) + 1):
        first = np.arange(len(lengths_ns)) % size == 0
        rollouts, others = lengths_ns[first], lengths_ns[~first]
        usual, long = float(np.median(others)), float(np.median(rollouts))
        if long < _TIMES_AS_LONG * usual or rollouts.sum() < _SHARE * total:
            continue
        border = np.sqrt(max(usual, 1.0) * long)
        if np.mean(rollouts < border) <= _MOST_STRAY >= np.mean(others >= border):
            return size
    return 1


def join_optimizer_steps(
    columns: Mapping[int, dict[str, Int64s]],
    counters: Mapping[int, dict[str, Counter]],
    headers: Mapping[int, Header],
    names: Mapping[str, int],
) -> int:
    """Let iterations be the steps of a run whose steps are the optimizer's, in place.

    The lowest rank decides for all. A loader's batches, captures and shadow steps keep the steps.

    Args:
        columns: By rank, sorted by start.
        counters: By rank.
        headers: By rank.
        names: Codes of names.

    Returns:
        How many steps of the optimizer are one now; 1 if nothing changed.
    """
    own = columns[min(columns)]
    rows = own["kind"] == _STEP
    fetched = np.unique(own["step"][own["name"] == names.get(_LOADED, -1)])
    if (
        any(header.step_unit != OPTIMIZER_STEP for header in headers.values())
        or any(name in each for each in counters.values() for name in _RAW)
        or 2 * len(fetched) > rows.sum()
    ):
        return 1
    size = optimizer_steps_per_iteration((own["end_ns"] - own["start_ns"])[rows])
    if size > 1:
        for rank, each in columns.items():
            _join(each, counters[rank], size)
    return size


def _join(own: dict[str, Int64s], counters: dict[str, Counter], size: int) -> None:
    own["step"] = np.where(own["step"] > 0, (own["step"] - 1) // size + 1, own["step"])
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
