"""The laps of all chains cut into pieces: stages, the time between, joins, and hand-overs.

What each thread did between joins, step by step: the graph that paths and what-ifs go through.

A lap is a step from the moment that all ranks leave the last join of the step before to the moment
that they leave its own last one: there all are at the same place at the same time, whatever their
clocks say. Where no join is attended by all, a lap is the step as the clocks tell it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.clock_uncertainty import never_compared, remark
from lightning_rlprof.analysis.critical_path.handoffs import Handed, handed, is_fed
from lightning_rlprof.analysis.critical_path.replay import OWN, Plan, plan
from lightning_rlprof.analysis.critical_path.step_intervals import Laps, laps
from lightning_rlprof.analysis.critical_path.sync_points import Joins, joins
from lightning_rlprof.analysis.stages.partition import UNTRACED, Flat, Partition, partition
from lightning_rlprof.analysis.step_selection import counted, last_steps
from lightning_rlprof.tables.arrays import Int64s, Mask
from lightning_rlprof.tables.intervals import edges
from lightning_rlprof.tables.spans import Spans

Int32s = npt.NDArray[np.int32]
Kind = tuple[Int64s, Int64s, Int64s]


class Pieces(NamedTuple):
    """Pieces by run and time, which tile all runs, and the joins among them, numbered anew.

    Attributes:
        run: Run of each piece.
        join: Join of each piece, or `OWN`.
        name: Stage, or of a join outside of stages its own name; the last one is for neither.
        row: Row of the stage in the run, or of what was handed over, or `UNTRACED`.
        ns: How long each piece took, waiting included; 0 where something is handed over.
        hands: Pieces that only hand over.
        transfer_ns: The shortest stay in each join, or what passes once all is handed over.
        waits: Joins that are a whole stage, with the last one's own work in it.
        given: Joins in which one waits for what others hand over.
    """

    run: Int64s
    join: Int64s
    name: Int64s
    row: Int64s
    ns: Int64s
    hands: Mask
    transfer_ns: Int64s
    waits: Mask
    given: Mask

    def plan(self, laps: Laps) -> Plan:
        """Order the joins."""
        return plan(self.run, self.join, laps.begin_ns.size, len(laps.steps), self.hands)


class _Cut(NamedTuple):
    """Pieces whose joins have the numbers that were given; waits come after the others."""

    run: Int64s
    join: Int64s
    name: Int64s
    row: Int64s
    ns: Int64s


def pieces(
    spans: Spans, cut: Partition, threads: Int64s, met: Joins, got: Handed | None, laps: Laps
) -> Pieces:
    """Cut the laps of all chains at the edges of stages and joins."""
    own, transfer, count = _cut(spans, cut, threads, met, got, laps), met.transfer_ns, len(met.size)
    hands = np.zeros(len(own.run), dtype=bool)
    if got is not None and len(own.run):
        own, hands, more = _given(own, got, laps, count, len(met.names))
        transfer = np.append(transfer, more)
    used = np.unique(own.join[own.join != OWN])
    join = np.where(own.join == OWN, OWN, np.searchsorted(used, own.join))
    waits = np.append(met.waits, np.zeros(len(transfer) - count, dtype=bool))[used]
    return Pieces(own.run, join, *own[2:], hands, transfer[used], waits, used >= count)


def _cut(
    spans: Spans, cut: Partition, threads: Int64s, met: Joins, got: Handed | None, laps: Laps
) -> _Cut:
    if not len(laps.steps):
        return _Cut(*np.zeros((5, 0), dtype=np.int64))
    (chain, start, end), row = _stages(spans, cut, threads)
    low, high = laps.begin_ns[:, 0], laps.end_ns[:, -1]
    near = (end > low[chain]) & (start < high[chain])
    row, stages = row[near], (chain[near], start[near], end[near])
    attended, group, name = _attended(met, got, low, high)
    chains = np.repeat(np.arange(len(threads)), len(laps.steps))
    kinds = [stages, attended, (chains, laps.begin_ns.ravel(), laps.end_ns.ravel())]
    if got is not None:  # nobody is inside of an instant, and yet it cuts
        kinds += [(got.giver, got.given_ns, got.given_ns), (got.chain, got.end_ns, got.end_ns)]
    times, (stage, join, lap) = _cells(kinds)
    keep = np.flatnonzero(lap >= 0)
    stage, join, run = stage[keep], join[keep], lap[keep]
    heads = np.flatnonzero(
        (join < 0) | (np.diff(join, prepend=-2) != 0) | (np.diff(run, prepend=-1) != 0)
    )
    ns = np.add.reduceat((times[keep + 1] - times[keep]), heads)
    stage, join = stage[heads], join[heads]
    rows = np.append(row, UNTRACED)[stage]
    named = np.append(spans.name, len(met.names))[rows]  # -1 reads the last one
    named = np.where((rows < 0) & (join >= 0), np.append(name, 0)[join], named)
    return _Cut(run[heads].astype(np.int64), np.append(group, OWN)[join], named, rows, ns)


def _stages(spans: Spans, cut: Partition, threads: Int64s) -> tuple[Kind, Int64s]:
    """Return chain, start, end and row of the time that each stage has for itself, in order."""
    own = cut.divided
    if isinstance(own, Flat):
        row, start, end = own.rows, own.start_ns, own.end_ns
    else:
        inside = own.label != UNTRACED
        row, start, end = own.label[inside], own.start_ns[inside], own.end_ns[inside]
    return (np.searchsorted(threads, spans.thread[row]), start, end), row


def _attended(
    met: Joins, got: Handed | None, low: Int64s, high: Int64s
) -> tuple[Kind, Int64s, Int64s]:
    """Return chain, start and end of attendances and waits within the laps, groups and names."""
    chain, start, end, group, name = met.chain, met.start_ns, met.end_ns, met.group, met.name
    if got is not None:
        number = len(met.size) + np.arange(len(got.chain))
        pairs = zip((chain, start, end, group, name), (*got[:3], number, got.name), strict=True)
        both = [np.concatenate(pair) for pair in pairs]
        order = np.lexsort((both[2], both[1], both[0]))
        chain, start, end, group, name = (each[order] for each in both)
    near = (end > low[chain]) & (start < high[chain])
    return (chain[near], start[near], end[near]), group[near], name[near]


def _cells(kinds: list[Kind]) -> tuple[Int64s, list[Int32s]]:
    """Cut chains at all edges; return the times, and of three kinds which interval a cell lies in.

    The intervals of a kind come by chain and start and do not overlap. Further kinds are instants.
    """
    low = min(int(kind[1].min(initial=kinds[2][1].min())) for kind in kinds)
    width = max(int(kind[2].max(initial=low)) for kind in kinds) - low + 1
    starts = [chain * width + (start - low) for chain, start, _ in kinds]
    ends = [chain * width + (end - low) for chain, _, end in kinds]
    times = edges(*starts, *ends[:3])
    found = []
    for start, end in zip(starts[:3], ends, strict=False):
        first, last = np.searchsorted(times, start), np.searchsorted(times, end)
        found.append(_inside(first, last, len(times)))
    times %= width
    times += low
    return times, found


def _inside(first: Int64s, last: Int64s, cells: int) -> Int32s:
    """Return for each cell which interval it lies in, or -1; intervals ascend and are apart."""
    values = np.full(2 * len(first) + 1, -1, dtype=np.int32)
    values[1::2] = np.arange(len(first))
    counts = np.zeros(2 * len(first) + 1, dtype=np.int64)
    counts[1::2] = last - first
    counts[::2] = np.append(first, cells) - np.append(0, last)
    return np.repeat(values, counts)


def _given(
    own: _Cut, got: Handed, laps: Laps, joins: int, between: int
) -> tuple[_Cut, Mask, Int64s]:
    """Put in what is handed over within a lap; return the transfers of waits, too.

    What comes from another lap, or by the clocks after it was needed, ends no wait: then that time
    is the thread's own. But waiting at the end of a lap for what comes later takes no time of it.
    """
    waits, lap = joins + np.arange(len(got.chain)), own.run % len(laps.steps)
    after, end = _times(own, laps)
    edge = own.run // len(laps.steps), end, end - own.ns
    gives, takes = _at(*edge, got.giver, got.given_ns), _at(*edge, got.chain, got.end_ns)
    join, idle = _idle(own, got, joins, takes, end)
    there = (gives >= 0) & (takes[got.to] >= 0)
    there &= (lap[gives] == lap[takes[got.to]]) & (after[gives] <= after[takes[got.to]])
    long = (takes >= 0) & (own.join[takes] == waits)  # others were ready when it was handed over
    ready = after[takes] - np.where(long, own.ns[takes], 0)
    np.maximum.at(ready, got.to[there], after[gives[there]])
    live = np.zeros(len(waits), dtype=bool)
    live[got.to[there]] = True
    join[takes[live & long]] = waits[live & long]
    name = np.where((join == OWN) & (own.row < 0), between, own.name)
    new = _new(own, got, joins, (gives, there), (takes, np.flatnonzero(live & ~long)))
    transfer = np.append(after[takes] - ready, np.zeros(idle, dtype=np.int64))
    return *_inserted(own._replace(join=join, name=name), *new), transfer


def _new(
    own: _Cut, got: Handed, joins: int, gives: tuple[Int64s, Mask], takes: tuple[Int64s, Int64s]
) -> tuple[_Cut, Int64s, Mask]:
    """Return pieces of no length, behind which piece each comes, and which of them hand over."""
    (where, there), (end, short) = gives, takes
    place = np.append(where[there], end[short])
    rank = np.append(np.where(got.mark[there], 2, 0), np.ones(len(short), dtype=np.int64))
    order = np.lexsort((rank, place))
    place = place[order]
    name = np.append(got.what[there], got.name[short])[order]
    row = np.append(got.row[there], np.full(len(short), UNTRACED))[order]
    join = joins + np.append(got.to[there], short)[order]
    found = _Cut(own.run[place], join, name, row, np.zeros(len(place), dtype=np.int64))
    return found, place, rank[order] != 1


def _inserted(own: _Cut, new: _Cut, place: Int64s, hands: Mask) -> tuple[_Cut, Mask]:
    every = (np.insert(old, place + 1, more) for old, more in zip(own, new, strict=True))
    return _Cut(*every), np.insert(np.zeros(len(own.run), dtype=bool), place + 1, hands)


def _idle(own: _Cut, got: Handed, joins: int, takes: Int64s, end: Int64s) -> tuple[Int64s, int]:
    """Return joins without those waits, and how many parts of them lasted until a lap's end.

    Each such part is a join of its own, numbered after all others, which takes no time.
    """
    count, latest = len(got.chain), np.full(len(got.chain) + 1, np.iinfo(np.int64).min)
    fine = got.given_ns <= got.end_ns[got.to]
    np.maximum.at(latest, got.to[fine], got.given_ns[fine])
    parts = np.flatnonzero(own.join >= joins)
    wait = own.join[parts] - joins
    parts = parts[(end[parts] <= latest[wait]) & (takes[wait] != parts)]
    join = np.where(own.join < joins, own.join, OWN)
    join[parts] = joins + count + np.arange(len(parts))
    return join, len(parts)


def _times(own: _Cut, laps: Laps) -> tuple[Int64s, Int64s]:
    """Return when each piece ends, after its lap began and by the clock of its chain."""
    until = np.append(0, np.cumsum(own.ns))
    first = np.searchsorted(own.run, np.arange(laps.begin_ns.size))
    inside = until[1:] - until[first][own.run]
    return inside + laps.offset_ns[own.run], inside + laps.begin_ns.ravel()[own.run]


def _at(chain: Int64s, end: Int64s, start: Int64s, whose: Int64s, when: Int64s) -> Int64s:
    """Return the piece of a chain in or at the end of which a time lies, or -1."""
    low = min(int(start.min()), int(when.min(initial=int(start.min()))))
    width = max(int(end.max()), int(when.max(initial=0))) - low + 1
    place = np.searchsorted(chain * width + (end - low), whose * width + (when - low))
    at = np.minimum(place, len(end) - 1)
    return np.where((place < len(end)) & (chain[at] == whose) & (start[at] < when), at, -1)


BETWEEN = "untraced"
"""How the time of a training thread in which no stage was open is called."""

_NO_SYNC = (
    "rlprof found no synchronization between ranks. Mark collectives with "
    'annotate("all_reduce"), or capture a step with a profiler.'
)


def seconds(ns: float) -> str:
    """Format a time in ms, or in s from one second on.

    Example::

        >>> seconds(116.1e6), seconds(2.5e9)
        ('116 ms', '2.5 s')
    """
    return f"{ns / 1e9:.3g} s" if ns >= 1e9 else f"{ns / 1e6:.3g} ms"


@dataclass(frozen=True, eq=False)
class Dag:
    """Pieces of runs, by run and time; they tile each lap of each thread.

    Attributes:
        spans: The run, or its last steps; ``row`` belongs to them.
        names: What ``name`` stands for; the last one is `BETWEEN`.
        ranks: Rank of each chain.
        roles: Role of each chain.
        steps: RL step of each lap, ascending.
        wall_ns: How long each lap took.
        offset_ns: How much later than its lap each run began; 0 where laps begin at joins.
        name: Stage of each piece, or of a join outside of stages its own name.
        row: Row of the stage in the run, or of what was handed over, or `UNTRACED`.
        ns: How long each piece took, waiting included.
        transfer_ns: The shortest stay in each join, or what passes once all is handed over.
        waits: Joins that are a whole stage, with the last one's own work in it.
        given: Joins in which one waits for what others hand over, a sample or weights.
        plan: In which order joins come.
        note: What the reader must know.
    """

    spans: Spans
    names: tuple[str, ...]
    ranks: Int64s
    roles: tuple[str, ...]
    steps: Int64s
    wall_ns: Int64s
    offset_ns: Int64s
    name: Int64s
    row: Int64s
    ns: Int64s
    transfer_ns: Int64s
    waits: Mask
    given: Mask
    plan: Plan
    note: str


def dag(spans: Spans) -> Dag | str:
    """Cut the complete steps of a run into pieces and joins; a text says why that cannot be done.

    Threads that have no steps are left out. So are steps that a thread lacks, and those in which
    joins come in different orders. Of a run with very many spans the last steps are looked at.
    """
    spans, fewer = last_steps(spans)
    cut = partition(spans)
    choice, threads = counted(spans, cut.steps), np.unique(spans.thread[cut.steps])
    if not len(threads):
        return "This run has no steps."
    fed = is_fed(spans)
    met = joins(spans, threads, fed=fed)
    its = laps(spans, cut, threads, choice.mask, met, fed=fed)
    got = handed(spans, threads, met, its) if fed else None
    if len(threads) > 1 and (why := _apart(spans, met, its, got)):
        return why
    own = pieces(spans, cut, threads, met, got, its)
    order = own.plan(its)
    bad = np.unique(order.run[order.piece][order.stuck[order.group]] % max(order.laps, 1))
    if len(bad):
        its = its.only(np.delete(np.arange(len(its.steps)), bad))
        own = pieces(spans, cut, threads, met, got, its)
        order = own.plan(its)
    if not len(its.steps):
        return "No step is complete on all ranks with the same order of sync points."
    told = (fewer, choice.note, _told(spans, met, own, its), _lost(len(bad)))
    note = " ".join(filter(None, told))
    return _dag(spans, (*met.names, BETWEEN), _who(spans, threads), its, own, order, note)


def _apart(spans: Spans, met: Joins, its: Laps, got: Handed | None) -> str:
    """Say why ranks cannot be seen together, nothing where they can."""
    if not its.joined and (text := never_compared(spans)):
        return f"Steps can't be aligned: no sync point includes all ranks, and {text}."
    if not len(met.step) and (got is None or not len(got.to)):
        return _NO_SYNC
    return ""


def _who(spans: Spans, threads: Int64s) -> tuple[Int64s, tuple[str, ...]]:
    ranks = [spans.threads[thread].rank for thread in threads.tolist()]
    return np.array(ranks), tuple(spans.headers[rank].role for rank in ranks)


def _told(spans: Spans, met: Joins, own: Pieces, its: Laps) -> str:
    if len(its.begin_ns) == 1:
        return "Single thread, so everything is on the critical path."
    crosses = not its.joined or bool(own.given.any())
    sure = remark(spans, "Step boundaries and handoffs") if crosses else ""
    by = [met.source] if met.source else []
    by += ["samples and weight versions"] if own.given.any() else []
    return (
        f"Synchronization points: {' and '.join(by)}. Step boundaries: {its.told}. {sure}".rstrip()
    )


def _lost(laps: int) -> str:
    return f"Excluded {laps} steps whose sync points come in different orders." if laps else ""


def _dag(
    spans: Spans,
    names: tuple[str, ...],
    who: tuple[Int64s, tuple[str, ...]],
    its: Laps,
    own: Pieces,
    order: Plan,
    note: str,
) -> Dag:
    """Put together what is known."""
    when = (its.steps, its.wall_ns, its.offset_ns)
    what = (own.name, own.row, own.ns, own.transfer_ns)
    return Dag(spans, names, *who, *when, *what, own.waits, own.given, order, note)
