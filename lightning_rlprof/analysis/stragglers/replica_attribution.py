"""Attribution of a slowdown to one rank of a model replica, by arrival order at collectives.

A slow rank makes its whole replica slow. A collective ends for all when the last rank has arrived,
so the last arrival has the shortest duration: no clocks of ranks are compared.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.rank_tests import at_least, holm
from lightning_rlprof.analysis.statistics.robust import nan_median
from lightning_rlprof.analysis.steps.rank_matrix import RankMatrix, Replicas
from lightning_rlprof.analysis.stragglers.verdicts import (
    IMBALANCE,
    INCONCLUSIVE,
    LEVEL,
    SLOW_REPLICA,
    SLOW_UNCOUNTED,
    RankSlowdown,
    Verdict,
)
from lightning_rlprof.tables.arrays import (
    Float64s,
    Int64s,
    Mask,
    group_sizes,
    group_starts,
    number_occurrences,
)
from lightning_rlprof.tables.spans import Spans

# These tables contain collectives; the value is the column with the operation.
_TABLES = {"collectives": "operation", "communication": "operator"}
_PAIRWISE = re.compile("send|recv|receive")  # In a pipeline the next stage is always later.
_MIN_SHARE_LAST = 0.5  # A straggler is the last to arrive in at least this share of the steps.
_EITHER_LEVEL = 0.05  # One of the ranks is known to be slow, so the level may be higher.
_MIN_LATENESS_SHARE = 0.01  # A rank that is late by less of a step is not reported.
_MIN_SLOWDOWN_SHARE = 0.5  # A rank with this part of the largest slowdown may be the cause, too.

Proof = tuple[int, float]
Causes = dict[int, Proof]


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
    group, rank, took = group[order], rank[order], duration_ns[order]
    heads = group_starts(group)
    size = group_sizes(heads, len(group))
    several = np.repeat(size > 1, size)
    ranks, place = np.unique(rank[several], return_inverse=True)
    alone = (size > 1) & (took[heads] < np.append(took, 0)[heads + 1])
    winner = np.searchsorted(ranks, rank[heads[alone]])
    last, cost = np.bincount(winner, minlength=len(ranks)), np.zeros_like(ranks)
    later: Float64s = np.zeros(len(ranks))
    whole = np.add.reduceat(took, heads) if len(heads) else took
    np.add.at(cost, winner, (whole - size * took[heads])[alone])
    members, whole = (np.repeat(each, size)[several] for each in (size, whole))
    np.add.at(later, place, (whole - took[several]) / (members - 1) - took[several])
    trials = np.bincount(place, minlength=len(ranks))
    smallest = np.full(len(ranks), np.iinfo(np.int64).max)
    np.minimum.at(smallest, place, members)
    each = zip(trials.tolist(), last.tolist(), smallest.tolist(), strict=True)
    chance = [at_least(number, 1 / few)[times] for number, times, few in each]
    return Arrivals(ranks, last, trials, np.array(chance, dtype=np.float64), cost, later)


def listed_collectives(spans: Spans, who: Replicas) -> ListedCollectives:
    """Read the table ``collectives`` or ``communication``; nothing if it lists no groups.

    Excludes groups with other ranks than the given ones, and sends and receives.
    """
    name = next((name for name in _TABLES if name in spans.tables), "")
    table = spans.try_table(name, [])
    columns = {column.name for column in table.columns} if table is not None else set()
    needed = {"rank", "group", "start", "duration", _TABLES.get(name, "")}
    if table is None or not needed <= columns:
        return ListedCollectives(*np.empty((5, 0), dtype=np.int64))
    rank, start, took = (table.numbers(each, -1) for each in ("rank", "start", "duration"))
    group, (operator, names) = table.texts("group")[0], table.texts(_TABLES[name])
    step = table.numbers("step", 0) if "step" in columns else np.zeros_like(rank)
    between = np.array([bool(_PAIRWISE.search(each.lower())) for each in names] + [False])
    known = (start >= 0) & (took >= 0) & (group >= 0) & ~between[operator]
    group, step, operator, rank, start, took = (
        each[known] for each in (group, step, operator, rank, start, took)
    )
    one, whole = _matched(group, step, operator, rank, start)
    if "group size" in columns:  # If different groups have one name, none of them is whole.
        told = table.numbers("group size", -1)[known]
        whole &= (told < 0) | (told == np.bincount(one)[one])
    keep = whole & ~np.isin(one, np.unique(one[~np.isin(rank, who.ranks)]))
    return ListedCollectives(one, group, step, rank, took).only(keep)


def between_replicas(found: ListedCollectives, who: Replicas) -> ListedCollectives:
    """Return the collectives between replicas; ``rank`` is a replica, by its last rank.

    Excludes groups of parts with different work, where a late rank is not at fault. Ranks of a
    replica are late together, so if it has several, all groups are evaluated as one.
    """
    at = np.searchsorted(who.ranks, found.rank)
    replica, alike = who.replica[at], _spread(found.one, who.work[at]) == 0
    found, replica = found.only(alike), replica[alike]
    order = np.lexsort((found.took, replica, found.one))
    heads = group_starts(found.one[order], replica[order])
    size, lasts = group_sizes(heads, len(order)), order[heads]
    own = ListedCollectives(*(column[lasts] for column in found))._replace(rank=replica[lasts])
    own = own.only((_spread(own.one, size) == 0) & (_spread(own.one, own.rank) > 0))
    return own._replace(group=np.zeros_like(own.group)) if who.place.any() else own


def within_replicas(found: ListedCollectives, who: Replicas) -> ListedCollectives:
    """Return the collectives of ranks that share the work of one part of one replica."""
    at = np.searchsorted(who.ranks, found.rank)
    alike = _spread(found.one, who.work[at]) == 0
    return found.only(alike & (_spread(found.one, who.replica[at]) == 0))


def groups_overlap(found: ListedCollectives) -> bool:
    """Return whether the first rank is in two groups, neither of which contains the other."""
    first = found.rank.min(initial=0)
    groups = np.unique(found.group[found.rank == first]).tolist()
    members = [set(found.rank[found.group == group].tolist()) for group in groups]
    return any(not (one <= other or other <= one) for one, other in combinations(members, 2))


def last_arrivals(found: ListedCollectives, every: int = 1) -> Arrivals:
    """Count last arrivals, once per group and step.

    Within a step one late arrival is followed by others. So only the collective with the largest
    spread of durations counts; lateness is summed over all.

    Args:
        found: Collectives.
        every: Use every n-th step, because steps are autocorrelated.
    """
    found = found.only(found.step % every == 0)
    visit = found.group * (found.step.max(initial=0) + 2) + found.step
    order = np.lexsort((found.one, _spread(found.one, found.took), visit))
    widest = order[np.flatnonzero(np.diff(visit[order], append=-1))]
    chosen = found.only(np.isin(found.one, found.one[widest]))
    told = count_last_arrivals(chosen.one, chosen.rank, chosen.took)
    whole = count_last_arrivals(found.one, found.rank, found.took)
    return told._replace(later_ns=whole.later_ns[np.searchsorted(whole.ranks, told.ranks)])


def _spread(one: Int64s, values: Int64s) -> Int64s:
    """Return for each row the largest minus the smallest value in its collective."""
    numbers, place = np.unique(one, return_inverse=True)
    low, high = np.full(len(numbers), np.iinfo(np.int64).max), np.full(len(numbers), -1)
    np.minimum.at(low, place, values)
    np.maximum.at(high, place, values)
    spread: Int64s = (high - low)[place]
    return spread


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


Compared = tuple[ComparedRanks, Verdict]


@dataclass(frozen=True, eq=False)
class Attribution:
    """A verdict on a rank, or on one of several ranks, unknown which.

    Attributes:
        ranks: The ranks.
        word: One of the words of `verdicts`.
        compared: The comparison that it comes from, and its verdict on one of the ranks, or on one
            that waited for them; None if it comes from arrival order alone.
        cost_ns: Time that the others waited, if from arrival order alone.
        chance: p-value of the arrival order.
    """

    ranks: tuple[int, ...]
    word: str
    compared: Compared | None = None
    cost_ns: int = 0
    chance: float = 1.0


@dataclass(frozen=True, eq=False)
class ArrivalEvidence:
    """Last arrivals in the collectives of a role.

    Attributes:
        who: Replicas of its ranks.
        every: Every n-th step was used.
        step_ns: Duration of a step.
        several: Whether ranks are in process groups, neither of which contains the other.
        within: Collectives of ranks that share a part of a replica.
        late: Last arrivals by replica, if several met.
        inside: Last arrivals by rank, within replicas.
    """

    who: Replicas
    every: int
    step_ns: float
    several: bool
    within: ListedCollectives
    late: Arrivals
    inside: Arrivals

    def share(self, rank: int) -> float | None:
        """Return how often a rank was last within its replica, or else its replica was."""
        row = int(np.searchsorted(self.who.ranks, rank))
        share = self.inside.share(rank)
        return self.late.share(int(self.who.replica[row])) if share is None else share

    def replicas(self, needed: int) -> Causes:
        """Return the replicas that the others waited for, and the cost and p-value."""
        # A late replica is late in as many groups as it has ranks.
        most = max(map(len, self.who.members().values()))
        return _proven_last(self.late, needed, LEVEL, _MIN_LATENESS_SHARE * self.step_ns * most)

    def cause(
        self, ranks: Sequence[int], steps: Sequence[int], needed: int, least_ns: float
    ) -> Causes:
        """Return the ranks that the others of one replica waited for, group by group.

        A rank that is late in one group because it waited in another one is not the cause.

        Args:
            ranks: Of one replica.
            steps: First and last RL step to use.
            needed: Number of steps below which nothing is significant.
            least_ns: Required lateness of the cause per step.
        """
        here = np.isin(self.within.rank, ranks)
        here &= (self.within.step >= steps[0]) & (self.within.step <= steps[1])
        found = self.within.only(here)
        proofs: Causes = {}
        excused: set[int] = set()
        for group in np.unique(found.group).tolist():
            met = last_arrivals(found.only(found.group == group), self.every)
            sure = _proven_last(met, needed, _EITHER_LEVEL if needed == 1 else LEVEL, least_ns)
            proofs = {**sure, **proofs}
            excused |= set(met.ranks.tolist()) - set(sure) if sure else set()
        return {rank: proof for rank, proof in proofs.items() if rank not in excused}


def arrival_evidence(
    who: Replicas, found: ListedCollectives, every: int, step_ns: float
) -> ArrivalEvidence:
    """Count last arrivals in every n-th step."""
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
        told: dict[int, Compared] = {}
        for line in lines:
            numbers = line.matrix.ranks
            own = {int(numbers[verdict.rank]): (line, verdict) for verdict in line.verdicts}
            told |= {rank: compared for rank, compared in own.items() if rank in ranks}
        alone = [Attribution((rank,), each[1].verdict, each) for rank, each in told.items()]
        uneven = [each for each in alone if each.word == IMBALANCE]
        harmless = (INCONCLUSIVE, IMBALANCE)
        slow = {rank: each for rank, each in told.items() if each[1].verdict not in harmless}
        if slow and len(ranks) > 1:
            yield _narrow_down(slow, ranks, lines, arrivals)
            yield from uneven
        elif slow or uneven:
            yield from alone
        else:
            found = _by_arrivals(ranks, arrivals, late.get(replica), needed, len(members))
            yield from alone if found is None else [found]


def _narrow_down(
    slow: Mapping[int, Compared],
    ranks: Sequence[int],
    lines: Sequence[ComparedRanks],
    arrivals: ArrivalEvidence,
) -> Attribution:
    """Return the attribution to the one rank of a slow replica, or to all that may be it."""
    worst = max(slow, key=lambda rank: slow[rank][1].evidence.effect)
    line, evidence = slow[worst][0], slow[worst][1].evidence
    first, last = evidence.first, evidence.last
    # The whole counts: a verdict may be about one stage, where the rank is slower than elsewhere.
    whole = line.effect(worst, first, last)
    least = _MIN_SLOWDOWN_SHARE * (evidence.effect if whole is None else max(whole, 0.0))
    own_ns = float(np.nan_to_num(nan_median(line.slowdown.own_ns.ravel())))
    steps = line.matrix.steps[[first, last]].tolist()
    found = list(arrivals.cause(ranks, steps, 1, least * own_ns))
    if not found:
        for rank in ranks:
            effects = [each.effect(rank, first, last) for each in lines]
            if all(effect is None or effect >= least for effect in effects):
                found.append(rank)
    if len(found) != 1:
        return Attribution(tuple(sorted(found or ranks)), SLOW_REPLICA, slow[worst])
    own = slow.get(found[0], slow[worst])
    return Attribution((found[0],), own[1].verdict, own)


def _by_arrivals(
    ranks: Sequence[int], arrivals: ArrivalEvidence, late: Proof | None, needed: int, replicas: int
) -> Attribution | None:
    """Return the attribution by arrival order: significantly late, for an unknown reason."""
    if late is None and replicas > 1:
        return None
    everything = (0, np.iinfo(np.int64).max)
    cause = arrivals.cause(ranks, everything, needed, _MIN_LATENESS_SHARE * arrivals.step_ns)
    if late is None and not cause:
        return None
    cost_ns, chance = late or next(iter(cause.values()))
    cost_ns *= len(ranks) if late else 1  # Only the last rank of each other replica was counted.
    found = tuple(sorted(cause)) or tuple(ranks)
    word = SLOW_UNCOUNTED if len(found) == 1 else SLOW_REPLICA
    return Attribution(found, word, cost_ns=cost_ns, chance=chance)


def _proven_last(last: Arrivals, needed: int, level: float, least_ns: float) -> Causes:
    """Return the ranks that were last significantly often, mostly, and late enough on average."""
    chance = holm(last.chance)
    sure = (last.trials >= needed) & (chance <= level) & (last.last > _MIN_SHARE_LAST * last.trials)
    sure &= last.later_ns > least_ns * last.trials
    return {
        int(last.ranks[at]): (int(last.cost_ns[at]), float(chance[at]))
        for at in np.flatnonzero(sure).tolist()
    }
