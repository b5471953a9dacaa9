"""What each thread did between joins, step by step: the graph that paths and what-ifs go through.

A lap is a step from the moment that all ranks leave the last join of the step before to the moment
that they leave its own last one: there all are at the same place at the same time, whatever their
clocks say. Where no join is attended by all, a lap is the step as the clocks tell it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.certainty import never_compared, remark
from lightning_rlprof.analysis.counted import counted
from lightning_rlprof.analysis.handed import Handed, handed, is_fed
from lightning_rlprof.analysis.joins import Joins, joins
from lightning_rlprof.analysis.laps import Laps, laps
from lightning_rlprof.analysis.last_steps import last_steps
from lightning_rlprof.analysis.partition import partition
from lightning_rlprof.analysis.pieces import Pieces, pieces
from lightning_rlprof.analysis.plan import Plan
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["BETWEEN", "Dag", "dag"]

Mask = npt.NDArray[np.bool_]

BETWEEN = "between stages"
"""How the time of a training thread in which no stage was open is called."""

_NOTHING = "no span or table of collectives, and no sample or version that two ranks had"


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
        return "no step was recorded"
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
        return "no step is complete on all ranks with its joins in one order"
    told = (fewer, choice.note, _told(spans, met, own, its), _lost(len(bad)))
    note = " ".join(filter(None, told))
    return _dag(spans, (*met.names, BETWEEN), _who(spans, threads), its, own, order, note)


def _apart(spans: Spans, met: Joins, its: Laps, got: Handed | None) -> str:
    """Say why ranks cannot be seen together, nothing where they can."""
    if not its.joined and (text := never_compared(spans)):
        return f"no join has all ranks, by which steps could be cut, and {text}"
    if not len(met.step) and (got is None or not len(got.to)):
        return f"nothing shows where ranks wait for one another: {_NOTHING}"
    return ""


def _who(spans: Spans, threads: Int64s) -> tuple[Int64s, tuple[str, ...]]:
    ranks = [spans.threads[thread].rank for thread in threads.tolist()]
    return np.array(ranks), tuple(spans.headers[rank].role for rank in ranks)


def _told(spans: Spans, met: Joins, own: Pieces, its: Laps) -> str:
    if len(its.begin_ns) == 1:
        return "One thread: the path is all that it did."
    crosses = not its.joined or bool(own.given.any())
    sure = remark(spans, "Where steps begin and end, and what is handed over") if crosses else ""
    by = [met.source] if met.source else []
    by += ["samples and weight versions"] if own.given.any() else []
    return f"Joins told by {' and '.join(by)}. Steps are cut {its.told}. {sure}".rstrip()


def _lost(laps: int) -> str:
    return f"Steps left out, as joins come in different orders: {laps}." if laps else ""


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
