"""Where ranks wait for one another: collectives, barriers, and stages that hold waiting."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.clock_uncertainty import uncertainty_ns
from lightning_rlprof.analysis.statistics.robust import expected
from lightning_rlprof.analysis.step_selection import recent
from lightning_rlprof.analysis.stragglers.rank_matrix import Lineup, line_up, stage_rows
from lightning_rlprof.analysis.stragglers.wait_detection import waits
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, group_sizes
from lightning_rlprof.tables.occurrences import match_occurrences
from lightning_rlprof.tables.spans import Spans

_TABLES = {"collectives": "operation", "communication": "operator"}
_SPANS = (KINDS.index("stage"), KINDS.index("region"))
_LEARNED = 100_000  # spans from which is learned which stages hold waiting


@dataclass(frozen=True, eq=False)
class Joins:
    """Joins, and who attended them when; attendances by chain and start, never overlapping.

    Attributes:
        chain: Index of the thread that attended.
        start_ns: When it came, by its own clock.
        end_ns: When it went on.
        group: Which join it was.
        name: Index into ``names``.
        step: RL step of each join.
        size: How many attended each join, two or more.
        transfer_ns: The shortest stay in each join, which is that of the last one to come.
        waits: Joins that are a whole stage: its shortest stay holds the last one's own work, too.
        names: The run's names, then those that only a table has.
        source: What told the joins.
    """

    chain: Int64s
    start_ns: Int64s
    end_ns: Int64s
    group: Int64s
    name: Int64s
    step: Int64s
    size: Int64s
    transfer_ns: Int64s
    waits: Mask
    names: tuple[str, ...]
    source: str


class _Stays(NamedTuple):
    """Possible joins; those of one ``set`` and ``step`` are matched by their order."""

    chain: Int64s
    step: Int64s
    set: Int64s
    name: Int64s
    start_ns: Int64s
    end_ns: Int64s

    def only(self, kept: Int64s | Mask) -> "_Stays":
        """Return some of them."""
        return _Stays(*(each[kept] for each in self))


def joins(spans: Spans, threads: Int64s, *, fed: bool = False) -> Joins:
    """Find the joins of some threads, one per chain: a table's, else spans', and waiting stages.

    The n-th of a name in a step is the same for all chains that have as many of them. A stage that
    is found to hold waiting, and has no join inside, is one as a whole: its shortest stay holds the
    last one's own work, too.

    Args:
        spans: The run.
        threads: The threads.
        fed: Whether it is told who waits for which sample: then such waiting is no join of those
            who wait for the same one.
    """
    names = [*spans.names]
    stays, source = _listed(spans, threads, names), "collectives table"
    if stays is None or not len(stays.chain):
        stays, source = _named(spans, threads), "spans of collectives and barriers"
    stays = stays.only(_matched(stays, uncertainty_ns(spans))[0])
    waiting, first = _waiting(spans, threads, stays, fed), int(stays.set.max(initial=0)) + 1
    if len(waiting.chain):
        told = f"stages that include waiting ({_listing(spans, waiting)})"
        source = f"{source} and {told}" if len(stays.chain) else told
        waiting = waiting._replace(set=waiting.set + first)
        stays = _Stays(*(np.concatenate(pair) for pair in zip(stays, waiting, strict=True)))
    stays = _outermost(stays)
    return _joins(stays, *_matched(stays, None), first, (*names,), source)


def _joins(
    stays: _Stays, at: Int64s, group: Int64s, first: int, names: tuple[str, ...], source: str
) -> Joins:
    """Sort what is matched; of sets from the first one on the stages wait as a whole."""
    order = np.lexsort((stays.start_ns[at], stays.chain[at]))
    stays, group = stays.only(at[order]), group[order]
    size = np.bincount(group)
    step = np.zeros(len(size), dtype=np.int64)
    step[group] = stays.step
    held = np.zeros(len(size), dtype=bool)
    held[group] = stays.set >= first
    shortest = np.full(len(size), np.iinfo(np.int64).max)
    np.minimum.at(shortest, group, stays.end_ns - stays.start_ns)
    columns = (stays.chain, stays.start_ns, stays.end_ns, group, stays.name)
    return Joins(*columns, step, size, shortest, held, names, source if len(size) else "")


def _listing(spans: Spans, stays: _Stays) -> str:
    return ", ".join(spans.names[code] for code in np.unique(stays.name).tolist())


def _named(spans: Spans, threads: Int64s) -> _Stays:
    """Return spans whose names are those of collectives or barriers."""
    joint = np.isin(categories_of(spans.names), (Category.COMMUNICATION, Category.COLLECTIVE_WAIT))
    return _stays(spans, threads, np.flatnonzero(joint[spans.name] & np.isin(spans.kind, _SPANS)))


def _stays(spans: Spans, threads: Int64s, rows: Int64s) -> _Stays:
    rows = rows[np.isin(spans.thread[rows], threads)]
    chain, name = np.searchsorted(threads, spans.thread[rows]), spans.name[rows]
    times = spans.start_ns[rows], spans.end_ns[rows]
    return _Stays(chain, spans.step[rows], name, name, *times)


def _listed(spans: Spans, threads: Int64s, names: list[str]) -> _Stays | None:
    """Return what a table lists as collectives, None without one; its names are appended."""
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
    stays = _Stays(chain, step[keep], one, name, start, start + took)
    return stays.only(np.argsort(start, kind="stable"))


def _waiting(spans: Spans, threads: Int64s, known: _Stays, fed: bool) -> _Stays:
    """Return the spans of stages that hold waiting, where no join inside of them explains it."""
    some, _ = recent(spans, _LEARNED)
    found = stage_rows(some)
    parts, feeds = [], np.flatnonzero(fed & (categories_of(spans.names) == Category.DATA_WAIT))
    for number, ranks in enumerate(_roles(spans)):
        codes = list(_bound(some, line_up(some, found, ranks))) if len(found.rows) else []
        mine = np.isin(spans.name, codes) & np.isin(spans.rank, ranks)
        own = _stays(spans, threads, np.flatnonzero(mine & (spans.kind == _SPANS[0])))
        own = own._replace(set=own.set + number * len(spans.names))
        explained = np.append(feeds, own.name[_holds(own, known)])
        parts.append(own.only(~np.isin(own.name, explained)))
    empty = _Stays(*np.zeros((6, 0), dtype=np.int64))
    return _Stays(*(np.concatenate(each) for each in zip(empty, *parts, strict=True)))


def _roles(spans: Spans) -> Iterator[Sequence[int]]:
    """Yield the ranks of each role that has several."""
    roles: dict[str, list[int]] = {}
    for rank, header in spans.headers.items():
        roles.setdefault(header.role, []).append(rank)
    yield from (ranks for ranks in roles.values() if len(ranks) > 1)


def _bound(spans: Spans, lineup: Lineup) -> Iterator[int]:
    """Yield the codes of stages that `waits` finds to hold waiting."""
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
    held = waits(lineup, explained, tokens, one_clock=one_clock)
    yield from np.unique(lineup.stage[held.bound]).tolist()


def _holds(outer: _Stays, inner: _Stays) -> Mask:
    """Tell which stays have one of the others beginning inside."""
    order = np.lexsort((inner.start_ns, inner.chain))
    chain, start = inner.chain[order], inner.start_ns[order]
    found = np.zeros(len(outer.chain), dtype=bool)
    for each in np.unique(outer.chain).tolist():
        mine, theirs = outer.chain == each, start[chain == each]
        first = np.searchsorted(theirs, outer.start_ns[mine])
        found[mine] = first < np.searchsorted(theirs, outer.end_ns[mine])
    return found


def _matched(stays: _Stays, unsure_ns: int | None) -> tuple[Int64s, Int64s]:
    """Return the stays that have a counterpart, by index, and which join each of them is.

    Args:
        stays: Possible joins; those of one set and step come by start on each chain.
        unsure_ns: How far their times may be off; None where they cannot be compared.
    """
    order, heads = match_occurrences((stays.step, stays.set), stays.chain, stays.start_ns)
    size = group_sizes(heads, len(order))
    fits = np.ones(len(heads), dtype=bool)
    if unsure_ns is not None:
        last = np.maximum.reduceat(stays.start_ns[order], heads)
        fits = last <= np.minimum.reduceat(stays.end_ns[order], heads) + unsure_ns
    whole = np.repeat(fits, size)
    return order[whole], np.repeat(np.arange(fits.sum()), size[fits])


def _outermost(stays: _Stays) -> _Stays:
    """Leave out joins of which an attendance begins in another one of the same chain."""
    at, group = _matched(stays, None)
    chain, start, end = stays.chain[at], stays.start_ns[at], stays.end_ns[at]
    low = int(start.min(initial=0))
    width = int(end.max(initial=0)) - low + 1
    start, end = (chain * width + (each - low) for each in (start, end))
    order = np.lexsort((-end, start))
    latest = np.maximum.accumulate(end[order])
    inside = np.append(False, start[order[1:]] < latest[:-1])[: len(order)]
    bad = np.zeros(int(group.max(initial=-1)) + 1, dtype=bool)
    bad[group[order[inside]]] = True
    return stays.only(at[~bad[group]])
