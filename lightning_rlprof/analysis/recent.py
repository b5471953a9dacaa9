"""The last steps of a run that is too large to be compared whole."""

from dataclasses import replace

import numpy as np

from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import Counter, Int64s, Spans

__all__ = ["MOST_SPANS", "recent"]

MOST_SPANS = 1_500_000
"""Steps and stages that are compared: 64 ranks x 1,000 steps x 20, of 1,024 the last 73 steps."""

_CHUNK = 2**20
_COLUMNS = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")


def recent(spans: Spans, most: int = MOST_SPANS) -> tuple[Spans, str]:
    """Return the last steps of a run, with no more than so many spans, and what to say of it.

    Steps go or stay as a whole, on all ranks. A run that is small enough comes back as it is.
    """
    if len(spans) <= most:
        return spans, ""
    compared = (spans.kind == KINDS.index("step")) | (spans.kind == KINDS.index("stage"))
    count = np.zeros(int(spans.step.max(initial=0)) + 1, dtype=np.int64)
    for at in range(0, len(spans), _CHUNK):  # a copy of the steps would be the largest array of all
        part = slice(at, at + _CHUNK)
        count += np.bincount(spans.step[part][compared[part]], minlength=len(count))
    steps = np.flatnonzero(count)
    behind = np.cumsum(count[steps][::-1])[::-1]
    kept = steps[behind <= most] if len(steps) else steps
    kept = kept if len(kept) else steps[-1:]
    first = int(kept[0]) if len(kept) else 0
    keep = np.flatnonzero(compared & (spans.step >= first))
    columns = {name: getattr(spans, name)[keep] for name in _COLUMNS}
    counters = {name: _kept(counter, keep) for name, counter in spans.counters.items()}
    left = len(steps) - len(kept)
    note = f"Compared are the last {len(kept)} steps: with all, they were too many." if left else ""
    return replace(spans, **columns, counters=counters), note


def _kept(counter: Counter, keep: Int64s) -> Counter:
    rows, values = counter
    place = np.searchsorted(keep, rows)
    there = np.append(keep, -1)[place] == rows
    return Counter(place[there], values[there])
