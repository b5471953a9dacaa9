"""What each rank's device ran, by the tables of kernels and copies, and where it surely idled."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.clock_uncertainty import uncertainty_ns
from lightning_rlprof.analysis.collectives import UNMATCHED, calls_of, matched, transfers
from lightning_rlprof.analysis.step_selection import captures
from lightning_rlprof.analysis.time_categories import Category, categories_of, kernel_categories
from lightning_rlprof.tables.arrays import Int64s, differs
from lightning_rlprof.tables.intervals import unions
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

# What is launched in such a stage is part of it; elsewhere it is what its own name says. Stages
# that wait are not among them: what runs meanwhile was launched by others.
_STAGES = (
    Category.ROLLOUT,
    Category.ROLLOUT_TAIL,
    Category.WEIGHT_SYNC,
    Category.REWARD,
    Category.OFFLOAD,
    Category.EVALUATION,
)
_HIDDEN = "hide their kernels"  # the note of a table in which replays of graphs are one row each
_SAME = ("rank", "device", "stream", "start")  # of a kernel and of the collective that it is
_ROUNDED = (0, -1, 1)  # ns that the two tables of an Ascend output may be apart
_BETWEEN_TWO = ("send", "recv", "p2p")  # no collectives of a whole group: they cannot be matched


class Work(NamedTuple):
    """What one rank's device ran: disjoint intervals of each label, and when it was looked at.

    Within ``known_start_ns`` to ``known_end_ns`` a device that runs nothing idles; elsewhere
    nothing is known of it.
    """

    start_ns: Int64s
    end_ns: Int64s
    label: Int64s
    known_start_ns: Int64s
    known_end_ns: Int64s


@dataclass(eq=False)
class Occupancy:
    """What devices say about a run.

    Attributes:
        work: By rank; ranks of whose device nothing was recorded have none.
        told: Labels for which there is evidence, if only that they have no time.
        remarks: What the reader must know.
    """

    work: dict[int, Work] = field(default_factory=dict)
    told: set[Category] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)


class _Runs(NamedTuple):
    """Kernels or copies as columns of one length."""

    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    label: Int64s


def occupancy(spans: Spans) -> Occupancy:
    """Read the run's tables ``kernels`` and ``memcpy``, where there are any, and label their rows.

    A kernel that was launched in a rollout, a weight sync, a reward, an offload or a validation
    counts to that; all others are compute, transfer or copy by their names. Collectives that can be
    matched across ranks are divided into waiting and transfer, see `transfers`.

    Takes as long as reading the tables, which can be gigabytes.
    """
    found = Occupancy()
    kernels = spans.try_table("kernels", found.remarks)
    copies = spans.try_table("memcpy", found.remarks)
    parts = []
    if kernels is not None and len(kernels.rows):
        found.told |= {Category.COMPUTE, Category.COMMUNICATION}
        parts.append(_kernels(spans, kernels, found))
    # Without a kernel it is not sure that any would have been recorded.
    hidden = _hides(kernels, found) or not parts
    if copies is not None and (parts or len(copies.rows)):
        found.told.add(Category.MEMCPY)
        parts.append(_runs(copies, np.full(len(copies.rows), int(Category.MEMCPY))))
    if not parts:
        return found
    runs = _Runs(*map(np.concatenate, zip(*parts, strict=True)))
    found.told |= {Category(each) for each in np.unique(runs.label).tolist()}
    for rank, own in _by_rank(runs):
        found.work[rank] = _work(own, *_known(spans, rank, own, hidden))
    if any(len(work.known_start_ns) for work in found.work.values()):
        found.told.add(Category.HOST_IDLE)
    return found


def _hides(kernels: Table | None, found: Occupancy) -> bool:
    if kernels is None or _HIDDEN not in kernels.note:
        return False
    text = "Replays of graphs hide their kernels: whether the device idled is not known."
    found.remarks.append(text)
    return True


def _kernels(spans: Spans, table: Table, found: Occupancy) -> _Runs:
    """Return the kernels by label, collectives divided where that is possible."""
    codes, names = table.texts("kernel")
    labels = np.append(
        kernel_categories(names), Category.COMPUTE
    )  # a name that is not known reads this
    runs = _runs(table, labels[codes])
    at = np.flatnonzero(runs.label == Category.COMMUNICATION)
    took = _listed(spans, table, at)
    if took is None:
        took = _named(spans, table, runs, at)
    alone = int(np.count_nonzero(took == UNMATCHED))
    if alone:
        text = f"{alone} kernels of collectives have no counterpart on other ranks: their transfer"
        found.remarks.append(f"{text} includes the wait for peers.")
    at, took = at[took != UNMATCHED], took[took != UNMATCHED]
    came, start = runs.start_ns[at], runs.start_ns.copy()
    start[at] = np.maximum(runs.end_ns[at] - took, came)
    waiting = _Runs(runs.rank[at], came, start[at], np.full(len(at), int(Category.COLLECTIVE_WAIT)))
    return _Runs(*map(np.append, runs._replace(start_ns=start), waiting))


def _listed(spans: Spans, kernels: Table, at: Int64s) -> Int64s | None:
    """Return the transfer of some kernels by the table ``collectives``; None where it is not there.

    As `matched` finds it: a late peer is a peer of the same group in the same operation.
    """
    listed = spans.try_table("collectives", [])
    if listed is None or not len(listed.rows):
        return None
    met, _ = matched(calls_of(listed))
    meeting = np.append(met.meeting, UNMATCHED)[_collective_of(listed, kernels, at)]
    took: Int64s = np.append(met.transfer_ns, UNMATCHED)[meeting]
    return took


def _named(spans: Spans, kernels: Table, runs: _Runs, at: Int64s) -> Int64s:
    """Return the same by the names of kernels alone."""
    codes, names = kernels.texts("kernel")
    paired = [any(word in name.lower() for word in _BETWEEN_TWO) for name in names]
    took, own = np.full(len(at), UNMATCHED), ~np.array([*paired, True])[codes[at]]
    at = at[own]
    step = kernels.numbers("step")[at]
    times = (runs.start_ns[at], runs.end_ns[at])
    took[own] = transfers(runs.rank[at], step, codes[at], *times, uncertainty_ns(spans))
    return took


def _collective_of(listed: Table, kernels: Table, at: Int64s) -> Int64s:
    """Return the row of the collective that each of some kernels is, -1 without one."""
    found = np.full(len(at), -1)
    theirs = np.stack([listed.numbers(key, -1) for key in _SAME])
    own = np.stack([kernels.numbers(key, -1)[at] for key in _SAME])
    for later in _ROUNDED:
        left = np.flatnonzero(found < 0)
        there = own[:, left] + np.array([[0], [0], [0], [later]])
        place = np.unique(np.hstack([theirs, there]), axis=1, return_inverse=True)[1].ravel()
        row = np.full(len(place), -1)
        row[place[: theirs.shape[1]]] = np.arange(theirs.shape[1])
        found[left] = row[place[theirs.shape[1] :]]
    return found


def _runs(table: Table, label: Int64s) -> _Runs:
    codes, stages = table.texts("stage")
    stage = categories_of(stages)[codes]
    start = table.numbers("start")
    end = start + table.numbers("duration")
    return _Runs(table.numbers("rank"), start, end, np.where(np.isin(stage, _STAGES), stage, label))


def _by_rank(runs: _Runs) -> list[tuple[int, _Runs]]:
    if (np.diff(runs.rank) < 0).any():
        order = np.argsort(runs.rank, kind="stable")
        runs = _Runs(*(column[order] for column in runs))
    heads = np.flatnonzero(differs(runs.rank))
    ranks, ends = runs.rank[heads], np.append(heads[1:], len(runs.rank)).tolist()
    slices = map(slice, heads.tolist(), ends)
    return [
        (rank, _Runs(*(column[own] for column in runs)))
        for rank, own in zip(ranks.tolist(), slices, strict=True)
    ]


def _work(runs: _Runs, known_start: Int64s, known_end: Int64s) -> Work:
    """Unite a rank's intervals of each label: kernels of many streams count once."""
    zero = int(runs.start_ns.min())
    label, start, end = unions(runs.label, runs.start_ns - zero, runs.end_ns - zero)
    return Work(start + zero, end + zero, label, known_start, known_end)


def _known(spans: Spans, rank: int, runs: _Runs, hidden: bool) -> tuple[Int64s, Int64s]:
    """Return when kernels were recorded: captures with kernels, or from the first to the last.

    Between two captures nothing was recorded, so a run with captures is known in these alone.
    """
    if hidden:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    windows = captures(spans, rank, runs.start_ns)
    return windows or (runs.start_ns.min()[None], runs.end_ns.max()[None])
