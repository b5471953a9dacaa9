"""Where a rank waits for what another one hands over: samples, and versions of the weights.

Spans and marks that carry ``sample`` are one sample's way through the job: each begins when the one
before has ended, on whichever rank. Spans that carry ``version`` begin when that version has been
published: by a weight sync or a mark that carries the same number.
"""

from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.critical_path.step_intervals import Laps
from lightning_rlprof.analysis.critical_path.sync_points import Joins
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s, Mask, differs
from lightning_rlprof.tables.spans import Spans

Times = tuple[Int64s, Int64s]

_WORK = (KINDS.index("stage"), KINDS.index("region"))
_MARK = KINDS.index("mark")
_FED = ("sample", "version")


class Handed(NamedTuple):
    """Waits, by chain and start, never overlapping; and what is handed over to end them.

    Attributes:
        chain: Index of the thread that waits.
        start_ns: When it had done what came before, by its own clock.
        end_ns: When it went on.
        name: Name of what it went on with, like ``step``.
        step: RL step of that.
        to: Of what is handed over: which wait it ends.
        giver: Index of the thread that hands over.
        given_ns: When it did, by its own clock.
        row: Row of what it had done then.
        what: Its name.
        mark: Whether that was a mark.
        given_step: Its RL step.
    """

    chain: Int64s
    start_ns: Int64s
    end_ns: Int64s
    name: Int64s
    step: Int64s
    to: Int64s
    giver: Int64s
    given_ns: Int64s
    row: Int64s
    what: Int64s
    mark: Mask
    given_step: Int64s


def is_fed(spans: Spans) -> bool:
    """Tell whether anything in a run says which sample or version of the weights it works on."""
    return any(name in spans.counters for name in _FED)


def handed(spans: Spans, threads: Int64s, met: Joins, its: Laps) -> Handed:
    """Find the waits of some threads, one per chain, that others end.

    The wait is the time before a span in which no stage and no region was open, but those that are
    called like waiting for samples. Background threads hand over as if their rank's first did.
    What came first is told from the begin of laps where these begin at joins, else by the clocks.
    """
    chain = _chains(spans, threads)
    when = _together(spans, chain, its)
    pairs = np.hstack([_samples(spans, when), _versions(spans, when)])
    giver, taker = pairs[:, (chain[pairs] >= 0).all(axis=0)]
    own = (spans.thread[taker] == threads[chain[taker]]) & (chain[taker] != chain[giver])
    giver, taker = giver[own], taker[own]
    where, until = chain[taker], spans.start_ns[taker]
    begin = _since(spans, threads, where, until)
    begin, fine = _after(met, where, begin, until)
    giver, taker, where, begin = giver[fine], taker[fine], where[fine], begin[fine]
    order = np.lexsort((spans.start_ns[taker], begin, where))
    giver, taker, where, begin = giver[order], taker[order], where[order], begin[order]
    new = differs(where, begin)
    to, last = np.cumsum(new) - 1, np.append(new[1:], True)[: len(new)]
    row = taker[last]
    waits = (where[new], begin[new], spans.start_ns[row], spans.name[row], spans.step[row])
    order = np.lexsort((-spans.end_ns[giver], chain[giver], to))
    order = order[differs(to[order], chain[giver[order]])]  # of one thread the last
    to, giver = to[order], giver[order]
    mark = spans.kind[giver] == _MARK
    given = (chain[giver], spans.end_ns[giver], giver, spans.name[giver], mark, spans.step[giver])
    return Handed(*waits, to, *given)


def _numbered(spans: Spans, name: str) -> tuple[Int64s, Int64s]:
    """Return the rows that carry a whole number, and which one it is in their order: all fit."""
    if name not in spans.counters:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    rows, values = spans.counters[name]
    keep = np.isin(spans.kind[rows], (*_WORK, _MARK))
    rows, values = rows[keep], values[keep]
    if values.dtype != np.int64:
        whole = [isinstance(each, int) or each.is_integer() for each in values.tolist()]
        rows, values = rows[whole], values[whole]
    return rows, np.unique(values, return_inverse=True)[1]


def _together(spans: Spans, chain: Int64s, its: Laps) -> Times:
    """Return starts and ends as if all chains had begun each lap at once, at that of the first."""
    if not its.joined or not len(its.steps):
        return spans.start_ns, spans.end_ns
    count, low = len(its.steps), int(min(spans.start_ns.min(), its.begin_ns.min()))
    width = int(max(spans.end_ns.max(), its.end_ns.max())) - low + 1
    keys = (np.arange(len(its.begin_ns))[:, None] * width + (its.begin_ns - low)).ravel()
    late, own = (its.begin_ns - its.begin_ns[0]).ravel(), np.maximum(chain, 0)
    found = []
    for times in (spans.start_ns, spans.end_ns):
        place = np.searchsorted(keys, own * width + (times - low), "right") - 1
        found.append(times - late[np.clip(place, own * count, own * count + count - 1)])
    return found[0], found[1]


def _samples(spans: Spans, when: Times) -> Int64s:
    """Return pairs of rows: what was done to a sample last, and what came then."""
    rows, sample = _numbered(spans, "sample")
    found = _latest(when, rows, sample, rows, sample)
    some = found >= 0
    return np.array([found[some], rows[some]], dtype=np.int64)


def _versions(spans: Spans, when: Times) -> Int64s:
    """Return pairs of rows: the last to publish a version, and each thread's first that needs it.

    A thread that passes over some versions needs the last that was published.
    """
    rows, version = _numbered(spans, "version")
    gives = categories_of(spans.names)[spans.name[rows]] == Category.WEIGHT_SYNC
    gives |= spans.kind[rows] == _MARK
    there = np.unique(version[gives])
    takes = rows[~gives]
    place = np.searchsorted(there, version[~gives], "right") - 1
    order = np.lexsort((spans.start_ns[takes], spans.thread[takes]))
    takes, place = takes[order], place[order]
    thread = spans.thread[takes]
    highest = np.maximum.accumulate(thread * (len(there) + 2) + place + 1)
    first = differs(highest) & (place >= 0)
    takes, wanted = takes[first], np.append(there, 0)[place[first]]
    found = _latest(when, rows[gives], version[gives], takes, wanted)
    some = found >= 0
    return np.array([found[some], takes[some]], dtype=np.int64)


def _latest(when: Times, rows: Int64s, number: Int64s, takers: Int64s, wanted: Int64s) -> Int64s:
    """Return for each taker the row with its number that ended last before it began, or -1."""
    if not len(rows):
        return np.full(len(takers), -1)
    numbers, code = np.unique(number, return_inverse=True)
    start, end = when[0][takers], when[1][rows]
    low = min(int(start.min(initial=int(end.min()))), int(end.min()))
    width = max(int(start.max(initial=0)), int(end.max())) - low + 2
    keys = code * width + (end - low)
    order = np.lexsort((rows, keys))
    its = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    query = its * width + (start - low)
    place = np.searchsorted(keys[order], query, "right") - 1
    for _ in range(2):  # a mark ends when it begins
        same = (place >= 0) & (rows[order][place] == takers)
        place = np.where(same, place - 1, place)
    found = np.where(place >= 0, rows[order][place], -1)
    known = (place >= 0) & (code[order][place] == its) & (numbers[its] == wanted)
    return np.where(known, found, -1)


def _chains(spans: Spans, threads: Int64s) -> Int64s:
    """Return the chain of each row: its own thread's, else the first one of its rank, or -1."""
    chain = np.full(len(spans.threads), -1, dtype=np.int64)
    first: dict[int, int] = {}
    for at, thread in enumerate(threads.tolist()):
        first.setdefault(spans.threads[thread].rank, at)
    chain[:] = [first.get(thread.rank, -1) for thread in spans.threads]
    chain[threads] = np.arange(len(threads))
    return chain[spans.thread]


def _since(spans: Spans, threads: Int64s, chain: Int64s, when: Int64s) -> Int64s:
    """Return when each chain had last begun or ended some work before a time."""
    feeds = categories_of(spans.names) == Category.DATA_WAIT
    work = np.isin(spans.kind, _WORK) & ~feeds[spans.name] & np.isin(spans.thread, threads)
    rows = np.flatnonzero(work)
    own, low = np.searchsorted(threads, spans.thread[rows]), int(spans.start_ns.min(initial=0))
    width = int(spans.end_ns.max(initial=0)) - low + 2
    begin = np.full(len(when), low, dtype=np.int64)
    for times, before in ((spans.start_ns[rows], 1), (spans.end_ns[rows], 0)):
        keys = np.sort(own * width + (times - low))
        query = chain * width + (when - low - before)
        place = np.searchsorted(keys, query, "right") - 1
        last = np.append(keys, -1)[place]
        there = (place >= 0) & (last // width == chain)
        begin = np.where(there, np.maximum(begin, last % width + low), begin)
    return begin


def _after(met: Joins, chain: Int64s, begin: Int64s, when: Int64s) -> tuple[Int64s, Mask]:
    """Return waits cut after the last join before their end, and which do not end in a join."""
    if not len(met.chain) or not len(chain):
        return begin, np.ones(len(chain), dtype=bool)
    low = min(int(met.start_ns.min()), int(begin.min()))
    width = max(int(met.end_ns.max()), int(when.max())) - low + 2
    query = chain * width + (when - low)
    place = np.searchsorted(met.chain * width + (met.start_ns - low), query) - 1
    there = (place >= 0) & (met.chain[place] == chain)
    end = met.end_ns[place]
    return np.where(there, np.maximum(begin, end), begin), ~there | (end <= when)
