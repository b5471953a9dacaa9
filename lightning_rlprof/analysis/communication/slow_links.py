"""Which links are slow, compared with links that did the same.

Two links are comparable if they have the same transport and took part in the same operation of the
same step, with sizes within a factor of two. A link's score is the median, over what was seen of
it, of the logarithm of its speed relative to comparable links. It is slow if its score is far below
those of the links that share neither end with it: a slow port slows all links of its rank. It must
also be slow more often than congestion explains, which the other links show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_rlprof.analysis.communication.link_observations import Observations
from lightning_rlprof.analysis.statistics.distributions import student_tail
from lightning_rlprof.analysis.statistics.group_summary import group_medians
from lightning_rlprof.analysis.statistics.rank_tests import at_least
from lightning_rlprof.tables.arrays import Float64s, Int64s, distinct_tuples

Verdict = Literal["slow", "ok", "inconclusive"]

SLOWER = 0.9
"""A link is slow if it certainly has less than this part of the baseline's speed."""

EXCLUDED = 0.75
"""A link is ok if it certainly has more than this part."""

SEEN = 3
"""A link is called slow if it was seen at least so often: congestion comes and goes."""

FEWEST = 3
"""Links that a link is compared with, at least."""

_ALPHA = 0.01  # chance that any of the links of a healthy run is called slow
_CONGESTED = 0.001  # chance that congestion alone is taken for a slow link
_MAD = 1.4826  # from the median of absolute deviations to a standard deviation
_FLOOR = 0.02  # relative spread of links at least; timers and chunks differ by as much
_MOST = 2_000  # links that one is compared with, at most
_TAIL = np.geomspace(1e-3, 1e6, 4_000)


@dataclass(frozen=True, eq=False)
class Links:
    """One row per link and transport.

    Attributes:
        ends: Ranks at both ends, or numbers in a group, as in `Observations`; shape (2, n).
        groups: The group whose number an end is, else `UNKNOWN`; shape (2, n).
        transport: Code of the transport.
        size: Bytes in all.
        time: Nanoseconds in all.
        seen: How often.
        below: How often it was slower than `SLOWER` of what did the same.
        score: Logarithm of its speed relative to the baseline; NaN if nothing is comparable.
        low: Lower end of the interval of the score; all intervals hold together at 99%.
        high: Upper end.
        others: How many links it was compared with.
        chance: How likely a healthy link is that so often, by how often the other links are.
    """

    ends: Int64s
    groups: Int64s
    transport: Int64s
    size: Int64s
    time: Int64s
    seen: Int64s
    below: Int64s
    score: Float64s
    low: Float64s
    high: Float64s
    others: Int64s
    chance: Float64s

    def verdicts(self) -> Sequence[Verdict]:
        """Return whether each link is slow."""
        slower = self.high < np.log(SLOWER)
        slow = slower & (self.seen >= SEEN) & (self.chance * len(self.seen) < _CONGESTED)
        ok = ~slower & (self.low > np.log(EXCLUDED))
        return [
            "slow" if one else "ok" if other else "inconclusive"
            for one, other in zip(slow, ok, strict=True)
        ]


def judge(seen: Observations) -> Links:
    """Sum up what was seen of each link, and compare it with the links that did the same."""
    keys = np.stack([*seen.ends, *seen.groups, seen.transport[0]])
    heads, link = distinct_tuples(keys)
    count = heads.shape[1]
    amounts = np.zeros((2, count), np.int64)
    for amount, column in zip(amounts, (seen.size, seen.time), strict=True):
        np.add.at(amount, link, column)
    ends, groups, transport = heads[:2], heads[2:4], heads[4]
    relative = _relative(seen, link)
    known = ~np.isnan(relative)
    below = np.bincount(link[known], relative[known] < np.log(SLOWER), count).astype(np.int64)
    times = np.bincount(link[known], minlength=count)
    score = group_medians(link[known], relative[known], count)
    compared = _compare(score, below, times, ends, groups, transport)
    size, time = amounts
    seen_of = np.bincount(link, minlength=count)
    return Links(ends, groups, transport, size, time, seen_of, below, *compared)


def _relative(seen: Observations, link: Int64s) -> Float64s:
    """Return the logarithm of each speed relative to the links that did the same, NaN if alone."""
    speed = np.log(seen.size / seen.time)
    bucket = np.round(np.log2(seen.size)).astype(np.int64)
    same = np.stack([seen.transport[0], seen.operation[0], seen.step, bucket])
    _, cell = distinct_tuples(same)
    (cells, _), of_pair = distinct_tuples(np.stack([cell, link]))
    own = group_medians(of_pair, speed, len(cells))
    usual = group_medians(cells, own, int(cells.max()) + 1)
    return np.where((np.bincount(cells) < 2)[cell], np.nan, speed - usual[cell])


def _compare(
    score: Float64s,
    below: Int64s,
    times: Int64s,
    ends: Int64s,
    groups: Int64s,
    transport: Int64s,
) -> tuple[Float64s, Float64s, Float64s, Int64s, Float64s]:
    """Return score, interval, number of links compared with, and chance, of each link."""
    places = np.stack([groups.reshape(-1), ends.reshape(-1)])
    node = distinct_tuples(places)[1].reshape(2, -1)
    found, margin = np.full(len(score), np.nan), np.full(len(score), np.nan)
    others, chance = np.zeros(len(score), np.int64), np.ones(len(score))
    known = np.flatnonzero(~np.isnan(score))
    for code in np.unique(transport[known]).tolist():
        rows = known[transport[known] == code]
        if len(rows) <= FEWEST:
            continue
        pool = rows
        if len(rows) > _MOST:
            pool = np.random.default_rng(0).choice(rows, _MOST, replace=False)
        for row in rows.tolist():
            away = pool[~np.isin(node[:, pool], node[:, row]).any(axis=0)]
            if len(away) < FEWEST:
                away = pool[pool != row]
            others[row] = len(away)
            found[row] = score[row] - float(np.median(score[away]))
            # that of one more time than was seen, so that it is never zero
            rate = (below[away].sum() + 1) / (times[away].sum() + 2)
            chance[row] = at_least(int(times[row]), float(rate))[below[row]]
        margin[rows] = _margin(found[rows], others[rows], len(known))
    return found, found - margin, found + margin, others, chance


def _margin(score: Float64s, others: Int64s, links: int) -> Float64s:
    """Return half the width of the interval of each score, at 99% for all links together.

    A median of n values has π/2 times the variance of a mean. The spread of links is the median
    deviation, so few slow links don't widen it; it counts as half as many degrees of freedom as
    there are links. The tests on healthy runs confirm both.
    """
    spread = max(_MAD * float(np.median(np.abs(score))), _FLOOR)
    freedom = max(len(score) / 2, 2.0)
    reach = float(np.interp(-_ALPHA / links, -student_tail(_TAIL, freedom), _TAIL))
    return np.asarray(reach * spread * np.sqrt(1 + np.pi / 2 / others))
