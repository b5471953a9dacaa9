"""What a run that is being written shows: steps, stages, ranks, background metrics, alarms.

`rlprof watch` and `rlprof serve` show the same figures.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.alarms import UNUSUAL, Alarm, Code, RankState, alarms
from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.analysis.steps.step_matrix import WAITING, step_matrix
from lightning_rlprof.analysis.steps.step_selection import counted
from lightning_rlprof.loaders.live_run import LATELY, LiveRank, LiveRun
from lightning_rlprof.loaders.rank_names import as_ranges
from lightning_rlprof.report.terminal import duration, percent, size
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of, figure, rows_of

_MOST_ROWS = 16  # ranks; of more ranks, blocks are shown
_MOST_ALARMS = 12
_ALIKE = 1.05

_STAGES = (
    Column("stage", "text"),
    Column("share", "share"),
    Column("mean", "duration", "ns"),
    Column("tokens/s in stage", "number"),
    Column("MFU", "share"),
    Column("longest", "duration", "ns"),
    Column("rank", "count"),
    Column("longest/others", "ratio"),
)
_RANKS = (
    Column("rank", "text"),
    Column("role", "text"),
    Column("step", "text"),
    Column("last stage", "text"),
    *columns_of("duration", "last", "median", unit="ns"),
    Column("slowdown", "ratio"),
    Column("slowest", "count"),
    *columns_of("count", "resident", "device", unit="bytes"),
    Column("written", "text"),
)
_METRICS = (
    *(Column(name, "text") for name in ("metric", "lowest", "median", "highest")),
    Column("rank", "count"),
)
_ALARMS = (Column("level", "text"), Column("ranks", "text"), Column("alarm", "text"))
_UNITS = {"_percent": "%", "_watts": "W", "_celsius": "°C", "_mhz": "MHz", "_cores": "cores"}


@dataclass(frozen=True)
class LiveView:
    """The figures of one moment.

    Attributes:
        title: How many ranks and steps, in one line.
        slowest: Which rank takes longest, and where it does or makes others wait, in one line each.
        stages: Share of the last steps by stage, over all ranks, with tokens per second and MFU.
        ranks: A row per rank, or per block of ranks if they are many.
        background: Background metrics that are unusual, see `UNUSUAL`.
        alarms: Warnings and errors of the run, and ranks that write nothing.
        has_ended: Whether all ranks have.
        times: The times of ranks that these tables show.
    """

    title: str
    slowest: tuple[str, ...]
    stages: Table
    ranks: Table
    background: Table
    alarms: Table
    has_ended: bool
    times: "RecentTimes"

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that have rows, alarms first."""
        found = (self.alarms, self.stages, self.ranks, self.background)
        return tuple(table for table in found if table.rows)

    @property
    def line(self) -> str:
        """All of it in one line."""
        parts = [self.title, *self.slowest[:1]]
        if self.stages.rows:  # untraced, too, if it is the largest
            most = max(rows_of(self.stages), key=lambda row: row["share"] or 0.0)
            parts.append(f"{most['stage']} {percent(most['share'] or 0.0)}")
        if count := len(self.alarms.rows):
            parts.append(f"{count} alarm{'s' * (count > 1)}: {self.alarms.rows[0][2]}")
        return " · ".join(parts)


def live_view(run: LiveRun) -> LiveView:
    """Return what to show of a run after `LiveRun.refresh`."""
    ranks = [run.ranks[number] for number in sorted(run.ranks)]
    times = RecentTimes() if run.spans is None else _times(run.spans)
    pace = _Pace(ranks, times)
    stages, behind = _stages(times, pace)
    return LiveView(
        title=_title(run, ranks, times),
        slowest=tuple(text for text in (pace.slowest(), behind) if text),
        stages=stages,
        ranks=_ranks(run, ranks, pace),
        background=_background(ranks),
        alarms=_alarms(run, ranks, times),
        has_ended=run.has_ended,
        times=times,
    )


@dataclass(frozen=True, eq=False)
class RecentTimes:
    """The times of the last included steps, by the analyses that `rlprof summary` uses.

    Attributes:
        steps: The steps of each rank.
        stage_ns: Mean time per step of each stage on each rank that ran it, without waiting; what
            ranks waited has names of its own, as in the table of stages.
        waits: Of these names, the stage in which ranks waited.
        stages: That table, see `lightning_rlprof.analysis.stages.stages`.
        rates: Tokens per second and MFU, see `throughput`.
    """

    steps: Mapping[int, "RankSteps"] = field(default_factory=dict)
    stage_ns: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)
    stages: Table | None = None
    rates: Table | None = None

    def median_ns(self, rank: int) -> float | None:
        """Return the median time of a rank's steps; None if there is none."""
        own = self.steps.get(rank)
        return None if own is None else float(np.median(own.ns))


class RankSteps(NamedTuple):
    """The last step of a rank, and the time of each of its included steps."""

    last: int
    ns: Int64s


def _times(spans: Spans) -> RecentTimes:
    matrix = step_matrix(spans)
    last = {
        rank: int(spans.step[spans.rows(kind="step", rank=rank)].max(initial=0))
        for rank in spans.ranks
    }
    if not len(matrix.steps):
        return RecentTimes()
    choice = counted(spans, matrix.steps)
    rows = matrix.steps[choice.mask]
    ranks, first = np.unique(spans.rank[rows], return_index=True)
    ns = np.split(spans.duration_ns[rows], first[1:])
    work = matrix.by_rank(spans, choice.mask)
    stage_ns: dict[str, dict[int, float]] = {}
    for of_ranks, name in ((work.work_ns[:, :-1], "{}"), (work.waits_ns[:, :-1], WAITING)):
        means = of_ranks / np.maximum(work.steps, 1)[:, None]
        for row, code in np.argwhere(of_ranks > 0).tolist():
            own = stage_ns.setdefault(name.format(spans.names[code]), {})
            own[int(work.ranks[row])] = float(means[row, code])
    steps = {rank: RankSteps(last[rank], own) for rank, own in zip(ranks.tolist(), ns, strict=True)}
    waits = {WAITING.format(name): name for name in spans.names}
    return RecentTimes(steps, stage_ns, waits, stages(spans), throughput(spans))


class _Pace:
    """Step times of ranks, each compared with those of its role."""

    def __init__(self, ranks: Sequence[LiveRank], times: RecentTimes) -> None:
        self.times = times
        self.has_roles = len({each.role for each in ranks}) > 1
        self.step_ns = {
            each.rank: ns for each in ranks if (ns := times.median_ns(each.rank)) is not None
        }
        by_role: dict[str, list[float]] = {}
        for each in ranks:
            if each.rank in self.step_ns:
                by_role.setdefault(each.role, []).append(self.step_ns[each.rank])
        usual = {role: median(times) for role, times in by_role.items() if len(times) > 1}
        self.slowdown = {
            each.rank: self.step_ns[each.rank] / usual[each.role]
            for each in ranks
            if each.rank in self.step_ns and usual.get(each.role)
        }

    def excess_ns(self, rank: int, among: Mapping[int, float]) -> float:
        """Return by how much a rank's step is longer than those of other ranks."""
        others = [self.step_ns[each] for each in among if each != rank and each in self.step_ns]
        return self.step_ns[rank] - median(others) if others and rank in self.step_ns else 0.0

    def slowest(self) -> str:
        """Return which rank takes longest per step, or that they are alike."""
        if not self.slowdown:
            return ""
        rank = max(self.slowdown, key=self.slowdown.__getitem__)
        if self.slowdown[rank] < _ALIKE:
            return "step times of all ranks within 5%"
        return f"slowest rank {rank}: {self.slowdown[rank]:.2f}x the median step"


def _title(run: LiveRun, ranks: Sequence[LiveRank], times: RecentTimes) -> str:
    if not ranks:
        return "no rank has written yet"
    size = max(run.world_size, len(ranks))
    count = f"{len(ranks)} of {size} ranks" if len(ranks) < size else _count(size, "rank")
    ended = sum(each.status is not None for each in ranks)
    state = "" if not ended else ", all ended" if ended == len(ranks) else f", {ended} ended"
    if not times.steps:
        return f"{count}{state} · no step has ended yet"
    step = f"step {_span([own.last for own in times.steps.values()])}"
    usual = median(times.median_ns(rank) or 0 for rank in times.steps)
    return f"{count}{state} · {step} · median {duration(round(usual))}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _stages(times: RecentTimes, pace: _Pace) -> tuple[Table, str]:
    """Return the table of stages, and which rank the others wait for, or why its step is longer.

    A rank that takes longer in a stage may wait there for others, where that is not known as
    waiting. It does not if its step is longer by as much: ranks that wait have equal steps.
    """
    if times.stages is None or times.rates is None or not times.stage_ns:
        why = "no stage has ended in a complete step"
        return Table("stages", _STAGES, abstained=why), ""
    rates = rows_of(times.rates)
    of_job = {row["stage"]: row for row in rates if row["rank"] is None}
    of_stage = {row["stage"]: row for row in reversed(rates)} | of_job
    rows: list[tuple[Cell, ...]] = []
    most, text, waits = 0.0, "", _Behind()
    for row in rows_of(times.stages):
        stage, rate = row["stage"], of_stage.get(row["stage"], {})
        means = times.stage_ns.get(stage, {})
        rank = max(means, key=means.__getitem__, default=0)
        others = [mean for number, mean in means.items() if number != rank]
        ratio = means[rank] / median(others) if others and median(others) > 0 else None
        longest = (round(means[rank]), rank) if others else (None, None)
        shown = (stage, row["share"], row["mean"], rate.get("tokens/s in stage"), rate.get("MFU"))
        rows.append((*shown, *longest, ratio))
        if stage in times.waits:
            waits = max(waits, _behind(times.waits[stage], means, pace))
            continue
        more = means[rank] - median(others) if others else 0.0
        lasts = more <= 2 * pace.excess_ns(rank, means)
        if more > most and ratio is not None and ratio >= _ALIKE and lasts:
            most, text = more, f"longest in {stage}: rank {rank}, {ratio:.2f}x the others"
    note = f"Last {LATELY} steps of each rank. {times.stages.note}".strip()
    return Table("stages", _STAGES, rows, note), waits.text or text


class _Behind(NamedTuple):
    """How long the others wait for a rank in a stage of waiting."""

    ns: float = 0.0
    text: str = ""


def _behind(stage: str, means: Mapping[int, float], pace: _Pace) -> _Behind:
    """Return the rank that waits least, as it comes last, if one stands apart."""
    ranks = set(pace.step_ns)
    waits = {rank: means.get(rank, 0.0) for rank in ranks}
    if len(waits) < 2:
        return _Behind()
    rank = min(waits, key=waits.__getitem__)
    others = [mean for number, mean in waits.items() if number != rank]
    ns = median(others) - waits[rank]
    if ns < (_ALIKE - 1) * pace.step_ns[rank] or min(others) - waits[rank] < ns / 2:
        return _Behind()
    return _Behind(ns, f"the others wait {duration(round(ns))} per step for rank {rank} in {stage}")


def _ranks(run: LiveRun, ranks: Sequence[LiveRank], pace: _Pace) -> Table:
    if len(ranks) <= _MOST_ROWS:
        return Table("ranks", _RANKS, [_row(run, [each], pace) for each in ranks])
    per_row = 1
    while len(ranks) > per_row * _MOST_ROWS:
        per_row *= 2
    blocks = [ranks[at : at + per_row] for at in range(0, len(ranks), per_row)]
    note = "Times are medians of a row, slowdown and memory are the highest"
    return Table("ranks", _RANKS, [_row(run, block, pace) for block in blocks], note)


def _row(run: LiveRun, block: Sequence[LiveRank], pace: _Pace) -> tuple[Cell, ...]:
    several = len(block) > 1
    stages = Counter(each.last_stage for each in block if each.last_stage)
    known = [pace.times.steps[each.rank] for each in block if each.rank in pace.times.steps]
    last = [float(own.ns[-1]) for own in known]
    times = [pace.step_ns[each.rank] for each in block if each.rank in pace.step_ns]
    slow = {each.rank: pace.slowdown[each.rank] for each in block if each.rank in pace.slowdown}
    slowest = max(slow, key=slow.__getitem__) if slow else None
    return (
        as_ranges(each.rank for each in block),
        ", ".join(sorted({each.role for each in block})) if pace.has_roles else None,
        _span([own.last for own in known] or [0]),
        stages.most_common(1)[0][0] if stages else None,
        round(median(last)) if last else None,
        round(median(times)) if times else None,
        slow[slowest] if slowest is not None else None,
        slowest if several else None,
        _highest(block, resident),
        _highest(block, device_memory),
        _written(run, block),
    )


def resident(rank: LiveRank) -> int | None:
    """Return the resident memory of a rank and the processes that it started, in bytes."""
    own = rank.memory.get("host_rss_bytes")
    return None if own is None else own + rank.memory.get("children_rss_bytes", 0)


def device_memory(rank: LiveRank) -> int | None:
    """Return the memory that a rank uses on its device: by the driver, else torch's allocator."""
    used = rank.metrics.get("device_memory_used_bytes")
    names = ("device_used_bytes", "device_reserved_bytes", "device_allocated_bytes")
    found = (rank.memory[name] for name in names if name in rank.memory)
    return round(used) if used is not None else next(found, None)


def _highest(block: Sequence[LiveRank], read: Callable[[LiveRank], int | None]) -> int | None:
    return max((value for each in block if (value := read(each)) is not None), default=None)


def _written(run: LiveRun, block: Sequence[LiveRank]) -> str:
    """Return when a rank last wrote something, or how it ended."""
    open_ranks = [each for each in block if each.status is None]
    if not open_ranks:
        return ", ".join(sorted({each.status or "" for each in block}))
    return f"{_seconds(max(map(run.quiet_s, open_ranks)))} ago"


def _seconds(seconds: float) -> str:
    return duration(round(seconds) * 10**9) if seconds >= 60 else f"{seconds:.0f} s"


def _background(ranks: Sequence[LiveRank]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, limit in UNUSUAL.items():
        values = {each.rank: each.metrics[name] for each in ranks if name in each.metrics}
        high = max(values, key=values.__getitem__, default=0)
        if values.get(high, 0.0) < limit:
            continue
        shown = (min(values.values()), median(values.values()), values[high])
        rank = high if len(values) > 1 else None
        rows.append((name, *(_metric(name, value) for value in shown), rank))
    note = "Only those that are unusual. All: rlprof show RUN device_counters"
    return Table("background metrics", _METRICS, rows, note)


def _metric(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return size(round(value))
    if name.endswith("_bytes_per_s"):
        return f"{size(round(value))}/s"
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    return f"{figure(value)} {unit}".strip()


_ALARM_TEXTS: Mapping[Code, str] = {
    "hang": "hang report: no progress for {time} in step {step}{last}",
    "ended": "ended: {status}",
    "quiet": "nothing written for more than {steps} steps, since step {step}",
    "unreadable": "its file can't be read: {text}",
    "cpu-wait": "training threads wait for a CPU in up to {share:.0%} of the step: all times "
    "include this wait",
    "cpu-pressure": "CPU pressure {percent}%: a thread waits for a CPU, so all times are longer",
    "note": "{text}",
}


def alarm_text(alarm: Alarm) -> str:
    """Return an alarm in words."""
    facts = dict(alarm.facts)
    if alarm.code == "hang":
        facts["time"] = _seconds(float(facts["seconds"]))
        facts["last"] = f", last span {facts['span']}" if facts["span"] else ""
    return _ALARM_TEXTS[alarm.code].format(**facts)


def _alarms(run: LiveRun, ranks: Sequence[LiveRank], times: RecentTimes) -> Table:
    states = [
        RankState(
            each.rank,
            each.status,
            times.steps[each.rank].last if each.rank in times.steps else each.last_step,
            times.median_ns(each.rank),
            run.quiet_s(each),
            list(each.notes),
            each.metrics,
        )
        for each in ranks
    ]
    found = alarms(states, run.spans, run.hangs, run.problems)
    rows = [(each.level, as_ranges(each.ranks), alarm_text(each)) for each in found]
    note = f"and {len(rows) - _MOST_ALARMS} more" if len(rows) > _MOST_ALARMS else ""
    return Table("alarms", _ALARMS, rows[:_MOST_ALARMS], note)
