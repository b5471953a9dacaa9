"""Rollouts with a span per request, and how long they would take after a change."""

import heapq
from dataclasses import dataclass

import numpy as np

from lightning_rlprof.analysis.steps.partition import containing_step
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import NO_PARENT, Spans

_MIN_REQUESTS = 4  # A rollout of fewer has no tail.
_KINDS = (KINDS.index("stage"), KINDS.index("region"))


@dataclass(frozen=True, eq=False)
class RolloutRequests:
    """The requests of each rollout, ordered by rollout and start.

    Attributes:
        row: Row of each rollout's stage, ascending.
        first: Index of its first request; the last entry is the number of requests.
        request: Row of each request.
        start_ns: When each request was sent.
        end_ns: When its response was complete.
        tokens: Tokens that it counted, or -1.
    """

    row: Int64s
    first: Int64s
    request: Int64s
    start_ns: Int64s
    end_ns: Int64s
    tokens: Int64s

    def of(self, at: int) -> slice:
        """Return the requests of one rollout."""
        return slice(int(self.first[at]), int(self.first[at + 1]))


def find_requests(spans: Spans, rows: Int64s) -> RolloutRequests | None:
    """Find the requests of the rollouts among some stages; None if no rollout has four.

    A request is an innermost rollout span that starts within the stage, on any thread of its rank.
    """
    rollout = categories_of(spans.names)[spans.name] == Category.ROLLOUT
    return requests_within(spans, rows[rollout[rows]])


def requests_within(spans: Spans, rows: Int64s) -> RolloutRequests | None:
    """Find the requests that start within some spans, which are not among them, as above."""
    rollout = categories_of(spans.names)[spans.name] == Category.ROLLOUT
    there = np.flatnonzero(rollout & np.isin(spans.kind, _KINDS))
    own = there[~np.isin(there, rows)]
    width = int(spans.id.max(initial=0)) + 2
    inner = spans.parent[own] != NO_PARENT
    around = spans.rank[own[inner]] * width + spans.parent[own[inner]]
    own = own[~np.isin(spans.rank[own] * width + spans.id[own], around)]
    place = containing_step(spans, rows, own, spans.rank)
    own, stage = own[place >= 0], rows[place[place >= 0]]
    used, count = np.unique(stage, return_counts=True)
    keep = np.isin(stage, used[count >= _MIN_REQUESTS])
    own, stage = own[keep], stage[keep]
    if not len(own):
        return None
    row, first = np.unique(stage, return_index=True)
    times = (spans.start_ns[own], spans.end_ns[own])
    return RolloutRequests(
        row, np.append(first, len(own)), own, *times, spans.per_row("tokens", rows=own)
    )


def slots(start_ns: Int64s, end_ns: Int64s) -> int:
    """Return the largest number of requests that ran at the same time."""
    ended = np.searchsorted(np.sort(end_ns), np.sort(start_ns), "right")
    return int((np.arange(1, len(ended) + 1) - ended).max(initial=1))


def makespan(ns: Int64s, slots: int) -> int:
    """Return when the last request ends if each starts, in order, as soon as a slot is free.

    List scheduling (Graham 1966); one step per request.

    Example::

        >>> makespan(np.array([3, 3, 2, 2]), 2)
        5
    """
    free = [0] * slots
    for each in ns.tolist():
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def stopped_at(found: RolloutRequests, share: float) -> Int64s:
    """Return what each rollout saves if it stops when this share of its requests is answered."""
    saved = []
    for at in range(len(found.row)):
        ends = np.sort(found.end_ns[found.of(at)])
        saved.append(int(ends[-1] - ends[max(int(np.ceil(share * len(ends))), 1) - 1]))
    return np.array(saved, dtype=np.int64)


def replicas_added(found: RolloutRequests, step: Int64s, replicas: int) -> Int64s:
    """Return what each rollout saves with more replicas, each like one that exists.

    The requests of all rollouts of a step are shared among all slots.

    Args:
        found: The requests.
        step: RL step of each rollout.
        replicas: Number of replicas to add.
    """
    took, saved = found.end_ns - found.start_ns, np.zeros(len(found.row), dtype=np.int64)
    for each in np.unique(step).tolist():
        mine = np.flatnonzero(step == each)
        parts = [found.of(at) for at in mine.tolist()]
        many = sum(slots(found.start_ns[own], found.end_ns[own]) for own in parts)
        jobs = np.concatenate([took[own] for own in parts])
        order = np.argsort(np.concatenate([found.start_ns[own] for own in parts]), kind="stable")
        before = makespan(jobs[order], many)
        after = makespan(jobs[order], max(round(many * (1 + replicas / len(parts))), 1))
        left = min(after / max(before, 1), 1.0)
        whole = [int(found.end_ns[own].max() - found.start_ns[own].min()) for own in parts]
        saved[mine] = np.rint(np.array(whole) * (1 - left)).astype(np.int64)
    return saved
