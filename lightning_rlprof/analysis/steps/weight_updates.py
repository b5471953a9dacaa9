"""Which ranks send new weights and which receive them, and what is unknown about that.

A stage of a weight sync is marked where the weights are sent, where they arrive, or on both sides.
So its name alone does not tell the direction: what else the rank does tells it.
"""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.listing import listed
from lightning_rlprof.analysis.steps.time_categories import Category, categories_of, kind_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.intervals import NONE, Enclosing, edges, last_begun
from lightning_rlprof.tables.spans import Spans, rows_named

_WORK = (KINDS.index("stage"), KINDS.index("region"))
_MARK = KINDS.index("mark")


class WeightUpdates(NamedTuple):
    """Rows of a run in which weights are sent and received; each ascends.

    Attributes:
        sent: Weight syncs of ranks that send, and marks that publish a version. Without any of
            them, the training of ranks that train.
        sending_ns: How long sending may go on after each of these has ended: after training, until
            the rank does something else.
        received: Weight syncs of ranks that receive, the outermost ones. The weights are there when
            one ends; before, the rank waits.
        ranks: Ranks that receive.
        note: What is unknown, empty if nothing is.
    """

    sent: Int64s
    sending_ns: Int64s
    received: Int64s
    ranks: Int64s
    note: str


def weight_updates(spans: Spans) -> WeightUpdates:
    """Find the rows in which weights are sent and received; once per run.

    A rank that trains sends. A rank that generates and doesn't train receives, if another rank may
    send. Ranks do what their stages say, else what their role says. Other ranks count as senders.
    """
    return spans.once("weight updates", _find)


def _find(spans: Spans) -> WeightUpdates:
    categories = categories_of(spans.names)
    sync = rows_named(spans, categories == Category.WEIGHT_SYNC, _WORK)
    versions = spans.counters.get("version")
    numbered = np.zeros(0, np.int64) if versions is None else versions.rows
    marks = numbered[spans.kind[numbered] == _MARK]
    trains_in = (kind_of(name) == "training" for name in spans.names)
    is_training = np.array([*trains_in, False], bool)
    training = rows_named(spans, is_training, _WORK)
    generating = rows_named(spans, categories == Category.ROLLOUT, _WORK)
    trains, generates = _doing(spans, training, generating)
    other = ~trains & ~generates
    receives = generates & ~trains & bool((trains | other).any())
    by_rank = np.zeros(max(spans.ranks, default=-1) + 1, bool)
    by_rank[[*spans.ranks]] = receives
    here = by_rank[spans.rank]
    sent = edges(sync[~here[sync]], marks[~here[marks]])
    sending_ns = np.zeros_like(sent)
    received = _outermost(spans, sync[here[sync]])
    notes = []
    unclear = np.isin(spans.ranks, spans.rank[sync[np.isin(sync, numbered)]]) & other
    if unclear.sum() > 1:
        notes.append(
            "The direction of weight syncs is unknown on ranks "
            f"{listed(np.array(spans.ranks)[unclear].tolist())}: they neither train nor generate "
            "in a stage with a known name."
        )
    users = np.unique(spans.rank[np.append(received, numbered[here[numbered]])]).tolist()
    if not len(sent) and len(training) and users:
        sent = training[~here[training]]
        sending_ns = _until_next(spans, sent)
        name = spans.names[spans.name[sent[-1]]]
        notes.append(
            f"No sending rank marks its weight sync: new weights count as sent after {name}, until "
            "the rank does something else."
        )
    silent = [rank for rank in np.flatnonzero(by_rank).tolist() if rank not in users]
    if silent:
        notes.append(
            f"When new weights reached {listed(silent, 'rank')} is unknown. Mark weight_sync "
            "there, or pass version=... to the stage that uses them first."
        )
    return WeightUpdates(sent, sending_ns, received, np.flatnonzero(by_rank), " ".join(notes))


def _doing(spans: Spans, training: Int64s, generating: Int64s) -> tuple[Mask, Mask]:
    """Return which ranks train and which generate, by their stages, else by their role."""
    ranks = np.array(spans.ranks)
    trains, generates = (np.isin(ranks, spans.rank[rows]) for rows in (training, generating))
    for at, rank in enumerate(spans.ranks):
        if not trains[at] and not generates[at] and rank in spans.headers:
            role = spans.headers[rank].role
            trains[at] = kind_of(role) == "training" or role in ("trainer", "learner")
            generates[at] = categories_of([role])[0] == Category.ROLLOUT
    return trains, generates


def _until_next(spans: Spans, rows: Int64s) -> Int64s:
    """Return how long it takes after each row until its thread does more, or ends its step."""
    steps, more = spans.rows(kind="step"), np.flatnonzero(np.isin(spans.kind, _WORK))
    thread = np.append(spans.thread[steps], spans.thread[more])
    times = np.append(spans.end_ns[steps], spans.start_ns[more])
    order = np.lexsort((times, thread))
    thread, times = thread[order], times[order]
    found = last_begun(thread, times, spans.thread[rows], spans.end_ns[rows] - 1) + 1
    found = np.where(found > 0, found, np.searchsorted(thread, spans.thread[rows]))
    there = np.append(thread, NONE)[found] == spans.thread[rows]
    later = np.where(there, np.append(times, 0)[found], spans.end_ns[rows])
    return later - spans.end_ns[rows]


def _outermost(spans: Spans, rows: Int64s) -> Int64s:
    """Return the rows that begin in no other of them on their thread."""
    lane, start, end = spans.thread[rows], spans.start_ns[rows], spans.end_ns[rows]
    inside = Enclosing(lane, start, end).at(lane, start)
    outer: Int64s = rows[(inside == NONE) | (inside == np.arange(len(rows)))]
    return outer
