"""The job's time accounts: every instant of every rank in exactly one category and one step.

`compute_accounts` cuts each rank's time into cells with one step and one category, and sums them.
All sums are integer nanoseconds, and add up to wall time times ranks exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_rlprof.analysis.clock_uncertainty import uncertainty_note, uncertainty_ns
from lightning_rlprof.analysis.collectives import transfer_times
from lightning_rlprof.analysis.ledger.device_occupancy import DeviceTime, device_occupancy
from lightning_rlprof.analysis.ledger.host_activity import (
    Activity,
    host_activity,
    host_categories,
    rollout_tail,
)
from lightning_rlprof.analysis.stages.partition import paint
from lightning_rlprof.analysis.time_categories import NO_CATEGORY, Category, categories_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s
from lightning_rlprof.tables.intervals import cells_of, edges, open_count
from lightning_rlprof.tables.spans import Spans

OUTSIDE = -1
"""Stands for the time outside steps."""

SILENT = -1
"""Stands for every rank without a file: their entries are equal, and kept once."""

_STEP = KINDS.index("step")
_STAGE, _REGION = KINDS.index("stage"), KINDS.index("region")
_KEYS = 2 * len(Category)
_MOST_RANKS = 2**20
_SHOWN = 5
_RANKS_AT_ONCE = 64  # ranks whose entries are in memory separately


class Entries(NamedTuple):
    """Where time went, as columns of equal length, sorted by step and category; none is zero.

    A thousand ranks and steps have some ten million entries, so columns are as narrow as possible.

    Attributes:
        step: Index of the step's number, 0 if steps are summed, or `OUTSIDE`.
        category: A `Category`.
        from_kernels: 1 if kernels showed the category, 0 if spans did, or nothing.
        ns: Time in nanoseconds.
    """

    step: npt.NDArray[np.int32]
    category: npt.NDArray[np.int8]
    from_kernels: npt.NDArray[np.int8]
    ns: Int64s


@dataclass(frozen=True, eq=False)
class Accounts:
    """Where the time of a job went: the entries add up to ``wall_ns`` of each rank exactly.

    Attributes:
        ranks: Ranks with recorded data.
        silent: Ranks of the job without a file; each has the entries of `SILENT`.
        start_ns: When the first rank began, on the run's timeline.
        end_ns: When the last rank ended.
        steps: Numbers of the steps, ascending; None if steps are summed.
        by_rank: Whether ranks are separate; if not, an entry may sum several.
        rank: Rank of each entry, the first one of several, or `SILENT`; ascending.
        entries: The time.
        sources: Categories with data in this run, even if they took no time, and the source:
            ``spans``, ``kernels`` or ``both``.
        unmatched_collectives: Collectives without a counterpart on other ranks.
        cpu_only: Whether no rank has an accelerator.
        notes: What a reader needs to know, one sentence each.
    """

    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    start_ns: int
    end_ns: int
    steps: Int64s | None
    by_rank: bool
    rank: npt.NDArray[np.int32]
    entries: Entries
    sources: Mapping[Category, str]
    unmatched_collectives: int
    cpu_only: bool
    notes: tuple[str, ...]

    @property
    def wall_ns(self) -> int:
        """Time from the first rank's start to the last one's end."""
        return self.end_ns - self.start_ns

    @property
    def total_ns(self) -> int:
        """Wall time times all ranks of the job."""
        return self.wall_ns * (len(self.ranks) + len(self.silent))


def compute_accounts(spans: Spans, *, per_step: bool = False, per_rank: bool = False) -> Accounts:
    """Assign every instant of every rank of the job to one category and one step.

    Every rank lasts from the job's start to its end, even if its file starts late, is truncated or
    missing: time without data is untraced.

    Args:
        spans: The run.
        per_step: Keep steps separate; otherwise only time in and outside steps.
        per_rank: Keep ranks separate: a thousand ranks then take a thousand times the memory.
    """
    devices, categories = device_occupancy(spans), categories_of(spans.names)
    collectives, alone = _matched_collectives(spans, categories)
    missing = _missing_ranks(spans)
    silent = tuple(sorted(missing - {*devices.by_rank}))
    ranks = tuple(sorted({*spans.ranks, *missing} - {*silent}))
    start, end = _job_times(spans, devices.by_rank)
    steps = _job_steps(spans)
    job = _Job(spans, categories, collectives, steps, per_step, devices.by_rank, start, end)
    from_spans, parts = {Category.UNTRACED}, []
    for group in _groups(silent, ranks, 1 if per_rank else _RANKS_AT_ONCE, end - start):
        results = [_rank_entries(job, rank) for rank in group]
        from_spans |= set[Category]().union(*(categories for _, categories in results))
        entries = merge_entries([entries for entries, _ in results])
        parts.append((np.full(len(entries.ns), group[0], np.int32), *entries))
    rank_of, *columns = _concatenated(parts)
    notes = [*_missing_notes(spans, silent, end), *devices.notes, *_step_notes(spans, categories)]
    if alone:
        text = "collectives have no counterpart on other ranks: their transfer includes the wait"
        notes.append(f"{alone} {text} for peers.")
    if clocks := uncertainty_note(
        spans, "Wall time, and untraced time at the start and end of a rank"
    ):
        notes.append(clocks)
    devices_used = [header.device for header in spans.headers.values()]
    return Accounts(
        ranks,
        silent,
        start,
        end,
        steps.number if per_step else None,
        per_rank,
        rank_of,
        Entries(*columns),
        _sources(from_spans, devices.categories),
        alone + devices.unmatched,
        bool(devices_used) and all(device == "cpu" for device in devices_used),
        tuple(notes),
    )


class _Steps(NamedTuple):
    """When steps ran: their numbers, or indices of their numbers, with start and end."""

    number: Int64s
    start_ns: Int64s
    end_ns: Int64s


class _Job(NamedTuple):
    """What cuts the time of a rank.

    Attributes:
        spans: The run.
        categories: Category per name.
        collectives: Collectives whose transfer start is known, see `_matched_collectives`.
        steps: The steps of the job.
        per_step: Whether they stay separate.
        devices: What devices ran, by rank.
        start_ns: When the first rank began.
        end_ns: When the last one ended.
    """

    spans: Spans
    categories: Int64s
    collectives: Int64s
    steps: _Steps
    per_step: bool
    devices: Mapping[int, DeviceTime]
    start_ns: int
    end_ns: int


def _job_steps(spans: Spans) -> _Steps:
    """Return for each step number its span on the lowest rank that has one."""
    rows = spans.rows(kind="step")  # by rank, so that the first one is the lowest rank's
    number, first = np.unique(spans.step[rows], return_index=True)
    return _Steps(number, spans.start_ns[rows[first]], spans.end_ns[rows[first]])


def _groups(
    silent: Sequence[int], ranks: Sequence[int], size: int, wall_ns: int
) -> list[Sequence[int]]:
    """Return ranks in groups whose sums fit into 64 bits."""
    size = max(1, min(size, 2**62 // max(1, wall_ns)))
    groups = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    return ([[SILENT]] if silent or not ranks else []) + groups


def _rank_entries(job: _Job, rank: int) -> tuple[Entries, set[Category]]:
    """Return the entries of a rank, and the categories of which its spans have data."""
    rows = slice(*np.searchsorted(job.spans.rank, [rank, rank + 1]).tolist())
    first, last = np.searchsorted(job.collectives[0], [rows.start, rows.stop])
    collectives = job.collectives[:, first:last] - np.array([[rows.start], [0]])
    activity = host_activity(job.spans, rows, job.categories, collectives)
    steps = _rank_steps(job.spans, rows, job.steps)
    steps = steps if job.per_step else steps._replace(number=np.zeros_like(steps.number))
    entries, has_tails = _cut(activity, steps, job.devices.get(rank), job.start_ns, job.end_ns)
    categories = {Category(each) for each in np.unique(activity.category).tolist()}
    return entries, categories | ({Category.ROLLOUT_TAIL} if has_tails else set())


def _rank_steps(spans: Spans, rows: slice, job: _Steps) -> _Steps:
    """Return the steps of one rank with indices into the job's: those it lacks, then its own.

    Steps that it lacks last as long as in the job. If steps overlap the later row counts, so its
    own steps win.
    """
    own = np.flatnonzero(spans.kind[rows] == _STEP) + rows.start
    place = np.searchsorted(job.number, spans.step[own])
    lacks = np.ones(len(job.number), dtype=bool)
    lacks[place] = False
    return _Steps(
        np.append(np.flatnonzero(lacks), place),
        np.append(job.start_ns[lacks], spans.start_ns[own]),
        np.append(job.end_ns[lacks], spans.end_ns[own]),
    )


def _cut(
    activity: Activity, steps: _Steps, device: DeviceTime | None, start_ns: int, end_ns: int
) -> tuple[Entries, bool]:
    """Cut one rank's time at every change of step, span or kernel, and sum the cells.

    Returns:
        The entries, whose ``ns`` add up to ``end_ns - start_ns``; and whether its requests show
        the tails of rollouts.
    """
    parts = [activity.start_ns, activity.end_ns, steps.start_ns, steps.end_ns]
    parts.append(np.array([start_ns, end_ns]))
    if device is not None:
        parts += [device.start_ns, device.end_ns, device.known_start_ns, device.known_end_ns]
    times = edges(*(part.clip(start_ns, end_ns) for part in parts))
    step_of = np.append(steps.number, OUTSIDE)
    step = step_of[paint(*cells_of(times, steps.start_ns, steps.end_ns), len(times) - 1)]
    category = host_categories(activity, times)
    from_kernels = np.zeros_like(category)
    if device is not None:
        from_kernels = _apply_device(category, device, times)
    tail = rollout_tail(activity, times)
    if tail is not None:
        category[tail & (category == Category.ROLLOUT)] = Category.ROLLOUT_TAIL
    sums = _zeros(int(steps.number.max(initial=OUTSIDE)))
    np.add.at(sums, _keys(step, category, from_kernels), np.diff(times))
    return _entries(sums), tail is not None


def _apply_device(category: Int64s, device: DeviceTime, times: Int64s) -> Int64s:
    """Replace the host's category by the device's, in place; return 1 in each replaced cell.

    Running work counts before what the host does or waits for, except in evaluations. If the host
    computes and the device runs nothing, the device waits for the host.
    """
    cells = len(category)
    first, last = cells_of(times, device.start_ns, device.end_ns)
    free, running = category != Category.EVALUATION, np.zeros(cells, dtype=bool)
    for each in np.unique(device.category)[::-1].tolist():
        own = device.category == each
        here = free & (open_count(first[own], last[own], cells) > 0)
        category[here], running = each, running | here
    known = open_count(*cells_of(times, device.known_start_ns, device.known_end_ns), cells) > 0
    idle = known & ~running & (category == Category.COMPUTE)
    category[idle] = Category.HOST_IDLE
    replaced: Int64s = (running | idle).astype(np.int64)
    return replaced


def merge_entries(ranks: Sequence[Entries]) -> Entries:
    """Sum the entries of several ranks; the sums must fit into 64 bits."""
    if len(ranks) == 1:
        return ranks[0]
    sums = _zeros(max(int(own.step.max(initial=OUTSIDE)) for own in ranks))
    for own in ranks:
        sums[_keys(own.step.astype(np.int64), own.category, own.from_kernels)] += own.ns
    return _entries(sums)


def _zeros(last: int) -> Int64s:
    """Return a sum for each key of the steps up to the last one, and of the time outside."""
    return np.zeros((last + 2) * _KEYS, dtype=np.int64)


def _keys(step: Int64s, category: npt.NDArray[Any], from_kernels: npt.NDArray[Any]) -> Int64s:
    keys: Int64s = (step + 1) * _KEYS + 2 * category + from_kernels
    return keys


def _entries(sums: Int64s) -> Entries:
    """Return the entries of sums by key that are not zero."""
    keys = np.flatnonzero(sums)
    step, kind = (keys // _KEYS - 1).astype(np.int32), (keys % _KEYS).astype(np.int8)
    return Entries(step, kind // 2, kind % 2, sums[keys])


def _concatenated(parts: list[tuple[Any, ...]]) -> list[Any]:
    """Concatenate column by column, so that at most one column is in memory twice."""
    columns = [list(column) for column in zip(*parts, strict=True)][::-1]
    parts.clear()
    return [np.concatenate(columns.pop()) for _ in range(len(columns))]


def _sources(from_spans: set[Category], from_kernels: set[Category]) -> dict[Category, str]:
    both = dict.fromkeys(from_spans & from_kernels, "both")
    return dict.fromkeys(from_spans, "spans") | dict.fromkeys(from_kernels, "kernels") | both


def _is_rlprof_run(spans: Spans) -> bool:
    """Return whether rlprof wrote the headers; those of external traces lack clock and config."""
    return any(header.clock_ns or header.config for header in spans.headers.values())


def _missing_ranks(spans: Spans) -> set[int]:
    """Return the ranks of the job without a file; none if a single file was loaded."""
    if spans.path.suffix == ".jsonl" or not _is_rlprof_run(spans):
        return set()
    world = max(header.world_size for header in spans.headers.values())
    return {*range(min(world, _MOST_RANKS))} - {*spans.ranks}


def _job_times(spans: Spans, devices: Mapping[int, DeviceTime]) -> tuple[int, int]:
    """Return when the first rank began and the last one ended.

    A rank begins with its header and lasts until its last record. An external trace has no such
    header, and lasts from its first to its last event.
    """
    known = [note.time_ns for note in spans.notes if note.rank in spans.headers]
    for rank, header in spans.headers.items():
        if header.clock_ns:
            known.append(spans.later(rank, header.unix_ns))
    if len(spans):
        known += [int(spans.start_ns.min()), int(spans.end_ns.max())]
    if not _is_rlprof_run(spans):
        known += [int(each.start_ns.min()) for each in devices.values()]
        known += [int(each.end_ns.max()) for each in devices.values()]
    return min(known, default=0), max(known, default=0)


def _matched_collectives(spans: Spans, categories: Int64s) -> tuple[Int64s, int]:
    """Match the collectives recorded as spans across ranks.

    Returns:
        Two rows: the spans' own rows, ascending, and when their transfers began; and how many
        collectives have no counterpart.
    """
    rows = np.flatnonzero((categories == Category.COMMUNICATION)[spans.name])
    rows = rows[np.isin(spans.kind[rows], (_STAGE, _REGION))]
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    columns = (spans.rank[rows], spans.step[rows], spans.name[rows], start, end)
    took = transfer_times(*columns, unsure_ns=uncertainty_ns(spans))
    matched = took != UNKNOWN
    alone = len(rows) - int(np.count_nonzero(matched))
    return np.stack([rows[matched], (end - took)[matched]]), alone


def _missing_notes(spans: Spans, silent: tuple[int, ...], end_ns: int) -> list[str]:
    """Name the ranks that are untraced, and for how long."""
    texts = []
    if silent:
        texts.append(f"No file, so untraced: {_listed('rank', silent)}.")
    for rank in spans.ranks:
        rows = slice(*np.searchsorted(spans.rank, [rank, rank + 1]).tolist())
        last = int(spans.end_ns[rows].max(initial=0))
        if spans.statuses.get(rank) is None and last < end_ns:
            texts.append(
                f"Rank {rank}: file is truncated {(end_ns - last) / 1e9:.3g} s before the end."
            )
    return texts[:_SHOWN] + ([f"And {len(texts) - _SHOWN} more."] if len(texts) > _SHOWN else [])


def _step_notes(spans: Spans, categories: Int64s) -> list[str]:
    """Name what is included although it differs from the rest."""
    flagged = [spans.flagged(name) for name in ("interrupted", "capture")]
    steps = [rows[spans.kind[rows] == _STEP] for rows in flagged]
    interrupted, captured = ({*spans.step[rows].tolist()} for rows in steps)
    counts = {"captured": len(captured - interrupted), "interrupted": len(interrupted)}
    texts = [f"Includes {how} steps: {count}." for how, count in counts.items() if count]
    rows = np.flatnonzero((categories == NO_CATEGORY)[spans.name])
    stages = np.unique(spans.name[rows[spans.kind[rows] == _STAGE]])
    if custom := [spans.names[code] for code in stages.tolist()]:
        texts.append(f"Names without a category: {_listed('stage', custom)}.")
    return texts


def _listed(word: str, items: Sequence[object]) -> str:
    """Return "rank 3", or "ranks 3, 4 and 7 more"."""
    first = ", ".join(map(str, items[:_SHOWN]))
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{word}{'s' if len(items) > 1 else ''} {first}{more}"
