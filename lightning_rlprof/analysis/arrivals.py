"""Who comes last to collectives, told by durations alone: the last one to come stays shortest."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.analysis.exact import Floats, at_least
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Table

__all__ = ["Arrivals", "came_last", "last_of_steps"]

Mask = npt.NDArray[np.bool_]

# What lists collectives, and the column that tells what each of them does.
_TABLES = {"collectives": "operation", "communication": "operator"}
_NEEDED = ("rank", "group", "start", "duration")


class Arrivals(NamedTuple):
    """How often each rank came last; arrays over ranks.

    Attributes:
        ranks: Ascending.
        last: Collectives that it came last to.
        trials: Collectives that it took part in.
        chance: How likely so many or more are if every rank is last equally often.
        cost_ns: What the others waited for it where it came last, summed over them.
    """

    ranks: Int64s
    last: Int64s
    trials: Int64s
    chance: Floats
    cost_ns: Int64s


def came_last(group: Int64s, rank: Int64s, duration_ns: Int64s) -> Arrivals:
    """Count for each rank how often it had the shortest duration of its group.

    It ends for all when the last one has come. The chance is exact: binomial, with one over the
    size of the smallest group. Where several were shortest, nobody was last.

    Args:
        group: Which collective each row is of.
        rank: Whose row it is.
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
    last = np.bincount(winner, minlength=len(ranks))
    waited = np.add.reduceat(duration_ns, heads) if len(heads) else duration_ns
    cost = np.zeros_like(ranks)
    np.add.at(cost, winner, (waited - size * duration_ns[heads])[alone])
    return Arrivals(ranks, last, *_chances(place, np.repeat(size, size)[several], last), cost)


def _chances(place: Int64s, size: Int64s, last: Int64s) -> tuple[Int64s, Floats]:
    """Return in how many collectives each rank was, and how likely it was last so often in them."""
    trials = np.bincount(place, minlength=len(last))
    least = np.full(len(last), np.iinfo(np.int64).max)
    np.minimum.at(least, place, size)
    each = zip(trials.tolist(), last.tolist(), least.tolist(), strict=True)
    chance = [at_least(number, 1 / few)[times] for number, times, few in each]
    return trials, np.array(chance, dtype=np.float64)


def last_of_steps(spans: Spans, among: Collection[int], every: int = 1) -> Arrivals | None:
    """Count who came last in the collectives of a run, once per step and process group.

    Within a step one late arrival is followed by others, so only the collective in which ranks came
    furthest apart is asked. None where no table lists collectives of several of these ranks.

    Args:
        spans: The run, with a table ``collectives`` or ``communication``.
        among: Ranks to compare; groups with others are left out.
        every: Ask every so many-th step, where ranks keep their pace for so long.
    """
    name = next((name for name in _TABLES if name in spans.tables), "")
    table = read(spans, name, [])
    if table is None or not _told(table, _TABLES[name]):
        return None
    rank, start, took = (numbers(table, each, -1) for each in ("rank", "start", "duration"))
    group, operator = texts(table, "group")[0], texts(table, _TABLES[name])[0]
    step = numbers(table, "step", 0) if _has(table, "step") else np.zeros_like(rank)
    known = (start >= 0) & (took >= 0) & (step % every == 0) & (group >= 0)
    columns = [each[known] for each in (group, step, operator, rank, start, took)]
    group, step, operator, rank, start, took = columns
    one, whole = _matched(group, step, operator, rank, start)
    stray = np.unique(one[~np.isin(rank, list(among))])
    keep = whole & ~np.isin(one, stray)
    if not keep.any():
        return None
    lap = group * (step.max() + 2) + step
    one, rank, took, lap = (each[keep] for each in (one, rank, took, lap))
    chosen = _furthest_apart(one, lap, took)
    return came_last(one[chosen], rank[chosen], took[chosen])


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
