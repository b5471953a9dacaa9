"""Which stages hold waiting for other ranks, told from how long the early and the late ones stay.

Where ranks wait for one another, in a collective for instance, a stage ends for all when the last
one has come: whoever comes early stays longer, by just as much. A stage that is a rank's own lasts
as long for the early as for the late.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.exact import Floats
from lightning_rlprof.analysis.lineup import Lineup
from lightning_rlprof.analysis.meetings import Meetings, meetings
from lightning_rlprof.analysis.others import apart, middle, middle_of_others
from lightning_rlprof.analysis.slopes import slope

__all__ = ["Waits", "waits"]

Mask = npt.NDArray[np.bool_]

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
    early_ns: Floats
    met: bool


def waits(lineup: Lineup, explained_ns: Floats, work: Floats | None, *, one_clock: bool) -> Waits:
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


def _early(lineup: Lineup, met: Meetings, slots: Mask, one_clock: bool) -> Floats:
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


def _held_together(rest: Floats) -> bool:
    """Tell whether ranks take the same time in each step, though not in all steps."""
    common = middle(rest)
    steps = float(middle(np.abs(common - middle(common))))
    return float(middle(np.abs(apart(rest)).ravel())) < _EQUAL * steps
