"""What a run that is being written shows: steps, stages, ranks, alarms.

`rlprof watch` and `rlprof serve` show the same figures. `gauges` are these figures as metrics,
`exposition` writes them in the text format of Prometheus.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.alarms import Alarm, Code, RankState, alarms
from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.analysis.steps.step_matrix import WAITING, step_matrix
from lightning_rlprof.analysis.steps.step_selection import counted
from lightning_rlprof.loaders.live_run import LATELY, LiveRank, LiveRun
from lightning_rlprof.loaders.rank_names import as_ranges
from lightning_rlprof.report.terminal import count_of, duration, percent
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of, rows_of

_MAX_RANKS_SHOWN = 16  # Ranks; of more, the slowest are shown.
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
    *columns_of("text", "rank", "role", "step", "last stage"),
    *columns_of("duration", "last", "median", unit="ns"),
    Column("slowdown", "ratio"),
    *columns_of("count", "resident", "device", unit="bytes"),
    Column("written", "text"),
)
_ALARMS = columns_of("text", "level", "ranks", "alarm")

BACKGROUND = "rlprof_background_"
"""Start of the names of background metrics; the rest is the name that the run has."""

_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")

GAUGES: Mapping[str, str] = {
    "rlprof_run_info": "1; the labels name the run and its device",
    "rlprof_world_size_ranks": "Ranks that the run has",
    "rlprof_ranks": "Ranks that have written",
    "rlprof_ended_ranks": "Ranks that have ended",
    "rlprof_alarms": "Alarms by level",
    "rlprof_step": "Last step that has ended",
    "rlprof_step_duration_seconds": "Time of the last step",
    "rlprof_step_duration_median_seconds": f"Median time of the last {LATELY} steps",
    "rlprof_stage_duration_seconds": f"Mean time of a stage per step, of the last {LATELY} steps",
    "rlprof_stage_tokens_per_second": f"Tokens per second in a stage, of the last {LATELY} steps",
    "rlprof_stage_mfu_ratio": f"MFU of a stage, of all ranks, of the last {LATELY} steps",
    "rlprof_resident_memory_bytes": "Resident memory on the host, with child processes",
    "rlprof_device_memory_bytes": "Memory that is in use on the device",
    "rlprof_quiet_seconds": "Time since the rank has written; absent when it has ended",
}
"""Names and meanings. All are gauges, as a run that is resumed begins again."""


@dataclass(frozen=True)
class LiveView:
    """The figures of one moment.

    Attributes:
        title: How many ranks and steps, and where most of the time goes, in one line.
        slowest: Which rank takes longest, and where it does or makes others wait, in one line each.
        stages: Share of the last steps by stage, over all ranks, with tokens per second and MFU.
        ranks: A row per rank; of very many ranks the slowest.
        alarms: Warnings and errors of the run, silent ranks, and unusual background metrics.
        has_ended: Whether all ranks have.
        times: The times of ranks that these tables show.
    """

    title: str
    slowest: tuple[str, ...]
    stages: Table
    ranks: Table
    alarms: Table
    has_ended: bool
    times: "RecentTimes"

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that have rows, alarms first."""
        return tuple(each for each in (self.alarms, self.stages, self.ranks) if each.rows)

    @property
    def line(self) -> str:
        """All of it in one line."""
        parts = [self.title, *self.slowest[:1]]
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
        title=_title(run, ranks, times) + _largest(stages),
        slowest=tuple(text for text in (pace.slowest(), behind) if text),
        stages=stages,
        ranks=_ranks(run, ranks, pace),
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
        work_ns: Mean time per step in which each rank did not wait for others.
        stages: That table, see `lightning_rlprof.analysis.stages.stages`.
        rates: Tokens per second and MFU, see `throughput`.
    """

    steps: Mapping[int, "RankSteps"] = field(default_factory=dict)
    stage_ns: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)
    work_ns: Mapping[int, float] = field(default_factory=dict)
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
    own_ns = work.work_ns.sum(axis=1) / np.maximum(work.steps, 1)
    by_rank = dict(zip(work.ranks.tolist(), own_ns.tolist(), strict=True))
    return RecentTimes(steps, stage_ns, waits, by_rank, stages(spans), throughput(spans))


class _Pace:
    """Step times of ranks, and their work, which is compared with that of their role.

    Steps end together where ranks wait for one another, so only work tells who is slow.
    """

    def __init__(self, ranks: Sequence[LiveRank], times: RecentTimes) -> None:
        self.times = times
        self.has_roles = len({each.role for each in ranks}) > 1
        self.step_ns = {
            each.rank: ns for each in ranks if (ns := times.median_ns(each.rank)) is not None
        }
        work = {rank: times.work_ns.get(rank, ns) for rank, ns in self.step_ns.items()}
        by_role: dict[str, list[float]] = {}
        for each in ranks:
            if each.rank in work:
                by_role.setdefault(each.role, []).append(work[each.rank])
        usual = {role: median(times) for role, times in by_role.items() if len(times) > 1}
        self.slowdown = {
            each.rank: work[each.rank] / usual[each.role]
            for each in ranks
            if each.rank in work and usual.get(each.role)
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
            return "work of all ranks within 5%"
        return f"slowest rank {rank}: {self.slowdown[rank]:.2f}x the median rank's work"


def _title(run: LiveRun, ranks: Sequence[LiveRank], times: RecentTimes) -> str:
    if not ranks:
        return "no rank has written yet"
    size = max(run.world_size, len(ranks))
    count = f"{len(ranks)} of {size} ranks" if len(ranks) < size else count_of(size, "rank")
    ended = sum(each.status is not None for each in ranks)
    state = "" if not ended else ", all ended" if ended == len(ranks) else f", {ended} ended"
    if not times.steps:
        return f"{count}{state} · no step has ended yet"
    step = f"step {_span([own.last for own in times.steps.values()])}"
    usual = median(times.median_ns(rank) or 0 for rank in times.steps)
    return f"{count}{state} · {step} · median {duration(round(usual))}"


def _largest(stages: Table) -> str:
    """Return the stage with the largest share, which may be untraced, and its share."""
    if not stages.rows:
        return ""
    most = max(rows_of(stages), key=lambda row: row["share"] or 0.0)
    return f" · {most['stage']} {percent(most['share'] or 0.0)}"


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
    behind, longest = [(0.0, "")], [(0.0, "")]  # The text with the longest time is shown.
    for row in rows_of(times.stages):
        stage, rate = row["stage"], of_stage.get(row["stage"], {})
        means = times.stage_ns.get(stage, {})
        rank = max(means, key=means.__getitem__, default=0)
        others = [mean for number, mean in means.items() if number != rank]
        ratio = means[rank] / median(others) if others and median(others) > 0 else None
        most = (round(means[rank]), rank) if others else (None, None)
        shown = (stage, row["share"], row["mean"], rate.get("tokens/s in stage"), rate.get("MFU"))
        rows.append((*shown, *most, ratio))
        if stage in times.waits:
            behind.append(_behind(times.waits[stage], means, pace))
            continue
        more = means[rank] - median(others) if others else 0.0
        lasts = more <= 2 * pace.excess_ns(rank, means)
        if ratio is not None and ratio >= _ALIKE and lasts:
            text = f"longest in {stage}: rank {rank}, {ratio:.2f}x the others"
            longest.append((more, text))
    note = f"Last {LATELY} steps of each rank. {times.stages.note}".strip()
    return Table("stages", _STAGES, rows, note), max(behind)[1] or max(longest)[1]


def _behind(stage: str, means: Mapping[int, float], pace: _Pace) -> tuple[float, str]:
    """Return how long the others wait for the rank that waits least, and say so."""
    waits = {rank: means.get(rank, 0.0) for rank in pace.step_ns}
    if len(waits) < 2:
        return 0.0, ""
    rank = min(waits, key=waits.__getitem__)
    others = [mean for number, mean in waits.items() if number != rank]
    ns = median(others) - waits[rank]
    if ns < (_ALIKE - 1) * pace.step_ns[rank] or min(others) - waits[rank] < ns / 2:
        return 0.0, ""  # No rank stands apart.
    return ns, f"the others wait {duration(round(ns))} per step for rank {rank} in {stage}"


def _ranks(run: LiveRun, ranks: Sequence[LiveRank], pace: _Pace) -> Table:
    slowest = sorted(ranks, key=lambda each: -pace.slowdown.get(each.rank, 0.0))
    shown = sorted(slowest[:_MAX_RANKS_SHOWN], key=lambda each: each.rank)
    note = f"The {len(shown)} slowest of {len(ranks)} ranks" if len(shown) < len(ranks) else ""
    return Table("ranks", _RANKS, [_row(run, each, pace) for each in shown], note)


def _row(run: LiveRun, rank: LiveRank, pace: _Pace) -> tuple[Cell, ...]:
    steps, usual = pace.times.steps.get(rank.rank), pace.step_ns.get(rank.rank)
    return (
        str(rank.rank),
        rank.role if pace.has_roles else None,
        "0" if steps is None else str(steps.last),
        rank.last_stage or None,
        None if steps is None else int(steps.ns[-1]),
        None if usual is None else round(usual),
        pace.slowdown.get(rank.rank),
        resident(rank),
        device_memory(rank),
        f"{_seconds(run.quiet_s(rank))} ago" if rank.status is None else rank.status,
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


def _seconds(seconds: float) -> str:
    return duration(round(seconds) * 10**9) if seconds >= 60 else f"{seconds:.0f} s"


_ALARM_TEXTS: Mapping[Code, str] = {
    "hang": "hang report: no progress for {time} in step {step}{last}",
    "ended": "ended: {status}",
    "quiet": "nothing written for more than {steps} steps, since step {step}",
    "unreadable": "its file can't be read: {text}",
    "cpu-wait": "training threads wait for a CPU in up to {share:.0%} of the step: all times "
    "include this wait",
    "metric": "{metric} is unusually high. All values: rlprof show RUN device_counters",
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


# ---- metrics


class Sample(NamedTuple):
    """A value of a metric, with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


class Gauge(NamedTuple):
    """A metric: its name, its meaning, and its samples, of which there is at least one."""

    name: str
    meaning: str
    samples: list[Sample]


def gauges(run: LiveRun, view: LiveView) -> list[Gauge]:
    """Return all metrics; one that is not known is absent."""
    by_name: dict[str, list[Sample]] = {name: [] for name in GAUGES}
    for sample in _samples(run, view):
        by_name.setdefault(sample.name, []).append(sample)
    return [
        Gauge(name, GAUGES.get(name) or f"Background metric {name.removeprefix(BACKGROUND)}", found)
        for name, found in by_name.items()
        if found
    ]


def exposition(found: Iterable[Gauge]) -> str:
    """Return metrics as the text that Prometheus reads."""
    lines = []
    for name, meaning, samples in found:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(each.labels)} {each.value!r}" for each in samples]
    return "".join(f"{line}\n" for line in lines)


def _samples(run: LiveRun, view: LiveView) -> Iterator[Sample]:
    ranks = [run.ranks[number] for number in sorted(run.ranks)]
    headers = [each.header for each in ranks if each.header is not None]
    if headers:
        labels = {"run": run.run.resolve().name, "device": headers[0].hardware}
        yield Sample("rlprof_run_info", labels, 1)
        yield Sample("rlprof_world_size_ranks", {}, run.world_size)
    yield Sample("rlprof_ranks", {}, len(ranks))
    ended = sum(each.status is not None for each in ranks)
    yield Sample("rlprof_ended_ranks", {}, ended)
    levels = view.alarms.column("level")
    for level in ("warning", "error"):
        yield Sample("rlprof_alarms", {"level": level}, levels.count(level))
    for stage, mfu in zip(view.stages.column("stage"), view.stages.column("MFU"), strict=True):
        if isinstance(mfu, float):
            yield Sample("rlprof_stage_mfu_ratio", {"stage": str(stage)}, mfu)
    rates = [] if view.times.rates is None else rows_of(view.times.rates)
    for each in ranks:
        yield from _of_rank(run, each, view.times)
        labels = {"rank": str(each.rank), "role": each.role}
        for row in rates:
            per_s = row["tokens/s in stage"]
            if row["rank"] == each.rank and isinstance(per_s, float):
                of_stage = {**labels, "stage": row["stage"]}
                yield Sample("rlprof_stage_tokens_per_second", of_stage, per_s)


def _of_rank(run: LiveRun, rank: LiveRank, times: RecentTimes) -> Iterator[Sample]:
    labels = {"rank": str(rank.rank), "role": rank.role}
    own = times.steps.get(rank.rank)
    yield Sample("rlprof_step", labels, own.last if own is not None else rank.last_step)
    if own is not None:
        yield Sample("rlprof_step_duration_seconds", labels, float(own.ns[-1]) / 1e9)
        usual = times.median_ns(rank.rank) or 0
        yield Sample("rlprof_step_duration_median_seconds", labels, usual / 1e9)
    for stage, means in times.stage_ns.items():
        if rank.rank in means:
            of_stage = {**labels, "stage": stage}
            yield Sample("rlprof_stage_duration_seconds", of_stage, means[rank.rank] / 1e9)
    if (used := resident(rank)) is not None:
        yield Sample("rlprof_resident_memory_bytes", labels, used)
    if (used := device_memory(rank)) is not None:
        yield Sample("rlprof_device_memory_bytes", labels, used)
    if rank.status is None:
        yield Sample("rlprof_quiet_seconds", labels, run.quiet_s(rank))
    for name, value in rank.metrics.items():
        yield Sample(BACKGROUND + _NO_NAME.sub("_", name), labels, value)


def _labels(labels: Mapping[str, str]) -> str:
    pairs: Sequence[str] = [f'{name}="{_escaped(text)}"' for name, text in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
