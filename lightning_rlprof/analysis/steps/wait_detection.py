"""Which stages include waiting for other ranks, from how long early and late ranks stay.

If ranks wait for one another, for instance in a collective, a stage ends for all when the last rank
has arrived: early ranks stay longer, by just as much. A stage without waiting takes the same time
for early and late ranks. On one clock, a rank that is late in every step shows that as well.

Without a common clock, arrival is measured from meeting places: ends or starts of stages at which
the ranks are at the same point of the step. These are found without comparing clocks.
"""

from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.statistics.robust import (
    deviation_from_median,
    leave_one_out_median,
    nan_median,
    slope,
)
from lightning_rlprof.analysis.steps.rank_matrix import RankMatrix
from lightning_rlprof.tables.arrays import Float64s, Mask

_SHARP = 0.25  # of the spread of ranks elsewhere: ranks that are closer meet
_LIKELY, _MOST = 6.0, 6  # times the spread at the sharpest place, and number of such places


@dataclass(frozen=True, eq=False)
class MeetingPlaces:
    """Places of a step where ranks are likely to meet, the sharpest first.

    Attributes:
        times_ns: When each rank was there, on its own clock; shape (ranks, steps, places).
        apart_ns: Spread of ranks in the time between two visits of the sharpest place.
        sharp: Whether that is far less than their spread elsewhere in the step.
    """

    times_ns: Float64s
    apart_ns: float
    sharp: bool

    def since(self, start_ns: Float64s, place: int) -> Float64s:
        """Return times since the same rank was last at a place, slot by slot."""
        here = self.times_ns[:, :, place, None]
        before = np.concatenate([np.full_like(here[:, :1], np.nan), here[:, :-1]], axis=1)
        later = nan_median((start_ns - here).reshape(-1, start_ns.shape[2])) >= 0
        return start_ns - np.where(later, here, before)


def find_meeting_places(matrix: RankMatrix) -> MeetingPlaces:
    """Find where ranks meet: there, all take equally long from one step to the next.

    Of all ends and starts of slots, takes those whose distance to the previous step differs least
    between ranks. If ranks never meet, none of them waits, and the place doesn't matter.
    """
    start = matrix.start_ns
    following = np.concatenate([start[:, :, 1:], start[:, :, :1]], axis=2)  # of the same step
    some = matrix.some_steps()[1:]  # the first one has none before it
    intervals = [edges[:, some] - edges[:, some - 1] for edges in (matrix.end_ns, following)]
    spread = [_spread(each) for each in intervals]
    off = np.minimum(*spread)
    order = np.argsort(off, kind="stable")[:_MOST]
    best = float(off[order[0]])
    likely = order[off[order] <= _LIKELY * best]
    ends = np.where(spread[0] <= spread[1], matrix.end_ns, following)[:, :, likely]
    elsewhere = _spread(start[:, some] - ends[:, some, :1])
    widest = float(np.max(elsewhere[np.isfinite(elsewhere)], initial=0.0))
    return MeetingPlaces(ends, best, best <= _SHARP * widest)


def _spread(times: Float64s) -> Float64s:
    """Return the spread of ranks in each slot, infinite if too few of them are known."""
    off = np.abs(deviation_from_median(times)).reshape(-1, times.shape[2])
    known = np.sum(~np.isnan(off), axis=0)
    enough = known * 2 >= max(int(known.max(initial=0)), 1)
    return np.where(enough, nan_median(off), np.inf)


_FREE, _BOUND = -0.3, -0.5  # slopes: work has 0, waiting -1, and half of each is in between
_SURE = 2.0  # standard errors
_FINER = 1.4  # times the spread at a place: what can be measured from it
_EQUAL = 1 / 3  # of the spread of steps: ranks that are closer may wait for each other
_SAME = 0.02  # of it: work is never that even, so they do
_ABSORBED = 0.25  # of how far ranks are apart at the start: what is left of it at the end
_ENOUGH = 20  # spans of a slot that show it


@dataclass(frozen=True, eq=False)
class DetectedWaits:
    """Waiting in the slots of a rank matrix.

    Attributes:
        bound: Slots that include waiting.
        seen: Slots in which a slow rank would show. Excludes those that include waiting, and those
            that take all ranks the same time although it changes from step to step.
        early_ns: How much earlier than the median of the others a rank started a slot: the most
            that it can have waited longer. 0 without waiting.
        has_sync: Whether there is a place in the step where the ranks meet.
    """

    bound: Mask
    seen: Mask
    early_ns: Float64s
    has_sync: bool


def detect_waits(
    matrix: RankMatrix, explained_ns: Float64s, work: Float64s | None, *, one_clock: bool
) -> DetectedWaits:
    """Separate work from waiting, slot by slot.

    Args:
        matrix: Two ranks or more.
        explained_ns: Time that `expected` computes for the work; same shape as the matrix's arrays.
        work: Tokens, to separate "early because of less work" from "early, so it waited"; None if
            not counted.
        one_clock: Whether all ranks read the same clock, as on one host. If not, lateness counts
            from where the ranks last met.
    """
    places = find_meeting_places(matrix)
    some = matrix.some_steps()
    since = matrix.start_ns[:, some] if one_clock else places.since(matrix.start_ns, 0)[:, some]
    rest = (matrix.own_ns - explained_ns)[:, some]
    free, bound, equal = (np.zeros(len(matrix.stage), dtype=bool) for _ in range(3))
    for slot in range(len(free)):
        late, longer = deviation_from_median(since[:, :, slot]), rest[:, :, slot]
        found = [slope(late, longer)]
        if work is not None:
            found.append(slope(late, longer, work[:, some, slot]))
        bound[slot] = any(each + _SURE * error < _BOUND for each, error in found)
        own = matrix.own_ns[:, some, slot]
        enough = np.sum(~np.isnan(own)) >= _ENOUGH
        bound[slot] |= enough and _held_together(own, _SAME)
        bound[slot] |= enough and one_clock and _absorbs(late, longer)
        # Measured from a place that isn't sharp itself, a slope of 0 means nothing.
        moves = np.abs(late - nan_median(late, axis=1)[:, None])
        sharp = one_clock or float(nan_median(moves.ravel())) >= _FINER * places.apart_ns
        free[slot] = not bound[slot] and sharp and found[0][0] - _SURE * found[0][1] > _FREE
        equal[slot] = _held_together(longer, _EQUAL)
    early = np.zeros(matrix.start_ns.shape)
    early[:, :, ~free] = _early(matrix, places, ~free, one_clock)
    return DetectedWaits(bound, (free | ~equal) & ~bound, early, places.sharp)


def _early(matrix: RankMatrix, places: MeetingPlaces, slots: Mask, one_clock: bool) -> Float64s:
    """Return how early ranks were in some slots, the most that any meeting place allows.

    Ranks may be apart at a place by the same time in every step, which no interval shows.
    """
    start = matrix.start_ns[:, :, slots]
    if one_clock:
        return np.maximum(leave_one_out_median(start) - start, 0.0)
    found = np.zeros(start.shape)
    for place in range(places.times_ns.shape[2]):
        since = places.since(matrix.start_ns, place)[:, :, slots]
        found = np.maximum(found, leave_one_out_median(since) - since)
    return found


def _absorbs(late: Float64s, longer: Float64s) -> bool:
    """Return whether a slot makes up for lateness, also for one that is the same in every step."""
    rest = np.abs(late + deviation_from_median(longer)).ravel()
    return float(nan_median(rest)) < _ABSORBED * float(nan_median(np.abs(late).ravel()))


def _held_together(times: Float64s, closer: float) -> bool:
    """Return whether ranks take the same time in each step, though not from step to step.

    Steps are compared with the ones before them: a stage that is slower from a step on moves all
    ranks once, which is no meeting.
    """
    common = nan_median(times)
    steps = float(nan_median(np.abs(np.diff(common)))) / _OF_TWO
    return float(nan_median(np.abs(deviation_from_median(times)).ravel())) < closer * steps


_OF_TWO = 2**0.5  # times the deviation of one step is that of the difference of two
