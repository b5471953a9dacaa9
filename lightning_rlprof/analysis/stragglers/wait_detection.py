"""Which stages hold waiting for other ranks, told from how long the early and the late ones stay.

Where ranks wait for one another, in a collective for instance, a stage ends for all when the last
one has come: whoever comes early stays longer, by just as much. A stage that is a rank's own lasts
as long for the early as for the late.

Where in a step the ranks come together, told without comparing their clocks.
"""

from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.statistics.robust import apart, middle, middle_of_others, slope
from lightning_rlprof.analysis.stragglers.rank_matrix import Lineup
from lightning_rlprof.tables.arrays import Float64s, Mask

_SHARP = 0.25  # of how far ranks are apart elsewhere: where they are closer, they met
_LIKELY, _MOST = 6.0, 6  # times as far apart as at the sharpest place, and how many such places


@dataclass(frozen=True, eq=False)
class Meetings:
    """Places of a step where ranks are likely to meet, the sharpest first.

    Attributes:
        times_ns: When each rank was there, on its own clock; shape (ranks, steps, places).
        apart_ns: How far ranks are apart in the laps between two visits of the sharpest place.
        sharp: Whether that is far less than what they are apart elsewhere in the step.
    """

    times_ns: Float64s
    apart_ns: float
    sharp: bool

    def since(self, start_ns: Float64s, place: int) -> Float64s:
        """Return times counted from when the same rank was last at a place, slot by slot."""
        here = self.times_ns[:, :, place, None]
        before = np.concatenate([np.full_like(here[:, :1], np.nan), here[:, :-1]], axis=1)
        later = middle((start_ns - here).reshape(-1, start_ns.shape[2])) >= 0
        return start_ns - np.where(later, here, before)


def meetings(lineup: Lineup) -> Meetings:
    """Find where ranks meet: there, all take equally long from one step to the next.

    Of all ends and beginnings of slots those are taken whose distance to the step before differs
    least between ranks. If they never meet, nobody waits, and where we count from does not matter.
    """
    start = lineup.start_ns
    following = np.concatenate([start[:, :, 1:], start[:, :, :1]], axis=2)  # of the same step
    some = lineup.some_steps()[1:]  # the first one has none before it
    laps = [edges[:, some] - edges[:, some - 1] for edges in (lineup.end_ns, following)]
    spread = [_spread(each) for each in laps]
    off = np.minimum(*spread)
    order = np.argsort(off, kind="stable")[:_MOST]
    best = float(off[order[0]])
    likely = order[off[order] <= _LIKELY * best]
    ends = np.where(spread[0] <= spread[1], lineup.end_ns, following)[:, :, likely]
    elsewhere = _spread(start[:, some] - ends[:, some, :1])
    widest = float(np.max(elsewhere[np.isfinite(elsewhere)], initial=0.0))
    return Meetings(ends, best, best <= _SHARP * widest)


def _spread(times: Float64s) -> Float64s:
    """Return how far ranks are apart in each slot, infinite where too few of them are known."""
    off = np.abs(apart(times)).reshape(-1, times.shape[2])
    known = np.sum(~np.isnan(off), axis=0)
    enough = known * 2 >= max(int(known.max(initial=0)), 1)
    return np.where(enough, middle(off), np.inf)


_FREE, _BOUND = -0.3, -0.5  # slopes: own time has 0, waiting -1, and half of each lies between
_SURE = 2.0  # standard errors
_FINER = 1.4  # times further than a place's laps: what can be told by counting from it
_EQUAL = 1 / 3  # of how far steps are apart: where ranks are closer, something holds them together


@dataclass(frozen=True, eq=False)
class Waits:
    """What is known of waiting in a line-up.

    Attributes:
        bound: Slots that hold waiting.
        seen: Slots in which a slow rank would show. Not those that hold waiting, and not those that
            take all ranks the same time although it changes from step to step.
        early_ns: How much earlier than the median of the others a rank began a slot, which is the
            most that it can have waited longer than they. 0 where there is no waiting.
        met: Whether there is a place in the step where the ranks come together.
    """

    bound: Mask
    seen: Mask
    early_ns: Float64s
    met: bool


def waits(
    lineup: Lineup, explained_ns: Float64s, work: Float64s | None, *, one_clock: bool
) -> Waits:
    """Tell own time from waiting, slot by slot.

    Args:
        lineup: Two ranks or more.
        explained_ns: What `expected` makes of the work; same shape as the line-up's arrays.
        work: Tokens, to tell "early, as it had less to do" from "early, so it waited"; None where
            nobody counted any.
        one_clock: Whether all ranks read the same clock, as they do on one host. If not, how late a
            rank is counts from where the ranks last met.
    """
    met = meetings(lineup)
    some = lineup.some_steps()
    since = lineup.start_ns[:, some] if one_clock else met.since(lineup.start_ns, 0)[:, some]
    rest = (lineup.own_ns - explained_ns)[:, some]
    free, bound, equal = (np.zeros(len(lineup.stage), dtype=bool) for _ in range(3))
    for slot in range(len(free)):
        late, longer = apart(since[:, :, slot]), rest[:, :, slot]
        found = [slope(late, longer)]
        if work is not None:
            found.append(slope(late, longer, work[:, some, slot]))
        bound[slot] = any(each + _SURE * error < _BOUND for each, error in found)
        # Counted from a place that is not sharp itself, a slope of 0 means nothing.
        moves = np.abs(late - middle(late, axis=1)[:, None])
        sharp = one_clock or float(middle(moves.ravel())) >= _FINER * met.apart_ns
        free[slot] = not bound[slot] and sharp and found[0][0] - _SURE * found[0][1] > _FREE
        equal[slot] = _held_together(longer)
    early = np.zeros(lineup.start_ns.shape)
    early[:, :, ~free] = _early(lineup, met, ~free, one_clock)
    return Waits(bound, (free | ~equal) & ~bound, early, met.sharp)


def _early(lineup: Lineup, met: Meetings, slots: Mask, one_clock: bool) -> Float64s:
    """Return how early ranks were in some slots, the most that any meeting place allows.

    Ranks may be apart at a place by the same time in every step, which no lap shows.
    """
    start = lineup.start_ns[:, :, slots]
    if one_clock:
        return np.maximum(middle_of_others(start) - start, 0.0)
    found = np.zeros(start.shape)
    for place in range(met.times_ns.shape[2]):
        since = met.since(lineup.start_ns, place)[:, :, slots]
        found = np.maximum(found, middle_of_others(since) - since)
    return found


def _held_together(rest: Float64s) -> bool:
    """Tell whether ranks take the same time in each step, though not in all steps."""
    common = middle(rest)
    steps = float(middle(np.abs(common - middle(common))))
    return float(middle(np.abs(apart(rest)).ravel())) < _EQUAL * steps
