"""Tokens and samples per second of each stage, and how much of the hardware's peak that used."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_rlprof.analysis.efficiency.peak_flops import (
    attention_flops,
    kind_of,
    peak_of,
    token_flops,
)
from lightning_rlprof.analysis.stages.partition import containing_step
from lightning_rlprof.analysis.step_selection import counted
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.arrays import Float64s, Int64s
from lightning_rlprof.tables.intervals import unions
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Cell, Column, Table

_COLUMNS = (
    Column("stage", "text"),
    Column("rank", "count"),
    Column("tokens/s", "number"),
    Column("samples/s", "number"),
    Column("MFU", "share"),
    Column("TFLOP/s", "number", "TFLOP/s"),
    Column("peak TFLOP/s", "number", "TFLOP/s"),
    Column("FLOPs source", "text"),
    Column("tokens", "count"),
    Column("samples", "count"),
    Column("time", "duration", "ns"),
    Column("ranks", "count"),
)
_NOTE = (
    "Time is that in which a span of the stage with the counter was open on its rank. A row "
    "without rank is the job: what all ranks did, by the mean of their times."
)
_NAMES = [column.name for column in _COLUMNS]
_NOTHING = "no stage counted tokens, samples or flops: call count(tokens=…) inside of it"
_COUNTERS = ("tokens", "samples", "flops")
_SILENT = "silent"  # ranks that ran a stage, and counted no tokens of it where others did
_MEASURED, _STATED = "counter", "user"

PerStage = Mapping[str, float]
"""A number by the name of a stage."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers, width and tokens per sequence of a transformer, for the FLOPs of its attention."""

    layers: int
    hidden: int
    length: float


@dataclass(frozen=True, eq=False)
class _Known:
    """What the caller states, see `throughput`, and the peak of each rank's device."""

    per_token: PerStage
    parameters: float | PerStage | None
    shape: Shape | None
    peaks: Mapping[int, float | None]


Work = dict[int, tuple[float, int]]
"""By rank: how much a stage counted, and the nanoseconds in which it did."""


def throughput(
    spans: Spans,
    *,
    flops_per_token: PerStage | None = None,
    parameters: float | PerStage | None = None,
    shape: Shape | None = None,
    peak_tflops: float | None = None,
) -> Table:
    """Return tokens and samples per second of each stage, per rank and of the job, and its MFU.

    From the counters ``tokens``, ``samples`` and ``flops`` of spans, in steps without a capture.
    FLOPs: those stated per token, else the counter, else by formula. MFU above 100 % is refused.

    Args:
        spans: The run.
        flops_per_token: By stage.
        parameters: Of the model, one number or by stage, see `token_flops`.
        shape: Adds attention to what ``parameters`` give.
        peak_tflops: Of each device; None looks up what the rank's header names.

    Raises:
        RlprofError: A number is not above 0 and below 1e18, or a stage is not in the run.
    """
    known = _known(spans, flops_per_token, parameters, shape, peak_tflops)
    stages, note = _stages(spans)
    work = _works(spans, stages)
    if not any(work.values()):
        return Table("throughput", _COLUMNS, abstained=_NOTHING)
    rows, doubts = _judged(spans, _rows(spans, work, known), known)
    return Table("throughput", _COLUMNS, rows, " ".join(filter(None, [note, *doubts, _NOTE])))


def _known(
    spans: Spans,
    per_token: PerStage | None,
    parameters: float | PerStage | None,
    shape: Shape | None,
    peak: float | None,
) -> _Known:
    _check(spans, flops_per_token=per_token, parameters=parameters, peak_tflops=peak)
    peaks = {rank: peak or peak_of(header.hardware) for rank, header in spans.headers.items()}
    return _Known(per_token or {}, parameters, shape, peaks)


def _check(spans: Spans, **given: float | PerStage | None) -> None:
    stages = {spans.names[code] for code in np.unique(spans.name[spans.rows(kind="stage")])}
    for option, told in given.items():
        named = told if isinstance(told, Mapping) else {"": told}
        for stage, value in named.items():
            if stage and stage not in stages:
                there = ", ".join(sorted(stages))
                raise RlprofError(f"{option}: {stage!r} is no stage of this run, which has {there}")
            if value is not None and not 0 < value < 1e18:
                raise RlprofError(f"{option} {value}: takes a number above 0 and below 1e18")


def _stages(spans: Spans) -> tuple[Int64s, str]:
    """Return the spans of stages that begin in a step that counts, and which steps do not."""
    steps, stages = spans.rows(kind="step"), spans.rows(kind="stage")
    choice = counted(spans, steps)
    if len(steps):
        step = containing_step(spans, steps, stages, spans.rank)
        other = ~np.isin(spans.rank[stages], spans.rank[steps])  # a role that knows no steps
        stages = stages[other | ((step >= 0) & choice.mask[step])]
    return stages, choice.note


def _works(spans: Spans, stages: Int64s) -> dict[str, dict[int, Work]]:
    work = {name: _work(spans, name, stages) for name in _COUNTERS}
    return work | {_SILENT: _silent(spans, stages, work["tokens"])}


def _work(spans: Spans, counter: str, stages: Int64s) -> dict[int, Work]:
    """Return per stage and rank what a counter adds up to, and how long its spans were open."""
    rows, values = spans.amounts(counter)
    keep = np.isin(rows, stages)
    rows, amounts = rows[keep], values[keep]
    found = {}
    for code in np.unique(spans.name[rows]).tolist():
        mine = spans.name[rows] == code
        found[code] = _by_rank(spans, rows[mine], amounts[mine])
    return found


def _by_rank(spans: Spans, rows: Int64s, amounts: Float64s) -> Work:
    """Return what spans of a stage counted on each rank, and how long one at least was open."""
    ranks, place = np.unique(spans.rank[rows], return_inverse=True)
    total = np.bincount(place, amounts).tolist()
    owner, first, last = unions(place, spans.start_ns[rows], spans.end_ns[rows])
    ns = np.zeros(len(ranks), np.int64)
    np.add.at(ns, owner, last - first)
    return dict(zip(ranks.tolist(), zip(total, ns.tolist(), strict=True), strict=True))


def _silent(spans: Spans, stages: Int64s, tokens: Mapping[int, Work]) -> dict[int, Work]:
    found = {}
    for code, told in tokens.items():
        rows = stages[spans.name[stages] == code]
        rows = rows[~np.isin(spans.rank[rows], list(told))]
        found[code] = _by_rank(spans, rows, np.zeros(len(rows)))
    return found


class _Sum(NamedTuple):
    """What some ranks did of a counter: how much, in how much time of theirs, and how many."""

    amount: float
    ns: int
    ranks: int

    @property
    def per_second(self) -> float | None:
        """What ranks did beside one another: by the mean of their times."""
        return self.amount * self.ranks / self.ns * 1e9 if self.ns else None

    @property
    def total(self) -> int | None:
        """The amount as a whole number, None where nothing was counted."""
        return round(self.amount) if self.ranks else None


def _sum(work: Work, ranks: Iterable[int]) -> _Sum:
    own = [work[rank] for rank in ranks if rank in work]
    return _Sum(sum(amount for amount, _ in own), sum(ns for _, ns in own), len(own))


def _rows(
    spans: Spans, work: Mapping[str, Mapping[int, Work]], known: _Known
) -> list[tuple[Cell, ...]]:
    """Return the rows of all stages, that with the most time first."""
    found = []
    for code in sorted({code for name in _COUNTERS for code in work[name]}):
        mine = {name: own.get(code, {}) for name, own in work.items()}
        longest = max(_sum(mine[name], mine[name]).ns for name in _COUNTERS)
        found.append((-longest, _of_stage(spans.names[code], mine, known)))
    return [row for _, rows in sorted(found, key=lambda each: each[0]) for row in rows]


def _of_stage(stage: str, work: Mapping[str, Work], known: _Known) -> list[tuple[Cell, ...]]:
    """Return the row of the job, where several ranks ran the stage, and one of each rank."""
    source, flops = _flops(stage, work, known)
    ranks = sorted({rank for name in _COUNTERS for rank in work[name]})
    shared = source != _MEASURED and bool(flops.keys() - work["tokens"].keys())
    groups = [(None, ranks)] if len(ranks) > 1 or shared else []
    rows: list[tuple[Cell, ...]] = []
    for rank, group in [*groups, *((rank, [rank]) for rank in ranks)]:
        tokens, samples = (_sum(work[name], group) for name in ("tokens", "samples"))
        whose = list(flops) if rank is None else [rank] * (not shared)  # else they are not its own
        done, peak = _sum(flops, whose), _peak(flops, whose, known.peaks)
        achieved = done.amount / done.ns / 1_000 if done.ns else None  # per ns it is 10^9 per s
        share = achieved / peak if achieved is not None and peak else None
        rates = (tokens.per_second, samples.per_second, share, achieved, peak)
        told = source if done.ranks else None
        time = max(each.ns // max(each.ranks, 1) for each in (tokens, samples, done))
        rows.append((stage, rank, *rates, told, tokens.total, samples.total, time, len(group)))
    return rows


def _peak(flops: Work, ranks: list[int], peaks: Mapping[int, float | None]) -> float | None:
    """Return the peak of the devices of some ranks, weighed by their times; None for unknown."""
    total, ns = 0.0, 0
    for rank in ranks:
        if rank in flops:
            peak = peaks.get(rank)
            if peak is None:
                return None
            total, ns = total + flops[rank][1] * peak, ns + flops[rank][1]
    return total / ns if ns else None


def _flops(stage: str, work: Mapping[str, Work], known: _Known) -> tuple[str, Work]:
    """Return where a stage's FLOPs come from, and by rank how many in how much time."""
    tokens = work["tokens"]
    if stage in known.per_token and tokens:
        return _STATED, _times(tokens, known.per_token[stage]) | work[_SILENT]
    if work["flops"]:
        return _MEASURED, work["flops"]
    size, kind = known.parameters, kind_of(stage)
    if isinstance(size, Mapping):
        size = size.get(stage)
    if size is None or kind is None:
        return "", {}
    label, each = ("6N" if kind == "training" else "2N"), token_flops(size, kind)
    if known.shape is not None:
        shape = known.shape
        each += attention_flops(shape.layers, shape.hidden, shape.length, kind)
        label += " + attention"
    return f"{label} estimate", (_times(tokens, each) | work[_SILENT]) if tokens else {}


def _times(work: Work, factor: float) -> Work:
    return {rank: (amount * factor, ns) for rank, (amount, ns) in work.items()}


def _judged(
    spans: Spans, rows: list[tuple[Cell, ...]], known: _Known
) -> tuple[list[tuple[Cell, ...]], list[str]]:
    """Take out each MFU above 100 %, and say why there is none."""
    at, doubts = _NAMES.index("MFU"), []
    above = [row for row in rows if _exceeds(row[at])]
    if above:
        names = ", ".join(dict.fromkeys(str(row[0]) for row in above))
        doubts.append(f"MFU of {names} is above 100 %: FLOPs, tokens or peak are wrong.")
    told = any(row[_NAMES.index("FLOPs source")] for row in rows)
    unknown = {head.hardware for rank, head in spans.headers.items() if not known.peaks.get(rank)}
    if not told:
        doubts.append("No MFU: it takes FLOPs, by count(flops=…) or parameters.")
    elif unknown:
        doubts.append(f"No MFU on {', '.join(sorted(unknown))}: no peak known, state peak_tflops.")
    if shared := _shared(rows):
        text = "not every rank that ran it counts tokens, so they are those of all"
        doubts.append(f"FLOPs of {', '.join(shared)} are told of the job alone: {text}.")
    kept = [(*row[:at], None, *row[at + 1 :]) if _exceeds(row[at]) else row for row in rows]
    return kept, doubts


def _shared(rows: list[tuple[Cell, ...]]) -> list[str]:
    """Return stages whose FLOPs by tokens are those of the job, and of no rank."""
    source = _NAMES.index("FLOPs source")
    jobs = {row[0] for row in rows if row[1] is None and row[source] not in (None, _MEASURED)}
    told = {row[0] for row in rows if row[1] is not None and row[source] is not None}
    return sorted(map(str, jobs - told))


def _exceeds(share: Cell) -> bool:
    return isinstance(share, float) and share > 1
