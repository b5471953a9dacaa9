"""Which ranks are slower than the others beyond doubt: always, or for a stretch of steps.

From evidence to one verdict on each rank that stands out.
"""

import math
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.statistics.rank_tests import holm, median_bounds, sign_test
from lightning_rlprof.analysis.statistics.robust import middle
from lightning_rlprof.analysis.statistics.time_series import joined, stretches
from lightning_rlprof.analysis.stragglers.rank_slowdown import WHOLE, Pace
from lightning_rlprof.tables.arrays import Float64s, Int64s

EFFECT = 0.05
"""A rank is slow that takes 5 % longer than the others: healthy ones are seldom so far apart."""

BEYOND = 6.0
"""A slow rank is so many times as far off as the others are among themselves."""

_FEWEST = 5  # steps that a stretch has, and that are left beside it
_SUSPECT = 0.05
_NEARLY, _FIRST = 0.9, 10  # of all steps; and how many first ones are like no others


@dataclass(frozen=True)
class Evidence:
    """What speaks against one rank, in columns of the array that was tested.

    Attributes:
        first: First step that it is about.
        last: Last step.
        ended: Whether the rank was as fast as the others afterwards.
        effect: Median of how much slower it was in these steps: 0.1 took 10 % longer.
        low: Lower end of the 95 % interval of that median; None where steps are too few for one.
        high: Upper end.
        chance: p value after Holm's correction.
    """

    first: int
    last: int
    ended: bool
    effect: float
    low: float | None
    high: float | None
    chance: float


def proven(
    effect: Float64s, level: float, lasting: int = 1, beyond: float = BEYOND
) -> dict[tuple[int, int], Evidence]:
    """Test all ranks and series as one family; return what is sure, by rank and series.

    Two tests, each at the level given, corrected by Holm's method. Always slow: more steps above
    zero than the sign test allows, and a median above `EFFECT`. Slow for a stretch: `stretches`,
    with such a median inside and none beside it. Where both hold, the stretch says more, unless it
    lacks hardly more than the first steps of a run, which are like no others.

    Args:
        effect: Relative excess over the others; shape (ranks, steps, series), NaN: says nothing.
        level: How likely one healthy rank is accused by a test.
        lasting: Steps that count as one.
        beyond: How many standard deviations of the other ranks' medians it has to be off.
    """
    blocks = joined(effect, lasting)
    stretch = stretches(blocks, EFFECT)
    always, passing = _among_asked(blocks, sign_test(blocks), stretch.chance)
    found: dict[tuple[int, int], Evidence] = {}
    for rank, series in np.argwhere((always <= level) | (passing <= level)).tolist():
        first, last = int(stretch.first[rank, series]), int(stretch.last[rank, series])
        chances = (float(always[rank, series]), float(passing[rank, series]))
        steps = (first * lasting, (last + 1) * lasting - 1)
        told = _told(effect[rank, :, series], steps, chances, level, lasting)
        if told and told.effect > beyond * _spread(effect[:, :, series], rank, told):
            found[rank, series] = told
    return found


def _told(
    values: Float64s,
    steps: tuple[int, int],
    chances: tuple[float, float],
    level: float,
    lasting: int,
) -> Evidence | None:
    """Return what two chances say, of being always slow and of being so in a stretch of steps."""
    known = np.flatnonzero(~np.isnan(values))
    always = chances[0] <= level and np.nanmedian(values) > EFFECT
    stretch = chances[1] <= level and _apart(values, *steps)
    if stretch and not (always and _is_nearly_all(known, *steps)):
        return _evidence(values, *steps, bool(steps[1] < known[-1]), chances[1], lasting)
    if always:
        return _evidence(values, int(known[0]), int(known[-1]), False, chances[0], lasting)
    return None


def _is_nearly_all(known: Int64s, first: int, last: int) -> bool:
    """Tell whether steps are all but a few of the first ones, and hardly any of the last."""
    before, behind = np.count_nonzero(known < first), np.count_nonzero(known > last)
    left = before + behind
    return bool(before <= _FIRST and behind < _FEWEST and left <= (1 - _NEARLY) * len(known))


def _spread(effect: Float64s, rank: int, told: Evidence) -> float:
    """Return how far the other ranks are apart in the same steps: a standard deviation.

    Where all keep a pace of their own, warm or cool, one of them is the slowest by no fault. The
    one that is furthest off counts only among two, since it may be slow as well.
    """
    others = middle(np.delete(effect[:, told.first : told.last + 1], rank, axis=0), axis=1)
    off = np.abs(others - middle(others))
    off = np.sort(off[~np.isnan(off)])
    kept = off[:-1] if len(off) > 2 else off
    return float(np.sqrt(np.sum(kept**2) / max(len(kept) - 1, 1)))


def _among_asked(effect: Float64s, *chances: Float64s) -> list[Float64s]:
    """Correct p values for the series that say anything; the others were not asked."""
    asked = ~np.isnan(effect).all(axis=1)
    found = [np.ones(asked.shape) for _ in chances]
    for corrected, chance in zip(found, chances, strict=True):
        corrected[asked] = holm(chance[asked])
    return found


def suspected(effect: Float64s, lasting: int = 1) -> dict[int, Evidence]:
    """Return ranks that a single look finds slow, where looking at all of them proves nothing.

    Args:
        effect: As for `proven`, of one series; shape (ranks, steps).
        lasting: As for `proven`.
    """
    chance, center = sign_test(effect), middle(effect, axis=1)
    return {
        rank: _evidence(effect[rank], 0, effect.shape[1] - 1, False, float(chance[rank]), lasting)
        for rank in np.flatnonzero((chance <= _SUSPECT) & (center > EFFECT)).tolist()
    }


def _apart(values: Float64s, first: int, last: int) -> bool:
    """Tell whether a rank was slow in a stretch and not beside it."""
    inside, beside = values[first : last + 1], np.delete(values, slice(first, last + 1))
    if min(np.sum(~np.isnan(inside)), np.sum(~np.isnan(beside))) < _FEWEST:
        return False
    return bool(np.nanmedian(inside) > EFFECT >= np.nanmedian(beside))


def _evidence(
    values: Float64s, first: int, last: int, ended: bool, chance: float, lasting: int
) -> Evidence:
    inside = values[first : last + 1]
    low, high = median_bounds(joined(inside[None], lasting)[0]) or (None, None)
    return Evidence(first, last, ended, float(np.nanmedian(inside)), low, high, chance)


LEVEL = 0.01
"""How likely a healthy rank of a role is accused, split among questions and places of a replica."""

INCONCLUSIVE, NO_STRAGGLER = "inconclusive", "no straggler"
"""The data can't decide, or no rank is slow."""

SLOW, SLOW_DEVICE, SLOW_HOST = "slow rank", "slow device", "slow host"
"""One rank is slow for its work: as a whole, on its device, or on its host alone."""

SLOW_UNCOUNTED, SLOW_REPLICA = "slow, work not counted", "slow replica"
"""Longer, without counts to adjust for; or one rank of a model replica, unknown which."""

TRANSIENT, IMBALANCE = "transient slowdown", "load imbalance"
"""Slow for a range of steps; or longer because it had more to do."""

_QUESTIONS = 3  # its own time as a whole, each stage, the device's time
_MATTERS = 0.01  # of the own time: what costs less is not worth a word, however sure


@dataclass(frozen=True)
class Verdict:
    """What is held about one rank.

    Attributes:
        rank: Index into the ranks of the line-up.
        verdict: One of the words of this module.
        stages: Index into ``Spans.names`` of the stages that it is slow in; `WHOLE` for all.
        evidence: Why.
    """

    rank: int
    verdict: str
    stages: tuple[int, ...]
    evidence: Evidence


def steps_needed(ranks: int) -> int:
    """Return the steps that it takes to find one rank of so many that is slow in each of them.

    Example::

        >>> steps_needed(2), steps_needed(8), steps_needed(1024)
        (10, 12, 19)
    """
    return math.ceil(math.log2(ranks * _QUESTIONS / LEVEL))


def judge(pace: Pace, *, host_only: bool, places: int = 1) -> list[Verdict]:
    """Return a verdict on each rank that stands out, in the order of ranks.

    Args:
        pace: Of one group, over `steps_needed` steps or more.
        host_only: Whether what the ranks compute on is the host.
        places: How many such groups the role has.
    """
    level = LEVEL / _QUESTIONS / places
    found: dict[int, Verdict] = {}
    for (rank, _), evidence in proven(pace.effect[:, :, :1], level, pace.lasting).items():
        word = _cause(pace, rank, evidence, host_only)
        found[rank] = Verdict(rank, word, _where(pace, rank, evidence), evidence)
    for rank, series, evidence in _single(pace, level):
        word = _cause(pace, rank, evidence, host_only)
        found.setdefault(rank, Verdict(rank, word, (int(pace.stages[series]),), evidence))
    if pace.device is not None:
        for (rank, _), evidence in proven(pace.device[:, :, None], level, pace.lasting).items():
            word = TRANSIENT if evidence.ended else SLOW_DEVICE
            found.setdefault(rank, Verdict(rank, word, (WHOLE,), evidence))
    for (rank, _), evidence in proven(pace.unequal[:, :, None], level, pace.lasting, 0.0).items():
        word = IMBALANCE if float(middle(pace.fitted[rank])) <= EFFECT else INCONCLUSIVE
        found.setdefault(rank, Verdict(rank, word, (WHOLE,), evidence))
    for rank, evidence in suspected(pace.effect[:, :, 0], pace.lasting).items():
        found.setdefault(rank, Verdict(rank, INCONCLUSIVE, (WHOLE,), evidence))
    return [found[rank] for rank in sorted(found)]


def _single(pace: Pace, level: float) -> list[tuple[int, int, Evidence]]:
    """Return ranks, series and evidence of slow stages that matter, the most costly first."""
    sure = proven(pace.effect[:, :, 1:], level, pace.lasting)
    costs = {key: evidence.effect * float(pace.share[key[1] + 1]) for key, evidence in sure.items()}
    order = sorted((key for key in sure if costs[key] >= _MATTERS), key=lambda key: -costs[key])
    return [(rank, series + 1, sure[rank, series]) for rank, series in order]


def _where(pace: Pace, rank: int, evidence: Evidence) -> tuple[int, ...]:
    """Name the stages in which a rank is slow, the most costly first; `WHOLE` for all."""
    effect = middle(pace.effect[rank, evidence.first : evidence.last + 1], axis=0)
    seen = np.flatnonzero(pace.seen[1:]) + 1
    slow = [series for series in seen.tolist() if effect[series] > EFFECT]
    if len(slow) in (0, len(seen)):
        return (WHOLE,) if len(slow) != 1 else (int(pace.stages[slow[0]]),)
    slow.sort(key=lambda series: -effect[series] * float(pace.share[series]))
    return tuple(int(pace.stages[series]) for series in slow)


def _cause(pace: Pace, rank: int, evidence: Evidence, host_only: bool) -> str:
    """Tell a slow device from a slow host, as far as the run knows."""
    if evidence.ended:
        return TRANSIENT
    if not pace.counted:
        return SLOW_UNCOUNTED
    if host_only:
        return SLOW_HOST
    if pace.device is None:
        return SLOW
    values = pace.device[rank, evidence.first : evidence.last + 1]
    bounds = median_bounds(joined(values[None], pace.lasting)[0])
    if bounds is None:
        return SLOW
    if bounds[0] > 0 and float(middle(values)) > EFFECT:
        return SLOW_DEVICE
    return SLOW_HOST if bounds[1] < max(EFFECT, evidence.effect / 2) else SLOW
