"""How a job shares its ranks: rollout and training on the same ones, in turns, or at once."""

from enum import Enum

import numpy as np

from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.records.stage_aliases import standard_stage
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import covered_before, unions
from lightning_rlprof.tables.spans import Spans

_MAX_OVERLAP = 0.1  # With more of the shorter one in common, neither waited for the other.


class Mode(Enum):
    """How rollout and training share the ranks."""

    INTEGRATED = "integrated"
    SEPARATED = "separated"
    ASYNCHRONOUS = "asynchronous"


def execution_mode(spans: Spans) -> Mode | None:
    """Return the mode that the run shows; None if it lacks rollout or updates.

    ``integrated``: a rank does both. ``separated``: other ranks generate, in turns with updates.
    ``asynchronous``: they do both at once for more than 10% of the time of the shorter one.
    """
    generates, updates = rollouts_and_updates(spans)
    if not len(generates) or not len(updates):
        return None
    if np.isin(spans.rank[generates], spans.rank[updates]).any():
        return Mode.INTEGRATED
    first, last = _union(spans, generates)
    begin, end = _union(spans, updates)
    both = covered_before(first, last, end) - covered_before(first, last, begin)
    shorter = min((end - begin).sum(), (last - first).sum())
    share = both.sum() / max(shorter, 1)
    return Mode.ASYNCHRONOUS if share > _MAX_OVERLAP else Mode.SEPARATED


def generating_and_training_ranks(spans: Spans) -> tuple[Int64s, Int64s]:
    """Return the ranks that generate, and those that update."""
    generates, updates = rollouts_and_updates(spans)
    return np.unique(spans.rank[generates]), np.unique(spans.rank[updates])


def rollouts_and_updates(spans: Spans) -> tuple[Int64s, Int64s]:
    """Return the rows of the stages that generate, and of those that update the actor."""
    stages = spans.rows(kind="stage")
    names = spans.name[stages]
    generates = (categories_of(spans.names) == Category.ROLLOUT)[names]
    is_update = np.array([standard_stage(name) == "actor_update" for name in spans.names] + [False])
    return stages[generates], stages[is_update[names]]


def _union(spans: Spans, rows: Int64s) -> tuple[Int64s, Int64s]:
    zero = spans.start_ns.min(initial=0)
    owner = np.zeros(len(rows), np.int64)
    _, first, last = unions(owner, spans.start_ns[rows] - zero, spans.end_ns[rows] - zero)
    return first, last
