"""Seeded runs of a synchronous job whose pace wanders, for the operating curves of verdicts.

Written apart from `scripted`, so that no method is measured on the generator it was tuned on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.records.records import FORMAT, KINDS, Header
from lightning_rlprof.tables.spans import NO_PARENT, Counter, Spans, Thread

# Milliseconds at usual work: whatever the work, by tokens, by squares of lengths, by the longest.
USUAL = {
    "actor_generate": (150.0, 700.0, 50.0, 0.0),
    "compute_reward": (60.0, 0.0, 0.0, 0.0),
    "actor_compute_log_prob": (30.0, 100.0, 20.0, 0.0),
    "actor_update": (80.0, 300.0, 60.0, 0.0),
}
STAGES = tuple(USUAL)
_SAMPLES, _LENGTH, _SPREAD = 16, 400.0, 0.6


@dataclass(frozen=True)
class Regime:
    """How the pace of a run behaves; shares are spreads of logarithms.

    Attributes:
        white: Noise of each stage of each rank in each step.
        tails: Degrees of freedom of that noise; None for normal.
        common: Spread, and what is left in the next step, of the pace of the whole machine.
        own: The same of each rank.
        lasting: Spread of the ranks' constant pace.
        pauses: In what share of steps one rank pauses in one stage, and for how many ms.
        warming: By how much the machine slows down over the run.
        day: Height and length in steps of a slow cycle.
        length: Mean length of responses, times the usual.
    """

    white: float = 0.01
    tails: float | None = None
    common: tuple[float, float] = (0.0, 0.0)
    own: tuple[float, float] = (0.0, 0.0)
    lasting: float = 0.0
    pauses: tuple[float, float] = (0.0, 0.0)
    warming: float = 0.0
    day: tuple[float, float] = (0.0, 1.0)
    length: float = 1.0


REGIMES: Mapping[str, Regime] = {
    "iid 2%": Regime(0.02),
    "iid 5%": Regime(0.05),
    "t2 4%": Regime(0.04, tails=2.0),
    "GC 10% x 200 ms": Regime(0.01, pauses=(0.1, 200.0)),
    "lengths x1.3": Regime(0.02),
    "lasting spread 1.5%": Regime(0.01, lasting=0.015),
    "per-rank AR(.9) 3%": Regime(own=(0.03, 0.9)),
    "common AR(.9) 3%": Regime(common=(0.03, 0.9)),
    "common AR(.95) 5%": Regime(common=(0.05, 0.95)),
    "thermal 8%": Regime(warming=0.08),
    "day/night 10%, 200 steps": Regime(day=(0.10, 200.0)),
}


@dataclass(frozen=True)
class Job:
    """A run as it is to be.

    Attributes:
        slower: By stage, the factor of its time; ``*`` is all stages.
        slow_ranks: By rank, the factor of all its work.
        extra_ms: By rank and stage, milliseconds on top.
        since: First step (0-based) in which `slower` holds.
        counted: Whether stages count their work.
        meets: Stages in which ranks wait for the last one at the end.
    """

    ranks: int = 4
    steps: int = 60
    regime: Regime = field(default_factory=Regime)
    slower: Mapping[str, float] = field(default_factory=dict)
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    extra_ms: Mapping[tuple[int, str], float] = field(default_factory=dict)
    since: int = 0
    counted: bool = True
    meets: tuple[str, ...] = ("actor_update",)


def autoregression(random: Any, shape: tuple[int, int], spread: float, left: float) -> Any:
    """Return stationary AR(1) series; shape (series, steps)."""
    steps = random.normal(0, spread * np.sqrt(1 - left**2), shape)
    found = np.zeros(shape)
    found[:, 0] = random.normal(0, spread, shape[0])
    for at in range(1, shape[1]):
        found[:, at] = left * found[:, at - 1] + steps[:, at]
    return found


def wandering(regime: Regime, took: Any, random: Any) -> Any:
    """Return times as the pace of a regime makes them; shape (ranks, steps, stages), in ns."""
    ranks, steps, stages = took.shape
    noise = (
        random.normal(size=took.shape)
        if regime.tails is None
        else random.standard_t(regime.tails, took.shape)
    )
    pace = regime.white * noise
    pace += autoregression(random, (1, steps), *regime.common)[:, :, None]
    pace += autoregression(random, (ranks, steps), *regime.own)[:, :, None]
    pace += random.normal(0, regime.lasting, ranks)[:, None, None]
    at = np.arange(steps)
    pace += (regime.warming * at / max(steps - 1, 1))[None, :, None]
    phase = random.uniform(0, 2 * np.pi)
    pace += (regime.day[0] * np.sin(2 * np.pi * at / regime.day[1] + phase))[None, :, None]
    took = took * np.exp(pace)
    often, pause = regime.pauses
    for step in np.flatnonzero(random.random(steps) < often):
        took[random.integers(ranks), step, random.integers(stages)] += pause * 1e6
    return took


def play(job: Job, seed: int) -> Spans:
    """Let a run happen: ranks meet at the end of some stages."""
    random = np.random.default_rng(seed)
    regime, shape = job.regime, (job.ranks, job.steps)
    lengths = random.lognormal(-(_SPREAD**2) / 2, _SPREAD, (*shape, _SAMPLES)) * regime.length
    work = np.stack([np.ones(shape), lengths.mean(2), (lengths**2).mean(2), lengths.max(2)], axis=2)
    typical = np.array([USUAL[stage] for stage in STAGES]) * 1e6
    took = np.einsum("rsw,tw->rst", work, typical)
    took = wandering(regime, took, random)
    for stage, factor in job.slower.items():
        some = slice(None) if stage == "*" else STAGES.index(stage)
        took[:, job.since :, some] *= factor
    for rank, factor in job.slow_ranks.items():
        took[rank] *= factor
    for (rank, stage), ms in job.extra_ms.items():
        took[rank, :, STAGES.index(stage)] += ms * 1e6
    return _spans(job, took, lengths)


def _spans(job: Job, took: Any, lengths: Any) -> Spans:
    ranks, steps, stages = took.shape
    start, end = np.zeros((2, ranks, steps, stages + 1), dtype=np.int64)
    now = np.zeros(ranks)
    for step in range(steps):
        start[:, step, 0] = now
        for stage, name in enumerate(STAGES, start=1):
            start[:, step, stage] = now
            now = now + took[:, step, stage - 1]
            if name in job.meets:
                now = np.full(ranks, now.max() + 2e5)
            end[:, step, stage] = now
        now = now + 3e5
        end[:, step, 0] = now
    rank, step, name = np.indices(start.shape)
    flat = [each.ravel().astype(np.int64) for each in (name, rank, step + 1)]
    kind = np.where(flat[0] == 0, KINDS.index("step"), KINDS.index("stage"))
    rows = np.flatnonzero(flat[0] > 0)
    sums = {"tokens": lengths.sum(2), "tokens_sq": (lengths**2).sum(2)}
    amounts = {
        key: Counter(rows, np.repeat(np.rint(each * _LENGTH).ravel(), stages))
        for key, each in sums.items()
    }
    head = [
        Header(FORMAT, "run", at, ranks, "actor", "host", 1, "cpu", 0, 0) for at in range(ranks)
    ]
    return Spans(
        Path("paced"),
        ("step", *STAGES),
        tuple(Thread(at, 1, "Main") for at in range(ranks)),
        name=flat[0],
        kind=kind,
        rank=flat[1],
        step=flat[2],
        start_ns=start.ravel(),
        end_ns=end.ravel(),
        thread=flat[1],
        id=np.arange(1, start.size + 1),
        parent=np.full(start.size, NO_PARENT),
        counters=amounts if job.counted else {},
        headers=dict(enumerate(head)),
        statuses=dict.fromkeys(range(ranks), "finished"),
    )
