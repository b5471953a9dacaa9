"""The last steps of a run that is too large to be looked at whole."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning_rlprof.spans import Counter, Int64s, Spans

__all__ = ["MOST_SPANS", "cut_before", "last_steps"]

Mask = npt.NDArray[np.bool_]

MOST_SPANS = 1_300_000
"""Spans of a run that is looked at whole: 64 ranks x 1,000 steps x 20."""

_KEPT = 750_000  # of a larger run, whose own columns take memory already: at 1,024 ranks 36 steps
_CHUNK = 2**20
_COLUMNS = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")


def last_steps(spans: Spans, most: int = MOST_SPANS, kept: int = _KEPT) -> tuple[Spans, str]:
    """Return the last steps of a run that has very many spans, and what to say of it.

    Steps go or stay as a whole, on all ranks and with all that is in them; at least the last one
    stays.

    Args:
        spans: The run.
        most: Spans up to which it comes back as it is.
        kept: Spans that are kept of a larger one.
    """
    if len(spans) <= most:
        return spans, ""
    spans, left, steps = cut_before(spans, kept)
    return spans, f"Looked at are the last {left} of {steps} steps."


def cut_before(spans: Spans, kept: int, among: Mask | None = None) -> tuple[Spans, int, int]:
    """Return the last steps with so many spans at most, how many they are, and of how many.

    Args:
        spans: The run.
        kept: Spans that are kept; at least the last step is.
        among: Which spans count, and may stay; unset, all of them.
    """
    count = np.zeros(int(spans.step.max(initial=0)) + 1, dtype=np.int64)
    for at in range(0, len(spans), _CHUNK):  # a copy of all steps would be the largest array here
        part = slice(at, at + _CHUNK)
        step = spans.step[part] if among is None else spans.step[part][among[part]]
        count += np.bincount(step, minlength=len(count))
    steps = np.flatnonzero(count)
    behind = np.cumsum(count[steps][::-1])[::-1]
    first = int(np.append(steps[behind <= kept], steps[-1])[0]) if len(steps) else 0
    there = spans.step >= first
    keep = np.flatnonzero(there if among is None else there & among)
    columns = {name: getattr(spans, name)[keep] for name in _COLUMNS}
    counters = {name: _kept(counter, keep) for name, counter in spans.counters.items()}
    left = int(np.count_nonzero(steps >= first))
    return replace(spans, **columns, counters=counters), left, len(steps)


def _kept(counter: Counter, keep: Int64s) -> Counter:
    rows, values = counter
    place = np.searchsorted(keep, rows)
    there = np.append(keep, -1)[place] == rows
    return Counter(place[there], values[there])
