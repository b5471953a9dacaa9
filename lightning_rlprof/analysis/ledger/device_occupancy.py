"""What each rank's device ran, from the tables of kernels and copies, and when it was observed."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.clock_uncertainty import uncertainty_ns
from lightning_rlprof.analysis.collectives import calls_of, match_collectives, transfer_times
from lightning_rlprof.analysis.device.work import GRAPHS_NOTE, DeviceWork, device_work
from lightning_rlprof.analysis.step_selection import captures
from lightning_rlprof.analysis.time_categories import Category, categories_of
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s, group_starts
from lightning_rlprof.tables.intervals import unions
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table

_CATEGORIES = (Category.COMPUTE, Category.COMMUNICATION, Category.MEMCPY)  # by kind of work
# Work launched in a stage of these categories belongs to it; other work to what its name means.
# Stages that wait are not among them: work that runs meanwhile was launched earlier.
_LAUNCHING = (
    Category.ROLLOUT,
    Category.ROLLOUT_TAIL,
    Category.WEIGHT_SYNC,
    Category.REWARD,
    Category.OFFLOAD,
    Category.EVALUATION,
)
_IDENTITY = ("rank", "device", "stream", "start")  # of a kernel and of the collective that it is
_ROUNDING_NS = (0, -1, 1)  # difference between the two tables of an Ascend output
_POINT_TO_POINT = ("send", "recv", "p2p")  # not collectives of a group: they cannot be matched


class DeviceTime(NamedTuple):
    """What one rank's device ran: disjoint intervals per category, and when it was observed.

    From ``known_start_ns`` to ``known_end_ns`` a device that runs nothing is idle. Outside these
    times nothing is known.
    """

    start_ns: Int64s
    end_ns: Int64s
    category: Int64s
    known_start_ns: Int64s
    known_end_ns: Int64s


@dataclass(eq=False)
class DeviceOccupancy:
    """Device time of a run.

    Attributes:
        by_rank: Device time by rank; ranks without recorded device work are missing.
        categories: Categories with data, even if they took no time.
        unmatched: Kernels of collectives without a counterpart on other ranks.
        notes: What a reader needs to know.
    """

    by_rank: dict[int, DeviceTime] = field(default_factory=dict)
    categories: set[Category] = field(default_factory=set)
    unmatched: int = 0
    notes: list[str] = field(default_factory=list)


class _Work(NamedTuple):
    """Kernels or copies as columns of equal length."""

    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    category: Int64s


def device_occupancy(spans: Spans) -> DeviceOccupancy:
    """Read the tables ``kernels`` and ``memcpy``, if any, and categorize their rows.

    A kernel launched in a rollout, weight sync, reward, offload or evaluation belongs to that.
    Other kernels are compute, communication or memcpy by their names. Collectives that match
    across ranks are divided into wait and transfer, see `transfers`.

    Takes as long as reading the tables, which can be gigabytes.
    """
    found = DeviceOccupancy()
    device = device_work(spans, None, found.notes)
    if device.hidden_in_graphs:
        found.notes.append(GRAPHS_NOTE)
    if not device.tables:
        return found
    if device.kernel_count:
        found.categories |= {Category.COMPUTE, Category.COMMUNICATION}
    if device.copies is not None:
        found.categories.add(Category.MEMCPY)
    work = _work(spans, device, found)
    found.categories |= {Category(each) for each in np.unique(work.category).tolist()}
    # Without any kernel, the profiler may not record kernels.
    idle_unknown = device.hidden_in_graphs or not device.kernel_count
    order = np.argsort(work.rank, kind="stable")
    for rows in np.split(order, group_starts(work.rank[order])[1:]):
        rank, own = int(work.rank[rows[0]]), _Work(*(column[rows] for column in work))
        found.by_rank[rank] = _device_time(spans, rank, own, idle_unknown)
    if any(len(each.known_start_ns) for each in found.by_rank.values()):
        found.categories.add(Category.HOST_IDLE)
    return found


def _work(spans: Spans, device: DeviceWork, found: DeviceOccupancy) -> _Work:
    """Return kernels and copies by category, matched collectives as wait and transfer."""
    codes, stages = device.stages()
    stage, begin = categories_of(stages)[codes], device.numbers("start")
    category = np.where(np.isin(stage, _LAUNCHING), stage, np.array(_CATEGORIES)[device.kind])
    work = _Work(device.rank, begin, begin + device.duration, category)
    at = np.flatnonzero(category == Category.COMMUNICATION)
    if not len(at):
        return work
    took = _transfers_from_table(spans, device, at)
    if took is None:
        took = _transfers_from_names(spans, device, work, at)
    found.unmatched = int(np.count_nonzero(took == UNKNOWN))
    if found.unmatched:
        text = "kernels of collectives have no counterpart on other ranks"
        found.notes.append(f"{found.unmatched} {text}: their transfer includes the wait for peers.")
    at, took = at[took != UNKNOWN], took[took != UNKNOWN]
    arrived, start = work.start_ns[at], work.start_ns.copy()
    start[at] = np.maximum(work.end_ns[at] - took, arrived)
    wait = np.full(len(at), int(Category.COLLECTIVE_WAIT))
    waits = _Work(work.rank[at], arrived, start[at], wait)
    return _Work(*map(np.append, work._replace(start_ns=start), waits))


def _transfers_from_table(spans: Spans, device: DeviceWork, at: Int64s) -> Int64s | None:
    """Return the transfer of some kernels by the table ``collectives``; None if it is missing."""
    table = spans.try_table("collectives", [])
    if table is None or not len(table.rows):
        return None
    found, _ = match_collectives(calls_of(table))
    row = _rows_of_kernels(table, device, at)
    took: Int64s = np.append(found.transfer_ns, UNKNOWN)[np.append(found.collective, UNKNOWN)[row]]
    return took


def _rows_of_kernels(table: Table, device: DeviceWork, at: Int64s) -> Int64s:
    """Return the row of the collective that each of some kernels is, -1 without one."""
    found = np.full(len(at), -1)
    listed = np.stack([table.numbers(key, -1) for key in _IDENTITY])
    own = np.stack([device.numbers(key, -1)[at] for key in _IDENTITY])
    for later in _ROUNDING_NS:
        left = np.flatnonzero(found < 0)
        wanted = own[:, left] + np.array([[0], [0], [0], [later]])
        place = np.unique(np.hstack([listed, wanted]), axis=1, return_inverse=True)[1].ravel()
        row = np.full(len(place), -1)
        row[place[: listed.shape[1]]] = np.arange(listed.shape[1])
        found[left] = row[place[listed.shape[1] :]]
    return found


def _transfers_from_names(spans: Spans, device: DeviceWork, work: _Work, at: Int64s) -> Int64s:
    """Return the transfer of some kernels, matched by their names alone."""
    codes, names = device.named
    is_p2p = [any(word in name.lower() for word in _POINT_TO_POINT) for name in names]
    took, collective = np.full(len(at), UNKNOWN), ~np.array([*is_p2p, True])[codes[at]]
    at = at[collective]
    step = device.numbers("step", 0)[at]
    times = (work.start_ns[at], work.end_ns[at])
    took[collective] = transfer_times(work.rank[at], step, codes[at], *times, uncertainty_ns(spans))
    return took


def _device_time(spans: Spans, rank: int, work: _Work, idle_unknown: bool) -> DeviceTime:
    """Unite a rank's intervals of each category: kernels of several streams count once.

    Kernels were recorded during captures with kernels, or without captures from the first kernel
    to the last. Between two captures nothing was recorded.
    """
    zero = int(work.start_ns.min())
    category, start, end = unions(work.category, work.start_ns - zero, work.end_ns - zero)
    known = (np.empty(0, np.int64), np.empty(0, np.int64))
    if not idle_unknown:
        windows = captures(spans, rank, work.start_ns)
        known = windows or (work.start_ns.min()[None], work.end_ns.max()[None])
    return DeviceTime(start + zero, end + zero, category, *known)
