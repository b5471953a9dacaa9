"""A complete table of spans in memory: ranks x steps x stages, one behind the other, with gaps."""

from pathlib import Path

import numpy as np

from lightning_rlprof.records.records import FORMAT, KINDS, Header
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import NO_PARENT, Counter, Spans, Thread

__all__ = ["complete_table"]

_SLOT_NS = 1_000_000
_GAP_NS = 100_000


def complete_table(ranks: int, steps: int, stages: int, seed: int = 0) -> Spans:
    """Return a run of which the same seed gives the same; every stage has a time of the device.

    Each step is a step span and a slot per stage; the stage fills its slot but for a gap by chance.
    """
    width = stages + 1
    total = ranks * steps * width
    slot = np.tile(np.arange(-1, stages), ranks * steps)
    step = np.tile(np.repeat(np.arange(1, steps + 1), width), ranks)
    start, end = _times(slot, step, stages, np.random.default_rng(seed))
    rank = np.repeat(np.arange(ranks), steps * width)
    at: Int64s = np.flatnonzero(slot >= 0)
    return Spans(
        Path("synthetic"),
        ("step", *(f"stage_{number}" for number in range(stages))),
        tuple(Thread(one, 1, "Main") for one in range(ranks)),
        name=slot + 1,
        kind=np.where(slot < 0, KINDS.index("step"), KINDS.index("stage")),
        rank=rank,
        step=step,
        start_ns=start,
        end_ns=end,
        thread=rank,
        id=np.tile(np.arange(1, steps * width + 1), ranks),
        parent=np.full(total, NO_PARENT),
        counters={"device_ns": Counter(at, (end - start)[at])},
        headers={one: _header(one, ranks) for one in range(ranks)},
        statuses=dict.fromkeys(range(ranks), "finished"),
    )


def _times(
    slot: Int64s, step: Int64s, stages: int, random: np.random.Generator
) -> tuple[Int64s, Int64s]:
    """Return starts and ends; the slot -1 is the step itself."""
    start = (step - 1) * (stages * _SLOT_NS) + np.maximum(slot, 0) * _SLOT_NS
    end = start + np.where(slot < 0, stages * _SLOT_NS, _SLOT_NS)
    start += (slot >= 0) * random.integers(1, _GAP_NS, len(slot))
    end -= (slot >= 0) * random.integers(1, _GAP_NS, len(slot))
    return start, end


def _header(rank: int, ranks: int) -> Header:
    return Header(FORMAT, "job", rank, ranks, "actor", "host", 1, "cuda", 0, 0, {"profile": True})
