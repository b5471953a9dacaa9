"""Collectives of several ranks in which each had to wait for all: what tells of their clocks."""

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.errors import TraceError
from lightning_rlprof.frames import columns_of
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Table

__all__ = ["Mask", "Met", "Shared", "Side", "met"]

# Those in which everybody needs something from everybody. Of a broadcast the root is done before
# others have begun, of a reduce the others; an uneven all_to_all may send nothing to some.
_KERNEL = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|barrier)", re.IGNORECASE)
_ALL = ("all_reduce", "all_gather", "reduce_scatter", "barrier")

# Where no group is told, that ranks met has to show: they leave together, however they came.
_FEWEST = 4
_CLOSER = 5

Mask = npt.NDArray[np.bool_]
"""Some of the calls, or of the meetings."""


class Shared(NamedTuple):
    """Meetings of two sets of ranks, by time: when the last came, and the first left, of each."""

    start_ns: Int64s
    end_ns: Int64s
    start_there_ns: Int64s
    end_there_ns: Int64s

    def bounds(self) -> tuple[Int64s, Int64s]:
        """Return the least and the most that can be added to times of the first set."""
        return self.start_there_ns - self.end_ns, self.end_there_ns - self.start_ns

    def where(self, keep: Mask) -> "Shared":
        """Return some of them."""
        return Shared(*(column[keep] for column in self))


class Met(NamedTuple):
    """Calls on the axis of the run, and which of them were one collective.

    Attributes:
        rank: Whose each is.
        start_ns: When it came.
        end_ns: When it left.
        meeting: Which collective it was.
        sure: Whether its group is told.
    """

    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    meeting: Int64s
    sure: Mask

    def side(self, own: Int64s) -> "Side":
        """Return when the last of some calls began in each meeting, and when the first ended."""
        own = own[np.argsort(self.meeting[own], kind="stable")]
        if not len(own):
            return Side(own, own, own, np.zeros(0, bool))
        heads = _heads(self.meeting[own])
        start = np.maximum.reduceat(self.start_ns[own], heads)
        end = np.minimum.reduceat(self.end_ns[own], heads)
        return Side(self.meeting[own[heads]], start, end, self.sure[own[heads]])


class Side(NamedTuple):
    """Some ranks in their meetings; by meeting, which is ascending."""

    meeting: Int64s
    start_ns: Int64s
    end_ns: Int64s
    sure: Mask

    def shared(self, there: "Side") -> Shared:
        """Return the meetings in which both sides are, without those that are doubtful.

        Where groups are not told, calls were matched by their order alone. Then they are believed
        where most bounds agree with one offset, and the ends of those differ far less than their
        starts do: so it is where ranks wait for one another, and not where they do alike.
        """
        place = np.searchsorted(there.meeting, self.meeting)
        here = np.flatnonzero(np.append(there.meeting, -1)[place] == self.meeting)
        at, sure = place[here], self.sure[here]
        times = (self.start_ns[here], self.end_ns[here], there.start_ns[at], there.end_ns[at])
        every = Shared(*times)
        pairs = zip(every.where(sure), _waiting(every.where(~sure)), strict=True)
        found = Shared(*map(np.concatenate, pairs))
        order = np.argsort(found.end_ns, kind="stable")
        return Shared(*(column[order] for column in found))


def met(spans: Spans) -> Met | None:
    """Match the collectives of a run: by number, else by their order in a step.

    They are those of the table ``collectives``; Nsight Systems, which has none, tells them by names
    of kernels. None where there are none, or where they cannot be read.
    """
    table = _table(spans)
    if table is None:
        return None
    heads = [column.name for column in table.columns]
    cells = dict(zip(heads, columns_of(table), strict=True))
    codes, texts = cells["operation" if "operation" in cells else "kernel"]
    waits = np.array([*map(_operation, texts), -1], np.int64)[codes]
    rank, start, took = (np.ma.getdata(cells[each]) for each in ("rank", "start", "duration"))
    group = cells["group"][0] if isinstance(cells.get("group"), tuple) else np.full(len(rank), -1)
    number, step = (_told(cells.get(each), len(rank)) for each in ("number", "step"))
    keep = np.flatnonzero((waits >= 0) & ((number >= 0) | (step > 0)))
    place = np.where(number >= 0, number, step)
    what, told = (group * len(_ALL) + waits)[keep], (number >= 0)[keep]
    order, meeting = _matched(what, told, place[keep], rank[keep], start[keep])
    at = keep[order]
    return Met(rank[at], start[at], start[at] + took[at], meeting, group[at] >= 0)


def _table(spans: Spans) -> Table | None:
    by_names = any("nsys" in header.versions for header in spans.headers.values())
    name = "kernels" if by_names and "collectives" not in spans.tables else "collectives"
    if name not in spans.tables:
        return None
    try:
        table = spans.table(name)
    except TraceError:
        return None
    return table if table.abstained is None and len(table.rows) else None


def _operation(name: str) -> int:
    """Return which of `_ALL` an operation or a kernel is, -1 for others."""
    found = _KERNEL.search(name)
    short = found[1].lower().replace("_", "") if found else ""
    return next((at for at, each in enumerate(_ALL) if each.replace("_", "") == short), -1)


def _told(cells: Any, count: int) -> Int64s:
    if cells is None or isinstance(cells, tuple):
        return np.full(count, -1)
    filled: Int64s = np.ma.filled(cells, -1).astype(np.int64, copy=False)
    return filled


def _matched(
    what: Int64s, told: Mask, place: Int64s, rank: Int64s, start: Int64s
) -> tuple[Int64s, Int64s]:
    """Return the calls that have a counterpart, and which meeting each is of.

    The n-th of a group and operation, in a step or with a number, is the same on all ranks, which
    have as many of them.
    """
    order = np.lexsort((start, rank, place, told, what))
    if not len(order):
        return order, order
    columns = [column[order] for column in (what, told, place)]
    whole = _heads(*columns)
    own = _heads(*columns, rank[order])
    count = np.diff(np.append(own, len(order)))
    nth = np.arange(len(order)) - np.repeat(own, count)
    first = np.searchsorted(own, whole)
    alike = np.minimum.reduceat(count, first) == np.maximum.reduceat(count, first)
    alike &= np.diff(np.append(first, len(own))) > 1
    size = np.diff(np.append(whole, len(order)))
    kept = np.flatnonzero(np.repeat(alike, size))
    number = np.repeat(whole, size)[kept] + nth[kept]
    return order[kept], np.unique(number, return_inverse=True)[1]


def _heads(*columns: npt.NDArray[Any]) -> Int64s:
    """Return where any of some sorted columns has another value than before."""
    new = np.zeros(len(columns[0]), bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


def _waiting(found: Shared) -> Shared:
    """Return those of which it shows that ranks met in them; none where it does not."""
    nothing = np.zeros(len(found.end_ns), bool)
    if len(nothing) < _FEWEST:
        return found.where(nothing)
    low, high = found.bounds()
    ends, starts = found.end_there_ns - found.end_ns, found.start_there_ns - found.start_ns
    middle = np.sort(ends)[len(ends) // 2]
    agree = (low <= middle) & (middle <= high)
    count = int(np.count_nonzero(agree))
    closer = count >= _FEWEST and _spread(ends[agree]) * _CLOSER <= _spread(starts[agree])
    return found.where(agree if closer and 2 * count > len(agree) else nothing)


def _spread(values: Int64s) -> float:
    return float(np.median(abs(values - np.median(values))))
