"""Seeded runs under the law of real rollout engines, which no verdict of ours was made for.

Decoding is continuous batching: a batch is done when its longest response is, so the longest counts
as much as the sum. Attention makes an update grow with the squares of lengths, and all ranks wait
for one another inside it. `paced` has the first law, in which time is proportional to tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_rlprof.records.records import FORMAT, KINDS, Header
from lightning_rlprof.tables.spans import NO_PARENT, Counter, Spans, Thread
from tests.builders.paced import Regime, wandering
from tests.builders.runs import Row, loaded

STAGES = (
    "actor_generate",
    "compute_reward",
    "actor_compute_log_prob",
    "actor_update",
    "weight_sync",
    "validation",
    "save_checkpoint",
)
GENERATE, REWARD, LOG_PROB, UPDATE, SYNC, VALIDATION, CHECKPOINT = range(len(STAGES))
MEETS = (UPDATE, SYNC)
"""Stages in which ranks wait for the last one."""

_RESPONSES, _MEAN, _SIGMA, _CAP = 16, 900.0, 0.7, 4_096
_BUDGET = 8_192  # tokens of a micro batch
_MICRO = 4  # responses of a padded micro batch

Shape = Literal["level", "growing", "shrinking", "cosine", "curriculum"]
Batches = Literal["whole", "packed", "padded"]


@dataclass(frozen=True)
class Engine:
    """A run as it is to be; milliseconds of the law are in `_own_ms`.

    Attributes:
        lengths: By rank, the mean length of its responses, times the usual.
        shape: How lengths change over the run: 400 to 1,600 tokens on average, or back.
        batches: How an update is cut: as one, filled to 8,192 tokens, or 4 padded responses.
        judge: Whether the reward is a remote judge: the slowest of 16 latencies with heavy tails.
        alternating: Whether every second step has half of the responses.
        dynamic: Whether a share of the responses is generated and then thrown away.
        evaluation: Every so many steps there is one of 2 s; 0 for none.
        checkpoint: The same of 5 s.
        compiling: Whether the first 6 steps are up to five times slower.
        slower: By stage, the factor of its own time; ``*`` is all stages.
        since: First step (0-based) in which `slower` holds.
        slow_ranks: By rank, the factor of all its work.
        per_host: Ranks of a host; 0 for one host.
        extra_ms: By rank, step (0-based) and stage, milliseconds on top; None is all.
        counted: Which amounts are recorded: all that follow from lengths, tokens alone, or none.
    """

    ranks: int = 4
    steps: int = 60
    regime: Regime = field(default_factory=lambda: Regime(0.02))
    lengths: Mapping[int, float] = field(default_factory=dict)
    shape: Shape = "level"
    batches: Batches = "whole"
    judge: bool = False
    alternating: bool = False
    dynamic: bool = False
    evaluation: int = 0
    checkpoint: int = 0
    compiling: bool = False
    slower: Mapping[str, float] = field(default_factory=dict)
    since: int = 0
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    per_host: int = 0
    extra_ms: Mapping[tuple[int | None, int | None, str], float] = field(default_factory=dict)
    counted: Literal["lengths", "tokens", "nothing"] = "lengths"


def run(job: Engine, seed: int) -> Spans:
    """Let a run happen."""
    random = np.random.default_rng(seed)
    lengths = _lengths(job, random)
    took = wandering(job.regime, _own_ms(job, lengths, random) * 1e6, random)
    took[:, :, CHECKPOINT:] = np.where(took[:, :, CHECKPOINT:] > 1e3, took[:, :, CHECKPOINT:], 0.0)
    for stage, factor in job.slower.items():
        some = slice(None) if stage == "*" else STAGES.index(stage)
        took[:, job.since :, some] *= factor
    for rank, factor in job.slow_ranks.items():
        took[rank] *= factor
    for (rank, step, stage), ms in job.extra_ms.items():
        some = [slice(None) if at is None else at for at in (rank, step)]
        took[(*some, STAGES.index(stage))] += ms * 1e6
    return _spans(job, took, lengths)


def _lengths(job: Engine, random: Any) -> Any:
    """Return lengths of responses in tokens, NaN for those that there are not."""
    at = np.linspace(0, 1, job.steps)
    usual = {
        "level": np.ones_like(at),
        "growing": (400 + 1_200 * at) / _MEAN,
        "shrinking": (1_600 - 1_200 * at) / _MEAN,
        "cosine": 1 + 0.4 * np.cos(2 * np.pi * 2 * at),
        "curriculum": np.where(at < 1 / 3, 0.5, np.where(at < 2 / 3, 1.0, 1.6)),
    }[job.shape]
    by_rank = np.array([job.lengths.get(rank, 1.0) for rank in range(job.ranks)])
    mean = _MEAN * job.regime.length * usual[None, :, None] * by_rank[:, None, None]
    drawn = random.lognormal(-(_SIGMA**2) / 2, _SIGMA, (job.ranks, job.steps, _RESPONSES))
    found = np.clip(np.rint(mean * drawn), 1, _CAP)
    if job.alternating:
        found[:, 1::2, _RESPONSES // 2 :] = np.nan
    return found


def _own_ms(job: Engine, lengths: Any, random: Any) -> Any:
    """Return the milliseconds of each stage by the law: (ranks, steps, stages)."""
    total, longest = np.nansum(lengths, axis=2), np.nanmax(lengths, axis=2)
    squares = np.nansum(lengths**2, axis=2)
    found = np.zeros((*total.shape, len(STAGES)))
    found[..., GENERATE] = 15 + 0.30 * longest + 0.010 * total
    if job.dynamic:  # what is thrown away is decoded beside the others
        found[..., GENERATE] *= 1 + 0.4 * random.random(job.steps)[None]
    found[..., REWARD] = 52
    if job.judge:
        latency = 60 * random.lognormal(0, 0.8, lengths.shape)
        found[..., REWARD] = latency.max(axis=2)
    found[..., LOG_PROB] = 5 + 5.5e-3 * total
    tokens, pairs = total, squares
    if job.batches == "packed":
        tokens = np.ceil(total / _BUDGET) * _BUDGET
    elif job.batches == "padded":
        longest = np.nanmax(lengths.reshape(*total.shape, -1, _MICRO), axis=3)
        tokens, pairs = _MICRO * longest.sum(axis=2), _MICRO * (longest**2).sum(axis=2)
    found[..., UPDATE] = 14e-3 * tokens + 1e-6 * pairs
    found[..., SYNC] = 30
    at = np.arange(1, job.steps + 1)
    if job.evaluation:
        found[:, at % job.evaluation == 0, VALIDATION] = 2_000
    if job.checkpoint:
        found[:, at % job.checkpoint == 0, CHECKPOINT] = 5_000
    if job.compiling:
        found[:, :6] *= np.linspace(5, 1.2, 6)[None, :, None]
    return found


def _spans(job: Engine, took: Any, lengths: Any) -> Spans:
    ranks, steps, stages = took.shape
    start, end = np.zeros((2, ranks, steps, stages + 1), dtype=np.int64)
    now = np.zeros(ranks)
    for step in range(steps):
        start[:, step, 0] = now
        for stage in range(stages):
            start[:, step, stage + 1] = now
            now = now + took[:, step, stage]
            if stage in MEETS:
                now = np.full(ranks, now.max() + 2e5)
            end[:, step, stage + 1] = now
        now = now + 3e5
        end[:, step, 0] = now
    ran = np.ones(start.shape, dtype=bool)
    ran[:, :, 1:] = took > 0
    rank, step, name = np.nonzero(ran)
    kind = np.where(name == 0, KINDS.index("step"), KINDS.index("stage"))
    total, squares = np.nansum(lengths, axis=2), np.nansum(lengths**2, axis=2)
    sums = {"tokens": total, "tokens_sq": squares, "tokens_max": np.nanmax(lengths, axis=2)}
    kept = {"lengths": 3, "tokens": 1, "nothing": 0}[job.counted]
    rows = np.flatnonzero(np.isin(name, (GENERATE + 1, LOG_PROB + 1, UPDATE + 1)))
    counters = {
        key: Counter(rows, each[rank[rows], step[rows]].astype(np.float64))
        for key, each in list(sums.items())[:kept]
    }
    hosts = [f"host{at // job.per_host if job.per_host else 0}" for at in range(ranks)]
    headers = {
        at: Header(FORMAT, "run", at, ranks, "actor", hosts[at], 1, "cpu", 0, 0)
        for at in range(ranks)
    }
    return Spans(
        Path("engine"),
        ("step", *STAGES),
        tuple(Thread(at, 1, "Main") for at in range(ranks)),
        name=name,
        kind=kind,
        rank=rank,
        step=step + 1,
        start_ns=start[ran],
        end_ns=end[ran],
        thread=rank.copy(),
        id=np.arange(1, len(name) + 1),
        parent=np.full(len(name), NO_PARENT),
        counters=counters,
        headers=headers,
        statuses=dict.fromkeys(range(ranks), "finished"),
    )


@dataclass(frozen=True)
class OneStepOff:
    """A job whose ranks generate the next batch while others train on this one.

    Both wait for each other at the end of a step, in which the weights go over.

    Attributes:
        rollouts: Ranks that generate, 16 responses each.
        trainers: Ranks that train, on equal shares of the batch.
        slower: Factors of ``actor_generate`` and ``actor_update``; a change is applied here.
        spread: Noise of each stage of each rank.
    """

    rollouts: int = 4
    trainers: int = 2
    steps: int = 60
    slower: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.02


def one_step_off(job: OneStepOff, seed: int) -> tuple[Spans, float]:
    """Let it happen, event by event, and return what is recorded and the mean step in ns."""
    random = np.random.default_rng(seed)
    lengths = _lengths(Engine(ranks=job.rollouts, steps=job.steps), random)
    noise = np.exp(random.normal(0, job.spread, (job.rollouts + job.trainers, job.steps)))
    own = _own_ms(Engine(ranks=job.rollouts, steps=job.steps), lengths, random)
    generate = own[..., GENERATE] * job.slower.get("actor_generate", 1.0)
    shares = np.array_split(np.moveaxis(lengths, 1, 0).reshape(job.steps, -1), job.trainers, axis=1)
    update = np.stack([14e-3 * each.sum(1) + 1e-6 * (each**2).sum(1) for each in shares])
    update = update * job.slower.get("actor_update", 1.0)
    took = np.concatenate([generate, update]) * noise * 1e6
    rows: list[list[Row]] = [[] for _ in took]
    now, begun = 0, []
    for at in range(job.steps):
        arrived = [now + round(each) for each in took[:, at].tolist()]
        end = max(arrived) + round(30e6)
        for rank, done in enumerate(arrived):
            name = "actor_generate" if rank < job.rollouts else "actor_update"
            rows[rank] += [
                Row(name, "stage", at + 1, now, done),
                Row("weight_sync", "stage", at + 1, done, end),
                Row("step", "step", at + 1, now, end + 100_000),
            ]
        begun.append(now)
        now = end + 100_000
    return loaded(*rows), (now - begun[1]) / (job.steps - 1)
