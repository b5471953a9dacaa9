"""Slowdown of ranks at equal work, and which are slower than the others, always or for a while.

`proven` and `suspicious` test slowdowns; `judge` turns them into one verdict per rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.statistics.pace import highest
from lightning_rlprof.analysis.statistics.rank_tests import (
    holm,
    joined,
    lasting,
    median_bounds,
    sign_test,
    stretches,
)
from lightning_rlprof.analysis.statistics.robust import (
    MAD_TO_SPREAD,
    expected,
    leave_one_out_median,
    nan_median,
)
from lightning_rlprof.analysis.steps.rank_matrix import RankMatrix, counted_amounts, detect_waits
from lightning_rlprof.analysis.steps.sync_points import uncertainty_ns
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.spans import Spans

EFFECT = 0.05
"""A rank is slow if it takes 5% longer than the others: healthy ranks seldom differ by that."""

BEYOND = 6.0
"""A slow rank deviates by this factor more than the others deviate from each other."""

_MIN_STEPS = 5  # A range needs this many steps, and so does the rest of the run.
_MIN_STEPS_TOGETHER = 8
_SUSPICIOUS_CHANCE = 0.05
_SHOWN_CONFIDENCE = 0.95
_NEARLY, _MAX_FIRST = 0.9, 10  # A range may lack a tenth of the steps, and the first ten.
_MIN_RATIO = 1e-3  # A smaller part of the others' time is not believed.
_MIN_RANKS_OF_MEDIAN = 4
_MIN_KNOWN = 0.5  # If pace wanders, ranks with fewer steps share too few of them.

LEVEL = 0.01
"""Probability that a healthy rank of a role is accused, split among tests and positions."""

INCONCLUSIVE, NO_STRAGGLER = "inconclusive", "no straggler"
"""The data can't decide, or no rank is slow."""

SLOW, SLOW_DEVICE, SLOW_HOST = "slow rank", "slow device", "slow host"
"""One rank is slow for its work: as a whole, on its device, or only on its host."""

SLOW_UNCOUNTED, SLOW_REPLICA = "slow, work not counted", "slow replica"
"""Longer, without counts to adjust for; or one rank of a model replica, unknown which."""

TRANSIENT, IMBALANCE = "transient slowdown", "load imbalance"
"""Slow for a range of steps; or longer because it had more to do."""

LONGER_IN, SLOW_IN = "longer in", "slow in"
"""Longer in one stage while the others keep pace; or in some. The names of the stages follow."""

_QUESTIONS = 3  # A rank is tested as a whole, in each stage, and by its device's time.
_MIN_COST = 0.01  # A slow stage that costs less of a rank's own time is not reported.
_MIN_STAGE_SHARE = 0.005  # A stage with less of the own time says nothing of the machine.

WHOLE = -1
"""Stands for all stages without waiting; other series are an index into ``Spans.names``."""

_MIN_SHARE_COVERED = 0.5  # Steps with less of the usual time are not compared.
_EDGE = 0.02  # The least and the most work of a rank is too rare to compare with.
_MIN_OTHERS_OF_MEDIAN = 6


@dataclass(frozen=True)
class Evidence:
    """Evidence that one rank is slow, in columns of the tested array.

    Attributes:
        first: First step that it covers.
        last: Last step.
        ended: Whether the rank was as fast as the others afterwards.
        effect: Median slowdown in these steps: 0.1 is 10% longer.
        low: Lower end of its 95% CI; None if there are too few steps.
        high: Upper end.
        chance: p-value after Holm's correction.
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
    """Test all ranks and series as one family; return what is significant, by rank and series.

    There are two tests, each at the given level, corrected by Holm's method. Always slow: more
    steps above zero than the sign test allows, and a median above `EFFECT`; if pace wanders,
    `panel.highest` takes its place. Slow for a range of steps: `stretches`, with such a median
    inside and none outside. If both hold, the range says more, unless it is nearly the whole run.

    Args:
        effect: Relative excess over the others; shape (ranks, steps, series), NaN for no data.
        level: Probability that one healthy rank is accused by a test.
        lasting: Number of steps that count as one sample.
        beyond: Required excess in standard deviations of the other ranks' medians.
    """
    blocks = joined(effect, lasting)
    stretch = stretches(blocks, EFFECT)
    always, passing = _among_asked(blocks, sign_test(blocks), stretch.chance)
    found = _wandering(effect, level * _QUESTIONS) if lasting > 1 else {}
    if lasting > 1:
        always[:] = 1.0
    for rank, series in np.argwhere((always <= level) | (passing <= level)).tolist():
        first, last = int(stretch.first[rank, series]), int(stretch.last[rank, series])
        chances = (float(always[rank, series]), float(passing[rank, series]))
        steps = (first * lasting, (last + 1) * lasting - 1)
        evidence = _evidence_of(effect[rank, :, series], steps, chances, level, lasting)
        if evidence and evidence.effect > beyond * _spread(effect[:, :, series], rank, evidence):
            found.setdefault((rank, series), evidence)
    return found


def _wandering(effect: Float64s, level: float) -> dict[tuple[int, int], Evidence]:
    """Return the ranks that are always slow although pace wanders, by rank and series.

    The level is that of the role: healthy ranks whose pace wanders were accused in 0 to 1% of runs.
    """
    found = {}
    asked = [series for series in range(effect.shape[2]) if known_together(effect[:, :, series])]
    for series in asked:
        ranks, steps = known_together(effect[:, :, series]) or ([], np.zeros(0, dtype=np.int64))
        values = np.log(np.maximum(1 + effect[ranks][:, steps, series], _MIN_RATIO))
        for at, (chance, above) in highest(
            steps, values, level / len(asked), math.log1p(EFFECT)
        ).items():
            known = above.scaled(_own_part(len(ranks)))
            low, high = (math.expm1(each) for each in known.interval(1 - _SHOWN_CONFIDENCE))
            first, last = int(steps[0]), int(steps[-1])
            center = math.expm1(known.quantile(0.5))
            evidence = Evidence(first, last, False, center, low, high, min(chance * len(asked), 1))
            found[ranks[at], series] = evidence
    return found


def _own_part(ranks: int) -> float:
    """Return which part of an excess over the others' effects is the rank's own.

    The others' effects are relative to this rank, too: of two ranks, one is 5x and the other 1/5.
    From four ranks on, the median of the others hardly moves with one of them.
    """
    return (ranks - 1) / ranks if ranks < _MIN_RANKS_OF_MEDIAN else 1.0


def known_together(effect: Float64s) -> tuple[list[int], Int64s] | None:
    """Return the ranks known in half of the steps, and the steps that all of these know.

    None if these are fewer than two ranks, or fewer than eight steps.

    Args:
        effect: Shape (ranks, steps), NaN for no data.
    """
    known = ~np.isnan(effect)
    ranks = np.flatnonzero(known.sum(axis=1) >= _MIN_KNOWN * max(int(known.any(axis=0).sum()), 1))
    steps = np.flatnonzero(known[ranks].all(axis=0))
    return (ranks.tolist(), steps) if len(ranks) > 1 and len(steps) >= _MIN_STEPS_TOGETHER else None


def _evidence_of(
    values: Float64s,
    steps: tuple[int, int],
    chances: tuple[float, float],
    level: float,
    lasting: int,
) -> Evidence | None:
    """Return the evidence of two p-values: always slow, and slow in a range of steps."""
    known = np.flatnonzero(~np.isnan(values))
    always = chances[0] <= level and np.nanmedian(values) > EFFECT
    stretch = chances[1] <= level and _apart(values, *steps)
    if stretch and not (always and _is_nearly_all(known, *steps)):
        return _evidence(values, *steps, bool(steps[1] < known[-1]), chances[1], lasting)
    if always:
        return _evidence(values, int(known[0]), int(known[-1]), False, chances[0], lasting)
    return None


def _is_nearly_all(known: Int64s, first: int, last: int) -> bool:
    """Return whether a range has all but a few of the first steps, and nearly all of the last."""
    before, behind = np.count_nonzero(known < first), np.count_nonzero(known > last)
    left = before + behind
    return bool(before <= _MAX_FIRST and behind < _MIN_STEPS and left <= (1 - _NEARLY) * len(known))


def _spread(effect: Float64s, rank: int, evidence: Evidence) -> float:
    """Return the standard deviation of the other ranks in the same steps.

    If all ranks differ a little, for instance by temperature, one of them is always the slowest.
    Some may be slow as well, such as the others of a host: from six others on, their median
    deviation is taken, which a third of them can't move far. Of fewer, the one furthest off does
    not count, unless there are two.
    """
    others = nan_median(
        np.delete(effect[:, evidence.first : evidence.last + 1], rank, axis=0), axis=1
    )
    off = np.abs(others - nan_median(others))
    off = np.sort(off[~np.isnan(off)])
    if len(off) >= _MIN_OTHERS_OF_MEDIAN:
        return MAD_TO_SPREAD * float(np.median(off))
    kept = off[:-1] if len(off) > 2 else off
    return float(np.sqrt(np.sum(kept**2) / max(len(kept) - 1, 1)))


def _among_asked(effect: Float64s, *chances: Float64s) -> list[Float64s]:
    """Correct p-values for series with data only."""
    asked = ~np.isnan(effect).all(axis=1)
    found = [np.ones(asked.shape) for _ in chances]
    for corrected, chance in zip(found, chances, strict=True):
        corrected[asked] = holm(chance[asked])
    return found


def suspicious(effect: Float64s, lasting: int = 1) -> dict[int, Evidence]:
    """Return ranks that are significant alone, but not after correction for all ranks.

    Args:
        effect: As for `proven`, of one series; shape (ranks, steps).
        lasting: As for `proven`.
    """
    chance, center = sign_test(effect), nan_median(effect, axis=1)
    return {
        rank: _evidence(effect[rank], 0, effect.shape[1] - 1, False, float(chance[rank]), lasting)
        for rank in np.flatnonzero((chance <= _SUSPICIOUS_CHANCE) & (center > EFFECT)).tolist()
    }


def _apart(values: Float64s, first: int, last: int) -> bool:
    """Return whether a rank was slow in a range of steps and not outside of it."""
    inside, beside = values[first : last + 1], np.delete(values, slice(first, last + 1))
    if min(np.sum(~np.isnan(inside)), np.sum(~np.isnan(beside))) < _MIN_STEPS:
        return False
    return bool(np.nanmedian(inside) > EFFECT >= np.nanmedian(beside))


def _evidence(
    values: Float64s, first: int, last: int, ended: bool, chance: float, lasting: int
) -> Evidence:
    inside = values[first : last + 1]
    low, high = median_bounds(joined(inside[None], lasting)[0]) or (None, None)
    return Evidence(first, last, ended, float(np.nanmedian(inside)), low, high, chance)


@dataclass(frozen=True)
class Verdict:
    """Verdict on one rank.

    Attributes:
        rank: Index into the ranks of the matrix.
        verdict: One of the verdicts of this module.
        stages: Index into ``Spans.names`` of the stages that it is slow in; `WHOLE` for all.
        evidence: The evidence.
    """

    rank: int
    verdict: str
    stages: tuple[int, ...]
    evidence: Evidence


def steps_needed(ranks: int) -> int:
    """Return the number of steps needed to find one of some ranks that is slow in each step.

    Example::

        >>> steps_needed(2), steps_needed(8), steps_needed(1024)
        (10, 12, 19)
    """
    return math.ceil(math.log2(ranks * _QUESTIONS / LEVEL))


@dataclass(frozen=True, eq=False)
class RankSlowdown:
    """Slowdowns of a group of ranks; a series is a stage, or all stages without waiting together.

    Attributes:
        stages: Index into ``Spans.names`` of each series, the first is `WHOLE`.
        effect: Slowdown relative to the others at equal work; 0.1 is 10% longer. Shape
            (ranks, steps, series), NaN for steps that can't be compared.
        most: As ``effect`` for `WHOLE`, if the others waited as long as they may have: what a
            slow rank can at most have.
        fitted: The same for `WHOLE`, also if no other rank had as much or as little work.
        unequal: The same for `WHOLE` without adjusting for work.
        device: As ``effect`` for `WHOLE`, by the device's clock; None without device times.
        own_ns: Time in stages without waiting, including those that no other rank runs; NaN for
            steps without data.
        compared_ns: The part of it in stages in which ranks are compared.
        share: Share of each series in that time.
        waiting: Share of the time of all stages that is in stages with waiting.
        seen: Series in which a slow rank would show.
        has_sync: Whether the ranks wait for one another somewhere in a step.
        counted: Whether work was counted.
        lasting: Number of steps that count as one sample, because steps are autocorrelated.
    """

    stages: Int64s
    effect: Float64s
    most: Float64s
    fitted: Float64s
    unequal: Float64s
    device: Float64s | None
    own_ns: Float64s
    compared_ns: Float64s
    share: Float64s
    waiting: float
    seen: Mask
    has_sync: bool
    counted: bool
    lasting: int


def judge(slowdown: RankSlowdown, *, host_only: bool, places: int = 1) -> list[Verdict]:
    """Return a verdict on each rank that stands out, in the order of ranks.

    Args:
        slowdown: Of one group, over `steps_needed` steps or more.
        host_only: Whether the ranks compute on the host.
        places: Number of such groups in the role.
    """
    level = LEVEL / _QUESTIONS / places
    found: dict[int, Verdict] = {}
    for (rank, _), evidence in proven(slowdown.effect[:, :, :1], level, slowdown.lasting).items():
        found[rank] = _verdict(slowdown, rank, evidence, host_only)
    for rank, series, evidence in _slow_stages(slowdown, level):
        before = found.get(rank)
        if before is not None and _steps(before.evidence) >= _steps(evidence):
            continue
        own = _verdict(slowdown, rank, evidence, host_only)
        stage = (int(slowdown.stages[series]),)
        word = own.verdict if own.stages == stage else _cause(slowdown, rank, evidence, host_only)
        found[rank] = Verdict(rank, word, stage, evidence)
    if slowdown.device is not None:
        for (rank, _), evidence in proven(
            slowdown.device[:, :, None], level, slowdown.lasting
        ).items():
            word = TRANSIENT if evidence.ended else SLOW_DEVICE
            found.setdefault(rank, Verdict(rank, word, (WHOLE,), evidence))
    for (rank, _), evidence in proven(
        slowdown.unequal[:, :, None], level, slowdown.lasting, 0.0
    ).items():
        word = IMBALANCE if float(nan_median(slowdown.fitted[rank])) <= EFFECT else INCONCLUSIVE
        found.setdefault(rank, Verdict(rank, word, (WHOLE,), evidence))
    for rank, evidence in suspicious(slowdown.effect[:, :, 0], slowdown.lasting).items():
        found.setdefault(rank, Verdict(rank, INCONCLUSIVE, (WHOLE,), evidence))
    return [found[rank] for rank in sorted(found)]


def _steps(evidence: Evidence) -> int:
    return evidence.last - evidence.first + 1


def _verdict(slowdown: RankSlowdown, rank: int, evidence: Evidence, host_only: bool) -> Verdict:
    cause = _cause(slowdown, rank, evidence, host_only)
    word, stages = _slow_in(slowdown, rank, evidence)
    blamed = word if word and cause not in (TRANSIENT, SLOW_UNCOUNTED) else cause
    return Verdict(rank, blamed, stages, evidence)


def _slow_stages(slowdown: RankSlowdown, level: float) -> list[tuple[int, int, Evidence]]:
    """Return ranks, series and evidence of slow stages that matter, the most costly first."""
    sure = proven(slowdown.effect[:, :, 1:], level, slowdown.lasting)
    costs = {
        key: evidence.effect * float(slowdown.share[key[1] + 1]) for key, evidence in sure.items()
    }
    order = sorted((key for key in sure if costs[key] >= _MIN_COST), key=lambda key: -costs[key])
    return [(rank, series + 1, sure[rank, series]) for rank, series in order]


def _slow_in(slowdown: RankSlowdown, rank: int, evidence: Evidence) -> tuple[str, tuple[int, ...]]:
    """Return in which stages a rank is slow, the most costly first; `WHOLE` for all.

    If one stage is slow while all others keep pace, it is extra work or a slow dependency. If half
    of the stages or more are slow, it is the machine.

    Returns:
        `LONGER_IN`, `SLOW_IN`, `SLOW` if there is one stage alone, or an empty text for the
        machine; and the stages.
    """
    part = slice(evidence.first, evidence.last + 1)
    effect = nan_median(slowdown.effect[rank, part], axis=0)
    large = slowdown.seen[1:] & (slowdown.share[1:] >= _MIN_STAGE_SHARE)
    compared = np.flatnonzero(large & ~np.isnan(effect[1:])) + 1
    slow = [series for series in compared.tolist() if effect[series] > EFFECT]
    slow.sort(key=lambda series: -effect[series] * float(slowdown.share[series]))
    names = tuple(int(slowdown.stages[series]) for series in slow)
    if not slow:
        return "", (WHOLE,)
    if len(compared) == 1:
        return SLOW, names
    most = max(EFFECT, float(effect[slow[0]]) / 2)
    others = [series for series in compared.tolist() if series not in slow]
    bounds = [_upper(slowdown.effect[rank, part, series], slowdown.lasting) for series in others]
    if len(slow) == 1 and all(bound is not None and bound < most for bound in bounds):
        return LONGER_IN, names
    return (SLOW_IN, names) if 2 * len(slow) < len(compared) else ("", (WHOLE,))


def _upper(values: Float64s, lasting: int) -> float | None:
    """Return what a median stays below with 95%; None if there are too few steps."""
    bounds = median_bounds(joined(values[None], lasting)[0], 0.9)
    if bounds is None and lasting > 1:
        bounds = median_bounds(values, 0.9)
    return None if bounds is None else bounds[1]


def _cause(slowdown: RankSlowdown, rank: int, evidence: Evidence, host_only: bool) -> str:
    """Return whether the device or the host is slow, if the run shows it."""
    if evidence.ended:
        return TRANSIENT
    if not slowdown.counted:
        return SLOW_UNCOUNTED
    if host_only:
        return SLOW_HOST
    if slowdown.device is None:
        return SLOW
    values = slowdown.device[rank, evidence.first : evidence.last + 1]
    bounds = median_bounds(joined(values[None], slowdown.lasting)[0])
    if bounds is None:
        return SLOW
    if bounds[0] > 0 and float(nan_median(values)) > EFFECT:
        return SLOW_DEVICE
    return SLOW_HOST if bounds[1] < max(EFFECT, evidence.effect / 2) else SLOW


def rank_slowdown(spans: Spans, matrix: RankMatrix) -> RankSlowdown:
    """Compare the ranks of a matrix with one another.

    Stages with waiting are excluded. From stages that may include some, the time by which a rank
    was early is subtracted.
    """
    known = ~np.isnan(matrix.own_ns)
    # A stage that no rank ran in a step has no work there; lost spans of one rank are unknown.
    ran = np.broadcast_to(known.any(axis=0), known.shape)
    work = counted_amounts(lambda name: matrix.counter(spans, name), ran, known, matrix.stage)
    explained = _explained(matrix, matrix.own_ns, work)
    one_clock = uncertainty_ns(spans, matrix.ranks.tolist()) == 0
    waits = detect_waits(matrix, explained, work[0] if work else None, one_clock=one_clock)
    own = np.where(waits.bound, np.nan, matrix.own_ns)
    stages = np.concatenate([[WHOLE], np.unique(matrix.stage)])
    member = (matrix.stage[:, None] == stages) | (stages == WHOLE)
    typical = np.nan_to_num(nan_median(explained.reshape(-1, len(member))))
    usual = typical * ~waits.bound
    share = usual @ member
    alike = np.where(_comparable(work), own, np.nan)
    evenly = np.broadcast_to(np.where(usual > 0, usual, np.nan), own.shape)
    effect = _relative_slowdown(alike, waits.early_ns, explained, member)
    return RankSlowdown(
        stages,
        effect,
        _relative_slowdown(alike, waits.early_ns, explained, member[:, :1], waited=True)[:, :, 0],
        _relative_slowdown(own, waits.early_ns, explained, member[:, :1])[:, :, 0],
        _relative_slowdown(own, waits.early_ns, evenly, member[:, :1])[:, :, 0],
        _device_slowdown(
            spans, matrix, work, np.where(np.isnan(alike), np.nan, waits.early_ns), member
        ),
        *_own_ns(matrix, waits.bound),
        share / max(float(share[0]), 1.0),
        1 - float(share[0]) / max(float(typical.sum()), 1.0),
        waits.seen @ member,
        waits.has_sync,
        bool(work),
        lasting(effect[:, :, 0]),
    )


def _own_ns(matrix: RankMatrix, bound: Mask) -> tuple[Float64s, Float64s]:
    """Return each rank's time in stages without waiting, and the part that can be compared."""
    compared: Float64s = np.nan_to_num(matrix.own_ns)[:, :, ~bound].sum(axis=2)
    found = compared.copy()
    rank, step, stage, ns = matrix.uncompared
    free = ~np.isin(stage, matrix.stage[bound])
    np.add.at(found, (rank[free], step[free]), ns[free])
    known = np.sum(~np.isnan(matrix.own_ns), axis=2)
    known[rank, step] += 1
    found[known == 0] = np.nan
    return found, compared


def _explained(matrix: RankMatrix, ns: Float64s, work: Sequence[Float64s]) -> Float64s:
    found = np.full(ns.shape, np.nan)
    for stage in np.unique(matrix.stage).tolist():
        slots = matrix.stage == stage
        found[:, :, slots] = expected(ns[:, :, slots], [each[:, :, slots] for each in work])
    return found


def _comparable(work: Sequence[Float64s]) -> Mask:
    """Mark where a rank's work is in the range of other ranks; outside, ranks can't be compared."""
    inside: Mask = np.ones((1, 1, 1), dtype=bool)
    for each in work:
        ordered = np.sort(each, axis=1)
        count = np.maximum(np.sum(~np.isnan(each), axis=1, keepdims=True), 1)
        low = np.take_along_axis(ordered, ((count - 1) * _EDGE).astype(np.int64), 1)
        high = np.take_along_axis(ordered, np.ceil((count - 1) * (1 - _EDGE)).astype(np.int64), 1)
        inside = inside & (each >= -_highest_other(-low)) & (each <= _highest_other(high))
    return inside


def _highest_other(values: Float64s) -> Float64s:
    """Return for each rank the highest value of another one."""
    values = np.where(np.isnan(values), -np.inf, values)
    first = values.max(axis=0, keepdims=True)
    top = np.argmax(values, axis=0, keepdims=True)
    rest = values.copy()
    np.put_along_axis(rest, top, -np.inf, 0)
    own = np.arange(len(values)).reshape(-1, 1, 1) == top
    found: Float64s = np.where(own, rest.max(axis=0, keepdims=True), first)
    return found


def _relative_slowdown(
    ns: Float64s, early: Float64s, explained: Float64s, member: Mask, *, waited: bool = False
) -> Float64s:
    """Return the relative excess over the others' median, per series; NaN is left out.

    The time by which a rank was early is subtracted from its own time, and not from the others'.
    With ``waited`` it is the other way round. A stage that isn't run in every step is only expected
    in the others.
    """
    valid = ~np.isnan(ns) & ~np.isnan(explained) & ~np.isnan(early)
    weight = np.nan_to_num(nan_median(np.where(valid, explained, np.nan).reshape(-1, len(member))))
    covered, there = (valid * weight) @ member, np.where(valid, explained, 0.0) @ member
    usual = (valid.any(axis=0) * weight) @ member
    there = np.where((covered > 0) & (covered >= _MIN_SHARE_COVERED * usual), there, np.nan)
    took = (np.where(valid, ns, 0.0) @ member) / there
    charged = (np.where(valid, np.maximum(ns - early, 0.0), 0.0) @ member) / there
    own, others = (took, charged) if waited else (charged, took)
    usually = leave_one_out_median(others, len(took) // 2)
    found: Float64s = own / np.where(usually > 0, usually, np.nan) - 1.0
    return found


def _device_slowdown(
    spans: Spans, matrix: RankMatrix, work: Sequence[Float64s], early: Float64s, member: Mask
) -> Float64s | None:
    took = matrix.counter(spans, "device_ns")
    if took is None:
        return None
    found: Float64s = _relative_slowdown(took, early, _explained(matrix, took, work), member)[
        :, :, 0
    ]
    return found
