"""The time of a whole job, entered once: by label, and where asked by step and rank.

A rank's life cut into cells, each with one step and one label, and summed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.clock_uncertainty import remark, uncertainty_ns
from lightning_rlprof.analysis.collectives import UNMATCHED, transfers
from lightning_rlprof.analysis.ledger.device_occupancy import Work, occupancy
from lightning_rlprof.analysis.ledger.host_activity import (
    Activity,
    activity,
    host_labels,
    rollout_tail,
)
from lightning_rlprof.analysis.stages.partition import paint
from lightning_rlprof.analysis.time_categories import NO_CATEGORY, Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.intervals import cells_of, edges, open_count
from lightning_rlprof.tables.spans import Spans

OUTSIDE = -1
"""Stands for the time outside of steps."""

_STEP = KINDS.index("step")
_KEYS = 2 * len(Category)


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
        label: A `Category`.
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
        label[tail & (label == Category.ROLLOUT)] = Category.ROLLOUT_TAIL
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
    free, runs = label != Category.EVALUATION, np.zeros(cells, dtype=bool)
    for each in np.unique(work.label)[::-1].tolist():
        mine = work.label == each
        here = free & (open_count(first[mine], last[mine], cells) > 0)
        label[here], runs = each, runs | here
    known = open_count(*cells_of(times, work.known_start_ns, work.known_end_ns), cells) > 0
    idle = known & ~runs & (label == Category.COMPUTE)
    label[idle] = Category.HOST_IDLE
    told: Int64s = (runs | idle).astype(np.int64)
    return told


SILENT = -1
"""Stands for each one of the ranks that wrote nothing: their entries are alike, and kept once."""

_MOST_RANKS = 2**20  # as many as a run is read of
_FEW = 5
_AT_ONCE = 64  # ranks whose entries are held one by one
_SPANS = (KINDS.index("stage"), KINDS.index("region"))


@dataclass(frozen=True, eq=False)
class Accounts:
    """Where the time of a job went: ``wall_ns`` of each rank, and its entries add up to it exactly.

    Attributes:
        ranks: Ranks of which something was recorded.
        silent: Ranks of the job that wrote nothing; each has the entries of `SILENT`.
        start_ns: When the first rank began, on the run's axis.
        end_ns: When the last rank ended.
        steps: Numbers of the steps, ascending; None where steps are not told apart.
        by_rank: Whether ranks are told apart; if not, an entry may hold the time of several.
        rank: Rank per entry, the first one of several, or `SILENT`; ascending.
        entries: The time.
        told: Labels for which there is evidence in this run, if only that they have no time, and
            of what it is: ``spans``, ``kernels`` or ``both``.
        remarks: What the reader must know, a sentence each.
    """

    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    start_ns: int
    end_ns: int
    steps: Int64s | None
    by_rank: bool
    rank: npt.NDArray[np.int32]
    entries: Entries
    told: Mapping[Category, str]
    remarks: tuple[str, ...]

    @property
    def wall_ns(self) -> int:
        """How long the job took, from the first rank's start to the last one's end."""
        return self.end_ns - self.start_ns


class _Job(NamedTuple):
    """What the life of a rank is cut by.

    Attributes:
        spans: The run.
        labels: Category per name.
        joined: Collectives of which it is known when their transfer began, see `_joined`.
        calendar: The steps of the job.
        per_step: Whether they are told apart.
        work: What devices did, by rank.
        start_ns: When the first rank began.
        end_ns: When the last one ended.
    """

    spans: Spans
    labels: Int64s
    joined: Int64s
    calendar: Calendar
    per_step: bool
    work: Mapping[int, Work]
    start_ns: int
    end_ns: int


def compute_accounts(spans: Spans, *, per_step: bool = False, per_rank: bool = False) -> Accounts:
    """Give every instant of every rank of the job one label, and one step.

    A rank lives from the job's start to its end, whenever its file begins and stops, and also where
    it wrote none: what is not known of it is untraced. Steps are told apart ``per_step``, or else
    told from what lies outside of them; see `days_of` for steps that a rank lacks. Ranks are told
    apart ``per_rank``: that is a thousand times as much to hold for a thousand of them.
    """
    devices, labels, calendar = occupancy(spans), categories_of(spans.names), calendar_of(spans)
    joined, remarks = _joined(spans, labels)
    missing = _missing(spans)
    silent = tuple(sorted(missing - {*devices.work}))
    ranks = tuple(sorted({*spans.ranks, *missing} - {*silent}))
    start, end = _life(spans, devices.work)
    job = _Job(spans, labels, joined, calendar, per_step, devices.work, start, end)
    told, parts = {Category.UNTRACED}, []
    for group in _groups(silent, ranks, 1 if per_rank else _AT_ONCE, end - start):
        pages = [_page(job, rank) for rank in group]
        told |= set[Category]().union(*(page[1] for page in pages))
        entries = merged([page[0] for page in pages])
        parts.append((np.full(len(entries.ns), group[0], np.int32), *entries))
    rank_of, *columns = _joint(parts)
    clocks = remark(spans, "Wall clock, and untraced time where a rank begins and ends")
    remarks = [*_gaps(spans, silent, end), *remarks, *devices.remarks, *_odd(spans, labels)]
    remarks += [clocks] if clocks else []
    known = (_told(told, devices.told), tuple(remarks))
    steps = calendar.number if per_step else None
    return Accounts(ranks, silent, start, end, steps, per_rank, rank_of, Entries(*columns), *known)


def _groups(
    silent: Sequence[int], ranks: Sequence[int], size: int, wall_ns: int
) -> list[Sequence[int]]:
    """Return the ranks that are entered together: what they add up to fits into 64 bits."""
    size = max(1, min(size, 2**62 // max(1, wall_ns)))
    groups = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    return ([[SILENT]] if silent or not ranks else []) + groups


def _page(job: _Job, rank: int) -> tuple[Entries, set[Category]]:
    """Return the entries of a rank, and the labels for which it has evidence."""
    rows = slice(*np.searchsorted(job.spans.rank, [rank, rank + 1]).tolist())
    own = activity(job.spans, rows, job.labels, _in_rank(job.joined, rows))
    days = days_of(job.spans, rows, job.calendar)
    days = days if job.per_step else days._replace(number=np.zeros_like(days.number))
    entries, has_tails = enter(own, days, job.work.get(rank), job.start_ns, job.end_ns)
    told = {Category(each) for each in np.unique(own.label).tolist()}
    return entries, told | ({Category.ROLLOUT_TAIL} if has_tails else set())


def _joint(parts: list[tuple[Any, ...]]) -> list[Any]:
    """Put columns together one by one, so that no more than one is there twice."""
    columns = [list(column) for column in zip(*parts, strict=True)][::-1]
    parts.clear()
    return [np.concatenate(columns.pop()) for _ in range(len(columns))]


def _told(by_spans: set[Category], by_kernels: set[Category]) -> dict[Category, str]:
    both = dict.fromkeys(by_spans & by_kernels, "both")
    return dict.fromkeys(by_spans, "spans") | dict.fromkeys(by_kernels, "kernels") | both


def _is_ours(spans: Spans) -> bool:
    """Tell whether the ranks wrote headers; loaders of device tools make some up, without these."""
    return any(header.clock_ns or header.config for header in spans.headers.values())


def _missing(spans: Spans) -> set[int]:
    """Return the ranks of the job without a file; none where a single file was asked for."""
    if spans.path.suffix == ".jsonl" or not _is_ours(spans):
        return set()
    world = max(header.world_size for header in spans.headers.values())
    return {*range(min(world, _MOST_RANKS))} - {*spans.ranks}


def _life(spans: Spans, work: Mapping[int, Work]) -> tuple[int, int]:
    """Return when the first rank began and the last one ended.

    A rank begins with its header and lives as long as it writes; a device tool's file, which has no
    such header, is as long as what it holds.
    """
    known = [
        *(
            spans.later(rank, header.unix_ns)
            for rank, header in spans.headers.items()
            if header.clock_ns
        ),
        *(note.time_ns for note in spans.notes if note.rank in spans.headers),
    ]
    if len(spans):
        known += [int(spans.start_ns.min()), int(spans.end_ns.max())]
    if not _is_ours(spans):
        known += [int(each.start_ns.min()) for each in work.values()]
        known += [int(each.end_ns.max()) for each in work.values()]
    return min(known, default=0), max(known, default=0)


def _joined(spans: Spans, labels: Int64s) -> tuple[Int64s, list[str]]:
    """Match the collectives that are spans.

    Returns:
        Two rows: the spans' own rows, ascending, and when their transfers began; and remarks.
    """
    rows = np.flatnonzero((labels == Category.COMMUNICATION)[spans.name])
    rows = rows[np.isin(spans.kind[rows], _SPANS)]
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    columns = (spans.rank[rows], spans.step[rows], spans.name[rows], start, end)
    took = transfers(*columns, unsure_ns=uncertainty_ns(spans))
    matched = took != UNMATCHED
    alone = len(rows) - int(np.count_nonzero(matched))
    text = f"{alone} collectives have no counterpart on other ranks: their transfer"
    remarks = [f"{text} includes the wait for peers."] if alone else []
    return np.stack([rows[matched], (end - took)[matched]]), remarks


def _in_rank(joined: Int64s, rows: slice) -> Int64s:
    """Return the matched collectives of one rank, their rows counted from its first."""
    first, last = np.searchsorted(joined[0], [rows.start, rows.stop])
    found: Int64s = joined[:, first:last] - np.array([[rows.start], [0]])
    return found


def _gaps(spans: Spans, silent: tuple[int, ...], end_ns: int) -> list[str]:
    """Say which ranks are untraced for how long."""
    texts = []
    if silent:
        texts.append(f"Untraced throughout, as they wrote nothing: {_some('rank', silent)}.")
    for rank in spans.ranks:
        rows = slice(*np.searchsorted(spans.rank, [rank, rank + 1]).tolist())
        last = int(spans.end_ns[rows].max(initial=0))
        if spans.statuses.get(rank) is None and last < end_ns:
            texts.append(f"Rank {rank}'s file stops {(end_ns - last) / 1e9:.3g} s before the end.")
    return texts[:_FEW] + ([f"And {len(texts) - _FEW} more."] if len(texts) > _FEW else [])


def _odd(spans: Spans, labels: Int64s) -> list[str]:
    """Say what is part of the sum and not like the rest."""
    flags = [spans.flagged(name) for name in ("interrupted", "capture")]
    steps = [rows[spans.kind[rows] == _STEP] for rows in flags]
    interrupted, captured = ({*spans.step[rows].tolist()} for rows in steps)
    counts = {"under capture": len(captured - interrupted), "interrupted": len(interrupted)}
    texts = [f"Steps {how} are part of the sum: {n}." for how, n in counts.items() if n]
    rows = np.flatnonzero((labels == NO_CATEGORY)[spans.name])
    stages = np.unique(spans.name[rows[spans.kind[rows] == _SPANS[0]]])
    if unknown := [spans.names[code] for code in stages.tolist()]:
        listed = _some("stage", unknown)
        texts.append(f"The ledger's table of names does not have {listed}.")
    if spans.headers and all(header.device == "cpu" for header in spans.headers.values()):
        texts.append("No rank had an accelerator: GPU-hours are hours of ranks.")
    return texts


def _some(word: str, items: Sequence[object]) -> str:
    """Return "rank 3", or "ranks 3, 4 and 7 more"."""
    listed = ", ".join(map(str, items[:_FEW]))
    more = f" and {len(items) - _FEW} more" if len(items) > _FEW else ""
    return f"{word}{'s' if len(items) > 1 else ''} {listed}{more}"
