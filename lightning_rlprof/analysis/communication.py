"""Collectives matched across ranks: how much, how fast, how long waited, and for whom."""

from typing import Any

import numpy as np

from lightning_rlprof.analysis.matched import (
    NOBODY,
    PAIRWISE,
    UNKNOWN,
    UNMATCHED,
    Calls,
    Meetings,
    collectives,
    matched,
    operation_of,
)
from lightning_rlprof.analysis.statistics import mean, summarize
from lightning_rlprof.spans import Int64s, Spans
from lightning_rlprof.table import Cell, Column, Table

__all__ = ["bus_factor", "communication"]

_COLUMNS = (
    Column("operation", "text"),
    Column("group", "text"),
    Column("stage", "text"),
    Column("total", "duration", "ns"),
    Column("count", "count"),
    Column("meetings", "count"),
    Column("transfer", "duration", "ns"),
    Column("wait", "duration", "ns"),
    Column("last to come", "count"),
    Column("times last", "count"),
    Column("bytes", "count", "bytes"),
    Column("typical", "count", "bytes"),
    Column("algorithm GB/s", "number", "GB/s"),
    Column("bus GB/s", "number", "GB/s"),
    Column("group size", "count"),
    Column("ranks", "count"),
)
_FORMULA = (
    "Transfer is the shortest duration of a meeting, wait is what the others took beyond it: no "
    "clocks of two ranks are compared, so neither has a ± of them. Who "
    "came last is a count and no verdict: that rank may have had more work."
)
_ONE_WAY = {"all_gather", "reduce_scatter", "all_to_all"}
_PLAIN = {"broadcast", "reduce", *PAIRWISE}


def communication(spans: Spans) -> Table:
    """Match collectives across ranks, and tell per group transfer, wait and bandwidth.

    The n-th collective of a group and operation is one meeting of its ranks: by the tool's
    sequence number, or else by order within a step. ``total`` is the time of all ``count`` calls,
    ``transfer`` the mean over meetings, ``wait`` the mean over the calls in them. ``last to come``
    is the rank that waited least most often, ``times last`` how often, of ``meetings``; no rank
    where two share that. ``typical`` is the median of the bytes. Bandwidths are bytes by transfer,
    and that times `bus_factor`. Sends and receives, and what one rank alone recorded, have
    durations only.

    Abstains where no device tool recorded a collective.
    """
    remarks: list[str] = []
    calls = collectives(spans, remarks)
    if calls is None:
        reason = " ".join(["no device tool recorded a collective", *remarks])
        return Table("communication", _COLUMNS, abstained=reason)
    found, calls = matched(calls)
    remarks += [calls.remark, *_doubts(calls, found), _FORMULA]
    rows = _rows(calls, found)
    return Table("communication", _COLUMNS, rows, " ".join(filter(None, remarks)))


def bus_factor(operation: str, ranks: int) -> float | None:
    """Return by what the algorithm bandwidth is multiplied to compare it with links; None: unknown.

    NCCL's factors: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

    Example::

        >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("barrier", 8)
        (1.75, 0.875, None)
    """
    if ranks < 2:
        return None
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in _ONE_WAY:
        return (ranks - 1) / ranks
    return 1.0 if operation in _PLAIN else None


def _doubts(calls: Calls, found: Meetings) -> list[str]:
    """Say what could not be matched, and which meetings may not be what they seem."""
    doubts = []
    alone = int(np.count_nonzero(found.meeting == UNMATCHED))
    if alone:
        text = "have no counterpart on other ranks: their wait and transfer are not told apart."
        doubts.append(f"{alone} of {len(calls.rank)} calls {text}")
    at = np.flatnonzero(found.meeting != UNMATCHED)
    members = np.zeros(len(found.ranks), np.int64)
    np.maximum.at(members, found.meeting[at], calls.members[at])
    few = int(np.count_nonzero(found.ranks < members))
    if few:
        text = "not every rank of the group was recorded, and transfer may hold a wait for those."
        doubts.append(f"In {few} of {len(members)} meetings {text}")
    apart = int(np.count_nonzero(found.apart))
    if apart:
        text = "a rank was done before another began, although their numbers are equal."
        doubts.append(f"In {apart} of {len(members)} meetings {text}")
    return doubts


def _rows(calls: Calls, found: Meetings) -> list[tuple[Cell, ...]]:
    """Sum the calls by operation, group and stage; those that take longest first."""
    columns = [calls.operation, calls.group, calls.stage]
    widths = [len(names) + 1 for _, names in columns]
    every = np.ravel_multi_index([codes + 1 for codes, _ in columns], widths)
    keys, own = np.unique(every, return_inverse=True)
    names = [
        [names[code - 1] if code else None for code in codes.tolist()]
        for codes, (_, names) in zip(np.unravel_index(keys, widths), columns, strict=True)
    ]
    rows: list[tuple[Cell, ...]] = []
    for *key, times, last, sizes, speed, (members, ranks) in zip(
        *names, *_figures(calls, found, own, len(keys)), strict=True
    ):
        factor = bus_factor(operation_of(key[0] or ""), members or 0)
        bus = speed * factor if speed is not None and factor is not None else None
        rows.append((*key, *times, *last, *sizes, speed, bus, members, ranks))
    return sorted(rows, key=lambda row: -row[3])  # type: ignore[operator]


def _figures(calls: Calls, found: Meetings, own: Int64s, size: int) -> tuple[list[Any], ...]:
    """Return per row times and counts, who came last, bytes, bandwidth, ranks of the group."""
    at = np.flatnonzero(found.meeting != UNMATCHED)
    home = np.zeros(len(found.ranks), np.int64)
    home[found.meeting[at]] = own[at]
    took = calls.end_ns - calls.start_ns
    waited = took[at] - found.transfer_ns[found.meeting[at]]
    count, met, shared = (np.bincount(of, minlength=size) for of in (own, home, own[at]))
    times = zip(
        _sums(own, took, size).tolist(),
        count.tolist(),
        met.tolist(),
        _means(_sums(home, found.transfer_ns, size), met),
        _means(_sums(own[at], waited, size), shared),
        strict=True,
    )
    last, sizes = _last(calls, found, home, met), _sizes(calls, own, size)
    speeds = _bandwidths(calls, found, home, size)
    return list(times), last, sizes, speeds, _members(calls, own, size)


def _sums(own: Int64s, values: Int64s, size: int) -> Int64s:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, own, values)
    return sums


def _means(sums: Int64s, counts: Int64s) -> list[int | None]:
    means = mean(sums, np.maximum(counts, 1)).tolist()
    return [one if count else None for one, count in zip(means, counts.tolist(), strict=True)]


def _last(
    calls: Calls, found: Meetings, home: Int64s, met: Int64s
) -> list[tuple[int | None, int | None]]:
    """Return who came last most often in each row's meetings, nobody where two share that."""
    ranks, codes = np.unique(calls.rank, return_inverse=True)
    single = np.flatnonzero(found.last != NOBODY)
    pairs = home[single] * len(ranks) + codes[found.last[single]]
    each, times = np.unique(pairs, return_counts=True)
    most: list[tuple[int | None, int | None]] = [(None, 0 if n else None) for n in met.tolist()]
    for pair, count in zip(each.tolist(), times.tolist(), strict=True):
        row, code = divmod(pair, len(ranks))
        before = most[row][1] or 0
        if count >= before:
            most[row] = (int(ranks[code]) if count > before else None, count)
    return most


def _sizes(calls: Calls, own: Int64s, size: int) -> list[tuple[int | None, int | None]]:
    """Return the bytes of each row in all, and their median."""
    known = calls.bytes != UNKNOWN
    found = summarize(own[known], calls.bytes[known])
    sizes: list[tuple[int | None, int | None]] = [(None, None)] * size
    for row, total, typical in zip(
        found.group.tolist(), found.total.tolist(), found.p50.tolist(), strict=True
    ):
        sizes[row] = (total, typical)
    return sizes


def _bandwidths(calls: Calls, found: Meetings, home: Int64s, size: int) -> list[float | None]:
    """Return the payload of each row's meetings by their transfer: bytes per ns are GB/s."""
    at = np.flatnonzero(found.meeting != UNMATCHED)
    payload = np.full(len(found.ranks), UNKNOWN)
    np.maximum.at(payload, found.meeting[at], calls.bytes[at])
    told = (payload > 0) & (found.transfer_ns > 0)
    moved = _sums(home[told], payload[told], size).tolist()
    took = _sums(home[told], found.transfer_ns[told], size).tolist()
    return [one / time if time else None for one, time in zip(moved, took, strict=True)]


def _members(calls: Calls, own: Int64s, size: int) -> list[tuple[int | None, int]]:
    """Return the size of each row's group, and how many ranks recorded any of its calls."""
    members = np.full(size, UNKNOWN)
    np.maximum.at(members, own, calls.members)
    ranks, codes = np.unique(calls.rank, return_inverse=True)
    recorded = np.bincount(np.unique(own * len(ranks) + codes) // len(ranks), minlength=size)
    told = [None if one == UNKNOWN else one for one in members.tolist()]
    return list(zip(told, recorded.tolist(), strict=True))
