"""A whole job as `Spans` in memory: ranks x steps x 20 spans, nested, with collectives."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.records.records import FORMAT, KINDS, Header, Kind
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import NO_PARENT, Spans, Thread

__all__ = ["SPANS_PER_STEP", "synthetic_job"]


Int8s = npt.NDArray[np.int8]


class _Part(NamedTuple):
    """One span of every step: when it begins and ends in thousandths, and the span around it."""

    name: str
    kind: Kind
    start: int
    end: int
    parent: int | None = None


_STEP = (
    _Part("step", "step", 0, 1000),
    _Part("data_fetch", "region", 5, 520),
    _Part("actor_generate", "stage", 15, 400, 1),
    _Part("compute_reward", "stage", 405, 450, 1),
    _Part("compute_advantage", "stage", 455, 470, 1),
    _Part("batch_transfer", "region", 521, 525),
    _Part("actor_compute_log_prob", "stage", 526, 580),
    _Part("reference_compute_log_prob", "stage", 582, 630),
    _Part("critic_compute_values", "stage", 632, 660),
    _Part("my_filter", "stage", 662, 670),
    _Part("actor_update", "stage", 672, 860),
    _Part("training_step", "region", 674, 740, 10),
    _Part("backward", "region", 742, 800, 10),
    _Part("all_reduce", "region", 802, 830, 10),
    _Part("gc", "region", 832, 835, 10),
    _Part("optimizer_step", "region", 837, 858, 10),
    _Part("critic_update", "stage", 862, 930),
    _Part("all_reduce", "region", 900, 925, 16),
    _Part("barrier", "region", 932, 940),
    _Part("weight_sync", "stage", 942, 990),
)
SPANS_PER_STEP = len(_STEP)
"""Spans of one step on one rank, the step included."""

_UNIT_NS = 1_000_000
_LATE_NS = (
    900_000  # ranks come to a collective up to so much later than the first, and leave as one
)


def synthetic_job(ranks: int, steps: int, seed: int = 0) -> Spans:
    """Return a job of which the same seed gives the same; building it takes little memory more."""
    names = tuple(dict.fromkeys(part.name for part in _STEP))
    each = np.tile(np.arange(SPANS_PER_STEP, dtype=np.int8), ranks * steps)
    step = np.tile(np.repeat(np.arange(1, steps + 1), SPANS_PER_STEP), ranks)
    number = np.tile(np.arange(1, steps * SPANS_PER_STEP + 1), ranks)
    rank = np.repeat(np.arange(ranks), steps * SPANS_PER_STEP)
    start, end = _times(each, step, np.random.default_rng(seed))
    return Spans(
        Path("synthetic"),
        names,
        tuple(Thread(one, 1, "Main") for one in range(ranks)),
        name=np.array([names.index(part.name) for part in _STEP])[each],
        kind=np.array([KINDS.index(part.kind) for part in _STEP])[each],
        rank=rank,
        step=step,
        start_ns=start,
        end_ns=end,
        thread=rank.copy(),
        id=number,
        parent=_parents(each, number),
        headers={one: _header(one, ranks) for one in range(ranks)},
        statuses=dict.fromkeys(range(ranks), "finished"),
    )


def _times(each: Int8s, step: Int64s, random: np.random.Generator) -> tuple[Int64s, Int64s]:
    """Return starts, each later by chance but the step's own, and ends."""
    starts = np.array([part.start for part in _STEP], dtype=np.int32) * _UNIT_NS
    ends = np.array([part.end for part in _STEP], dtype=np.int32) * _UNIT_NS
    start = (step - 1) * (1000 * _UNIT_NS)
    end = start + ends[each]
    start += starts[each]
    start += random.integers(0, _LATE_NS, len(each), dtype=np.int32) * (each > 0)
    return start, end


def _parents(each: Int8s, number: Int64s) -> Int64s:
    """Return the number of the span around each; the parts of a step are numbered in a row."""
    above = [NO_PARENT if part.parent is None else part.parent for part in _STEP]
    back = np.array([place - parent for place, parent in enumerate(above)], dtype=np.int8)[each]
    parents = number - back
    parents[np.array(above)[each] == NO_PARENT] = NO_PARENT
    return parents


def _header(rank: int, ranks: int) -> Header:
    return Header(FORMAT, "job", rank, ranks, "actor", "host", 1, "cuda", 0, 0, {"profile": True})
