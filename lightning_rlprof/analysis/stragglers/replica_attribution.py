"""Who comes last to collectives, told by durations alone: the last one to come stays shortest.

From verdicts on ranks of one place to the one rank of a replica that makes the others late.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.rank_tests import at_least, holm
from lightning_rlprof.analysis.statistics.robust import middle
from lightning_rlprof.analysis.stragglers.rank_matrix import Lineup, Replicas
from lightning_rlprof.analysis.stragglers.rank_slowdown import Pace
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

# What lists collectives, and the column that tells what each of them does.
_TABLES = {"collectives": "operation", "communication": "operator"}
_NEEDED = ("rank", "group", "start", "duration")
_PAIRWISE = re.compile("send|recv|receive")  # in a pipeline the next stage is always later


class Arrivals(NamedTuple):
    """How often each rank came last; arrays over ranks.

    Attributes:
        ranks: Ascending.
        last: Collectives that it came last to.
        trials: Collectives that it took part in.
        chance: How likely so many or more are if every rank is last equally often.
        cost_ns: What the others waited for it where it came last, summed over them.
        later_ns: How much later than the others' mean it came, summed; below 0 if earlier.
    """

    ranks: Int64s
    last: Int64s
    trials: Int64s
    chance: Float64s
    cost_ns: Int64s
    later_ns: Float64s

    def share(self, rank: int) -> float | None:
        """Return how often a rank came last; None where it took part in nothing."""
        if rank not in self.ranks:
            return None
        at = int(np.searchsorted(self.ranks, rank))
        return int(self.last[at]) / int(self.trials[at])


class Listed(NamedTuple):
    """The collectives that a table lists, as columns: of whole groups of the ranks asked for.

    Attributes:
        one: Which collective each row is of.
        group: Which process group, or groups that are asked together.
        step: RL step.
        rank: Whose row it is.
        took: How long the rank was there, in nanoseconds.
    """

    one: Int64s
    group: Int64s
    step: Int64s
    rank: Int64s
    took: Int64s

    def only(self, keep: Mask) -> "Listed":
        """Return some rows."""
        return Listed(*(column[keep] for column in self))


def came_last(group: Int64s, rank: Int64s, duration_ns: Int64s) -> Arrivals:
    """Count for each rank how often it had the shortest duration of its group.

    It ends for all when the last one has come. The chance is exact: binomial, with one over the
    size of the smallest group. Where several were shortest, nobody was last.

    Args:
        group: Which collective each row is of; ``rank`` is whose it is.
        duration_ns: How long it was there.

    Example::

        >>> found = came_last(*np.array([[0, 0, 1, 1], [0, 1, 0, 1], [9, 2, 8, 2]]))
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
    """Return in how many collectives each rank was, and how likely it was last so often in them."""
    trials = np.bincount(place, minlength=len(last))
    least = np.full(len(last), np.iinfo(np.int64).max)
    np.minimum.at(least, place, size)
    each = zip(trials.tolist(), last.tolist(), least.tolist(), strict=True)
    chance = [at_least(number, 1 / few)[times] for number, times, few in each]
    return trials, np.array(chance, dtype=np.float64)


def listed(spans: Spans, who: Replicas) -> Listed | None:
    """Read the table ``collectives`` or ``communication``; None where it tells nothing of a group.

    Groups with other ranks than those asked for are left out, and so are sends and receives.
    """
    name = next((name for name in _TABLES if name in spans.tables), "")
    table = spans.try_table(name, [])
    if table is None or not _told(table, _TABLES[name]):
        return None
    rank, start, took = (table.numbers(each, -1) for each in ("rank", "start", "duration"))
    group, (operator, names) = table.texts("group")[0], table.texts(_TABLES[name])
    step = table.numbers("step", 0) if _has(table, "step") else np.zeros_like(rank)
    between = np.array([bool(_PAIRWISE.search(each.lower())) for each in names] + [False])
    known = (start >= 0) & (took >= 0) & (group >= 0) & ~between[operator]
    columns = [each[known] for each in (group, step, operator, rank, start, took)]
    group, step, operator, rank, start, took = columns
    one, whole = _matched(group, step, operator, rank, start)
    if _has(table, "group size"):  # where different groups have one name, none of them is whole
        told = table.numbers("group size", -1)[known]
        whole &= (told < 0) | (told == np.bincount(one)[one])
    keep = whole & ~np.isin(one, np.unique(one[~np.isin(rank, who.ranks)]))
    return Listed(one, group, step, rank, took).only(keep) if keep.any() else None


def between_replicas(found: Listed, who: Replicas) -> Listed:
    """Return the collectives in which several replicas met; ``rank`` is a replica, by its last one.

    Where parts of the model with different work meet, nobody is late by fault of his own: such
    groups are left out. Ranks of a replica are late together, so where it has several, all groups
    are asked as one.
    """
    at = np.searchsorted(who.ranks, found.rank)
    replica, alike = who.replica[at], _one_of(found.one, who.work[at])
    found, replica = found.only(alike), replica[alike]
    order = np.lexsort((found.took, replica, found.one))
    heads = group_starts(found.one[order], replica[order])
    size, lasts = group_sizes(heads, len(order)), order[heads]
    own = Listed(*(column[lasts] for column in found))._replace(rank=replica[lasts])
    own = own.only(_one_of(own.one, size) & ~_one_of(own.one, own.rank))
    return own._replace(group=np.zeros_like(own.group)) if who.place.any() else own


def within_replicas(found: Listed, who: Replicas) -> Listed:
    """Return the collectives of ranks that share the work of one part of one replica."""
    at = np.searchsorted(who.ranks, found.rank)
    return found.only(_one_of(found.one, who.work[at]) & _one_of(found.one, who.replica[at]))


def cross(found: Listed) -> bool:
    """Tell whether the first rank is in two process groups of which none holds the other."""
    first = found.rank.min(initial=0)
    groups = np.unique(found.group[found.rank == first]).tolist()
    members = [set(found.rank[found.group == group].tolist()) for group in groups]
    return any(not (one <= other or other <= one) for one, other in combinations(members, 2))


def last_of(found: Listed, every: int = 1) -> Arrivals | None:
    """Count who came last, once per group and step; None where nobody met.

    Within a step one late arrival is followed by others, so only the collective in which they came
    furthest apart is asked who was last; how late is summed over all.

    Args:
        found: Collectives.
        every: Ask every so many-th step, where ranks keep their pace for so long.
    """
    found = found.only(found.step % every == 0)
    lap = found.group * (found.step.max(initial=0) + 2) + found.step
    chosen = found.only(_furthest_apart(found.one, lap, found.took))
    told = came_last(chosen.one, chosen.rank, chosen.took)
    if not len(told.ranks):
        return None
    whole = came_last(found.one, found.rank, found.took)
    return told._replace(later_ns=whole.later_ns[np.searchsorted(whole.ranks, told.ranks)])


def _one_of(one: Int64s, values: Int64s) -> Mask:
    """Tell for each row whether all rows of its collective have the same value."""
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

    Also tell which are whole: all ranks that the group has anywhere are in them.
    """
    order = np.argsort(start, kind="stable")
    nth = np.empty(len(order), dtype=np.int64)
    nth[order] = number_occurrences(*(each[order] for each in (group, step, operator, rank)))[0]
    one = np.unique(np.stack([group, step, operator, nth]), axis=1, return_inverse=True)[1].ravel()
    members = np.unique(np.stack([group, rank]), axis=1)[0]
    size = np.bincount(members, minlength=int(group.max(initial=0)) + 1)
    return one, np.bincount(one)[one] == size[group]


def _furthest_apart(one: Int64s, lap: Int64s, took: Int64s) -> Mask:
    """Choose per lap the collective whose durations differ most."""
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


def _told(table: Table, operator: str) -> bool:
    return len(table.rows) > 0 and all(_has(table, name) for name in (*_NEEDED, operator))


_MOSTLY = 0.5  # of the steps: who comes last less often shares that with others
_EITHER = 0.05  # where one of them is slow for sure, and which is asked
_MATTERS = 0.01  # of a step: who comes later by less is not worth a word, however sure
_AS_SLOW = 0.5  # of the slowest one's effect: a rank that slow may be the cause as well


Proof = tuple[int, float]
Causes = dict[int, Proof]
Steps = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Line:
    """Ranks of one place in their replicas, and what is held about each by comparing them."""

    lineup: Lineup
    pace: Pace
    verdicts: Sequence[Verdict]

    def effect(self, rank: int, first: int, last: int) -> float | None:
        """Return how much slower a rank was in some steps; None where it is not known."""
        if rank not in self.lineup.ranks:
            return None
        row = int(np.searchsorted(self.lineup.ranks, rank))
        found = float(middle(self.pace.effect[row, first : last + 1, 0]))
        return None if np.isnan(found) else found


@dataclass(frozen=True, eq=False)
class Charge:
    """What is held against a rank, or against one of several without knowing which.

    Attributes:
        ranks: Who.
        word: What: one of the words of `verdicts`.
        line: Whose comparison says so; None where arrivals alone do.
        verdict: What that comparison says of one of the ranks, or of one that waited for them.
        cost_ns: What the others waited, where arrivals alone say so.
        chance: How likely arrivals are such where nobody is slow.
    """

    ranks: tuple[int, ...]
    word: str
    line: Line | None = None
    verdict: Verdict | None = None
    cost_ns: int = 0
    chance: float = 1.0

    def columns(self) -> tuple[int, int]:
        """Return the first and last column of the line-up that the verdict is about."""
        evidence = self.verdict.evidence if self.verdict else None
        return (evidence.first, evidence.last) if evidence else (0, -1)


@dataclass(frozen=True, eq=False)
class Attendance:
    """Who came last to the collectives of a role.

    Attributes:
        who: Where its ranks stand.
        every: Every so many-th step was asked.
        step_ns: How long a step takes.
        within: The collectives of ranks that share a part of a replica; None if none are listed.
        late: By replica, where several met.
        inside: By rank, where ranks of one replica did.
        several: Whether ranks are in process groups of which none holds the other.
    """

    who: Replicas
    every: int
    step_ns: float
    several: bool = False
    within: Listed | None = None
    late: Arrivals | None = None
    inside: Arrivals | None = None

    def share(self, rank: int) -> float | None:
        """Return how often a rank came last within its replica, or else its replica did."""
        if self.inside is not None and rank in self.inside.ranks:
            return self.inside.share(rank)
        row = int(np.searchsorted(self.who.ranks, rank))
        return self.late.share(int(self.who.replica[row])) if self.late is not None else None

    def replicas(self, needed: int) -> dict[int, Proof]:
        """Return the replicas that the others waited for, and what that cost."""
        most = max(map(len, self.who.members().values()))  # so many groups of a replica are late
        return _proven(self.late, needed, LEVEL, _MATTERS * self.step_ns * most)

    def cause(self, ranks: Sequence[int], steps: Steps, needed: int, least_ns: float) -> Causes:
        """Return whom the ranks of one replica waited for, group by group.

        Who is late in one group since it waited in another one is not the cause.

        Args:
            ranks: Of one replica.
            steps: First and last RL step to ask.
            needed: Steps below which nothing is proven.
            least_ns: How much later per step the cause has to come.
        """
        if self.within is None:
            return {}
        here = np.isin(self.within.rank, ranks)
        here &= (self.within.step >= steps[0]) & (self.within.step <= steps[1])
        found = self.within.only(here)
        proofs: Causes = {}
        excused: set[int] = set()
        for group in np.unique(found.group).tolist():
            met = last_of(found.only(found.group == group), self.every)
            sure = _proven(met, needed, _EITHER if needed == 1 else LEVEL, least_ns)
            proofs = {**sure, **proofs}
            excused |= set(met.ranks.tolist()) - set(sure) if met is not None and sure else set()
        return {rank: proof for rank, proof in proofs.items() if rank not in excused}


def attendance(who: Replicas, found: Listed | None, every: int, step_ns: float) -> Attendance:
    """Count who came last, in every so many-th step."""
    if found is None:
        return Attendance(who, every, step_ns)
    within = within_replicas(found, who)
    late = last_of(between_replicas(found, who), every)
    return Attendance(who, every, step_ns, cross(found), within, late, last_of(within, every))


def charges(lines: Sequence[Line], came: Attendance, needed: int) -> Iterator[Charge]:
    """Yield what is held against whom.

    A rank that is slow makes its whole replica slow: of ranks that all look slow, the one is named
    for whom the others wait, and where that is not known the charge is against all of them as one.

    Args:
        lines: The places that can be compared.
        came: Who came last.
        needed: Steps below which arrivals prove nothing by themselves.
    """
    members = came.who.members()
    late = came.replicas(needed)
    for replica, ranks in members.items():
        told = [each for line in lines for each in _suspects_told(line, ranks)]
        guilty = [each for each in told if each.word not in (INCONCLUSIVE, IMBALANCE)]
        uneven = [each for each in told if each.word == IMBALANCE]
        if guilty:
            yield from (guilty if len(ranks) == 1 else [_narrowed(guilty, ranks, lines, came)])
            yield from uneven if len(ranks) > 1 else ()
            continue
        found = () if uneven else _arrived(ranks, came, late.get(replica), needed, len(members))
        yield from found or told


def _suspects_told(line: Line, ranks: Sequence[int]) -> Iterator[Charge]:
    for verdict in line.verdicts:
        rank = int(line.lineup.ranks[verdict.rank])
        if rank in ranks:
            yield Charge((rank,), verdict.verdict, line, verdict)


def _narrowed(
    guilty: Sequence[Charge], ranks: Sequence[int], lines: Sequence[Line], came: Attendance
) -> Charge:
    """Return the charge against the one rank of a slow replica, or against all that may be it."""
    worst = max(guilty, key=_effect)
    first, last = worst.columns()
    least = _AS_SLOW * _effect(worst)
    steps = lines[0].lineup.steps[[first, last]].tolist()  # all lines have the steps of the run
    waited = came.cause(ranks, (steps[0], steps[1]), 1, least * _own_ns(worst))
    found = tuple(waited) or tuple(
        rank for rank in ranks if _as_slow(rank, lines, first, last, least)
    )
    if len(found) > 1:
        return Charge(tuple(sorted(found)), SLOW_REPLICA, worst.line, worst.verdict)
    own = next((each for each in guilty if each.ranks == found), worst)
    return Charge(found, own.word, own.line, own.verdict)


def _own_ns(charge: Charge) -> float:
    """Return how long the work of a step takes."""
    own = charge.line.pace.own_ns if charge.line else np.zeros((1, 1))
    return float(np.nan_to_num(middle(own.ravel())))


def _effect(charge: Charge) -> float:
    return charge.verdict.evidence.effect if charge.verdict else 0.0


def _as_slow(rank: int, lines: Sequence[Line], first: int, last: int, least: float) -> bool:
    """Tell whether a rank may be as slow; not to know it is no excuse."""
    known = [line.effect(rank, first, last) for line in lines]
    effects = [effect for effect in known if effect is not None]
    return not effects or max(effects) >= least


def _arrived(
    ranks: Sequence[int], came: Attendance, late: Proof | None, needed: int, replicas: int
) -> tuple[Charge, ...]:
    """Return the charge that arrivals alone make: late for sure, though not why."""
    if late is None and replicas > 1:
        return ()
    everything = (0, np.iinfo(np.int64).max)
    cause = came.cause(ranks, everything, needed, _MATTERS * came.step_ns)
    if late is None and not cause:
        return ()
    cost_ns, chance = late or next(iter(cause.values()))
    cost_ns *= len(ranks) if late else 1  # of each other replica only the last rank was counted
    found = tuple(sorted(cause)) or tuple(ranks)
    word = SLOW_UNCOUNTED if len(found) == 1 else SLOW_REPLICA
    return (Charge(found, word, cost_ns=cost_ns, chance=chance),)


def _proven(last: Arrivals | None, needed: int, level: float, least_ns: float) -> dict[int, Proof]:
    """Return who came last beyond doubt, mostly, and by so much per step on average."""
    if last is None:
        return {}
    chance = holm(last.chance)
    sure = (last.trials >= needed) & (chance <= level) & (last.last > _MOSTLY * last.trials)
    sure &= last.later_ns > least_ns * last.trials
    return {
        int(last.ranks[at]): (int(last.cost_ns[at]), float(chance[at]))
        for at in np.flatnonzero(sure).tolist()
    }
