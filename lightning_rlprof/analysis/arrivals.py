"""Who comes last to collectives, told by durations alone: the last one to come stays shortest."""

import re
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.analysis.exact import Floats, at_least
from lightning_rlprof.analysis.replicas import Replicas
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Table

__all__ = [
    "Arrivals",
    "Listed",
    "between_replicas",
    "came_last",
    "cross",
    "last_of",
    "listed",
    "within_replicas",
]

Mask = npt.NDArray[np.bool_]

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
    chance: Floats
    cost_ns: Int64s
    later_ns: Floats

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
    heads = np.flatnonzero(np.diff(group, prepend=group[:1] - 1))
    size = np.diff(np.append(heads, len(group)))
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


def _later(place: Int64s, members: Int64s, whole: Int64s, took: Int64s) -> Floats:
    """Return by how much the others stayed longer on average than each rank, summed."""
    off: Floats = np.zeros(int(place.max(initial=-1)) + 1)
    np.add.at(off, place, (whole - took) / (members - 1) - took)
    return off


def _chances(place: Int64s, size: Int64s, last: Int64s) -> tuple[Int64s, Floats]:
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
    table = read(spans, name, [])
    if table is None or not _told(table, _TABLES[name]):
        return None
    rank, start, took = (numbers(table, each, -1) for each in ("rank", "start", "duration"))
    group, (operator, names) = texts(table, "group")[0], texts(table, _TABLES[name])
    step = numbers(table, "step", 0) if _has(table, "step") else np.zeros_like(rank)
    between = np.array([bool(_PAIRWISE.search(each.lower())) for each in names] + [False])
    known = (start >= 0) & (took >= 0) & (group >= 0) & ~between[operator]
    columns = [each[known] for each in (group, step, operator, rank, start, took)]
    group, step, operator, rank, start, took = columns
    one, whole = _matched(group, step, operator, rank, start)
    if _has(table, "group size"):  # where different groups have one name, none of them is whole
        told = numbers(table, "group size", -1)[known]
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
    heads = np.flatnonzero(_differ(found.one[order], replica[order]))
    size, lasts = np.diff(np.append(heads, len(order))), order[heads]
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


def _differ(*columns: Int64s) -> Mask:
    found: Mask = np.any(np.diff(np.stack(columns), axis=1, prepend=-2) != 0, axis=0)
    return found


def _matched(
    group: Int64s, step: Int64s, operator: Int64s, rank: Int64s, start: Int64s
) -> tuple[Int64s, Mask]:
    """Number the collectives: the n-th of a name in a group and step is one for all its ranks.

    Also tell which are whole: all ranks that the group has anywhere are in them.
    """
    order = np.lexsort((start, rank, operator, step, group))
    keys = np.stack([group, step, operator, rank])[:, order]
    heads = np.flatnonzero(np.any(np.diff(keys, axis=1, prepend=-2) != 0, axis=0))
    nth = np.empty(len(order), dtype=np.int64)
    nth[order] = np.arange(len(order)) - np.repeat(heads, np.diff(np.append(heads, len(order))))
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
