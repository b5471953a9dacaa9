"""What a run that is being written shows: steps, stages, ranks, background metrics, alarms.

`rlprof watch` and `rlprof serve` show the same figures.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from lightning_rlprof.analysis.efficiency.model_flops import (
    counted_flops,
    model_from,
    recorded_model,
)
from lightning_rlprof.analysis.efficiency.peak_flops import recorded_device
from lightning_rlprof.analysis.models.architecture import Model
from lightning_rlprof.analysis.steps.time_categories import Category, category_of
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.loaders.live_run import LATELY, LiveRank, LiveRun
from lightning_rlprof.report.terminal import duration, percent, size
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of, figure

_MOST_ROWS = 16  # ranks; of more ranks, blocks are shown
_MOST_ALARMS = 12
_ALIKE = 1.05
_QUIET_STEPS = 5
_LEAST_QUIET_S = 10.0
_LEAST_HANG_S = 1.0  # less, if a rank that runs reports because another one hangs
_WAITS = (Category.COLLECTIVE_WAIT, Category.COMMUNICATION)

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
        background: Background metrics, if the run has some.
        alarms: Warnings and errors of the run, and ranks that write nothing.
        has_ended: Whether all ranks have.
    """

    title: str
    slowest: tuple[str, ...]
    stages: Table
    ranks: Table
    background: Table
    alarms: Table
    has_ended: bool

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that have rows, alarms first."""
        found = (self.alarms, self.stages, self.ranks, self.background)
        return tuple(table for table in found if table.rows)

    @property
    def line(self) -> str:
        """All of it in one line."""
        stage = self.stages.rows[0] if self.stages.rows else None
        parts = [self.title, *self.slowest[:1]]
        if stage is not None:
            parts.append(f"{stage[0]} {percent(float(stage[1] or 0))}")
        if count := len(self.alarms.rows):
            parts.append(f"{count} alarm{'s' * (count > 1)}: {self.alarms.rows[0][2]}")
        return " · ".join(parts)


def live_view(run: LiveRun) -> LiveView:
    """Return what to show of a run after `LiveRun.refresh`."""
    ranks = [run.ranks[number] for number in sorted(run.ranks)]
    pace = _Pace(ranks)
    stages, behind = _stages(ranks, pace)
    return LiveView(
        title=_title(run, ranks),
        slowest=tuple(text for text in (pace.slowest(), behind) if text),
        stages=stages,
        ranks=_ranks(run, ranks, pace),
        background=_background(ranks),
        alarms=_alarms(run, ranks),
        has_ended=run.has_ended,
    )


def rank_ranges(numbers: Iterable[int]) -> str:
    """Return numbers of ranks in short.

    Example::

        >>> rank_ranges([3, 0, 1, 2, 7])
        '0-3, 7'
    """
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


class _Pace:
    """Step times of ranks, each compared with those of its role."""

    def __init__(self, ranks: Sequence[LiveRank]) -> None:
        self.has_roles = len({each.role for each in ranks}) > 1
        self.step_ns = {each.rank: ns for each in ranks if (ns := each.step_ns) is not None}
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

    def excess_ns(self, rank: int, among: Iterable[int]) -> float:
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


def _title(run: LiveRun, ranks: Sequence[LiveRank]) -> str:
    if not ranks:
        return "no rank has written yet"
    size = max(run.world_size, len(ranks))
    count = f"{len(ranks)} of {size} ranks" if len(ranks) < size else _count(size, "rank")
    ended = sum(each.status is not None for each in ranks)
    state = "" if not ended else ", all ended" if ended == len(ranks) else f", {ended} ended"
    times = [ns for each in ranks if (ns := each.step_ns) is not None]
    if not any(each.last_step for each in ranks):
        return f"{count}{state} · no step has ended yet"
    step = f"step {_span([each.last_step for each in ranks])}"
    return f"{count}{state} · {step}" + (
        f" · median {duration(round(median(times)))}" if times else ""
    )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _stages(ranks: Sequence[LiveRank], pace: _Pace) -> tuple[Table, str]:
    """Return the table of stages, and which rank the others wait for, or why its step is longer.

    A rank that takes longer in a stage may wait there for others. It does not if its step is longer
    by as much: ranks that wait for each other have equal steps.
    """
    total = sum(step.ns for each in ranks for step in each.steps)
    by_stage: dict[str, dict[int, float]] = {}
    sums: Counter[str] = Counter()
    for each in ranks:
        for stage, ns in each.stage_ns.items():
            sums[stage] += ns
            by_stage.setdefault(stage, {})[each.rank] = ns / len(each.steps)
    rows: list[tuple[Cell, ...]] = []
    rates = _rates(ranks)
    most, text, waits = 0.0, "", _Behind()
    for stage, ns in sums.most_common():
        means = by_stage[stage]
        rank = max(means, key=means.__getitem__)
        others = [mean for number, mean in means.items() if number != rank]
        ratio = means[rank] / median(others) if others and median(others) > 0 else None
        row = (stage, ns / total if total else None, round(ns / _steps(ranks, means)))
        longest = (round(means[rank]), rank) if others else (None, None)
        rows.append((*row, *rates.get(stage, (None, None)), *longest, ratio))
        if category_of(stage) in _WAITS:
            waits = max(waits, _behind(stage, means, pace))
            continue
        more = means[rank] - median(others) if others else 0.0
        lasts = more <= 2 * pace.excess_ns(rank, means)
        if more > most and ratio is not None and ratio >= _ALIKE and lasts:
            most, text = more, f"longest in {stage}: rank {rank}, {ratio:.2f}x the others"
    if rows and (rest := total - sum(sums.values())) > 0:
        steps = sum(len(each.steps) for each in ranks)
        rows.append(("untraced", rest / total, round(rest / steps), *[None] * 5))
    note = f"Last {LATELY} steps of each rank, without captured ones"
    why = None if rows else "no stage has ended in a complete step"
    return Table("stages", _STAGES, rows, note, abstained=why), waits.text or text


class _Behind(NamedTuple):
    """How long the others wait for a rank in a stage of waiting."""

    ns: float = 0.0
    text: str = ""


def _behind(stage: str, means: Mapping[int, float], pace: _Pace) -> _Behind:
    """Return the rank that waits least, as it comes last, if one stands apart."""
    if len(means) < 2:
        return _Behind()
    rank = min(means, key=means.__getitem__)
    others = [mean for number, mean in means.items() if number != rank]
    ns = median(others) - means[rank]
    step_ns = pace.step_ns.get(rank, 0.0)
    if ns < (_ALIKE - 1) * step_ns or min(others) - means[rank] < ns / 2:
        return _Behind()
    return _Behind(ns, f"the others wait {duration(round(ns))} per step for rank {rank} in {stage}")


def _rates(ranks: Sequence[LiveRank]) -> dict[str, tuple[float | None, float | None]]:
    """Return tokens per second and MFU of stages that counted something, of the whole job.

    They are those of `throughput`: the sum of all ranks over the mean of their times. If only some
    ranks of a stage count its tokens, MFU takes the time of the others too.
    """
    counts = {each.rank: each.counts for each in ranks if each.steps}
    stages = {stage for own in counts.values() for stage, _ in own}
    headers = {each.rank: each.header for each in ranks if each.header and stages}
    model = _model([header.config for header in headers.values()])
    by_name = {header.hardware: recorded_device(header) for header in headers.values()}
    peaks = {
        rank: device.tflops * 1_000  # FLOPs per ns
        for rank, header in headers.items()
        if (device := by_name[header.hardware]) is not None
    }
    found: dict[str, tuple[float | None, float | None]] = {}
    for stage in stages:
        tokens = [own[stage, "tokens"] for own in counts.values() if (stage, "tokens") in own]
        amount, ns = sum(each for each, _ in tokens), sum(each for _, each in tokens)
        done = {
            rank: flops
            for rank, own in counts.items()
            if (flops := counted_flops(stage, own, model)) is not None
        }
        times = {rank: of_rank for rank, (_, of_rank) in done.items()}
        if done and not any((stage, "flops") in own for own in counts.values()):
            others = (each for each in ranks if each.steps and each.rank not in done)
            times |= {each.rank: each.stage_ns[stage] for each in others if stage in each.stage_ns}
        most = sum(times[rank] * peaks.get(rank, 0) for rank in times)
        known = most > 0 and all(rank in peaks for rank in times)
        mfu = sum(flops for flops, _ in done.values()) / most if known else None
        per_s = amount * len(tokens) / ns * 1e9 if ns else None
        found[stage] = per_s, mfu if mfu is not None and mfu <= 1 else None
    return found


def _model(configs: Sequence[Mapping[str, Any]]) -> Model | None:
    """Return the model that the run recorded; of an unknown type, none."""
    recorded = recorded_model(configs)
    with suppress(RlprofError):
        return None if recorded is None else model_from(recorded)
    return None


def _steps(ranks: Sequence[LiveRank], among: "dict[int, float]") -> int:
    return sum(len(each.steps) for each in ranks if each.rank in among) or 1


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
    last = [each.steps[-1].ns for each in block if each.steps]
    times = [pace.step_ns[each.rank] for each in block if each.rank in pace.step_ns]
    slow = {each.rank: pace.slowdown[each.rank] for each in block if each.rank in pace.slowdown}
    slowest = max(slow, key=slow.__getitem__) if slow else None
    return (
        rank_ranges(each.rank for each in block),
        ", ".join(sorted({each.role for each in block})) if pace.has_roles else None,
        _span([each.last_step for each in block]),
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
    for name in sorted({name for each in ranks for name in each.metrics}):
        values = {each.rank: each.metrics[name] for each in ranks if name in each.metrics}
        high = max(values, key=values.__getitem__)
        shown = (min(values.values()), median(values.values()), values[high])
        rank = high if len(values) > 1 else None
        rows.append((name, *(_metric(name, value) for value in shown), rank))
    return Table("background metrics", _METRICS, rows)


def _metric(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return size(round(value))
    if name.endswith("_bytes_per_s"):
        return f"{size(round(value))}/s"
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    return f"{figure(value)} {unit}".strip()


def _alarms(run: LiveRun, ranks: Sequence[LiveRank]) -> Table:
    found: dict[tuple[str, str], list[int]] = {}
    for hang in run.hangs.values():
        rank = run.ranks.get(hang.rank)
        is_quiet = hang.cause != "recovered" and hang.quiet_s >= _LEAST_HANG_S
        if rank is not None and rank.status is None and is_quiet:
            last = f", last span {hang.last_span}" if hang.last_span else ""
            text = f"no progress for {_seconds(hang.quiet_s)} in step {hang.step}{last}"
            found.setdefault(("error", f"hang report: {text}"), []).append(hang.rank)
    for each in ranks:
        if each.status not in (None, "finished"):
            found.setdefault(("error", f"ended: {each.status}"), []).append(each.rank)
        elif each.status is None and (text := _quiet(run, each)):
            found.setdefault(("error", text), []).append(each.rank)
    notes: dict[tuple[str, str], list[int]] = {}
    for each in ranks:
        for level, text in reversed(each.notes):
            notes.setdefault((level, text), []).append(each.rank)
    found |= dict(sorted(notes.items(), key=lambda item: item[0][0]))  # errors first
    rows = [(level, rank_ranges(of), text) for (level, text), of in found.items()]
    note = f"and {len(rows) - _MOST_ALARMS} more" if len(rows) > _MOST_ALARMS else ""
    return Table("alarms", _ALARMS, rows[:_MOST_ALARMS], note)


def _quiet(run: LiveRun, rank: LiveRank) -> str:
    """Return that a rank has written nothing for longer than a few of its steps."""
    usual = rank.step_ns
    if usual is None or not run.quiet_s(rank) > max(_QUIET_STEPS * usual / 1e9, _LEAST_QUIET_S):
        return ""
    return f"nothing written for more than {_QUIET_STEPS} steps, since step {rank.last_step}"
