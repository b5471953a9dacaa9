"""Included steps: complete ones, no warm-up, captures or shadow steps; of large runs the last."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lightning_rlprof.records.records import KINDS, SHADOW
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.intervals import edges
from lightning_rlprof.tables.spans import Counter, Spans

OPENED, CLOSED = "rlprof open capture", "rlprof close capture"
"""Names of the regions in which the session opens and closes captures."""
_STEP = KINDS.index("step")
MIN_STEPS = 3
"""Number of steps below which no statement about a run is made."""

STATES = ("complete", "warm-up", SHADOW, "capture", "interrupted")
"""State of a step; if two apply, the later one wins."""

_WARM_UP = 1.5  # A first step warms up if it takes this multiple of nine of ten later steps.
_USUAL_QUANTILE = 0.9
_STEPS_PER_WARM_UP = 10  # One step in ten may be warm-up.

MOST_SPANS = 1_300_000
"""Number of spans up to which a run is analyzed whole: 64 ranks x 1,000 steps x 20."""

_MAX_KEPT = 750_000  # The columns of a larger run take memory already.
_COLUMNS = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")


def captures(spans: Spans, rank: int, start_ns: Int64s) -> tuple[Int64s, Int64s] | None:
    """Return start and end of the captures of a rank in which any of these starts lies.

    None if the rank opened none: then an external profiler recorded it.
    """
    opened = np.sort(spans.end_ns[spans.rows(kind="region", name=OPENED, rank=rank)])
    if not len(opened):
        return None
    closed = np.sort(spans.start_ns[spans.rows(kind="region", name=CLOSED, rank=rank)])
    at = np.searchsorted(opened, closed, "right") - 1
    first, last = opened[at[at >= 0]], closed[at >= 0]
    starts = np.sort(start_ns, kind="stable")  # A stable sort is quick if the times are in order.
    some = np.searchsorted(starts, last) > np.searchsorted(starts, first)
    return first[some], last[some]


class Counted(NamedTuple):
    """Included steps: a mask over the given step rows, the number of distinct steps, and a note."""

    mask: Mask
    steps: int
    note: str


def states(spans: Spans, steps: Int64s) -> Int64s:
    """Return per step row an index into `STATES`.

    If one rank didn't finish a step, ran a capture in it or recorded only its length, the state
    holds for all ranks, because the others waited for it. Warm-up is found by time: see `warm_up`.
    """
    _, state, place = _of_steps(spans, steps)
    return state[place]


def _of_steps(spans: Spans, steps: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return the numbers and states of all steps, and the place of each row's step among them."""
    numbers, state, place = spans.once("step states", _states)
    if steps is not spans.rows(kind="step"):
        place = np.searchsorted(numbers, spans.step[steps])
    return numbers, state, place


def _states(spans: Spans) -> tuple[Int64s, Int64s, Int64s]:
    """Return `_of_steps` for all rows of steps."""
    steps = spans.step[spans.rows(kind="step")]
    numbers = edges(steps)
    found = np.isin(numbers, warm_up(spans)).astype(np.int64)
    for code, name in enumerate(STATES[2:], start=2):
        found[np.isin(numbers, _flagged(spans, name))] = code
    return numbers, found, np.searchsorted(numbers, steps)


def shadow_steps(spans: Spans) -> Int64s:
    """Return the numbers of the steps of which a rank recorded only the length."""
    return _flagged(spans, SHADOW)


def _flagged(spans: Spans, name: str) -> Int64s:
    """Return the numbers of the steps that carry a flag on some rank."""
    rows = spans.flagged(name)
    numbers: Int64s = spans.step[rows[spans.kind[rows] == _STEP]]
    return numbers


def warm_up(spans: Spans) -> Int64s:
    """Return the numbers of the first steps that take far longer than the others.

    A step at the start warms up if it takes more than 1.5 times the 90th percentile of later ones,
    by the mean of its ranks. At most one step in ten does, and three others are left. None does in
    the last steps of a long run.
    """
    return spans.once("warm-up", _warm_up)


def _warm_up(spans: Spans) -> Int64s:
    rows = spans.rows(kind="step")
    flagged = [_flagged(spans, name) for name in STATES[2:]]
    rows = rows[~np.isin(spans.step[rows], np.concatenate(flagged))]
    numbers, place, ranks = np.unique(spans.step[rows], return_inverse=True, return_counts=True)
    most = min(-(-len(numbers) // _STEPS_PER_WARM_UP), len(numbers) - MIN_STEPS)
    if most < 1 or not spans.from_start:
        return numbers[:0]
    walls = np.bincount(place, spans.took_ns(rows)) / ranks
    slow = walls[:most] > _WARM_UP * np.quantile(walls[most:], _USUAL_QUANTILE)
    return numbers[: int(np.argmin(np.append(slow, False)))]


def counted(spans: Spans, steps: Int64s, since: int = 0) -> Counted:
    """Choose the complete steps, or all of them if none is complete; the note says so.

    Args:
        spans: The run.
        steps: Rows of step spans.
        since: Number of the first step that may be chosen.
    """
    numbers, state, place = _of_steps(spans, steps)
    there = np.bincount(place, minlength=len(numbers)) > 0
    state = np.where(there & (numbers >= since), state, -1)
    chosen, parts = state == 0, []
    for code, text in enumerate(("warm-up", SHADOW, "captured", "interrupted"), start=1):
        count = int(np.count_nonzero(state == code))
        if count:
            parts.append(f"{count} {text}")
    note = f"Excluded steps: {', '.join(parts)}." if parts else ""
    if parts and not chosen.any():
        chosen, note = state > 0, f"No complete steps, so {' and '.join(parts)} steps are included."
    return Counted(chosen[place], int(np.count_nonzero(chosen)), note)


def in_included(spans: Spans, rows: Int64s) -> Mask:
    """Mark the rows of included steps, see `counted`, and those outside steps."""
    steps = spans.rows(kind="step")
    left_out = edges(spans.step[steps[~counted(spans, steps).mask]])
    return ~np.isin(spans.step[rows], left_out)


def last_steps(spans: Spans, most: int = MOST_SPANS, kept: int = _MAX_KEPT) -> tuple[Spans, str]:
    """Return the last steps of a run with very many spans, and a note.

    Steps are kept or dropped whole, on all ranks; at least the last one is kept.

    Args:
        spans: The run.
        most: Number of spans up to which the run is returned unchanged.
        kept: Number of spans to keep of a larger one.
    """
    if len(spans) <= most:
        return spans, ""
    first, left, steps = _first_of_last(spans, kept)
    keep = np.flatnonzero(spans.step >= first)
    columns = {name: getattr(spans, name)[keep] for name in _COLUMNS}
    counters = {}
    for name, (rows, values) in spans.counters.items():
        kept_rows = np.isin(rows, keep)
        counters[name] = Counter(np.searchsorted(keep, rows[kept_rows]), values[kept_rows])
    is_whole = spans.from_start and left == steps
    spans = replace(spans, **columns, counters=counters, results={}, from_start=is_whole)
    return spans, f"Only the last {left} of {steps} steps are analyzed, because the run is large."


def _first_of_last(spans: Spans, kept: int, among: Mask | None = None) -> tuple[int, int, int]:
    """Return the first of the last steps within a number of spans, their count, and that of all.

    Args:
        spans: The run.
        kept: Number of spans; at least the last step is taken.
        among: Which spans count; None: all of them.
    """
    count = np.bincount(spans.step if among is None else spans.step[among])
    steps = np.flatnonzero(count)
    behind = np.cumsum(count[steps][::-1])[::-1]
    first = int(np.append(steps[behind <= kept], steps[-1])[0]) if len(steps) else 0
    return first, int(np.count_nonzero(steps >= first)), len(steps)


def recent(spans: Spans, most: int = MOST_SPANS) -> tuple[int, str]:
    """Return the first of the last steps with up to a number of step and stage spans, and a note.

    It is 0 for a small run, of which all steps are taken.
    """
    if len(spans) <= most:
        return 0, ""
    compared = (spans.kind == KINDS.index("step")) | (spans.kind == KINDS.index("stage"))
    first, kept, steps = _first_of_last(spans, most, compared)
    if kept == steps:
        return 0, ""
    return first, f"Only the last {kept} steps are compared, because the run is large."


def capture_slowdown(spans: Spans) -> float | None:
    """Return how much longer captured steps take, in the median; None if unknown.

    0.1 is 10% longer. Needs `MIN_STEPS` steps of each kind.
    """
    rows = spans.rows(kind="step")
    state, took = states(spans, rows), []
    for name in ("capture", "complete"):
        own = rows[state == STATES.index(name)]
        if len(edges(spans.step[own])) < MIN_STEPS:
            return None
        took.append(float(np.median(spans.took_ns(own))))
    return took[0] / took[1] - 1 if took[1] else None
