"""Tokens and samples per second of each stage, and MFU: the share of the devices' peak."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_rlprof.analysis.efficiency.peak_flops import (
    recorded_device,
    token_flops,
    unconfirmed_note,
)
from lightning_rlprof.analysis.models.architecture import Model
from lightning_rlprof.analysis.models.flops import (
    decode_cache_bytes,
    decode_weight_bytes,
    forward,
)
from lightning_rlprof.analysis.models.huggingface import Source, read_model
from lightning_rlprof.analysis.statistics.group_summary import rows_by_group
from lightning_rlprof.analysis.steps.partition import containing_step
from lightning_rlprof.analysis.steps.step_selection import counted
from lightning_rlprof.analysis.steps.time_categories import kind_of
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.tables.arrays import Float64s, Int64s, Mask
from lightning_rlprof.tables.intervals import unions
from lightning_rlprof.tables.spans import Counter, Spans
from lightning_rlprof.tables.table import Cell, Column, Table, columns_of

ABOVE_PEAK = "MFU above 100%"
"""Starts the note on stages whose MFU is impossible."""

_COLUMNS = (
    Column("stage", "text"),
    Column("rank", "count"),
    *columns_of("number", "tokens/s in stage", "samples/s in stage"),
    Column("MFU", "share"),
    *columns_of("number", "TFLOP/s", "peak TFLOP/s", unit="TFLOP/s"),
    Column("% of bandwidth", "share"),
    Column("FLOPs source", "text"),
    *columns_of("count", "tokens", "samples"),
    Column("time", "duration", "ns"),
    Column("ranks", "count"),
)
_MFU, _BANDWIDTH, _SOURCE = 4, 7, 8
_NOTE = (
    "time: when a span of the stage with the counter was open on its rank. Rows without a rank are "
    "the whole job: the sum of all ranks over the mean of their times."
)
_NO_COUNTS = (
    "No stage of this run has token, sample or FLOP counts. Call count(tokens=...) inside a stage."
)
_NO_MFU = "No MFU: pass --params N or --model config.json, or record count(flops=...)."
_FROM_MODEL = (
    "model: FLOPs of sequences of the mean length, or without attention if no samples were counted."
)
_DECODES = (
    "% of bandwidth: what generating reads at least, in bf16: the weights once per token of a mean "
    "response, and the KV cache of responses without their prompts."
)
_COUNTERS = ("tokens", "samples", "flops")
# This key is for ranks that counted no tokens in a stage, while other ranks did.
_UNCOUNTED = "uncounted"
_COUNTER, _MODEL = "counter", "model"
_CALLS = "calls"  # This key is for the number of spans that counted samples.

_NOTHING = Counter(np.empty(0, np.int64), np.empty(0))

Work = dict[int, tuple[float, int]]
"""By rank: how much a stage counted, and the nanoseconds in which it did."""


_GENERATES = re.compile(r"(actor_)?generate(_\w+)?|rollouts?|generation|gen")


class _Given(NamedTuple):
    """What the caller passed to `throughput`, and the peak of each rank's device."""

    parameters: float | None
    peaks: Mapping[int, float | None]
    looked_up: bool
    model: Model | None
    gb_s: Mapping[int, float | None]


def throughput(
    spans: Spans,
    *,
    parameters: float | None = None,
    peak_tflops: float | None = None,
    model: Source | None = None,
) -> Table:
    """Return tokens and samples per second of each stage, per rank and of the job, and its MFU.

    From the counters ``tokens``, ``samples`` and ``flops`` of spans, in steps without a capture.
    FLOPs are those of the counter, else of the model, else a formula ("6N estimate" in training,
    "2N estimate" forward). MFU above 100% is omitted.

    With a model, stages that generate show how much of the memory bandwidth decoding uses at least.

    Args:
        spans: The run.
        parameters: Of the model, see `token_flops`.
        peak_tflops: Of each device; None looks up the device in the rank's header.
        model: Path or content of a ``config.json``; None takes that of the configuration.

    Raises:
        RlprofError: The model cannot be read, or a number is not above 0 and below 1e18.
    """
    for option, number in (("parameters", parameters), ("peak_tflops", peak_tflops)):
        if number is not None and not 0 < number < 1e18:
            raise RlprofError(f"{option} {number}: must be above 0 and below 1e18")
    if parameters is None and peak_tflops is None and model is None:
        return spans.once("throughput", _analyze, spans.tables)
    return _analyze(spans, parameters, peak_tflops, model)


def _analyze(
    spans: Spans,
    parameters: float | None = None,
    peak_tflops: float | None = None,
    model: Source | None = None,
) -> Table:
    devices = {rank: recorded_device(header) for rank, header in spans.headers.items()}
    peaks = {rank: peak_tflops or (own.tflops if own else None) for rank, own in devices.items()}
    found_model, why_none = _model(spans, model)
    gb_s = {rank: own.gb_s if own else None for rank, own in devices.items()}
    of_model = found_model if model is not None or parameters is None else None
    given = _Given(parameters, peaks, peak_tflops is None, of_model, gb_s)
    steps, stages = spans.rows(kind="step"), spans.rows(kind="stage")
    choice = counted(spans, steps)
    amounts = {name: spans.amounts(name) for name in _COUNTERS}
    counting = np.zeros(len(spans.names), bool)
    for rows, _ in amounts.values():
        counting[spans.name[rows]] = True
    stages = stages[counting[spans.name[stages]]]
    if len(steps):
        step = containing_step(spans, steps, stages, spans.rank)
        # A rollout role, for example, has no steps.
        no_steps = ~np.isin(spans.rank[stages], spans.rank[steps])
        stages = stages[no_steps | ((step >= 0) & choice.mask[step])]
    included = np.zeros(len(spans), bool)
    included[stages] = True
    counters = {name: _by_stage(spans, included, own) for name, own in amounts.items()}
    of_stages = []
    for code, own in _by_stage(spans, included, Counter(stages, np.zeros(len(stages)))).items():
        counts = {name: found.get(code, _NOTHING) for name, found in counters.items()}
        work = _work_of_stage(spans, own.rows, counts)
        if any(work.values()):
            longest = max(_sum(work[name], work[name]).ns for name in _COUNTERS)
            of_stages.append((longest, _stage_rows(spans.names[code], work, given)))
    if not of_stages:
        return Table("throughput", _COLUMNS, abstained=_NO_COUNTS)
    of_stages.sort(key=lambda each: -each[0])
    found = [row for _, rows in of_stages for row in rows]
    notes = filter(None, [choice.note, why_none, *_mfu_notes(spans, found, given), _NOTE])
    kept = [(*row[:_MFU], None, *row[_MFU + 1 :]) if _above_peak(row) else row for row in found]
    return Table("throughput", _COLUMNS, kept, " ".join(notes))


def efficiency(spans: Spans) -> Table | None:
    """Return the stages of the whole job in `throughput`, None if no rate has a peak to compare.

    That is MFU, and for decoding the share of memory bandwidth, from what the run recorded.
    """
    table = throughput(spans)
    several = {row[0] for row in table.rows if row[1] is None}
    rows = [row for row in table.rows if row[1] is None or row[0] not in several]
    if not any(row[_MFU] is not None or row[_BANDWIDTH] is not None for row in rows):
        return None
    return replace(table, rows=rows)


def _model(spans: Spans, given: Source | None) -> tuple[Model | None, str]:
    """Return the model that is given or recorded, and why there is none."""
    if given is not None:
        return model_from(given), ""
    recorded = recorded_model([header.config for header in spans.headers.values()])
    try:
        return (None if recorded is None else model_from(recorded)), ""
    except RlprofError as error:
        return None, f"No FLOPs from the model: {error}."


def _by_stage(spans: Spans, included: Mask, counter: Counter) -> dict[int, Counter]:
    """Return the part of a counter that each stage has, by code of its name, ascending.

    Args:
        spans: The run.
        included: Which of its rows count.
        counter: What they counted.
    """
    own = included[counter.rows]
    rows, values = counter.rows[own], counter.values[own]
    parts = rows_by_group(spans.name[rows])
    return {int(spans.name[rows[at[0]]]): Counter(rows[at], values[at]) for at in parts}


def _work_of_stage(spans: Spans, stage: Int64s, counters: Mapping[str, Counter]) -> dict[str, Work]:
    """Return each counter of a stage, and the ranks that ran it without counting tokens."""
    work = {name: _by_rank(spans, *counter) for name, counter in counters.items()}
    samples = counters["samples"].rows
    work[_CALLS] = _by_rank(spans, samples, np.ones(len(samples)))
    others = stage[~np.isin(spans.rank[stage], list(work["tokens"]))]
    work[_UNCOUNTED] = _by_rank(spans, others, np.zeros(len(others))) if work["tokens"] else {}
    return work


def _by_rank(spans: Spans, rows: Int64s, amounts: Float64s) -> Work:
    """Return what spans of a stage counted on each rank, and how long at least one was open."""
    ranks, place = np.unique(spans.rank[rows], return_inverse=True)
    total = np.bincount(place, amounts).tolist()
    owner, first, last = unions(place, spans.start_ns[rows], spans.end_ns[rows])
    ns = np.zeros(len(ranks), np.int64)
    np.add.at(ns, owner, last - first)
    return dict(zip(ranks.tolist(), zip(total, ns.tolist(), strict=True), strict=True))


class _Sum(NamedTuple):
    """A counter over some ranks: its sum, the sum of their times, and how many ranks."""

    amount: float
    ns: int
    ranks: int

    @property
    def per_second(self) -> float | None:
        """The sum of all ranks over the mean of their times, per second."""
        return self.amount * self.ranks / self.ns * 1e9 if self.ns else None

    @property
    def total(self) -> int | None:
        """The amount as a whole number, None if no rank counted any."""
        return round(self.amount) if self.ranks else None


def _sum(work: Work, ranks: Iterable[int]) -> _Sum:
    own = [work[rank] for rank in ranks if rank in work]
    return _Sum(sum(amount for amount, _ in own), sum(ns for _, ns in own), len(own))


def _stage_rows(stage: str, work: Mapping[str, Work], given: _Given) -> list[tuple[Cell, ...]]:
    """Return the row of the job, if several ranks ran the stage, and one per rank."""
    source, flops = _flops(stage, work, given)
    ranks = sorted({rank for name in _COUNTERS for rank in work[name]})
    shared = source != _COUNTER and bool(flops.keys() - work["tokens"].keys())
    groups = [(None, ranks)] if len(ranks) > 1 or shared else []
    rows: list[tuple[Cell, ...]] = []
    for rank, group in [*groups, *((rank, [rank]) for rank in ranks)]:
        tokens, samples = (_sum(work[name], group) for name in ("tokens", "samples"))
        # Shared FLOPs belong to several ranks, so no single rank has them.
        doing = list(flops) if rank is None else [rank] * (not shared)
        done, peak = _sum(flops, doing), _peak(flops, doing, given.peaks)
        # One FLOP per ns is one GFLOP/s, and the peak is in TFLOP/s.
        achieved = done.amount / done.ns / 1_000 if done.ns else None
        share = achieved / peak if achieved is not None and peak else None
        read = _bandwidth(stage, work, doing, given)
        rates = (tokens.per_second, samples.per_second, share, achieved, peak, read)
        time = max(each.ns // max(each.ranks, 1) for each in (tokens, samples, done))
        counts = (tokens.total, samples.total, time, len(group))
        rows.append((stage, rank, *rates, source if done.ranks else None, *counts))
    return rows


def _peak(flops: Work, ranks: list[int], peaks: Mapping[int, float | None]) -> float | None:
    """Return the mean peak of the devices of some ranks, weighted by time; None if unknown."""
    own = [(peaks.get(rank), flops[rank][1]) for rank in ranks if rank in flops]
    ns = sum(time for _, time in own)
    if not ns or any(peak is None for peak, _ in own):
        return None
    return sum((peak or 0) * time for peak, time in own) / ns


def _bandwidth(
    stage: str, work: Mapping[str, Work], ranks: list[int], given: _Given
) -> float | None:
    """Return the share of the memory's bandwidth that decoding uses at least."""
    tokens, samples, calls = (_sum(work[name], ranks) for name in ("tokens", "samples", _CALLS))
    speeds = [given.gb_s.get(rank) for rank in ranks]
    if given.model is None or not generates(stage) or not samples.amount or not tokens.amount:
        return None
    ns = tokens.ns + _sum(work[_UNCOUNTED], ranks).ns
    if not ns or not speeds or not all(speeds):
        return None
    read = decode_bytes(given.model, tokens.amount, samples.amount, calls.amount)
    share = read / ns / (sum(filter(None, speeds)) / len(speeds))
    return share if share <= 1 else None


def _flops(stage: str, work: Mapping[str, Work], given: _Given) -> tuple[str, Work]:
    """Return the source of a stage's FLOPs, and by rank how many in how much time."""
    if work["flops"]:
        return _COUNTER, work["flops"]
    done: Work = {}
    for rank in work["tokens"]:
        counts = {(stage, name): own[rank] for name, own in work.items() if rank in own}
        if known := counted_flops(stage, counts, given.model, given.parameters):
            done[rank] = known
    if not done:
        return "", {}
    estimate = "6N estimate" if kind_of(stage) == "training" else "2N estimate"
    return (estimate if given.model is None else _MODEL), done | work[_UNCOUNTED]


def _mfu_notes(spans: Spans, rows: list[tuple[Cell, ...]], given: _Given) -> list[str]:
    """Return the reasons for missing MFU."""
    notes = []
    if above := dict.fromkeys(str(row[0]) for row in rows if _above_peak(row)):
        notes.append(f"{ABOVE_PEAK} in {', '.join(above)}: FLOPs, tokens or peak are wrong.")
    unknown = {head.hardware for rank, head in spans.headers.items() if not given.peaks.get(rank)}
    if not any(row[_SOURCE] for row in rows):
        notes.append(_NO_MFU)
    elif unknown:
        names = ", ".join(sorted(unknown))
        notes.append(f"No MFU on {names}: the peak is unknown. Pass --peak-tflops N.")
    if any(row[_SOURCE] == _MODEL for row in rows):
        notes.append(_FROM_MODEL)
    if any(row[_BANDWIDTH] is not None for row in rows):
        notes.append(_DECODES)
    if given.looked_up and any(row[_MFU] is not None for row in rows):
        notes.append(unconfirmed_note(spans.headers.values(), "tflops"))
    jobs = {row[0] for row in rows if row[1] is None and row[_SOURCE] not in (None, _COUNTER)}
    by_rank = {row[0] for row in rows if row[1] is not None and row[_SOURCE] is not None}
    if shared := sorted(map(str, jobs - by_rank)):
        text = "not every rank that ran it counts tokens"
        notes.append(f"FLOPs of {', '.join(shared)} are known for the whole job only: {text}.")
    return notes


def _above_peak(row: tuple[Cell, ...]) -> bool:
    share = row[_MFU]
    return isinstance(share, float) and share > 1


def flops_of(
    model: Source | Model, lengths: Sequence[int], kind: Literal["training", "forward"] = "training"
) -> int:
    """Return the FLOPs of a batch of sequences, to be counted: ``count(flops=flops_of(…))``.

    Matmuls and causal attention, without padding and recomputation, of the whole model: with
    tensor or pipeline parallelism, count them on one rank of a replica. A file is read once.

    Args:
        model: Path of a ``config.json``, its content, or a configuration object of transformers.
        lengths: Tokens of each sequence.
        kind: Forward and backward, or forward alone.

    Raises:
        RlprofError: The configuration cannot be read, or its model type is unknown.

    Example::

        >>> sizes = {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 96}
        >>> layers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        >>> flops_of({"model_type": "llama", **sizes, **layers}, [24, 24], "forward")
        10782720
    """
    found = forward(model if isinstance(model, Model) else model_from(model), lengths)
    return found.training if kind == "training" else found.forward


def model_from(source: Source) -> Model:
    """Return the model of a configuration; a file is read once."""
    return _read(source) if isinstance(source, str) else read_model(source)


@lru_cache(maxsize=8)
def _read(path: str) -> Model:
    return read_model(path)


def recorded_model(configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return what a run recorded of its model: the content of the file that ``model`` names."""
    found = (each.get("model") for each in configs)
    return next((each for each in found if isinstance(each, Mapping)), None)


def stage_flops(model: Model, stage: str, tokens: float, samples: float) -> float | None:
    """Return the FLOPs of a stage's tokens; None if its name does not show what it computes.

    Attention is that of sequences of the mean length; longer and shorter ones together need more.
    Without samples it is left out. Critics have a value head. Generated tokens count as a forward
    pass over responses, so their prompts are left out.
    """
    kind = kind_of(stage)
    if kind is None:
        return None
    own = model.critic() if stage.lower().startswith("critic") else model
    length = max(round(tokens / samples), 1) if samples else 1
    found = forward(own, [length])
    each = found.forward - (0 if samples else found.attention)
    return tokens / length * each * (3 if kind == "training" else 1)


def counted_flops(
    stage: str,
    counts: Mapping[tuple[str, str], tuple[float, int]],
    model: Model | None,
    parameters: float | None = None,
) -> tuple[float, int] | None:
    """Return the FLOPs of a stage and in how many ns they were done; None if they are unknown.

    Args:
        stage: Its name.
        counts: By stage and counter, its sum, and the ns of the spans that counted.
        model: Gives the FLOPs of ``tokens`` if no ``flops`` were counted.
        parameters: How many a token passes, if the model is unknown.
    """
    if found := counts.get((stage, "flops")):
        return found
    kind, tokens = kind_of(stage), counts.get((stage, "tokens"))
    if kind is None or tokens is None:
        return None
    samples, _ = counts.get((stage, "samples"), (0, 0))
    known = stage_flops(model, stage, tokens[0], samples) if model else None
    if known is None and parameters is not None:
        known = token_flops(parameters, kind) * tokens[0]
    return None if known is None else (known, tokens[1])


def generates(stage: str) -> bool:
    """Return whether a stage generates responses, by its name."""
    return _GENERATES.fullmatch(stage.lower()) is not None


def decode_bytes(model: Model, tokens: float, samples: float, calls: float) -> float:
    """Return the bytes that generating responses reads at least, in bf16.

    Each call decodes all its samples in one batch, and reads the weights once per token of a mean
    response and the KV cache of the response so far. Longer responses, prompts and smaller batches
    add to it.
    """
    batch, length = samples / calls, max(round(tokens / samples), 1)
    cache = decode_cache_bytes(model, [0], [length + 1]) * batch
    return calls * (length * decode_weight_bytes(model, batch) + cache)
