"""What a run that is being written shows: the first screen of its report, ranks and alarms.

`rlprof watch` and `rlprof serve` show the same figures. `gauges` are figures as metrics,
`exposition` writes them in the text format of Prometheus.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.alarms import Alarm, Code, RankState, alarms
from lightning_rlprof.analysis.diagnosis.diagnosis import Diagnosis, diagnose
from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.analysis.stages import StepTimes
from lightning_rlprof.analysis.steps.step_matrix import WAITING
from lightning_rlprof.analysis.steps.step_selection import counted
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.live_run import RECENT, LiveRank, LiveRun
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.rank_names import as_ranges
from lightning_rlprof.report.summary import Summary, first_lines, run_line, summary
from lightning_rlprof.report.terminal import count_of, duration, percent
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of, rows_of

EVERY_S = 1.0
"""Seconds between two refreshes."""

_REST = 3  # Times as long as a refresh took, which is a second with a thousand ranks.
_DIAGNOSIS_REST = 9  # Times as long as a diagnosis took, which is seconds with 64 ranks.
_MAX_RANKS_SHOWN = 16  # Ranks; of more, the slowest are shown.
_MOST_ALARMS = 12
_ALIKE = 1.05  # Times the work of the median rank; ranks below that are alike.
_BUSY = "device_busy_percent"

_STAGES = (
    Column("stage", "text"),
    Column("share", "share"),
    *columns_of("duration", "mean", "p50", unit="ns"),
    Column("tokens/s in stage", "number"),
    Column("MFU", "share"),
    Column("slowest rank", "count"),
    Column("slowest / peers", "ratio"),
)
_RANKS = (
    *columns_of("text", "rank", "role", "step", "last stage"),
    *columns_of("duration", "last", "median", unit="ns"),
    Column("slowdown", "ratio"),
    Column("device busy", "share"),
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
    "rlprof_step_duration_median_seconds": f"Median time of the last {RECENT} steps",
    "rlprof_stage_duration_seconds": f"Mean time of a stage per step, of the last {RECENT} steps",
    "rlprof_stage_tokens_per_second": f"Tokens per second in a stage, of the last {RECENT} steps",
    "rlprof_stage_mfu_ratio": f"MFU of a stage, of all ranks, of the last {RECENT} steps",
    "rlprof_resident_memory_bytes": "Resident memory on the host, with child processes",
    "rlprof_device_memory_bytes": "Memory that is in use on the device",
    "rlprof_quiet_seconds": "Time since the rank has written; absent when it has ended",
}
"""Names and meanings. All are gauges, as a run that is resumed begins again."""


class LiveScreen:
    """Follow a run: each `view` reads what was appended.

    What is wrong with the run is looked for in a thread of its own, a tenth of the time at most,
    because that can take seconds. When all ranks have ended, the whole run is read once: its
    figures are then those of `rlprof report`.

    Args:
        run: The run.
        clock: Seconds, monotonic.

    Attributes:
        pause_s: How long to wait until the next view, so that it takes a quarter of a CPU at most.
    """

    def __init__(self, run: LiveRun, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self._clock = run, clock
        self._diagnosis: Diagnosis | None = None
        self._thread: threading.Thread | None = None
        self._next_at, self.pause_s = float("-inf"), EVERY_S
        self._whole: Spans | None = None

    def view(self) -> "LiveView":
        """Return what to show now; the first one waits until problems were looked for."""
        begin = time.thread_time()
        self.run.refresh()
        spans = self.run.spans
        if spans is None:
            return live_view(self.run)
        if self.run.has_ended:
            if self._whole is None:
                with suppress(TraceError):  # The window is shown of what cannot be read whole.
                    self._whole = load(self.run.run)
            return live_view(self.run, spans if self._whole is None else self._whole)
        self._whole = None
        if self._diagnosis is None:
            self._diagnose(spans)
            begin = time.thread_time()  # Later refreshes do not wait for this.
        elif self._clock() >= self._next_at and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._diagnose, args=(spans,), daemon=True)
            self._thread.start()
        view = live_view(self.run, spans, self._diagnosis)
        took = time.thread_time() - begin
        self.pause_s = max(EVERY_S - took, _REST * took)
        return view

    def _diagnose(self, spans: Spans) -> None:
        begin = time.thread_time()
        self._diagnosis = diagnose(spans)
        self._next_at = self._clock() + _DIAGNOSIS_REST * (time.thread_time() - begin)


@dataclass(frozen=True)
class LiveView:
    """The figures of one moment.

    Attributes:
        title: How many ranks and steps, and where most of the time goes, in one line.
        found: The first screen, of the same steps as the tables; None before the first header.
        spans: These steps: the last ones, or all when the run has ended.
        stages: Share of the steps by stage, over all ranks, with tokens per second and MFU.
        ranks: A row per rank; of very many ranks the slowest.
        alarms: Warnings and errors of the run, silent ranks, and unusual background metrics.
        slowest: Which rank has most work, unless ranks are alike: empty then.
        busy: How busy devices were when they were last asked; empty if that is unknown.
        has_ended: Whether all ranks have.
    """

    title: str
    found: Summary | None
    spans: Spans | None
    stages: Table
    ranks: Table
    alarms: Table
    slowest: str
    busy: str
    has_ended: bool

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that have rows, alarms first."""
        return tuple(each for each in (self.alarms, self.stages, self.ranks) if each.rows)

    @property
    def facts(self) -> tuple[str, ...]:
        """How long steps take, what to fix first, which rank is slow, and how busy devices are."""
        found = self.found
        if found is None or not found.steps or self.spans is None:
            return ()
        last = "" if self.spans.from_start else "last "
        problems = [] if found.median_ns is None else first_lines(found)
        return tuple(filter(None, (f"{last}{run_line(found)}", *problems, self.slowest, self.busy)))

    @property
    def line(self) -> str:
        """All of it in one line."""
        parts = [self.title]
        if self.found is not None and self.found.first and self.found.median_ns is not None:
            parts += first_lines(self.found)[:1]
        if count := len(self.alarms.rows):
            parts.append(f"{count} alarm{'s' * (count > 1)}: {self.alarms.rows[0][2]}")
        return " · ".join(parts)


def live_view(
    run: LiveRun, spans: Spans | None = None, diagnosis: Diagnosis | None = None
) -> LiveView:
    """Return what to show of a run after `LiveRun.refresh`.

    Args:
        run: The run.
        spans: Steps to show; None for the last ones.
        diagnosis: What is known to be wrong; None to look for it now.
    """
    ranks = [run.ranks[number] for number in sorted(run.ranks)]
    spans = run.spans if spans is None else spans
    times = RecentTimes() if spans is None else recent_times(spans)
    found = None if spans is None else summary(spans, diagnosis=diagnosis)
    slowdown = _slowdown(ranks, times)
    return LiveView(
        title=_title(run, ranks, times, found),
        found=found,
        spans=spans,
        stages=_stages(times),
        ranks=_ranks(run, ranks, times, slowdown),
        alarms=_alarms(run, ranks, times),
        slowest=_slowest(slowdown),
        busy=_busy(ranks),
        has_ended=run.has_ended,
    )


@dataclass(frozen=True, eq=False)
class RecentTimes:
    """The times of included steps, by the analyses that `rlprof summary` uses.

    Attributes:
        steps: The steps of each rank.
        stage_ns: Mean time per step of each stage on each rank that ran it, without waiting; what
            ranks waited has names of its own, as in the table of stages.
        work_ns: Mean time per step in which each rank did not wait for others.
        steps_of_run: The same of all ranks together.
        rates: Tokens per second and MFU, see `throughput`.
    """

    steps: Mapping[int, "RankSteps"] = field(default_factory=dict)
    stage_ns: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    work_ns: Mapping[int, float] = field(default_factory=dict)
    steps_of_run: StepTimes | None = None
    rates: Table | None = None

    def median_ns(self, rank: int) -> float | None:
        """Return the median time of a rank's steps; None if there is none."""
        own = self.steps.get(rank)
        return None if own is None else float(np.median(own.ns))


class RankSteps(NamedTuple):
    """The last step of a rank, and the time of each of its included steps."""

    last: int
    ns: Int64s


def recent_times(spans: Spans) -> RecentTimes:
    """Return the times of the included steps."""
    times = StepTimes(spans)
    matrix, work = times.matrix, times.work
    last = {
        rank: int(spans.step[spans.rows(kind="step", rank=rank)].max(initial=0))
        for rank in spans.ranks
    }
    if not len(matrix.steps):
        return RecentTimes()
    choice = counted(spans, matrix.steps)
    rows = matrix.steps[choice.mask]
    ranks, first = np.unique(spans.rank[rows], return_index=True)
    ns = np.split(spans.took_ns(rows), first[1:])
    stage_ns: dict[str, dict[int, float]] = {}
    for of_ranks, name in ((work.work_ns[:, :-1], "{}"), (work.waits_ns[:, :-1], WAITING)):
        means = of_ranks / np.maximum(work.steps, 1)[:, None]
        for row, code in np.argwhere(of_ranks > 0).tolist():
            own = stage_ns.setdefault(name.format(spans.names[code]), {})
            own[int(work.ranks[row])] = float(means[row, code])
    steps = {rank: RankSteps(last[rank], own) for rank, own in zip(ranks.tolist(), ns, strict=True)}
    own_ns = work.work_ns.sum(axis=1) / np.maximum(work.steps, 1)
    by_rank = dict(zip(work.ranks.tolist(), own_ns.tolist(), strict=True))
    return RecentTimes(steps, stage_ns, by_rank, times, throughput(spans))


def _slowdown(ranks: Sequence[LiveRank], times: RecentTimes) -> dict[int, float]:
    """Return the work of each rank by that of the median rank of its role.

    Steps end together where ranks wait for one another, so only work tells who is slow.
    """
    work = {each.rank: times.work_ns[each.rank] for each in ranks if each.rank in times.work_ns}
    by_role: dict[str, list[float]] = {}
    for each in ranks:
        if each.rank in work:
            by_role.setdefault(each.role, []).append(work[each.rank])
    usual = {role: median(own) for role, own in by_role.items() if len(own) > 1}
    return {
        each.rank: work[each.rank] / usual[each.role]
        for each in ranks
        if each.rank in work and usual.get(each.role)
    }


def _slowest(slowdown: Mapping[int, float]) -> str:
    rank = max(slowdown, key=slowdown.__getitem__, default=-1)
    if slowdown.get(rank, 0.0) < _ALIKE:
        return ""
    return f"slowest rank {rank}: {slowdown[rank]:.2f}x the median rank's work"


def _title(
    run: LiveRun, ranks: Sequence[LiveRank], times: RecentTimes, found: Summary | None
) -> str:
    if not ranks or found is None:
        return "no rank has written yet"
    size = max(run.world_size, len(ranks))
    count = f"{len(ranks)} of {size} ranks" if len(ranks) < size else count_of(size, "rank")
    ended = sum(each.status is not None for each in ranks)
    state = "" if not ended else ", all ended" if ended == len(ranks) else f", {ended} ended"
    if not times.steps:
        return f"{count}{state} · no step has ended yet"
    text = f"{count}{state} · step {_span([own.last for own in times.steps.values()])}"
    if found.median_ns is not None:
        text += f" · median {duration(found.median_ns)}"
    if all(part.kind == "untraced" for part in found.parts):
        return text
    most = max(found.parts, key=lambda part: part.share)  # It may be untraced nevertheless.
    return f"{text} · {most.name} {percent(most.share)}"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _stages(times: RecentTimes) -> Table:
    own = times.steps_of_run
    if own is None or times.rates is None or not times.stage_ns:
        why = "no stage has ended in a complete step"
        return Table("stages", _STAGES, abstained=why)
    rates = rows_of(times.rates)
    of_job = {row["stage"]: row for row in rates if row["rank"] is None}
    of_stage = {row["stage"]: row for row in reversed(rates)} | of_job
    rows: list[tuple[Cell, ...]] = []
    for part in own.parts:
        if part.total_ns or part.kind == "untraced":
            found, rate = own.statistics(part), of_stage.get(part.name, {})
            slowest = own.slowest.get(part.name, (None, None)) if part.kind == "stage" else ()
            facts = (part.name, found.share, found.mean, found.p50)
            rates_of_job = (rate.get("tokens/s in stage"), rate.get("MFU"))
            rows.append((*facts, *rates_of_job, *(slowest or (None, None))))
    return Table("stages", _STAGES, rows, own.note)


def _ranks(
    run: LiveRun, ranks: Sequence[LiveRank], times: RecentTimes, slowdown: Mapping[int, float]
) -> Table:
    has_roles = len({each.role for each in ranks}) > 1
    slowest = sorted(ranks, key=lambda each: -slowdown.get(each.rank, 0.0))
    shown = sorted(slowest[:_MAX_RANKS_SHOWN], key=lambda each: each.rank)
    note = f"The {len(shown)} slowest of {len(ranks)} ranks" if len(shown) < len(ranks) else ""
    rows: list[tuple[Cell, ...]] = []
    for each in shown:
        steps, usual = times.steps.get(each.rank), times.median_ns(each.rank)
        busy = each.metrics.get(_BUSY)
        row = (
            str(each.rank),
            each.role if has_roles else None,
            "0" if steps is None else str(steps.last),
            each.last_stage or None,
            None if steps is None else int(steps.ns[-1]),
            None if usual is None else round(usual),
            slowdown.get(each.rank),
            None if busy is None else busy / 100,
            resident(each),
            device_memory(each),
            f"{_seconds(run.quiet_s(each))} ago" if each.status is None else each.status,
        )
        rows.append(row)
    return Table("ranks", _RANKS, rows, note)


def _busy(ranks: Sequence[LiveRank]) -> str:
    shares = {each.rank: each.metrics[_BUSY] / 100 for each in ranks if _BUSY in each.metrics}
    if not shares:
        return ""
    text = f"devices busy {percent(sum(shares.values()) / len(shares))}"
    if len(shares) == 1:
        return text
    low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    return f"{text} (rank {low}: {percent(shares[low])}, rank {high}: {percent(shares[high])})"


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
    recent = run.recent
    times = RecentTimes() if recent is None else recent_times(recent)
    for sample in _samples(run, view, times):
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


def _samples(run: LiveRun, view: LiveView, times: RecentTimes) -> Iterator[Sample]:
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
    rates = [] if times.rates is None else rows_of(times.rates)
    of_job = {row["stage"]: row["MFU"] for row in reversed(rates)}
    of_job |= {row["stage"]: row["MFU"] for row in rates if row["rank"] is None}
    for stage, mfu in of_job.items():
        if isinstance(mfu, float):
            yield Sample("rlprof_stage_mfu_ratio", {"stage": stage}, mfu)
    for each in ranks:
        yield from _of_rank(run, each, times)
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
