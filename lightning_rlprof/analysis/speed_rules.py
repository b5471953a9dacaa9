"""The rule on training that reaches little of what its devices can compute."""

from collections.abc import Iterator

import numpy as np

from lightning_rlprof.analysis.claims import (
    HIGH,
    MEDIUM,
    Claim,
    Undecided,
    bounds,
    place_of,
    spans_query,
)
from lightning_rlprof.analysis.counted import states
from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.flops import kind_of, peak_of
from lightning_rlprof.analysis.nested import NONE, enclosing
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["FEWEST", "REACHED", "speed_claims"]

REACHED = 0.2
"""MFU of training below which is a finding; what dense models reach is 0.35 to 0.5."""

FEWEST = 5
"""Steps below which nothing is said."""

_SHOWN = 3
_SUBJECT = "MFU of training"


def speed_claims(spans: Spans) -> Iterator[Claim | Undecided]:
    """Yield the MFU of training where that is low; nothing where FLOPs or hardware are not told.

    The price is what reaching `REACHED` would save. Only spans that counted ``flops`` themselves,
    in complete steps and in stages whose name means training: a decoding engine is bound by memory,
    and its MFU is low when all is well. Any above 100 % makes the rule abstain.
    """
    rows, done = _counted(spans)
    peak = _peaks(spans, rows)
    rows, done, peak = rows[peak > 0], done[peak > 0], peak[peak > 0]
    if not len(rows):
        return
    took = spans.duration_ns[rows].astype(np.float64)
    numbers, place = np.unique(spans.step[rows], return_inverse=True)
    used, could = _sums(place, done / 1_000), _sums(place, took * peak)
    if len(numbers) < FEWEST:
        yield Undecided(_SUBJECT, f"of {len(numbers)} steps that counted flops")
        return
    if (done / 1_000 > took * peak).any():
        yield Undecided(_SUBJECT, "as some of it is above 100 %: see the integrity sheet")
        return
    low, high = bounds(used, could)
    if low > REACHED:
        return
    if high >= REACHED:
        yield Undecided(_SUBJECT, f"{low:.0%} to {high:.0%} where {REACHED:.0%} counts")
        return
    order = np.argsort(done / (took * peak))
    reached = (low, float(used.sum() / could.sum()), high)
    yield _claim(spans, rows[order], float(took.sum()), reached)


def _counted(spans: Spans) -> tuple[Int64s, Floats]:
    """Return the spans of training in complete steps that counted flops, and how many."""
    rows, values = spans.amounts("flops")
    trains = np.array([kind_of(name) == "training" for name in spans.names], dtype=bool)
    keep = trains[spans.name[rows]] & (values > 0) & (spans.duration_ns[rows] > 0)
    steps = spans.rows(kind="step")
    whole = np.unique(spans.step[steps[states(spans, steps) == 0]])
    keep &= np.isin(spans.step[rows], whole)
    rows, values = rows[keep], values[keep]
    thread, start, end = spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows]
    order = np.lexsort((spans.id[rows], -end, start, thread))
    once = order[enclosing(thread[order], start[order], end[order]) == NONE]  # nested: counted once
    return rows[once], values[once]


def _peaks(spans: Spans, rows: Int64s) -> Floats:
    """Return the peak of the device of each span in TFLOP/s, 0 where it is not known."""
    known = {rank: peak_of(head.hardware) or 0.0 for rank, head in spans.headers.items()}
    return np.array([known.get(rank, 0.0) for rank in spans.rank[rows].tolist()])


def _sums(place: Int64s, values: Floats) -> Floats:
    return np.bincount(place, values).astype(np.float64)


def _claim(spans: Spans, rows: Int64s, took: float, mfu: tuple[float, float, float]) -> Claim:
    """Return the claim; the lowest MFU comes first in ``rows``."""
    low, middle, high = mfu
    effect, least, most = (int(took * (1 - share / REACHED)) for share in (middle, high, low))
    names = sorted({spans.names[code] for code in spans.name[rows].tolist()})
    return Claim(
        f"training reaches {middle:.0%} of what its devices compute: {', '.join(names)}",
        *(effect, least, most),
        HIGH if high < REACHED / 2 else MEDIUM,
        "rlprof show RUN breakdown and idle say whether the devices wait or compute slowly; then "
        "a larger micro-batch, packed sequences, BF16",
        "the flops that were counted leave out a part of the work, or the work is not in BF16",
        f"MFU {low:.1%} to {high:.1%} by counted flops; lowest spans (rank/id): "
        + ", ".join(f"{spans.rank[row]}/{spans.id[row]}" for row in rows[:_SHOWN].tolist())
        + f"; the price is what {REACHED:.0%} would save",
        spans_query(spans, rows[:_SHOWN].tolist()),
        place_of(spans, rows),
        "rlprof show RUN throughput",
    )
