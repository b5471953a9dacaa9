"""Sync points, where ranks wait for each other: collectives, barriers, and stages with waiting."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.clock_uncertainty import uncertainty_ns
from lightning_rlprof.analysis.statistics.robust import expected
from lightning_rlprof.analysis.step_selection import recent
from lightning_rlprof.analysis.stragglers.rank_matrix import (
    RankMatrix,
    build_rank_matrix,
    stage_rows,
)
from lightning_rlprof.analysis.stragglers.wait_detection import detect_waits
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, group_sizes
from lightning_rlprof.tables.occurrences import match_occurrences
from lightning_rlprof.tables.spans import Spans

_TABLES = {"collectives": "operation", "communication": "operator"}
_SPANS = (KINDS.index("stage"), KINDS.index("region"))
_LEARNED = 100_000  # spans that are enough to detect which stages include waiting


@dataclass(frozen=True, eq=False)
class SyncPoints:
    """Sync points, and the visits of chains (one per training thread) to them.

    The first five columns have one entry per visit, by chain and start; a chain's visits never
    overlap. The next four have one entry per sync point.

    Attributes:
        chain: Chain of the visit.
        start_ns: Its arrival, by the clock of its rank.
        end_ns: When it continued.
        group: Sync point of the visit.
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
    name: Int64s
    start_ns: Int64s
    end_ns: Int64s

    def only(self, kept: Int64s | Mask) -> "_Visits":
        """Return some of them."""
        return _Visits(*(each[kept] for each in self))


def find_sync_points(spans: Spans, threads: Int64s, *, with_handoffs: bool = False) -> SyncPoints:
    """Find the sync points of training threads.

    They come from a table of collectives if there is one, else from spans with names of collectives
    and barriers. A stage that is found to include waiting, without a sync point inside, is one as a
    whole. Calls are matched by their order, see `match_occurrences`.

    Args:
        spans: The run.
        threads: Training threads, one per chain.
        with_handoffs: Whether samples or versions are counted: then a data wait is not a sync
            point of the ranks that wait for the same producer.
    """
    names = [*spans.names]
    visits, source = _visits_in_table(spans, threads, names), "collectives table"
    if visits is None or not len(visits.chain):
        visits, source = _visits_by_name(spans, threads), "spans of collectives and barriers"
    visits = visits.only(_match(visits, uncertainty_ns(spans))[0])
    waiting, first = (
        _waiting_stages(spans, threads, visits, with_handoffs),
        int(visits.set.max(initial=0)) + 1,
    )
    if len(waiting.chain):
        told = f"stages that include waiting ({_listing(spans, waiting)})"
        source = f"{source} and {told}" if len(visits.chain) else told
        waiting = waiting._replace(set=waiting.set + first)
        visits = _Visits(*(np.concatenate(pair) for pair in zip(visits, waiting, strict=True)))
    visits = _outermost(visits)
    return _to_sync_points(visits, *_match(visits, None), first, (*names,), source)


def _to_sync_points(
    visits: _Visits, at: Int64s, group: Int64s, first: int, names: tuple[str, ...], source: str
) -> SyncPoints:
    """Sort matched visits by chain; sets from ``first`` on are whole stages."""
    order = np.lexsort((visits.start_ns[at], visits.chain[at]))
    visits, group = visits.only(at[order]), group[order]
    size = np.bincount(group)
    step = np.zeros(len(size), dtype=np.int64)
    step[group] = visits.step
    whole_stage = np.zeros(len(size), dtype=bool)
    whole_stage[group] = visits.set >= first
    shortest = np.full(len(size), np.iinfo(np.int64).max)
    np.minimum.at(shortest, group, visits.end_ns - visits.start_ns)
    columns = (visits.chain, visits.start_ns, visits.end_ns, group, visits.name)
    return SyncPoints(
        *columns, step, size, shortest, whole_stage, names, source if len(size) else ""
    )


def _listing(spans: Spans, visits: _Visits) -> str:
    return ", ".join(spans.names[code] for code in np.unique(visits.name).tolist())


def _visits_by_name(spans: Spans, threads: Int64s) -> _Visits:
    """Return the spans with names of collectives or barriers."""
    joint = np.isin(categories_of(spans.names), (Category.COMMUNICATION, Category.COLLECTIVE_WAIT))
    return _visits_of(
        spans, threads, np.flatnonzero(joint[spans.name] & np.isin(spans.kind, _SPANS))
    )


def _visits_of(spans: Spans, threads: Int64s, rows: Int64s) -> _Visits:
    rows = rows[np.isin(spans.thread[rows], threads)]
    chain, name = np.searchsorted(threads, spans.thread[rows]), spans.name[rows]
    times = spans.start_ns[rows], spans.end_ns[rows]
    return _Visits(chain, spans.step[rows], name, name, *times)


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
    visits = _Visits(chain, step[keep], one, name, start, start + took)
    return visits.only(np.argsort(start, kind="stable"))


def _waiting_stages(spans: Spans, threads: Int64s, known: _Visits, with_handoffs: bool) -> _Visits:
    """Return the spans of stages that include waiting, unless a sync point inside explains it."""
    some, _ = recent(spans, _LEARNED)
    found = stage_rows(some)
    parts, feeds = (
        [],
        np.flatnonzero(with_handoffs & (categories_of(spans.names) == Category.DATA_WAIT)),
    )
    for number, ranks in enumerate(_roles(spans)):
        codes = (
            list(_stages_with_waiting(some, build_rank_matrix(some, found, ranks)))
            if len(found.rows)
            else []
        )
        mine = np.isin(spans.name, codes) & np.isin(spans.rank, ranks)
        own = _visits_of(spans, threads, np.flatnonzero(mine & (spans.kind == _SPANS[0])))
        own = own._replace(set=own.set + number * len(spans.names))
        explained = np.append(feeds, own.name[_contains(own, known)])
        parts.append(own.only(~np.isin(own.name, explained)))
    empty = _Visits(*np.zeros((6, 0), dtype=np.int64))
    return _Visits(*(np.concatenate(each) for each in zip(empty, *parts, strict=True)))


def _roles(spans: Spans) -> Iterator[Sequence[int]]:
    """Yield the ranks of each role that has several."""
    roles: dict[str, list[int]] = {}
    for rank, header in spans.headers.items():
        roles.setdefault(header.role, []).append(rank)
    yield from (ranks for ranks in roles.values() if len(ranks) > 1)


def _stages_with_waiting(spans: Spans, lineup: RankMatrix) -> Iterator[int]:
    """Yield the codes of stages in which `waits` detects waiting."""
    if len(lineup.stage) == 0 or len(lineup.steps) < 2:
        return
    tokens = lineup.counter(spans, "tokens")
    if tokens is not None and np.isnan(tokens[~np.isnan(lineup.own_ns)]).any():
        tokens = None
    work = [] if tokens is None else [tokens]
    explained = np.full(lineup.own_ns.shape, np.nan)
    for slot in range(len(lineup.stage)):
        columns = [each[:, :, slot] for each in work]
        explained[:, :, slot] = expected(lineup.own_ns[:, :, slot], columns)
    one_clock = uncertainty_ns(spans, lineup.ranks.tolist()) == 0
    whole_stage = detect_waits(lineup, explained, tokens, one_clock=one_clock)
    yield from np.unique(lineup.stage[whole_stage.bound]).tolist()


def _contains(outer: _Visits, inner: _Visits) -> Mask:
    """Mark the visits inside which one of the others starts."""
    order = np.lexsort((inner.start_ns, inner.chain))
    chain, start = inner.chain[order], inner.start_ns[order]
    found = np.zeros(len(outer.chain), dtype=bool)
    for each in np.unique(outer.chain).tolist():
        mine, theirs = outer.chain == each, start[chain == each]
        first = np.searchsorted(theirs, outer.start_ns[mine])
        found[mine] = first < np.searchsorted(theirs, outer.end_ns[mine])
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


def _outermost(visits: _Visits) -> _Visits:
    """Leave out sync points with a visit that starts inside another visit of its chain."""
    at, group = _match(visits, None)
    chain, start, end = visits.chain[at], visits.start_ns[at], visits.end_ns[at]
    low = int(start.min(initial=0))
    width = int(end.max(initial=0)) - low + 1
    start, end = (chain * width + (each - low) for each in (start, end))
    order = np.lexsort((-end, start))
    latest = np.maximum.accumulate(end[order])
    inside = np.append(False, start[order[1:]] < latest[:-1])[: len(order)]
    bad = np.zeros(int(group.max(initial=-1)) + 1, dtype=bool)
    bad[group[order[inside]]] = True
    return visits.only(at[~bad[group]])
