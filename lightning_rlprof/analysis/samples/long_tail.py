"""The long tail of rollouts: ranks idle while the last responses are generated, and why."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.samples.sample_book import SampleBook, rollout_rows, sample_book
from lightning_rlprof.analysis.statistics.group_summary import rows_by_group
from lightning_rlprof.analysis.steps.execution_mode import Mode, execution_mode
from lightning_rlprof.analysis.steps.step_selection import counted
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.analysis.whatif.rollout_requests import (
    RolloutRequests,
    find_requests,
    requests_within,
    slots,
)
from lightning_rlprof.tables.arrays import Int64s, group_starts
from lightning_rlprof.tables.intervals import alone, enclosing, holding
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

_CUTS = (0.5, 0.75, 0.9, 0.95, 0.99)
_TAIL = 0.9
_COLUMNS = (
    Column("done", "share"),
    *columns_of("duration", "left mean", "left max", "idle", unit="ns"),
    Column("share of rollout", "share"),
    Column("samples cut", "count"),
    *columns_of("share", "tokens cut"),
    *columns_of("ratio", "length cut"),
)
_NOTE = (
    "left: from when this share of a rollout's responses is complete to the end of the last. idle: "
    "rank time without a response in that time. A cut there saves `left` and loses the samples "
    "cut. length cut: their mean length over that of all."
)
_NO_REQUESTS = (
    "No rollout has a span per response. Wrap each in sample(prompt_id) with a phase, or "
    'annotate("generate") each request'
)
_TOOLS = "tools"
_CAUSES = ("long responses", "slow replica", _TOOLS, "gaps", "late start", "retry")
_CAUSE_COLUMNS = (
    Column("cause", "text"),
    Column("time", "duration", "ns"),
    Column("share", "share"),
    Column("samples", "count"),
    Column("where", "text"),
)
_CAUSE_NOTE = (
    "time: by how much the last 10% of each rollout's responses ended later than the mean; the "
    "causes add up to it. samples: those that this cause delayed most. slow replica: time beyond "
    "what the mean time per token explains. where: the tool that was late most, and its role."
)
_NO_CAUSES = "Needs rollouts of four samples or more, each with phases and tokens: see sample()"


class _Pool(NamedTuple):
    """Rollouts that end together: indices of them, and of their requests."""

    rollouts: Int64s
    requests: Int64s


def long_tail(spans: Spans) -> Table:
    """Return what rollouts cost after a share of their responses is complete, over included steps.

    Rollouts of one step end together, those of asynchronous runs each for itself. A rank has as
    many slots as responses at the same time at most; what is not in use counts as idle.

    Abstains if no rollout has four requests.
    """
    found, pools = _pools(spans)
    if found is None:
        return Table("long_tail", _COLUMNS, abstained=_NO_REQUESTS)
    took = [found.end_ns[own].max() - found.start_ns[own].min() for _, own in pools]
    ranks_ns = sum(len(pool.rollouts) * int(ns) for pool, ns in zip(pools, took, strict=True))
    rows: list[tuple[Cell, ...]] = []
    for share in _CUTS:
        left, idle, cut = [], 0, [np.zeros(0, np.int64)]
        for pool in pools:
            ends = found.end_ns[pool.requests]
            until = int(ends.max())
            order = np.argsort(ends, kind="stable")
            last = max(int(np.ceil(share * len(ends))), 1) - 1
            since = int(ends[order[last]])
            left.append(until - since)
            idle += sum(_idle_ns(found, at, since, until) for at in pool.rollouts.tolist())
            cut.append(pool.requests[order[last + 1 :]])
        lost = np.concatenate(cut)
        rows.append(
            (
                share,
                round(sum(left) / len(left)),
                max(left),
                idle,
                idle / ranks_ns if ranks_ns else None,
                len(lost),
                *_lost_tokens(found.tokens, lost),
            )
        )
    return Table("long_tail", _COLUMNS, rows, _NOTE)


def _pools(spans: Spans) -> tuple[RolloutRequests | None, list[_Pool]]:
    """Return the requests of included rollouts, and which rollouts end together."""
    steps = spans.rows(kind="step")
    included = np.unique(spans.step[steps[counted(spans, steps).mask]])
    stages = spans.rows(kind="stage")
    keep = np.isin(spans.step[stages], included) if len(included) else np.ones(len(stages), bool)
    # On a thread of its own, the phase of a sample is a stage, too, but not a rollout.
    own = stages[keep & np.isin(spans.thread[stages], spans.thread[steps])]
    found = find_requests(spans, own) or find_requests(spans, stages[keep])
    if found is None and len(steps):  # A server may have no stages around its requests.
        found = requests_within(spans, steps[np.isin(spans.step[steps], included)])
    if found is None:
        return None, []
    many = len(found.row)
    together = spans.step[found.row]
    if execution_mode(spans) == Mode.ASYNCHRONOUS:
        together = np.arange(many)
    pools = []
    for own in rows_by_group(together):
        requests = [np.arange(*found.first[at : at + 2]) for at in own.tolist()]
        pools.append(_Pool(own, np.concatenate(requests)))
    return found, pools


def _idle_ns(found: RolloutRequests, at: int, since: int, until: int) -> int:
    """Return how long a rollout's rank is idle in a stretch: the part of its slots without use."""
    own = found.of(at)
    start, end = found.start_ns[own], found.end_ns[own]
    used = np.clip(np.minimum(end, until) - np.maximum(start, since), 0, None).sum()
    return round((until - since) - int(used) / slots(start, end))


def _lost_tokens(tokens: Int64s, lost: Int64s) -> tuple[float | None, float | None]:
    known = tokens >= 0
    total = int(tokens[known].sum())
    own = tokens[lost][known[lost]]
    if not total:
        return None, None
    return int(own.sum()) / total, float(own.mean() / tokens[known].mean()) if len(own) else None


def tail_causes(spans: Spans) -> Table:
    """Return why the last tenth of each rollout's samples ended later than the mean of them.

    A sample ends at its start plus generation, tools, and gaps between its phases. Each part less
    its mean is a cause; they sum to the delay exactly. Generation is divided into tokens at the
    pool's mean time per token, and the rest. A late start of an attempt after the first is a retry.

    Abstains without samples that have phases and tokens.
    """
    book = sample_book(spans)
    found, pools = _pools(spans) if len(book) else (None, [])
    if found is None:
        return Table("tail_causes", _CAUSE_COLUMNS, abstained=_NO_CAUSES)
    parts = _parts(spans, book)
    end = np.sum(parts, axis=0)
    weight = np.zeros(len(book))
    total, main = np.zeros(len(_CAUSES), np.int64), np.zeros(len(_CAUSES), np.int64)
    for pool in pools:
        own = np.unique(book.of_row[found.request[pool.requests]])
        own = own[(own >= 0) & (book.tokens[own] >= 0)]
        if len(own) < 4:
            continue
        causes = _causes(book, own, *(part[own] for part in parts))
        first = min(int(np.ceil(_TAIL * len(own))), len(own) - 1)
        late = np.argsort(end[own], kind="stable")[first:]
        total += causes[:, late].sum(axis=1)
        np.add.at(main, causes[:, late].argmax(axis=0), 1)
        weight[own] -= len(late) / len(own)
        weight[own[late]] += 1
    if not main.any():
        return Table("tail_causes", _CAUSE_COLUMNS, abstained=_NO_CAUSES)
    whole = int(total.sum())
    where = _slowest_tool(spans, book, end, weight)
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            int(ns),
            int(ns) / whole if whole else None,
            int(count),
            where if name == _TOOLS else None,
        )
        for name, ns, count in zip(_CAUSES, total, main, strict=True)
    ]
    rows.sort(key=lambda row: -int(row[1] or 0))
    return Table("tail_causes", _CAUSE_COLUMNS, rows, _CAUSE_NOTE)


def _parts(spans: Spans, book: SampleBook) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Return start, generation, tools and gaps of each sample until its last response ended."""
    first, last = np.zeros((2, len(book)), np.int64)
    generation, tools = np.zeros((2, len(book)), np.int64)
    rows = rollout_rows(spans, book)
    of = book.of_row[rows]
    np.add.at(generation, of, _innermost_ns(spans, book, rows))
    begins = group_starts(of)
    first[of[begins]] = spans.start_ns[rows[begins]]
    np.maximum.at(last, of, spans.end_ns[rows])
    called, took = _tool_phases(spans, book, last)
    np.add.at(tools, book.of_row[called], took)
    return first, generation, tools, last - first - generation - tools


def _tool_phases(spans: Spans, book: SampleBook, last: Int64s) -> tuple[Int64s, Int64s]:
    """Return the tools of samples until their last response ended, and the time of each."""
    is_tool = (categories_of(spans.names) == Category.REWARD)[spans.name[book.rows]]
    rows = book.rows[is_tool & (spans.end_ns[book.rows] <= last[book.owner])]
    return rows, _innermost_ns(spans, book, rows)


def _innermost_ns(spans: Spans, book: SampleBook, rows: Int64s) -> Int64s:
    """Return how long each phase was the innermost of its sample.

    What a server does for a sample is inside the phase of the process that calls it.
    """
    of, start, end = book.of_row[rows], spans.start_ns[rows], spans.end_ns[rows]
    return alone(of, start, end, holding(enclosing(of, start, end), start, end))


def _slowest_tool(
    spans: Spans, book: SampleBook, last: Int64s, weight: npt.NDArray[np.float64]
) -> str | None:
    """Return which tool took the most time, weighted by sample, with its role; None if none did."""
    rows, took = _tool_phases(spans, book, last)
    names, role = np.unique([spans.headers[rank].role for rank in spans.ranks], return_inverse=True)
    role = role[np.searchsorted(spans.ranks, spans.rank[rows])]
    tools, tool = np.unique(np.stack([spans.name[rows], role]), axis=1, return_inverse=True)
    excess = np.bincount(tool.ravel(), took * weight[book.of_row[rows]])
    if not len(excess) or excess.max() <= 0:
        return None
    name, at = tools[:, excess.argmax()].tolist()
    return f"{spans.names[name]} ({names[at]})"


def _causes(
    book: SampleBook, own: Int64s, start: Int64s, generation: Int64s, tools: Int64s, gaps: Int64s
) -> Int64s:
    """Return the delay of each sample by cause: shape (causes, samples); sums are exact."""
    count, tokens = len(own), book.tokens[own]
    per_token = generation.sum() / max(int(tokens.sum()), 1)
    usual = np.rint(per_token * (tokens - tokens.mean())).astype(np.int64)
    late = start - start.sum() // count
    slow = generation - generation.sum() // count - usual
    again = book.attempt[own] > 0
    return np.stack(
        [
            usual,
            slow,
            tools - tools.sum() // count,
            gaps - gaps.sum() // count,
            np.where(again, 0, late),
            np.where(again, late, 0),
        ]
    )
