"""Counters of spans as columns that keep every number as it was written."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_rlprof.model import Number
from lightning_rlprof.spans import Counter, Int64s
from lightning_rlprof.tracefile import SpanLine

__all__ = ["collect", "merge"]


_NOTHING: dict[str, Number | None] = {}


def collect(
    lines: list[SpanLine], late: Mapping[int, Mapping[str, Number | None]], order: Int64s
) -> dict[str, Counter]:
    """Collect one rank's counters by name, rows after sorting.

    Args:
        lines: The spans.
        late: Counters that were written after their span, by its id; they win.
        order: Indices that sort the spans.
    """
    found: dict[str, tuple[list[int], list[Number]]] = {}
    for row, line in enumerate(lines):
        counters = line.counters or _NOTHING
        if line.id in late:
            counters = {**counters, **late[line.id]}
        for name, value in counters.items():
            if value is None:  # written for a number that is not finite
                continue
            rows, values = found.setdefault(name, ([], []))
            rows.append(row)
            values.append(value)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    result = {}
    for name, (rows, values) in found.items():
        at = place[rows]
        sort = np.argsort(at)
        result[name] = Counter(at[sort], _exact(values)[sort])
    return result


def _exact(values: list[Number]) -> np.ndarray[Any, Any]:
    """Return an array that holds every value as it is: no integer becomes a float."""
    kinds = set(map(type, values))
    if kinds == {int} and max(map(abs, values)) < 2**63:
        return np.array(values, dtype=np.int64)
    return np.array(values, dtype=np.float64 if kinds == {float} else object)


def merge(ranks: Sequence[Mapping[str, Counter]], counts: Sequence[int]) -> dict[str, Counter]:
    """Join the counters of ranks that have so many spans each.

    Where the types of two ranks differ, the values stay Python numbers.
    """
    starts = [0, *np.cumsum(counts).tolist()]
    merged: dict[str, Counter] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        own = [
            (start, rank[name]) for start, rank in zip(starts, ranks, strict=False) if name in rank
        ]
        types = {counter.values.dtype for _, counter in own}
        kind = types.pop() if len(types) == 1 else np.dtype(object)
        merged[name] = Counter(
            np.concatenate([counter.rows + start for start, counter in own]),
            np.concatenate([counter.values.astype(kind) for _, counter in own]),
        )
    return merged
