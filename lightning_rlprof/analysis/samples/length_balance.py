"""How evenly the lengths of trained samples are spread over ranks, and how evenly they could be."""

import heapq
from collections.abc import Sequence

import numpy as np

from lightning_rlprof.analysis.samples.sample_book import NO_SAMPLES, USED, sample_book
from lightning_rlprof.tables.arrays import Int64s, group_starts
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    Column("order", "text"),
    *columns_of("count", "least tokens", "most tokens"),
    *columns_of("ratio", "tokens", "tokens squared"),
    *columns_of("count", "steps", "samples"),
)
_NOTE = (
    "least and most tokens of a rank, mean over steps. tokens, tokens squared: the largest rank "
    "over the mean of all. Time grows with the first, attention with the second. as generated: in "
    "order of start, cut into equal numbers. best: by differencing, equal numbers not required."
)
_ONE_RANK = "Needs samples with tokens that two or more ranks trained in one step"


def length_balance(spans: Spans) -> Table:
    """Compare how evenly tokens are spread over ranks: as generated, as trained, and at best.

    A sample belongs to the rank and step that recorded its fate. Abstains unless two ranks trained.
    """
    book = sample_book(spans)
    if not len(book):
        return Table("length_balance", _COLUMNS, abstained=NO_SAMPLES)
    used = np.flatnonzero(book.fates(*USED) & (book.tokens >= 0))
    order = np.lexsort((used, spans.start_ns[_first_rows(book.first, book.rows)[used]]))
    used = used[order]
    step = spans.step[book.fate_row[used]]
    rank = spans.rank[book.fate_row[used]]
    sums: dict[str, list[list[Int64s]]] = {"as generated": [], "as trained": [], "best": []}
    samples = 0
    by_step = np.argsort(step, kind="stable")
    for own in np.split(by_step, group_starts(step[by_step])[1:]) if len(step) else ():
        ranks, place = np.unique(rank[own], return_inverse=True)
        if len(ranks) < 2:
            continue
        lengths, parts = book.tokens[used[own]], len(ranks)
        samples += len(own)
        chunks = np.minimum(np.arange(len(own)) // max(len(own) // parts, 1), parts - 1)
        found = {"as generated": chunks, "as trained": place, "best": balanced(lengths, parts)}
        for name, of in found.items():
            sums[name].append([_sums(lengths, of, parts), _sums(lengths**2, of, parts)])
    if not samples:
        return Table("length_balance", _COLUMNS, abstained=_ONE_RANK)
    rows: list[tuple[Cell, ...]] = []
    for name, steps in sums.items():
        tokens = [each[0] for each in steps]
        least = round(float(np.mean([each.min() for each in tokens])))
        most = round(float(np.mean([each.max() for each in tokens])))
        ratios = [_imbalance([each[at] for each in steps]) for at in (0, 1)]
        rows.append((name, least, most, *ratios, len(steps), samples))
    return Table("length_balance", _COLUMNS, rows, _NOTE)


def _first_rows(first: Int64s, rows: Int64s) -> Int64s:
    """Return the first row of each sample; the first of all for one without rows."""
    starts = np.minimum(first[:-1], max(len(rows) - 1, 0))
    return rows[starts] if len(rows) else np.zeros(len(first) - 1, np.int64)


def _sums(lengths: Int64s, part: Int64s, parts: int) -> Int64s:
    found = np.zeros(parts, np.int64)
    np.add.at(found, part, lengths)
    return found


def _imbalance(steps: Sequence[Int64s]) -> float | None:
    ratios = [float(each.max() / each.mean()) for each in steps if each.any()]
    return float(np.mean(ratios)) if ratios else None


def balanced(lengths: Int64s, parts: int) -> Int64s:
    """Return the part of each length so that the sums of parts are nearly even.

    The largest differencing method for several parts (Karmarkar and Karp 1982): the two partial
    solutions with the largest spread are joined, heavy parts with light ones.

    Example::

        >>> balanced(np.array([8, 7, 6, 5, 4]), 2).tolist()
        [1, 0, 1, 0, 0]
    """
    # A partial solution: its spread, a number to break ties, and per part its sum and its members.
    heap = []
    for at, length in enumerate(lengths.tolist()):
        sums = [(length, [at])] + [(0, list[int]()) for _ in range(parts - 1)]
        heap.append((-length, at, sums))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        light = reversed(other)
        joined = [(a + b, own + more) for (a, own), (b, more) in zip(one, light, strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    found = np.zeros(len(lengths), np.int64)
    for part, (_, members) in enumerate(heap[0][2] if heap else ()):
        found[members] = part
    return found
