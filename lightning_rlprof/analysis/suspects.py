"""From verdicts on ranks of one place to the one rank of a replica that makes the others late."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.arrivals import (
    Arrivals,
    Listed,
    between_replicas,
    cross,
    last_of,
    within_replicas,
)
from lightning_rlprof.analysis.exact import holm
from lightning_rlprof.analysis.lineup import Lineup
from lightning_rlprof.analysis.others import middle
from lightning_rlprof.analysis.pace import Pace
from lightning_rlprof.analysis.replicas import Replicas
from lightning_rlprof.analysis.verdicts import (
    INSUFFICIENT,
    LEVEL,
    SLOW_GROUP,
    SLOW_OR_UNEVEN,
    UNEVEN,
    Verdict,
)

__all__ = ["Attendance", "Charge", "Line", "attendance", "charges"]

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
        told = [each for line in lines for each in _told(line, ranks)]
        guilty = [each for each in told if each.word not in (INSUFFICIENT, UNEVEN)]
        uneven = [each for each in told if each.word == UNEVEN]
        if guilty:
            yield from (guilty if len(ranks) == 1 else [_narrowed(guilty, ranks, lines, came)])
            yield from uneven if len(ranks) > 1 else ()
            continue
        found = () if uneven else _arrived(ranks, came, late.get(replica), needed, len(members))
        yield from found or told


def _told(line: Line, ranks: Sequence[int]) -> Iterator[Charge]:
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
        return Charge(tuple(sorted(found)), SLOW_GROUP, worst.line, worst.verdict)
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
    word = SLOW_OR_UNEVEN if len(found) == 1 else SLOW_GROUP
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
