"""The last steps of a run that is too large to be looked at whole.

When captures of our own were open, by the regions that opening and closing them leave.

Which steps count in statistics: whole ones that no capture slowed down.

The last steps of a run that is too large to be compared whole.

By how much captures slowed the steps down that they looked at.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.spans import Counter, Spans

OPENED, CLOSED = "rlprof open capture", "rlprof close capture"
"""What the session calls the regions."""


def captures(spans: Spans, rank: int, start_ns: Int64s) -> tuple[Int64s, Int64s] | None:
    """Return where the captures of a rank begin and end in which any of these starts lies.

    None where the rank opened none: then a tool of another kind recorded it.
    """
    opened = np.sort(spans.end_ns[spans.rows(kind="region", name=OPENED, rank=rank)])
    if not len(opened):
        return None
    closed = np.sort(spans.start_ns[spans.rows(kind="region", name=CLOSED, rank=rank)])
    at = np.searchsorted(opened, closed, "right") - 1
    first, last = opened[at[at >= 0]], closed[at >= 0]
    starts = np.sort(start_ns, kind="stable")  # quick where they are in order
    some = np.searchsorted(starts, last) > np.searchsorted(starts, first)
    return first[some], last[some]


_STEP = KINDS.index("step")
FEWEST = 3
"""Steps below which nothing is claimed about a run."""

STATES = ("complete", "capture", "interrupted")
"""What a step may be; of two that are said of one step the later one wins."""


class Counted(NamedTuple):
    """The choice: a mask over the given step rows, how many distinct steps, and what to say."""

    mask: npt.NDArray[np.bool_]
    steps: int
    note: str


def states(spans: Spans, steps: Int64s) -> Int64s:
    """Return per step row an index into `STATES`.

    A step that one rank did not finish, or in which one rank ran a capture, is so for all: the
    others waited for it.
    """
    numbers = spans.step[steps]
    found = np.zeros(len(steps), dtype=np.int64)
    for code, name in enumerate(STATES[1:], start=1):
        flagged = spans.flagged(name)
        flagged = flagged[spans.kind[flagged] == _STEP]
        if len(flagged):
            found[np.isin(numbers, spans.step[flagged])] = code
    return found


def counted(spans: Spans, steps: Int64s) -> Counted:
    """Choose the complete steps; where there are none, all of them, and say so."""
    numbers, state = spans.step[steps], states(spans, steps)
    mask = state == 0
    parts = []
    for code, text in ((1, "captured"), (2, "interrupted")):
        count = len(np.unique(numbers[state == code]))
        if count:
            parts.append(f"{count} {text}")
    if not parts:
        return Counted(mask, len(np.unique(numbers)), "")
    if not mask.any():
        text = f"No complete steps, so {' and '.join(parts)} steps are included."
        return Counted(np.ones_like(mask), len(np.unique(numbers)), text)
    return Counted(mask, len(np.unique(numbers[mask])), f"Excluded steps: {', '.join(parts)}.")


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
    return spans, f"Only the last {left} of {steps} steps are analyzed, because the run is large."


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


def recent(spans: Spans, most: int = MOST_SPANS) -> tuple[Spans, str]:
    """Return the last steps of a run, up to so many steps and stages, and what to say of it.

    Steps go or stay as a whole, on all ranks. A run that is small enough comes back as it is.
    """
    if len(spans) <= most:
        return spans, ""
    compared = (spans.kind == KINDS.index("step")) | (spans.kind == KINDS.index("stage"))
    spans, kept, steps = cut_before(spans, most, compared)
    if kept == steps:
        return spans, ""
    return spans, f"Only the last {kept} steps are compared, because the run is large."


_COMPLETE, _CAPTURE = STATES.index("complete"), STATES.index("capture")
_FIRST = 1  # steps at the start that are left out: they warm up


def slowdown(spans: Spans) -> float | None:
    """Return how much longer a captured step takes than others, in the median; None if not known.

    0.1 is 10 % longer. The first step counts on neither side. It takes `FEWEST` steps of each.
    """
    rows = np.flatnonzero(spans.kind == KINDS.index("step"))
    if not len(rows):
        return None
    state, number = states(spans, rows), spans.step[rows]
    late = number >= int(number.min()) + _FIRST
    took = []
    for code in (_CAPTURE, _COMPLETE):
        own = (state == code) & late
        if len(np.unique(number[own])) < FEWEST:
            return None
        took.append(float(np.median(spans.duration_ns[rows[own]])))
    return took[0] / took[1] - 1 if took[1] else None
