"""What recording costs, from pairs of neighboring steps of which one recorded only its length."""

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

from lightning_rlprof.analysis.steps.step_selection import STATES, states
from lightning_rlprof.records.records import SHADOW, STEP_END
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.spans import Spans

AIM = 0.003
"""Half of the 95% interval that is worth reaching: 0.3 points."""

FEWEST_PAIRS = 20
"""Below it, the interval of a median is nearly the range of the values."""


@dataclass(frozen=True)
class Overhead:
    """How much longer recorded steps are than shadow steps.

    Attributes:
        pairs: How many pairs of neighboring steps were compared.
        share: Median of their ratios, less 1; NaN with fewer than `FEWEST_PAIRS` pairs.
        low: Lower end of its 95% interval.
        high: Upper end.
        step_ends: Share of the recorded steps that their end took: counters, encoding, writing.
    """

    pairs: int
    share: float
    low: float
    high: float
    step_ends: float

    @property
    def more_steps(self) -> int:
        """How many more steps are needed for an interval of ±0.3 points; 0 if it is reached.

        The interval narrows with the square root of the number of pairs.
        """
        if self.pairs < FEWEST_PAIRS:
            return 2 * (FEWEST_PAIRS - self.pairs)
        half = (self.high - self.low) / 2
        return 2 * max(ceil(self.pairs * ((half / AIM) ** 2 - 1)), 0)


def measured_overhead(spans: Spans) -> Overhead | None:
    """Compare the steps of a run with its shadow steps; None if it has none.

    Steps 1 and 2 are a pair, steps 3 and 4, and so on: a slow drift changes both alike. The ranks
    of a role wait for each other, so a pair's ratio is that of the sums over them. A pair counts if
    one step is complete and the other a shadow step on all of them. The end of a step runs within
    the span of the next one: it is added to the step that it is of, and nowhere if that is a shadow
    step, as without rlprof there is none.

    The interval is that of order statistics, which holds whatever the noise is.
    """
    rows = spans.rows(kind="step")
    state = states(spans, rows)
    if not (state == STATES.index(SHADOW)).any():
        return None
    roles = [spans.headers[rank].role for rank in spans.ranks]
    ratios, ends, recorded = [], 0.0, 0.0
    for role in dict.fromkeys(roles):
        own = [rank for rank, its in zip(spans.ranks, roles, strict=True) if its == role]
        chosen = np.isin(spans.rank[rows], own)
        found = _ratios(spans, rows[chosen], state[chosen])
        ratios.append(found[0])
        ends, recorded = ends + found[1], recorded + found[2]
    values = np.sort(np.concatenate(ratios))
    share = ends / recorded if recorded else 0.0
    if len(values) < FEWEST_PAIRS:
        return Overhead(len(values), np.nan, np.nan, np.nan, share)
    median = float(np.median(values)) - 1
    return Overhead(len(values), median, *_interval(values), share)


def _ratios(spans: Spans, rows: Int64s, state: Int64s) -> tuple[Float64s, float, float]:
    """Return a ratio per pair, and of their recorded steps how long the ends and all of it took."""
    order = np.lexsort([spans.start_ns[rows], spans.rank[rows]])
    rows, state = rows[order], state[order]
    after = spans.per_row(STEP_END)[rows]  # of the end of the step before
    follows = np.append((np.diff(spans.rank[rows]) == 0) & (after[1:] >= 0), False)
    end = np.append(after[1:], 0)
    is_shadow = state == STATES.index(SHADOW)
    length = spans.duration_ns[rows] - np.maximum(after, 0) + np.where(is_shadow, 0, end)
    steps, place = np.unique(spans.step[rows], return_inverse=True)
    count = np.bincount(place)
    sums = np.bincount(place, length)
    known = (np.bincount(place, follows) == count) & (sums > 0)
    complete = known & (np.bincount(place, state == 0) == count)
    shadow = known & (np.bincount(place, is_shadow) == count)
    is_pair = (np.diff(steps) == 1) & (steps[:-1] % 2 == 1)  # as `pair_of` has them
    first = np.flatnonzero(is_pair & (np.diff(count) == 0))
    early = first[complete[first] & shadow[first + 1]]
    late = first[shadow[first] & complete[first + 1]] + 1
    on, off = np.append(early, late), np.append(early + 1, late - 1)
    ends = np.bincount(place, end)[on].sum()
    return sums[on] / sums[off], float(ends), float(sums[on].sum())


def _interval(ordered: Float64s) -> tuple[float, float]:
    """Return the 95% interval of the median, less 1."""
    count = len(ordered)
    low = max(int(count / 2 - 0.98 * sqrt(count)), 0)
    return float(ordered[low]) - 1, float(ordered[count - 1 - low]) - 1
