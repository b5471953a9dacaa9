"""What was seen of each link between two ranks: bytes, time, transport, operation and step.

torch_npu records links one by one. On other devices, a collective of a group of two ranks is an
observation of the link between them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.communication.collectives import calls_of, match_collectives
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s
from lightning_rlprof.tables.kernels import Coded, distinct
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

INSIDE, BETWEEN = "inside a host", "between hosts"
"""Transports of links that are known from collectives."""


@dataclass(frozen=True, eq=False)
class Observations:
    """What links moved, as columns of one length; rows with bytes and a time alone.

    Attributes:
        ends: Ranks at both ends, or their numbers in a group if the rank is unknown; shape (2, n).
        groups: The group whose number an end is, `UNKNOWN` of a rank; shape (2, n).
        group_names: Names of groups.
        transport: How the data went.
        operation: The collective.
        step: RL step, 0 if unknown.
        size: Bytes.
        time: Nanoseconds.
        directed: Whether both directions of a pair are links of their own.
    """

    ends: Int64s
    groups: Int64s
    group_names: Sequence[str]
    transport: Coded
    operation: Coded
    step: Int64s
    size: Int64s
    time: Int64s
    directed: bool


def observe(spans: Spans, ranks: Collection[int] | None, notes: list[str]) -> Observations | None:
    """Return what was seen of links, None if nothing was.

    Args:
        spans: The run.
        ranks: Only what these recorded; None for all.
        notes: Reasons for unreadable tables are added.
    """
    table = spans.try_table("links", notes)
    if table is not None:
        found = _recorded(table, ranks)
        if found is not None:
            return found
    table = spans.try_table("collectives", notes)
    hosts = {rank: header.host for rank, header in spans.headers.items()}
    return None if table is None else _pairs(table, ranks, hosts)


def _recorded(table: Table, ranks: Collection[int] | None) -> Observations | None:
    names = ("rank", "source", "destination", "size", "transfer")
    rank, source, destination, size, time = (table.numbers(name, UNKNOWN) for name in names)
    keep = (source != destination) & (size > 0) & (time > 0)
    if ranks is not None:
        keep &= np.isin(rank, list(ranks))
    if not keep.any():
        return None
    known = np.stack([_global_ranks(table, name) for name in ("source", "destination")])
    group, groups = table.texts("group")
    transport, transports = table.texts("transport")
    operation, operations = table.texts("operation")
    return Observations(
        np.where(known == UNKNOWN, np.stack([source, destination]), known)[:, keep],
        np.where(known == UNKNOWN, group, UNKNOWN)[:, keep],
        groups,
        (transport[keep], transports),
        (operation[keep], operations),
        table.numbers("step", 0)[keep],
        size[keep],
        time[keep],
        directed=True,
    )


def _global_ranks(table: Table, end: str) -> Int64s:
    """Return the rank at one end of each link, as any row knows it, else `UNKNOWN`."""
    group, names = table.texts("group")
    width = len(names) + 1
    known: dict[int, int] = {}
    keys = {}
    for each in ("source", "destination"):
        keys[each] = table.numbers(each, UNKNOWN) * width + group + 1
        rank = table.numbers(f"{each} rank", UNKNOWN)
        told = rank != UNKNOWN
        known |= dict(zip(keys[each][told].tolist(), rank[told].tolist(), strict=True))
    return np.array([known.get(key, UNKNOWN) for key in keys[end].tolist()], np.int64)


def _pairs(
    table: Table, ranks: Collection[int] | None, hosts: Mapping[int, str]
) -> Observations | None:
    """Return the collectives of groups of two ranks that both recorded.

    The transfer is the shorter of their durations: the other one waited as well.
    """
    found, calls = match_collectives(calls_of(table))
    at = np.flatnonzero(found.collective != UNKNOWN)
    of = found.collective[at]
    count = len(found.ranks)
    low, high, size = (np.full(count, start) for start in (2**62, -1, UNKNOWN))
    step, operation = np.zeros(count, np.int64), np.full(count, UNKNOWN)
    members = np.full(count, UNKNOWN)
    np.minimum.at(low, of, calls.rank[at])
    for column, values in (
        (high, calls.rank),
        (size, calls.bytes),
        (step, calls.step),
        (operation, calls.operation[0]),
        (members, calls.members),
    ):
        np.maximum.at(column, of, values[at])
    keep = (members == 2) & (found.ranks == 2) & (size > 0) & (found.transfer_ns > 0) & ~found.apart
    if ranks is not None:
        keep &= np.isin(low, list(ranks)) & np.isin(high, list(ranks))
    if not keep.any():
        return None
    ends = [*zip(low[keep].tolist(), high[keep].tolist(), strict=True)]
    names = [_transport(hosts.get(one, ""), hosts.get(other, "")) for one, other in ends]
    code, texts = distinct(np.arange(len(names)), names)
    return Observations(
        np.stack([low[keep], high[keep]]),
        np.full((2, len(ends)), UNKNOWN),
        [],
        (np.where([name == "" for name in names], UNKNOWN, code), texts),
        (operation[keep], calls.operation[1]),
        step[keep],
        size[keep],
        found.transfer_ns[keep],
        directed=False,
    )


def _transport(one: str, other: str) -> str:
    if not one or not other:
        return ""
    return INSIDE if one == other else BETWEEN
