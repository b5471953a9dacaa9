"""Equal work: which counted amounts say how much a stage had to do, in every comparison.

Runs, ranks, steps and what-if edits are compared at equal work. They all ask here what was counted.
"""

from collections.abc import Callable

import numpy as np

from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask

AMOUNTS = ("tokens", "tokens_sq", "tokens_max")
"""Counters of work: tokens, the sum of their squares over samples, and those of the longest."""


def counted_amounts(
    counter: Callable[[str], Float64s | None], ran: Mask, known: Mask, stage: Int64s
) -> list[Float64s]:
    """Return the amounts of work by rank, step and slot; empty if no tokens were counted.

    A stage that lacks a counter in more than half of its spans has what its rank counted in the
    whole step.

    Args:
        counter: Returns a counter by name, NaN for spans without it; None if no span has it. The
            shape is (ranks, steps, slots).
        ran: Where a slot may have an amount: elsewhere it counts as 0. The same shape.
        known: Where a slot has a span. The same shape.
        stage: Stage of each slot.

    Example::

        >>> tokens = np.array([[[3.0, np.nan], [4.0, np.nan]]])
        >>> there = np.ones((1, 2, 2), bool)
        >>> found = counted_amounts({"tokens": tokens}.get, there, there, np.arange(2))
        >>> found[0].tolist()
        [[[3.0, 3.0], [4.0, 4.0]]]
    """
    amounts = {name: counter(name) for name in AMOUNTS}
    if amounts["tokens"] is None:
        return []
    return [_filled(own, ran, known, stage) for own in amounts.values() if own is not None]


def _filled(own: Float64s, ran: Mask, known: Mask, stage: Int64s) -> Float64s:
    counted = np.sum(~np.isnan(own), axis=(0, 1))
    often = counted * 2 >= np.maximum(known.sum(axis=(0, 1)), 1)
    counts = np.isin(stage, stage[often])
    if not counts.any():
        return np.full_like(own, np.nan)
    own = np.where(ran, own, 0.0)
    step = own[:, :, counts].sum(axis=2)  # NaN where one of them was lost
    return np.where(counts, own, step[:, :, None])
