"""Attribution of a slowdown to one rank of a model replica, by arrival order at collectives.

A slow rank makes its whole replica slow. A collective ends for all when the last rank has arrived,
so the last arrival has the shortest duration: no clocks of ranks are compared.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.rank_tests import at_least, holm
from lightning_rlprof.analysis.statistics.robust import nan_median
from lightning_rlprof.analysis.stragglers.rank_matrix import RankMatrix, Replicas
from lightning_rlprof.analysis.stragglers.rank_slowdown import RankSlowdown
from lightning_rlprof.analysis.stragglers.verdicts import (
    IMBALANCE,
    INCONCLUSIVE,
    LEVEL,
    SLOW_REPLICA,
    SLOW_UNCOUNTED,
    Verdict,
)
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask, group_sizes, group_starts
from lightning_rlprof.tables.occurrences import number_occurrences
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

# Tables with collectives, and their column with the operation.
_TABLES = {"collectives": "operation", "communication": "operator"}
_NEEDED = ("rank", "group", "start", "duration")
_PAIRWISE = re.compile("send|recv|receive")  # in a pipeline the next stage is always later


class Arrivals(NamedTuple):
    """Last arrivals by rank; arrays over ranks.

    Attributes:
        ranks: Ascending.
        last: Number of collectives that it was the last to enter.
        trials: Number of collectives that it took part in.
        chance: p-value: probability of as many or more if every rank is last equally often.
        cost_ns: Time that the others waited in these collectives, summed over them.
        later_ns: How much later than the others' mean it arrived, summed; below 0 if earlier.
    """

    ranks: Int64s
    last: Int64s
    trials: Int64s
    chance: Float64s
    cost_ns: Int64s
    later_ns: Float64s

    def share(self, rank: int) -> float | None:
        """Return the share of a rank's collectives with it as last arrival; None without any."""
        if rank not in self.ranks:
            return None
        at = int(np.searchsorted(self.ranks, rank))
        return int(self.last[at]) / int(self.trials[at])


class ListedCollectives(NamedTuple):
    """The collectives that a table lists, as columns: of whole groups of the given ranks.

    Attributes:
        one: Collective of each row.
        group: Process group, or groups that are evaluated together.
        step: RL step.
        rank: Rank of the row.
        took: Duration on the rank, in nanoseconds.
    """

    one: Int64s
    group: Int64s
    step: Int64s
    rank: Int64s
    took: Int64s

    def only(self, keep: Mask) -> "ListedCollectives":
        """Return some rows."""
        return ListedCollectives(*(column[keep] for column in self))


def count_last_arrivals(group: Int64s, rank: Int64s, duration_ns: Int64s) -> Arrivals:
    """Count for each rank how often it had the shortest duration of a collective.

    The p-value is exact: binomial, with one over the size of the smallest group. If several ranks
    were shortest, none was last.

    Args:
        group: Collective of each row.
        rank: Its rank.
        duration_ns: Its duration.

    Example::

        >>> found = count_last_arrivals(*np.array([[0, 0, 1, 1], [0, 1, 0, 1], [9, 2, 8, 2]]))
        >>> found.last.tolist(), found.chance.tolist(), found.cost_ns.tolist()
        ([0, 2], [1.0, 0.25], [0, 13])
    """
    order = np.lexsort((duration_ns, group))
    group, rank, duration_ns = group[order], rank[order], duration_ns[order]
    heads = group_starts(group)
    size = group_sizes(heads, len(group))
    several = np.repeat(size > 1, size)
    ranks, place = np.unique(rank[several], return_inverse=True)
    alone = (size > 1) & (duration_ns[heads] < np.append(duration_ns, 0)[heads + 1])
    winner = np.searchsorted(ranks, rank[heads[alone]])
    last, cost = np.bincount(winner, minlength=len(ranks)), np.zeros_like(ranks)
    waited = np.add.reduceat(duration_ns, heads) if len(heads) else duration_ns
    np.add.at(cost, winner, (waited - size * duration_ns[heads])[alone])
    members, whole = (np.repeat(each, size)[several] for each in (size, waited))
    later = _later(place, members, whole, duration_ns[several])
    return Arrivals(ranks, last, *_chances(place, members, last), cost, later)


def _later(place: Int64s, members: Int64s, whole: Int64s, took: Int64s) -> Float64s:
    """Return by how much the others stayed longer on average than each rank, summed."""
    off: Float64s = np.zeros(int(place.max(initial=-1)) + 1)
    np.add.at(off, place, (whole - took) / (members - 1) - took)
    return off


def _chances(place: Int64s, size: Int64s, last: Int64s) -> tuple[Int64s, Float64s]:
    """Return the number of each rank's collectives, and the p-value of its last arrivals."""
    trials = np.bincount(place, minlength=len(last))
    least = np.full(len(last), np.iinfo(np.int64).max)
    np.minimum.at(least, place, size)
    each = zip(trials.tolist(), last.tolist(), least.tolist(), strict=True)
    chance = [at_least(number, 1 / few)[times] for number, times, few in each]
    return trials, np.array(chance, dtype=np.float64)


def listed_collectives(spans: Spans, who: Replicas) -> ListedCollectives | None:
    """Read the table ``collectives`` or ``communication``; None if it lists no groups.

    Excludes groups with other ranks than the given ones, and sends and receives.
    """
    name = next((name for name in _TABLES if name in spans.tables), "")
    table = spans.try_table(name, [])
    if table is None or not _lists_groups(table, _TABLES[name]):
        return None
    rank, start, took = (table.numbers(each, -1) for each in ("rank", "start", "duration"))
    group, (operator, names) = table.texts("group")[0], table.texts(_TABLES[name])
    step = table.numbers("step", 0) if _has(table, "step") else np.zeros_like(rank)
    between = np.array([bool(_PAIRWISE.search(each.lower())) for each in names] + [False])
    known = (start >= 0) & (took >= 0) & (group >= 0) & ~between[operator]
    columns = [each[known] for each in (group, step, operator, rank, start, took)]
    group, step, operator, rank, start, took = columns
    one, whole = _matched(group, step, operator, rank, start)
    if _has(table, "group size"):  # if different groups have one name, none of them is whole
        told = table.numbers("group size", -1)[known]
        whole &= (told < 0) | (told == np.bincount(one)[one])
    keep = whole & ~np.isin(one, np.unique(one[~np.isin(rank, who.ranks)]))
    return ListedCollectives(one, group, step, rank, took).only(keep) if keep.any() else None


def between_replicas(found: ListedCollectives, who: Replicas) -> ListedCollectives:
    """Return the collectives between replicas; ``rank`` is a replica, by its last rank.

    Excludes groups of parts with different work, where a late rank is not at fault. Ranks of a
    replica are late together, so if it has several, all groups are evaluated as one.
    """
    at = np.searchsorted(who.ranks, found.rank)
    replica, alike = who.replica[at], _one_of(found.one, who.work[at])
    found, replica = found.only(alike), replica[alike]
    order = np.lexsort((found.took, replica, found.one))
    heads = group_starts(found.one[order], replica[order])
    size, lasts = group_sizes(heads, len(order)), order[heads]
    own = ListedCollectives(*(column[lasts] for column in found))._replace(rank=replica[lasts])
    own = own.only(_one_of(own.one, size) & ~_one_of(own.one, own.rank))
    return own._replace(group=np.zeros_like(own.group)) if who.place.any() else own


def within_replicas(found: ListedCollectives, who: Replicas) -> ListedCollectives:
    """Return the collectives of ranks that share the work of one part of one replica."""
    at = np.searchsorted(who.ranks, found.rank)
    return found.only(_one_of(found.one, who.work[at]) & _one_of(found.one, who.replica[at]))


def groups_overlap(found: ListedCollectives) -> bool:
    """Return whether the first rank is in two groups, neither of which contains the other."""
    first = found.rank.min(initial=0)
    groups = np.unique(found.group[found.rank == first]).tolist()
    members = [set(found.rank[found.group == group].tolist()) for group in groups]
    return any(not (one <= other or other <= one) for one, other in combinations(members, 2))


def last_arrivals(found: ListedCollectives, every: int = 1) -> Arrivals | None:
    """Count last arrivals, once per group and step; None without collectives.

    Within a step one late arrival is followed by others. So only the collective with the largest
    spread of durations counts; lateness is summed over all.

    Args:
        found: Collectives.
        every: Use every n-th step, because steps are autocorrelated.
    """
    found = found.only(found.step % every == 0)
    lap = found.group * (found.step.max(initial=0) + 2) + found.step
    chosen = found.only(_furthest_apart(found.one, lap, found.took))
    told = count_last_arrivals(chosen.one, chosen.rank, chosen.took)
    if not len(told.ranks):
        return None
    whole = count_last_arrivals(found.one, found.rank, found.took)
    return told._replace(later_ns=whole.later_ns[np.searchsorted(whole.ranks, told.ranks)])


def _one_of(one: Int64s, values: Int64s) -> Mask:
    """Mark the rows whose collective has the same value in all rows."""
    places, place = np.unique(one, return_inverse=True)
    low, high = np.full(len(places), np.iinfo(np.int64).max), np.full(len(places), -1)
    np.minimum.at(low, place, values)
    np.maximum.at(high, place, values)
    found: Mask = (low == high)[place]
    return found


def _matched(
    group: Int64s, step: Int64s, operator: Int64s, rank: Int64s, start: Int64s
) -> tuple[Int64s, Mask]:
    """Number the collectives: the n-th of a name in a group and step is one for all its ranks.

    Also mark which are whole: they include all ranks that the group has anywhere.
    """
    order = np.argsort(start, kind="stable")
    nth = np.empty(len(order), dtype=np.int64)
    nth[order] = number_occurrences(*(each[order] for each in (group, step, operator, rank)))[0]
    one = np.unique(np.stack([group, step, operator, nth]), axis=1, return_inverse=True)[1].ravel()
    members = np.unique(np.stack([group, rank]), axis=1)[0]
    size = np.bincount(members, minlength=int(group.max(initial=0)) + 1)
    return one, np.bincount(one)[one] == size[group]


def _furthest_apart(one: Int64s, lap: Int64s, took: Int64s) -> Mask:
    """Mark per group and step the collective whose durations differ most."""
    numbers, place = np.unique(one, return_inverse=True)
    high, low = np.zeros(len(numbers), np.int64), np.full(len(numbers), np.iinfo(np.int64).max)
    np.maximum.at(high, place, took)
    np.minimum.at(low, place, took)
    of = np.zeros(len(numbers), dtype=np.int64)
    of[place] = lap
    order = np.lexsort((high - low, of))
    widest = order[np.flatnonzero(np.diff(of[order], append=-1))]
    chosen = np.zeros(len(numbers), dtype=bool)
    chosen[widest] = True
    found: Mask = chosen[place]
    return found


def _has(table: Table, name: str) -> bool:
    return any(column.name == name for column in table.columns)


def _lists_groups(table: Table, operator: str) -> bool:
    return len(table.rows) > 0 and all(_has(table, name) for name in (*_NEEDED, operator))


_MOSTLY = 0.5  # of the steps that a straggler must be last in
_EITHER = 0.05  # level if it is known that one of the ranks is slow
_MATTERS = 0.01  # of a step: a smaller lateness is not reported
_AS_SLOW = 0.5  # of the largest slowdown: a rank that slow may be the cause, too


Proof = tuple[int, float]
Causes = dict[int, Proof]
Steps = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ComparedRanks:
    """Ranks of one parallel position in their replicas, and the verdicts from comparing them."""

    matrix: RankMatrix
    slowdown: RankSlowdown
    verdicts: Sequence[Verdict]

    def effect(self, rank: int, first: int, last: int) -> float | None:
        """Return the slowdown of a rank in some steps; None if unknown."""
        if rank not in self.matrix.ranks:
            return None
        row = int(np.searchsorted(self.matrix.ranks, rank))
        found = float(nan_median(self.slowdown.effect[row, first : last + 1, 0]))
        return None if np.isnan(found) else found


@dataclass(frozen=True, eq=False)
class Attribution:
    """A verdict on a rank, or on one of several ranks, unknown which.

    Attributes:
        ranks: The ranks.
        word: One of the words of `verdicts`.
        line: The comparison that it comes from; None if it comes from arrival order alone.
        verdict: Verdict of that comparison on one of the ranks, or on one that waited for them.
        cost_ns: Time that the others waited, if from arrival order alone.
        chance: p-value of the arrival order.
    """

    ranks: tuple[int, ...]
    word: str
    line: ComparedRanks | None = None
    verdict: Verdict | None = None
    cost_ns: int = 0
    chance: float = 1.0

    def columns(self) -> tuple[int, int]:
        """Return the first and last column of the matrix that the verdict covers."""
        evidence = self.verdict.evidence if self.verdict else None
        return (evidence.first, evidence.last) if evidence else (0, -1)


@dataclass(frozen=True, eq=False)
class ArrivalEvidence:
    """Last arrivals in the collectives of a role.

    Attributes:
        who: Replicas of its ranks.
        every: Every n-th step was used.
        step_ns: Duration of a step.
        several: Whether ranks are in process groups, neither of which contains the other.
        within: Collectives of ranks that share a part of a replica; None if none are listed.
        late: Last arrivals by replica, if several met.
        inside: Last arrivals by rank, within replicas.
    """

    who: Replicas
    every: int
    step_ns: float
    several: bool = False
    within: ListedCollectives | None = None
    late: Arrivals | None = None
    inside: Arrivals | None = None

    def share(self, rank: int) -> float | None:
        """Return how often a rank was last within its replica, or else its replica was."""
        if self.inside is not None and rank in self.inside.ranks:
            return self.inside.share(rank)
        row = int(np.searchsorted(self.who.ranks, rank))
        return self.late.share(int(self.who.replica[row])) if self.late is not None else None

    def replicas(self, needed: int) -> dict[int, Proof]:
        """Return the replicas that the others waited for, and the cost and p-value."""
        most = max(
            map(len, self.who.members().values())
        )  # number of groups of a replica that are late
        return _proven_last(self.late, needed, LEVEL, _MATTERS * self.step_ns * most)

    def cause(self, ranks: Sequence[int], steps: Steps, needed: int, least_ns: float) -> Causes:
        """Return the ranks that the others of one replica waited for, group by group.

        A rank that is late in one group because it waited in another one is not the cause.

        Args:
            ranks: Of one replica.
            steps: First and last RL step to use.
            needed: Number of steps below which nothing is significant.
            least_ns: Required lateness of the cause per step.
        """
        if self.within is None:
            return {}
        here = np.isin(self.within.rank, ranks)
        here &= (self.within.step >= steps[0]) & (self.within.step <= steps[1])
        found = self.within.only(here)
        proofs: Causes = {}
        excused: set[int] = set()
        for group in np.unique(found.group).tolist():
            met = last_arrivals(found.only(found.group == group), self.every)
            sure = _proven_last(met, needed, _EITHER if needed == 1 else LEVEL, least_ns)
            proofs = {**sure, **proofs}
            excused |= set(met.ranks.tolist()) - set(sure) if met is not None and sure else set()
        return {rank: proof for rank, proof in proofs.items() if rank not in excused}


def arrival_evidence(
    who: Replicas, found: ListedCollectives | None, every: int, step_ns: float
) -> ArrivalEvidence:
    """Count last arrivals in every n-th step."""
    if found is None:
        return ArrivalEvidence(who, every, step_ns)
    within = within_replicas(found, who)
    late = last_arrivals(between_replicas(found, who), every)
    return ArrivalEvidence(
        who, every, step_ns, groups_overlap(found), within, late, last_arrivals(within, every)
    )


def attribute(
    lines: Sequence[ComparedRanks], arrivals: ArrivalEvidence, needed: int
) -> Iterator[Attribution]:
    """Yield the verdicts on ranks or groups of ranks.

    A slow rank makes its whole replica slow. If several ranks of a replica look slow, the one that
    the others wait for is named; if that is unknown, all of them are named together.

    Args:
        lines: Comparable parallel positions.
        arrivals: Last arrivals.
        needed: Number of steps below which arrivals alone are not significant.
    """
    members = arrivals.who.members()
    late = arrivals.replicas(needed)
    for replica, ranks in members.items():
        told = [each for line in lines for each in _by_verdict(line, ranks)]
        slow = [each for each in told if each.word not in (INCONCLUSIVE, IMBALANCE)]
        uneven = [each for each in told if each.word == IMBALANCE]
        if slow:
            yield from (slow if len(ranks) == 1 else [_narrow_down(slow, ranks, lines, arrivals)])
            yield from uneven if len(ranks) > 1 else ()
            continue
        found = (
            () if uneven else _by_arrivals(ranks, arrivals, late.get(replica), needed, len(members))
        )
        yield from found or told


def _by_verdict(line: ComparedRanks, ranks: Sequence[int]) -> Iterator[Attribution]:
    for verdict in line.verdicts:
        rank = int(line.matrix.ranks[verdict.rank])
        if rank in ranks:
            yield Attribution((rank,), verdict.verdict, line, verdict)


def _narrow_down(
    slow: Sequence[Attribution],
    ranks: Sequence[int],
    lines: Sequence[ComparedRanks],
    arrivals: ArrivalEvidence,
) -> Attribution:
    """Return the attribution to the one rank of a slow replica, or to all that may be it."""
    worst = max(slow, key=_effect)
    first, last = worst.columns()
    # As a whole: a verdict may be about one stage, in which a rank is slower than in the rest.
    whole = worst.line.effect(worst.ranks[0], first, last) if worst.line else None
    least = _AS_SLOW * (_effect(worst) if whole is None else max(whole, 0.0))
    steps = (
        lines[0].matrix.steps[[first, last]].tolist()
    )  # all comparisons have the steps of the run
    waited = arrivals.cause(ranks, (steps[0], steps[1]), 1, least * _own_ns(worst))
    as_slow = tuple(rank for rank in ranks if _as_slow(rank, lines, first, last, least))
    found = tuple(waited) or as_slow or tuple(ranks)
    if len(found) > 1:
        return Attribution(tuple(sorted(found)), SLOW_REPLICA, worst.line, worst.verdict)
    own = next((each for each in slow if each.ranks == found), worst)
    return Attribution(found, own.word, own.line, own.verdict)


def _own_ns(attribution: Attribution) -> float:
    """Return the time of work in a step."""
    own = attribution.line.slowdown.own_ns if attribution.line else np.zeros((1, 1))
    return float(np.nan_to_num(nan_median(own.ravel())))


def _effect(attribution: Attribution) -> float:
    return attribution.verdict.evidence.effect if attribution.verdict else 0.0


def _as_slow(
    rank: int, lines: Sequence[ComparedRanks], first: int, last: int, least: float
) -> bool:
    """Return whether a rank may be as slow; also if its slowdown is unknown."""
    known = [line.effect(rank, first, last) for line in lines]
    effects = [effect for effect in known if effect is not None]
    return not effects or max(effects) >= least


def _by_arrivals(
    ranks: Sequence[int], arrivals: ArrivalEvidence, late: Proof | None, needed: int, replicas: int
) -> tuple[Attribution, ...]:
    """Return the attribution by arrival order: significantly late, for an unknown reason."""
    if late is None and replicas > 1:
        return ()
    everything = (0, np.iinfo(np.int64).max)
    cause = arrivals.cause(ranks, everything, needed, _MATTERS * arrivals.step_ns)
    if late is None and not cause:
        return ()
    cost_ns, chance = late or next(iter(cause.values()))
    cost_ns *= len(ranks) if late else 1  # only the last rank of each other replica was counted
    found = tuple(sorted(cause)) or tuple(ranks)
    word = SLOW_UNCOUNTED if len(found) == 1 else SLOW_REPLICA
    return (Attribution(found, word, cost_ns=cost_ns, chance=chance),)


def _proven_last(
    last: Arrivals | None, needed: int, level: float, least_ns: float
) -> dict[int, Proof]:
    """Return the ranks that were last significantly often, mostly, and late enough on average."""
    if last is None:
        return {}
    chance = holm(last.chance)
    sure = (last.trials >= needed) & (chance <= level) & (last.last > _MOSTLY * last.trials)
    sure &= last.later_ns > least_ns * last.trials
    return {
        int(last.ranks[at]): (int(last.cost_ns[at]), float(chance[at]))
        for at in np.flatnonzero(sure).tolist()
    }
