"""How fast each link between two ranks moves data, and which is slow.

torch_npu records links one by one.

Two links are comparable if they have the same transport and took part in the same operation of the
same step, with sizes within a factor of two. A link's score is the median, over what was seen of
it, of the logarithm of its speed relative to comparable links. It is slow if its score is far below
those of the links that share neither end with it: a slow port slows all links of its rank. It must
also be slow more often than congestion explains, which the other links show.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.statistics.group_summary import group_medians
from lightning_rlprof.analysis.statistics.rank_tests import at_least, student_tail
from lightning_rlprof.analysis.statistics.robust import MAD_TO_SPREAD
from lightning_rlprof.tables.arrays import UNKNOWN, Float64s, Int64s, distinct_tuples
from lightning_rlprof.tables.kernels import Coded
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_COLUMNS = (
    *columns_of("count", "source", "destination"),
    *columns_of("text", "group", "transport"),
    Column("bytes", "count", "bytes"),
    Column("time", "duration", "ns"),
    Column("bandwidth", "number", "GB/s"),
    *columns_of("ratio", "of baseline", "CI low", "CI high"),
    Column("seen", "count"),
    Column("verdict", "text"),
)
_NO_LINKS = (
    "This run has no bandwidth of links. torch_npu.profiler records it from level1 on "
    "(integrated: {profile_level: level1})."
)
_NUMBERED = "In rows with a group, a rank that recorded nothing has its number within that group."
_MAX_LINKS_NAMED = 3
SLOWER = 0.9
"""A link is slow if it certainly has less than this part of the baseline's speed."""

EXCLUDED = 0.75
"""A link is ok if it certainly has more than this part."""

SEEN = 3
"""A link is called slow if it was seen at least so often: congestion comes and goes."""

MIN_OTHER_LINKS = 3
"""Links that a link is compared with, at least."""

_ALPHA = 0.01  # In 1% of healthy runs, some link is called slow.
_CONGESTION_LEVEL = 0.001  # Congestion alone is taken for a slow link this often.
_MIN_SPREAD = 0.02  # Timers and chunks alone make links differ by this much.
_MAX_OTHER_LINKS = 2_000
_TAIL = np.geomspace(1e-3, 1e6, 4_000)


class End(NamedTuple):
    """An end of a link: its rank, or if that is unknown its number in a group, as ``#3``."""

    group: int
    number: int
    name: str


class LinkSpeed(NamedTuple):
    """A link between two ranks, as a row of `links` has it; ``ratio`` is ``of baseline``."""

    source: End
    destination: End
    transport: str | None
    size: int
    time: int
    ratio: float | None
    verdict: str


def links(spans: Spans, *, ranks: Collection[int] | None = None) -> Table:
    """Show the bandwidth of each link between two ranks, the slowest first, and name slow ones.

    ``bandwidth`` is bytes over the time in which the link moved them, over all collectives and
    steps. ``of baseline`` compares it with links of the same transport, in the same operations and
    steps, with sizes within a factor of two; ``CI low`` and ``CI high`` hold for all links together
    at 99%. ``verdict``: "slow" below 0.9, "ok" above 0.75, else "inconclusive". Copies inside a
    device are left out. If the rank at an end is unknown, its number within the ``group`` of the
    row is shown.

    Args:
        spans: The run.
        ranks: Only what these recorded; None for all.
    """
    notes: list[str] = []
    seen = _seen(spans, ranks, notes)
    if seen is None:
        return Table("links", _COLUMNS, abstained=" ".join([_NO_LINKS, *notes]))
    found = judge(seen)
    rows = [_row(found, seen, at) for at in _slowest_first(found)]
    return Table("links", _COLUMNS, rows, _note(spans, found, seen, notes))


def link_speeds(spans: Spans) -> tuple[list[LinkSpeed], str]:
    """Return the rows of `links` with the names of their ends, and its note or why it has none."""
    notes: list[str] = []
    seen = _seen(spans, None, notes)
    if seen is None:
        return [], " ".join([_NO_LINKS, *notes])
    found = judge(seen)
    names, transports = _names(found, seen, {}), [*seen.transport[1], None]
    speeds = []
    for at in _slowest_first(found):
        groups, numbers = found.groups[:, at].tolist(), found.ends[:, at].tolist()
        source, destination = map(End, groups, numbers, names[at])
        transport, size, time = transports[found.transport[at]], found.size[at], found.time[at]
        ratio = None if np.isnan(found.score[at]) else float(np.exp(found.score[at]))
        own = (transport, int(size), int(time), ratio, found.verdict[at])
        speeds.append(LinkSpeed(source, destination, *own))
    return speeds, _note(spans, found, seen, notes)


@dataclass(frozen=True, eq=False)
class Links:
    """One row per link and transport.

    Attributes:
        ends: Ranks at both ends, or numbers in a group, as in `Observations`; shape (2, n).
        groups: The group whose number an end is, else `UNKNOWN`; shape (2, n).
        transport: Code of the transport.
        size: Bytes in all.
        time: Nanoseconds in all.
        seen: How often.
        below: How often it was slower than `SLOWER` of what did the same.
        score: Logarithm of its speed relative to the baseline; NaN if nothing is comparable.
        low: Lower end of the interval of the score; all intervals hold together at 99%.
        high: Upper end.
        others: How many links it was compared with.
        verdict: Whether it is "slow", "ok" or "inconclusive".
    """

    ends: Int64s
    groups: Int64s
    transport: Int64s
    size: Int64s
    time: Int64s
    seen: Int64s
    below: Int64s
    score: Float64s
    low: Float64s
    high: Float64s
    others: Int64s
    verdict: Sequence[str]


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
    """

    ends: Int64s
    groups: Int64s
    group_names: Sequence[str]
    transport: Coded
    operation: Coded
    step: Int64s
    size: Int64s
    time: Int64s


def _seen(spans: Spans, ranks: Collection[int] | None, notes: list[str]) -> Observations | None:
    table = spans.try_table("links", notes)
    return None if table is None else observe(table, ranks)


def _slowest_first(found: Links) -> list[int]:
    score = np.where(np.isnan(found.score), np.inf, found.score)
    order: list[int] = np.lexsort((*found.ends[::-1], found.size / found.time, score)).tolist()
    return order


def _note(spans: Spans, found: Links, seen: Observations, notes: Sequence[str]) -> str:
    hosts = {rank: header.host for rank, header in spans.headers.items()}
    text = _conclude(found, seen, _names(found, seen, hosts), _slowest_first(found))
    numbered = [_NUMBERED] * bool((found.groups != UNKNOWN).any())
    return " ".join([text, *notes, *numbered])


def _row(found: Links, seen: Observations, at: int) -> tuple[Cell, ...]:
    group, transport = int(found.groups[:, at].max()), int(found.transport[at])
    scores = (float(each[at]) for each in (found.score, found.low, found.high))
    return (
        *found.ends[:, at].tolist(),
        seen.group_names[group] if group >= 0 else None,
        seen.transport[1][transport] if transport >= 0 else None,
        int(found.size[at]),
        int(found.time[at]),
        float(found.size[at] / found.time[at]),  # Bytes per ns are GB/s.
        *(None if np.isnan(score) else float(np.exp(score)) for score in scores),
        int(found.seen[at]),
        found.verdict[at],
    )


def _names(found: Links, seen: Observations, hosts: Mapping[int, str]) -> list[tuple[str, ...]]:
    """Return the ranks at the ends of each link, with hosts if there are several.

    ``#3`` is number 3 of a group; with several groups the group's name stands before it.
    """
    only = len(np.unique(found.groups[found.groups != UNKNOWN])) == 1
    several = len({*hosts.values()}) > 1

    def name(group: int, number: int) -> str:
        if group != UNKNOWN:
            return f"{'' if only else seen.group_names[group]}#{number}"
        host = hosts.get(number) if several else None
        return f"{number} ({host})" if host else str(number)

    sides = zip(found.groups.tolist(), found.ends.tolist(), strict=True)
    return [*zip(*(map(name, *side) for side in sides), strict=True)]


def _conclude(
    found: Links, seen: Observations, names: list[tuple[str, ...]], order: Sequence[int]
) -> str:
    """Name the slow links with their evidence, or say that there are none, or what is missing.

    All links of one rank are named as that rank's.
    """
    slow = [at for at in order if found.verdict[at] == "slow"]
    every, own = (Counter(name for at in some for name in names[at]) for some in (order, slow))
    ports = {name for name, count in own.items() if count == every[name] > 2}
    texts = []
    for name in sorted(ports):
        part = float(np.exp(np.median([found.score[at] for at in slow if name in names[at]])))
        texts.append(
            f"All {own[name]} links of rank {name} are slow, {part:.2f}x the speed of comparable "
            "ones: check its port or network card."
        )
    rest = [at for at in slow if ports.isdisjoint(names[at])]
    texts += [_described(found, seen, names[at], at) for at in rest[:_MAX_LINKS_NAMED]]
    if len(rest) > _MAX_LINKS_NAMED:
        texts.append(f"{len(rest) - _MAX_LINKS_NAMED} more links are slow, see the column verdict.")
    if undecided := found.verdict.count("inconclusive"):
        texts.append(
            f"Inconclusive: {undecided} of {len(order)} links, with fewer than {MIN_OTHER_LINKS} "
            "others to compare with, or with speeds that vary, as under congestion. Capture more "
            "ranks or steps."
        )
    return " ".join(texts) or (
        f"No slow link: each of {len(order)} links has more than {EXCLUDED:g}x the speed of "
        "comparable ones (99% CI)."
    )


def _described(found: Links, seen: Observations, names: tuple[str, ...], at: int) -> str:
    ratio, low, high = (float(np.exp(each[at])) for each in (found.score, found.low, found.high))
    code = int(found.transport[at])
    over = f" over {seen.transport[1][code]}" if code >= 0 else ""
    return (
        f"Slow link: rank {' to rank '.join(names)}{over}, "
        f"{found.size[at] / found.time[at]:.4g} GB/s, {ratio:.2f}x the speed of "
        f"{found.others[at]} links in the same operations and sizes (99% CI {low:.2f}\u2013"
        f"{high:.2f}), slower in {found.below[at]} of {found.seen[at]} observations."
    )


def judge(seen: Observations) -> Links:
    """Sum up what was seen of each link, and compare it with the links that did the same."""
    keys = np.stack([*seen.ends, *seen.groups, seen.transport[0]])
    heads, link = distinct_tuples(keys)
    count = heads.shape[1]
    amounts = np.zeros((2, count), np.int64)
    for amount, column in zip(amounts, (seen.size, seen.time), strict=True):
        np.add.at(amount, link, column)
    ends, groups, transport = heads[:2], heads[2:4], heads[4]
    relative = _relative(seen, link)
    known = ~np.isnan(relative)
    below = np.bincount(link[known], relative[known] < np.log(SLOWER), count).astype(np.int64)
    times = np.bincount(link[known], minlength=count)
    score = group_medians(link[known], relative[known], count)
    score, low, high, others, chance = _compare(score, below, times, ends, groups, transport)
    seen_of = np.bincount(link, minlength=count)
    slower = high < np.log(SLOWER)
    slow = slower & (seen_of >= SEEN) & (chance * count < _CONGESTION_LEVEL)
    ok = ~slower & (low > np.log(EXCLUDED))
    verdict = np.select([slow, ok], ["slow", "ok"], "inconclusive").tolist()
    (size, time), own = amounts, (seen_of, below, score, low, high, others, verdict)
    return Links(ends, groups, transport, size, time, *own)


def _relative(seen: Observations, link: Int64s) -> Float64s:
    """Return the logarithm of each speed relative to the links that did the same, NaN if alone."""
    speed = np.log(seen.size / seen.time)
    bucket = np.round(np.log2(seen.size)).astype(np.int64)
    same = np.stack([seen.transport[0], seen.operation[0], seen.step, bucket])
    _, cell = distinct_tuples(same)
    (cells, _), of_pair = distinct_tuples(np.stack([cell, link]))
    own = group_medians(of_pair, speed, len(cells))
    usual = group_medians(cells, own, int(cells.max()) + 1)
    return np.where((np.bincount(cells) < 2)[cell], np.nan, speed - usual[cell])


def _compare(
    score: Float64s,
    below: Int64s,
    times: Int64s,
    ends: Int64s,
    groups: Int64s,
    transport: Int64s,
) -> tuple[Float64s, Float64s, Float64s, Int64s, Float64s]:
    """Return score, interval, number of links compared with, and chance, of each link."""
    places = np.stack([groups.reshape(-1), ends.reshape(-1)])
    node = distinct_tuples(places)[1].reshape(2, -1)
    found, margin = np.full(len(score), np.nan), np.full(len(score), np.nan)
    others, chance = np.zeros(len(score), np.int64), np.ones(len(score))
    known = np.flatnonzero(~np.isnan(score))
    for code in np.unique(transport[known]).tolist():
        rows = known[transport[known] == code]
        if len(rows) <= MIN_OTHER_LINKS:
            continue
        pool = rows
        if len(rows) > _MAX_OTHER_LINKS:
            pool = np.random.default_rng(0).choice(rows, _MAX_OTHER_LINKS, replace=False)
        for row in rows.tolist():
            away = pool[~np.isin(node[:, pool], node[:, row]).any(axis=0)]
            if len(away) < MIN_OTHER_LINKS:
                away = pool[pool != row]
            others[row] = len(away)
            found[row] = score[row] - float(np.median(score[away]))
            # One more time than was seen is counted, so that it is never zero.
            rate = (below[away].sum() + 1) / (times[away].sum() + 2)
            chance[row] = at_least(int(times[row]), float(rate))[below[row]]
        margin[rows] = _margin(found[rows], others[rows], len(known))
    return found, found - margin, found + margin, others, chance


def _margin(score: Float64s, others: Int64s, links: int) -> Float64s:
    """Return half the width of the interval of each score, at 99% for all links together.

    A median of n values has π/2 times the variance of a mean. The spread of links is the median
    deviation, so few slow links don't widen it; it counts as half as many degrees of freedom as
    there are links. The tests on healthy runs confirm both.
    """
    spread = max(MAD_TO_SPREAD * float(np.median(np.abs(score))), _MIN_SPREAD)
    freedom = max(len(score) / 2, 2.0)
    reach = float(np.interp(-_ALPHA / links, -student_tail(_TAIL, freedom), _TAIL))
    return np.asarray(reach * spread * np.sqrt(1 + np.pi / 2 / others))


def observe(table: Table, ranks: Collection[int] | None) -> Observations | None:
    """Return what a table ``links`` says of links between ranks, None if it says nothing.

    Args:
        table: One row for each operation and link.
        ranks: Only what these recorded; None for all.
    """
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
