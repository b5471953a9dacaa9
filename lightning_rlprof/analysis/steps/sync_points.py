"""Sync points, where ranks wait for each other: collectives, barriers, and stages with waiting.

Few numbers compare clocks: a duration comes from one rank's clock, and so does a difference of two.
A table with a number that does adds `uncertainty_note`, and reports nothing smaller than ±u.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.listing import listed
from lightning_rlprof.analysis.statistics.robust import expected
from lightning_rlprof.analysis.steps.rank_matrix import (
    RankMatrix,
    build_rank_matrix,
    detect_waits,
    stage_rows,
    with_phases,
)
from lightning_rlprof.analysis.steps.step_selection import recent
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.analysis.steps.weight_updates import weight_updates
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, group_sizes, match_occurrences
from lightning_rlprof.tables.intervals import last_begun
from lightning_rlprof.tables.spans import Spans, rows_named

_TABLES = {"collectives": "operation", "communication": "operator"}
_SPANS = (KINDS.index("stage"), KINDS.index("region"))
_MAX_SPANS_LEARNED = 100_000  # They are enough to detect which stages include waiting.

WITHIN_UNCERTAINTY = "within clock uncertainty"
"""Text of a row whose effect is smaller than the clock uncertainty."""


@dataclass(frozen=True, eq=False)
class SyncPoints:
    """Sync points, and the visits of chains (one per training thread) to them.

    The first six columns have one entry per visit, by chain and start; a chain's visits never
    overlap. The next four have one entry per sync point.

    Attributes:
        chain: Chain of the visit.
        start_ns: Its arrival, by the clock of its rank.
        end_ns: When it continued.
        group: Sync point of the visit.
        row: Row of its span; -1 if a table lists it.
        name: Index into ``names``.
        step: RL step of each sync point.
        size: How many chains visited it, two or more.
        transfer_ns: Its shortest visit, which is that of the last arrival.
        whole_stage: Whether it is a whole stage; then ``transfer_ns`` includes work of that rank.
        names: The run's names, then those that only a table has.
        source: Where the sync points come from, for the reader.
    """

    chain: Int64s
    start_ns: Int64s
    end_ns: Int64s
    group: Int64s
    row: Int64s
    name: Int64s
    step: Int64s
    size: Int64s
    transfer_ns: Int64s
    whole_stage: Mask
    names: tuple[str, ...]
    source: str


class _Visits(NamedTuple):
    """Visits to possible sync points; those of one ``set`` and ``step`` are matched by order."""

    chain: Int64s
    step: Int64s
    set: Int64s
    row: Int64s
    name: Int64s
    start_ns: Int64s
    end_ns: Int64s

    def only(self, kept: Int64s | Mask) -> "_Visits":
        """Return some of them."""
        return _Visits(*(each[kept] for each in self))


def has_handoffs(spans: Spans) -> bool:
    """Return whether ranks hand over samples or weights: counted, or marked where they arrive."""
    counted = "sample" in spans.counters or "version" in spans.counters
    return counted or len(weight_updates(spans).received) > 0


def find_sync_points(spans: Spans, threads: Int64s, *, tables: bool = True) -> SyncPoints:
    """Find the sync points of training threads.

    They come from a table of collectives if there is one, else from spans with names of collectives
    and barriers. A stage that is found to include waiting, without a sync point inside, is one as a
    whole; but not a data wait or the arrival of weights, if ranks hand over something: they may
    wait for the same producer. Where phases of the training loop ran inside a stage, these are
    looked at one by one, see `with_phases`. Calls are matched by order, see `match_occurrences`.

    Args:
        spans: The run.
        threads: Training threads, one per chain.
        tables: Whether a table of collectives counts, whose times are a device's.
    """
    spans, names = with_phases(spans), [*spans.names]
    visits = _visits_in_table(spans, threads, names) if tables else None
    source = "collectives table"
    if visits is None or not len(visits.chain):
        joint = (Category.COMMUNICATION, Category.COLLECTIVE_WAIT)
        rows = rows_named(spans, np.isin(categories_of(spans.names), joint), _SPANS)
        visits = _visits_of(spans, threads, rows)
        source = "spans of collectives and barriers"
    visits = visits.only(_match(visits, uncertainty_ns(spans))[0])
    first = int(visits.set.max(initial=0)) + 1
    waiting = _waiting_stages(spans, threads, visits)
    if len(waiting.chain):
        stages = ", ".join(spans.names[code] for code in np.unique(waiting.name).tolist())
        told = f"stages that include waiting ({stages})"
        source = f"{source} and {told}" if len(visits.chain) else told
        waiting = waiting._replace(set=waiting.set + first)
        visits = _Visits(*(np.concatenate(pair) for pair in zip(visits, waiting, strict=True)))
    return _to_sync_points(visits, first, (*names,), source, uncertainty_ns(spans))


def _to_sync_points(
    visits: _Visits, first: int, names: tuple[str, ...], source: str, unsure_ns: int | None
) -> SyncPoints:
    """Match the visits and sort them by chain; sets from ``first`` on are whole stages.

    Leaves out sync points with a visit that starts inside another visit of its chain. A whole stage
    is left when the first rank leaves it, as far as clocks show that: what the others still do in
    it is their own work.
    """
    at, group = _match(visits, None)
    outer = ~np.isin(group, group[_inside_another(visits.only(at))])
    at, group = at[outer], np.unique(group[outer], return_inverse=True)[1]
    order = np.lexsort((visits.start_ns[at], visits.chain[at]))
    visits, group = visits.only(at[order]), group[order]
    size = np.bincount(group)
    step, whole_stage = np.zeros(len(size), dtype=np.int64), np.zeros(len(size), dtype=bool)
    step[group], whole_stage[group] = visits.step, visits.set >= first
    if unsure_ns is not None:
        left = np.full(len(size), np.iinfo(np.int64).max)
        np.minimum.at(left, group, visits.end_ns)
        end = np.maximum(np.minimum(visits.end_ns, left[group] + unsure_ns), visits.start_ns)
        visits = visits._replace(end_ns=np.where(whole_stage[group], end, visits.end_ns))
    shortest = np.full(len(size), np.iinfo(np.int64).max)
    np.minimum.at(shortest, group, visits.end_ns - visits.start_ns)
    columns = (visits.chain, visits.start_ns, visits.end_ns, group, visits.row, visits.name)
    source = source if len(size) else ""
    return SyncPoints(*columns, step, size, shortest, whole_stage, names, source)


def _visits_of(spans: Spans, threads: Int64s, rows: Int64s) -> _Visits:
    rows = rows[np.isin(spans.thread[rows], threads)]
    chain, name = np.searchsorted(threads, spans.thread[rows]), spans.name[rows]
    times = spans.start_ns[rows], spans.end_ns[rows]
    return _Visits(chain, spans.step[rows], name, rows, name, *times)


def _visits_in_table(spans: Spans, threads: Int64s, names: list[str]) -> _Visits | None:
    """Return the visits that a table of collectives lists, or None; append its names."""
    found = next((name for name in _TABLES if name in spans.tables), "")
    table = spans.try_table(found, [])
    if table is None or not len(table.rows) or "step" not in [c.name for c in table.columns]:
        return None
    rank, step, start, took = (
        table.numbers(name, -1) for name in ("rank", "step", "start", "duration")
    )
    group, (what, operations) = table.texts("group")[0], table.texts(_TABLES[found])
    ranks = np.array([spans.threads[thread].rank for thread in threads.tolist()])
    first = np.unique(ranks, return_index=True)
    place = np.minimum(np.searchsorted(first[0], rank), len(first[0]) - 1)
    keep = (first[0][place] == rank) & (start >= 0) & (took >= 0) & (group >= 0) & (what >= 0)
    keep &= step >= int(spans.step.min(initial=0))
    name, one = len(names) + what[keep], group[keep] * len(operations) + what[keep]
    names += operations
    chain, start, took = first[1][place[keep]], start[keep], took[keep]
    visits = _Visits(chain, step[keep], one, np.full(len(one), -1), name, start, start + took)
    return visits.only(np.argsort(start, kind="stable"))


def _waiting_stages(spans: Spans, threads: Int64s, known: _Visits) -> _Visits:
    """Return the spans of stages that include waiting, unless a sync point inside explains it."""
    found = stage_rows(spans, recent(spans, _MAX_SPANS_LEARNED)[0])
    feeds, received = categories_of(spans.names) == Category.DATA_WAIT, np.zeros(0, np.int64)
    if has_handoffs(spans):
        received = weight_updates(spans).received
    parts = [_Visits(*np.zeros((7, 0), dtype=np.int64))]
    for number, ranks in enumerate(_roles(spans) if len(found.rows) else ()):
        codes = _stages_with_waiting(spans, build_rank_matrix(spans, found, ranks))
        wanted = np.isin(np.arange(len(feeds)), codes)
        wanted &= ~(has_handoffs(spans) & feeds)
        rows = rows_named(spans, wanted, _SPANS[:1])
        rows = rows[np.isin(spans.rank[rows], ranks) & ~np.isin(rows, received)]
        own = _visits_of(spans, threads, rows)
        own = own._replace(set=own.set + number * len(spans.names))
        explained = np.isin(own.name, own.name[_contains(own, known)])
        parts.append(own.only(~explained))
    return _Visits(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _roles(spans: Spans) -> Iterator[Sequence[int]]:
    """Yield the ranks of each role that has several."""
    roles: dict[str, list[int]] = {}
    for rank, header in spans.headers.items():
        roles.setdefault(header.role, []).append(rank)
    yield from (ranks for ranks in roles.values() if len(ranks) > 1)


def _stages_with_waiting(spans: Spans, matrix: RankMatrix) -> Int64s:
    """Return the codes of stages in which `detect_waits` finds waiting."""
    if len(matrix.stage) == 0 or len(matrix.steps) < 2:
        return np.zeros(0, dtype=np.int64)
    tokens = matrix.counter(spans, "tokens")
    if tokens is not None and np.isnan(tokens[~np.isnan(matrix.own_ns)]).any():
        tokens = None
    explained = np.full(matrix.own_ns.shape, np.nan)
    for slot in range(len(matrix.stage)):
        work = [] if tokens is None else [tokens[:, :, slot]]
        explained[:, :, slot] = expected(matrix.own_ns[:, :, slot], work)
    one_clock = uncertainty_ns(spans, matrix.ranks.tolist()) == 0
    return matrix.stage[detect_waits(matrix, explained, tokens, one_clock=one_clock).bound]


def _contains(outer: _Visits, inner: _Visits) -> Mask:
    """Mark the visits inside which one of the others starts."""
    inner = inner.only(np.lexsort((inner.start_ns, inner.chain)))
    last = last_begun(inner.chain, inner.start_ns, outer.chain, outer.end_ns - 1)
    found: Mask = np.append(inner.start_ns, np.iinfo(np.int64).min)[last] >= outer.start_ns
    return found


def _match(visits: _Visits, unsure_ns: int | None) -> tuple[Int64s, Int64s]:
    """Return the visits that have counterparts, by index, and the sync point of each.

    Args:
        visits: Visits to possible sync points.
        unsure_ns: Clock uncertainty: visits that are further apart don't match; None: don't check.
    """
    order, heads = match_occurrences((visits.step, visits.set), visits.chain, visits.start_ns)
    size = group_sizes(heads, len(order))
    fits = np.ones(len(heads), dtype=bool)
    if unsure_ns is not None:
        last = np.maximum.reduceat(visits.start_ns[order], heads)
        fits = last <= np.minimum.reduceat(visits.end_ns[order], heads) + unsure_ns
    whole = np.repeat(fits, size)
    return order[whole], np.repeat(np.arange(fits.sum()), size[fits])


def _inside_another(visits: _Visits) -> Int64s:
    """Return the visits that start inside another visit of their chain, by index."""
    order = np.lexsort((-visits.end_ns, visits.start_ns, visits.chain))
    visits = visits.only(order)
    width = int(visits.end_ns.max(initial=0)) - int(visits.start_ns.min(initial=0)) + 1
    shift = visits.chain * width
    latest = np.maximum.accumulate(visits.end_ns + shift)
    return order[1:][(visits.start_ns + shift)[1:] < latest[:-1]]


def uncertainty_ns(spans: Spans, ranks: Iterable[int] | None = None) -> int | None:
    """Return the ±u of numbers that compare these ranks' clocks, None if it is unknown.

    It is 0 on one host, and else the sum over the two hosts with the largest uncertainty.

    Args:
        spans: The run.
        ranks: Ranks whose times are compared; None: all.
    """
    chosen = set(spans.headers if ranks is None else ranks)
    clocks: dict[object, object] = {rank: header.host for rank, header in spans.headers.items()}
    unsure: dict[object, object] = {}
    if (table := spans.try_table("clocks", [])) is not None:
        clocks |= dict(zip(table.column("rank"), table.column("clock"), strict=True))
        unsure = dict(zip(table.column("rank"), table.column("uncertainty"), strict=True))
    if len({clocks.get(rank) for rank in chosen}) < 2:
        return 0
    worst: dict[object, int] = {}
    for rank in chosen:
        own = unsure.get(rank)
        if not isinstance(own, int):
            return None
        worst[clocks[rank]] = max(worst.get(clocks[rank], 0), own)
    return sum(sorted(worst.values())[-2:])


def is_within_uncertainty(effect_ns: int, unsure_ns: int | None) -> bool:
    """Return whether an effect is smaller than the clock uncertainty, or that is unknown.

    Example::

        >>> is_within_uncertainty(5, 0), is_within_uncertainty(-5, 8)
        (False, True)
    """
    return unsure_ns is None or abs(effect_ns) < unsure_ns


def unsynchronized_clocks(spans: Spans) -> str:
    """Return which hosts' clocks were not synchronized; "" if all were, or for one host."""
    if uncertainty_ns(spans) is not None:
        return ""
    hosts = sorted({header.host for header in spans.headers.values()})
    if "" in hosts:
        return "the hosts of some ranks are unknown and clocks were not synchronized"
    return f"clocks of {listed(hosts, 'host')} were not synchronized"


def uncertainty_note(spans: Spans, what: str) -> str:
    """Return the note with the ±u of numbers that compare all ranks, "" if that is 0.

    Args:
        spans: The run.
        what: The numbers, as the sentence starts.
    """
    unsure = uncertainty_ns(spans)
    if unsure is None:
        return f"{what}: may be off by milliseconds, because {unsynchronized_clocks(spans)}."
    return f"{what}: ±{unsure / 1e6:.3f} ms." if unsure else ""
