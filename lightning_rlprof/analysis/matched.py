"""The collectives of all ranks, and which of their calls were one, without comparing clocks.

A collective ends for all when the last rank has come and the data are through. So the shortest of
its durations is the transfer's, what another rank spent beyond that it waited, and the rank with
the shortest was the last to come. Durations are compared, never times of two ranks' clocks; these
only tell calls apart that cannot have been one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.cells import numbers, read, texts
from lightning_rlprof.analysis.labels import Label, kernel_labels
from lightning_rlprof.analysis.sweep import differs
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Table

__all__ = [
    "NOBODY",
    "NO_NUMBER",
    "PAIRWISE",
    "UNKNOWN",
    "UNMATCHED",
    "Calls",
    "Meetings",
    "calls_of",
    "collectives",
    "matched",
    "meet",
    "operation_of",
]

UNKNOWN = -1
"""Stands for bytes and sizes of groups that were not told, and as a code for no text."""

NO_NUMBER = -1
"""Stands for a call of which the tool told no sequence number."""

UNMATCHED = -1
"""Stands for a call whose counterparts on other ranks are not known."""

NOBODY = -1
"""Stands for the last to come where two ranks were equally short."""


Mask = npt.NDArray[np.bool_]
Coded = tuple[Int64s, Sequence[str]]

_BY_NAME = (
    "From kernels by their names: groups and bytes are not known, and groups that communicate at "
    "once are matched with one another."
)

# Whatever the libraries call them; what contains another one's name stands before it.
_OPERATIONS = (
    ("all_reduce", "all_?reduce|cross_device_reduce"),
    ("all_gather", "all_?gather"),
    ("reduce_scatter", "reduce_?scatter"),
    ("all_to_all", "all_?to_?all"),
    ("send_recv", "send_?recv"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("send", "send"),
    ("recv", "recv|receive"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
)
_KNOWN = tuple((name, re.compile(pattern)) for name, pattern in _OPERATIONS)

PAIRWISE = frozenset({"send_recv", "send", "recv"})
"""Operations between two ranks."""


@dataclass(frozen=True, eq=False)
class Calls:
    """Collectives of all ranks as columns of one length.

    Attributes:
        rank: Rank of each call.
        start_ns: When it began, on the run's axis.
        end_ns: When it ended.
        step: RL step, 0 where it is not known.
        number: The tool's sequence number in the group, or `NO_NUMBER`.
        bytes: Its size, or `UNKNOWN`.
        members: How many ranks its group has, or `UNKNOWN`.
        operation: `operation_of` names, or what the tool says.
        group: Process group; no code where it is not known.
        stage: RL stage, likewise.
        remark: What to know of the source, empty for the best one.
    """

    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    step: Int64s
    number: Int64s
    bytes: Int64s
    members: Int64s
    operation: Coded
    group: Coded
    stage: Coded
    remark: str = ""


@dataclass(frozen=True, eq=False)
class Meetings:
    """Calls by the collective that they were part of.

    Attributes:
        meeting: Per call the meeting it is of, or `UNMATCHED`; shape (calls,).
        ranks: How many ranks each meeting has, two at least; shape (meetings,), as what follows.
        transfer_ns: The shortest of its durations.
        last: The call with that duration, `NOBODY` where several have it.
        apart: Whether a rank was done before another began, though their numbers are equal.
    """

    meeting: Int64s
    ranks: Int64s
    transfer_ns: Int64s
    last: Int64s
    apart: Mask


def operation_of(name: str) -> str:
    """Return the collective that a kernel's or function's name means; "other" for none we know.

    Example::

        >>> operation_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL"), operation_of("hcom_receive__1")
        ('all_reduce', 'recv')
    """
    low = name.lower()
    return next((known for known, pattern in _KNOWN if pattern.search(low)), "other")


def collectives(spans: Spans, remarks: list[str]) -> Calls | None:
    """Read the table ``collectives``, else kernels by their names.

    Returns None where neither has one. A table that cannot be read becomes a remark.
    """
    table = read(spans, "collectives", remarks)
    if table is not None and len(table.rows):
        return calls_of(table)
    table = read(spans, "kernels", remarks)
    return None if table is None else _of_kernels(table)


def calls_of(table: Table) -> Calls:
    """Return the rows of a table ``collectives`` as calls, in their order."""
    return replace(
        _frame(table, texts(table, "operation")),
        number=numbers(table, "number", NO_NUMBER),
        bytes=numbers(table, "bytes", UNKNOWN),
        members=numbers(table, "group size", UNKNOWN),
        group=texts(table, "group"),
    )


def _of_kernels(table: Table) -> Calls | None:
    codes, names = texts(table, "kernel")
    keep = (np.append(kernel_labels(names), UNKNOWN) == Label.TRANSFER)[codes]
    if not keep.any():
        return None
    places: dict[str, int] = {}
    own = [places.setdefault(operation_of(name), len(places)) for name in names]
    operation = (np.array([*own, UNKNOWN], np.int64)[codes], list(places))
    return replace(_frame(table, operation, keep), remark=_BY_NAME)


def _frame(table: Table, operation: Coded, keep: slice | Mask = slice(None)) -> Calls:
    """Read what both tables have, of some rows."""
    start, took = numbers(table, "start")[keep], numbers(table, "duration")[keep]
    stage, names = texts(table, "stage")
    unknown = np.full(len(start), UNKNOWN)
    return Calls(
        numbers(table, "rank")[keep],
        start,
        start + took,
        numbers(table, "step")[keep],
        unknown,
        unknown,
        unknown,
        (operation[0][keep], operation[1]),
        (unknown, []),
        (stage[keep], names),
    )


def matched(calls: Calls) -> tuple[Meetings, Calls]:
    """Return which calls met, and the calls with one stage per meeting: one rank may know it.

    Sends and receives meet nobody: no tool tells with whom.
    """
    what = (calls.group[0] + 1) * (len(calls.operation[1]) + 1) + calls.operation[0] + 1
    between = np.array([operation_of(name) in PAIRWISE for name in calls.operation[1]], bool)
    alone = np.append(between, False)[calls.operation[0]]
    what = np.where(alone, int(what.max(initial=0)) + 1 + np.arange(len(what)), what)
    found = meet(calls.rank, what, calls.number, calls.step, calls.start_ns, calls.end_ns)
    at = np.flatnonzero(found.meeting != UNMATCHED)
    known = np.full(len(found.ranks), UNKNOWN)
    np.maximum.at(known, found.meeting[at], calls.stage[0][at])
    stage = calls.stage[0].copy()
    stage[at] = known[found.meeting[at]]
    return found, replace(calls, stage=(stage, calls.stage[1]))


def meet(
    rank: Int64s, what: Int64s, number: Int64s, step: Int64s, start_ns: Int64s, end_ns: Int64s
) -> Meetings:
    """Match calls across ranks: equal numbers meet, without numbers the n-th of a step.

    Calls of one group and operation, and number or else step, are counted off on each rank. They
    stay unmatched where ranks differ in how many they have, where only one has any, and without
    numbers where they lie apart. Takes O(n log n) time.

    Args:
        rank: Rank of each call; shape (n,), as all others.
        what: Code of its group and operation.
        number: Its sequence number in the group, or `NO_NUMBER`.
        step: RL step, any one value where it is not known.
        start_ns: When the rank came; ``end_ns``: when it went on.
    """
    told = number != NO_NUMBER
    order, heads = _counted_off(rank, what, told, np.where(told, number, step), start_ns)
    size = np.diff(np.append(heads, len(order)))
    apart = _apart(rank[order], start_ns[order], end_ns[order], heads, size)
    kept = told[order[heads]] | ~apart
    order, size, apart = order[np.repeat(kept, size)], size[kept], apart[kept]
    meeting, last = np.full(len(rank), UNMATCHED), np.full(len(size), NOBODY)
    meeting[order] = np.repeat(np.arange(len(size)), size)
    took = (end_ns - start_ns)[order]
    least = np.minimum.reduceat(took, np.cumsum(size) - size) if len(size) else size
    shortest = order[took == np.repeat(least, size)]
    last[meeting[shortest]] = shortest
    last[np.bincount(meeting[shortest], minlength=len(size)) > 1] = NOBODY
    return Meetings(meeting, size, least, last, apart)


def _apart(rank: Int64s, came: Int64s, went: Int64s, heads: Int64s, size: Int64s) -> Mask:
    """Tell the meetings of which a rank was done before another began, by clocks put right.

    All ranks of a collective go on at about the same time. So by how much the ends of two ranks
    differ in most of their meetings, from three on, is by how much their clocks do.
    """
    if not len(heads):
        return np.empty(0, dtype=bool)
    late = went - np.repeat(went[heads], size)
    pair = np.stack([np.repeat(rank[heads], size), rank])
    order = np.lexsort((late, *pair))
    first = np.flatnonzero(differs(*pair[:, order]))
    count = np.diff(np.append(first, len(order)))
    offset = np.where(count > 2, late[order][first + count // 2], 0)
    shift = np.empty_like(late)
    shift[order] = np.repeat(offset, count)
    latest = np.maximum.reduceat(came - shift, heads)
    return np.asarray(latest > np.minimum.reduceat(went - shift, heads))


def _counted_off(
    rank: Int64s, what: Int64s, told: Mask, place: Int64s, start: Int64s
) -> tuple[Int64s, Int64s]:
    """Return the matched calls, those of one meeting after one another, and where each begins."""
    order = np.lexsort((start, rank, place, told, what))
    if not len(order):
        return order, order
    columns = [column[order] for column in (what, told, place)]
    row = np.arange(len(order))
    whole = np.flatnonzero(differs(*columns))  # where each group and operation of a place begins
    own = np.flatnonzero(differs(*columns, rank[order]))  # the same of one rank
    count = np.diff(np.append(own, len(order)))
    nth = row - np.repeat(own, count)
    first = np.searchsorted(own, whole)
    ranks = np.diff(np.append(first, len(own)))
    alike = np.minimum.reduceat(count, first) == np.maximum.reduceat(count, first)
    size = np.diff(np.append(whole, len(order)))
    kept = np.flatnonzero(np.repeat(alike & (ranks > 1), size))
    number = np.repeat(whole, size)[kept] + nth[kept]  # unique: a place has more rows than numbers
    again = np.argsort(number, kind="stable")
    return order[kept[again]], np.flatnonzero(differs(number[again]))
