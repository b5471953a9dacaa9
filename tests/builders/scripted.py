"""Seeded synthetic runs in memory, each with a known culprit or none."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.records.records import KINDS, Header
from lightning_rlprof.tables.spans import NO_PARENT, Counter, Spans, Thread
from lightning_rlprof.tables.table import Table
from tests.builders.parts import Parts, table_of
from tests.builders.runs import header

# Nanoseconds that a stage takes at average work, and how much of it goes with tokens and squares.
TYPICAL = {
    "actor_generate": (1.0e9, 0.8, 0.1),
    "compute_reward": (0.05e9, 0.3, 0.0),
    "actor_compute_log_prob": (0.15e9, 0.6, 0.3),
    "actor_update": (0.4e9, 0.6, 0.3),
}
STAGES = tuple(TYPICAL)
TRANSFER_NS = 5e6
AFTER = 0.1  # of a stage's work is left when its collective is done


@dataclass(frozen=True)
class Script:
    """What happens in a run.

    Attributes:
        slow: How much longer a rank takes for all its work, by rank.
        when: First and last step of that, both included; None for always.
        where: Stages in which it is slow.
        uneven: Spread of the logarithm of each rank's tokens in a step.
        more: How many times the others' work a rank gets, by rank.
        meets: Stages with a collective towards their end.
        offsets_ms: Error of a rank's clock, which then is on a host of its own.
        hosts: Whether every rank is on a host of its own.
        counters: Whether stages count tokens and their squares.
        device: Whose fault slowness is where the device's clock is read: ``device`` or ``host``;
            None where it is not.
        noise: Spread of the logarithm of every time.
        hiccups: How often a stage takes half as long again.
        listed: Whether the run has a table of its collectives.
        parallel: Sizes of tensor, expert and pipeline parallelism, as in the configuration.
        told: Whether the configuration says so.
        layers: How much work each pipeline stage has.
        experts: How much work each expert-parallel rank has.
        drift: Spread of ranks' pace, and how much of it is left in the next step.
    """

    ranks: int = 8
    steps: int = 24
    slow: Mapping[int, float] = field(default_factory=dict)
    when: tuple[int, int] | None = None
    where: tuple[str, ...] = STAGES
    uneven: float = 0.0
    more: Mapping[int, float] = field(default_factory=dict)
    meets: tuple[str, ...] = ("actor_update",)
    offsets_ms: Mapping[int, float] = field(default_factory=dict)
    hosts: bool = False
    counters: bool = True
    device: str | None = None
    noise: float = 0.02
    hiccups: float = 0.01
    listed: bool = False
    parallel: Mapping[str, int] = field(default_factory=dict)
    told: bool = True
    layers: tuple[float, ...] = (1.0,)
    experts: tuple[float, ...] = (1.0,)
    drift: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Scripted:
    """A run and what the peers' formulas look at; arrays by rank and step.

    Attributes:
        came_ns: When each rank came to the collective of the last stage that has one, as its own
            clock tells it.
        waited_ns: How long the collective took there, waiting and transfer.
        sections_ns: Time of each stage; shape (ranks, steps, stages).
    """

    spans: Spans
    came_ns: Any
    waited_ns: Any
    sections_ns: Any


def play(script: Script, seed: int) -> Scripted:
    """Let a run happen."""
    random = np.random.default_rng(seed)
    parts = Parts(script.ranks, script.parallel)
    tokens, squares = (parts.share(each) for each in _tokens(script, random))
    took = _took(script, random, tokens, squares) * _part_of(script, parts) * _pace(script, seed)
    start, end, inside = np.zeros((3, *took.shape))
    met, now = np.zeros((2, *took.shape)), np.zeros(script.ranks)
    for step, at in np.ndindex(took.shape[1:]):
        now = now + random.uniform(1.1e5, 2e5, script.ranks)
        start[:, step, at], own = now, took[:, step, at]
        inside[:, step, at] = came = now + own * (1 - AFTER)
        went = parts.piped(parts.held_up(came), own)
        if STAGES[at] in script.meets:
            came = went
            went = parts.met(came) + TRANSFER_NS + random.uniform(0, 1e5, script.ranks)
            met[:, :, step, at] = came, went - came
            went = went.max() + TRANSFER_NS if parts.several else went
        now = went + own * AFTER
        end[:, step, at] = now
    clock = np.array([script.offsets_ms.get(rank, 0.0) for rank in range(script.ranks)]) * 1e6
    for here in (start, end, met[0], inside):
        here[...] += clock[:, None, None] + 1e9
    spans = _spans(script, start, end, tokens, squares, _device_ns(script, took))
    if script.listed:
        spans = replace(
            spans, tables={"communication": lambda: _listed(script, parts, met, inside)}
        )
    came, waited = met[..., max((STAGES.index(stage) for stage in script.meets), default=0)]
    return Scripted(spans, came, waited, end - start)


def _tokens(script: Script, random: np.random.Generator) -> tuple[Any, Any]:
    """Return tokens by rank and step, and the sum of their squares over 64 samples."""
    shape = (script.ranks, script.steps)
    mean = random.lognormal(0.0, script.uneven, shape) * 512
    mean *= np.array([script.more.get(rank, 1.0) for rank in range(script.ranks)])[:, None]
    spread = 1.0 + random.uniform(0.1, 0.5, shape) * min(script.uneven, 1.0)
    return np.rint(mean * 64), np.rint(mean**2 * 64 * spread)


def _slowness(script: Script) -> Any:
    shape = (script.ranks, script.steps, len(STAGES))
    factor = np.ones(shape)
    first, last = script.when or (1, script.steps)
    for rank, share in script.slow.items():
        for stage in script.where:
            factor[rank, first - 1 : last, STAGES.index(stage)] += share
    return factor


def _took(script: Script, random: np.random.Generator, tokens: Any, squares: Any) -> Any:
    """Return how long each rank works on each stage; some steps are slower for all."""
    per_token, per_square = tokens / (512 * 64), squares / (512**2 * 64)
    parts = [
        typical * ((1 - linear - square) + linear * per_token + square * per_square)
        for typical, linear, square in TYPICAL.values()
    ]
    shape = (script.ranks, script.steps, len(STAGES))
    noise = random.lognormal(0.0, script.noise, shape)
    noise *= random.lognormal(0.0, script.noise / 2, (1, script.steps, 1))
    noise *= random.lognormal(0.0, 0.003, (script.ranks, 1, 1))  # no two machines are the same
    noise *= np.where(random.random(shape) < script.hiccups, 1.5, 1.0)
    return np.stack(parts, axis=2) * noise * _slowness(script)


def _part_of(script: Script, parts: Parts) -> Any:
    """Return how much of the work each rank has, as its part of the model is larger or smaller."""
    layers = np.array(script.layers)[parts.stage % len(script.layers)]
    return (layers * np.array(script.experts)[parts.expert % len(script.experts)])[:, None, None]


def _pace(script: Script, seed: int) -> Any:
    """Return the pace of ranks that drift, by rank and step; apart from all other chance."""
    spread, left = script.drift
    random = np.random.default_rng((seed, 1))
    pace = np.zeros((script.ranks, script.steps, 1))
    now = random.normal(0, spread, script.ranks)
    for step in range(script.steps):
        pace[:, step, 0] = now
        now = left * now + random.normal(0, spread * np.sqrt(1 - left**2), script.ranks)
    return np.exp(pace)


def _device_ns(script: Script, took: Any) -> Any:
    if script.device is None:
        return None
    return 0.9 * (took if script.device == "device" else took / _slowness(script))


def _spans(script: Script, start: Any, end: Any, tokens: Any, squares: Any, device: Any) -> Spans:
    ranks = script.ranks
    edge = np.concatenate([start[:, :1, 0] - 1e5, end[:, :, -1] + 1e5], axis=1)
    starts = np.concatenate([edge[:, :-1, None], start], axis=2).astype(np.int64)
    ends = np.concatenate([edge[:, 1:, None], end], axis=2).astype(np.int64)
    shape = starts.shape
    rank, step, name = np.indices(shape)
    kind = np.where(name == 0, KINDS.index("step"), KINDS.index("stage"))
    ids = step * shape[2] + name
    flat = [each.ravel().astype(np.int64) for each in (name, kind, rank, step + 1)]
    rows = np.flatnonzero(flat[1] == KINDS.index("stage"))
    counters = _counters(script, rows, tokens, squares, device)
    kinds = "cpu" if device is None else "cuda"
    return Spans(
        Path("scripted"),
        ("step", *STAGES),
        tuple(Thread(number, 1, "Main") for number in range(ranks)),
        *flat,
        starts.ravel(),
        ends.ravel(),
        flat[2],
        ids.ravel().astype(np.int64),
        np.full(ids.size, NO_PARENT),
        counters=counters,
        headers=_headers(script, kinds),
        statuses=dict.fromkeys(range(ranks), "finished"),
    )


def _counters(
    script: Script, rows: Any, tokens: Any, squares: Any, device: Any
) -> dict[str, Counter]:
    found = {}
    if script.counters:
        for key, each in (("tokens", tokens), ("tokens_sq", squares)):
            found[key] = Counter(rows, np.repeat(each.ravel().astype(np.int64), len(STAGES)))
    if device is not None:
        found["device_ns"] = Counter(rows, device.ravel().astype(np.int64))
    return found


def _headers(script: Script, device: str) -> dict[int, Header]:
    apart = script.hosts or bool(script.offsets_ms)
    hosts = [f"node-{rank}" if apart else "node-a" for rank in range(script.ranks)]
    config = {"parallel": dict(script.parallel)} if script.told else {}
    return {
        rank: header(rank, script.ranks, host=host, device=device, config=config)
        for rank, host in enumerate(hosts)
    }


def _listed(script: Script, parts: Parts, met: Any, inside: Any) -> Table:
    """Return collectives as the loaders list them."""
    slots = [STAGES.index(stage) for stage in script.meets]
    if not parts.several:
        return table_of(met[:, :, :, slots], {"data_parallel": np.zeros_like(parts.line)})
    return table_of(met[:, :, :, slots], parts.groups(), inside)


def without(spans: Spans, share: float, seed: int) -> Spans:
    """Lose a share of all spans, whichever they are."""
    keep = np.random.default_rng(seed).random(len(spans)) >= share
    place = np.cumsum(keep) - 1
    names = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")
    counters = {}
    for key, (rows, values) in spans.counters.items():
        there = keep[rows]
        counters[key] = Counter(place[rows[there]], values[there])
    return replace(spans, **{n: getattr(spans, n)[keep] for n in names}, counters=counters)
