"""A rank's life cut into cells, each with one step and one label, and summed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.activity import Activity, host_labels, rollout_tail
from lightning_rlprof.analysis.labels import Label
from lightning_rlprof.analysis.occupancy import Work
from lightning_rlprof.analysis.partition import paint
from lightning_rlprof.analysis.sweep import cells_of, edges, open_count
from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import Int64s, Spans

__all__ = ["OUTSIDE", "Calendar", "Entries", "calendar_of", "days_of", "enter", "merged"]

OUTSIDE = -1
"""Stands for the time outside of steps."""

_STEP = KINDS.index("step")
_KEYS = 2 * len(Label)


class Calendar(NamedTuple):
    """When steps were: their numbers, or indices of their numbers, with start and end."""

    number: Int64s
    start_ns: Int64s
    end_ns: Int64s


class Entries(NamedTuple):
    """Where time went, as columns of one length, sorted by step and label; none is zero.

    A thousand ranks and steps have some ten million entries, so columns are as narrow as can be.

    Attributes:
        step: Index of the step's number, 0 where steps are not told apart; or `OUTSIDE`.
        label: A `Label`.
        by_kernels: 1 where kernels told the label, 0 where spans did, or nothing.
        ns: How long.
    """

    step: npt.NDArray[np.int32]
    label: npt.NDArray[np.int8]
    by_kernels: npt.NDArray[np.int8]
    ns: Int64s


def calendar_of(spans: Spans) -> Calendar:
    """Return for each step number its span on the lowest rank that has one."""
    rows = spans.rows(kind="step")  # by rank, so that the first one is the lowest rank's
    number, first = np.unique(spans.step[rows], return_index=True)
    return Calendar(number, spans.start_ns[rows[first]], spans.end_ns[rows[first]])


def days_of(spans: Spans, rows: slice, calendar: Calendar) -> Calendar:
    """Return the steps of one rank with indices into the calendar: those it lacks, then its own.

    What it lacks is as long as in the calendar. Of steps that overlap the last one counts, so that
    its own ones win.
    """
    own = np.flatnonzero(spans.kind[rows] == _STEP) + rows.start
    place = np.searchsorted(calendar.number, spans.step[own])
    lacks = np.ones(len(calendar.number), dtype=bool)
    lacks[place] = False
    return Calendar(
        np.append(np.flatnonzero(lacks), place),
        np.append(calendar.start_ns[lacks], spans.start_ns[own]),
        np.append(calendar.end_ns[lacks], spans.end_ns[own]),
    )


def enter(
    own: Activity, days: Calendar, work: Work | None, start_ns: int, end_ns: int
) -> tuple[Entries, bool]:
    """Give every instant of one rank from start to end to one step and one label.

    Returns:
        The entries, whose ``ns`` add up to ``end_ns - start_ns``; and whether the tails of its
        rollouts are told.
    """
    parts = [own.start_ns, own.end_ns, days.start_ns, days.end_ns, np.array([start_ns, end_ns])]
    parts += [] if work is None else [work.start_ns, work.end_ns, *work[3:]]
    times = edges(*(part.clip(start_ns, end_ns) for part in parts))
    step = np.append(days.number, OUTSIDE)[paint(*cells_of(times, *days[1:]), len(times) - 1)]
    label = host_labels(own, times)
    by_kernels = np.zeros_like(label) if work is None else _look(label, work, times)
    tail = rollout_tail(own, times)
    if tail is not None:
        label[tail & (label == Label.ROLLOUT)] = Label.TAIL
    sums = _zeros(int(days.number.max(initial=OUTSIDE)))
    np.add.at(sums, _keys(step, label, by_kernels), np.diff(times))
    return _entries(sums), tail is not None


def merged(ranks: Sequence[Entries]) -> Entries:
    """Return the entries of several ranks as one rank's; their sums must fit into 64 bits."""
    if len(ranks) == 1:
        return ranks[0]
    sums = _zeros(max(int(own.step.max(initial=OUTSIDE)) for own in ranks))
    for own in ranks:
        sums[_keys(own.step.astype(np.int64), own.label, own.by_kernels)] += own.ns
    return _entries(sums)


def _zeros(last: int) -> Int64s:
    """Return a sum for each key of the steps up to the last one, and of what lies outside."""
    return np.zeros((last + 2) * _KEYS, dtype=np.int64)


def _keys(step: Int64s, label: npt.NDArray[Any], by_kernels: npt.NDArray[Any]) -> Int64s:
    keys: Int64s = (step + 1) * _KEYS + 2 * label + by_kernels
    return keys


def _entries(sums: Int64s) -> Entries:
    """Return what is not zero of sums by key."""
    keys = np.flatnonzero(sums)
    step, kind = (keys // _KEYS - 1).astype(np.int32), (keys % _KEYS).astype(np.int8)
    return Entries(step, kind // 2, kind % 2, sums[keys])


def _look(label: Int64s, work: Work, times: Int64s) -> Int64s:
    """Put what the device did in the place of what the host said; return 1 where that was so.

    What runs counts before what the host does or waits for, but within a validation. Where the host
    computes and nothing runs, the device waits for the host.
    """
    cells = len(label)
    first, last = cells_of(times, work.start_ns, work.end_ns)
    free, runs = label != Label.EVALUATION, np.zeros(cells, dtype=bool)
    for each in np.unique(work.label)[::-1].tolist():
        mine = work.label == each
        here = free & (open_count(first[mine], last[mine], cells) > 0)
        label[here], runs = each, runs | here
    known = open_count(*cells_of(times, work.known_start_ns, work.known_end_ns), cells) > 0
    idle = known & ~runs & (label == Label.COMPUTE)
    label[idle] = Label.HOST
    told: Int64s = (runs | idle).astype(np.int64)
    return told
