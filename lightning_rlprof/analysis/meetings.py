"""Where in a step the ranks come together, told without comparing their clocks."""

from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.lineup import Lineup
from lightning_rlprof.analysis.others import apart, middle

__all__ = ["Meetings", "meetings"]

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

    times_ns: Floats
    apart_ns: float
    sharp: bool

    def since(self, start_ns: Floats, place: int) -> Floats:
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


def _spread(times: Floats) -> Floats:
    """Return how far ranks are apart in each slot, infinite where too few of them are known."""
    off = np.abs(apart(times)).reshape(-1, times.shape[2])
    known = np.sum(~np.isnan(off), axis=0)
    enough = known * 2 >= max(int(known.max(initial=0)), 1)
    return np.where(enough, middle(off), np.inf)
