"""From evidence to one verdict on each rank that stands out."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.drift import joined
from lightning_rlprof.analysis.evidence import EFFECT, Evidence, proven, suspected
from lightning_rlprof.analysis.exact import median_bounds
from lightning_rlprof.analysis.others import middle
from lightning_rlprof.analysis.pace import WHOLE, Pace

__all__ = [
    "INSUFFICIENT",
    "LEVEL",
    "NOBODY",
    "SLOW",
    "SLOW_DEVICE",
    "SLOW_GROUP",
    "SLOW_HOST",
    "SLOW_OR_UNEVEN",
    "TRANSIENT",
    "UNEVEN",
    "Verdict",
    "judge",
    "steps_needed",
]

LEVEL = 0.01
"""How likely a healthy rank of a role is accused, split among questions and places of a replica."""

INSUFFICIENT, NOBODY = "insufficient evidence", "nobody is slow"
"""Nothing can be said, or nobody is found."""

SLOW, SLOW_DEVICE, SLOW_HOST = "slow rank", "slow device", "slow host"
"""One rank is slow for its work: as a whole, on its device, or on its host alone."""

SLOW_OR_UNEVEN, SLOW_GROUP = "slow or uneven work", "slow group"
"""Nobody counted the work; or one of several ranks that hold a copy of the model together."""

TRANSIENT, UNEVEN = "transient", "uneven work"
"""Slow for a stretch of steps; or longer since it had more to do."""

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
        word = UNEVEN if float(middle(pace.fitted[rank])) <= EFFECT else INSUFFICIENT
        found.setdefault(rank, Verdict(rank, word, (WHOLE,), evidence))
    for rank, evidence in suspected(pace.effect[:, :, 0], pace.lasting).items():
        found.setdefault(rank, Verdict(rank, INSUFFICIENT, (WHOLE,), evidence))
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
        return SLOW_OR_UNEVEN
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
