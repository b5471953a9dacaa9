"""GPU-hours of the whole job by category: every second of every rank once, with its cost.

`compute_accounts` cuts each rank's time into cells with one step and one category, and sums them.
All sums are integer nanoseconds, and add up to wall time times ranks exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.communication.collectives import transfer_times
from lightning_rlprof.analysis.ledger.activity import (
    DeviceOccupancy,
    DeviceTime,
    device_occupancy,
    host_activity,
    host_categories,
    rollout_tail,
)
from lightning_rlprof.analysis.listing import listed
from lightning_rlprof.analysis.steps.partition import paint
from lightning_rlprof.analysis.steps.step_matrix import find_waits
from lightning_rlprof.analysis.steps.step_selection import warm_up
from lightning_rlprof.analysis.steps.sync_points import uncertainty_note, uncertainty_ns
from lightning_rlprof.analysis.steps.time_categories import NO_CATEGORY, Category, categories_of
from lightning_rlprof.records.records import KINDS, SHADOW, stated_world_size
from lightning_rlprof.tables.arrays import UNKNOWN, Int64s, Mask
from lightning_rlprof.tables.intervals import cells_of, edges, open_count
from lightning_rlprof.tables.spans import Spans, drivers
from lightning_rlprof.tables.table import Cell, Column, Table

_HOUR_NS = 3_600 * 10**9
_FEW_S = 360  # Totals below a tenth of an hour are shown in seconds.
_NO_DATA = "no spans were recorded"
# If these categories have no time, no data is missing.
_ONLY_IF_ANY = (
    Category.LAUNCH_LATENCY,
    Category.UNATTRIBUTED_IDLE,
    Category.PROFILER,
    Category.CUSTOM,
    Category.WARM_UP,
)
_NEEDS = {
    Category.COLLECTIVE_WAIT: "needs two or more ranks that meet",
    Category.HOST_IDLE: "needs device kernels",
    Category.ROLLOUT_TAIL: "needs a span per request",
}

OUTSIDE = -1
"""Index of the time outside steps in ``Accounts.ns``."""

_STEP = KINDS.index("step")
_STAGE, _REGION = KINDS.index("stage"), KINDS.index("region")
_SHOWN = 5
_SILENT = -1  # This number stands for a rank without a file.
_NO_SPANS = (Category.UNTRACED, Category.OUTSIDE_STEPS)
_UNKNOWN_WORK = (Category.COMPUTE, Category.CUSTOM, Category.UNTRACED)


def ledger(spans: Spans) -> Table:
    """Divide the time of the whole job, wall time times ranks, among categories; sums are exact.

    The rows are those of `category_totals`. Has no data if nothing was recorded.
    """
    return category_totals(accounts_of(spans))


@dataclass(frozen=True, eq=False)
class Accounts:
    """Where the time of a job went: the times of each rank add up to ``wall_ns`` exactly.

    Attributes:
        ranks: Ranks with recorded data.
        silent: Ranks of the job without a file.
        wall_ns: Time from the first rank's start to the last one's end.
        steps: Numbers of the steps, ascending.
        by_rank: Whether ranks are separate.
        ns: Time in nanoseconds; shape (ranks, steps + 1, categories). Without ``by_rank`` there is
            one entry with the sum of ranks. The last step is the time outside steps.
        silent_ns: Time of one silent rank; shape (steps + 1, categories).
        kernels_ns: Time of each category that kernels showed, of all ranks.
        idle_ns: Idle time of devices that has the category of what the host did meanwhile.
        sources: Categories with data in this run, even if they took no time, and the source:
            ``spans``, ``kernels`` or ``both``.
        unknown_transfers: Collectives without a match on other ranks, or without all their ranks.
        device: What its hours are of, see `Spans.device_word`.
        notes: What a reader needs to know, one sentence each.
    """

    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    wall_ns: int
    steps: Int64s
    by_rank: bool
    ns: Int64s
    silent_ns: Int64s
    kernels_ns: Int64s
    idle_ns: int
    sources: Mapping[Category, str]
    unknown_transfers: int
    device: str
    notes: tuple[str, ...]

    @property
    def total_ns(self) -> int:
        """Wall time times all ranks of the job."""
        return self.wall_ns * (len(self.ranks) + len(self.silent))

    @property
    def job_ns(self) -> Int64s:
        """Time of all ranks of the job; shape (steps + 1, categories)."""
        job: Int64s = self.ns.sum(axis=0) + len(self.silent) * self.silent_ns
        return job


def accounts_of(spans: Spans) -> Accounts:
    """Return the accounts of a run, ranks summed; they are computed once."""
    return spans.once("accounts", compute_accounts, spans.tables)


def category_totals(accounts: Accounts, *, price: float | None = None) -> Table:
    """Return one row per category: its time of the job, its cost, and where this is known from.

    ``total`` adds up to ``wall_ns`` times all ranks; ``in steps`` is the part inside steps.
    ``source`` is ``spans``, ``kernels``, ``both``, or ``none`` for untraced time and time outside
    steps. The note lists the categories without data: they have no row, and are not zero.

    Args:
        accounts: The job's time.
        price: Price of a GPU-hour, in any currency.
    """
    columns = (
        Column("category", "text"),
        Column("share", "share"),
        Column(f"{accounts.device}-hours", "number", "h"),
        *([] if price is None else [Column("cost", "number")]),
        Column("total", "duration", "ns"),
        Column("source", "text"),
        Column("in steps", "duration", "ns"),
        Column("% from kernels", "share"),
    )
    if not accounts.wall_ns:
        return Table("ledger", columns, abstained=_NO_DATA)
    ns = accounts.job_ns
    totals, in_steps = ns.sum(axis=0).tolist(), ns[:OUTSIDE].sum(axis=0).tolist()
    rows: list[tuple[Cell, ...]] = []
    for category in _most_time_first(accounts):
        total, from_kernels = totals[category], int(accounts.kernels_ns[category])
        hours = total / _HOUR_NS
        source = accounts.sources[category]
        if category in _NO_SPANS:
            source = "none"
        elif total:
            part = "kernels" if from_kernels == total else "both"
            source = part if from_kernels else "spans"
        cost = () if price is None else (hours * price,)
        measured = from_kernels / total if from_kernels else None
        times = (total, source, in_steps[category], measured)
        rows.append((category.text, total / accounts.total_ns, hours, *cost, *times))
    return Table("ledger", columns, rows, _note(accounts))


def category_breakdown(accounts: Accounts, *, per_step: bool) -> Table:
    """Return categories as columns: a row per rank if the accounts have them, per step, or both.

    Each row adds up to its ``wall``, and all walls add up to the total of `category_totals`. The
    row of the time outside steps has no step. Categories without time have no column.
    """
    per_rank, job_ns = accounts.by_rank, accounts.job_ns
    name = "ledger by " + " and ".join(["rank"] * per_rank + ["step"] * per_step)
    totals = job_ns.sum(axis=0)
    shown = [
        each for each in _most_time_first(accounts) if totals[each] or each == Category.UNTRACED
    ]
    columns = (
        *([Column("rank", "count")] if per_rank else []),
        *([Column("step", "count")] if per_step else []),
        Column("wall", "duration", "ns"),
        *(Column(category.text, "duration", "ns") for category in shown),
    )
    if not accounts.wall_ns:
        return Table(name, columns, abstained=_NO_DATA)
    by_rank: dict[int | None, Int64s] = {None: job_ns}
    if per_rank:
        recorded = zip(accounts.ranks, accounts.ns, strict=True)
        by_rank = {**dict.fromkeys(accounts.silent, accounts.silent_ns), **dict(recorded)}
    steps = [*accounts.steps.tolist(), None] if per_step else [None]
    rows: list[tuple[Cell, ...]] = []
    for rank, ns in sorted(by_rank.items()):
        for step, times in zip(steps, (ns if per_step else [ns.sum(axis=0)]), strict=True):
            if times.any():
                place = (*([rank] if per_rank else []), *([step] if per_step else []))
                rows.append((*place, int(times.sum()), *times[shown].tolist()))
    return Table(name, columns, rows)


def _most_time_first(accounts: Accounts) -> list[Category]:
    """Return the categories with data; those that no span shows come last."""
    totals = accounts.job_ns.sum(axis=0)
    return sorted(
        accounts.sources,
        key=lambda each: (each if each in _NO_SPANS else 0, -totals[each], each),
    )


def _note(accounts: Accounts) -> str:
    ranks, wall_s = len(accounts.ranks) + len(accounts.silent), accounts.wall_ns / 1e9
    total_s = accounts.total_ns / 1e9
    amount, unit = (total_s, "seconds") if total_s < _FEW_S else (total_s / 3600, "hours")
    hours = f"{_rounded(amount)} {accounts.device}-{unit}"
    cpu = " (CPU run)" if accounts.device == "rank" else ""
    head = f"{ranks} {'rank' if ranks == 1 else 'ranks'} × {_rounded(wall_s)} s = {hours}{cpu}."
    present = {*accounts.sources, *_ONLY_IF_ANY}
    missing = [category for category in Category if category not in present]
    texts = [head, *accounts.notes]
    if Category.HOST_IDLE in missing and Category.COMPUTE in accounts.sources:
        texts.append("Without device kernels, compute includes host-bound idle time.")
    if missing:
        parts = [f"{each.text} ({_NEEDS[each]})" for each in missing if each in _NEEDS]
        if unnamed := ", ".join(each.text for each in missing if each not in _NEEDS):
            parts.append(f"{unnamed} (no spans with matching names)")
        count = f"{len(missing)} {'category' if len(missing) == 1 else 'categories'}"
        texts.append(f"No data for {count}: {'; '.join(parts)}.")
    return " ".join(texts)


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def compute_accounts(
    spans: Spans, *, per_rank: bool = False, cuts: Int64s | None = None
) -> Accounts:
    """Assign every instant of every rank of the job to one category and one step.

    Every rank lasts from the job's start to its end, even if its file starts late, is truncated or
    missing. Time in its steps that no span covers is untraced; all other time without data is
    outside steps.

    Args:
        spans: The run.
        per_rank: Keep ranks separate: a thousand ranks then take a thousand times the memory.
        cuts: Instead of steps, divide the time in which devices were profiled at these times, which
            ascend; the rest of the time is outside.
    """
    devices, categories = device_occupancy(spans), categories_of(spans.names)
    waits, alone = _waits(spans, categories)
    missing = _missing_ranks(spans)
    silent = tuple(sorted(missing - {*devices.by_rank}))
    ranks = tuple(sorted({*spans.ranks, *missing} - {*silent} - drivers(spans)))
    start, end = _job_times(spans, devices.by_rank)
    steps = _job_steps(spans)
    warm = np.append(np.isin(steps.number, warm_up(spans)), False)
    job = _Job(spans, categories, waits, steps, cuts, warm, devices.by_rank, start, end)
    # A thousand ranks for a hundred days exceed 64 bits.
    dtype = np.int64 if (end - start) * (len(ranks) + len(silent)) < 2**63 else object
    rows = len(ranks) if per_rank else 1
    numbers = steps.number if cuts is None else np.arange(len(cuts) + 1)
    ns: Int64s = np.zeros((rows, len(numbers) + 1, len(Category)), dtype)
    kernels_ns: Int64s = np.zeros(len(Category), dtype)
    from_spans, idle_ns = {*_NO_SPANS}, 0
    for at, rank in enumerate(ranks):
        own = _rank_times(job, rank)
        ns[at if per_rank else 0] += own.ns
        kernels_ns += own.kernels_ns
        idle_ns += own.idle_ns
        from_spans |= own.categories
    sources = dict.fromkeys(from_spans, "spans") | dict.fromkeys(devices.categories, "kernels")
    sources |= dict.fromkeys(from_spans & devices.categories, "both")
    return Accounts(
        ranks,
        silent,
        end - start,
        numbers,
        per_rank,
        ns,
        _rank_times(job, _SILENT).ns.astype(dtype),
        kernels_ns,
        idle_ns,
        sources,
        alone + devices.unknown_transfers,
        spans.device_word,
        tuple(_notes(spans, categories, devices, silent, start, end, alone, idle_ns)),
    )


class _Steps(NamedTuple):
    """When steps ran: their numbers, or indices of their numbers, with start and end."""

    number: Int64s
    start_ns: Int64s
    end_ns: Int64s


class _Job(NamedTuple):
    """What cuts the time of a rank; ``waits`` as from `_waits`.

    All time in the steps that ``warm_up`` marks is warm-up, whatever ran in it; its last item is
    for time outside steps. ``cuts`` are the times between
    parts, None to count by steps.
    """

    spans: Spans
    categories: Int64s
    waits: Int64s
    steps: _Steps
    cuts: Int64s | None
    warm_up: Mask
    devices: Mapping[int, DeviceTime]
    start_ns: int
    end_ns: int


class _RankTimes(NamedTuple):
    """Time of one rank, see `Accounts`, and the categories of which its spans have data."""

    ns: Int64s
    kernels_ns: Int64s
    idle_ns: int
    categories: set[Category]


def _job_steps(spans: Spans) -> _Steps:
    """Return for each step number its span on the lowest rank that has one."""
    # Rows are sorted by rank, so the first one belongs to the lowest rank.
    rows = spans.rows(kind="step")
    number, first = np.unique(spans.step[rows], return_index=True)
    return _Steps(number, spans.start_ns[rows[first]], spans.end_ns[rows[first]])


def _rank_times(job: _Job, rank: int) -> _RankTimes:
    """Cut one rank's time at every change of step, span or kernel, and sum the cells."""
    spans, device = job.spans, job.devices.get(rank)
    rows = slice(*np.searchsorted(spans.rank, [rank, rank + 1]).tolist())
    first, last = np.searchsorted(job.waits[0], [rows.start, rows.stop])
    waits = job.waits[:, first:last] - np.array([[rows.start], [0], [0]])
    activity = host_activity(spans, rows, job.categories, waits)
    steps = _rank_steps(spans, rows, job.steps)
    parts = [activity.start_ns, activity.end_ns, steps.start_ns, steps.end_ns]
    parts.append(np.array([job.start_ns, job.end_ns]))
    counted = steps
    if job.cuts is not None:
        counted = _parts(job.cuts, device)
        parts += [counted.start_ns, counted.end_ns]
    if device is not None:
        parts += [device.start_ns, device.end_ns]
    times = edges(*(part.clip(job.start_ns, job.end_ns) for part in parts))
    length, width = np.diff(times), len(Category)
    painted = paint(*cells_of(times, steps.start_ns, steps.end_ns), len(length))
    # An index of -1, for no step, reads the last item.
    step = np.append(steps.number, OUTSIDE)[painted]
    warms = job.warm_up[step]  # `OUTSIDE` reads the last item, too.
    there = np.flatnonzero(np.bincount(activity.category))
    categories = {Category(each) for each in there.tolist()}
    category, kernels_ns = host_categories(activity, times), np.zeros(width, np.int64)
    by_kernels, waits = np.zeros((2, len(length)), dtype=bool)
    if device is not None:
        by_kernels, waits = _apply_device(category, device, times)
    tail = rollout_tail(activity, times)
    if tail is not None:
        category[tail & (category == Category.ROLLOUT)] = Category.ROLLOUT_TAIL
        categories.add(Category.ROLLOUT_TAIL)
    own_steps = np.count_nonzero(spans.kind[rows] == _STEP)  # They come last.
    outside = painted < len(steps.number) - own_steps
    category[outside & (category == Category.UNTRACED)] = Category.OUTSIDE_STEPS
    if warms.any():
        category[warms], by_kernels = Category.WARM_UP, by_kernels & ~warms
        categories.add(Category.WARM_UP)
    np.add.at(kernels_ns, category[by_kernels], length[by_kernels])
    count = len(job.steps.number)
    if job.cuts is not None:
        painted = paint(*cells_of(times, counted.start_ns, counted.end_ns), len(length))
        step, count = np.append(counted.number, OUTSIDE)[painted], len(job.cuts) + 1
    ns = np.zeros((count + 1) * width, np.int64)
    np.add.at(ns, step * width + category, length)  # `OUTSIDE` is -1, so it adds to the last step.
    return _RankTimes(ns.reshape(-1, width), kernels_ns, int(length[waits].sum()), categories)


def _parts(cuts: Int64s, device: DeviceTime | None) -> _Steps:
    """Divide the time in which the devices of a rank were profiled at some times."""
    if device is None or not len(device.profiled[0]):
        return _Steps(*np.zeros((3, 0), np.int64))
    first, last = device.profiled
    times = edges(first, last, cuts)
    start, end = times[:-1], times[1:]
    at = np.searchsorted(first, start, "right") - 1
    inside = (at >= 0) & (end <= last[at])
    return _Steps(np.searchsorted(cuts, start, "right")[inside], start[inside], end[inside])


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


def _apply_device(category: Int64s, device: DeviceTime, times: Int64s) -> tuple[Mask, Mask]:
    """Replace the host's category by the device's, in place.

    Returns:
        The replaced cells, and those in which the devices are idle and the host's category stays.

    Running work counts before what the host does or waits for, except in evaluations. The cause of
    idle time counts before computing, custom stages and untraced time of the host: other names say
    better what the device waits for.
    """
    cells = len(category)
    first, last = cells_of(times, device.start_ns, device.end_ns)
    replaced, is_idle_at = np.zeros((2, cells), dtype=bool)
    idle = np.isin(category, _UNKNOWN_WORK)
    for is_idle, free in ((True, idle), (False, category != Category.EVALUATION)):
        for each in np.unique(device.category[device.is_idle == is_idle])[::-1].tolist():
            own = (device.category == each) & (device.is_idle == is_idle)
            there = open_count(first[own], last[own], cells) > 0
            here = free & there
            category[here] = each
            replaced |= here
            is_idle_at |= there & is_idle
    return replaced, is_idle_at & ~replaced


def _is_rlprof_run(spans: Spans) -> bool:
    """Return whether rlprof wrote the headers; those of external traces lack clock and config."""
    return any(header.clock_ns or header.config for header in spans.headers.values())


def _missing_ranks(spans: Spans) -> set[int]:
    """Return the ranks of the job without a file; none if a single file was loaded."""
    if spans.path.suffix == ".jsonl" or not _is_rlprof_run(spans):
        return set()
    world = stated_world_size(spans.headers.values())
    return {*range(world)} - {*spans.ranks}


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
        known += [time for each in devices.values() for time in each.record]
    return min(known, default=0), max(known, default=0)


def _waits(spans: Spans, categories: Int64s) -> tuple[Int64s, int]:
    """Find when ranks waited for others, by their spans.

    Collectives of all threads are matched; on training threads, stages that include waiting, too.

    Returns:
        Three rows: the rows of the spans in which ranks waited, ascending, and start and end of the
        waits; and how many collectives have no counterpart.
    """
    rows = np.flatnonzero((categories == Category.COMMUNICATION)[spans.name])
    rows = rows[np.isin(spans.kind[rows], (_STAGE, _REGION))]
    start, end = spans.start_ns[rows], spans.end_ns[rows]
    columns = (spans.rank[rows], spans.step[rows], spans.name[rows], start, end)
    took = transfer_times(*columns, unsure_ns=uncertainty_ns(spans))
    waited = (took != UNKNOWN) & (end - took > start)
    alone = int(np.count_nonzero(took == UNKNOWN))
    collectives = np.stack([rows, start, end - took])[:, waited]
    others = find_waits(spans)
    stages = np.stack([others.row, others.start_ns, others.end_ns])[:, others.whole_stage]
    found = np.append(collectives, stages, axis=1)
    return found[:, np.argsort(found[0], kind="stable")], alone


def _notes(
    spans: Spans,
    categories: Int64s,
    devices: DeviceOccupancy,
    silent: Sequence[int],
    start_ns: int,
    end_ns: int,
    alone: int,
    idle_ns: int,
) -> list[str]:
    """Return what is untraced, what is included although it differs, and what is uncertain."""
    untraced = [f"No file, so outside steps: {listed(silent, 'rank')}."] if silent else []
    for rank in spans.ranks:
        last = int(spans.end_ns[spans.rows(rank=rank)].max(initial=0))
        if spans.statuses.get(rank) is None and last < end_ns:
            missing = f"{(end_ns - last) / 1e9:.3g} s before the end"
            untraced.append(f"Rank {rank}: file is truncated {missing}.")
    more = len(untraced) - _SHOWN
    texts = [*untraced[:_SHOWN], *[f"And {more} more."] * (more > 0), *devices.notes]
    flagged = [spans.flagged(name) for name in ("interrupted", "capture", SHADOW)]
    steps = [rows[spans.kind[rows] == _STEP] for rows in flagged]
    interrupted, captured, shadow = ({*spans.step[rows].tolist()} for rows in steps)
    counts = {"captured": len(captured - interrupted), "interrupted": len(interrupted)}
    counts["shadow"] = len(shadow - captured - interrupted)
    texts += [f"Includes {how} steps: {count}." for how, count in counts.items() if count]
    rows = np.flatnonzero((categories == NO_CATEGORY)[spans.name])
    stages = np.unique(spans.name[rows[spans.kind[rows] == _STAGE]])
    if custom := [spans.names[code] for code in stages.tolist()]:
        texts.append(f"Names without a category: {listed(custom, 'stage')}.")
    if alone:
        text = "collectives have no counterpart on other ranks: their transfer includes the wait"
        texts.append(f"{alone} {text} for peers.")
    records = [each.record for each in devices.by_rank.values()]
    if any(first < start_ns or last > end_ns for first, last in records):
        texts.append("Device work before or after the time that rlprof recorded isn't counted.")
    if idle_ns:
        idle = f"{idle_ns / 1e6:,.3g} ms"
        texts.append(f"Devices were idle for {idle} more, which count as what the host did then.")
    clocks = "Wall time, and time outside steps at the start and end of a rank"
    return [*texts, *filter(None, [uncertainty_note(spans, clocks)])]
